//! Frames that a port holds: who waits for them, for how long, and who does not.

use super::guest::pool;
use super::limits::Sender;
use super::running::Guest;
use super::*;
use crate::Device;
use manyring_backend::net::late::Grip;
use manyring_engine::policy::polling::Decision;
use manyring_engine::{Kick, Order, QueueIo};
use manyring_queue::QueueError;
use rustix::event::{EventfdFlags, eventfd};
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Wake, Waker};
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::timeout;

/// Longer than anything takes that waits for nobody.
const SOON: Duration = Duration::from_secs(10);
/// Shorter than a wait that never ends.
const PAUSE: Duration = Duration::from_millis(300);
const TRANSMITQ: usize = 1;

type Answer = oneshot::Receiver<Result<(), QueueError>>;

/// A transmitq without a worker, whose port finishes frames later.
struct Case {
    guest: Guest,
    grip: Grip,
    now_ns: u64,
}

impl Case {
    /// `tells`: the port says when it has finished something.
    fn new(tells: bool) -> Self {
        let port = Scripted::default();
        let grip = port.delay(tells);
        let mut guest = Guest::on(false, false, port);
        guest.set_kick(Kick::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap()).unwrap());
        Self { guest, grip, now_ns: 1 }
    }

    /// With `count` frames that the port holds. `has_begun`: it cannot give them back.
    fn holding(count: u64, has_begun: bool) -> Self {
        let mut case = Self::new(false);
        case.grip.hold(has_begun);
        case.guest.send(count);
        case.turn();
        assert_eq!((case.grip.count() as u64, case.guest.returned()), (count, 0));
        case
    }

    fn turn(&mut self) {
        self.now_ns += 1000;
        let now_ns = self.now_ns;
        self.guest.running.turn(&mut QueueIo::new(&mut self.guest.wait, 0, 1, now_ns));
    }

    /// Gives an order; its answer comes when it comes.
    fn heed(
        &mut self,
        order: impl FnOnce(oneshot::Sender<Result<(), QueueError>>) -> Order,
    ) -> Answer {
        let (reply, answer) = oneshot::channel();
        let now_ns = self.now_ns;
        let mut io = QueueIo::new(&mut self.guest.wait, 0, 1, now_ns);
        self.guest.running.heed(order(reply), &mut io);
        answer
    }

    fn change_memory(&mut self) -> Answer {
        let memory = Arc::new((*self.guest.ring.memory).clone());
        let addresses = self.guest.ring.config.addresses;
        self.heed(|fence| Order::Memory(memory, addresses, fence))
    }

    fn disable(&mut self) -> Answer {
        self.heed(|fence| Order::Enable(false, fence))
    }

    /// Lets the frames go, and takes turns until all are back.
    fn let_go(&mut self) {
        self.grip.let_go();
        while self.grip.count() > 0 {
            self.turn();
        }
    }
}

fn is_told(answer: &mut Answer) -> bool {
    answer.try_recv().is_ok()
}

#[test]
fn other_memory_is_acknowledged_when_the_frames_in_the_former_are_back() {
    let mut case = Case::holding(3, true);
    let mut answer = case.change_memory();
    (0..50).for_each(|_| case.turn());
    assert!(!is_told(&mut answer), "the port still reads the former memory");
    case.let_go();
    assert!(is_told(&mut answer));
    assert_eq!(case.guest.returned(), 3);
    case.guest.port.assert_sent(0..3);
}

#[test]
fn frames_of_the_new_memory_do_not_hold_up_the_answer_for_the_former() {
    let mut case = Case::holding(2, true);
    let mut answer = case.change_memory();
    case.grip.let_go();
    case.guest.send(1);
    // One that is kept for ever from now on, while the former two come back.
    for _ in 0..20 {
        case.turn();
        case.guest.send(1);
    }
    assert!(is_told(&mut answer), "there are always some frames with the port");
    case.let_go();
    case.guest.port.assert_sent(0..23);
}

