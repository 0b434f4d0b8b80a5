//! Network queues as a worker runs them: notifications held back, memory replaced, the end.
//!
//! This file is two modules: the transmitqs of `running` send to a port that is done with a frame
//! when it has taken it, those of `running_late` to one that is done with it later.

#[path = "running/disable.rs"]
mod disable;

#[path = "running/limited.rs"]
mod limited;

#[path = "running/looks.rs"]
mod looks;

#[path = "running/moderation.rs"]
mod moderation;

#[path = "running/port.rs"]
mod port;

#[path = "running/reclaim.rs"]
mod reclaim;

use super::*;
use crate::live::Live;
use crate::net::{NetRx, NetTx, Reclaim};
use manyring_engine::Activation;
use manyring_engine::Order;
use manyring_engine::QueueIo;
use manyring_engine::RunningQueue;
use manyring_engine::policy::moderation::Limits;
use manyring_engine::policy::polling::Decision;
use manyring_engine::solo::{EventSource, Wait, Woken};
use manyring_engine::solo::{Happened, Run};
use manyring_engine::{Call, Kick, Limit};
use manyring_engine::{Event, EventKind};
use manyring_wire::virtqueue::{RING_IDX, avail_ring_size};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;
use tokio::sync::{mpsc, oneshot};

/// True in the module whose ports finish frames later.
fn late() -> bool {
    module_path!().ends_with("_late")
}

pub(super) struct Guest {
    pub(super) ring: Ring,
    pub(super) port: Scripted,
    pub(super) running: Box<dyn Run>,
    rules: Arc<Live<Rules>>,
    limit: Arc<Limit>,
    pub(super) wait: Wait,
    call: OwnedFd,
    events: mpsc::Receiver<Event>,
    next: u64,
}

impl Guest {
    pub(super) fn new(is_rx: bool) -> Self {
        Self::with(is_rx, false)
    }

    fn with(is_rx: bool, event_idx: bool) -> Self {
        Self::on(is_rx, event_idx, Scripted::default())
    }

    /// A receiveq on a port that reads, or lends.
    fn receiving(lends: bool) -> Self {
        let port = Scripted::default();
        port.script().lends = lends;
        Self::on(true, false, port)
    }

    pub(super) fn on(is_rx: bool, event_idx: bool, port: Scripted) -> Self {
        Self::ruled(is_rx, event_idx, port, (Moderation::Off, Reclaim::Off))
    }

    /// With these policies of the operator.
    fn ruled(
        is_rx: bool,
        event_idx: bool,
        port: Scripted,
        policies: (Moderation, Reclaim),
    ) -> Self {
        let (moderation, reclaim) = policies;
        let ring = Ring::new(1024, event_idx);
        let (rules, limit) = (Live::new(open_rules()), Arc::<Limit>::default());
        let call = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        let (sender, events) = mpsc::channel(4);
        let activation = Activation {
            index: 0,
            queue: ring.device_half(),
            addresses: ring.config.addresses,
            kick: None,
            call: Some(Arc::new(Call::new(call.try_clone().unwrap()).unwrap())),
            err: None,
            enabled: true,
            features: 0,
            events: sender,
        };
        let stats = ring.stats.clone();
        let running: Box<dyn Run> = if is_rx {
            let rx = NetRx::new(port.receiving(), rules.load(), true, 256)
                .unwrap()
                .follow(rules.clone())
                .limited(limit.clone());
            Box::new(RunningQueue::new(activation, rx, stats).moderated(moderation))
        } else {
            if late() {
                port.delay(false);
            }
            let tx = NetTx::new(port.sending(), rules.load(), ALL).unwrap().reclaiming(reclaim);
            let tx = tx.follow(rules.clone()).limited(limit.clone());
            Box::new(RunningQueue::new(activation, tx, stats).moderated(moderation))
        };
        let wait = Wait::new(false).unwrap();
        Self { ring, port, running, rules, limit, wait, call, events, next: 0 }
    }

    pub(super) fn send(&mut self, count: u64) {
        self.send_long(60, count);
    }

    /// Two hundred buffers of 2 KiB.
    fn post(&mut self) {
        for index in 0..200 {
            self.ring.driver.add(&[], &[(DATA + index * 2048, 2048)]).unwrap();
        }
        self.ring.driver.publish();
    }

    /// One turn, and further ones until the port has finished what it took.
    fn turn(&mut self, now_ns: u64) {
        self.running.turn(&mut QueueIo::new(&mut self.wait, 0, 1, now_ns));
        while self.is_late() {
            self.running.turn(&mut QueueIo::new(&mut self.wait, 0, 1, now_ns));
        }
    }

    /// True while frames are with the port, or have been, and are not back.
    fn is_late(&self) -> bool {
        let script = self.port.script();
        script.late.as_ref().is_some_and(|delay| delay.grip.count() > 0)
    }

