//! The budget of file descriptors of all front-ends together: parts of it that are set apart for
//! one device, and the part of one message.

use rustix::io::Errno;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use tokio::sync::{Semaphore, SemaphorePermit};

/// File descriptors of one message at most (`SCM_MAX_FD` of the kernel).
pub const MESSAGE_FDS_MAX: usize = 253;
/// Jobs that may wait for a janitor before its session receives the next message. Each may be the
/// close of a file descriptor that still counts, so the budget has room for this number of them.
pub(super) const JOBS_MAX: usize = 64;

/// How many permits the budget has: the limit of open files, less a quarter of it (and no fewer
/// than 256) for our own.
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

/// Permits for file descriptors of front-ends.
fn budget() -> &'static Semaphore {
    static BUDGET: OnceLock<Semaphore> = OnceLock::new();
    BUDGET.get_or_init(|| Semaphore::new(size()))
}

/// A part of the budget that is set apart for the descriptors that are kept of one device: however
/// many those of other domains are, it is there.
#[derive(Debug)]
pub struct Reserve(Arc<Part>);

/// The descriptors that the devices of one domain have beyond their parts. They come from what is
/// left of the budget, and are never more than what they leave there: so a domain that keeps as
/// many as it can leaves others half of it.
#[derive(Clone, Debug)]
pub struct Surplus(Arc<Part>);

/// Permits that are free.
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
    /// True if a device process or a session of the domain has it.
    #[must_use]
    pub fn is_used(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    /// The descriptors that the domain has beyond the parts of its devices.
    #[must_use]
    pub fn taken(&self) -> u32 {
        u32::MAX - self.0.free.load(Ordering::Relaxed)
    }
}

impl Reserve {
    /// Sets this many permits apart; at most one in 64 of the budget, and no more than leave a
    /// quarter of it to all.
    #[must_use]
    pub fn of(count: usize) -> Self {
        let left = budget().available_permits().saturating_sub(size() / 4);
        let count = u32::try_from(count.min(size() / 64).min(left)).unwrap_or(0);
        let permit = budget().try_acquire_many(count).ok();
        let free = AtomicU32::new(if permit.is_some() { count } else { 0 });
        Self(Arc::new(Part { free, _permit: permit }))
    }

    /// The permits of the part that are free.
    #[must_use]
    pub fn free(&self) -> usize {
        self.0.free.load(Ordering::Relaxed) as usize
    }

    /// Room for this many descriptors that are here already: of the part, and then of the
    /// surplus of the domain that sent them. `None` if there is too little.
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

/// Permits of a part, which gets them back on drop.
#[derive(Debug)]
pub(super) struct Share {
    part: Arc<Part>,
    count: u32,
}

impl Share {
    /// As many of `count` as are free.
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

/// The permit for one descriptor: of a part, of all, or of both.
pub(super) type Permit = (Option<Share>, Option<SemaphorePermit<'static>>);

/// Permits for file descriptors that this process makes in the place of a front-end's, or copies
/// because of a front-end. They come from the budget of front-ends, which could otherwise use up
/// the descriptors that the daemon keeps for itself. The budget gets them back on drop.
#[derive(Debug)]
pub struct StandIns {
    _permit: SemaphorePermit<'static>,
}

impl StandIns {
    /// # Errors
    /// `EMFILE`: front-ends already have all the file descriptors that the budget allows.
    pub fn take(count: u32) -> Result<Self, Errno> {
        let permit = budget().try_acquire_many(count).map_err(|_| Errno::MFILE)?;
        Ok(Self { _permit: permit })
    }

    /// For descriptors that are here already and have to stay: as many permits as there are.
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

/// FdReservation for the file descriptors of one message.
///
/// If a process has no number left for an fd, the kernel closes that fd on the thread that receives
/// the message, and such a close may block. Therefore nobody receives a message with fds unless
/// there is room for [`MESSAGE_FDS_MAX`] of them.
#[derive(Debug, Default)]
pub struct FdReservation {
    own: Option<Share>,
    surplus: Option<Share>,
    common: Option<SemaphorePermit<'static>>,
}

/// Permits for a message with [`MESSAGE_FDS_MAX`] fds.
const ROOM: u32 = 253;
const _: () = assert!(ROOM as usize == MESSAGE_FDS_MAX);

impl FdReservation {
    /// Waits until there is room for a message. Other sessions may keep their fds for ever: call
    /// this with a timeout.
    pub async fn for_message() -> Self {
        Self { common: budget().acquire_many(ROOM).await.ok(), ..Self::default() }
    }

    /// FdReservation for a message; `None` if there is too little now.
    #[must_use]
    pub fn at_once() -> Option<Self> {
        let common = budget().try_acquire_many(ROOM).ok()?;
        Some(Self { common: Some(common), ..Self::default() })
    }

    /// The permit for one of the message's descriptors; `None` once all of the room is split off.
    pub(super) fn split(&mut self) -> Option<Permit> {
        if let Some(own) = self.own.as_mut().and_then(Share::split) {
            return Some((Some(own), None));
        }
        let common = self.common.as_mut()?.split(1)?;
        Some((self.surplus.as_mut().and_then(Share::split), Some(common)))
    }

    /// For a message that has no file descriptors.
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
