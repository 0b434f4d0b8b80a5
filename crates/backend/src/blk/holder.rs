//! Finds the process that holds a lock on an image, as far as the system shows it.
//!
//! A lock of an open file description belongs to no process, so `F_OFD_GETLK` and `/proc/locks`
//! name none. `/proc/PID/fdinfo` shows the locks of each open file of a process, to root and to the
//! process's own user.

use std::ffi::OsStr;
use std::fs;
use std::path::Path;

/// The process that holds a lock on the file at `path`; `None` if that cannot be seen.
pub(super) fn pid_of(path: &Path) -> Option<u32> {
    let file = fs::canonicalize(path).ok()?;
    let pids = fs::read_dir("/proc").ok()?.flatten().filter_map(|entry| number(&entry.file_name()));
    pids.filter(|pid| *pid != std::process::id()).find(|pid| holds(*pid, &file))
}

/// True if the process has opened this file and holds a lock by it. Only the links of its fds are
/// read, and `fdinfo` of those that lead to this file: the process's other files may block.
fn holds(pid: u32, file: &Path) -> bool {
    let Ok(fds) = fs::read_dir(format!("/proc/{pid}/fd")) else { return false };
    fds.flatten().any(|fd| {
        fs::read_link(fd.path()).is_ok_and(|target| target == file)
            && number(&fd.file_name()).is_some_and(|fd| has_lock(pid, fd))
    })
}

fn has_lock(pid: u32, fd: u32) -> bool {
    let info = fs::read_to_string(format!("/proc/{pid}/fdinfo/{fd}")).unwrap_or_default();
    info.lines().any(|line| line.starts_with("lock:"))
}

fn number(name: &OsStr) -> Option<u32> {
    name.to_str()?.parse().ok()
}
