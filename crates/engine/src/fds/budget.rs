//! The budget of file descriptors of all front-ends together: the permits that are set apart for
//! one device, and those that are set apart for one message.

use rustix::io::Errno;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use tokio::sync::{Semaphore, SemaphorePermit};

/// The maximum of file descriptors in one message (`SCM_MAX_FD` of the kernel).
pub const MESSAGE_FDS_MAX: usize = 253;
/// The maximum of jobs that may wait for a janitor before its session receives the next message.
/// Each job may be the close of a file descriptor that still has a permit, so the budget is large
/// enough for as many more.
pub(super) const JOBS_MAX: usize = 64;

/// Returns how many permits the budget has: the limit of open files, less a quarter of it (and no
/// fewer than 256) for our own.
fn size() -> usize {
    static SIZE: OnceLock<usize> = OnceLock::new();
    *SIZE.get_or_init(|| {
        use rustix::process::{Resource, getrlimit};
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(1 << 20);
        let limit = usize::try_from(limit.min(1 << 28)).unwrap_or(1 << 20);
        let ours = (limit / 4).max(256);
        limit.saturating_sub(ours).max(MESSAGE_FDS_MAX + JOBS_MAX)
    })
}

/// Returns the permits for file descriptors of front-ends.
fn budget() -> &'static Semaphore {
    static BUDGET: OnceLock<Semaphore> = OnceLock::new();
    BUDGET.get_or_init(|| Semaphore::new(size()))
}

/// Permits of the budget that are set apart for the descriptors that the daemon keeps for one
/// device: a device has these permits however many descriptors other domains have.
#[derive(Debug)]
pub struct Reserve(Arc<Part>);

/// The permits that the devices of one domain have in addition to their reserves. The permits come
/// from the free rest of the budget. A domain gets another one only while it has no more of them
/// than the budget has free: so even a domain that takes all it can get leaves others half of the
/// rest.
#[derive(Clone, Debug)]
pub struct Surplus(Arc<Part>);

/// Counts free permits.
#[derive(Debug)]
struct Part {
    free: AtomicU32,
    _permit: Option<SemaphorePermit<'static>>,
}

impl Default for Surplus {
    fn default() -> Self {
        Self(Arc::new(Part { free: AtomicU32::new(u32::MAX), _permit: None }))
    }
}

impl Surplus {
    /// True if a device process or a session of the domain has a clone of this surplus.
    #[must_use]
    pub fn is_used(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    /// Returns how many permits the domain has in addition to its devices' reserves.
    #[must_use]
    pub fn taken(&self) -> u32 {
        u32::MAX - self.0.free.load(Ordering::Relaxed)
    }
}

impl Reserve {
    /// Sets `count` permits apart for a device; at most one in 64 of the budget, and only so many
    /// that a quarter of the budget stays for all.
    #[must_use]
    pub fn of(count: usize) -> Self {
        let left = budget().available_permits().saturating_sub(size() / 4);
        let count = u32::try_from(count.min(size() / 64).min(left)).unwrap_or(0);
        let permit = budget().try_acquire_many(count).ok();
        let free = AtomicU32::new(if permit.is_some() { count } else { 0 });
        Self(Arc::new(Part { free, _permit: permit }))
    }

    /// Returns how many permits of the reserve are free.
    #[must_use]
    pub fn free(&self) -> usize {
        self.0.free.load(Ordering::Relaxed) as usize
    }

    /// Returns permits for `count` descriptors that this process already has: permits of the
    /// reserve, then of the surplus of the domain that sent the descriptors. `None` if there are
    /// too few.
    #[must_use]
    pub fn room(&self, count: usize, surplus: &Surplus) -> Option<FdReservation> {
        let count = u32::try_from(count).ok()?;
        let own = Share::of(&self.0, count);
        let more = count - own.count;
        if more == 0 {
            return Some(FdReservation { own: Some(own), ..FdReservation::default() });
        }
        let left = budget().available_permits().checked_sub(more as usize)?;
        if left < surplus.taken().saturating_add(more) as usize {
            return None;
        }
        let common = budget().try_acquire_many(more).ok()?;
        let surplus = Share::of(&surplus.0, more);
        Some(FdReservation { own: Some(own), surplus: Some(surplus), common: Some(common) })
    }
}

/// Permits of a reserve or surplus, which gets them back on drop.
#[derive(Debug)]
pub(super) struct Share {
    part: Arc<Part>,
    count: u32,
}

impl Share {
    /// Takes `count` permits, or as many as are free.
    fn of(part: &Arc<Part>, count: u32) -> Self {
        let (take, order) = (|free: u32| Some(free - free.min(count)), Ordering::Relaxed);
        let free = part.free.fetch_update(order, order, take);
        Self { part: part.clone(), count: free.map_or(0, |free| free.min(count)) }
    }

