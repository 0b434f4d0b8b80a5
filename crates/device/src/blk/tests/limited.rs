//! A queue with a limit: refused requests stay in the ring in their order, cost nothing while they
//! wait, and delay neither a stop nor a change.

use super::in_flight_max::{ADDRESSES, BEHIND, MEMORY, RING};
use super::*;
use manyring_engine::limit::{Group, Rates};
use manyring_engine::policy::polling::Decision;
use manyring_engine::solo::Run;
use manyring_engine::{Activation, Limit, Order, QueueIo, RunningQueue, Way};
use manyring_queue::Base;
use tokio::sync::{mpsc, oneshot};

const SECOND_NS: u64 = 1_000_000_000;
const MS_NS: u64 = 1_000_000;

/// A disk whose ring holds requests, and its queue without a worker.
struct Rig {
    mapping: Arc<Mapping>,
    driver: DriverQueue,
    device: BlkDevice,
    queue: RunningQueue<DeviceQueue, BlkQueue>,
    wait: Wait,
}

impl Rig {
    fn new(rates: Rates, group: Option<&Arc<Group>>) -> Self {
        let mapping = Arc::new(Mapping::anonymous(MEMORY as u64).unwrap());
        let spec = RegionSpec { guest_addr: 0, size: MEMORY as u64, user_addr: 0, mmap_offset: 0 };
        let memory = Arc::new(GuestMemory::default().with_mapping(spec, mapping.clone()).unwrap());
        let features = RingFeatures::default();
        let config = QueueConfig { size: RING, addresses: ADDRESSES, base: 0.into(), features };
        let device = Guest::plain().device;
        device.limit().set(rates, group, SECOND_NS);
        let disk = NullDisk::new(DISK_SIZE).open_queue(false).unwrap();
        let blk = BlkQueue::new(disk, device.shared.clone(), memory.clone());
        let eventfd = rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap();
        let activation = Activation {
            index: 0,
            queue: DeviceQueue::new(config, memory.clone()).unwrap(),
            addresses: ADDRESSES,
            kick: Some(manyring_engine::Kick::new(eventfd).unwrap()),
            call: None,
            err: None,
            enabled: true,
            features: 0,
            events: mpsc::channel(1).0,
        };
        let mut queue = RunningQueue::new(activation, blk, Arc::new(QueueStats::default()));
        let mut wait = Wait::new(false).unwrap();
        queue.attach(&mut QueueIo::new(&mut wait, 0, 0, SECOND_NS));
        let driver = DriverQueue::new(config, &memory).unwrap();
        Self { mapping, driver, device, queue, wait }
    }

    /// Adds requests of this kind with `len` bytes of data each.
    fn add(&mut self, kind: u32, len: u32, count: usize) {
        let at = BEHIND - 16 * u64::from(kind + 1);
        let header = self.mapping.slice(usize::try_from(at).unwrap(), 16).unwrap();
        header.write_from(&[&kind.to_le_bytes()[..], &[0; 12]].concat());
        for _ in 0..count {
            let (mut read, mut write) = (vec![(at, 16)], Vec::new());
            let is_out = [VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_DISCARD].contains(&kind);
            let data = if is_out { &mut read } else { &mut write };
            if len > 0 {
                data.push((0x1000, len));
            }
            write.push((BEHIND, 1));
            self.driver.add(&read, &write).unwrap();
        }
        self.driver.publish();
    }

    /// Turns at this time until one has found nothing. Returns how many requests came back.
    fn serve(&mut self, now_ns: u64) -> usize {
        while self.queue.turn(&mut QueueIo::new(&mut self.wait, 0, 0, now_ns)).worked {}
        std::iter::from_fn(|| self.driver.take_used()).count()
    }

    /// Settles beside neighbours that are busy, as a queue without work at once.
    fn settles(&mut self, now_ns: u64) -> bool {
        assert!(self.queue.is_overdue(now_ns), "it has nothing to do for now");
        self.queue.settle(Decision::Sleep, false, &mut QueueIo::new(&mut self.wait, 0, 0, now_ns))
    }

    fn base(&self) -> Base {
        self.queue.base()
    }
}

fn ops(read: u64, write: u64, both: u64) -> Rates {
    Rates { ops: [read, write, both], ..Rates::default() }
}

#[test]
fn what_is_refused_stays_in_the_ring_and_the_queue_sleeps_until_its_time() {
    let mut rig = Rig::new(ops(100, 0, 0), None);
    rig.add(VIRTIO_BLK_T_IN, 512, 20);
    assert_eq!((rig.serve(SECOND_NS), rig.base()), (1, 1.into()));
    assert!(rig.settles(SECOND_NS) && !rig.queue.is_hot());
    assert_eq!(rig.queue.deadline_ns(), Some(SECOND_NS + 10 * MS_NS));
    // Neither an event of its disk nor a turn before its time lets one pass.
    rig.queue.wake(SECOND_NS + MS_NS);
    assert_eq!(rig.serve(SECOND_NS + MS_NS), 0);
    // It comes late by less than the credit, and takes what has come.
    assert_eq!(rig.serve(SECOND_NS + 40 * MS_NS), 4);
    assert_eq!((rig.base(), rig.queue.stats().limited.value()), (5.into(), 2));
    assert_eq!(rig.queue.stats().limited_ns.value(), 40 * MS_NS);
    // It was away for long: the credit is kept, and no more beside the request that it waited with.
    assert_eq!(rig.serve(9 * SECOND_NS), 7);
    assert_eq!(rig.queue.stats().in_flight.value(), 0);
}

