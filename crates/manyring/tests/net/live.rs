//! Changes of the rings of a network device that run: another memory table, enable and disable,
//! stop and start, more and fewer queue pairs, another worker, an end without a word. Frames may be
//! lost then, and are counted; a frame that arrives is whole, and traffic goes on. It needs root.

use crate::support::datagram::{Host, datagram, payload};
use crate::support::process::{Daemon, TIMEOUT, wait_until};
use crate::support::rings::{Restart, StopAtEnd, activation, replace_table};
use crate::support::space::{in_own_space, queues, run};
use manyring_backend::net::Port;
use manyring_backend::net::late::{LateOptions, LatePort};
use manyring_backend::net::tap::{QueueLength, TapOptions, TapPort, TapSource};
use manyring_device::Device;
use manyring_device::net::{
    NetDevice, NetOptions as DeviceOptions, Offload, ReceivePairs, Reclaim,
};
use manyring_driver::{
    Arena, ControlOwner, NetDriver, NetDriverOptions, NetDriverRx, NetDriverTx, NetPair,
};
use manyring_engine::stats::NamedCounter;
use manyring_engine::{Moderation, Polling, Pool, PoolOptions, QueueHandle};
use manyring_queue::RingFeatures;
use manyring_wire::net::RawNetHeader;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

const PAIRS: u16 = 2;
/// Datagrams that a pair has on their way at most.
const WINDOW: u64 = 32;
const CONFIG: &str =
    "[[net]]\nname = 'lan'\nsocket_path = '@/lan'\ntap = 'lan0'\nqueue_pairs = 2\n";
/// The port is done with a frame at once, or later and in any order.
const LATE: [&str; 2] = ["", "fault = { late_tx = 5 }\n"];

fn options(control: ControlOwner) -> NetDriverOptions {
    // Small buffers: most frames fill several.
    NetDriverOptions {
        queue_pairs: PAIRS,
        control,
        mergeable_size: 512,
        ..NetDriverOptions::default()
    }
}

/// The contents of datagram `number` of a pair.
fn content(number: u64) -> Vec<u8> {
    let len = usize::try_from(8 + number.wrapping_mul(37) % 1400).unwrap();
    number.to_le_bytes().into_iter().cycle().take(len).collect()
}

/// Sends what comes to the host back to where it came from, until stopped.
fn echo(host: &Host, stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        match host.try_receive() {
            // Each datagram tells the port of its pair in its last byte.
            Some(bytes) => host.send(u16::from(*bytes.last().unwrap()), &bytes),
            None => std::thread::sleep(Duration::from_micros(100)),
        }
    }
}

/// Sends numbered datagrams and checks each that comes back, until stopped.
fn drive(pair: &mut NetPair, port: u8, stop: &AtomicBool, back: &AtomicU64) {
    let (mut sent, mut seen, mut idle) = (0u64, 0u64, 0u32);
    let mut frame = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        // Datagrams that do not come back for a while were lost.
        if sent < seen + WINDOW || idle > 50 {
            let bytes = [content(sent), vec![port]].concat();
            if pair.tx.send(&RawNetHeader::default(), &datagram(port.into(), &bytes)).unwrap() {
                sent += 1;
            }
            pair.tx.publish(0).unwrap();
        }
        pair.tx.reclaim();
        idle += 1;
        frame.clear();
        while pair.rx.recv(&mut frame).expect("whole frames").is_some() {
            if let Some(bytes) = payload(&frame) {
                let number = u64::from_le_bytes(*bytes.first_chunk().unwrap());
                let (_port, body) = bytes.split_last().unwrap();
                assert!(body == content(number), "datagram {number} has changed");
                (seen, idle) = (seen.max(number), 0);
                back.fetch_add(1, Ordering::Relaxed);
            }
            frame.clear();
        }
        pair.rx.refill().unwrap();
        if idle > 0 {
            std::thread::sleep(Duration::from_micros(50));
        }
    }
}