    fn split(&mut self) -> Option<Self> {
        self.count = self.count.checked_sub(1)?;
        Some(Self { part: self.part.clone(), count: 1 })
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.part.free.fetch_add(self.count, Ordering::Relaxed);
    }
}

/// The permit for one descriptor: of a reserve, of the common budget, or of both.
pub(super) type Permit = (Option<Share>, Option<SemaphorePermit<'static>>);

/// Permits for file descriptors that this process makes in the place of a front-end's, or copies
/// because of a front-end. They come from the budget of front-ends: otherwise front-ends could use
/// up the descriptors that the daemon keeps for itself. The budget gets them back on drop.
#[derive(Debug)]
pub struct StandIns {
    _permit: SemaphorePermit<'static>,
}

impl StandIns {
    /// Takes `count` permits.
    ///
    /// # Errors
    /// `EMFILE`: front-ends already have all the file descriptors that the budget allows.
    pub fn take(count: u32) -> Result<Self, Errno> {
        let permit = budget().try_acquire_many(count).map_err(|_| Errno::MFILE)?;
        Ok(Self { _permit: permit })
    }

    /// Takes permits for `count` descriptors that this process must keep, or as many as are free.
    #[must_use]
    pub fn up_to(count: u32) -> Self {
        let mut count = count;
        loop {
            let left = u32::try_from(budget().available_permits()).unwrap_or(u32::MAX);
            count = count.min(left);
            if let Ok(permit) = Self::take(count) {
                return permit;
            }
        }
    }
}

/// Permits for the file descriptors of one message.
///
/// If a process has no number left for a descriptor, the kernel closes that descriptor on the
/// thread that receives the message, and such a close may block. Therefore a session receives a
/// message with descriptors only when it has permits for [`MESSAGE_FDS_MAX`] of them.
#[derive(Debug, Default)]
pub struct FdReservation {
    own: Option<Share>,
    surplus: Option<Share>,
    common: Option<SemaphorePermit<'static>>,
}

/// Permits for a message with [`MESSAGE_FDS_MAX`] descriptors.
const ROOM: u32 = 253;
const _: () = assert!(ROOM as usize == MESSAGE_FDS_MAX);

impl FdReservation {
    /// Waits until there are permits for a message. Other sessions may keep their descriptors for
    /// ever: call this with a timeout.
    pub async fn for_message() -> Self {
        Self { common: budget().acquire_many(ROOM).await.ok(), ..Self::default() }
    }

    /// Returns the permits for a message; `None` if too few are free now.
    #[must_use]
    pub fn at_once() -> Option<Self> {
        let common = budget().try_acquire_many(ROOM).ok()?;
        Some(Self { common: Some(common), ..Self::default() })
    }

    /// Splits off the permit for one of the message's descriptors; `None`: all are split off.
    pub(super) fn split(&mut self) -> Option<Permit> {
        if let Some(own) = self.own.as_mut().and_then(Share::split) {
            return Some((Some(own), None));
        }
        let common = self.common.as_mut()?.split(1)?;
        Some((self.surplus.as_mut().and_then(Share::split), Some(common)))
    }

    /// Returns the reservation of a message that has no file descriptors.
    #[must_use]
    pub fn none() -> Self {
        Self::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One test, since the budget is that of the process.
    #[test]
    fn who_keeps_all_that_he_can_leaves_others_their_parts_and_half_of_the_rest() {
        let parts: Vec<_> = (0..64).map(|_| Reserve::of(usize::MAX)).collect();
        assert_eq!(parts[0].free(), size() / 64);
        assert!(parts.iter().map(Reserve::free).sum::<usize>() <= size() - size() / 4);
        assert_eq!(parts[63].free(), 0, "a quarter stays common");
        drop(parts);
        let (bad, good) = (Reserve::of(8), Reserve::of(4));
        assert_eq!((bad.free(), good.free()), (8, 4));
        let (hoarder, honest) = (Surplus::default(), Surplus::default());
        let before = budget().available_permits();
        let mut hoarded = Vec::new();
        while let Some(mut room) = bad.room(8, &hoarder) {
            hoarded.extend((0..8).map(|_| room.split().unwrap()));
            assert!(room.split().is_none());
        }
        let surplus = hoarded.len() - 8;
        assert!((before / 2 - 8..=before / 2).contains(&surplus), "{surplus} of {before}");
        // What exceeds the part of another device is still to be had.
        let room = good.room(12, &honest).unwrap();
        assert_eq!((good.free(), honest.taken()), (0, 8));
        drop((room, hoarded));
        assert_eq!((bad.free(), hoarder.taken(), honest.taken()), (8, 0, 0));
        assert_eq!(budget().available_permits(), before);
    }
}
