//! Notifications of a block queue that are held back as the operator wishes: after how many
//! requests and how long, and that none is lost.

use super::in_flight_max::{ADDRESSES, BEHIND, RING, rig_with};
use super::*;
use manyring_backend::blk::{Burst, Completion, DiskQueue, Geometry};
use manyring_backend::sys::uring::Ring;
use manyring_engine::Call;
use manyring_engine::Order;
use manyring_engine::QueueIo;
use manyring_engine::RunningQueue;
use manyring_engine::policy::moderation::Limits;
use manyring_engine::solo::Run;
use manyring_wire::virtqueue::{RING_IDX, avail_ring_size};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use tokio::sync::oneshot;

/// A disk that answers the number of requests that the test asks for, the oldest first.
#[derive(Debug, Default)]
struct SteppedDisk(Arc<Steps>);

#[derive(Debug, Default)]
struct Steps {
    answers: AtomicUsize,
    /// A worker serves a queue of it.
    is_attached: AtomicBool,
    /// While the disk answers, the driver makes its requests up to this index available.
    meanwhile: Mutex<Option<(Arc<GuestMemory>, u16)>>,
}

#[derive(Debug)]
struct SteppedQueue {
    steps: Arc<Steps>,
    held: VecDeque<u32>,
}

impl Disk for SteppedDisk {
    fn geometry(&self) -> Geometry {
        NullDisk::new(DISK_SIZE).geometry()
    }

    fn open_queue(&self, _has_ring: bool) -> Result<Box<dyn DiskQueue>, Errno> {
        Ok(Box::new(SteppedQueue { steps: self.0.clone(), held: VecDeque::new() }))
    }

    fn resize(&self, _size: Option<u64>) -> Result<Geometry, Errno> {
        Err(Errno::OPNOTSUPP)
    }

    fn kind(&self) -> &'static str {
        "stepped"
    }
}

impl DiskQueue for SteppedQueue {
    fn attach(&mut self, _ring: Option<&mut Ring>, _tag: u64) {
        self.steps.is_attached.store(true, Ordering::Relaxed);
    }

    fn detach(&mut self, _ring: Option<&mut Ring>) {
        self.steps.is_attached.store(false, Ordering::Relaxed);
    }

    fn submit(&mut self, burst: &Burst, _ring: Option<&mut Ring>, _done: &mut Vec<Completion>) {
        self.held.extend(burst.iter().map(|(request, _)| request.token));
    }

    fn reap(&mut self, done: &mut Vec<Completion>) -> bool {
        if let Some((memory, index)) = self.steps.meanwhile.lock().unwrap().take() {
            let words = memory.words(ADDRESSES.available, avail_ring_size(RING), 2).unwrap();
            words.store_u16_release(RING_IDX, index);
        }
        let count = self.steps.answers.swap(0, Ordering::Relaxed).min(self.held.len());
        done.extend(self.held.drain(..count).map(|token| Completion { token, result: Ok(()) }));
        false
    }
}

/// A queue whose requests the disk has, and its driver.
pub(crate) struct Rig {
    steps: Arc<Steps>,
    _mapping: Arc<Mapping>,
    memory: Arc<GuestMemory>,
    driver: DriverQueue,
    pub(crate) queue: RunningQueue<DeviceQueue, BlkQueue>,
    wait: Wait,
    pub(crate) call: OwnedFd,
}

impl Rig {
    /// With this many requests, at the time 0.
    pub(crate) fn new(moderation: Moderation, requests: u16, event_idx: bool) -> Self {
        let disk = SteppedDisk::default();
        let features = RingFeatures { event_idx, ..RingFeatures::default() };
        let (mapping, driver, queue) = rig_with(&disk, requests, features);
        let spec =
            RegionSpec { guest_addr: 0, size: mapping.size() as u64, user_addr: 0, mmap_offset: 0 };
        let memory = Arc::new(GuestMemory::default().with_mapping(spec, mapping.clone()).unwrap());
        let mut rig = Self {
            steps: disk.0,
            _mapping: mapping,
            memory,
            driver,
            queue: queue.moderated(moderation),
            wait: Wait::new(false).unwrap(),
            call: eventfd(0, EventfdFlags::NONBLOCK).unwrap(),
        };
        let call = Some(Arc::new(Call::new(rig.call.try_clone().unwrap()).unwrap()));
        rig.heed(|reply| Order::Call(call, reply));
        assert!(rig.is_called(), "a new call is rung at once");
        rig.queue.attach(&mut QueueIo::new(&mut rig.wait, 0, 0, 0));
        rig.turn(0);
        rig
    }

