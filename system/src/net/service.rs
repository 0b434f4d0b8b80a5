//! A program that runs beside a test, and is ended with it.

use crate::command::wait_for;
use crate::{Context, Outcome, check, cleanup};
use rustix::process::{Signal, kill_process};
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(30);
const END: Duration = Duration::from_secs(2);

/// A running program; dropped, it is killed.
#[derive(Debug)]
pub struct Service {
    name: String,
    child: Child,
}

impl Service {
    /// Starts it; what it says goes to the file `log`.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(mut command: Command, log: &Path) -> Outcome<Self> {
        let words = command.get_args().map(|word| word.to_string_lossy().into_owned());
        let name = words.skip_while(|word| word != "--").collect::<Vec<_>>().join(" ");
        let out = File::create(log).context(log.display())?;
        let errors = out.try_clone().context(log.display())?;
        let child = command.stdout(out).stderr(errors).spawn().context(&name)?;
        cleanup::adopt(child.id());
        Ok(Self { name, child })
    }

    /// As [`Service::start`], without input.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn silent(mut command: Command, log: &Path) -> Outcome<Self> {
        command.stdin(Stdio::null());
        Self::start(command, log)
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits until `log` holds `words`.
    ///
    /// # Errors
    /// It ended, or did not say so within 30 s.
    pub fn until_says(&mut self, words: &str, log: &Path) -> Outcome {
        let name = self.name.clone();
        let said = || std::fs::read_to_string(log).context(log.display());
        let outcome = wait_for(&format!("{name} saying {words:?}"), LIMIT, || {
            if said()?.contains(words) {
                return Ok(Some(()));
            }
            match self.child.try_wait().context(&name)? {
                Some(status) => Err(format!("{name} ended: {status}")),
                None => Ok(None),
            }
        });
        let said = || said().unwrap_or_default();
        outcome.map_err(|error| format!("{error}; it said: {}", said().trim()))
    }

    /// Writes to its input.
    ///
    /// # Errors
    /// It has none, or is gone.
    pub fn say(&mut self, line: &str) -> Outcome {
        let input = self.child.stdin.as_mut().ok_or("it has no input")?;
        writeln!(input, "{line}").and_then(|()| input.flush()).context(&self.name)
    }

    /// SIGINT, and waits for its end.
    ///
    /// # Errors
    /// It does not end.
    pub fn interrupt(mut self) -> Outcome {
        let pid = cleanup::pid(self.child.id()).ok_or("it has no pid")?;
        kill_process(pid, Signal::INT).context(&self.name)?;
        self.end()
    }

    /// SIGKILL, and waits for its end.
    ///
    /// # Errors
    /// It had ended before.
    pub fn kill(mut self) -> Outcome {
        let ended = self.child.try_wait().context(&self.name)?;
        check(ended.is_none(), || format!("{} had ended before it was killed", self.name))?;
        self.child.kill().context(&self.name)?;
        self.end()
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// It does not end within 30 s.
    pub fn finish(mut self) -> Outcome {
        self.end()
    }

    fn end(&mut self) -> Outcome {
        let name = format!("the end of {}", self.name);
        wait_for(&name, LIMIT, || self.child.try_wait().context(&self.name)).map(|_| ())
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        // `timeout` ends with the program it runs only if it is asked to.
        let pid = rustix::process::Pid::from_child(&self.child);
        let _ = kill_process(pid, Signal::TERM);
        let ended = wait_for("a service's end", END, || self.child.try_wait().context("a service"));
        if ended.is_err() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
        cleanup::forget(self.child.id());
    }
}
