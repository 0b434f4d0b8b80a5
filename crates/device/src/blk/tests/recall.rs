//! A queue that stops: what its disk has not done goes back into the ring, as far as that leaves no
//! gap, and the next queue serves it from the base on.

use super::in_flight_max::{ADDRESSES, BEHIND, MEMORY, RING, rig_in, rig_with, serve_in};
use super::*;
use manyring_backend::blk::{Burst, Completion, DiskQueue, Geometry};
use manyring_backend::sys::uring::Ring;
use manyring_engine::solo::Run;
use manyring_engine::{Order, QueueIo, RunningQueue};
use manyring_memory::Words;
use manyring_queue::inflight_size;
use rustix::io::Errno;
use std::sync::{Mutex, PoisonError};
use tokio::sync::oneshot;

/// The requests of a disk whose outcome the test decides.
#[derive(Clone, Debug, Default)]
struct Script(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    /// Tokens, in the order in which they came.
    held: Vec<u32>,
    /// Tokens of requests that cannot be taken back.
    begun: Vec<u32>,
    done: Vec<Completion>,
}

impl Script {
    fn with<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn begin(&self, at: usize) {
        self.with(|state| state.begun.push(state.held[at]));
    }

    /// The request that came as the `at`th ends.
    fn end(&self, at: usize, result: Result<(), Errno>) {
        self.with(|state| state.done.push(Completion { token: state.held[at], result }));
    }
}

impl Disk for Script {
    fn geometry(&self) -> Geometry {
        NullDisk::new(DISK_SIZE).geometry()
    }

    fn open_queue(&self, _has_ring: bool) -> Result<Box<dyn DiskQueue>, Errno> {
        Ok(Box::new(self.clone()))
    }

    fn resize(&self, _size: Option<u64>) -> Result<Geometry, Errno> {
        Err(Errno::OPNOTSUPP)
    }

    fn kind(&self) -> &'static str {
        "script"
    }
}

impl DiskQueue for Script {
    fn submit(&mut self, burst: &Burst, _ring: Option<&mut Ring>, _done: &mut Vec<Completion>) {
        let tokens = burst.iter().map(|(request, _)| request.token);
        self.with(|state| state.held.extend(tokens));
    }

    fn recall(&mut self, token: u32, _ring: Option<&mut Ring>) -> bool {
        self.with(|state| !state.begun.contains(&token))
    }

    fn reap(&mut self, done: &mut Vec<Completion>) -> bool {
        self.with(|state| done.append(&mut state.done));
        false
    }
}

/// A queue that has given its disk five requests and stops, and what its ring and driver say.
struct Stopping {
    script: Script,
    queue: RunningQueue<DeviceQueue, BlkQueue>,
    driver: DriverQueue,
    wait: Wait,
    mapping: Arc<Mapping>,
}

impl Stopping {
    fn new(prepare: impl FnOnce(&Script)) -> Self {
        let script = Script::default();
        let (mapping, driver, queue) = rig_with(&script, 5, RingFeatures::default());
        let wait = Wait::new(false).unwrap();
        let mut it = Self { script, queue, driver, wait, mapping };
        it.turn();
        assert_eq!(it.script.with(|state| state.held.len()), 5);
        prepare(&it.script);
        // Requests that have ended before the stop are answered.
        it.turn();
        it.queue.drain();
        it.turn();
        it
    }

    fn turn(&mut self) {
        self.queue.turn(&mut QueueIo::new(&mut self.wait, 0, 0, 0));
    }

    /// The position of the ring, and the number of requests returned since the last call.
    fn found(&mut self) -> (u32, usize) {
        let used = std::iter::from_fn(|| self.driver.take_used()).count();
        (self.queue.base().bits(), used)
    }
}

