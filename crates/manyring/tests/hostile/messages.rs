//! Messages without end: they cost the front-end that sends them, and not its neighbours.

use crate::support::process::{Daemon, TIMEOUT};
use crate::support::rings::StopAtEnd;
use manyring_driver::{BlkDriver, BlkDriverOptions, DriverOp, FrontEnd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

/// Both guests share the worker and the thread that reads messages.
const CONFIG: &str = "[daemon]\nworkers = 1\n\
    [[blk]]\nname = 'bad'\nsocket_path = '@/bad'\nmemory = '16M'\n\
    [[blk]]\nname = 'good'\nsocket_path = '@/good'\nmemory = '16M'\n";
/// Messages that a front-end may send at once, and the time in which one more may come.
const AT_ONCE: u32 = 8192;
const EACH: Duration = Duration::from_millis(1);
/// How long a start of the neighbour may take: a hundred times what it takes alone.
const BOUND: Duration = Duration::from_secs(2);
const SET_OWNER: u32 = 3;
const SET_VRING_ENABLE: u32 = 18;
/// The log's line about a front-end that is slowed down.
const SLOWED: &str = "front-end throttled: it sends too many messages";

/// Enables and disables a queue `count` times without waiting for any answer.
fn flood(front: &mut FrontEnd, count: u32) {
    for n in 0..count {
        let state = [0u32.to_ne_bytes(), (n % 2).to_ne_bytes()].concat();
        front.send_message(SET_VRING_ENABLE, &state, &[]).unwrap();
    }
}

#[test]
fn a_front_end_that_sends_messages_without_end_is_slowed_down_and_its_neighbour_is_not() {
    let daemon = Daemon::run(CONFIG, &["bad", "good"]);
    let mut bad =
        BlkDriver::connect(&daemon.socket_of("bad"), &BlkDriverOptions::default()).unwrap();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // The neighbour goes on until then, also if an assertion fails here.
            let _end = StopAtEnd(&is_over);
            let mut more = 3000;
            let began = SystemTime::now();
            flood(&mut bad.front, AT_ONCE + more);
            // This one is answered when those before it were read.
            bad.front.features().expect("the session goes on");
            // On a busy host the worker may carry them out more slowly than they may come: these
            // are no orders to it.
            while !daemon.log().contains(SLOWED) && began.elapsed().unwrap() < 4 * TIMEOUT {
                for _ in 0..AT_ONCE {
                    bad.front.send_message(SET_OWNER, &[], &[]).unwrap();
                }
                bad.front.features().expect("the session goes on");
                more += AT_ONCE;
            }
            let took = began.elapsed().unwrap();
            assert!(took >= EACH * (more - 500), "{took:?} for {more} beyond the first ones");
        });
        let (mut starts, socket) = (0, daemon.socket_of("good"));
        while !is_over.load(Ordering::Relaxed) {
            let began = SystemTime::now();
            let mut good = BlkDriver::connect(&socket, &BlkDriverOptions::default()).unwrap();
            good.queues[0].write(8, &[7; 512]).unwrap();
            drop(good);
            let took = began.elapsed().unwrap();
            assert!(took < BOUND, "the neighbour's start took {took:?}");
            // One that waits for the flood has not ended before it.
            starts += u32::from(!is_over.load(Ordering::Relaxed));
            // Each start of the neighbour counts for some thirty messages of its own device, so it
            // pauses: otherwise its own pace would slow it down.
            std::thread::sleep(Duration::from_millis(50));
        }
        assert!(starts > 0, "the neighbour was served beside the flood");
    });
    // Whoever is slowed down is served all the same, and the log says so once.
    bad.front.set_vring_enable(0, true).unwrap();
    bad.queues[0].run(DriverOp::Flush).unwrap();
    drop(bad);
    let log = daemon.log();
    let lines = log.matches(SLOWED).count();
    assert_eq!(lines, 1, "{log}");
}

#[test]
fn clients_that_come_and_go_without_end_are_slowed_down_too() {
    let daemon = Daemon::run(CONFIG, &["bad", "good"]);
    let began = SystemTime::now();
    // Each counts for sixteen messages.
    for _ in 0..(AT_ONCE + 1500) / 16 {
        let mut front = FrontEnd::connect(&daemon.socket_of("bad"), 10 * BOUND).unwrap();
        front.features().unwrap();
    }
    let took = began.elapsed().unwrap();
    assert!(took >= EACH * 1000, "{took:?}");
    let mut good =
        BlkDriver::connect(&daemon.socket_of("good"), &BlkDriverOptions::default()).unwrap();
    good.queues[0].run(DriverOp::Flush).unwrap();
}
