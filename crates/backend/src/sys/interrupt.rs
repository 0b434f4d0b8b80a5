//! Interrupts a thread that sleeps in a system call, by a signal whose handler does nothing. Also
//! reads the CPU time of such a thread.
#![allow(unsafe_code, reason = "allow-listed: installs a signal handler and sends its signal")]

use std::sync::Once;
use std::time::Duration;

static INSTALL: Once = Once::new();

/// Returns the signal: a real-time signal that no other code of this process uses.
fn signal() -> i32 {
    libc::SIGRTMIN() + 4
}

/// A thread that can be interrupted.
#[derive(Debug)]
pub struct Interruptible {
    process: i32,
    thread: i32,
}

impl Interruptible {
    /// Returns the calling thread. Installs the handler, and unblocks the signal for this thread,
    /// since the process may have inherited it as blocked.
    #[must_use]
    pub fn this_thread() -> Self {
        INSTALL.call_once(install);
        // SAFETY: all-zero is a valid sigset_t; it is emptied below before it is used.
        let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
        // SAFETY: `set` is writable.
        unsafe { libc::sigemptyset(&raw mut set) };
        // SAFETY: `set` is an initialized set, and the number is that of a signal.
        unsafe { libc::sigaddset(&raw mut set, signal()) };
        // SAFETY: `set` is readable; the former mask is not asked for.
        unsafe { libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const set, std::ptr::null_mut()) };
        let process = rustix::process::getpid().as_raw_nonzero().get();
        let thread = rustix::thread::gettid().as_raw_nonzero().get();
        Self { process, thread }
    }

    /// Interrupts the system call in which the thread sleeps: if that can be interrupted, it fails
    /// with `EINTR`. Has no effect on a thread that has ended, or is not in a system call.
    pub fn interrupt(&self) {
        // SAFETY: the call takes no pointer. The signal goes to this process, whose handler is
        // installed, so that it kills no process.
        unsafe { libc::syscall(libc::SYS_tgkill, self.process, self.thread, signal()) };
    }

    /// Returns the CPU time that the thread has used so far; zero if it has ended.
    #[must_use]
    pub fn cpu_time(&self) -> Duration {
        // The kernel's number of a thread's CPU clock (CPUCLOCK_PERTHREAD | CPUCLOCK_SCHED).
        let clock = (!self.thread << 3) | 6;
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: `time` is writable; the call fails if the thread has ended.
        let told = unsafe { libc::clock_gettime(clock, &raw mut time) };
        if told != 0 {
            return Duration::ZERO;
        }
        let part = |value: i64| u64::try_from(value).unwrap_or(0);
        Duration::from_secs(part(time.tv_sec)) + Duration::from_nanos(part(time.tv_nsec))
    }
}

fn install() {
    // SAFETY: all-zero is a valid sigaction: no flags (above all no SA_RESTART), empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_signal as *const () as usize;
    // SAFETY: the handler does nothing, so it may run anywhere.
    unsafe { libc::sigaction(signal(), &raw const action, std::ptr::null_mut()) };
}

extern "C" fn on_signal(_signal: i32) {}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::io::Errno;

    #[test]
    fn the_cpu_time_of_another_thread_grows_while_it_runs() {
        let (sender, receiver) = std::sync::mpsc::channel();
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::Builder::new().spawn(move || {
            sender.send(Interruptible::this_thread()).unwrap();
            while stopped.try_recv().is_err() {
                std::hint::spin_loop();
            }
        });
        let target = receiver.recv().unwrap();
        let first = target.cpu_time();
        while target.cpu_time() < first + Duration::from_millis(2) {
            std::thread::yield_now();
        }
        stop.send(()).unwrap();
        thread.unwrap().join().unwrap();
        // The kernel tells of the end before it forgets the thread.
        while target.cpu_time() > Duration::ZERO {
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_write_that_waits_for_a_full_eventfd_is_interrupted() {
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        let (sender, receiver) = std::sync::mpsc::channel();
        let build = std::thread::Builder::new();
        let writer = build.spawn(move || {
            sender.send(Interruptible::this_thread()).unwrap();
            rustix::io::write(&event, &1u64.to_ne_bytes())
        });
        let (target, writer) = (receiver.recv().unwrap(), writer.unwrap());
        while !writer.is_finished() {
            target.interrupt();
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(writer.join().unwrap(), Err(Errno::INTR));
        target.interrupt();
    }
}
