//! A time limit for a piece of work on the calling thread: what it waits for is shown, and what it
//! started is ended, so that the work fails instead of waiting for ever.

use crate::cleanup::leave_nothing;
use crate::processes::{below_thread, describe, describe_own_threads, kill};
use crate::{Outcome, check};
use rustix::thread::gettid;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// What the work has to fail once the processes that it started have ended. A thread cannot be
/// ended, so then our own process ends, with a sentence.
const GRACE: Duration = Duration::from_secs(120);

/// What is under way, and since when.
static UNDER_WAY: Mutex<Vec<(String, Instant)>> = Mutex::new(Vec::new());

fn under_way() -> MutexGuard<'static, Vec<(String, Instant)>> {
    UNDER_WAY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What is under way, in lines with the seconds that each has taken.
#[must_use]
pub fn what_is_under_way() -> String {
    let line = |(what, begun): &(String, Instant)| {
        format!("xtask: {what} was under way for {} s\n", begun.elapsed().as_secs())
    };
    under_way().iter().map(line).collect()
}

/// A piece of work that is under way until this value is dropped.
#[derive(Debug)]
pub struct UnderWay(String);

impl UnderWay {
    /// It begins.
    #[must_use]
    pub fn begin(what: &str) -> Self {
        under_way().push((what.to_owned(), Instant::now()));
        Self(what.to_owned())
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        let mut all = under_way();
        if let Some(at) = all.iter().position(|(what, _)| *what == self.0) {
            all.remove(at);
        }
    }
}

/// The watch over a piece of work; dropped, it has ended.
#[derive(Debug)]
pub struct Watch {
    what: UnderWay,
    limit: Duration,
    /// Dropped when the work has ended.
    working: Option<Sender<()>>,
    /// Gives whether the work was beyond its limit.
    watcher: Option<JoinHandle<bool>>,
}

impl Watch {
    /// Begins to watch what the calling thread does.
    #[must_use]
    pub fn start(what: &str, limit: Duration) -> Self {
        Self::with_grace(what, limit, GRACE, end_us)
    }

    fn with_grace(what: &str, limit: Duration, grace: Duration, last: fn(&str)) -> Self {
        let (working, ended) = channel::<()>();
        let (name, thread) = (what.to_owned(), gettid().as_raw_pid().unsigned_abs());
        let has_ended = move |wait| ended.recv_timeout(wait) == Err(RecvTimeoutError::Disconnected);
        let watch = move || {
            let start = Instant::now();
            if has_ended(limit) {
                return false;
            }
            let seconds = limit.as_secs();
            let found = below_thread(thread);
            let said = describe(&found);
            println!(
                "xtask: {name} has not ended within {seconds} s; what it started ends:\n{said}"
            );
            let kills = || kill(|| below_thread(thread));
            kills();
            while start.elapsed() < limit + grace {
                if has_ended(grace / 20) {
                    return true;
                }
                kills();
            }
            last(&name);
            true
        };
        Self {
            what: UnderWay::begin(what),
            limit,
            working: Some(working),
            watcher: Some(std::thread::spawn(watch)),
        }
    }

    /// The work has ended.
    ///
    /// # Errors
    /// It took longer than it may.
    pub fn end(mut self) -> Outcome {
        let late = self.stop();
        let (what, seconds) = (&self.what.0, self.limit.as_secs());
        check(!late, || format!("{what} did not end within {seconds} s and was ended"))
    }