/// Runs `change` again and again while `pairs` carry traffic; each time all of it must get on.
fn under_load(host: &Host, pairs: &mut [NetPair], rounds: usize, mut change: impl FnMut(usize)) {
    let stop = AtomicBool::new(false);
    let back: Vec<_> = pairs.iter().map(|_| AtomicU64::new(0)).collect();
    std::thread::scope(|scope| {
        scope.spawn(|| echo(host, &stop));
        for ((pair, port), back) in pairs.iter_mut().zip(1..).zip(&back) {
            let stop = &stop;
            scope.spawn(move || drive(pair, port, stop, back));
        }
        let _stop = StopAtEnd(&stop);
        let total = || back.iter().map(|b| b.load(Ordering::Relaxed)).sum::<u64>();
        let get_on = |round: usize| {
            let goal = total() + 60;
            assert!(wait_until(|| total() >= goal), "round {round}: traffic stands at {}", total());
        };
        get_on(0);
        for round in 0..rounds {
            change(round);
            get_on(round);
        }
    });
}

/// Runs [`under_load`] with a daemon on a tap that is done with frames at once, and then later.
fn daemon_under_load(
    control: ControlOwner,
    rounds: usize,
    mut change: impl FnMut(&mut NetDriver, usize) + Send,
) {
    in_own_space(|| {
        for late in LATE {
            let daemon = Daemon::run(&[CONFIG, late].concat(), &["lan"]);
            let host = Host::on("lan0");
            let socket = daemon.socket_of("lan");
            let mut driver = NetDriver::connect(&socket, &options(control)).unwrap();
            driver.set_queue_pairs(PAIRS).unwrap();
            let mut pairs = std::mem::take(&mut driver.pairs);
            under_load(&host, &mut pairs, rounds, |round| change(&mut driver, round));
            assert!(!daemon.log().contains("WARN"), "{late} {}", daemon.log());
            // A device process that serves the tap has ended by then: the next daemon does not wait
            // for it.
            drop((pairs, driver));
            assert!(daemon.terminate().success());
        }
    });
}

#[test]
fn a_memory_table_is_replaced_while_frames_flow() {
    for control in [ControlOwner::FrontEnd, ControlOwner::Device] {
        daemon_under_load(control, 30, |driver, round| {
            replace_table(&mut driver.front, &driver.arena, round);
        });
    }
}

#[test]
fn queue_pairs_come_and_go_while_frames_flow_and_the_tap_follows() {
    for control in [ControlOwner::FrontEnd, ControlOwner::Device] {
        daemon_under_load(control, 20, |driver, round| {
            let count = if round % 2 == 0 { 1 } else { PAIRS };
            driver.set_queue_pairs(count).unwrap();
            assert_eq!(queues("lan0"), (count.into(), (PAIRS - count).into()));
        });
    }
}

/// Hundredths of a second that the daemon has run, the kernel for it included.
fn cpu_ticks(daemon: &Daemon) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", daemon.pid())).unwrap();
    let behind_name = stat.rsplit_once(')').unwrap().1;
    let times = behind_name.split_whitespace().skip(11).take(2);
    times.map(|ticks| ticks.parse::<u64>().unwrap()).sum()
}

#[test]
fn a_tap_that_is_deleted_is_told_and_costs_no_cpu() {
    in_own_space(|| {
        let daemon = Daemon::run(CONFIG, &["lan"]);
        let options = options(ControlOwner::FrontEnd);
        let mut driver = NetDriver::connect(&daemon.socket_of("lan"), &options).unwrap();
        driver.set_queue_pairs(PAIRS).unwrap();
        run("ip link del lan0");
        let told = || daemon.log().matches("the host's interface is gone").count();
        assert!(wait_until(|| told() == 1), "{}", daemon.log());
        // Frames to it are dropped and counted; its receiveqs ask for nothing.
        let tx = &mut driver.pairs[0].tx;
        assert!(tx.send(&RawNetHeader::default(), &[0; 60]).unwrap());
        tx.publish(0).unwrap();
        let mut used = 0;
        let rests = wait_until(|| {
            let before = cpu_ticks(&daemon);
            std::thread::sleep(Duration::from_secs(1));
            used = cpu_ticks(&daemon) - before;
            used < 3
        });
        assert!(rests, "a worker looks for ever: {used} of 100 ticks");
        assert_eq!(told(), 1, "{}", daemon.log());
    });
}