#[test]
fn requests_that_the_disk_has_not_begun_with_go_back_and_those_before_them_are_answered() {
    let mut it = Stopping::new(|script| (0..2).for_each(|at| script.begin(at)));
    assert_eq!(it.found(), (2, 0));
    assert!(!it.queue.is_drained(), "two are with the disk");
    (0..2).for_each(|at| it.script.end(at, Ok(())));
    it.turn();
    assert_eq!(it.found(), (2, 2), "all before the base, and none behind it");
    assert!(it.queue.is_drained());
}

#[test]
fn a_request_before_one_that_was_answered_does_not_go_back() {
    let mut it = Stopping::new(|script| script.end(3, Ok(())));
    assert_eq!(it.found(), (4, 1), "the last one went back");
    assert!(!it.queue.is_drained());
    (0..3).for_each(|at| it.script.end(at, Ok(())));
    it.turn();
    assert_eq!(it.found(), (4, 3));
    assert!(it.queue.is_drained());
}

#[test]
fn a_long_transfer_that_ends_after_a_piece_goes_back_and_then_those_before_it() {
    let mut it = Stopping::new(|script| (3..5).for_each(|at| script.begin(at)));
    assert_eq!(it.found(), (5, 0), "it is waited for");
    it.script.end(4, Err(Errno::CANCELED));
    it.turn();
    assert_eq!(it.found(), (4, 0), "the next one is with the disk too");
    it.script.end(3, Err(Errno::CANCELED));
    it.turn();
    assert_eq!(it.found(), (0, 0));
    assert!(it.queue.is_drained());
}

#[test]
fn a_transfer_that_ends_while_it_is_waited_for_is_answered_and_so_are_those_before_it() {
    let mut it = Stopping::new(|script| script.begin(4));
    assert_eq!(it.found(), (5, 0));
    it.script.end(4, Ok(()));
    it.turn();
    assert_eq!(it.found(), (5, 1));
    (0..4).for_each(|at| it.script.end(at, Ok(())));
    it.turn();
    assert_eq!(it.found(), (5, 4));
    assert!(it.queue.is_drained());
}

#[test]
fn a_write_that_waited_for_space_does_not_go_back_in_the_place_of_one_that_was_popped_later() {
    let script = Script::default();
    let (mapping, mut driver, queue) = rig_with(&script, 0, RingFeatures::default());
    mapping.slice(usize::try_from(BEHIND).unwrap(), 16).unwrap().write_from(&[1]);
    for _ in 0..3 {
        driver.add(&[(BEHIND, 16), (0, 512)], &[(BEHIND + 64, 1)]).unwrap();
    }
    driver.publish();
    let wait = Wait::new(false).unwrap();
    let mut it = Stopping { script, queue, driver, wait, mapping };
    it.turn();
    it.script.end(0, Err(Errno::NOSPC));
    it.turn();
    // Long after, it is tried again.
    it.queue.turn(&mut QueueIo::new(&mut it.wait, 0, 0, 60_000_000_000));
    assert_eq!(it.script.with(|state| state.held.len()), 4);
    it.queue.drain();
    it.turn();
    assert_eq!(it.found(), (3, 0), "nothing went back");
    (1..4).for_each(|at| it.script.end(at, Ok(())));
    it.turn();
    assert_eq!(it.found(), (3, 3));
    assert!(it.queue.is_drained());
}