    fn stop(&mut self) -> bool {
        drop(self.working.take());
        self.watcher.take().is_some_and(|watcher| watcher.join().unwrap_or(true))
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Does `work` under a time limit.
///
/// # Errors
/// That of the work; if it took too long, both.
pub fn within<T>(what: &str, limit: Duration, work: impl FnOnce() -> Outcome<T>) -> Outcome<T> {
    let watch = Watch::start(what, limit);
    let done = work();
    match (watch.end(), done) {
        (Ok(()), done) => done,
        (Err(late), Ok(_)) => Err(late),
        (Err(late), Err(reason)) => Err(format!("{late}: {reason}")),
    }
}

/// A thread of ours waits for none of its processes. What all threads have started ends with us.
fn end_us(what: &str) {
    let threads = describe_own_threads();
    println!("xtask: {what} waits without an end; the threads of this program:\n{threads}");
    leave_nothing();
    println!("\nFAILED {what}: waits without an end\n0 passed, 1 failed");
    std::process::exit(1);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cleanup::Folder;
    use crate::command::{child, output};
    use crate::processes::{RUN, with_variable};
    use std::fs::File;
    use std::io::Read;
    use std::process::{Command, Stdio};
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn work_that_waits_for_a_process_fails_at_its_limit() {
        let limit = Duration::from_millis(50);
        let slow = || output(Command::new("sleep").arg("1000"));
        let error = within("a sleep", limit, slow).unwrap_err();
        let late = "a sleep did not end within 0 s and was ended: sleep: signal: 9";
        assert!(error.starts_with(late), "{error}");
    }

    #[test]
    fn work_within_its_limit_is_left_alone() {
        let quick = || output(Command::new("echo").arg("yes"));
        assert_eq!(within("an echo", Duration::from_secs(600), quick), Ok(b"yes\n".to_vec()));
    }

    #[test]
    fn what_is_under_way_is_said_until_it_ends() {
        let work = UnderWay::begin("a piece of work");
        let other = UnderWay::begin("another piece");
        let says = |what: &str| what_is_under_way().contains(what);
        assert!(says("xtask: a piece of work was under way for 0 s\n") && says("another piece"));
        drop(work);
        assert!(!says("a piece of work") && says("another piece"));
        drop(other);
    }

    /// Set for the process that ends itself.
    const ENDS: &str = "MANYRING_TEST_ENDS_US";

    /// Starts a child, which starts another process and one more that loses its parent; then ends
    /// this process.
    fn starts_others_and_ends_us() {
        let mut shell = child("sh");
        shell.args(["-c", "sleep 1000 & (sleep 1000 &); echo; wait"]).stdout(Stdio::piped());
        let mut shell = shell.spawn().unwrap();
        let mut line = [0];
        shell.stdout.take().unwrap().read_exact(&mut line).unwrap();
        let _folder = Folder::new().unwrap();
        end_us("a test");
        // That does not come back.
        shell.wait().unwrap();
    }

    #[test]
    fn the_end_of_us_ends_children_of_children_and_leaves_no_folder() {
        // Started again below, this test is the process that ends.
        if std::env::var_os(ENDS).is_some() {
            return starts_others_and_ends_us();
        }
        let folder = tempfile::tempdir().unwrap();
        let entry = format!("{ENDS}={}", folder.path().display());
        let mut us = Command::new(std::env::current_exe().unwrap());
        us.args(["--exact", "--nocapture"]);
        us.arg("watch::tests::the_end_of_us_ends_children_of_children_and_leaves_no_folder");
        us.env(ENDS, folder.path()).env("TMPDIR", folder.path()).env_remove(RUN);
        // In a file, since what is left behind would keep a pipe open.
        let said = folder.path().join("said");
        us.stdout(File::create(&said).unwrap());
        let status = us.status().unwrap();
        let said = std::fs::read_to_string(said).unwrap();
        assert!(said.contains("FAILED a test: waits without an end"), "{status}: {said}");
        let left = with_variable(&entry);
        kill(|| with_variable(&entry));
        assert!(left.is_empty(), "{left:?} are left behind");
        let files: Vec<_> = folder.path().read_dir().unwrap().flatten().collect();
        assert!(files.len() == 1, "{files:?}");
    }

    #[test]
    fn work_that_waits_for_no_process_ends_us_after_a_grace() {
        static ENDED: AtomicBool = AtomicBool::new(false);
        let last = |_: &str| ENDED.store(true, Ordering::Release);
        let limit = Duration::from_millis(20);
        let watch = Watch::with_grace("a wait", limit, limit, last);
        while !ENDED.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        assert_eq!(watch.end(), Err("a wait did not end within 0 s and was ended".into()));
    }
}
