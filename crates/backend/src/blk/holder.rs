//! Finds the process that holds a lock on an image, if /proc shows it.
//!
//! A lock of an open file description belongs to no process, so `F_OFD_GETLK` and `/proc/locks`
//! name none. `/proc/PID/fdinfo` shows the locks of each open file of a process, to root and to the
//! process's own user.

use std::ffi::OsStr;
use std::fs;
use std::path::Path;

/// Returns the ID of another process that holds a lock on the file at `path`; `None` if /proc shows
/// none.
pub(super) fn pid_of(path: &Path) -> Option<u32> {
    let file = fs::canonicalize(path).ok()?;
    let pids = fs::read_dir("/proc").ok()?.flatten().filter_map(|entry| number(&entry.file_name()));
    pids.filter(|pid| *pid != std::process::id()).find(|pid| holds(*pid, &file))
}

/// True if the process has opened this file and holds a lock by it. While a process is being
/// killed, its first thread may have ended, and then shows no file, while another thread still
/// hangs: then the other threads' folders are read.
fn holds(pid: u32, file: &Path) -> bool {
    let process = format!("/proc/{pid}");
    let Ok(fds) = fs::read_dir(format!("{process}/fd")) else { return false };
    if fds.flatten().next().is_some() {
        return holds_by(&process, file);
    }
    let Ok(threads) = fs::read_dir(format!("{process}/task")) else { return false };
    let mut threads = threads.flatten().filter_map(|entry| number(&entry.file_name()));
    threads.any(|thread| holds_by(&format!("{process}/task/{thread}"), file))
}

/// True if the thread with this `/proc` folder holds a lock on the file. Reads only the links of
/// its descriptors, and `fdinfo` of those that lead to this file: queries of other files may block.
fn holds_by(thread: &str, file: &Path) -> bool {
    let Ok(fds) = fs::read_dir(format!("{thread}/fd")) else { return false };
    fds.flatten().any(|fd| {
        fs::read_link(fd.path()).is_ok_and(|target| target == file)
            && number(&fd.file_name()).is_some_and(|fd| has_lock(thread, fd))
    })
}

fn has_lock(thread: &str, fd: u32) -> bool {
    let info = fs::read_to_string(format!("{thread}/fdinfo/{fd}")).unwrap_or_default();
    info.lines().any(|line| line.starts_with("lock:"))
}

fn number(name: &OsStr) -> Option<u32> {
    name.to_str()?.parse().ok()
}
