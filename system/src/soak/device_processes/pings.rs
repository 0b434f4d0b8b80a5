//! Pings of a guest by the host, and how long it did not answer.

use crate::command::wait_for;
use crate::net::Namespace;
use crate::{Context, Outcome, cleanup};
use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Seconds between two pings.
const INTERVAL: &str = "0.01";
/// A guest that has not answered for this long does not answer any more.
const LIMIT: Duration = Duration::from_secs(60);

/// A program that pings a guest, and when the answers came; dropped, it is gone.
#[derive(Debug)]
pub(super) struct Pings {
    child: Child,
    answers: Arc<Mutex<Vec<Instant>>>,
}

impl Pings {
    /// Pings `address` from the namespace, a hundred times in a second.
    pub(super) fn start(namespace: &Namespace, address: &str) -> Outcome<Self> {
        let mut command = namespace.child("busybox");
        command.args(["ping", "-i", INTERVAL, address]).stdin(Stdio::null());
        let mut child = command.stdout(Stdio::piped()).spawn().context("ping")?;
        cleanup::adopt(child.id());
        let answers = Arc::<Mutex<Vec<Instant>>>::default();
        let (output, noted) = (child.stdout.take(), answers.clone());
        let pings = Self { child, answers };
        let output = output.ok_or("ping has no output")?;
        let reader = std::thread::Builder::new().name("pings".into());
        reader.spawn(move || note(output, &noted)).context("a thread")?;
        pings.wait_beyond(Instant::now())?;
        Ok(pings)
    }

    fn answers(&self) -> MutexGuard<'_, Vec<Instant>> {
        self.answers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for an answer that comes after `instant`.
    ///
    /// # Errors
    /// None comes within a minute.
    pub(super) fn wait_beyond(&self, instant: Instant) -> Outcome {
        wait_for("an answer to a ping", LIMIT, || {
            Ok(self.answers().last().is_some_and(|last| *last > instant).then_some(()))
        })
    }

    /// The longest time between two answers of which the second one came after `instant`. Forgets
    /// the answers before it.
    pub(super) fn worst_since(&self, instant: Instant) -> Duration {
        let mut answers = self.answers();
        let before = answers.partition_point(|answer| *answer <= instant);
        answers.drain(..before.saturating_sub(1));
        let gaps = answers.windows(2).map(|pair| pair[1].duration_since(pair[0]));
        gaps.max().unwrap_or_default()
    }
}

/// Notes when each answer came, until the program has ended.
fn note(output: ChildStdout, answers: &Mutex<Vec<Instant>>) {
    for line in BufReader::new(output).lines().map_while(Result::ok) {
        if line.contains("seq=") {
            answers.lock().unwrap_or_else(PoisonError::into_inner).push(Instant::now());
        }
    }
}

impl Drop for Pings {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        cleanup::forget(self.child.id());
    }
}
