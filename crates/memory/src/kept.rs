//! `Kept`: counts the references that a queue keeps mapped, and limits those of its guest.
//!
//! A process has room for a bounded number of pieces that stay mapped (`window.rs`). The guests
//! whose queues keep references **share that room by domain**: a guest's share is the same whatever
//! its number of queues and disks.
//!
//! 1. A guest below its share keeps a reference whenever there is room.
//! 2. A guest may keep more than its share while nobody lacks room. So guests that keep little
//!    leave what they do not use to the others.
//! 3. A guest below its share that finds no room *lacks* it, which is counted. Each queue of a
//!    guest above its share reads the count when it looks for pages to unmap (`persistent.rs`).
//!    While the count rises, the queue keeps no further reference, and gives up half of its part of
//!    what is above the share.
//!
//! A queue that sleeps does not see the count. So it looks again after [`SLEEP_NS`] while its guest
//! keeps more than a [`MUCH`]th of all that may be kept. Unused references are unmapped after a
//! minute in any case.

use crate::window::{has_room_to_keep, room_to_keep};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// The longest sleep of a queue whose guest keeps much, before the queue reads the count again.
pub(crate) const SLEEP_NS: u64 = 1_000_000_000;
/// A guest keeps much if it keeps more pieces than all guests may keep, divided by this.
const MUCH: usize = 16;

/// The guests whose queues keep references, by the domain that lends the pages.
static GUESTS: Mutex<Vec<(Lends, Weak<Guest>)>> = Mutex::new(Vec::new());
/// The number of these guests.
static COUNT: AtomicUsize = AtomicUsize::new(0);
/// How often a guest below its share found no room.
static LACKING: AtomicU64 = AtomicU64::new(0);

/// The domain that lends pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lends {
    /// A domain of the Xen on this machine.
    Domain(u16),
    /// A simulated domain: the device and inode of the file that holds its memory.
    Memory(u64, u64),
}

/// The number of references that all queues of one guest keep mapped.
#[derive(Debug)]
struct Guest {
    kept: AtomicUsize,
}

impl Guest {
    fn of(lends: Lends) -> Arc<Self> {
        let mut guests = GUESTS.lock().unwrap_or_else(PoisonError::into_inner);
        let known = guests.iter().find(|(of, guest)| *of == lends && guest.strong_count() > 0);
        if let Some(guest) = known.and_then(|(_, guest)| guest.upgrade()) {
            return guest;
        }
        let guest = Arc::new(Self { kept: AtomicUsize::new(0) });
        guests.push((lends, Arc::downgrade(&guest)));
        COUNT.fetch_add(1, Ordering::Relaxed);
        guest
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        COUNT.fetch_sub(1, Ordering::Relaxed);
        let mut guests = GUESTS.lock().unwrap_or_else(PoisonError::into_inner);
        guests.retain(|(_, guest)| guest.strong_count() > 0);
    }
}

/// The references that one queue keeps. Drop subtracts them from its guest's number.
#[derive(Debug)]
pub(crate) struct Kept {
    guest: Arc<Guest>,
    /// The number of references that this queue keeps.
    count: usize,
    /// The value of [`LACKING`] at the last [`Self::look`].
    lacking: u64,
    /// True if no guest lacked space between the last two calls of [`Self::look`].
    may_exceed: bool,
}

impl Kept {
    /// Makes the count of a queue that keeps nothing yet. `lends`: the domain of its guest.
    pub(crate) fn new(lends: Lends) -> Self {
        let lacking = LACKING.load(Ordering::Relaxed);
        Self { guest: Guest::of(lends), count: 0, lacking, may_exceed: true }
    }

    /// True if the queue may keep one more reference. `planned`: pieces that are about to be
    /// mapped, and that no window has counted yet.
    pub(crate) fn has_room(&self, planned: usize) -> bool {
        let has_room = has_room_to_keep(planned);
        if self.guest.kept.load(Ordering::Relaxed) >= share() {
            return has_room && self.may_exceed;
        }
        if !has_room {
            LACKING.fetch_add(1, Ordering::Relaxed);
        }
        has_room
    }

    /// Counts one more reference that the queue keeps.
    pub(crate) fn add(&mut self) {
        self.count += 1;
        self.guest.kept.fetch_add(1, Ordering::Relaxed);
    }

    /// Subtracts `count` references that the queue no longer keeps.
    pub(crate) fn remove(&mut self, count: usize) {
        debug_assert!(count <= self.count, "{count} of {} kept references", self.count);
        self.count -= count;
        self.guest.kept.fetch_sub(count, Ordering::Relaxed);
    }

    /// Reads the count of lacking guests. Returns how many references the queue must give up.
    pub(crate) fn look(&mut self) -> usize {
        let lacking = LACKING.load(Ordering::Relaxed);
        self.may_exceed = lacking == self.lacking;
        self.lacking = lacking;
        let kept = self.guest.kept.load(Ordering::Relaxed);
        let above = kept.saturating_sub(share());
        if self.may_exceed || above == 0 {
            return 0;
        }
        (above.div_ceil(2) * self.count).div_ceil(kept)
    }

    /// True if the queue must call [`Self::look`] again, even if it sleeps.
    pub(crate) fn is_much(&self) -> bool {
        self.count > 0 && self.guest.kept.load(Ordering::Relaxed) > room_to_keep() / MUCH
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.remove(self.count);
    }
}

/// Returns how many references a guest may keep, however many other guests keep.
fn share() -> usize {
    room_to_keep() / COUNT.load(Ordering::Relaxed).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_of_one_domain_are_one_guest_as_long_as_one_of_them_is_there() {
        let one = Kept::new(Lends::Domain(901));
        let mut other = Kept::new(Lends::Domain(901));
        let stranger = Kept::new(Lends::Domain(902));
        assert!(Arc::ptr_eq(&one.guest, &other.guest));
        assert!(!Arc::ptr_eq(&one.guest, &stranger.guest));
        other.add();
        other.add();
        assert_eq!(one.guest.kept.load(Ordering::Relaxed), 2);
        drop(other);
        assert_eq!(one.guest.kept.load(Ordering::Relaxed), 0);
        drop(one);
        let guests = GUESTS.lock().unwrap();
        assert!(guests.iter().all(|(lends, _)| *lends != Lends::Domain(901)));
        assert!(guests.iter().any(|(lends, _)| *lends == Lends::Domain(902)));
    }
}
