//! Interrupts that are held back, as the operator has configured it for each device, and as its
//! guest wishes.

use crate::support::process::{Daemon, TIMEOUT};
use crate::support::program::shown;
use manyring_driver::{
    BlkDriver, BlkDriverOptions, ControlOwner, DriverOp, NetDriver, NetDriverOptions, NetDriverRx,
};
use manyring_wire::net::{Coalescing, CtrlStatus, VIRTIO_NET_F_NOTF_COAL};
use std::path::Path;

const CONFIG: &str = "[daemon]\ncontrol = '@/control'\npolling = 'never'\n\
    [[blk]]\nname = 'plain'\nsocket_path = '@/plain'\nmemory = '1M'\n\
    [[blk]]\nname = 'held'\nsocket_path = '@/held'\nmemory = '1M'\nmoderation = '4/10000us'\n\
    [blk.fault]\nhold_every = 3\n\
    [[net]]\nname = 'lan'\nsocket_path = '@/lan'\nnull = true\ngenerate = 64\n\
    moderation = '4/10000us'\n";

fn count(control: &Path, device: &str, name: &str) -> u64 {
    let device = shown(control, &format!("/v1/devices/{device}"));
    device["queues"][0]["counters"][name].as_u64().unwrap()
}

/// Calls that were held back, or would have been but for a reason.
fn moderated(control: &Path, device: &str) -> u64 {
    let names = ["calls_by_count", "calls_by_time", "calls_by_dry"];
    names.iter().map(|name| count(control, device, name)).sum()
}

#[test]
fn a_disk_holds_back_what_it_may_and_its_guest_gets_every_answer() {
    let daemon = Daemon::run(CONFIG, &["plain", "held", "lan", "control"]);
    let control = daemon.socket_of("control");
    let options = BlkDriverOptions { queues: 1, ..BlkDriverOptions::default() };
    let mut plain = BlkDriver::connect(&daemon.socket_of("plain"), &options).unwrap();
    let mut held = BlkDriver::connect(&daemon.socket_of("held"), &options).unwrap();
    plain.queues[0].read(0, &mut [0; 512]).unwrap();
    held.queues[0].read(0, &mut [0; 512]).unwrap();
    assert_eq!((count(&control, "plain", "calls"), moderated(&control, "plain")), (1, 0));
    // The only request of its guest.
    assert_eq!(count(&control, "held", "calls_by_dry"), 1);
    // Two more: the disk never answers the second, so the first waits for its time.
    let queue = &mut held.queues[0];
    queue.vring().clear_call().unwrap();
    assert!(!queue.vring().queue().enable_notifications());
    for _ in 0..2 {
        queue.submit(DriverOp::Read { sector: 0, len: 512 }).unwrap().unwrap();
    }
    queue.publish().unwrap();
    assert!(queue.vring().wait_call(TIMEOUT).unwrap(), "the driver sleeps on");
    assert!(queue.take().is_some() && queue.take().is_none());
    let of = |name| count(&control, "held", name);
    assert_eq!((of("calls_held"), of("calls_by_time"), of("calls")), (1, 1, 2));
}

/// Takes frames of the port, which has more than anybody takes, until something is so.
fn receive_until(what: &str, rx: &mut NetDriverRx, is_so: impl Fn() -> bool) {
    let mut frame = Vec::new();
    for _ in 0..1000 {
        if is_so() {
            return;
        }
        for _ in 0..300 {
            frame.clear();
            rx.recv_wait(&mut frame, TIMEOUT).unwrap();
            rx.refill().unwrap();
        }
    }
    panic!("{what}");
}

#[test]
fn a_guest_that_wants_nothing_held_back_is_obeyed_until_its_driver_begins_anew() {
    let daemon = Daemon::run(CONFIG, &["plain", "held", "lan", "control"]);
    let control = daemon.socket_of("control");
    let usual = NetDriverOptions::default();
    let features = usual.features | VIRTIO_NET_F_NOTF_COAL;
    let options = NetDriverOptions { control: ControlOwner::Device, features, ..usual };
    let mut guest = NetDriver::connect(&daemon.socket_of("lan"), &options).unwrap();
    let rx = &mut guest.pairs[0].rx;
    let count = |name| count(&control, "lan", name);
    receive_until("the operator's word counts", rx, || moderated(&control, "lan") > 0);
    let off = Coalescing { packets_max: 0, delay_us_max: 0 };
    assert_eq!(guest.control().unwrap().coalesce_rx(off).unwrap(), CtrlStatus::Ok);
    let (before, calls) = (moderated(&control, "lan"), count("calls"));
    let rx = &mut guest.pairs[0].rx;
    receive_until("somebody is called", rx, || count("calls") >= calls + 3);
    assert_eq!(moderated(&control, "lan"), before);
    guest.reconnect(&daemon.socket_of("lan")).unwrap();
    let rx = &mut guest.pairs[0].rx;
    receive_until("it counts again", rx, || moderated(&control, "lan") > before);
}
