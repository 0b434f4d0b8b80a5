//! `in_child`: makes a system call in a child process, because in this one it would block all
//! threads.
//!
//! The kernel has one lock for the memory map of a process. A call that holds this lock for long,
//! such as one that pins gigabytes, blocks every thread of the process that maps memory or touches
//! a page for the first time. A child has a memory map of its own, with the same shared pages, and
//! the same open files: a call of the child on a socket changes the parent's socket.
//!
//! To make the child, the kernel copies the private part of the map while it holds the lock: that
//! takes milliseconds, which grow with the daemon's own memory, and not with that of guests, which
//! is shared.
#![allow(unsafe_code, reason = "allow-listed: a child that makes a call and ends")]

use rustix::fd::{AsRawFd, BorrowedFd};
use rustix::io::Errno;
use rustix::process::{Pid, Signal};
use std::mem::MaybeUninit;

/// Makes `call` in a child, and waits for the child's end. The child keeps `fd` open and closes all
/// other files, so that files which this process closes are really closed. The child blocks all
/// signals except SIGKILL and SIGSTOP, and does not outlive the calling thread.
///
/// `call` must take no lock and allocate nothing: the child has one thread, and a lock that another
/// thread held when the child was made stays locked there.
///
/// # Errors
/// The error of `call`. `EAGAIN`, `ENOMEM`: the host cannot start a child. `ECHILD`: the child was
/// killed.
pub(crate) fn in_child(
    fd: BorrowedFd<'_>,
    call: impl FnOnce() -> Result<(), Errno>,
) -> Result<(), Errno> {
    let parent = rustix::process::getpid();
    let (mut all, mut before) = (MaybeUninit::uninit(), MaybeUninit::uninit());
    // SAFETY: `sigfillset` initialises the set.
    unsafe { libc::sigfillset(all.as_mut_ptr()) };
    // SAFETY: the first set was filled, and the second one is filled by the call.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr()) };
    // SAFETY: as `fork`; the child makes system calls only, and ends.
    let child = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) };
    let failed = std::io::Error::last_os_error();
    if child == 0 {
        close_all_but(fd);
        let lives = die_with(parent);
        let status = lives.and_then(|()| call()).err().map_or(0, Errno::raw_os_error);
        // SAFETY: `_exit` takes no pointers, and does not return.
        unsafe { libc::_exit(status) };
    }
    // SAFETY: this restores the mask that the call above has stored.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut()) };
    let child = libc::pid_t::try_from(child).ok().filter(|child| *child > 0);
    let child = child.ok_or(Errno::from_io_error(&failed).unwrap_or(Errno::AGAIN))?;
    let mut status = 0;
    // SAFETY: `status` outlives the call.
    while unsafe { libc::waitpid(child, &raw mut status, 0) } != child {
        if std::io::Error::last_os_error().kind() != std::io::ErrorKind::Interrupted {
            return Err(Errno::CHILD);
        }
    }
    match libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status)) {
        Some(0) => Ok(()),
        Some(errno) => Err(Errno::from_raw_os_error(errno)),
        None => Err(Errno::CHILD),
    }
}

/// Has the kernel kill the child when its parent thread ends: nobody waits for the call then, which
/// takes as long as a front-end withholds the pages that are to be pinned.
fn die_with(parent: Pid) -> Result<(), Errno> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    // The parent may have ended before the signal was set.
    if rustix::process::getppid() == Some(parent) { Ok(()) } else { Err(Errno::CHILD) }
}

/// Closes all open files of the child but one. Kernels before 5.9 have no such call; there the
/// files stay open until the child ends.
fn close_all_but(fd: BorrowedFd<'_>) {
    let fd = fd.as_raw_fd().unsigned_abs();
    for (from, to) in [(0, fd.checked_sub(1)), (fd + 1, Some(u32::MAX))] {
        if let Some(to) = to {
            // SAFETY: the child is about to end, and uses none of these files.
            unsafe { libc::syscall(libc::SYS_close_range, from, to, 0) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::fd::AsFd;

    #[test]
    fn a_child_shares_files_and_has_no_others_and_tells_how_its_call_ended() {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let (other, _writer) = std::io::pipe().unwrap();
        let write = |value: u64| rustix::io::write(&event, &value.to_ne_bytes()).map(drop);
        in_child(event.as_fd(), || write(7)).unwrap();
        let mut seen = [0; 8];
        assert_eq!(rustix::io::read(&event, &mut seen), Ok(8));
        assert_eq!(u64::from_ne_bytes(seen), 7, "it wrote to the file of this process");
        assert_eq!(in_child(event.as_fd(), || write(u64::MAX)), Err(Errno::INVAL));
        let uses_other = || rustix::io::fcntl_getfd(&other).map(drop);
        assert_eq!(in_child(event.as_fd(), uses_other), Err(Errno::BADF));
        assert_eq!(uses_other(), Ok(()), "it is open here");
    }

    #[test]
    fn a_child_that_a_signal_ends_has_not_made_its_call() {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let dies = || std::process::abort();
        assert_eq!(in_child(event.as_fd(), dies), Err(Errno::CHILD));
    }

    #[test]
    fn a_child_ends_with_whoever_waits_for_it() {
        let (mut reader, writer) = std::io::pipe().unwrap();
        let tell = || {
            let pid = rustix::process::getpid().as_raw_nonzero().get();
            rustix::io::write(&writer, &pid.to_ne_bytes()).map(drop)
        };
        let hangs = || -> Result<(), Errno> {
            loop {
                let _ = rustix::event::poll(&mut [], None);
            }
        };
        // A child that in turn waits for its own child.
        let waits =
            || tell().and_then(|()| in_child(writer.as_fd(), || tell().and_then(|()| hangs())));
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| in_child(writer.as_fd(), waits));
            let mut pid = || {
                let mut bytes = [0; 4];
                std::io::Read::read_exact(&mut reader, &mut bytes).unwrap();
                Pid::from_raw(i32::from_ne_bytes(bytes)).unwrap()
            };
            let [child, its_child] = [pid(), pid()];
            rustix::process::kill_process(child, Signal::KILL).unwrap();
            assert_eq!(waiter.join().unwrap(), Err(Errno::CHILD));
            // A process that nobody has waited for still has a `stat` file when it has ended.
            let stat = format!("/proc/{}/stat", its_child.as_raw_nonzero());
            let runs = || std::fs::read_to_string(&stat).is_ok_and(|stat| !stat.contains(") Z "));
            let lives = (0..1000).all(|_| {
                std::thread::sleep(std::time::Duration::from_millis(10));
                runs()
            });
            if lives {
                rustix::process::kill_process(its_child, Signal::KILL).unwrap();
            }
            assert!(!lives, "it outlives whoever waits for it");
        });
    }

    #[test]
    fn what_a_child_does_to_its_memory_map_is_not_done_to_ours() {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let page = Box::new([7_u8; 4096]);
        let unmaps = || {
            // SAFETY: this unmaps the child's own copy of the page, which is not used any more.
            let result = unsafe { libc::munmap((page.as_ptr().addr() & !4095) as *mut _, 4096) };
            if result == 0 { Ok(()) } else { Err(Errno::INVAL) }
        };
        assert_eq!(in_child(event.as_fd(), unmaps), Ok(()));
        assert!(page.iter().all(|byte| *byte == 7));
    }
}