    fn fixed(count_max: u32, delay_us_max: u32, requests: u16) -> Self {
        Self::new(Moderation::Fixed(Limits { count_max, delay_us_max }), requests, false)
    }

    fn turn(&mut self, now_ns: u64) {
        self.queue.turn(&mut QueueIo::new(&mut self.wait, 0, 0, now_ns));
    }

    /// The disk has answered this many requests.
    pub(crate) fn may_answer(&self, count: usize) {
        self.steps.answers.store(count, Ordering::Relaxed);
    }

    /// The disk answers this many requests, at the time `now_ns`. True if the driver was called.
    fn answer(&mut self, count: usize, now_ns: u64) -> bool {
        self.may_answer(count);
        self.turn(now_ns);
        self.is_called()
    }

    /// Gives an order, as its session does.
    fn heed<T>(&mut self, order: impl FnOnce(oneshot::Sender<T>) -> Order) {
        let (reply, _done) = oneshot::channel();
        self.queue.heed(order(reply), &mut QueueIo::new(&mut self.wait, 0, 0, 0));
    }

    /// True if the driver was called since it was asked last.
    fn is_called(&self) -> bool {
        rustix::io::read(&self.call, &mut [0; 8]).is_ok()
    }

    fn returned(&mut self) -> usize {
        std::iter::from_fn(|| self.driver.take_used()).count()
    }

    /// Bursts held back; calls by count, by time, on a dry ring; all calls.
    fn counted(&self) -> [u64; 5] {
        let s = self.queue.stats();
        [&s.calls_held, &s.calls_by_count, &s.calls_by_time, &s.calls_by_dry, &s.calls]
            .map(manyring_engine::stats::Counter::value)
    }
}

#[test]
fn a_disk_lets_go_of_its_worker_when_the_queue_leaves() {
    let mut rig = Rig::new(Moderation::Off, 0, false);
    assert!(rig.steps.is_attached.load(Ordering::Relaxed));
    rig.queue.detach(&mut QueueIo::new(&mut rig.wait, 0, 0, 0));
    assert!(!rig.steps.is_attached.load(Ordering::Relaxed));
}

#[test]
fn without_moderation_every_burst_is_told_at_once() {
    let mut rig = Rig::new(Moderation::Off, 4, false);
    assert!(rig.answer(1, 1000) && rig.answer(2, 2000) && rig.answer(1, 3000));
    assert_eq!(rig.counted(), [0, 0, 0, 0, 3]);
}

#[test]
fn a_call_is_held_back_until_its_count_or_its_time_and_buffers_are_not() {
    let mut rig = Rig::fixed(4, 1000, 10);
    assert!(!rig.answer(1, 1000) && !rig.answer(2, 2000));
    assert_eq!(rig.returned(), 3, "only the call waits");
    assert_eq!(rig.queue.deadline_ns(), Some(1_001_000), "since the first of them");
    assert!(rig.answer(1, 3000), "four requests");
    assert_eq!(rig.queue.deadline_ns(), None);
    assert!(!rig.answer(1, 4000) && !rig.answer(0, 1_003_999));
    assert!(rig.answer(0, 1_004_000), "a millisecond");
    assert_eq!(rig.counted(), [3, 1, 1, 0, 2]);
    assert!(!rig.answer(0, 9_000_000), "once");
}

#[test]
fn a_driver_that_sleeps_on_its_last_request_is_called_whatever_came_before() {
    for event_idx in [false, true] {
        for requests in 1..=6u16 {
            // Each way to answer them in bursts: after which of them one ends.
            for ends in 0..1u32 << (requests - 1) {
                let limits = Limits { count_max: 4, delay_us_max: 1000 };
                let mut rig = Rig::new(Moderation::Fixed(limits), requests, event_idx);
                assert!(!rig.driver.enable_notifications());
                let (mut burst, mut heard) = (0, 0);
                for index in 0..requests {
                    burst += 1;
                    let is_end = ends & 1 << index != 0 || index + 1 == requests;
                    if is_end && rig.answer(std::mem::take(&mut burst), u64::from(index)) {
                        heard += rig.returned();
                        assert!(!rig.driver.enable_notifications());
                    }
                }
                let case = format!("{requests} requests, bursts {ends:b}, {event_idx}");
                assert_eq!(heard, usize::from(requests), "{case}: the driver would sleep on");
                assert_eq!(rig.queue.deadline_ns(), None, "{case}");
            }
        }
    }
}

