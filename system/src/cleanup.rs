//! Nothing is left behind: a Ctrl-C ends what was started and removes what was made.
//!
//! Children also carry a parent-death signal (`command.rs`), so that even a killed xtask leaves
//! no guest behind.

use crate::processes::{describe_quickly, kill, ours};
use crate::watch::what_is_under_way;
use crate::{Context, Outcome};
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tempfile::TempDir;

static LIVING: Mutex<Living> = Mutex::new(Living { children: Vec::new(), folders: Vec::new() });

struct Living {
    children: Vec<Pid>,
    folders: Vec<PathBuf>,
}

fn living() -> MutexGuard<'static, Living> {
    LIVING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// From now on a signal to end kills our children and removes our folders first, and says what was
/// under way.
///
/// # Errors
/// The handlers cannot be installed.
pub fn on_signals() -> Outcome {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("signals")?;
    let wait = move || {
        if let Some(signal) = signals.forever().next() {
            // Whoever stops a run that takes too long wants to know what it waited for.
            print!("{}", what_is_under_way());
            if signal == SIGTERM {
                println!("{}", describe_quickly(&ours()));
            }
            leave_nothing();
            eprintln!("xtask: stopped by signal {signal}, nothing is left behind");
            std::process::exit(128 + signal);
        }
    };
    std::thread::Builder::new().name("signals".into()).spawn(wait).context("signals")?;
    Ok(())
}

/// Ends what we have started, with what that has started, and removes our folders: we exit now.
pub(crate) fn leave_nothing() {
    kill(ours);
    let left = living();
    for child in &left.children {
        let _ = kill_process(*child, Signal::KILL);
    }
    for folder in &left.folders {
        let _ = std::fs::remove_dir_all(folder);
    }
}

/// A child that a signal must end.
pub(crate) fn adopt(child: u32) {
    living().children.extend(pid(child));
}

/// A child that has ended.
pub(crate) fn forget(child: u32) {
    living().children.retain(|living| Some(*living) != pid(child));
}

pub(crate) fn pid(child: u32) -> Option<Pid> {
    i32::try_from(child).ok().and_then(Pid::from_raw)
}

/// A folder that is removed when dropped, and when a signal ends us.
#[derive(Debug)]
pub struct Folder(TempDir);

impl Folder {
    /// A new folder with a short path: sockets live there.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn new() -> Outcome<Self> {
        Self::inside(&std::env::temp_dir())
    }

    /// A new folder in another one, for files that must not lie in memory.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn inside(parent: &Path) -> Outcome<Self> {
        let folder = tempfile::Builder::new().prefix("manyring-").tempdir_in(parent);
        let folder = folder.context("a folder for temporary files")?;
        living().folders.push(folder.path().to_owned());
        Ok(Self(folder))
    }

    /// Its path.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        living().folders.retain(|folder| folder != self.0.path());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dropped_folder_is_gone_and_forgotten() {
        let folder = Folder::new().unwrap();
        let path = folder.path().to_owned();
        assert!(path.is_dir() && living().folders.contains(&path));
        drop(folder);
        assert!(!path.exists() && !living().folders.contains(&path));
    }
}
