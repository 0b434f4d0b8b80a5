//! What a front-end does to the rings of a network device that run: another memory table, enable
//! and disable, stop and start, more and fewer queue pairs, another worker, an end without a word.
//! Frames may be lost then, and are counted; what arrives is whole, and traffic goes on. It needs
//! root.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where it fails")]

mod datagram;
mod process;
mod rings;
mod space;

use datagram::{Host, datagram, payload};
use manyring_backend::net::tap::{TapOptions, TapPort, TapSource};
use manyring_device::net::{NetDevice, NetOptions as DeviceOptions};
use manyring_device::{Device, Pool, PoolOptions};
use manyring_driver::{Arena, ControlOwner, NetDriver, NetOptions, NetPair, NetRx, NetTx};
use manyring_queue::RingFeatures;
use manyring_wire::net::RawHeader;
use process::{Daemon, PATIENCE, wait_until};
use rings::{Restart, StopAtEnd, activation, replace_table};
use space::{in_own_space, queues, run};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

const PAIRS: u16 = 2;
/// Datagrams that a pair has on their way at most.
const WINDOW: u64 = 32;
const CONFIG: &str =
    "[[net]]\nname = 'lan'\nsocket_path = '@/lan'\ntap = 'lan0'\nqueue_pairs = 2\n";

fn options(control: ControlOwner) -> NetOptions {
    // Small buffers: most frames fill several.
    NetOptions { queue_pairs: PAIRS, control, mergeable_size: 512, ..NetOptions::default() }
}

/// What datagram `number` of a pair carries.
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
        // What does not come back for a while was lost.
        if sent < seen + WINDOW || idle > 50 {
            let bytes = [content(sent), vec![port]].concat();
            if pair.tx.send(&RawHeader::default(), &datagram(port.into(), &bytes)).unwrap() {
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

/// The same with a daemon on a tap.
fn daemon_under_load(
    control: ControlOwner,
    rounds: usize,
    mut change: impl FnMut(&mut NetDriver, usize) + Send,
) {
    in_own_space(|| {
        let daemon = Daemon::run(CONFIG, &["lan"]);
        let host = Host::on("lan0");
        let mut driver = NetDriver::connect(&daemon.socket_of("lan"), &options(control)).unwrap();
        driver.set_queue_pairs(PAIRS).unwrap();
        let mut pairs = std::mem::take(&mut driver.pairs);
        under_load(&host, &mut pairs, rounds, |round| change(&mut driver, round));
        assert!(!daemon.log().contains("WARN"), "{}", daemon.log());
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
        assert!(wait_until(|| told() == usize::from(PAIRS)), "{}", daemon.log());
        // Frames to it are dropped and counted; its receiveqs ask for nothing.
        let tx = &mut driver.pairs[0].tx;
        assert!(tx.send(&RawHeader::default(), &[0; 60]).unwrap());
        tx.publish(0).unwrap();
        let before = cpu_ticks(&daemon);
        std::thread::sleep(Duration::from_millis(500));
        let used = cpu_ticks(&daemon) - before;
        assert!(used < 10, "a worker looks for ever: {used} of 50 ticks");
        assert_eq!(told(), usize::from(PAIRS), "{}", daemon.log());
    });
}

#[test]
fn rings_are_stopped_and_started_while_frames_flow() {
    in_own_space(|| {
        let daemon = Daemon::run(CONFIG, &["lan"]);
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
    in_own_space(|| {
        let daemon = Daemon::run(CONFIG, &["lan"]);
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

#[test]
fn queues_move_from_worker_to_worker_while_frames_flow() {
    const WORKERS: usize = 3;
    for (uring, spin_us) in [(true, 32), (false, 0)] {
        in_own_space(|| {
            let source = TapSource::Name { name: "mv0".into(), must_exist: false };
            let (mtu, bridge) = (None, None);
            let queue_pairs = PAIRS.into();
            let tap = TapOptions { source, queue_pairs, sndbuf: None, mtu, bridge, up: Some(true) };
            let port = Arc::new(TapPort::open(tap).unwrap());
            let pool = Pool::new(PoolOptions { workers_max: WORKERS, spin_us, uring });
            let (name, mac) = ("moving".to_owned(), [2, 0, 0, 0, 0, 0x22]);
            let device = DeviceOptions { name, queue_pairs, mac, mtu: None, speed: None };
            let device = NetDevice::new(device, port, pool);
            let host = Host::on("mv0");
            let options = options(ControlOwner::FrontEnd);
            let features = device.features() & NetOptions::PLAIN;
            let size = NetRx::arena_size(&options) + NetTx::arena_size(&options);
            let arena = Arc::new(Arena::new(size * u64::from(PAIRS) + 4096).unwrap());
            let control = runtime();
            control.block_on(device.set_features(features));
            let ring = RingFeatures::from_bits(features);
            let pair = |index| NetPair {
                rx: NetRx::new(&arena, index, features, &options).unwrap(),
                tx: NetTx::new(&arena, index, ring, &options).unwrap(),
            };
            let mut pairs: Vec<_> = (0..PAIRS).map(pair).collect();
            let mut handles = Vec::new();
            for pair in &mut pairs {
                for vring in [pair.rx.vring(), pair.tx.vring()] {
                    let activation = activation(&arena, vring, features);
                    handles.push(control.block_on(device.start(activation)).unwrap());
                }
            }
            under_load(&host, &mut pairs, 60, |round| {
                let handle = &handles[round % 4];
                let to = (handle.worker().unwrap() + 1) % WORKERS;
                assert!(wait_until(|| control.block_on(handle.move_to(to))));
                assert_eq!(handle.worker(), Some(to));
            });
            for (index, handle) in handles.into_iter().enumerate() {
                control.block_on(device.stop(index, handle)).unwrap();
                let stats = device.stats(index).unwrap();
                assert_eq!((stats.moves.value(), stats.faults.value()), (15, 0));
                let lost: u64 = stats
                    .counters()
                    .iter()
                    .filter(|c| c.name.starts_with("dropped"))
                    .map(|c| c.value)
                    .sum();
                let (passed, full) = (stats.packets.value(), stats.dropped_port_full.value());
                assert!(passed > 0 && lost == full, "queue {index}: {lost} lost, {full} by moves");
            }
        });
    }
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
                pair.tx.send(&RawHeader::default(), &datagram(port.into(), &bytes)).unwrap();
                pair.tx.publish(0).unwrap();
                pair.tx.drain(PATIENCE).unwrap();
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
