//! `Places`: bounds how many clients a socket has at a time, in all and for each user. When a bound
//! is reached, a new client replaces the oldest idle one: a client that waits for no answer.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::task::AbortHandle;

/// The most clients of a socket at a time.
const ALL_MAX: usize = 64;
/// The most clients of one user at a time.
const USER_MAX: usize = 16;

/// The connected clients of a socket, the oldest first. Each takes up one *place* of at most
/// [`ALL_MAX`]. Clones share the list.
#[derive(Clone, Debug, Default)]
pub(super) struct Places {
    taken: Arc<Mutex<Vec<Taken>>>,
    next: Arc<AtomicU64>,
}

/// Whether the daemon works on a client's request or answer; a client with neither is idle.
#[derive(Debug, Default)]
pub(super) struct Busy {
    /// True while the daemon handles a request of the client.
    pub(super) asks: AtomicBool,
    /// True while the client has not read all of an answer.
    pub(super) takes: AtomicBool,
}

impl Busy {
    fn is_idle(&self) -> bool {
        !self.asks.load(Ordering::Relaxed) && !self.takes.load(Ordering::Relaxed)
    }
}

/// A client that has a place.
#[derive(Debug)]
struct Taken {
    number: u64,
    uid: u32,
    busy: Arc<Busy>,
    /// Aborts the task that serves the client; `None` until that task has started.
    task: Option<AbortHandle>,
}

/// The place of one client. Dropping this frees the place for another client.
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

    /// Takes a place for a client of this user. At the user's bound, the user's oldest idle client
    /// is disconnected; at the bound of all clients, the oldest idle client. `None` if no such
    /// client is idle.
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

    /// Disconnects the oldest idle client. Returns false if no client is idle.
    pub(super) fn free_one(&self) -> bool {
        let mut taken = self.lock();
        let idle = taken.iter().position(|other| other.busy.is_idle());
        let Some(index) = idle else { return false };
        if let Some(task) = taken.remove(index).task {
            task.abort();
        }
        true
    }

    /// Stores the task that serves the client which took the newest place. The caller must not
    /// await between [`Self::take`] and this call: the newest place would then be another client's.
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