/// Takes down what the driver could see used when it is woken.
struct Seen {
    memory: Arc<GuestMemory>,
    used: AtomicUsize,
}

impl Wake for Seen {
    fn wake(self: Arc<Self>) {
        let index = self.memory.words(USED, 4, 4).unwrap().load_u16_acquire(RING_IDX);
        self.used.store(index.into(), Ordering::Relaxed);
    }
}

#[test]
fn a_queue_is_disabled_when_its_chains_are_back_and_published() {
    for is_disabled in [true, false] {
        let mut case = Case::holding(3, true);
        let mut answer = if is_disabled { case.disable() } else { case.heed(Order::Fence) };
        let used = AtomicUsize::new(usize::MAX);
        let seen = Arc::new(Seen { memory: case.guest.ring.memory.clone(), used });
        let waker = Waker::from(seen.clone());
        assert!(Pin::new(&mut answer).poll(&mut Context::from_waker(&waker)).is_pending());
        (0..50).for_each(|_| case.turn());
        assert_eq!(seen.used.load(Ordering::Relaxed), usize::MAX, "an early answer");
        case.let_go();
        assert_eq!(seen.used.load(Ordering::Relaxed), 3, "published when the answer was given");
        assert!(is_told(&mut answer));
        assert_eq!(case.guest.returned(), 3);
    }
}

#[test]
fn a_disabled_queue_writes_nothing_after_its_last_frame_is_back() {
    let mut case = Case::holding(3, true);
    let mut answer = case.disable();
    case.let_go();
    assert!(is_told(&mut answer));
    // The driver has heard that: the memory is its own again.
    let pattern = vec![0xa5; usize::try_from(DATA).unwrap()];
    case.guest.ring.write(0, &pattern);
    // It may be about to move, and stay.
    case.guest.running.pause();
    case.guest.running.resume(case.now_ns);
    for _ in 0..5 {
        case.turn();
        let now_ns = case.now_ns + 1_000_000_000;
        case.guest.settles((Decision::Sleep, false), now_ns);
        case.guest.running.wake(now_ns);
    }
    assert!(case.guest.ring.read(0, pattern.len()) == pattern);
    assert_eq!(case.guest.ring.stats.faults.value(), 0, "its ring was looked at");
}

#[test]
fn frames_that_nobody_has_begun_with_are_taken_back_and_counted() {
    for what in 0..3 {
        let mut case = Case::holding(5, false);
        match what {
            0 => assert!(is_told(&mut case.disable())),
            1 => assert!(is_told(&mut case.change_memory())),
            _ => {
                case.guest.running.drain();
                assert!(case.guest.running.is_drained());
            }
        }
        assert_eq!((case.grip.count(), case.guest.returned()), (0, 5), "{what}");
        let stats = &case.guest.ring.stats;
        assert_eq!((stats.packets.value(), stats.dropped_port_full.value()), (0, 5), "{what}");
        assert!(case.guest.port.sent().is_empty());
    }
}

#[test]
fn a_queue_stops_when_the_port_has_finished_what_it_has_begun_with() {
    let mut case = Case::holding(4, true);
    case.guest.running.drain();
    case.guest.send(1);
    (0..50).for_each(|_| case.turn());
    assert!(!case.guest.running.is_drained());
    case.let_go();
    assert!(case.guest.running.is_drained());
    assert_eq!((case.guest.running.base(), case.guest.returned()), (4.into(), 4));
    case.guest.port.assert_sent(0..4);
}

#[test]
fn a_queue_that_is_to_move_waits_for_its_frames_and_loses_none() {
    let mut case = Case::holding(4, false);
    assert!(case.guest.running.pauses_without_loss());
    case.guest.running.pause();
    case.turn();
    assert!(!case.guest.running.is_drained(), "somebody could still take them");
    case.let_go();
    assert!(case.guest.running.is_drained());
    case.guest.running.resume(case.now_ns);
    case.guest.send(1);
    case.turn();
    case.let_go();
    assert_eq!(case.guest.returned(), 5);
    case.guest.port.assert_sent(0..5);
}

