//! SIGTERM: clean and quick, with or without a guest, and when a disk hangs.

use crate::support::client::Client;
use crate::support::process::{Daemon, Running, TIMEOUT, wait_until};
use crate::support::program::{http, names_in, shown};
use manyring_driver::hostile::GiantRing;
use manyring_driver::wire::blk::VIRTIO_BLK_T_IN;
use manyring_driver::{BlkDriver, BlkDriverOptions};
use rustix::process::Signal;
use std::path::Path;
use std::time::Duration;

/// How long a daemon may take to end on a busy host.
const BOUND: Duration = Duration::from_secs(20);

const HANGING: &str = "[daemon]\ncontrol = '@/control'\n\
    [[blk]]\nname = 'a'\nsocket_path = '@/a'\nnull = '1G'\nfault = { hold_every = 1 }\n";

/// A daemon that such a test left would keep the output of the test's program open for ever.
#[test]
fn a_program_that_a_test_started_ends_with_the_test_also_where_it_fails() {
    let mut pid = None;
    let failed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let running = Running::start(std::process::Command::new("sleep").arg("1000"));
        pid = Some(rustix::process::Pid::from_child(&running));
        std::panic::resume_unwind(Box::new("a failed assertion"));
    }));
    assert!(failed.is_err());
    assert!(rustix::process::test_kill_process(pid.unwrap()).is_err(), "it runs on");
}

/// Waits until device `a` has `count` requests in flight.
fn until_in_flight(daemon: &Daemon, count: u64) {
    let (control, words) = (daemon.socket_of("control"), format!("\"in_flight\":{count}"));
    let body = || http(&control, "GET", "/v1/devices/a", "").2;
    assert!(wait_until(|| body().contains(&words)), "{}", body());
}

#[test]
fn before_any_client_it_ends_and_removes_its_sockets() {
    let config = "[daemon]\ncontrol = '@/control'\n\
        [[blk]]\nname = 'a'\nsocket_path = '@/a'\nnull = '1G'\n";
    let mut daemon = Daemon::run(config, &["a", "control"]);
    assert_eq!(names_in(daemon.folder()), ["a", "control", "log", "manyring.toml"]);
    let (status, took) = daemon.stop();
    assert!(status.success() && took < BOUND, "{status} after {took:?}: {}", daemon.log());
    assert!(!daemon.log().contains("abandoning them"), "{}", daemon.log());
    assert_eq!(names_in(daemon.folder()), ["log", "manyring.toml"]);
}

#[test]
fn a_name_that_is_being_made_when_it_ends_is_removed_too() {
    let config = "[daemon]\ncontrol = '@/control'\n\
        [[blk]]\nname = 'a'\nsocket_path = '@/a'\nnull = '1G'\n";
    for _ in 0..20 {
        // The control socket gets its name after the device's.
        let mut daemon = Daemon::run(config, &["a"]);
        let (status, _) = daemon.stop();
        assert!(status.success(), "{status}: {}", daemon.log());
        assert_eq!(names_in(daemon.folder()), ["log", "manyring.toml"]);
    }
}

#[test]
fn with_a_connected_guest_it_ends_after_its_requests() {
    let mut daemon = Daemon::blk(&["--null", "1G"]);
    let mut client = Client::connect(&daemon.socket(), 2);
    client.submit_reads(0, 3);
    assert_eq!(client.wait_for(0, 3, TIMEOUT), 3);
    let (status, took) = daemon.stop();
    assert!(status.success() && took < BOUND, "{status} after {took:?}: {}", daemon.log());
    assert_eq!(names_in(daemon.folder()), ["log"]);
    assert!(!daemon.log().contains("abandoning them"), "{}", daemon.log());
}

#[test]
fn a_disk_that_hangs_is_given_up() {
    let mut daemon = Daemon::run(HANGING, &["a", "control"]);
    let mut client = Client::connect(&daemon.socket_of("a"), 1);
    client.submit_reads(0, 4);
    until_in_flight(&daemon, 4);
    let (status, took) = daemon.stop();
    assert!(status.success() && took < BOUND, "{status} after {took:?}: {}", daemon.log());
    assert!(daemon.log().contains("abandoning them"), "{}", daemon.log());
    assert_eq!(names_in(daemon.folder()), ["log", "manyring.toml"]);
}

#[test]
fn a_disk_that_hangs_while_its_guest_leaves_is_given_up_as_well() {
    let mut daemon = Daemon::run(HANGING, &["a", "control"]);
    let mut client = Client::connect(&daemon.socket_of("a"), 1);
    client.submit_reads(0, 1);
    until_in_flight(&daemon, 1);
    // Its end asks for the vring base or closes: either waits for the request that never ends.
    let (status, took) = std::thread::scope(|scope| {
        scope.spawn(move || drop(client));
        std::thread::sleep(Duration::from_millis(200));
        daemon.stop()
    });
    assert!(status.success() && took < BOUND, "{status} after {took:?}: {}", daemon.log());
    assert!(daemon.log().contains("abandoning them"), "{}", daemon.log());
}

