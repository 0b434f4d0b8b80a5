//! The counters of a switch's port; each is defined by one line here.

use std::sync::atomic::{AtomicU64, Ordering};

/// A counter to which several queues add by atomic additions, on slow paths only.
#[derive(Debug, Default)]
pub struct Count(AtomicU64);

impl Count {
    /// Adds `n`.
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    /// Returns the present value.
    #[must_use]
    pub fn value(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

macro_rules! port_counters {
    ($($counter:ident = $help:literal,)*) => {
        /// The counters of a port.
        #[derive(Debug, Default)]
        pub struct PortCounters {
            $(#[doc = $help] pub $counter: Count,)*
        }

        impl PortCounters {
            /// Returns every counter: name, help, value.
            #[must_use]
            pub fn all(&self) -> Vec<Counted> {
                vec![$(Counted {
                    name: stringify!($counter),
                    help: $help,
                    value: self.$counter.value(),
                },)*]
            }

            /// Stores values from another process that serves the port, in the order of
            /// [`Self::all`]. A counter without a value is not changed.
            pub fn show(&self, values: &[u64]) {
                let mut values = values.iter();
                $(if let Some(value) = values.next() {
                    self.$counter.0.store(*value, Ordering::Relaxed);
                })*
            }
        }
    };
}

/// A counter's definition and its value.
#[derive(Clone, Copy, Debug)]
pub struct Counted {
    /// The name of the counter.
    pub name: &'static str,
    /// The event that the counter counts, in words for the operator.
    pub help: &'static str,
    /// The present value.
    pub value: u64,
}

port_counters! {
    flooded = "Frames of the port that went to every other port of their VLAN",
    mailed = "Frames that were copied for the port, as they could not be lent",
    segmented = "Frames for the port that its guest does not take whole: cut into segments",
    finished = "Frames for the port whose checksum was completed for its guest",
    credit_out = "Frames of the port that found all of its credit lent",
    stalled = "Times that frames for the port were taken back: it took none for long",
    moves = "Addresses that came to the port from another one",
    flaps = "Frames of the port whose address moves too often to be learnt",
    not_learnt = "Frames of the port whose address was not learnt: no room, or another port's",
    dropped_credit = "Frames of the port that were dropped: the receiver is behind",
    dropped_full = "Frames for the port that were dropped: as many as may wait do",
    dropped_no_queue = "Frames for the port that were dropped: its guest has no queue for them",
    dropped_own = "Frames of the port that were dropped: they go where they come from",
    dropped_flood = "Frames of the port that were dropped: it floods more than it may",
    dropped_spoofed = "Frames of the port that were dropped: they claim to be somebody else's",
    dropped_vlan = "Frames of the port that were dropped: it is not in their VLAN",
    dropped_isolated = "Frames of the port that were dropped: it and the receiver are isolated",
    dropped_reserved = "Frames of the port that were dropped: they end at the next bridge",
    dropped_unfinished = "Frames of or for the port dropped: headers lie, or too long by a tag",
}