#[test]
fn a_queue_asks_a_port_that_cannot_tell_while_it_has_frames_and_no_longer() {
    let mut case = Case::holding(1, true);
    case.turn();
    assert_eq!(case.guest.running.deadline_ns(), Some(case.now_ns + 50_000));
    case.guest.running.drain();
    case.turn();
    assert_eq!(case.guest.running.deadline_ns(), Some(case.now_ns + 50_000), "at rest too");
    case.let_go();
    assert_eq!(case.guest.running.deadline_ns(), None);
    // One that tells is asked by nobody.
    let mut case = Case::new(true);
    case.grip.hold(true);
    case.guest.send(1);
    case.turn();
    assert_eq!((case.grip.count(), case.guest.running.deadline_ns()), (1, None));
    let _answer = case.disable();
    case.turn();
    let due_ns = case.now_ns + 1_000_000_000;
    assert_eq!(case.guest.running.deadline_ns(), Some(due_ns), "for the log's line");
    case.now_ns = due_ns;
    case.turn();
    assert_eq!(case.guest.running.deadline_ns(), None);
    case.let_go();
}

/// Counts the warnings that name the frames of a device.
struct Lines(Arc<AtomicUsize>);

impl tracing::Subscriber for Lines {
    fn enabled(&self, meta: &tracing::Metadata<'_>) -> bool {
        *meta.level() == tracing::Level::WARN
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        let names: Vec<_> = event.metadata().fields().iter().map(|field| field.name()).collect();
        assert_eq!(names, ["message", "device", "queue", "frames"]);
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

#[test]
fn a_wait_of_a_second_for_frames_is_logged_once_and_goes_on() {
    let lines = Arc::new(AtomicUsize::new(0));
    let count = || lines.load(Ordering::Relaxed);
    tracing::subscriber::with_default(Lines(lines.clone()), || {
        let mut case = Case::holding(2, true);
        case.now_ns += 5_000_000_000;
        case.turn();
        assert_eq!(count(), 0, "nobody waits");
        let mut answer = case.change_memory();
        case.turn();
        case.now_ns += 900_000_000;
        case.turn();
        assert_eq!(count(), 0);
        for _ in 0..10 {
            case.now_ns += 100_000_000;
            case.turn();
        }
        assert!(count() == 1 && !is_told(&mut answer));
        case.let_go();
        assert!(is_told(&mut answer));
        // The next wait is another.
        case.grip.hold(true);
        case.guest.send(1);
        case.turn();
        case.guest.running.drain();
        case.turn();
        case.now_ns += 1_000_000_000;
        case.turn();
        assert_eq!(count(), 2, "a stop waits too");
        case.let_go();
    });
}

#[test]
fn memory_stays_mapped_for_ever_if_its_queue_ends_with_frames_that_are_with_the_port() {
    for is_held in [false, true] {
        let mut case = Case::holding(3, true);
        if !is_held {
            case.let_go();
        }
        let mut answer = case.change_memory();
        assert_eq!(is_told(&mut answer), !is_held);
        let Case { guest, .. } = case;
        let former = Arc::downgrade(&guest.ring.memory);
        drop(guest);
        assert_eq!(former.upgrade().is_some(), is_held);
        assert!(!is_told(&mut answer));
    }
}

/// Two guests on one worker: the port of the first holds its frames, and cannot give them back.
struct Pair {
    first: Sender,
    grip: Grip,
    second: Sender,
}

impl Pair {
    fn new(tells: bool, workers: usize) -> Self {
        let pool = pool(workers);
        let (mut first, grip) = Sender::in_pool(pool.clone(), true, Some(tells));
        let (second, _) = Sender::in_pool(pool, true, None);
        let grip = grip.unwrap();
        grip.hold(true);
        first.send(3);
        while grip.count() < 3 {
            std::thread::yield_now();
        }
        Self { first, grip, second }
    }

    /// `waits` does not end while the port holds the frames of the first guest. Meanwhile the
    /// second one is served, and what its session asks for is done, on the same control thread.
    async fn outlasts<T>(&mut self, waits: impl Future<Output = T>) -> T {
        let mut waits = std::pin::pin!(waits);
        assert!(timeout(PAUSE, &mut waits).await.is_err(), "an early answer");
        let second = &mut self.second;
        second.send(1);
        second.until_returned(1);
        let (device, handle) = (&second.guest.device, second.handle.as_ref().unwrap());
        let asked = async {
            device.set_enabled(TRANSMITQ, handle, false).await;
            device.set_enabled(TRANSMITQ, handle, true).await;
            let memory = Arc::new((*second.ring.memory).clone());
            handle.set_memory(memory, second.ring.config.addresses).await
        };
        let asked = tokio::select! {
            asked = timeout(SOON, asked) => asked.expect("soon"),
            _ = &mut waits => panic!("an early answer"),
        };
        assert_eq!(asked, Ok(()));
        self.grip.let_go();
        timeout(SOON, waits).await.expect("the frames are back")
    }
}

/// The requests of a session whose guest has frames with the port.
#[derive(Clone, Copy, Debug)]
enum Ask {
    Stop,
    Disable,
    Memory,
}

#[test]
fn a_session_that_waits_for_frames_which_its_port_holds_holds_up_nobody_else() {
    for tells in [false, true] {
        for ask in [Ask::Stop, Ask::Disable, Ask::Memory] {
            println!("{ask:?}, tells: {tells}");
            let mut pair = Pair::new(tells, 1);
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let device = crate::net::NetDevice(pair.first.guest.device.0.clone());
            let handle = pair.first.handle.take().unwrap();
            let memory = Arc::new((*pair.first.ring.memory).clone());
            let addresses = pair.first.ring.config.addresses;
            let waits = async {
                match ask {
                    Ask::Stop => {
                        assert_eq!(device.stop(TRANSMITQ, handle).await, Ok(3.into()));
                        return None;
                    }
                    Ask::Disable => device.set_enabled(TRANSMITQ, &handle, false).await,
                    Ask::Memory => {
                        assert_eq!(handle.set_memory(memory, addresses).await, Ok(()));
                    }
                }
                Some(handle)
            };
            let handle = runtime.unwrap().block_on(pair.outlasts(waits));
            pair.first.handle = handle;
            // The frames were back before the session was told.
            assert_eq!(std::iter::from_fn(|| pair.first.ring.driver.take_used()).count(), 3);
            pair.first.guest.port.assert_sent(0..3);
        }
    }
}

#[test]
fn a_queue_whose_port_holds_its_frames_stays_where_it_is_and_moves_when_they_are_back() {
    for tells in [false, true] {
        let mut pair = Pair::new(tells, 2);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let (first, second) = (&mut pair.first, &mut pair.second);
        let handle = first.handle.take().unwrap();
        let target = 1 - handle.worker().unwrap();
        let moved = runtime.block_on(async { timeout(SOON, handle.move_to(target)).await });
        assert!(!moved.expect("a move has an end"), "a port has begun with its frames");
        second.send(1);
        second.until_returned(1);
        // The queue continues on its worker.
        first.send(1);
        while pair.grip.count() < 4 {
            std::thread::yield_now();
        }
        pair.grip.let_go();
        first.until_returned(4);
        let moved = runtime.block_on(async { timeout(SOON, handle.move_to(target)).await });
        assert!(moved.expect("soon"));
        first.send(1);
        first.until_returned(1);
        first.guest.port.assert_sent(0..5);
        first.handle = Some(handle);
    }
}
