//! `Switch`: carries frames between the ports of one daemon, with one copy.
//!
//! ```text
//! a transmitq's worker                                         a receiveq's worker
//! send: find the destination      verdict.rs, table.rs, vlan_rules.rs, wire::net::sender
//!   one port, which accepts the frame unchanged
//!     -> a burst in the channel   channel.rs, handoff.rs -> incoming: lends the burst
//!   several ports, or a change                           (device: copies it to its guest)
//!     -> a copy in the copy queue   copy_queue.rs     -> recv: copies it to its guest
//!   rings the doorbell, once for all                     release: the burst goes back
//! reap: the burst is back: its chains go back to the guest
//! ```
//! 1. **A port lends frames and is called; it handles no ring.** A frame in a channel is a list of
//!    slices of its sender's memory. Its first bytes were copied when they were checked; a short
//!    frame is copied whole, and its sender may reuse its memory at once. The receiver's worker
//!    copies the frame to its guest.
//! 2. **No queue waits for another.** A channel is a [`SpscQueue`]; the copy queue's lock is only
//!    tried. A receiver that does not take its frames loses them, and takes at most a part of its
//!    senders' credit, for a bounded time (`sender.rs`).
//! 3. **Order.** Frames from one transmitq to one MAC address go by the channel. They go by the
//!    copy queue only while nothing of the sender is in the channel, and by the channel again only
//!    when the receiver has read the copies.
//! 4. **Memory.** A burst keeps its sender's memory snapshot mapped while frames of it are lent,
//!    and no longer. A receiver has one burst at a time, within one turn of its queue.

mod channel;
mod copy_path;
mod copy_queue;
mod counters;
mod handoff;
mod port;
mod receiver;
mod sender;
mod shared;
mod table;
pub mod uplink;
mod verdict;
mod vlan_rules;

pub use copy_path::CopyPath;
pub use counters::{Count, Counted, PortCounters};
pub use handoff::{SpscQueue, TakeResult};
pub use port::SwitchPort;
pub use table::{ADDRESSES_MAX, PORTS_MAX, Station};
pub use vlan_rules::Vlans;

use copy_queue::CopyInbox;
use manyring_wire::net::rss::Rss;
use manyring_wire::net::{MacAddress, Offloads};
use rustix::time::{ClockId, clock_gettime};
use shared::{Shared, TAKES_ALL, TAKES_CSUM, TAKES_ECN, TAKES_TSO4, TAKES_TSO6};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use table::Table;

/// The number of a port in its switch.
pub type PortId = u16;

/// Default for the seconds after which a MAC address that sends nothing is forgotten.
pub const AGE: u32 = 300;
/// Default for the number of MAC addresses that are learnt behind a port.
pub const MACS_MAX: u32 = 8;
/// Default for the number of frames that a port may flood in a second.
pub const FLOODS_MAX: u32 = 1000;

/// The settings of a switch.
#[derive(Clone, Debug)]
pub struct SwitchOptions {
    /// The name of the switch in the configuration.
    pub name: String,
    /// Seconds after which a MAC address that sends nothing is forgotten, 1 to 65536.
    pub age: u32,
    /// The groups 01:80:c2:00:00:00 to 0f whose frames are forwarded: bit n stands for group n.
    pub group_fwd_mask: u16,
    /// The clock for the age of MAC addresses and the limit of floods.
    pub clock: Clock,
}

/// A clock in milliseconds, from any starting point.
#[derive(Clone)]
pub struct Clock(Arc<dyn Fn() -> u64 + Send + Sync>);

impl Clock {
    /// Makes a clock that calls `now` for the time in milliseconds.
    #[must_use]
    pub fn new(now: impl Fn() -> u64 + Send + Sync + 'static) -> Self {
        Self(Arc::new(now))
    }

    #[inline]
    fn now(&self) -> SwitchTime {
        SwitchTime((self.0)())
    }
}

impl Default for Clock {
    /// Makes the coarse monotonic clock, which needs no system call and is exact to a tick of the
    /// kernel.
    fn default() -> Self {
        Self::new(|| {
            let now = clock_gettime(ClockId::MonotonicCoarse);
            let (seconds, nanos) = (now.tv_sec.cast_unsigned(), now.tv_nsec.cast_unsigned());
            seconds.wrapping_mul(1000).wrapping_add(nanos / 1_000_000)
        })
    }
}

impl std::fmt::Debug for Clock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Clock")
    }
}

