//! `Places`: how many clients the control socket has at a time, in all and of each user. One that
//! waits for nothing makes place for others.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::task::AbortHandle;

/// Clients at a time.
const ALL_MAX: usize = 64;
/// Clients of one user at a time.
const USER_MAX: usize = 16;

/// The places that are taken, in the order in which they were. Clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct Places {
    taken: Arc<Mutex<Vec<Taken>>>,
    next: Arc<AtomicU64>,
}

/// Tells whether a client waits, and for which part of an exchange.
#[derive(Debug, Default)]
pub(super) struct Busy {
    /// An answer to its request.
    pub(super) asks: AtomicBool,
    /// The rest of an answer.
    pub(super) takes: AtomicBool,
}

impl Busy {
    fn is_idle(&self) -> bool {
        !self.asks.load(Ordering::Relaxed) && !self.takes.load(Ordering::Relaxed)
    }
}

#[derive(Debug)]
struct Taken {
    number: u64,
    uid: u32,
    busy: Arc<Busy>,
    /// Ends the client's task.
    task: Option<AbortHandle>,
}

/// A place; free again when this is dropped.
#[derive(Debug)]
pub(super) struct Place {
    places: Places,
    number: u64,
    pub(super) busy: Arc<Busy>,
}

impl Places {
    fn lock(&self) -> MutexGuard<'_, Vec<Taken>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for a client of this user. Where there are too many, the oldest that waits for
    /// nothing loses its place: first among those of this user. None: all others do.
    pub(super) fn take(&self, uid: u32) -> Option<Place> {
        let mut taken = self.lock();
        let of_user = taken.iter().filter(|other| other.uid == uid).count();
        let is_idle = |other: &Taken| other.busy.is_idle();
        let goes = match (of_user >= USER_MAX, taken.len() >= ALL_MAX) {
            (false, false) => None,
            (true, _) => Some(taken.iter().position(|other| other.uid == uid && is_idle(other))?),
            (false, true) => Some(taken.iter().position(is_idle)?),
        };
        if let Some(index) = goes
            && let Some(task) = taken.remove(index).task
        {
            task.abort();
        }
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let busy = Arc::new(Busy::default());
        taken.push(Taken { number, uid, busy: busy.clone(), task: None });
        Some(Place { places: self.clone(), number, busy })
    }

    /// The oldest client that waits for nothing loses its place. False: all wait for something.
    pub(super) fn free_one(&self) -> bool {
        let mut taken = self.lock();
        let idle = taken.iter().position(|other| other.busy.is_idle());
        let Some(index) = idle else { return false };
        if let Some(task) = taken.remove(index).task {
            task.abort();
        }
        true
    }

    /// Notes the task of the client that has taken the last place.
    pub(super) fn serve(&self, task: AbortHandle) {
        if let Some(last) = self.lock().last_mut() {
            last.task = Some(task);
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.lock().retain(|other| other.number != self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn busy(places: &Places, uid: u32) -> Option<Place> {
        let place = places.take(uid)?;
        place.busy.asks.store(true, Ordering::Relaxed);
        Some(place)
    }

    #[test]
    fn a_user_has_sixteen_places_and_all_users_sixty_four() {
        let places = Places::default();
        let mut kept: Vec<_> = (0..16).map(|_| busy(&places, 1).unwrap()).collect();
        assert!(places.take(1).is_none());
        for uid in 2..5 {
            kept.extend((0..16).map(|_| busy(&places, uid).unwrap()));
        }
        assert!(places.take(5).is_none(), "all are taken");
        kept.pop();
        assert!(places.take(5).is_some());
        kept.clear();
        assert!(places.lock().is_empty());
    }

    #[test]
    fn a_client_that_asks_nothing_keeps_no_other_out() {
        let places = Places::default();
        let silent: Vec<_> = (0..16).map(|_| places.take(1).unwrap()).collect();
        let first = silent[0].number;
        let next = places.take(1).unwrap();
        let numbers: Vec<_> = places.lock().iter().map(|taken| taken.number).collect();
        assert!(!numbers.contains(&first) && numbers.contains(&next.number), "{numbers:?}");
        drop(silent);
        assert_eq!(places.lock().len(), 1, "the one that lost its place gives none back");
    }
}
