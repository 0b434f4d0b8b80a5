//! A front-end outlives the device process that serves it: its connection stays, and the next
//! device process goes on.
#![allow(clippy::disallowed_methods, reason = "a guest of a test has a thread of its own")]

use crate::domain::{client_works, disk, pid, process, serve, two_domains, works, works_until};
use crate::support::foreign::Client;
use crate::support::process::{Daemon, wait_until};
use crate::support::rings::StopAtEnd;
use manyring_driver::{BlkDriver, BlkDriverOptions};
use rustix::process::{Signal, kill_process};
use std::sync::atomic::AtomicBool;

/// Kills the device process of a domain, and waits until the next one serves.
fn kill(daemon: &Daemon, name: &str) {
    let (killed, starts) = (pid(daemon, name), process(daemon, name)["starts"].as_u64().unwrap());
    kill_process(killed, Signal::KILL).unwrap();
    let serves = || {
        let process = process(daemon, name);
        process["starts"] == starts + 1 && process["state"] == "serving"
    };
    assert!(wait_until(serves), "{}", daemon.log());
}

#[test]
fn a_front_end_without_an_inflight_region_loses_nothing_when_its_device_process_is_killed() {
    let daemon = two_domains();
    let mut client = Client::connect(&daemon.socket_of("a"), false);
    works(&mut client, 0);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let end = StopAtEnd(&is_over);
        let guest = scope.spawn(|| works_until(&mut client, &is_over));
        for _ in 0..6 {
            kill(&daemon, "a");
            std::thread::sleep(std::time::Duration::from_millis(150));
        }
        drop(end);
        assert!(guest.join().unwrap() > 0);
    });
    works(&mut client, 99);
    assert!(!daemon.log().contains("fault"), "{}", daemon.log());
    drop(client);
    let left = || process(&daemon, "a")["devices"] == serde_json::json!(["a"]);
    assert!(wait_until(left));
    client_works(&daemon.socket_of("a"), 7);
    assert!(daemon.terminate().success());
}

#[test]
fn a_front_end_that_leaves_while_no_device_process_serves_it_makes_way_for_the_next() {
    let daemon = serve("", &disk("a", "memory = '1M'\ndomain = 'a'\n"), &["a"]);
    let options = BlkDriverOptions { queues: 1, ..BlkDriverOptions::default() };
    let connect = || BlkDriver::connect(&daemon.socket_of("a"), &options).unwrap();
    for round in 1..4_u8 {
        let mut driver = connect();
        driver.queues[0].write(0, &[round; 512]).unwrap();
        kill_process(pid(&daemon, "a"), Signal::KILL).unwrap();
        drop(driver);
        let mut bytes = [0; 512];
        connect().queues[0].read(0, &mut bytes).unwrap();
        assert_eq!(bytes, [round; 512], "a disk in memory outlives its device processes");
    }
    assert!(daemon.terminate().success());
}
