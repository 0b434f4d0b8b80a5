//! A guest that hears of its calls by signals, as User Mode Linux does, can miss one.

use crate::support::process::{Daemon, TIMEOUT};
use manyring_driver::hostile::HostileRing;
use manyring_driver::{BlkDriver, BlkDriverOptions};
use rustix::fd::AsFd;
use std::io::Read;
use std::os::unix::net::UnixStream;

const CONFIG: &str = "[daemon]\ncontrol = '@/control'\nworkers = 1\n\
    [[blk]]\nname = 'a'\nsocket_path = '@/a'\nmemory = '16M'\n";

/// Reads a call.
fn called(mut calls: &UnixStream) {
    calls.read_exact(&mut [0; 8]).unwrap();
}

#[test]
fn the_last_call_by_a_socket_comes_once_more_when_its_queue_rests() {
    let daemon = Daemon::run(CONFIG, &["a", "control"]);
    let mut guest =
        BlkDriver::connect(&daemon.socket_of("a"), &BlkDriverOptions::default()).unwrap();
    let (calls, call) = UnixStream::pair().unwrap();
    calls.set_read_timeout(Some(TIMEOUT)).unwrap();
    guest.front.set_vring_call(0, Some(call.as_fd())).unwrap();
    // The new call is rung once, for one that may have gone to the former.
    called(&calls);
    let mut ring = HostileRing::new(&guest.arena, guest.queues[0].vring()).unwrap();
    ring.offer_valid().unwrap();
    rustix::io::write(guest.queues[0].vring().kick_fd(), &1u64.to_ne_bytes()).unwrap();
    called(&calls);
    assert_eq!(ring.status().unwrap(), 0);
    // The guest has not looked at its ring: nothing else makes the device call.
    called(&calls);
    calls.set_nonblocking(true).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(200));
    assert!((&calls).read(&mut [0; 8]).is_err(), "it is repeated once");
}