/// When there is space again, a queue has no more under way at once than at any other time.
#[test]
fn writes_that_have_waited_for_space_come_in_the_number_and_size_that_a_queue_takes_at_once() {
    let script = Script::default();
    let (mapping, mut driver, queue) = rig_with(&script, 0, RingFeatures::default());
    mapping.slice(usize::try_from(BEHIND).unwrap(), 16).unwrap().write_from(&[1]);
    // Each descriptor names the same half of a mebibyte.
    let readable = [vec![(BEHIND, 16)], vec![(0, 1 << 19); 40]].concat();
    for _ in 0..100 {
        driver.add(&readable, &[(BEHIND + 64, 1)]).unwrap();
    }
    driver.publish();
    let (mut wait, mut queue) = (Wait::new(false).unwrap(), queue);
    let stats = queue.stats().clone();
    let mut now_ns = 0;
    let mut turns = |queue: &mut RunningQueue<DeviceQueue, BlkQueue>, now_ns: u64| {
        for _ in 0..8 {
            queue.turn(&mut QueueIo::new(&mut wait, 0, 0, now_ns));
        }
    };
    let end_all = |result| {
        script.with(|state| {
            let ended = state.held.drain(..).map(|token| Completion { token, result });
            state.done.extend(ended);
        })
    };
    while stats.waiting_for_space.value() < 100 {
        turns(&mut queue, now_ns);
        end_all(Err(Errno::NOSPC));
        turns(&mut queue, now_ns);
    }
    assert_eq!(script.with(|state| state.held.len()), 0);
    now_ns += 60_000_000_000;
    let mut most = 0;
    while stats.writes.value() < 100 {
        turns(&mut queue, now_ns);
        // The host ends one at a time.
        most = most.max(script.with(|state| state.held.len()));
        let last = script.with(|state| state.held.pop());
        let token = last.expect("some are under way until all are done");
        script.with(|state| state.done.push(Completion { token, result: Ok(()) }));
        turns(&mut queue, now_ns);
    }
    assert!(most <= 4, "{most} of 20 MiB each");
}

/// A queue of which 200 writes wait for space, and one that came after them is answered: they
/// cannot go back.
fn with_many_that_wait() -> Stopping {
    let script = Script::default();
    let (mapping, mut driver, queue) = rig_with(&script, 0, RingFeatures::default());
    mapping.slice(usize::try_from(BEHIND).unwrap(), 16).unwrap().write_from(&[1]);
    for _ in 0..201 {
        driver.add(&[(BEHIND, 16), (0, 512)], &[(BEHIND + 64, 1)]).unwrap();
    }
    driver.publish();
    let wait = Wait::new(false).unwrap();
    let mut it = Stopping { script, queue, driver, wait, mapping };
    while it.script.with(|state| state.held.len()) < 201 {
        it.turn();
    }
    (0..200).for_each(|at| it.script.end(at, Err(Errno::NOSPC)));
    it.script.end(200, Ok(()));
    it.turn();
    assert_eq!((it.found(), it.queue.stats().waiting_for_space.value()), ((201, 1), 200));
    it
}

/// Turns until `answered` were given back. None gives back more than a batch: each chain may have a
/// thousand descriptors, and queues of other guests wait.
fn in_turns(it: &mut Stopping, mut answered: usize) -> usize {
    let mut turns = 0;
    while answered < 200 {
        it.turn();
        let (base, more) = it.found();
        assert!(base == 201 && (1..=64).contains(&more), "{more} in a turn, base {base}");
        answered += more;
        turns += 1;
    }
    turns
}

#[test]
fn a_queue_that_stops_fails_what_waits_for_space_in_turns_of_a_batch() {
    let mut it = with_many_that_wait();
    it.queue.drain();
    let (_, at_once) = it.found();
    assert!(at_once <= 64, "{at_once} at once");
    assert!(!it.queue.is_drained(), "some are left");
    in_turns(&mut it, at_once);
    assert!(it.queue.is_drained());
    let stats = it.queue.stats();
    let found = (stats.errors.value(), stats.in_flight.value(), stats.waiting_for_space.value());
    assert_eq!(found, (200, 0, 0));
}

#[test]
fn an_order_to_disable_is_answered_when_all_that_waited_for_space_was_given_back() {
    let mut it = with_many_that_wait();
    let orders = [(); 2].map(|()| oneshot::channel());
    let [(first, mut one), (second, mut other)] = orders;
    for fence in [first, second] {
        let order = Order::Enable(false, fence);
        it.queue.heed(order, &mut QueueIo::new(&mut it.wait, 0, 0, 0));
    }
    let (_, at_once) = it.found();
    assert!(at_once <= 64, "{at_once} at once");
    assert!(one.try_recv().is_err() && other.try_recv().is_err());
    assert!(in_turns(&mut it, at_once) > 1);
    assert!(one.try_recv().is_ok() && other.try_recv().is_ok());
    assert_eq!(it.queue.stats().in_flight.value(), 0);
}