/// A time of the switch's clock, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct SwitchTime(u64);

impl SwitchTime {
    #[allow(clippy::cast_possible_truncation, reason = "32 bits of it")]
    fn second(self) -> u32 {
        (self.0 / 1000) as u32
    }
}

/// The settings of a port of a switch.
#[derive(Clone, Debug)]
pub struct PortOptions {
    /// The name of the device or the uplink.
    pub name: String,
    /// Number of queue pairs, 1 or more.
    pub queue_pairs: usize,
    /// The VLANs of the port.
    pub vlans: Vlans,
    /// True if the port exchanges no frames with other isolated ports.
    pub isolated: bool,
    /// The MAC address that is configured for the guest: no other port learns it.
    pub mac: Option<MacAddress>,
    /// The only MAC address with which the guest may send.
    pub only: Option<MacAddress>,
    /// True if the port leads to the host, behind which guests of other hosts are.
    pub is_uplink: bool,
    /// The most MAC addresses that are learnt behind the port.
    pub macs_max: u32,
    /// The most frames that the port may flood in a second.
    pub floods_max: u32,
}

impl PortOptions {
    /// Returns the options of a port with the default of every limit.
    #[must_use]
    pub fn new(name: impl Into<String>, queue_pairs: usize) -> Self {
        Self {
            name: name.into(),
            queue_pairs,
            vlans: Vlans::All,
            isolated: false,
            mac: None,
            only: None,
            is_uplink: false,
            macs_max: MACS_MAX,
            floods_max: FLOODS_MAX,
        }
    }
}

/// Why a switch cannot open a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SwitchError {
    /// The switch has [`PORTS_MAX`] ports.
    #[error("the switch is full: it has 4000 ports, the maximum")]
    Full,
}

/// The offloads of a port, in both directions: checksums and TCP segmentation.
pub const OFFLOADS: Offloads =
    Offloads { csum: true, tso4: true, tso6: true, ecn: true, uso4: false, uso6: false };

/// The ports of a switch, as senders use them; a new map is made for each change.
#[derive(Debug, Default)]
struct Map {
    ports: Vec<Option<Arc<Destination>>>,
    /// The MAC addresses that are configured for ports, sorted.
    pinned: Vec<(MacAddress, PortId)>,
    uplink: Option<PortId>,
}

/// A port and its present receiveqs.
#[derive(Debug)]
struct Destination {
    port: Arc<Shared>,
    inboxes: Vec<Option<Arc<CopyInbox>>>,
    rss: Option<Arc<Rss>>,
}

impl Map {
    fn get(&self, id: PortId) -> Option<&Arc<Destination>> {
        self.ports.get(usize::from(id))?.as_ref()
    }

    fn new(ports: Vec<Option<Arc<Destination>>>) -> Self {
        let all = || ports.iter().flatten().map(|destination| &destination.port);
        let mut pinned: Vec<_> =
            all().filter_map(|port| Some((port.options.mac?, port.id))).collect();
        pinned.sort_unstable();
        let uplink = all().find(|port| port.options.is_uplink).map(|port| port.id);
        Self { ports, pinned, uplink }
    }

    /// Returns the port of `vlan` whose configured MAC address this is. Returns `None` if no port
    /// of `vlan` has this address, or if several have it.
    fn owner(&self, address: &[u8], vlan: u16) -> Option<&Arc<Destination>> {
        let first = self.pinned.partition_point(|(mac, _)| mac[..] < *address);
        let same = self.pinned[first..].iter().take_while(|(mac, _)| mac[..] == *address);
        let mut owners = same.filter_map(|(_, id)| self.get(*id));
        let mut owners = owners.by_ref().filter(|owner| owner.port.options.vlans.has(vlan));
        let owner = owners.next()?;
        owners.next().is_none().then_some(owner)
    }
}

impl Destination {
    /// True if the port has a guest, whose queues are enabled.
    fn is_running(&self) -> bool {
        self.inbox(0, &[]).is_some()
    }

    /// True if the guest uses several queues, so that a frame's flow decides which one gets it.
    #[inline]
    fn is_steered(&self) -> bool {
        self.port.uses_several()
    }

