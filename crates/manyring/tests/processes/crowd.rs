//! Many front-ends of one device process: all that connect at once are served, and none waits for
//! the messages of another one.

use crate::domain::process;
use crate::support::process::{self, Daemon};
use manyring_driver::{BlkDriver, BlkDriverOptions};
use rustix::fd::AsFd;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime};

const SET_VRING_NUM: u32 = 8;
const SET_VRING_CALL: u32 = 13;

/// A disk in memory of this name.
fn disk(name: &str) -> String {
    format!("[[blk]]\nname = '{name}'\nsocket_path = '@/{name}'\nmemory = '1M'\n")
}

fn serve(devices: &str, names: &[&str]) -> Daemon {
    let text = format!("[daemon]\ncontrol = '@/control'\ndomains = 'user'\n{devices}");
    Daemon::run(&text, &[names, &["control"]].concat())
}

fn connect(daemon: &Daemon, name: &str) -> BlkDriver {
    BlkDriver::connect(&daemon.socket_of(name), &BlkDriverOptions::default()).unwrap()
}

#[test]
fn the_front_ends_of_a_hundred_devices_that_connect_at_once_are_all_served() {
    const DEVICES: usize = 100;
    let names: Vec<_> = (0..DEVICES).map(|n| format!("d{n}")).collect();
    let devices: String = names.iter().map(|name| disk(name)).collect();
    let sockets: Vec<_> = names.iter().map(String::as_str).collect();
    let daemon = serve(&devices, &sockets);
    let all_are_there = Barrier::new(DEVICES);
    std::thread::scope(|scope| {
        for name in &sockets {
            let (daemon, all_are_there) = (&daemon, &all_are_there);
            scope.spawn(move || {
                all_are_there.wait();
                // None of them connects again.
                connect(daemon, name).queues[0].write(8, &[7; 512]).unwrap();
            });
        }
    });
    let own = format!("user:{}", rustix::process::getuid().as_raw());
    assert_eq!(process(&daemon, &own)["devices"].as_array().unwrap().len(), DEVICES);
    assert!(!daemon.log().contains("ERROR"), "{}", daemon.log());
    // All of them stop, and none of them is given up.
    let log = std::fs::File::open(daemon.folder().join("log")).unwrap();
    assert!(daemon.terminate().success());
    let log = std::io::read_to_string(log).unwrap();
    assert!(!log.contains("timed out"), "{log}");
}

/// Sends messages to a device, each of which is an order to nobody: the size of a ring that does
/// not run, which is written to its journal, or an eventfd to call, which goes to the supervisor.
/// Returns when they were obeyed.
fn flood(bad: &mut BlkDriver, count: u32, has_fds: bool, sent: &AtomicU32) {
    let call = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
    for n in 0..count {
        let state = [7u32, 64 << (n % 2)].map(u32::to_ne_bytes).concat();
        let message = match has_fds {
            true => bad.front.send_message(SET_VRING_CALL, &7u64.to_ne_bytes(), &[call.as_fd()]),
            false => bad.front.send_message(SET_VRING_NUM, &state, &[]),
        };
        message.unwrap();
        sent.fetch_add(1, Ordering::Relaxed);
    }
    // This one is answered when those before it were obeyed.
    bad.front.features().expect("the session goes on");
}

#[test]
fn a_session_begins_beside_thousands_of_messages_of_another_session_of_its_device_process() {
    // With descriptors they pass at a pace, and others at once.
    begins_beside_a_flood(8192, true);
    begins_beside_a_flood(32_768, false);
}

fn begins_beside_a_flood(count: u32, has_fds: bool) {
    let config = disk("bad") + "num_queues = 8\n" + &disk("good");
    let daemon = serve(&config, &["bad", "good"]);
    let mut bad = connect(&daemon, "bad");
    connect(&daemon, "good").queues[0].write(8, &[7; 512]).unwrap();
    let sent = AtomicU32::new(0);
    let mut beside = Vec::new();
    std::thread::scope(|scope| {
        let flood = scope.spawn(|| flood(&mut bad, count, has_fds, &sent));
        // What passes at once is used up by then.
        assert!(process::wait_until(|| sent.load(Ordering::Relaxed) > count / 4));
        while !flood.is_finished() {
            let before = sent.load(Ordering::Relaxed);
            let options = BlkDriverOptions { queues: 8, ..BlkDriverOptions::default() };
            let mut good = BlkDriver::connect(&daemon.socket_of("good"), &options).unwrap();
            good.queues[7].write(8, &[7; 512]).unwrap();
            // One that the flood's end has set free is no witness.
            if !flood.is_finished() {
                beside.push(sent.load(Ordering::Relaxed) - before);
            }
        }
    });
    // A busy host may take the CPU from some of them.
    let least = beside.iter().min().expect("no session began before the flood was over");
    // Where each message of a session stood behind the flood's, three quarters of these were.
    assert!(*least <= count / 2, "of the flood beside each session that began: {beside:?}");
    assert!(daemon.terminate().success());
}

#[test]
fn the_descriptors_that_a_front_end_sends_without_end_reach_the_supervisor_at_a_pace() {
    /// Reports of a device process's sessions that pass at once, and the time after which one more
    /// does.
    const AT_ONCE: u32 = 1024;
    const EACH: Duration = Duration::from_micros(400);
    const MESSAGES: u32 = 3000;
    let daemon = serve(&(disk("bad") + "num_queues = 8\n"), &["bad"]);
    let mut bad = connect(&daemon, "bad");
    let own = format!("user:{}", rustix::process::getuid().as_raw());
    let reports = || process(&daemon, &own)["reports"].as_u64().unwrap();
    let (before, began) = (reports(), SystemTime::now());
    flood(&mut bad, MESSAGES, true, &AtomicU32::new(0));
    let took = began.elapsed().unwrap();
    assert!(took >= EACH * (MESSAGES - AT_ONCE), "{took:?}");
    // One for each message: the call that is replaced is released with the next one.
    assert!(process::wait_until(|| reports() - before >= u64::from(MESSAGES)));
    // What needs no descriptors reaches the supervisor not at all.
    let before = reports();
    flood(&mut bad, MESSAGES, false, &AtomicU32::new(0));
    assert!(reports() - before < 50, "{} reports", reports() - before);
    assert!(daemon.terminate().success());
}
