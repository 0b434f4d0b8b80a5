//! Survive memory that is cut away: a table of our mappings and the SIGBUS handler that reads it.
//!
//! A front-end may truncate the file of a region, or its tmpfs may be full. The first access then
//! raises SIGBUS. The handler replaces a window around the fault by zeroed memory and marks the
//! region broken; the thread goes on (it reads zeroes), and the worker's next look at
//! [`fault_count`] ends that session. A fault outside of all watched mappings goes to the handler
//! that was installed before. To replace all of a large region takes 90 ms for each GiB that was
//! touched, which is left to the janitor: it unmaps the region when the session has ended.
//!
//! Async-signal-safe by design: the table is static, its words are atomics, the handler makes one
//! raw system call and takes no lock.
#![allow(unsafe_code, reason = "allow-listed: a signal handler and its table")]

use crate::bounds::count_max;
use crate::error::MemoryError;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

/// Mappings that can be watched at once. [`count_max`] is less, unless the operator has
/// raised `vm.max_map_count`: with the kernel's default, 48 sessions have room for all of their
/// slots, and thousands of sessions for the few slots that guests use.
const SLOTS: usize = 65536;
/// Bytes that the handler replaces for a fault, at least a page of the region's file: few, because
/// each page of them that is mapped costs time on the thread that has faulted.
const WINDOW: usize = 64 << 10;
const FREE: usize = 0;
const CLAIMED: usize = 1;

struct Slot {
    base: AtomicUsize,
    len: AtomicUsize,
    /// The page size of the file in bytes: parts of the mapping are replaced in multiples of it.
    page: AtomicUsize,
    /// How many windows were replaced in this mapping.
    windows: AtomicUsize,
    broken: AtomicBool,
}

static TABLE: [Slot; SLOTS] = [const {
    Slot {
        base: AtomicUsize::new(FREE),
        len: AtomicUsize::new(0),
        page: AtomicUsize::new(0),
        windows: AtomicUsize::new(0),
        broken: AtomicBool::new(false),
    }
}; SLOTS];
/// One past the highest slot that was ever used: the handler searches no further.
static USED: AtomicUsize = AtomicUsize::new(0);
/// How many windows were replaced in all mappings that are watched now.
static WINDOWS: AtomicUsize = AtomicUsize::new(0);
static FAULTS: AtomicU64 = AtomicU64::new(0);
static OLD_ACTION: AtomicUsize = AtomicUsize::new(0);
static OLD_SIGINFO: AtomicBool = AtomicBool::new(false);
static INSTALL: Once = Once::new();

/// Returns how many regions were found truncated since the start. Costs one relaxed load, so that
/// workers can check it at each burst.
#[must_use]
pub fn fault_count() -> u64 {
    FAULTS.load(Ordering::Relaxed)
}

/// Returns the most windows that may be replaced. Each splits a mapping into up to three, so all
/// together take up to an eighth of `vm.max_map_count`, half of what regions and grants leave.
fn windows_max() -> usize {
    count_max() / 6
}

/// A slot of the table that is in use. Drop frees it.
#[derive(Debug)]
pub(crate) struct Watch(usize);

impl Watch {
    /// Watches `len` bytes at `base`, mapped in pages of `page` bytes, a power of two.
    pub(crate) fn new(base: usize, len: usize, page: usize) -> Result<Self, MemoryError> {
        let max = count_max().min(SLOTS);
        for (index, slot) in TABLE.iter().enumerate().take(max) {
            let claim =
                slot.base.compare_exchange(FREE, CLAIMED, Ordering::AcqRel, Ordering::Relaxed);
            if claim.is_ok() {
                slot.broken.store(false, Ordering::Relaxed);
                slot.len.store(len, Ordering::Relaxed);
                slot.page.store(page, Ordering::Relaxed);
                slot.base.store(base, Ordering::Release);
                USED.fetch_max(index + 1, Ordering::AcqRel);
                return Ok(Self(index));
            }
        }
        Err(MemoryError::TooMany { max })
    }

