//! Network queues and the control queue without a daemon: the driver half is the guest, a port
//! that follows a script is the host.

mod churn;
mod control;
mod device;
mod guest;
mod held;
mod late;
mod lending;
mod limits;
#[path = "limits.rs"]
#[allow(clippy::duplicate_mod, reason = "what holds for one kind of port holds for the other")]
mod limits_late;
mod receive;
#[path = "receive.rs"]
#[allow(clippy::duplicate_mod, reason = "what holds for one kind of port holds for the other")]
mod receive_lent;
mod running;
#[path = "running.rs"]
#[allow(clippy::duplicate_mod, reason = "what holds for one kind of port holds for the other")]
mod running_late;
mod state;
mod transmit;
#[path = "transmit.rs"]
#[allow(clippy::duplicate_mod, reason = "what holds for one kind of port holds for the other")]
mod transmit_late;

use super::NetSide;
use super::rules::Filter;
use super::{NetOptions, Rules};
use manyring_backend::net::{
    Frames, GROUP_FRAMES, HostFilter, Incoming, Port, PortRx, PortTx, Readiness, Sent, Stop,
};
use manyring_engine::Moderation;
use manyring_engine::stats::{QueueClass, QueueStats};
use manyring_memory::{
    GuestMemory, GuestSlice, Mapping, RegionSpec, copy_from_slices, copy_to_slices, total_len,
};
use manyring_queue::{DeviceQueue, DriverQueue, QueueConfig, RingAddresses, RingFeatures};
use manyring_wire::net::rss::{Rss, RssConfig};
use manyring_wire::net::{FRAME_SIZE_MAX, HEADER_SIZE, Offloads, RawNetHeader};
use manyring_wire::virtqueue::RING_IDX;
use rustix::io::Errno;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use zerocopy::IntoBytes;

/// Bytes of guest memory, and where buffers begin in it: the ring lies below.
const MEMORY: u64 = 8 << 20;
const DATA: u64 = 0x1_0000;
const USED: u64 = 0xa000;
/// Longest time that a script holds up who calls its port.
const HELD_MS_MAX: usize = 10_000;
/// Everything that can be left unfinished.
const ALL: Offloads =
    Offloads { csum: true, tso4: true, tso6: true, ecn: true, uso4: true, uso6: true };

/// Rules of a guest that takes everything.
fn open_rules() -> Rules {
    Rules {
        link_up: true,
        given: ALL,
        frame_size_max: FRAME_SIZE_MAX,
        room_size: FRAME_SIZE_MAX,
        filter: None,
        hash: None,
    }
}

/// A frame of `len` bytes: broadcast, then bytes that tell `number`.
fn frame(number: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0xff; 6];
    bytes.extend([2, 0, 0, 0, 0, 1, 0x88, 0xb5]);
    let payload = (0u64..).flat_map(|n| (number.wrapping_mul(0x9e37_79b9) ^ n).to_le_bytes());
    bytes.extend(payload.take(len.saturating_sub(bytes.len())));
    bytes.truncate(len);
    bytes
}

/// A frame as by [`frame`] that is TCP over IPv4, so that its checksum may be left open.
fn tcp_frame(number: u64, len: usize) -> Vec<u8> {
    let mut bytes = frame(number, len);
    bytes[12..16].copy_from_slice(&[8, 0, 0x45, 0]);
    bytes[20..24].copy_from_slice(&[0x40, 0, 64, 6]);
    bytes
}

/// The port's answer to the next frame that is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    Take,
    Refuse,
    Misplaced,
    Down,
    Fault,
    Block,
    NoMemory,
}

/// The answers of a port to its calls, and a record of these.
#[derive(Debug, Default)]
struct Script {
    /// The answers to frames; after the last one, every frame is taken.
    sends: VecDeque<Next>,
    /// The answer to every frame after the last one of `sends`, if not [`Next::Take`].
    then: Option<Next>,
    /// Frames that the port takes in one call; 0: all.
    group: usize,
    /// The port looks at the place of partial checksums.
    checks_place: bool,
    /// Header and frame of each that was taken.
    sent: Vec<Vec<u8>>,
    /// The frames and errors of receives; after the last one, `EAGAIN`.
    arrives: VecDeque<Result<Vec<u8>, Errno>>,
    /// Bytes of room that each receive had.
    rooms: Vec<usize>,
    /// A transmitq is opened on a port that finishes later what it takes.
    late: Option<late::Delay>,
    /// A receiveq is opened on a port that lends what arrives.
    lends: bool,
    /// A receiveq is opened on a port that always has something.
    endless: bool,
    /// How many used buffers of this ring the driver could see each time when it was looked.
    watched: Option<Arc<GuestMemory>>,
    seen: Vec<u16>,
    given: Offloads,
    refuses_offloads: bool,
    /// By what the port was told to choose pairs, with the pairs that were attached then.
    rss_calls: Vec<(Option<RssConfig>, Vec<bool>)>,
    refuses_rss: bool,
    /// What the host keeps from the port, and whether frames of VLANs reach it.
    host: (HostFilter, bool),
    attached: Vec<bool>,
    /// The calls of the host, in order.
    attach_calls: Vec<(usize, bool)>,
    offload_calls: Vec<Offloads>,
    /// How long the host's network lock takes.
    slow: Option<std::time::Duration>,
    /// Somebody else has it, until this is false.
    is_held: bool,
    /// The worker is held up too: nothing is sent. It has come to that.
    holds_worker: bool,
    worker_waits: bool,
}