#[test]
fn a_request_that_the_driver_added_meanwhile_is_waited_for_and_then_told() {
    let mut rig = Rig::fixed(100, 1000, 1);
    rig.driver.add(&[(BEHIND, 16)], &[(BEHIND + 64, 1)]).unwrap();
    *rig.steps.meanwhile.lock().unwrap() = Some((rig.memory.clone(), 2));
    assert!(!rig.answer(1, 1000), "the driver was seen to bring more");
    assert!(!rig.answer(0, 2000) && rig.queue.stats().in_flight.value() == 1);
    assert!(rig.answer(1, 3000));
    assert_eq!((rig.returned(), rig.counted()), (2, [1, 0, 0, 1, 1]));
}

#[test]
fn what_is_held_back_is_told_when_the_queue_is_disabled_moved_or_given_other_memory() {
    type Change = fn(&mut Rig);
    let memory: Change = |rig| {
        let memory = rig.memory.clone();
        let addresses = ADDRESSES;
        rig.heed(|fence| Order::Memory(memory, addresses, fence));
    };
    let disable: Change = |rig| rig.heed(|fence| Order::Enable(false, fence));
    let drain: Change = |rig| rig.queue.drain();
    for (what, change, is_served) in
        [("memory", memory, true), ("disable", disable, false), ("stop or move", drain, false)]
    {
        let mut rig = Rig::fixed(100, 1000, 5);
        assert!(!rig.answer(2, 1000), "{what}");
        change(&mut rig);
        assert!(rig.is_called(), "{what}: nobody tells the driver later");
        assert_eq!(rig.queue.deadline_ns(), None, "{what}");
        // The remaining requests are moderated as before, or notified at once if none follows.
        assert_eq!(rig.answer(1, 2000), !is_served, "{what}");
        assert_eq!(rig.counted()[0], if is_served { 2 } else { 1 }, "{what}");
        assert!(rig.answer(2, 3000), "{what}");
        assert_eq!(rig.returned(), 5, "{what}");
    }
}

#[test]
fn a_queue_that_breaks_tells_what_it_holds_back() {
    let mut rig = Rig::fixed(100, 1000, 3);
    assert!(!rig.answer(1, 1000));
    // The driver makes more available than the ring has.
    let words = rig.memory.words(ADDRESSES.available, avail_ring_size(RING), 2).unwrap();
    words.store_u16_release(RING_IDX, 3 + RING + 1);
    rig.turn(1001);
    assert_eq!(rig.queue.stats().faults.value(), 1);
    rig.turn(1002);
    assert!(rig.is_called(), "the driver may wait for what was done before");
    assert_eq!(rig.queue.deadline_ns(), None, "its worker would wake for nothing");
}

#[test]
fn a_queue_that_ends_tells_what_it_holds_back() {
    let mut rig = Rig::fixed(100, 1000, 3);
    assert!(!rig.answer(1, 1000));
    let Rig { queue, call, .. } = rig;
    drop(queue);
    assert!(rustix::io::read(&call, &mut [0; 8]).is_ok());
}

#[test]
fn a_long_burst_is_answered_in_groups_unless_its_driver_sleeps() {
    for (packed, event_idx, sleeps) in [false, true].into_iter().flat_map(|packed| {
        [(packed, false, false), (packed, false, true), (packed, true, false), (packed, true, true)]
    }) {
        let features = RingFeatures { event_idx, packed, ..RingFeatures::default() };
        let disk = NullDisk::new(DISK_SIZE);
        let (_mapping, mut driver, mut queue) = rig_with(&disk, 60, features);
        let mut wait = Wait::new(false).unwrap();
        queue.attach(&mut QueueIo::new(&mut wait, 0, 0, 0));
        if sleeps {
            assert!(!driver.enable_notifications(), "it sleeps until it is called");
        } else {
            driver.disable_notifications();
        }
        let mut seen = Vec::new();
        while queue.turn(&mut QueueIo::new(&mut wait, 0, 0, 0)).worked {
            seen.push(std::iter::from_fn(|| driver.take_used()).count());
        }
        let groups = if sleeps { &[60][..] } else { &[16, 16, 16, 12] };
        assert_eq!(seen, groups, "{packed} {event_idx} {sleeps}");
        assert_eq!(queue.stats().calls.value(), u64::from(sleeps), "{packed} {event_idx} {sleeps}");
    }
}