#[test]
fn rings_are_stopped_and_started_while_frames_flow() {
    LATE.into_iter().for_each(stop_and_start_rings);
}

fn stop_and_start_rings(late: &str) {
    in_own_space(|| {
        let daemon = Daemon::run(&[CONFIG, late].concat(), &["lan"]);
        let host = Host::on("lan0");
        let options = options(ControlOwner::FrontEnd);
        let mut driver = NetDriver::connect(&daemon.socket_of("lan"), &options).unwrap();
        let mut pairs = std::mem::take(&mut driver.pairs);
        let mut restarts = Vec::new();
        for pair in &mut pairs {
            restarts.extend([Restart::of(pair.rx.vring()), Restart::of(pair.tx.vring())]);
        }
        under_load(&host, &mut pairs, 40, |round| restarts[round % 4].run(&mut driver.front));
        assert!(!daemon.log().contains("WARN"), "{}", daemon.log());
    });
}

#[test]
fn a_guest_that_ends_without_a_word_is_followed_by_the_next() {
    LATE.into_iter().for_each(end_without_a_word);
}

fn end_without_a_word(late: &str) {
    in_own_space(|| {
        let daemon = Daemon::run(&[CONFIG, late].concat(), &["lan"]);
        let host = Host::on("lan0");
        for round in 0..6 {
            let control = [ControlOwner::FrontEnd, ControlOwner::Device][round % 2];
            let socket = daemon.socket_of("lan");
            let mut driver = NetDriver::connect(&socket, &options(control)).unwrap();
            driver.set_queue_pairs(PAIRS).unwrap();
            let mut pairs = std::mem::take(&mut driver.pairs);
            // In the middle of the traffic its session is cut, its rings are full.
            let mut session = Some(driver);
            let stop = AtomicBool::new(false);
            let back = AtomicU64::new(0);
            std::thread::scope(|scope| {
                scope.spawn(|| echo(&host, &stop));
                for (pair, port) in pairs.iter_mut().zip(1..) {
                    let (stop, back) = (&stop, &back);
                    scope.spawn(move || drive(pair, port, stop, back));
                }
                let _stop = StopAtEnd(&stop);
                assert!(wait_until(|| back.load(Ordering::Relaxed) > 100), "round {round}");
                drop(session.take());
                std::thread::sleep(Duration::from_millis(20));
            });
            assert!(wait_until(|| queues("lan0").0 == 0), "nobody serves the tap");
        }
        assert!(!daemon.log().contains("WARN"), "{}", daemon.log());
    });
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

const WORKERS: usize = 3;

/// A device without a daemon, whose queues the test moves.
struct Moving {
    pool: Arc<Pool>,
    device: NetDevice,
    host: Host,
    control: tokio::runtime::Runtime,
    pairs: Vec<NetPair>,
    /// Of the receiveq and the transmitq of each pair.
    handles: Vec<QueueHandle>,
}

impl Moving {
    /// On a new tap of this name.
    fn new(tap: &str, queue_pairs: u16, uring: bool, polling: Polling, late: bool) -> Self {
        let source = TapSource::Name { name: tap.into(), must_exist: false };
        let (mtu, bridge) = (None, None);
        let (count, up) = (queue_pairs.into(), Some(true));
        let at = TapOptions {
            source,
            queue_pairs: count,
            sndbuf: None,
            txqueuelen: QueueLength::Host,
            merge: true,
            steer: true,
            mtu,
            bridge,
            up,
        };
        let mut port: Arc<dyn Port> = Arc::new(TapPort::open(at).unwrap());
        if late {
            // A worker that asks, or is told.
            let options = LateOptions { seed: 1, calls_max: 5, tells: uring };
            port = Arc::new(LatePort::new(port, options));
        }
        let pool = Pool::new(PoolOptions { workers_max: WORKERS, polling, uring });
        let (name, mac) = ("moving".to_owned(), [2, 0, 0, 0, 0, 0x22]);
        let (mtu, speed, moderation) = (None, None, Moderation::Off);
        let (reclaim, offload) = (Reclaim::Off, Offload::All);
        let device = DeviceOptions {
            name,
            queue_pairs: count,
            mac,
            mtu,
            speed,
            moderation,
            reclaim,
            offload,
            hash_report: false,
            receive_pairs: ReceivePairs::All,
        };
        let device = NetDevice::new(device, port, pool.clone());
        let host = Host::on(tap);
        let options = NetDriverOptions { queue_pairs, ..options(ControlOwner::FrontEnd) };
        let features = device.features() & NetDriverOptions::PLAIN;
        let size = NetDriverRx::arena_size(&options) + NetDriverTx::arena_size(&options);
        let arena = Arc::new(Arena::new(size * u64::from(queue_pairs) + 4096).unwrap());
        let control = runtime();
        control.block_on(device.set_features(features));
        let ring = RingFeatures::from_bits(features);
        let pair = |index| NetPair {
            rx: NetDriverRx::new(&arena, index, features, &options).unwrap(),
            tx: NetDriverTx::new(&arena, index, ring, &options).unwrap(),
        };
        let mut pairs: Vec<_> = (0..queue_pairs).map(pair).collect();
        let mut handles = Vec::new();
        for pair in &mut pairs {
            for vring in [pair.rx.vring(), pair.tx.vring()] {
                let activation = activation(&arena, vring, features);
                handles.push(control.block_on(device.start(activation)).unwrap());
            }
        }
        Self { pool, device, host, control, pairs, handles }
    }

    /// Stops all queues. How often each has moved; no frame is lost but at a full port.
    fn stop(self) -> Vec<u64> {
        let stop = |(index, handle)| {
            self.control.block_on(self.device.stop(index, handle)).unwrap();
            let stats = self.device.stats(index).unwrap();
            assert!(stats.packets.value() > 0 && stats.faults.value() == 0, "queue {index}");
            let is_lost = |c: &NamedCounter<u64>| {
                c.name.starts_with("dropped") && c.name != "dropped_port_full" && c.value > 0
            };
            let lost: Vec<_> = stats.counters().into_iter().filter(is_lost).collect();
            assert!(lost.is_empty(), "queue {index}: {lost:?}");
            stats.moves.value()
        };
        self.handles.into_iter().enumerate().map(stop).collect()
    }
}

#[test]
fn queues_move_from_worker_to_worker_while_frames_flow() {
    let ways = [(true, Polling::default()), (false, Polling::NEVER)];
    for ((uring, polling), late) in ways.into_iter().zip([false; 2]).chain(ways.map(|w| (w, true)))
    {
        in_own_space(|| {
            let mut moving = Moving::new("mv0", PAIRS, uring, polling, late);
            let (handles, control) = (&moving.handles, &moving.control);
            under_load(&moving.host, &mut moving.pairs, 60, |round| {
                let handle = &handles[round % 4];
                let to = (handle.worker().unwrap() + 1) % WORKERS;
                assert!(wait_until(|| control.block_on(handle.move_to(to))));
                assert_eq!(handle.worker(), Some(to));
            });
            assert_eq!(moving.stop(), [15; 4]);
        });
    }
}

/// Has numbered datagrams sent to the host and back, until stopped. Each comes back once, after
/// the one before.
fn drive_in_order(pair: &mut NetPair, stop: &AtomicBool, back: &AtomicU64) {
    let (mut sent, mut came) = (0u64, 0u64);
    let mut frame = Vec::new();
    while !stop.load(Ordering::Relaxed) || came < sent {
        while sent < came + WINDOW && !stop.load(Ordering::Relaxed) {
            let bytes = [content(sent), vec![1]].concat();
            assert!(
                pair.tx.send(&RawNetHeader::default(), &datagram(1, &bytes)).unwrap(),
                "process"
            );
            sent += 1;
        }
        pair.tx.publish(0).unwrap();
        frame.clear();
        pair.rx.recv_wait(&mut frame, TIMEOUT).expect("none is lost");
        if let Some(bytes) = payload(&frame) {
            assert!(bytes == [content(came), vec![1]].concat(), "datagram {came} comes next");
            came += 1;
            back.store(came, Ordering::Relaxed);
        }
        pair.rx.refill().unwrap();
        pair.tx.reclaim();
    }
}

#[test]
fn frames_of_queues_that_move_arrive_once_and_in_order() {
    for (uring, polling) in [(true, Polling::default()), (false, Polling::NEVER)] {
        // Where the host keeps its CPUs from the workers, a pause lasts as long as that.
        let pauses: Vec<_> = std::iter::repeat_with(|| usual_pause(uring, polling))
            .take(5)
            .take_while(|pause| !(1..10_000_000).contains(pause))
            .collect();
        assert!(pauses.len() < 5, "{pauses:?} ns for a usual move");
    }
}

/// Moves queues while frames flow, in order; the longest usual pause of a move, in nanoseconds.
fn usual_pause(uring: bool, polling: Polling) -> u64 {
    const MOVES: usize = 200;
    let mut longest = 0;
    in_own_space(|| {
        let mut moving = Moving::new("mv1", 1, uring, polling, false);
        let (stop, all_back) = (AtomicBool::new(false), AtomicBool::new(false));
        let back = AtomicU64::new(0);
        let host = moving.host.twin();
        std::thread::scope(|scope| {
            scope.spawn(|| echo(&host, &all_back));
            let pair = &mut moving.pairs[0];
            let driven = scope.spawn(|| drive_in_order(pair, &stop, &back));
            let _stop = (StopAtEnd(&stop), StopAtEnd(&all_back));
            for round in 0..MOVES {
                let goal = back.load(Ordering::Relaxed) + 10;
                assert!(wait_until(|| back.load(Ordering::Relaxed) >= goal), "move {round}");
                let handle = &moving.handles[round % 2];
                let to = (handle.worker().unwrap() + 1) % WORKERS;
                // One that waits for buffers longer than a move does is asked again.
                assert!(wait_until(|| moving.control.block_on(handle.move_to(to))));
            }
            stop.store(true, Ordering::Relaxed);
            driven.join().unwrap();
        });
        let pauses: Vec<_> = moving.pool.worker_stats();
        let count: u64 = pauses.iter().map(|stats| stats.pause_ns.count()).sum();
        assert_eq!(count, MOVES as u64);
        for stats in &pauses {
            let pause_ns = stats.pause_ns.percentile(50);
            assert!(pause_ns > 0, "a move without a pause");
            longest = longest.max(pause_ns);
        }
        assert_eq!(moving.stop(), [100; 2]);
    });
    longest
}

#[test]
fn both_pairs_carry_frames_both_ways() {
    in_own_space(|| {
        let daemon = Daemon::run(CONFIG, &["lan"]);
        let host = Host::on("lan0");
        let options = options(ControlOwner::Device);
        let mut driver = NetDriver::connect(&daemon.socket_of("lan"), &options).unwrap();
        driver.set_queue_pairs(PAIRS).unwrap();
        for (pair, port) in driver.pairs.iter_mut().zip(1..) {
            // The tap answers a flow on the queue that it came from.
            let bytes = [content(u64::from(port)), vec![port]].concat();
            let echoed = wait_until(|| {
                pair.tx.send(&RawNetHeader::default(), &datagram(port.into(), &bytes)).unwrap();
                pair.tx.publish(0).unwrap();
                pair.tx.drain(TIMEOUT).unwrap();
                assert_eq!(host.receive(), bytes);
                host.send(port.into(), &bytes);
                let mut frame = Vec::new();
                while pair.rx.recv(&mut frame).unwrap().is_some() {
                    if payload(&frame) == Some(&bytes[..]) {
                        return true;
                    }
                    frame.clear();
                }
                pair.rx.refill().unwrap();
                false
            });
            assert!(echoed, "pair {port}");
        }
    });
}