#[test]
fn a_queue_that_waits_for_its_limit_stops_at_once_and_its_base_names_the_rest() {
    let mut rig = Rig::new(ops(0, 0, 1), None);
    rig.add(VIRTIO_BLK_T_OUT, 4096, 9);
    assert_eq!(rig.serve(SECOND_NS), 1);
    rig.queue.drain();
    assert!(rig.queue.is_drained());
    assert_eq!(rig.base(), 1.into());
    assert_eq!((rig.serve(SECOND_NS), rig.queue.deadline_ns()), (0, None));
}

#[test]
fn a_queue_that_waits_far_into_the_future_goes_on_as_soon_as_its_limit_is_changed() {
    let mut rig = Rig::new(Rates { bytes: [0, 0, 1], ..Rates::default() }, None);
    rig.add(VIRTIO_BLK_T_OUT, 4096, 50);
    assert_eq!(rig.serve(SECOND_NS), 1, "a request above the bucket passes");
    assert!(rig.settles(SECOND_NS));
    assert_eq!(rig.queue.deadline_ns(), Some(4097 * SECOND_NS));
    let (reply, mut told) = oneshot::channel();
    let now_ns = SECOND_NS + MS_NS;
    rig.device.limit().set(Rates::default(), None, now_ns);
    rig.queue.heed(Order::Refresh(reply), &mut QueueIo::new(&mut rig.wait, 0, 0, now_ns));
    assert!(told.try_recv().is_ok() && rig.queue.is_hot());
    assert_eq!(rig.serve(now_ns), 49);
    assert!(rig.queue.deadline_ns().is_none());
}

#[test]
fn a_flush_is_free_a_discard_has_no_bytes_and_each_way_has_its_own_limit() {
    let mut rig = Rig::new(ops(1, 2, 0), None);
    rig.add(VIRTIO_BLK_T_FLUSH, 0, 70);
    rig.add(VIRTIO_BLK_T_GET_ID, 20, 3);
    assert_eq!(rig.serve(SECOND_NS), 73);
    rig.add(VIRTIO_BLK_T_IN, 512, 1);
    rig.add(VIRTIO_BLK_T_OUT, 512, 1);
    assert_eq!(rig.serve(SECOND_NS), 2);
    // The write was half a second of its own limit; a read would have to wait for a whole one.
    rig.add(VIRTIO_BLK_T_OUT, 512, 1);
    rig.add(VIRTIO_BLK_T_IN, 512, 1);
    assert_eq!(rig.serve(SECOND_NS + 499 * MS_NS), 0);
    assert_eq!(rig.serve(SECOND_NS + 500 * MS_NS), 1);
    assert_eq!(rig.serve(2 * SECOND_NS), 1);
    // Bytes alone: a range has none.
    let mut rig = Rig::new(Rates { bytes: [0, 1, 0], ..Rates::default() }, None);
    let segment = rig.mapping.slice(0x1000, 16).unwrap();
    segment.write_from(&[&[0; 8][..], &8u32.to_le_bytes(), &[0; 4]].concat());
    rig.add(VIRTIO_BLK_T_DISCARD, 16, 9);
    rig.add(VIRTIO_BLK_T_OUT, 512, 1);
    rig.add(VIRTIO_BLK_T_DISCARD, 16, 9);
    assert_eq!(rig.serve(SECOND_NS), 10, "those behind the write wait with its debt");
    assert_eq!(rig.serve(513 * SECOND_NS), 9);
}

#[test]
fn a_request_that_the_guest_makes_longer_after_the_look_is_charged_as_it_was_served() {
    let limit = Arc::new(Limit::default());
    limit.set(Rates { ops: [1000; 3], bytes: [0, 0, 1 << 20], burst_ms: 0 }, None, SECOND_NS);
    let (mut gate, stats) = (limit.gate().unwrap(), QueueStats::default());
    assert!(gate.admits(Way::Read, 512, SECOND_NS, &stats));
    // Nine tenths of a second, and as a write.
    gate.settle([(0, 0), (1, 943_718)], SECOND_NS);
    assert!(!gate.passes(Way::Read, SECOND_NS + 899 * MS_NS, &stats));
    assert!(gate.passes(Way::Read, SECOND_NS + 901 * MS_NS, &stats));
    // And one that was put back is not charged.
    assert!(gate.admits(Way::Read, 512 << 10, 3 * SECOND_NS, &stats));
    gate.settle([(0, 0); 2], 3 * SECOND_NS);
    assert!(gate.admits(Way::Read, 512, 3 * SECOND_NS, &stats));
}

#[test]
fn two_guests_that_misuse_their_group_leave_the_third_its_share() {
    let group = Group::new(ops(0, 0, 300), SECOND_NS);
    let mut rigs: Vec<_> = (0..3).map(|_| Rig::new(Rates::default(), Some(&group))).collect();
    let mut returned = [0; 3];
    let mut now_ns = SECOND_NS;
    // The first two look every 100 us, as a guest makes its queue do that kicks without end; the
    // third one wakes when it is due, and a millisecond late.
    let mut due_ns = now_ns;
    while now_ns < 11 * SECOND_NS {
        for index in 0..3 {
            if index == 2 && now_ns < due_ns {
                continue;
            }
            let rig = &mut rigs[index];
            rig.add(VIRTIO_BLK_T_IN, 512, usize::from(rig.driver.free_count() > 100));
            rig.queue.wake(now_ns);
            returned[index] += rig.serve(now_ns);
            if index == 2 {
                due_ns = rig.queue.deadline_ns().unwrap_or(now_ns) + MS_NS;
            }
        }
        now_ns += MS_NS / 10;
    }
    let sum: usize = returned.iter().sum();
    assert!((2950..=3070).contains(&sum), "{returned:?}");
    assert!(returned.iter().all(|count| *count >= 900), "{returned:?}");
}