    pub(crate) fn is_broken(&self) -> bool {
        TABLE[self.0].broken.load(Ordering::Acquire)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let slot = &TABLE[self.0];
        WINDOWS.fetch_sub(slot.windows.swap(0, Ordering::Relaxed), Ordering::Relaxed);
        slot.base.store(FREE, Ordering::Release);
    }
}

/// Returns base and length of every mapping that is watched now. A mapping may end at any time.
pub(crate) fn watched() -> Vec<(usize, usize)> {
    let range = |slot: &Slot| {
        let base = slot.base.load(Ordering::Acquire);
        (base > CLAIMED).then(|| (base, slot.len.load(Ordering::Acquire)))
    };
    TABLE[..USED.load(Ordering::Acquire)].iter().filter_map(range).collect()
}

/// Installs the handler; later calls do nothing. To be called before the first session.
pub fn install() {
    INSTALL.call_once(|| {
        // Read the limit now: a sandbox may forbid that later.
        count_max();
        // SAFETY: all-zero is a valid sigaction: no flags, empty mask, default handler.
        let mut old: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: as above.
        let mut new: libc::sigaction = unsafe { std::mem::zeroed() };
        new.sa_sigaction = handler as *const () as usize;
        new.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER;
        // SAFETY: a null action only reads the current one into `old`.
        if unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), &raw mut old) } == 0 {
            OLD_ACTION.store(old.sa_sigaction, Ordering::Relaxed);
            OLD_SIGINFO.store(old.sa_flags & libc::SA_SIGINFO != 0, Ordering::Relaxed);
        }
        // SAFETY: the handler is async-signal-safe and the old action is stored before it can run.
        unsafe { libc::sigaction(libc::SIGBUS, &raw const new, std::ptr::null_mut()) };
    });
}

/// Returns the slot that contains `address`. The base is read twice, so that a slot that is reused
/// for another mapping between the two reads is not returned.
fn find(address: usize) -> Option<(&'static Slot, usize, usize)> {
    TABLE[..USED.load(Ordering::Acquire)].iter().find_map(|slot| {
        let base = slot.base.load(Ordering::Acquire);
        let len = slot.len.load(Ordering::Acquire);
        let inside = base > CLAIMED && address >= base && address - base < len;
        (inside && slot.base.load(Ordering::Acquire) == base).then_some((slot, base, len))
    })
}

