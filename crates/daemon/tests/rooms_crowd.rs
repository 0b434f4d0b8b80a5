//! Many front-ends of one room: all that connect at once are served.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where it fails")]

mod domain;
mod foreign;
mod process;
mod program;

use domain::room;
use manyring_driver::{BlkDriver, BlkOptions};
use process::Daemon;
use std::sync::Barrier;

/// A disk in memory of this name.
fn disk(name: &str) -> String {
    format!("[[blk]]\nname = '{name}'\nsocket_path = '@/{name}'\nmemory = '1M'\n")
}

fn serve(devices: &str, names: &[&str]) -> Daemon {
    let text = format!("[daemon]\ncontrol = '@/control'\ndomains = 'user'\n{devices}");
    Daemon::run(&text, &[names, &["control"]].concat())
}

fn connect(daemon: &Daemon, name: &str) -> BlkDriver {
    BlkDriver::connect(&daemon.socket_of(name), &BlkOptions::default()).unwrap()
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
    assert_eq!(room(&daemon, &own)["devices"].as_array().unwrap().len(), DEVICES);
    assert!(!daemon.log().contains("ERROR"), "{}", daemon.log());
    // All of them stop, and none of them is given up.
    let log = std::fs::File::open(daemon.folder().join("log")).unwrap();
    assert!(daemon.terminate().success());
    let log = std::io::read_to_string(log).unwrap();
    assert!(!log.contains("does not stop") && !log.contains("do not end"), "{log}");
}