    /// No more pops, until nothing is in flight.
    fn drain(&mut self, now_ns: u64) {
        self.running.drain();
        if late() {
            self.turn(now_ns);
        }
        assert!(self.running.is_drained());
    }

    /// Gives an order; returns its reply.
    fn heed<T>(&mut self, order: impl FnOnce(oneshot::Sender<T>) -> Order, now_ns: u64) -> T {
        let (reply, mut done) = oneshot::channel();
        self.running.heed(order(reply), &mut QueueIo::new(&mut self.wait, 0, 1, now_ns));
        if self.is_late() {
            self.turn(now_ns);
        }
        done.try_recv().unwrap()
    }

    pub(super) fn set_kick(&mut self, kick: Kick) {
        self.heed(|reply| Order::Kick(Some(kick), reply), 0);
    }

    /// Other memory with the same content, at the time `now_ns`.
    fn set_memory(&mut self, now_ns: u64) {
        let memory = Arc::new((*self.ring.memory).clone());
        let addresses = self.ring.config.addresses;
        let heard = self.heed(|fence| Order::Memory(memory, addresses, fence), now_ns);
        assert_eq!(heard, Ok(()));
    }

    pub(super) fn settles(&mut self, how: (Decision, bool), now_ns: u64) -> bool {
        self.running.settle(how.0, how.1, &mut QueueIo::new(&mut self.wait, 0, 1, now_ns))
    }

    /// The queue hears of an event of its kick.
    fn hear(&mut self, event: Woken, now_ns: u64) {
        let EventSource::Kick { slot, watch } = event.source else { panic!("a kick") };
        let mut io = QueueIo::new(&mut self.wait, slot, 1, now_ns);
        self.running.on_event(Happened::Kick(watch), event, &mut io);
    }

    /// True if the driver was called since it was asked last.
    fn is_called(&self) -> bool {
        rustix::io::read(&self.call, &mut [0; 8]).is_ok()
    }

    pub(super) fn returned(&mut self) -> usize {
        std::iter::from_fn(|| self.ring.driver.take_used()).count()
    }

    fn coalesce(&mut self, packets_max: u32, delay_us_max: u32) {
        let limits = Some(Limits { count_max: packets_max, delay_us_max });
        self.heed(|reply| Order::Moderate(limits, reply), 0);
    }
}

#[test]
fn a_driver_that_coalesces_is_called_after_its_count_or_its_time() {
    let mut guest = Guest::new(false);
    guest.send(1);
    guest.turn(1);
    assert!(guest.is_called() && guest.running.deadline_ns().is_none(), "at first nothing waits");
    guest.coalesce(5, 100);
    guest.send(4);
    guest.turn(1000);
    assert!(!guest.is_called());
    assert_eq!(guest.returned(), 5, "buffers come back at once, only the call waits");
    assert_eq!(guest.running.deadline_ns(), Some(101_000));
    guest.send(1);
    guest.turn(2000);
    assert!(guest.is_called(), "five packets");
    assert_eq!(guest.running.deadline_ns(), None);
    guest.send(1);
    guest.turn(3000);
    guest.turn(102_999);
    assert!(!guest.is_called());
    guest.turn(103_000);
    assert!(guest.is_called(), "100 microseconds");
    guest.coalesce(0, 0);
    guest.send(1);
    guest.turn(104_000);
    assert!(guest.is_called());
}

#[test]
fn a_frame_in_many_buffers_is_one_packet_of_a_driver_that_coalesces() {
    for lends in [false, true] {
        let mut guest = Guest::receiving(lends);
        guest.post();
        guest.coalesce(3, 1000);
        guest.port.arrive(RawNetHeader::default(), &frame(0, 20_000));
        guest.turn(1);
        assert_eq!(guest.returned(), 10);
        assert!(!guest.is_called(), "ten buffers are one packet");
        guest.port.arrive(RawNetHeader::default(), &frame(1, 60));
        guest.port.arrive(RawNetHeader::default(), &frame(2, 60));
        guest.turn(2);
        assert!(guest.is_called(), "three packets");
    }
}

#[test]
fn a_frame_that_is_dropped_is_no_packet_of_a_driver_that_coalesces() {
    let mut guest = Guest::new(true);
    guest.post();
    guest.coalesce(3, 1000);
    guest.port.arrive(RawNetHeader::default(), &frame(0, 60));
    // Too short for an Ethernet header: dropped.
    (0..8).for_each(|_| guest.port.arrive(RawNetHeader::default(), &[0; 4]));
    guest.port.arrive(RawNetHeader::default(), &frame(1, 60));
    guest.turn(1);
    assert_eq!((guest.returned(), guest.ring.stats.dropped_short.value()), (2, 8));
    assert!(!guest.is_called(), "two packets");
    guest.port.arrive(RawNetHeader::default(), &frame(2, 60));
    guest.turn(2);
    assert!(guest.is_called(), "three packets");
}

