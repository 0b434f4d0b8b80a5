//! System calls that seccomp denies: each fails with `EPERM`, and is recorded with its thread, so
//! that the operator can be told. A file that landlock refuses is recorded as well.
//!
//! The kernel sends the calling thread `SIGSYS` instead of making the call. The handler records the
//! call in a static ring, wakes the reader by an eventfd, and continues the thread as if the call
//! had failed. The handler takes no lock and allocates nothing. It makes a denied `openat` itself,
//! in a form that the filter allows, and returns the result to the thread: seccomp does not see the
//! path, and landlock reports a refusal only to the caller.
#![allow(unsafe_code, reason = "allow-listed: a signal handler, and the registers of its thread")]

use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, IntoRawFd, OwnedFd};
use std::io;
use std::sync::atomic::{AtomicI32, AtomicU64, AtomicUsize, Ordering};

/// Number of records that can wait for the reader; if more come, the oldest ones are only counted.
const NOTES: usize = 64;

/// The last denied calls, one word each: the thread's ID in the upper half, the call's number in
/// the lower.
static NOTED: [AtomicU64; NOTES] = [const { AtomicU64::new(0) }; NOTES];
/// The number of calls that were denied.
static COUNT: AtomicUsize = AtomicUsize::new(0);
/// How many of these [`take`] has returned or counted as lost.
static READ: AtomicUsize = AtomicUsize::new(0);
/// The handler's own descriptor of the eventfd that wakes the reader, or -1 before it is made.
static EVENT: AtomicI32 = AtomicI32::new(-1);

/// A call that was denied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeniedCall {
    /// The call's number on this machine.
    pub call: u32,
    /// The id of the thread that made it.
    pub thread: u32,
}

