//! A flow that moves to another queue keeps its order, however often the number of queues to which
//! the host delivers changes.

use crate::guest::{GUEST, GUEST_MAC, Guest, HOST, ethernet, halves, ipv4, is_ipv4};
use crate::space::{TIMEOUT, in_own_space, link, named, run};
use manyring_backend::net::tap::{Flows, QueueLength, TapOptions, TapPort};
use manyring_backend::net::{Port, PortRx};
use manyring_device::net::{Gate, Receiving};
use manyring_wire::net::RawNetHeader;
use rustix::io::Errno;
use std::net::UdpSocket;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

const PAIRS: usize = 4;
/// The pairs in the order in which they are attached.
const ORDER: [usize; PAIRS] = [2, 0, 3, 1];
const FLOWS: u16 = 64;
const CHANGES: usize = 200;
const UDP: u8 = 17;
/// The first port of the flows.
const PORT: u16 = 2000;

/// The next number that each flow is expected to have at least, and the queue of its last frame.
type Arrived = Vec<Mutex<(u32, usize)>>;

/// What the threads of a test share.
struct Shared {
    is_over: AtomicBool,
    /// Turns of each queue that have ended with all that follows from them.
    turns: [AtomicU64; PAIRS],
    arrived: Arrived,
    /// Frames of each queue; frames that came by another queue than the one before; frames too
    /// late.
    frames: [AtomicUsize; PAIRS],
    moved: AtomicUsize,
    late: AtomicUsize,
}

impl Shared {
    fn new() -> Self {
        Self {
            is_over: AtomicBool::new(false),
            turns: Default::default(),
            arrived: (0..FLOWS).map(|_| Mutex::default()).collect(),
            frames: Default::default(),
            moved: AtomicUsize::new(0),
            late: AtomicUsize::new(0),
        }
    }

    /// Reads a queue until the end, in turns, as a receiveq does.
    fn read(&self, queue: usize, rx: &mut dyn PortRx, gate: &Gate) {
        let mut guest = Guest::new();
        while !self.is_over.load(Ordering::Relaxed) {
            let frames = turn(&mut guest, rx, gate, 16);
            if frames.is_empty() {
                std::thread::yield_now();
            }
            frames.iter().for_each(|frame| self.note(queue, frame));
            self.turns[queue].fetch_add(1, Ordering::Release);
        }
    }

    fn note(&self, queue: usize, frame: &[u8]) {
        let port = u16::from_be_bytes([frame[36], frame[37]]);
        let number = u32::from_be_bytes(frame[42..46].try_into().unwrap());
        let mut arrived = self.arrived[usize::from(port - PORT)].lock().unwrap();
        let (next, before) = *arrived;
        self.late.fetch_add(usize::from(number < next), Ordering::Relaxed);
        self.moved.fetch_add(usize::from(queue != before && next > 0), Ordering::Relaxed);
        self.frames[queue].fetch_add(1, Ordering::Relaxed);
        *arrived = (number + 1, queue);
    }

    /// Waits until each queue has begun a new turn.
    fn pass(&self) {
        for turns in &self.turns {
            let before = turns.load(Ordering::Acquire);
            until(|| turns.load(Ordering::Acquire) > before);
        }
    }

    /// Sends numbered datagrams of these flows until the end.
    fn send(&self, flows: impl Iterator<Item = u16> + Clone) {
        let socket = UdpSocket::bind("10.77.0.1:0").unwrap();
        for number in 0_u32.. {
            for flow in flows.clone() {
                socket.send_to(&number.to_be_bytes(), ("10.77.0.2", PORT + flow)).unwrap();
            }
            if self.is_over.load(Ordering::Relaxed) {
                return;
            }
        }
    }
}

#[track_caller]
fn until(is_so: impl Fn() -> bool) {
    for _ in 0..TIMEOUT.as_millis() * 40 {
        if is_so() {
            return;
        }
        std::thread::sleep(Duration::from_micros(100));
    }
    panic!("it does not come");
}