/// The last page of the memory is cut away, and the header of a write ends in it: its type is
/// there, and its sector reads as 0.
#[test]
fn a_request_that_was_read_out_of_memory_that_is_gone_does_not_reach_the_disk() {
    manyring_memory::install_sigbus_handler();
    let file = std::fs::File::from(
        rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap(),
    );
    file.set_len(MEMORY as u64).unwrap();
    let script = Script::default();
    let memory = Mapping::of_file(&file, 0, MEMORY as u64).unwrap();
    let (mapping, mut driver, queue) = rig_in(memory, &script, 0, RingFeatures::default());
    let header = [[1, 0, 0, 0, 0, 0, 0, 0], [5, 0, 0, 0, 0, 0, 0, 0]].concat();
    mapping.slice(usize::try_from(BEHIND - 8).unwrap(), 16).unwrap().write_from(&header);
    driver.add(&[(BEHIND - 8, 16), (0x1000, 512)], &[(BEHIND - 64, 1)]).unwrap();
    driver.publish();
    file.set_len(BEHIND).unwrap();
    let wait = Wait::new(false).unwrap();
    let mut it = Stopping { script, queue, driver, wait, mapping };
    it.turn();
    assert_eq!(it.script.with(|state| state.held.len()), 0);
    assert_eq!(it.queue.stats().faults.value(), 1, "the session is told");
    assert_eq!(it.found(), (1, 1));
    assert_eq!(it.queue.stats().errors.value(), 1);
}

fn region() -> Words {
    let size = inflight_size(RING);
    let region = Mapping::anonymous(size as u64).unwrap();
    Words::new(Arc::new(region), 0, size, 8).unwrap()
}

/// A ring of which a former process has taken five requests, answered those in the middle, and was
/// killed; and the queue of the next process, which has not had a turn yet.
fn after_a_kill() -> (Stopping, Words) {
    let script = Script::default();
    let region = region();
    let (mapping, driver, _) = rig_with(&script, 5, RingFeatures::default());
    let queue = serve_in(&mapping, &script, RingFeatures::default(), Some(region.clone()));
    let wait = Wait::new(false).unwrap();
    let mut it = Stopping { script: script.clone(), queue, driver, wait, mapping };
    it.turn();
    (1..4).for_each(|at| script.end(at, Ok(())));
    it.turn();
    assert_eq!(it.found(), (5, 3));
    let mut next = serve_in(&it.mapping, &script, RingFeatures::default(), Some(region.clone()));
    std::mem::swap(&mut it.queue, &mut next);
    // Nobody gives back what a killed process held.
    std::mem::forget(next);
    script.with(|state| state.held.clear());
    (it, region)
}

#[test]
fn a_queue_that_stops_serves_what_a_former_process_has_taken_before_its_base_says_all() {
    let (mut it, _) = after_a_kill();
    it.driver.add(&[(BEHIND, 16)], &[(BEHIND + 64, 1)]).unwrap();
    it.driver.publish();
    it.queue.drain();
    assert!(!it.queue.is_drained(), "two are owed");
    it.turn();
    assert_eq!(it.script.with(|state| state.held.len()), 2, "and nothing else is popped");
    it.turn();
    assert_eq!(it.script.with(|state| state.held.len()), 2);
    assert!(!it.queue.is_drained());
    (0..2).for_each(|at| it.script.end(at, Ok(())));
    it.turn();
    assert_eq!(it.found(), (5, 2), "all before the base, and none behind it");
    assert!(it.queue.is_drained());
}