/// Installs the handler: from now on calls that are denied with `SIGSYS` fail with `EPERM` and are
/// recorded. Returns an eventfd that is readable when [`take`] has calls to return.
///
/// # Errors
/// The host has no eventfd, or the handler cannot be installed.
pub fn watch() -> io::Result<OwnedFd> {
    let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    // The handler's own descriptor is never closed.
    EVENT.store(event.as_fd().try_clone_to_owned()?.into_raw_fd(), Ordering::Relaxed);
    // SAFETY: all-zero is a valid sigaction: no flags, empty mask, default handler.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER;
    // SAFETY: the handler is async-signal-safe, and has the signature of SA_SIGINFO.
    if unsafe { libc::sigaction(libc::SIGSYS, &raw const action, std::ptr::null_mut()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(event)
}

/// Returns the calls that were denied since the last `take`, and the number of older ones that were
/// overwritten. Only one thread may call this.
pub fn take() -> (Vec<DeniedCall>, usize) {
    let (read, count) = (READ.load(Ordering::Relaxed), COUNT.load(Ordering::Acquire));
    READ.store(count, Ordering::Relaxed);
    let from = read.max(count.saturating_sub(NOTES));
    let note = |index: usize| NOTED[index % NOTES].load(Ordering::Relaxed);
    #[allow(clippy::cast_possible_truncation, reason = "two halves of a word")]
    let parse = |note: u64| DeniedCall { call: note as u32, thread: (note >> 32) as u32 };
    ((from..count).map(note).map(parse).collect(), from - read)
}

extern "C" fn handler(_: libc::c_int, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the C library returns the address of this thread's `errno`.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    let before = unsafe { *errno };
    // SAFETY: with SA_SIGINFO the kernel passes the interrupted context, which nobody else uses.
    let context = unsafe { &mut *context.cast::<libc::ucontext_t>() };
    let call = call(context);
    let (result, is_denied) = match i64::from(call) {
        // With this argument the call is the handler's own: then this thread's filter allows no
        // `openat` at all.
        libc::SYS_openat if arguments(context)[4] & HALF != i64::from(OPENED_BY_HANDLER) => {
            let opened = open(context);
            (opened, opened == -libc::EACCES)
        }
        _ => (-libc::EPERM, true),
    };
    if is_denied {
        note(call);
    }
    answer(context, result);
    // SAFETY: as above.
    unsafe { *errno = before };
}

/// Records a call of this thread as denied. Takes no lock and allocates nothing; changes `errno`.
#[allow(clippy::cast_sign_loss, reason = "numbers of threads are not negative")]
pub fn note(call: u32) {
    // SAFETY: `gettid` takes no pointers.
    let thread = unsafe { libc::gettid() };
    let index = COUNT.load(Ordering::Relaxed);
    NOTED[index % NOTES].store(u64::from(thread as u32) << 32 | u64::from(call), Ordering::Relaxed);
    COUNT.fetch_add(1, Ordering::Release);
    let one = 1_u64.to_ne_bytes();
    // SAFETY: the buffer of eight bytes outlives the call; a full eventfd is readable as well.
    unsafe { libc::write(EVENT.load(Ordering::Relaxed), one.as_ptr().cast(), one.len()) };
}

/// The fifth argument of an `openat` that the handler makes, by which the filter allows the call.
/// The kernel ignores a fifth argument. A thread that passes it by itself is still restricted by
/// landlock.
pub const OPENED_BY_HANDLER: u32 = 0x6d61_6e79;

/// Mask of the lower half of an argument, the only half that the filters compare.
const HALF: i64 = u32::MAX as i64;

/// Makes the interrupted `openat`. Returns a descriptor, or a negative errno.
fn open(context: &libc::ucontext_t) -> i32 {
    let [folder, path, flags, mode, _] = arguments(context);
    // SAFETY: the thread's own call with its own arguments, whose pointers the kernel checks.
    let opened =
        unsafe { libc::syscall(libc::SYS_openat, folder, path, flags, mode, OPENED_BY_HANDLER) };
    match i32::try_from(opened) {
        Ok(fd) if fd >= 0 => fd,
        _ => -io::Error::last_os_error().raw_os_error().unwrap_or(libc::EPERM),
    }
}

/// Returns the number of the interrupted call.
#[cfg(target_arch = "x86_64")]
#[allow(clippy::cast_sign_loss, clippy::cast_possible_truncation, reason = "numbers of calls")]
fn call(context: &libc::ucontext_t) -> u32 {
    context.uc_mcontext.gregs[libc::REG_RAX as usize] as u32
}

/// Returns the first five arguments of the interrupted call.
#[cfg(target_arch = "x86_64")]
#[allow(clippy::cast_sign_loss, reason = "indexes of registers")]
fn arguments(context: &libc::ucontext_t) -> [i64; 5] {
    [libc::REG_RDI, libc::REG_RSI, libc::REG_RDX, libc::REG_R10, libc::REG_R8]
        .map(|register| context.uc_mcontext.gregs[register as usize])
}

/// Sets the result of the interrupted call.
#[cfg(target_arch = "x86_64")]
#[allow(clippy::cast_sign_loss, reason = "indexes of registers")]
fn answer(context: &mut libc::ucontext_t, result: i32) {
    context.uc_mcontext.gregs[libc::REG_RAX as usize] = i64::from(result);
}

/// Returns the number of the interrupted call.
#[cfg(target_arch = "aarch64")]
#[allow(clippy::cast_possible_truncation, reason = "numbers of calls")]
fn call(context: &libc::ucontext_t) -> u32 {
    context.uc_mcontext.regs[8] as u32
}

/// Returns the first five arguments of the interrupted call.
#[cfg(target_arch = "aarch64")]
fn arguments(context: &libc::ucontext_t) -> [i64; 5] {
    [0, 1, 2, 3, 4].map(|register| context.uc_mcontext.regs[register].cast_signed())
}

/// Sets the result of the interrupted call.
#[cfg(target_arch = "aarch64")]
fn answer(context: &mut libc::ucontext_t, result: i32) {
    context.uc_mcontext.regs[0] = i64::from(result).cast_unsigned();
}

/// For tests that the filters deny them: calls that reach another process of the same user.
pub mod reach {
    use std::io;

    fn done(result: libc::c_long) -> io::Result<libc::c_long> {
        if result == -1 { Err(io::Error::last_os_error()) } else { Ok(result) }
    }

    /// Asks whether the first thread of a process may be signalled; sends nothing.
    ///
    /// # Errors
    /// `EPERM`: the call is denied.
    pub fn signal_thread(process: i32) -> io::Result<()> {
        // SAFETY: a call without pointers; signal 0 is only checked.
        done(unsafe { libc::syscall(libc::SYS_tgkill, process, process, 0) }).map(drop)
    }

    /// Makes a process the owner of an open file, which would send it signals.
    ///
    /// # Errors
    /// `EPERM`: the call is denied.
    pub fn own_file(process: i32) -> io::Result<()> {
        let (end, _other) = io::pipe()?;
        let fd = std::os::fd::AsRawFd::as_raw_fd(&end);
        // SAFETY: a call without pointers, on a descriptor that lives.
        done(unsafe { libc::fcntl(fd, libc::F_SETOWN, process) }.into()).map(drop)
    }

    /// Maps a page that can be executed, and unmaps it again.
    ///
    /// # Errors
    /// `EPERM`: the process may not have executable memory.
    pub fn map_executable() -> io::Result<()> {
        const PAGE: usize = 4096;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let rights = libc::PROT_READ | libc::PROT_EXEC;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let page = unsafe { libc::mmap(std::ptr::null_mut(), PAGE, rights, flags, -1, 0) };
        if page == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the mapping that was just made, which nobody uses.
        done(unsafe { libc::munmap(page, PAGE) }.into()).map(drop)
    }

    /// Asks the kernel not to end this process when its parent ends.
    ///
    /// # Errors
    /// `EPERM`: the call is denied.
    pub fn outlive_parent() -> io::Result<()> {
        // SAFETY: a call without pointers.
        done(unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, 0) }.into()).map(drop)
    }

    /// Asks to trace a process that does not exist.
    ///
    /// # Errors
    /// `EPERM`: the call is denied.
    pub fn trace() -> io::Result<()> {
        // SAFETY: no process has this number, and the further arguments are 0.
        let traced = unsafe { libc::syscall(libc::SYS_ptrace, libc::PTRACE_SEIZE, i32::MAX, 0, 0) };
        match done(traced) {
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Ok(()),
            traced => traced.map(drop),
        }
    }

    /// Makes an io_uring, and closes it.
    ///
    /// # Errors
    /// `EPERM`: the process may make no more io_urings.
    pub fn make_ring() -> io::Result<()> {
        // `struct io_uring_params`, all zero.
        let mut parameters = [0_u32; 30];
        // SAFETY: the kernel writes to the parameters, which have their size and live.
        let made = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, parameters.as_mut_ptr()) };
        let fd = i32::try_from(done(made)?).map_err(io::Error::other)?;
        // SAFETY: the descriptor that was just made, which nobody else has.
        drop(unsafe { <rustix::fd::OwnedFd as rustix::fd::FromRawFd>::from_raw_fd(fd) });
        Ok(())
    }

    /// Makes a process, which ends at once. The caller has one thread.
    ///
    /// # Errors
    /// `clone` or `waitpid` has failed: the system's error.
    pub fn make_process() -> io::Result<()> {
        // SAFETY: the child of a process with one thread makes one call, which never returns.
        let child = done(unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) })?;
        if child == 0 {
            // SAFETY: a call without pointers.
            unsafe { libc::_exit(0) };
        }
        let child = i32::try_from(child).map_err(io::Error::other)?;
        // SAFETY: the status of the child is not asked for.
        done(unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) }.into()).map(drop)
    }
}