/// Takes up to `most` frames of a queue, as a receiveq does in a turn. Returns the datagrams.
fn turn(guest: &mut Guest, rx: &mut dyn PortRx, gate: &Gate, most: usize) -> Vec<Vec<u8>> {
    let Some(older) = gate.look() else { return Vec::new() };
    let (mut left, mut frames) = (older, Vec::new());
    for _ in 0..most {
        match guest.try_recv(rx) {
            Ok((_, frame)) => {
                left = left.saturating_sub(1);
                frames.extend(is_ipv4(&frame, UDP).then_some(frame));
            }
            Err(Errno::AGAIN) => {
                left = 0;
                break;
            }
            Err(errno) => panic!("{errno}"),
        }
    }
    gate.note(older, left);
    frames
}

/// A tap whose flows move, as those of a device.
struct Moving {
    port: TapPort,
    receiving: Receiving,
}

impl Moving {
    fn new(port: TapPort) -> Self {
        Self { port, receiving: Receiving::new(PAIRS) }
    }

    fn flows(&self) -> &Flows {
        self.port.flows().expect("these tests need root")
    }

    /// Begins to change the number of pairs. Returns false if that moves no flow.
    fn begin(&self, pairs: Option<usize>) -> bool {
        self.receiving.begin(self.flows(), &ORDER, pairs)
    }

    fn turn(&self, pairs: Option<usize>) {
        self.receiving.turn(self.flows(), &ORDER, pairs);
    }

    /// Changes the number while nothing is to be delivered.
    fn change(&self, pairs: Option<usize>) -> bool {
        let moves = self.begin(pairs);
        if moves {
            self.turn(pairs);
            counts(&self.port);
            self.receiving.end();
        }
        moves
    }

    /// Changes the number while the threads of `shared` read.
    fn change_beside(&self, pairs: Option<usize>, shared: &Shared) -> bool {
        if !self.begin(pairs) {
            return false;
        }
        shared.pass();
        self.turn(pairs);
        until(|| self.receiving.unread().is_empty());
        shared.pass();
        self.receiving.end();
        true
    }
}

/// A tap whose pairs are attached in an order of their own, and a host that knows its guest.
fn opened() -> TapPort {
    opened_by(named("mr0", PAIRS))
}

fn opened_by(options: TapOptions) -> TapPort {
    let port = TapPort::open(options).unwrap();
    run("ip addr replace 10.77.0.1/24 dev mr0");
    run("ip neigh replace 10.77.0.2 lladdr 02:00:00:00:00:11 dev mr0 nud permanent");
    ORDER.iter().for_each(|pair| port.set_attached(*pair, true).unwrap());
    port
}

#[test]
fn no_flow_is_reordered_by_two_hundred_changes() {
    in_own_space(|| {
        let moving = Moving::new(opened());
        let shared = Shared::new();
        // The guest sends half of the flows, each by a pair of its own.
        let to = link("mr0").unwrap().address.unwrap();
        for flow in 0..FLOWS / 2 {
            let ports = [PORT + flow, 9, 8, 0].map(u16::to_be_bytes).concat();
            let frame = ethernet(to, GUEST_MAC, 0x0800, &ipv4(GUEST, HOST, UDP, &ports));
            let (mut tx, _) = halves(&moving.port, usize::from(flow) % PAIRS);
            Guest::new().send_in(&mut *tx, RawNetHeader::default(), &frame, frame.len());
        }
        std::thread::scope(|scope| {
            for queue in 0..PAIRS {
                let (shared, moving) = (&shared, &moving);
                let gate = moving.receiving.gate(queue);
                scope.spawn(move || shared.read(queue, &mut *halves(&moving.port, queue).1, &gate));
            }
            scope.spawn(|| shared.send((0..FLOWS).step_by(2)));
            scope.spawn(|| shared.send((1..FLOWS).step_by(2)));
            moving.change_beside(Some(1), &shared);
            let mut pairs = 1;
            for round in 0..CHANGES {
                pairs = (pairs + round * round % 3) % PAIRS + 1;
                assert!(moving.change_beside(Some(pairs), &shared), "{round}: {pairs}");
                assert_eq!(moving.flows().receiving(), Some(pairs));
                // Frames come by the pairs in use before the next change.
                let sum = || shared.frames.iter().map(|n| n.load(Ordering::Relaxed)).sum::<usize>();
                let before = sum();
                until(|| sum() > before + 100);
            }
            shared.is_over.store(true, Ordering::Relaxed);
        });
        let frames: Vec<_> = shared.frames.iter().map(|n| n.load(Ordering::Relaxed)).collect();
        let moved = shared.moved.load(Ordering::Relaxed);
        println!("{frames:?}, {moved} moved");
        assert!(frames.iter().all(|count| *count > 0), "{frames:?}");
        assert!(moved > CHANGES, "{moved} frames have moved a flow");
        assert_eq!(shared.late.load(Ordering::Relaxed), 0);
    });
}