extern "C" fn handler(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo_t.
    let siginfo = unsafe { &*info };
    let code = siginfo.si_code;
    // SAFETY: for SIGBUS the kernel sets si_addr; a sent signal (code <= 0) is not used below.
    let address = unsafe { siginfo.si_addr() } as usize;
    // SAFETY: errno's address is always valid for the current thread.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    let saved = unsafe { *errno };
    if let Some((slot, base, len)) = (code > 0).then(|| find(address)).flatten() {
        // Mark the mapping first: a thread that reads zeroes then also sees the mark.
        if !slot.broken.swap(true, Ordering::AcqRel) {
            FAULTS.fetch_add(1, Ordering::Relaxed);
        }
        let (base, len) = part_to_replace(slot, base, len, address);
        // SAFETY: base..base+len is part of a live mapping of this table (a thread just faulted in
        // it), and replacing it keeps every address valid.
        let mapped = unsafe {
            libc::syscall(
                libc::SYS_mmap,
                base,
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        // SAFETY: errno's address is valid, see above.
        unsafe { *errno = saved };
        if mapped != -1 {
            return;
        }
    }
    chain(signal, info, context);
}

/// Returns the start and length of the part to replace for a fault at `address` in the mapping of
/// `slot`: a window, or the whole mapping if no further window may be replaced.
fn part_to_replace(slot: &Slot, base: usize, len: usize, address: usize) -> (usize, usize) {
    if WINDOWS.fetch_add(1, Ordering::Relaxed) >= windows_max() {
        WINDOWS.fetch_sub(1, Ordering::Relaxed);
        return (base, len);
    }
    slot.windows.fetch_add(1, Ordering::Relaxed);
    let size = WINDOW.max(slot.page.load(Ordering::Relaxed));
    let offset = (address - base) / size * size;
    (base + offset, size.min(len - offset))
}

/// Passes a fault outside of all watched mappings to the former handler (Rust's std installs one),
/// or ends the process.
fn chain(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let old = OLD_ACTION.load(Ordering::Relaxed);
    if old != libc::SIG_DFL && old != libc::SIG_IGN && OLD_SIGINFO.load(Ordering::Relaxed) {
        type Action = extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void);
        // SAFETY: with SA_SIGINFO set, sa_sigaction is a function of this type.
        let action = unsafe { std::mem::transmute::<usize, Action>(old) };
        action(signal, info, context);
        return;
    }
    // SAFETY: all-zero is the default action.
    let default: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: resets to the default; the instruction faults again and ends the process.
    unsafe { libc::sigaction(libc::SIGBUS, &raw const default, std::ptr::null_mut()) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Mapping;

    #[test]
    fn memory_cut_away_reads_as_zeroes_and_is_marked_broken() {
        install();
        let file = rustix::fs::memfd_create("cut", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 1 << 20).unwrap();
        let mapping = Mapping::of_file(&file, 0, 1 << 20).unwrap();
        let healthy = Mapping::anonymous(4096).unwrap();
        mapping.slice(8192, 4).unwrap().write_from(b"seen");
        let before = fault_count();
        rustix::fs::ftruncate(&file, 0).unwrap();
        let mut bytes = [1; 4];
        mapping.slice(8192, 4).unwrap().read_into(&mut bytes);
        assert_eq!(bytes, [0; 4]);
        assert!(mapping.is_broken() && !healthy.is_broken());
        assert!(fault_count() > before);
        mapping.slice(0, 4).unwrap().write_from(b"more");
    }

    /// One at a time: the windows of a process are counted.
    static ALONE: std::sync::Mutex<()> = std::sync::Mutex::new(());

    #[test]
    fn a_fault_replaces_a_window_and_leaves_the_rest_to_the_janitor() {
        let _alone = ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        install();
        let file = rustix::fs::memfd_create("tail", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 1 << 20).unwrap();
        let mapping = Mapping::of_file(&file, 0, 1 << 20).unwrap();
        let last = (1 << 20) - 4096;
        rustix::fs::ftruncate(&file, last).unwrap();
        let last = usize::try_from(last).unwrap();
        mapping.slice(last, 4).unwrap().write_from(b"lost");
        assert!(mapping.is_broken());
        // Bytes further away than the window are still the file's.
        mapping.slice(last - WINDOW, 4).unwrap().write_from(b"kept");
        let mut bytes = [0; 4];
        rustix::io::pread(&file, &mut bytes, (last - WINDOW) as u64).unwrap();
        assert_eq!(&bytes, b"kept");
    }

    #[test]
    fn windows_have_a_bound_and_are_given_back() {
        let _alone = ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        install();
        let (count, before) = (windows_max() + 10, WINDOWS.load(Ordering::Relaxed));
        let file = rustix::fs::memfd_create("many", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let size = (count * WINDOW) as u64;
        rustix::fs::ftruncate(&file, size).unwrap();
        let mapping = Mapping::of_file(&file, 0, size).unwrap();
        rustix::fs::ftruncate(&file, 0).unwrap();
        // From the last one, so that the whole region is replaced before its first page is touched.
        for window in (0..count).rev() {
            mapping.slice(window * WINDOW, 4).unwrap().write_from(b"gone");
        }
        assert!(WINDOWS.load(Ordering::Relaxed) <= windows_max());
        drop(mapping);
        assert!(
            WINDOWS.load(Ordering::Relaxed) <= before + 1,
            "a test beside this one may have one"
        );
    }

    /// Set in the process that is to die of a fault.
    const FAULTING: &str = "MANYRING_TEST_FAULTS";
    /// With what the action ends the process that was there before ours.
    const CHAINED: i32 = 42;

    extern "C" fn end_process(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
        // SAFETY: the kernel, or the handler before this one, passes a valid siginfo_t.
        let is_fault = unsafe { (*info).si_code } > 0;
        // SAFETY: all-zero is a valid stack_t: it is only written to.
        let mut stack: libc::stack_t = unsafe { std::mem::zeroed() };
        // SAFETY: without a new stack the call only reads the thread's present one into `stack`.
        unsafe { libc::sigaltstack(std::ptr::null(), &raw mut stack) };
        // That of the standard library needs it: the stack of the thread may be used up.
        let has_own_stack = stack.ss_flags & libc::SS_ONSTACK != 0;
        // SAFETY: ends the process at once; a signal handler may.
        unsafe { libc::_exit(if is_fault && has_own_stack { CHAINED } else { 1 }) };
    }

    /// Touches a page that lies behind the end of its file: below all watched mappings if
    /// `is_below`, above them otherwise.
    fn fault_beside_a_mapping(is_below: bool) {
        let file = rustix::fs::memfd_create("theirs", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let map = || {
            // SAFETY: a new mapping at an address of the kernel's choice takes nobody's memory.
            let page = unsafe {
                let (read, shared) = (libc::PROT_READ, libc::MAP_SHARED);
                let fd = std::os::fd::AsRawFd::as_raw_fd(&file);
                libc::mmap(std::ptr::null_mut(), 4096, read, shared, fd, 0)
            };
            assert_ne!(page, libc::MAP_FAILED);
            page as usize
        };
        let healthy = rustix::fs::memfd_create("ours", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&healthy, 4096).unwrap();
        let (one, ours, other) = (map(), Mapping::of_file(&healthy, 0, 4096).unwrap(), map());
        let place = ours.slice(0, 1).unwrap().address();
        let page = if is_below { one.min(other) } else { one.max(other) };
        assert_eq!(page < place, is_below, "the kernel places mappings one after the other");
        // SAFETY: it is mapped; the access ends this process.
        unsafe { std::ptr::read_volatile(page as *const u8) };
    }

    /// Makes the process die of a fault at `place`, whose action before ours is `action`.
    fn die(action: usize, flags: i32, place: &str) {
        // SAFETY: all-zero is a valid sigaction: no flags, empty mask, default handler.
        let mut before: libc::sigaction = unsafe { std::mem::zeroed() };
        (before.sa_sigaction, before.sa_flags) = (action, flags);
        // SAFETY: `end_process` is of the type that SA_SIGINFO asks for; others are no functions.
        unsafe { libc::sigaction(libc::SIGBUS, &raw const before, std::ptr::null_mut()) };
        // SAFETY: changes no memory; it ends a process whose handler never ends.
        unsafe { libc::alarm(10) };
        install();
        fault_beside_a_mapping(place == "below");
    }

    /// How the process ends that runs the test `name` with this place of the fault.
    fn end_of(name: &str, place: &str) -> std::process::ExitStatus {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", &format!("sigbus::tests::{name}")]).env(FAULTING, place);
        child.output().unwrap().status
    }

    #[test]
    fn a_fault_outside_of_our_memory_goes_to_the_action_installed_before() {
        if let Ok(place) = std::env::var(FAULTING) {
            die(end_process as *const () as usize, libc::SA_SIGINFO, &place);
            return;
        }
        let name = "a_fault_outside_of_our_memory_goes_to_the_action_installed_before";
        for place in ["below", "above"] {
            assert_eq!(end_of(name, place).code(), Some(CHAINED), "{place}");
        }
    }

    #[test]
    fn a_fault_outside_of_our_memory_ends_a_process_that_had_no_action_for_it() {
        if let Ok(action) = std::env::var(FAULTING) {
            let function = end_process as *const () as usize;
            die(action.parse().unwrap_or(function), 0, "above");
            return;
        }
        let name = "a_fault_outside_of_our_memory_ends_a_process_that_had_no_action_for_it";
        let (default, ignore) = (libc::SIG_DFL.to_string(), libc::SIG_IGN.to_string());
        for action in [&default, &ignore, "a function that does not ask for the fault"] {
            let signal = std::os::unix::process::ExitStatusExt::signal(&end_of(name, action));
            assert_eq!(signal, Some(libc::SIGBUS), "{action}");
        }
    }
}