impl Script {
    /// Called whenever the device calls its port.
    fn on_look(&mut self) {
        if let Some(memory) = &self.watched {
            let used = memory.words(USED, 4, 4).unwrap();
            self.seen.push(used.load_u16_acquire(RING_IDX));
        }
    }
}

/// A port that follows its script; clones are the same port.
#[derive(Clone, Debug, Default)]
struct Scripted(Arc<Mutex<Script>>);

impl Scripted {
    fn script(&self) -> std::sync::MutexGuard<'_, Script> {
        self.0.lock().unwrap()
    }

    fn arrive(&self, header: RawNetHeader, frame: &[u8]) {
        self.script().arrives.push_back(Ok([header.as_bytes(), frame].concat()));
    }

    /// The half of what arrives: read, or lent if the script says so.
    fn receiving(&self) -> Box<dyn PortRx> {
        if self.script().lends {
            return Box::new(lending::Lending::new(self.clone()));
        }
        Box::new(self.clone())
    }

    /// The half of what is sent: done with it at once, or later if the script says so.
    fn sending(&self) -> Box<dyn PortTx> {
        let late = self.script().late.clone();
        match late {
            Some(delay) => Box::new(late::Delayed::new(self.clone(), &delay)),
            None => Box::new(self.clone()),
        }
    }

    /// Finishes what is sent later, from the next half on. `tells`: by a timer.
    fn delay(&self, tells: bool) -> manyring_backend::net::late::Grip {
        let delay = late::Delay::new(tells);
        let grip = delay.grip.clone();
        self.script().late = Some(delay);
        grip
    }

    /// The frames that were passed on, with their headers, in the order in which they were.
    fn passed(&self) -> Vec<Vec<u8>> {
        let script = self.script();
        let Some(delay) = &script.late else { return script.sent.clone() };
        // The script's own: those that `transmit` has sent.
        [script.sent.clone(), delay.behind.script().sent.clone()].concat()
    }

    /// The frames that were passed on, without their headers.
    fn sent(&self) -> Vec<Vec<u8>> {
        self.passed().iter().map(|bytes| bytes[HEADER_SIZE..].to_vec()).collect()
    }

    /// Asserts that exactly these frames of 60 bytes were passed on, and in this order unless they
    /// are finished later.
    #[track_caller]
    fn assert_sent(&self, numbers: impl IntoIterator<Item = u64>) {
        let mut sent = self.sent();
        let mut expected: Vec<_> = numbers.into_iter().map(|number| frame(number, 60)).collect();
        if self.script().late.is_some() {
            sent.sort();
            expected.sort();
        }
        assert!(sent == expected, "{} frames, or others than the {}", sent.len(), expected.len());
    }

    fn blocking(&self) {
        // Copy the value: others use the script during the sleep.
        let slow = self.script().slow;
        std::thread::sleep(slow.unwrap_or_default());
        self.wait_while(|script| script.is_held);
    }

    fn wait_while(&self, is_so: impl Fn(&Script) -> bool) {
        // A test that fails ends all the same.
        for _ in 0..HELD_MS_MAX {
            if !is_so(&self.script()) {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
}

impl PortTx for Scripted {
    fn send(&mut self, frames: &Frames, first: usize) -> Sent {
        self.script().worker_waits = true;
        self.wait_while(|script| script.holds_worker);
        let mut script = self.script();
        let mut sent = Sent::default();
        let group = if script.group == 0 { usize::MAX } else { script.group };
        for index in (first..frames.count()).take(group) {
            let then = script.then.unwrap_or(Next::Take);
            let next = script.sends.pop_front().unwrap_or(then);
            script.on_look();
            match next {
                Next::Take => {
                    let mut bytes = vec![0; HEADER_SIZE + frames.len(index)];
                    assert_eq!(copy_from_slices(frames.slices(index), &mut bytes), bytes.len());
                    script.sent.push(bytes);
                }
                Next::Refuse => sent.refused += 1,
                Next::Misplaced => sent.misplaced += 1,
                Next::Down => sent.down += 1,
                Next::Fault => sent.faulted += 1,
                Next::Block => sent.stop = Some(Stop::Blocked),
                Next::NoMemory => sent.stop = Some(Stop::NoMemory),
            }
            if sent.stop.is_some() {
                break;
            }
            sent.taken += 1;
            let is_lost = matches!(next, Next::Refuse | Next::Misplaced | Next::Down | Next::Fault);
            sent.lost |= u64::from(is_lost) << index;
        }
        sent
    }

    fn readiness(&self) -> Readiness<'_> {
        Readiness::Never
    }

    fn checks_place(&self) -> bool {
        self.script().checks_place
    }
}

impl PortRx for Scripted {
    fn recv(&mut self, buffers: &[GuestSlice]) -> Result<usize, Errno> {
        let mut script = self.script();
        script.on_look();
        let bytes = script.arrives.pop_front().unwrap_or(Err(Errno::AGAIN))?;
        script.rooms.push(usize::try_from(total_len(buffers)).unwrap());
        Ok(copy_to_slices(buffers, &bytes))
    }

    fn readiness(&self) -> Readiness<'_> {
        Readiness::Never
    }
}