/// The number of frames in each queue, which are taken out.
fn counts(port: &TapPort) -> Vec<usize> {
    let count = |queue| Guest::new().drain(&mut *halves(port, queue).1, |f| is_ipv4(f, UDP));
    (0..PAIRS).map(count).collect()
}

/// The host sends a datagram of each flow.
fn send(host: &UdpSocket) {
    for flow in 0..FLOWS {
        host.send_to(b"hello", ("10.77.0.2", PORT + flow)).unwrap();
    }
}

#[test]
fn the_host_delivers_to_the_first_pairs_in_its_order_and_to_all_again() {
    in_own_space(|| {
        let moving = Moving::new(opened());
        let host = UdpSocket::bind("10.77.0.1:0").unwrap();
        for (pairs, by) in [(1, vec![2]), (2, vec![0, 2]), (3, vec![0, 2, 3]), (1, vec![2])] {
            assert!(moving.change(Some(pairs)));
            send(&host);
            let counts = counts(&moving.port);
            let used: Vec<_> = (0..PAIRS).filter(|queue| counts[*queue] > 0).collect();
            assert_eq!((used, counts.iter().sum::<usize>()), (by, FLOWS.into()), "{pairs}");
        }
        // Pairs that come later get nothing, and one that goes is replaced by the last one.
        moving.port.set_attached(2, false).unwrap();
        moving.port.set_attached(2, true).unwrap();
        send(&host);
        assert_eq!(counts(&moving.port), [0, usize::from(FLOWS), 0, 0]);
        assert!(!moving.change(Some(1)), "it is so");
        assert!(moving.change(None));
        send(&host);
        assert!(counts(&moving.port).iter().all(|count| *count > 0));
    });
}

#[test]
fn a_queue_that_gets_flows_is_not_read_until_the_frames_before_are() {
    in_own_space(|| {
        let moving = Moving::new(opened());
        let host = UdpSocket::bind("10.77.0.1:0").unwrap();
        assert!(moving.change(Some(1)));
        send(&host);
        assert!(moving.begin(Some(4)));
        moving.turn(Some(4));
        send(&host);
        let turn_of = |queue: usize| {
            let (_, mut rx) = halves(&moving.port, queue);
            turn(&mut Guest::new(), &mut *rx, &moving.receiving.gate(queue), 1000).len()
        };
        for queue in [0, 3, 1] {
            assert_eq!((turn_of(queue), moving.receiving.unread()), (0, vec![2]), "{queue}");
        }
        let first = turn_of(2);
        assert!(first > usize::from(FLOWS) && moving.receiving.unread().is_empty());
        moving.receiving.end();
        let others: usize = [0, 3, 1].map(turn_of).iter().sum();
        assert_eq!(first + others, 2 * usize::from(FLOWS));
    });
}

#[test]
fn a_queue_that_never_runs_empty_is_waited_for_until_all_that_it_holds_was_read() {
    in_own_space(|| {
        let txqueuelen = QueueLength::Frames(400);
        let moving = Moving::new(opened_by(TapOptions { txqueuelen, ..named("mr0", PAIRS) }));
        let host = UdpSocket::bind("10.77.0.1:0").unwrap();
        assert!(moving.change(Some(1)));
        (0..2).for_each(|_| send(&host));
        assert!(moving.begin(Some(2)));
        moving.turn(Some(2));
        let ((_, mut rx), mut guest) = (halves(&moving.port, 2), Guest::new());
        for read in 0..100 {
            assert_eq!(moving.receiving.unread(), [2], "{read}");
            send(&host);
            turn(&mut guest, &mut *rx, &moving.receiving.gate(2), 1);
        }
        assert!(moving.receiving.unread().is_empty());
        assert!(guest.try_recv(&mut *rx).is_ok(), "it is not empty");
    });
}
