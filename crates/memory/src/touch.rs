//! Which threads may touch guest memory, and which may unmap it: checked in debug builds.
//!
//! A page fault in guest memory has no bound in time: it waits while another process punches a hole
//! into the file, for one. A thread that touches the memory of a guest waits with it, and so does
//! everybody who waits for that thread. To unmap a large region takes long as well. So a thread
//! that all guests share, such as the control thread, does neither: workers and threads of disks
//! touch guest memory, and janitors unmap it.
//!
//! A comment would not keep that so. In a debug build, the daemon says [`guard_memory`] when it
//! starts, and from then on its process ends when a thread touches or unmaps guest memory and has
//! not said that it may: every test that runs the program checks every access.

#[cfg(debug_assertions)]
use std::cell::Cell;
#[cfg(debug_assertions)]
use std::sync::atomic::{AtomicBool, Ordering};

/// The ways in which a thread may use guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Duty {
    /// None: guests of all devices wait for this thread.
    Control,
    /// Read and write: workers, and threads that belong to one disk.
    Touch,
    /// Map and unmap: the janitor of a device.
    Map,
    /// All: a thread that exists for one call.
    Both,
}

#[cfg(debug_assertions)]
static IS_GUARDED: AtomicBool = AtomicBool::new(false);

#[cfg(debug_assertions)]
thread_local! {
    static DUTY: Cell<Duty> = const { Cell::new(Duty::Control) };
}

/// From now on, this process ends if a thread uses guest memory in a way that its [`Duty`] does not
/// allow. In a release build this function does nothing.
pub fn guard_memory() {
    #[cfg(debug_assertions)]
    IS_GUARDED.store(true, Ordering::Relaxed);
}

/// Sets the duty of the calling thread. A thread without a duty may not use guest memory.
pub fn take_duty(duty: Duty) {
    #[cfg(debug_assertions)]
    DUTY.set(duty);
    #[cfg(not(debug_assertions))]
    let _ = duty;
}

/// Makes `call`, which uses private memory only: a [`Mapping::anonymous`](crate::Mapping), which is
/// accessed in the same way as guest memory.
pub fn in_own_memory<T>(call: impl FnOnce() -> T) -> T {
    #[cfg(debug_assertions)]
    let former = DUTY.replace(Duty::Both);
    let result = call();
    #[cfg(debug_assertions)]
    DUTY.set(former);
    result
}

/// Checks that the calling thread may touch guest memory.
#[inline]
pub(crate) fn touched() {
    #[cfg(debug_assertions)]
    check("touches", Duty::Touch);
}

/// Checks that the calling thread may unmap guest memory.
#[inline]
pub(crate) fn unmapped() {
    #[cfg(debug_assertions)]
    check("unmaps", Duty::Map);
}

#[cfg(debug_assertions)]
fn check(verb: &str, needed: Duty) {
    if !IS_GUARDED.load(Ordering::Relaxed) {
        return;
    }
    // An ending thread has no duty any more while its thread-local variables are dropped.
    let duty = DUTY.try_with(Cell::get).unwrap_or(Duty::Both);
    if duty != needed && duty != Duty::Both {
        // A panic alone could end only one task, and be overlooked.
        let _ = std::panic::catch_unwind(|| {
            let thread = std::thread::current();
            let name = thread.name().unwrap_or("without a name");
            panic!("the thread {name} {verb} guest memory, and others wait for it");
        });
        std::process::abort();
    }
}