    /// Returns the receiveq for a frame that begins with `start`, and its index. The guest's hash
    /// chooses it. Without a hash, it is that of the pair on which the guest sends the flow. For a
    /// frame without a flow, the sender's queue, `index`, decides.
    #[inline]
    fn inbox(&self, index: usize, start: &[u8]) -> Option<(usize, &Arc<CopyInbox>)> {
        let in_use = self.port.in_use.load(Ordering::Acquire);
        let pair = match (in_use, &self.rss) {
            (0, _) => return None,
            (1, _) => 0,
            // A detached pair takes no frames: the first pair takes them instead.
            (_, Some(rss)) => Some(rss.pair_of(start)).filter(|pair| *pair < in_use).unwrap_or(0),
            (_, None) => self.port.steer.choose(start, in_use).unwrap_or(index % in_use),
        };
        let inbox = self.inboxes.get(pair)?.as_ref()?;
        (!inbox.is_closed()).then_some((pair, inbox))
    }
}

/// A switch: its ports and its table of MAC addresses.
#[derive(Debug)]
pub struct Switch {
    name: String,
    clock: Clock,
    group_fwd_mask: u16,
    table: Table,
    /// Grows with each new map.
    generation: AtomicU64,
    map: Mutex<Arc<Map>>,
}

impl Switch {
    /// Makes a switch without ports.
    #[must_use]
    pub fn new(options: SwitchOptions) -> Arc<Self> {
        Arc::new(Self {
            name: options.name,
            clock: options.clock,
            group_fwd_mask: options.group_fwd_mask,
            table: Table::new(options.age),
            generation: AtomicU64::new(0),
            map: Mutex::default(),
        })
    }

    /// Returns the switch's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Opens a port. Dropping the port removes it from the switch.
    ///
    /// # Errors
    /// [`SwitchError::Full`]: the switch has [`PORTS_MAX`] ports.
    pub fn port(self: &Arc<Self>, options: PortOptions) -> Result<SwitchPort, SwitchError> {
        let mut map = self.map();
        let ports = &map.ports;
        let free = ports.iter().position(Option::is_none).unwrap_or(ports.len());
        if free >= PORTS_MAX {
            return Err(SwitchError::Full);
        }
        let id = PortId::try_from(free).map_err(|_| SwitchError::Full)?;
        let shared = Arc::new(Shared::new(id, options));
        self.redraw(&mut map, &shared, true);
        drop(map);
        Ok(SwitchPort::new(self.clone(), shared))
    }

    /// Returns the MAC addresses that the switch has learnt, each with the name of its port.
    #[must_use]
    pub fn stations(&self) -> Vec<(Station, String)> {
        let map = self.map().clone();
        let named = |station: Station| {
            let name = map.get(station.port)?.port.options.name.clone();
            Some((station, name))
        };
        self.table.list(self.clock.now().second()).into_iter().filter_map(named).collect()
    }

    fn map(&self) -> MutexGuard<'_, Arc<Map>> {
        self.map.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a new map in which `port` has its present state, or is missing (`is_there` is false).
    /// It allocates memory, so only threads that open and close ports call it, never a worker.
    fn redraw(&self, map: &mut Arc<Map>, port: &Arc<Shared>, is_there: bool) {
        let mut ports = map.ports.clone();
        let at = usize::from(port.id);
        if ports.len() <= at {
            ports.resize(at + 1, None);
        }
        let inbox = |slot: &Mutex<Option<Arc<CopyInbox>>>| {
            slot.lock().unwrap_or_else(PoisonError::into_inner).clone()
        };
        let inboxes = port.inboxes.iter().map(inbox).collect();
        let rss = port.rss.lock().unwrap_or_else(PoisonError::into_inner).clone();
        ports[at] = is_there.then(|| Arc::new(Destination { port: port.clone(), inboxes, rss }));
        *map = Arc::new(Map::new(ports));
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// Replaces `seen` by the present map, if the map has changed since `generation`. Returns true
    /// if so. If the map is locked for a change, the sender keeps the old one until its next burst.
    #[inline]
    fn refresh(&self, seen: &mut Arc<Map>, generation: &mut u64) -> bool {
        let now = self.generation.load(Ordering::Acquire);
        if now == *generation {
            return false;
        }
        let Ok(map) = self.map.try_lock() else { return false };
        *seen = map.clone();
        *generation = now;
        true
    }

    /// Removes a port from the map and the table, after it was dropped.
    fn remove(&self, port: &Arc<Shared>) {
        let mut map = self.map();
        self.redraw(&mut map, port, false);
        drop(map);
        self.table.forget(port.id, None);
    }
}

#[cfg(test)]
mod tests;