#[test]
fn one_off_ends_with_the_first_guest() {
    let mut daemon = Daemon::blk(&["--null", "1G", "--one-off"]);
    drop(Client::connect(&daemon.socket(), 1));
    let status = daemon.wait();
    assert!(status.success(), "{status}: {}", daemon.log());
    assert_eq!(names_in(daemon.folder()), ["log"]);
}

#[test]
fn a_guest_that_leaves_ends_nothing_and_the_next_is_served_at_once() {
    let mut daemon = Daemon::blk(&["--null", "1G"]);
    for _ in 0..50 {
        let mut client = Client::connect(&daemon.socket(), 1);
        client.submit_reads(0, 1);
        assert_eq!(client.wait_for(0, 1, TIMEOUT), 1);
    }
    assert!(daemon.is_running());
    assert!(!daemon.log().contains("client refused: the device has one"), "{}", daemon.log());
}

#[test]
fn signals_that_are_not_meant_to_end_it_end_nothing() {
    let mut daemon = Daemon::blk(&["--null", "1G"]);
    let mut client = Client::connect(&daemon.socket(), 2);
    for (signal, name) in [
        (Signal::HUP, "SIGHUP"),
        (Signal::USR1, "SIGUSR1"),
        (Signal::USR2, "SIGUSR2"),
        (Signal::XFSZ, "SIGXFSZ"),
    ] {
        daemon.send(signal);
        assert!(wait_until(|| !daemon.is_running() || daemon.log().contains(name)), "{name}");
        assert!(daemon.is_running(), "{name}");
        client.submit_reads(0, 3);
        assert_eq!(client.wait_for(0, 3, TIMEOUT), 3, "{name}");
    }
    daemon.send(Signal::PIPE);
    client.submit_reads(1, 3);
    assert_eq!(client.wait_for(1, 3, TIMEOUT), 3);
    assert!(daemon.is_running());
    // A storm of them holds nobody up.
    for _ in 0..1000 {
        daemon.send(Signal::USR1);
    }
    client.submit_reads(1, 3);
    assert_eq!(client.wait_for(1, 3, TIMEOUT), 3);
    assert!(daemon.stop().0.success());
    assert_eq!(names_in(daemon.folder()), ["log"]);
}

#[test]
fn the_signal_that_ends_it_is_named() {
    for (signal, name) in [(Signal::TERM, "SIGTERM"), (Signal::INT, "SIGINT")] {
        let mut daemon = Daemon::blk(&["--null", "1G"]);
        // The socket may be there a moment before its end is in good order.
        assert!(wait_until(|| daemon.log().contains("listening")));
        daemon.send(signal);
        assert!(daemon.wait().success(), "{name}");
        let log = daemon.log();
        assert!(log.lines().any(|l| l.contains("stopping") && l.contains(name)), "{log}");
        assert_eq!(names_in(daemon.folder()), ["log"], "{name}");
    }
}

/// Requests of all queues of device `a`, as its counters say.
fn requests_of(control: &Path) -> u64 {
    let device = shown(control, "/v1/devices/a");
    let queues = device["queues"].as_array().unwrap().iter();
    queues.filter_map(|queue| queue["counters"]["requests"].as_u64()).sum()
}

#[test]
fn a_guest_with_gigabytes_of_requests_in_its_rings_leaves_and_they_are_not_served() {
    const DEPTH: u16 = 32;
    const QUEUES: u16 = 4;
    let image = tempfile::NamedTempFile::new().unwrap();
    image.as_file().set_len(1 << 30).unwrap();
    for io_uring in [true, false] {
        let config = format!(
            "[daemon]\ncontrol = '@/control'\nio_uring = {io_uring}\n\
             [[blk]]\nname = 'a'\nsocket_path = '@/a'\nfile = '{}'\n",
            image.path().display()
        );
        let daemon = Daemon::run(&config, &["a", "control"]);
        let (socket, control) = (daemon.socket_of("a"), daemon.socket_of("control"));
        let spare = u64::from(QUEUES) * GiantRing::arena_size(DEPTH);
        let options = BlkDriverOptions { queues: QUEUES, spare, ..BlkDriverOptions::default() };
        let mut guest = BlkDriver::connect(&socket, &options).unwrap();
        for queue in &mut guest.queues {
            let mut giant = GiantRing::new(&guest.arena, queue.vring(), DEPTH).unwrap();
            for slot in 0..DEPTH {
                giant.offer_data(slot, VIRTIO_BLK_T_IN, 0, 1022, true).unwrap();
            }
            queue.vring().kick().unwrap();
        }
        drop(guest);
        let mut next = BlkDriver::connect(&socket, &BlkDriverOptions::default()).unwrap();
        next.queues[0].read(0, &mut [0; 512]).unwrap();
        // A queue has one such request at a time, which ends after a piece; one may have ended.
        let (served, offered) = (requests_of(&control), u64::from(QUEUES) * u64::from(DEPTH));
        assert!(served < offered / 2, "{served} of {offered}, io_uring {io_uring}");
    }
}
