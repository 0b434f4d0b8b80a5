//! `Shared`: the state that all queues of a port share: limits, counters, and the guest's settings.

use super::copy_queue::CopyInbox;
use super::{PortCounters, PortId, PortOptions, SwitchTime};
use crate::net::steer::Steer;
use manyring_wire::net::Offloads;
use manyring_wire::net::rss::Rss;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// The state of a port that all of its queues share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) id: PortId,
    pub(super) options: PortOptions,
    pub(super) counters: PortCounters,
    /// The number of MAC addresses that the table has learnt behind the port.
    pub(super) macs: AtomicU32,
    /// The second in which the old MAC addresses of the port were last removed from the table.
    pub(super) swept: AtomicU32,
    /// The second for which floods are counted (high 32 bits), and their number (low 32 bits).
    flood: AtomicU64,
    /// The `TAKES_*` bits of the offloads that the guest accepts.
    pub(super) takes: AtomicU8,
    /// The time until which the guest is lent no frames, because it has held frames for too long,
    /// and the length of that rest, both in milliseconds.
    pub(super) rests_until: AtomicU64,
    rest: AtomicU64,
    /// Which pairs the guest uses, and how many of them in a row from the first one on.
    pub(super) attached: Vec<AtomicBool>,
    pub(super) in_use: AtomicUsize,
    pub(super) inboxes: Vec<Mutex<Option<Arc<CopyInbox>>>>,
    /// The pair on which the guest sends each flow.
    pub(super) steer: Steer,
    /// The RSS configuration of the guest; `None`: it has set none. With one, `steer` learns no
    /// flows.
    pub(super) rss: Mutex<Option<Arc<Rss>>>,
}

/// Rests of a guest that has held frames for too long, in milliseconds: the first one, the longest
/// one, and the time without a rest after which the next one counts as the first again.
const REST_MS: u64 = 1000;
const REST_MAX_MS: u64 = 8000;
const FORGIVEN_MS: u64 = 60_000;

pub(super) const TAKES_CSUM: u8 = 1;
pub(super) const TAKES_TSO4: u8 = 2;
pub(super) const TAKES_TSO6: u8 = 4;
pub(super) const TAKES_ECN: u8 = 8;
pub(super) const TAKES_ALL: u8 = TAKES_CSUM | TAKES_TSO4 | TAKES_TSO6 | TAKES_ECN;

impl Shared {
    pub(super) fn new(id: PortId, options: PortOptions) -> Self {
        let pairs = options.queue_pairs;
        Self {
            id,
            options,
            counters: PortCounters::default(),
            macs: AtomicU32::new(0),
            swept: AtomicU32::new(u32::MAX),
            flood: AtomicU64::new(0),
            takes: AtomicU8::new(0),
            rests_until: AtomicU64::new(0),
            rest: AtomicU64::new(0),
            attached: (0..pairs).map(|_| AtomicBool::new(false)).collect(),
            in_use: AtomicUsize::new(0),
            inboxes: (0..pairs).map(|_| Mutex::new(None)).collect(),
            steer: Steer::new(),
            rss: Mutex::default(),
        }
    }

    pub(super) fn set_takes(&self, takes: Offloads) {
        let bit = |is_set: bool, bit: u8| if is_set { bit } else { 0 };
        let bits = bit(takes.csum, TAKES_CSUM)
            | bit(takes.tso4, TAKES_TSO4)
            | bit(takes.tso6, TAKES_TSO6)
            | bit(takes.ecn, TAKES_ECN);
        self.takes.store(bits, Ordering::Release);
    }

    pub(super) fn takes(&self) -> u8 {
        self.takes.load(Ordering::Acquire)
    }

    pub(super) fn attach(&self, index: usize, attached: bool) -> Option<()> {
        self.attached.get(index)?.store(attached, Ordering::Release);
        let in_use = self.attached.iter().take_while(|pair| pair.load(Ordering::Acquire)).count();
        self.in_use.store(in_use, Ordering::Release);
        Some(())
    }

    /// Begins a rest of the guest, which has held lent frames for too long. Returns the time until
    /// which it gets only copies. Held frames can stall a sender with `IN_ORDER`, so each rest is
    /// twice as long as the last: a guest cannot stall its senders most of the time.
    pub(super) fn rest(&self, now: SwitchTime) -> SwitchTime {
        let until = self.rests_until.load(Ordering::Relaxed);
        if now.0 < until {
            // Another sender has begun this rest already.
            return SwitchTime(until);
        }
        let is_new = now.0.saturating_sub(until) > FORGIVEN_MS;
        let last = if is_new { 0 } else { self.rest.load(Ordering::Relaxed) };
        let rest = (last * 2).clamp(REST_MS, REST_MAX_MS);
        self.rest.store(rest, Ordering::Relaxed);
        self.rests_until.store(now.0 + rest, Ordering::Relaxed);
        SwitchTime(now.0 + rest)
    }

    /// True if the guest uses several queues.
    #[inline]
    pub(super) fn uses_several(&self) -> bool {
        self.in_use.load(Ordering::Relaxed) > 1
    }

    /// True if the port may flood one more frame in this second; then counts it.
    pub(super) fn may_flood(&self, second: u32) -> bool {
        let old = self.flood.load(Ordering::Relaxed);
        let count = if old >> 32 == u64::from(second) { old & 0xffff_ffff } else { 0 };
        if count >= u64::from(self.options.floods_max) {
            return false;
        }
        // If two queues add at the same time, one flood may be missed in the count.
        self.flood.store(u64::from(second) << 32 | (count + 1), Ordering::Relaxed);
        true
    }
}
