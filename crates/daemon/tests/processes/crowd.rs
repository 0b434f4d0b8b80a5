//! Many front-ends of one device process: all that connect at once are served, and none waits for
//! the messages of another one.

use crate::domain::process;
use crate::support::process::{self, Daemon};
use manyring_driver::{BlkDriver, BlkDriverOptions};
use std::sync::Barrier;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime};

const SET_VRING_NUM: u32 = 8;
/// Messages that a device takes at once.
const AT_ONCE: u32 = 8192;
/// Messages of a flood that may be taken while a session begins which has some hundred notes to
/// make. Where each of these stood behind the flood's, three quarters of the flood were.
const FEW: u32 = AT_ONCE / 2;

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

/// Sends messages to a device, each of which is an order to nobody, and a note: the size of a ring
/// that does not run. Returns when they were obeyed.
fn flood(bad: &mut BlkDriver, count: u32, sent: &AtomicU32) {
    for n in 0..count {
        let state = [7u32, 64 << (n % 2)].map(u32::to_ne_bytes).concat();
        bad.front.send_message(SET_VRING_NUM, &state, &[]).unwrap();
        sent.fetch_add(1, Ordering::Relaxed);
    }
    // This one is answered when those before it were obeyed.
    bad.front.features().expect("the session goes on");
}

#[test]
fn a_session_begins_beside_thousands_of_messages_of_another_session_of_its_device_process() {
    let daemon = serve(&(disk("bad") + &disk("good")), &["bad", "good"]);
    let mut bad = connect(&daemon, "bad");
    connect(&daemon, "good").queues[0].write(8, &[7; 512]).unwrap();
    let sent = AtomicU32::new(0);
    let mut beside = Vec::new();
    std::thread::scope(|scope| {
        let flood = scope.spawn(|| flood(&mut bad, AT_ONCE, &sent));
        // Its credit is used up by then.
        assert!(process::wait_until(|| sent.load(Ordering::Relaxed) > AT_ONCE / 8));
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
    assert!(*least <= FEW, "messages of the flood beside each session that began: {beside:?}");
    assert!(daemon.terminate().success());
}

#[test]
fn a_front_end_that_connects_again_at_once_has_no_further_notes_that_pass_at_once() {
    /// Fewer than the notes that pass at once of a session with credit on a device of 64 queues.
    const NOTES: u32 = 2000;
    /// Notes of a device process that pass without credit, and the time after which one more does.
    const WITHOUT: u32 = 256;
    const EACH: Duration = Duration::from_micros(500);
    let daemon = serve(&(disk("bad") + "num_queues = 64\n"), &["bad"]);
    let connects_again = || {
        let began = SystemTime::now();
        drop(connect(&daemon, "bad"));
        let bad = connect(&daemon, "bad");
        // The sessions of a device have credit once a second.
        let is_at_once = began.elapsed().unwrap() < Duration::from_secs(1);
        std::thread::sleep(Duration::from_secs(u64::from(!is_at_once)));
        is_at_once.then_some(bad)
    };
    let mut bad = (0..20).find_map(|_| connects_again()).expect("a faster host");
    let began = SystemTime::now();
    flood(&mut bad, NOTES, &AtomicU32::new(0));
    let took = began.elapsed().unwrap();
    assert!(took >= EACH * (NOTES - WITHOUT), "{took:?}");
    assert!(daemon.terminate().success());
}