#[test]
fn an_order_to_disable_is_answered_when_what_a_former_process_has_taken_is_served() {
    let (mut it, _) = after_a_kill();
    let (fence, mut answer) = oneshot::channel();
    it.queue.heed(Order::Enable(false, fence), &mut QueueIo::new(&mut it.wait, 0, 0, 0));
    assert!(answer.try_recv().is_err());
    it.turn();
    (0..2).for_each(|at| it.script.end(at, Ok(())));
    it.turn();
    assert!(answer.try_recv().is_ok());
    it.queue.drain();
    assert_eq!(it.found(), (5, 2));
    assert!(it.queue.is_drained());
}

/// The requests of a former process can never be served: nothing may wait for them.
#[test]
fn a_driver_that_breaks_what_is_owed_holds_up_neither_a_base_nor_an_order_to_disable() {
    for breaks_before in [true, false] {
        let (mut it, _) = after_a_kill();
        let (fence, mut answer) = oneshot::channel();
        let table = usize::try_from(ADDRESSES.descriptor).unwrap();
        let break_it = |it: &Stopping| {
            let table = it.mapping.slice(table, 16 * usize::from(RING)).unwrap();
            table.write_from(&[0xff; 16 * RING as usize]);
        };
        if breaks_before {
            break_it(&it);
            it.turn();
        }
        it.queue.heed(Order::Enable(false, fence), &mut QueueIo::new(&mut it.wait, 0, 0, 0));
        break_it(&it);
        it.turn();
        assert_eq!(it.queue.stats().faults.value(), 1);
        assert!(answer.try_recv().is_ok(), "{breaks_before}");
        it.queue.drain();
        it.turn();
        assert!(it.queue.is_drained(), "{breaks_before}");
    }
}

/// A queue whose requests are recorded; two of its writes wait for space, and one that came after
/// them is answered.
fn with_two_that_wait() -> (Stopping, Words) {
    let (script, region) = (Script::default(), region());
    let (mapping, mut driver, _) = rig_with(&script, 0, RingFeatures::default());
    mapping.slice(usize::try_from(BEHIND).unwrap(), 16).unwrap().write_from(&[1]);
    for _ in 0..3 {
        driver.add(&[(BEHIND, 16), (0, 512)], &[(BEHIND + 64, 1)]).unwrap();
    }
    driver.publish();
    let queue = serve_in(&mapping, &script, RingFeatures::default(), Some(region.clone()));
    let wait = Wait::new(false).unwrap();
    let mut it = Stopping { script, queue, driver, wait, mapping };
    it.turn();
    (0..2).for_each(|at| it.script.end(at, Err(Errno::NOSPC)));
    it.script.end(2, Ok(()));
    it.turn();
    assert_eq!((it.found(), it.queue.stats().waiting_for_space.value()), ((3, 1), 2));
    (it, region)
}

#[test]
fn a_session_that_ends_leaves_what_waits_for_space_to_the_next_one() {
    let (mut it, region) = with_two_that_wait();
    let (reply, _) = oneshot::channel();
    it.queue.heed(Order::LeaveAside(reply), &mut QueueIo::new(&mut it.wait, 0, 0, 0));
    it.queue.drain();
    it.turn();
    assert!(it.queue.is_drained());
    assert_eq!((it.found(), it.queue.stats().waiting_for_space.value()), ((3, 0), 0));
    it.script.with(|state| state.held.clear());
    it.queue = serve_in(&it.mapping, &it.script, RingFeatures::default(), Some(region));
    it.turn();
    (0..2).for_each(|at| it.script.end(at, Ok(())));
    it.turn();
    assert_eq!((it.found(), it.queue.stats().writes.value()), ((3, 2), 2));
}

#[test]
fn a_queue_whose_front_end_asks_for_its_base_leaves_nothing_to_the_next_one() {
    let (mut it, region) = with_two_that_wait();
    it.queue.drain();
    it.turn();
    assert!(it.queue.is_drained());
    assert_eq!((it.found(), it.queue.stats().errors.value()), ((3, 2), 2));
    it.queue = serve_in(&it.mapping, &it.script, RingFeatures::default(), Some(region));
    it.turn();
    assert_eq!((it.found(), it.script.with(|state| state.held.len())), ((3, 0), 3));
}