impl Port for Scripted {
    fn kind(&self) -> &'static str {
        "scripted"
    }

    fn queue_pairs(&self) -> usize {
        self.script().attached.len()
    }

    fn taken(&self) -> Offloads {
        ALL
    }

    fn given(&self) -> Offloads {
        ALL
    }

    fn mtu(&self) -> Option<u16> {
        None
    }

    fn open_tx(&self, _: usize) -> Result<Box<dyn PortTx>, Errno> {
        Ok(self.sending())
    }

    fn open_rx(&self, _: usize) -> Result<Box<dyn PortRx>, Errno> {
        if self.script().endless {
            return Ok(Box::new(churn::Endless));
        }
        Ok(self.receiving())
    }

    fn set_offloads(&self, offloads: Offloads) -> Result<(), Errno> {
        self.blocking();
        let mut script = self.script();
        if script.refuses_offloads {
            return Err(Errno::INVAL);
        }
        script.given = offloads;
        script.offload_calls.push(offloads);
        Ok(())
    }

    fn set_attached(&self, index: usize, attached: bool) -> Result<(), Errno> {
        self.blocking();
        let mut script = self.script();
        script.attached[index] = attached;
        script.attach_calls.push((index, attached));
        Ok(())
    }

    fn can_hash(&self) -> bool {
        true
    }

    fn set_rss(&self, rss: Option<Arc<Rss>>) -> Result<(), Errno> {
        let mut script = self.script();
        if script.refuses_rss {
            return Err(Errno::PERM);
        }
        let attached = script.attached.clone();
        script.rss_calls.push((rss.map(|rss| rss.config().clone()), attached));
        Ok(())
    }

    fn host_filter(&self) -> HostFilter {
        self.script().host.0
    }

    fn carries_vlan(&self, _: u16) -> bool {
        self.script().host.1
    }

    fn set_mtu(&self, _: u16) -> Result<(), Errno> {
        Ok(())
    }

    fn set_link(&self, _: bool) {}

    fn transmit(&self, frame: &[u8]) -> Result<(), Errno> {
        self.script().sent.push([&[0; HEADER_SIZE], frame].concat());
        Ok(())
    }
}

/// A device of `queue_pairs` pairs.
fn options(queue_pairs: usize) -> NetOptions {
    let mac = [2, 0, 0, 0, 0, 9];
    NetOptions {
        name: "test".to_owned(),
        queue_pairs,
        mac,
        hash_report: true,
        ..NetOptions::default()
    }
}

/// Guest memory with one ring in it.
struct Ring {
    mapping: Arc<Mapping>,
    memory: Arc<GuestMemory>,
    config: QueueConfig,
    driver: DriverQueue,
    stats: Arc<QueueStats>,
}

impl Ring {
    fn new(size: u16, event_idx: bool) -> Self {
        let mapping = Arc::new(Mapping::anonymous(MEMORY).unwrap());
        let spec = RegionSpec { guest_addr: 0, size: MEMORY, user_addr: 0, mmap_offset: 0 };
        let memory = GuestMemory::default().with_mapping(spec, mapping.clone()).unwrap();
        let config = QueueConfig {
            size,
            addresses: RingAddresses { descriptor: 0, available: 0x8000, used: USED },
            base: 0.into(),
            // Every test of rings with EVENT_IDX has its chains back in order.
            features: RingFeatures {
                event_idx,
                indirect: true,
                in_order: event_idx,
                packed: false,
            },
        };
        Self {
            driver: DriverQueue::new(config, &memory).unwrap(),
            memory: Arc::new(memory),
            mapping,
            config,
            stats: Arc::new(QueueStats::new(QueueClass::Net)),
        }
    }

    fn device_half(&self) -> DeviceQueue {
        DeviceQueue::new(self.config, self.memory.clone()).unwrap()
    }

    fn write(&self, addr: u64, bytes: &[u8]) {
        self.slice(addr, bytes.len()).write_from(bytes);
    }

    fn read(&self, addr: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.slice(addr, len).read_into(&mut bytes);
        bytes
    }

    fn slice(&self, addr: u64, len: usize) -> GuestSlice<'_> {
        self.mapping.slice(usize::try_from(addr).unwrap(), len).unwrap()
    }
}

/// A length as a descriptor says it.
fn len32(len: usize) -> u32 {
    u32::try_from(len).unwrap()
}

/// A filter that passes the broadcast only.
fn broadcast_only() -> Filter {
    let mut filter = Filter::new([2, 0, 0, 0, 0, 9], false);
    filter.set_mode(manyring_wire::net::RxMode::Promisc, false);
    filter
}
