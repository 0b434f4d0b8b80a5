//! `Events`: the latest events of devices, for clients that wait for them.

use serde::Serialize;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::watch;
use utoipa::ToSchema;

/// The number of events that are kept; older ones are dropped.
const EVENTS_MAX: usize = 1024;

/// A change of a device's state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub(crate) struct Event {
    /// The number of the event: 1 for the first, and one more for each later one.
    pub(crate) number: u64,
    pub(crate) device: String,
    /// `serving`, `waiting` or `failed` (its state has changed), `removed`, `connected`, `left`.
    pub(crate) event: &'static str,
    /// Why the device is not served; `None` if the event tells no reason.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reason: Option<String>,
}

/// The events after a given number.
#[derive(Debug, Serialize, ToSchema)]
pub struct Since {
    /// The number of the last event, for `since` of the next request.
    pub(crate) last: u64,
    /// True if events after `since` were dropped: the client must read the devices instead.
    pub(crate) lost: bool,
    pub(crate) events: Vec<Event>,
}

/// The latest events of all devices. Clones share them.
#[derive(Clone, Debug)]
pub struct Events {
    kept: Arc<Mutex<VecDeque<Event>>>,
    last: Arc<watch::Sender<u64>>,
}

impl Default for Events {
    fn default() -> Self {
        Self { kept: Arc::default(), last: Arc::new(watch::Sender::new(0)) }
    }
}

impl Events {
    fn lock(&self) -> MutexGuard<'_, VecDeque<Event>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records an event, and wakes every client that waits for one.
    pub(crate) fn tell(&self, device: &str, event: &'static str, reason: Option<String>) {
        let mut kept = self.lock();
        let number = *self.last.borrow() + 1;
        if kept.len() == EVENTS_MAX {
            kept.pop_front();
        }
        kept.push_back(Event { number, device: device.to_owned(), event, reason });
        self.last.send_replace(number);
    }

    /// Returns the events after number `since`.
    pub fn since(&self, since: u64) -> Since {
        let kept = self.lock();
        let last = *self.last.borrow();
        let oldest = kept.front().map_or(last + 1, |event| event.number);
        // A number above the last one comes from a client of an earlier process.
        let lost = since > last || since + 1 < oldest;
        let is_new = |event: &&Event| lost || event.number > since;
        Since { last, lost, events: kept.iter().filter(is_new).cloned().collect() }
    }

    /// Returns when there are events that a client which knows number `since` has not seen.
    pub async fn wait(&self, since: u64) {
        let _ = self.last.subscribe().wait_for(|last| *last != since).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_numbered_and_the_oldest_are_forgotten() {
        let events = Events::default();
        assert_eq!((events.since(0).last, events.since(0).lost), (0, false));
        for _ in 0..EVENTS_MAX + 10 {
            events.tell("a", "connected", None);
        }
        let last = EVENTS_MAX as u64 + 10;
        let numbers = |since| -> Vec<_> {
            events.since(since).events.iter().map(|event| event.number).collect()
        };
        assert_eq!(numbers(last - 2), [last - 1, last]);
        assert_eq!((numbers(last), events.since(last).lost), (vec![], false));
        assert_eq!((events.since(10).lost, numbers(10).len()), (false, EVENTS_MAX));
        assert!(events.since(9).lost);
        let earlier = events.since(last + 1);
        assert_eq!((earlier.lost, earlier.events.len()), (true, EVENTS_MAX));
    }
}