#[test]
fn a_driver_that_looks_by_itself_is_not_called() {
    for event_idx in [false, true] {
        for is_rx in [false, true] {
            let mut guest = Guest::with(is_rx, event_idx);
            if is_rx {
                guest.post();
            }
            let pass = |guest: &mut Guest, number| {
                if is_rx {
                    guest.port.arrive(RawNetHeader::default(), &frame(number, 60));
                } else {
                    guest.send(1);
                }
                guest.turn(number);
                assert_eq!(guest.returned(), 1);
                guest.is_called()
            };
            guest.ring.driver.disable_notifications();
            assert!(!pass(&mut guest, 1), "{event_idx} {is_rx}");
            assert_eq!(guest.ring.stats.calls_suppressed.value(), 1);
            assert!(!guest.ring.driver.enable_notifications(), "there is no more");
            assert!(pass(&mut guest, 2), "{event_idx} {is_rx}");
            assert_eq!(guest.ring.stats.calls.value(), 1);
        }
    }
}

#[test]
fn a_call_that_is_held_back_is_sent_before_the_queue_stops() {
    let mut guest = Guest::new(false);
    guest.coalesce(100, 1000);
    guest.send(2);
    guest.turn(1);
    assert!(!guest.is_called());
    guest.drain(2);
    assert!(guest.is_called());
    assert_eq!((guest.running.base(), guest.returned()), (2.into(), 2));
}

#[test]
fn other_memory_under_a_blocked_transmitq_loses_what_the_port_does_not_take_and_no_chain() {
    use Next::{Block, Take};
    let mut guest = Guest::new(false);
    guest.port.script().sends.extend([Take, Block, Take, Block]);
    guest.send(4);
    guest.turn(1);
    assert!(guest.is_called());
    guest.set_memory(2);
    assert!(guest.is_called(), "the driver hears of the chains that were let go");
    assert_eq!(guest.returned(), 4);
    guest.send(1);
    guest.turn(3);
    let full = guest.ring.stats.dropped_port_full.value();
    if late() && full == 3 {
        // Nobody had begun with the second frame when the memory was to change.
        guest.port.assert_sent([0, 4]);
        return;
    }
    guest.port.assert_sent([0, 1, 4]);
    assert_eq!(full, 2);
}

#[test]
fn other_memory_under_a_receiveq_loses_nothing() {
    for lends in [false, true] {
        let mut guest = Guest::receiving(lends);
        guest.post();
        guest.port.arrive(RawNetHeader::default(), &frame(0, 5000));
        guest.turn(1);
        guest.set_memory(2);
        guest.port.arrive(RawNetHeader::default(), &frame(1, 5000));
        guest.turn(3);
        guest.drain(4);
        assert_eq!((guest.running.base(), guest.returned()), (6.into(), 6));
    }
}

#[test]
fn a_queue_that_broke_while_the_host_had_no_memory_wants_no_turn() {
    let mut guest = Guest::new(false);
    guest.port.script().then = Some(Next::NoMemory);
    guest.send(1);
    guest.turn(1);
    assert!(guest.running.deadline_ns().is_some(), "it tries again");
    // The driver makes more available than the ring has.
    let avail = guest.ring.memory.words(0x8000, avail_ring_size(256), 2).unwrap();
    avail.store_u16_release(RING_IDX, 1000);
    guest.port.script().then = None;
    guest.turn(1_000_001);
    guest.port.script().then = Some(Next::NoMemory);
    guest.turn(1_000_002);
    assert_eq!(guest.ring.stats.faults.value(), 1);
    assert_eq!(guest.running.deadline_ns(), None, "a worker would wake for it for ever");
    guest.drain(3_000_000);
}

#[test]
fn a_queue_that_is_found_broken_when_it_settles_tells_it_at_once() {
    for event_idx in [false, true] {
        let mut guest = Guest::with(false, event_idx);
        guest.set_kick(Kick::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap()).unwrap());
        guest.turn(1);
        // The driver makes more available than the ring has, after the last look at it.
        let avail = guest.ring.memory.words(0x8000, avail_ring_size(256), 2).unwrap();
        avail.store_u16_release(RING_IDX, 1000);
        let how = (Decision::Sleep, false);
        assert!(!guest.settles(how, 2), "nobody would be told before another kick");
        guest.turn(3);
        let event = guest.events.try_recv().map(|event| event.kind);
        assert!(matches!(event, Ok(EventKind::Fault(_))), "{event:?}");
        assert!(guest.settles(how, 4), "it is looked at no more");
    }
}

#[test]
fn a_queue_that_breaks_in_the_batch_that_finds_no_memory_wants_no_turn() {
    let mut guest = Guest::new(false);
    guest.port.script().then = Some(Next::NoMemory);
    guest.ring.write(DATA, &[&[0; HEADER_SIZE][..], &frame(0, 60)].concat());
    guest.ring.driver.add(&[(DATA, 72)], &[]).unwrap();
    guest.ring.driver.add(&[(MEMORY, 72)], &[]).unwrap();
    guest.ring.driver.publish();
    guest.turn(1);
    assert_eq!(guest.ring.stats.faults.value(), 1);
    guest.turn(2_000_000);
    assert_eq!(guest.running.deadline_ns(), None, "a worker would wake for it for ever");
    guest.drain(3_000_000);
    assert_eq!(guest.returned(), 1);
}

#[test]
fn a_queue_that_moved_sends_what_it_held_back_and_goes_on_holding_back() {
    let mut guest = Guest::new(false);
    guest.coalesce(100, 1000);
    guest.port.script().sends.extend([Next::Take, Next::Block, Next::Block]);
    guest.send(2);
    guest.turn(1_000_000_000);
    assert!(!guest.is_called(), "one packet waits for more");
    guest.drain(1_000_000_001);
    assert!(guest.is_called());
    guest.running.attach(&mut QueueIo::new(&mut guest.wait, 0, 1, 1_000_000_005));
    guest.send(1);
    guest.turn(1_000_000_010);
    assert!(!guest.is_called());
    assert_eq!(guest.running.deadline_ns(), Some(1_001_000_010));
    guest.turn(1_001_000_010);
    assert!(guest.is_called());
}

#[test]
fn a_receiveq_whose_port_is_gone_lets_its_worker_sleep_whatever_the_driver_posts() {
    for lends in [false, true] {
        let mut guest = Guest::receiving(lends);
        let kick = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        let kick = Kick::new(kick).unwrap();
        guest.set_kick(kick);
        guest.post();
        guest.port.script().arrives.push_back(Err(Errno::BADFD));
        guest.turn(1);
        let settles = |guest: &mut Guest, now_ns| guest.settles((Decision::Sleep, false), now_ns);
        assert!(settles(&mut guest, 2));
        assert_eq!(guest.events.try_recv().unwrap().kind, EventKind::PortGone);
        guest.set_memory(3);
        guest.turn(4);
        assert!(settles(&mut guest, 5), "it would look for ever");
        assert!(guest.events.try_recv().is_err(), "said once");
        // It may be there again when the driver enables the queue.
        guest.port.arrive(RawNetHeader::default(), &frame(0, 60));
        assert_eq!(guest.heed(|fence| Order::Enable(true, fence), 6), Ok(()));
        guest.turn(7);
        assert_eq!(guest.returned(), 1);
    }
}

#[test]
fn a_frame_that_stays_with_its_port_wakes_nobody_until_the_driver_posts_more() {
    let mut guest = Guest::receiving(true);
    let kick = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    guest.set_kick(Kick::new(kick).unwrap());
    guest.ring.driver.add(&[], &[(DATA, 2048)]).unwrap();
    guest.ring.driver.publish();
    guest.port.arrive(RawNetHeader::default(), &frame(0, 5000));
    guest.turn(1);
    let settles = |guest: &mut Guest, now_ns| guest.settles((Decision::Sleep, false), now_ns);
    assert!(settles(&mut guest, 2), "the port would say for ever that there is something");
    assert_eq!((guest.returned(), guest.is_called()), (0, false));
    for index in 1..3 {
        guest.ring.driver.add(&[], &[(DATA + index * 2048, 2048)]).unwrap();
    }
    assert!(guest.ring.driver.publish(), "the driver was asked to kick");
    guest.running.wake(3);
    guest.turn(4);
    assert_eq!(guest.returned(), 3);
}

const LOOK: Decision = Decision::Look { reach_ns: 32_000 };

#[test]
fn frames_that_wait_for_the_port_do_not_pass_while_the_link_is_down() {
    for is_let_go in [false, true] {
        let mut guest = Guest::new(false);
        guest.port.script().sends.extend([Next::Take, Next::Block]);
        guest.send(3);
        guest.turn(1);
        let down = Rules { link_up: false, ..open_rules() };
        guest.rules.set(down);
        guest.heed(Order::Refresh, 2);
        if is_let_go {
            guest.drain(3);
        } else {
            guest.turn(3);
        }
        assert_eq!(guest.returned(), 3);
        guest.port.assert_sent([0]);
        let stats = &guest.ring.stats;
        assert_eq!((stats.packets.value(), stats.dropped_link_down.value()), (1, 2));
    }
}
