//! A guest migrates while its devices work, over the socket as its front-end does it: every byte
//! of its memory that a device wrote has come to the destination by the migration log alone. The
//! front-end is ours (`guest.rs`); what the devices are asked for is random, with a printed seed.

mod disk;
mod guest;
mod net;

use crate::support::datagram::Host;
use crate::support::process::{Daemon, TIMEOUT};
use crate::support::program::shown;
use crate::support::space::{in_own_space, run};
use disk::{DISK_SIZE, Disk};
use guest::{Guest, Start};
use manyring_wire::net::{
    VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_HOST_USO,
    VIRTIO_NET_F_MRG_RXBUF, VIRTIO_NET_F_MTU,
};
use manyring_wire::virtio::{
    VIRTIO_F_EVENT_IDX, VIRTIO_F_IN_ORDER, VIRTIO_F_INDIRECT_DESC, VIRTIO_F_RING_PACKED,
};
use net::Net;
use rustix::process::{Pid, Signal, kill_process};
use std::io::Write;

/// An image whose bytes are nowhere zero, so that reading it changes memory.
fn image() -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let byte = |n: u64| u8::try_from((n / 512 * 7 + n % 251) % 256).unwrap() | 1;
    let bytes: Vec<u8> = (0..DISK_SIZE).map(byte).collect();
    file.write_all(&bytes).unwrap();
    file
}

/// Guests with all features of their rings migrate away from one daemon, one after the other.
fn disks_migrate(arguments: &[&str], seed: u64) {
    let daemon = Daemon::blk(&[&["--num-queues=2"], arguments].concat());
    let rings = [0, VIRTIO_F_RING_PACKED];
    for (case, ring) in (0..).zip(rings.into_iter().cycle().take(6)) {
        let features = match case / 2 {
            0 => ring,
            1 => ring | VIRTIO_F_EVENT_IDX,
            _ => ring | VIRTIO_F_EVENT_IDX | VIRTIO_F_INDIRECT_DESC,
        };
        // Of the longest ring the device writes more than one page.
        let size = [8, 64, 512, 512, 64, 8][case];
        let start = Start { queues: 2, size, features, seed: seed + case as u64 };
        println!("{start:?}");
        let mut guest = Guest::connect(&daemon.socket(), start);
        let disk = Disk { can_discard: guest.features & Disk::RANGES == Disk::RANGES };
        for _ in 0..4 {
            guest.migrate(|guest| disk.request(guest), Disk::settle);
        }
    }
    assert!(!daemon.log().contains("queue stopped:"), "{}", daemon.log());
}

#[test]
fn what_a_disk_in_a_file_writes_is_in_marked_pages() {
    let image = image();
    disks_migrate(&["--blk-file", image.path().to_str().unwrap()], 0x100);
}

#[test]
fn what_a_disk_without_the_page_cache_writes_is_in_marked_pages() {
    let image = image();
    disks_migrate(&["--blk-file", image.path().to_str().unwrap(), "--direct"], 0x200);
}

#[test]
fn what_a_disk_in_memory_writes_is_in_marked_pages() {
    disks_migrate(&["--memory=1M"], 0x300);
}

const NET: [u64; 4] = [
    VIRTIO_NET_F_MRG_RXBUF,
    VIRTIO_NET_F_MRG_RXBUF | VIRTIO_F_EVENT_IDX | VIRTIO_F_INDIRECT_DESC,
    VIRTIO_NET_F_MRG_RXBUF | VIRTIO_F_EVENT_IDX | VIRTIO_F_IN_ORDER | VIRTIO_NET_F_HOST_USO,
    VIRTIO_NET_F_GUEST_CSUM | VIRTIO_NET_F_GUEST_TSO4 | VIRTIO_F_EVENT_IDX,
];

/// A port that lends its frames.
#[test]
fn what_a_port_that_generates_frames_writes_is_in_marked_pages() {
    let config = "[[net]]\nname = 'lan'\nsocket_path = '@/lan'\nnull = true\ngenerate = 1800\n";
    let daemon = Daemon::run(config, &["lan"]);
    for (case, features) in NET.into_iter().enumerate() {
        let size = [256, 8][case % 2];
        let start = Start { queues: 2, size, features, seed: 0x400 + case as u64 };
        println!("{start:?}");
        let mut guest = Guest::connect(&daemon.socket_of("lan"), start);
        let net = Net::of(features);
        for _ in 0..4 {
            guest.migrate(|guest| net.work(guest, None), |guest| net.settle(guest, None));
        }
    }
}

/// A port whose frames are read into the guest's buffers. Needs root.
#[test]
fn what_a_tap_writes_is_in_marked_pages() {
    in_own_space(|| {
        let config = "[[net]]\nname = 'lan'\nsocket_path = '@/lan'\ntap = 'lan0'\nmtu = 900\n";
        let daemon = Daemon::run(config, &["lan"]);
        // Longer frames are read into the guest's buffers, and dropped.
        run("ip link set lan0 mtu 1500");
        let host = Host::on("lan0");
        for (case, features) in NET.into_iter().enumerate() {
            let size = [256, 16][case % 2];
            let features = features | VIRTIO_NET_F_MTU;
            let start = Start { queues: 2, size, features, seed: 0x500 + case as u64 };
            println!("{start:?}");
            let mut guest = Guest::connect(&daemon.socket_of("lan"), start);
            let net = Net::of(features);
            for _ in 0..4 {
                let host = Some(&host);
                guest.migrate(|guest| net.work(guest, host), |guest| net.settle(guest, host));
            }
        }
    });
}

/// Kills the device process of the domain that is named after a device.
fn kill_device_process(daemon: &Daemon, name: &str) {
    let processes = shown(&daemon.socket_of("control"), "/v1/processes");
    let process = processes["processes"]
        .as_array()
        .unwrap()
        .iter()
        .find(|process| process["process"] == name);
    let pid = i32::try_from(process.unwrap()["pid"].as_i64().unwrap()).unwrap();
    // None while the next process begins.
    if let Some(pid) = Pid::from_raw(pid) {
        kill_process(pid, Signal::KILL).unwrap();
    }
}

/// In each migration the process dies that serves the guest. What it had taken and not returned is
/// marked where the next one serves it, or puts it back. Needs root.
#[test]
fn what_device_processes_that_die_write_is_in_marked_pages() {
    in_own_space(|| {
        let image = image();
        let config = format!(
            "[daemon]\ncontrol = '@/control'\n\
             [[net]]\nname = 'lan'\nsocket_path = '@/lan'\ntap = 'lan0'\nmtu = 900\n\
             domain = 'lan'\n\
             [[blk]]\nname = 'disk'\nsocket_path = '@/disk'\nnum_queues = 2\nfile = '{}'\n\
             domain = 'disk'\n",
            image.path().display()
        );
        let daemon = Daemon::run(&config, &["lan", "disk", "control"]);
        run("ip link set lan0 mtu 1500");
        let (host, rings) = (Host::on("lan0"), [0, VIRTIO_F_EVENT_IDX, VIRTIO_F_RING_PACKED]);
        for (case, ring) in (0..).zip(rings) {
            let start = Start { queues: 2, size: 64, features: ring, seed: 0x800 + case };
            let features = ring | VIRTIO_NET_F_MRG_RXBUF | VIRTIO_NET_F_MTU;
            let on_net = Start { features, seed: 0x900 + case, ..start };
            println!("{start:?} {on_net:?}");
            let mut guest = Guest::connect(&daemon.socket_of("lan"), on_net);
            let (net, host) = (Net::of(features), Some(&host));
            for _ in 0..2 {
                let mut round = 0;
                let work = |guest: &mut Guest| {
                    net.work(guest, host);
                    round += 1;
                    if round == 5 {
                        kill_device_process(&daemon, "lan");
                    }
                };
                guest.migrate(work, |guest| net.settle(guest, host));
            }
            let mut guest = Guest::connect(&daemon.socket_of("disk"), start);
            let disk = Disk { can_discard: false };
            for _ in 0..2 {
                let mut round = 0;
                let work = |guest: &mut Guest| {
                    disk.request(guest);
                    round += 1;
                    if round == 5 {
                        kill_device_process(&daemon, "disk");
                    }
                };
                guest.migrate(work, Disk::settle);
            }
        }
        assert!(!daemon.log().contains("queue stopped:"), "{}", daemon.log());
        assert_eq!(daemon.log().matches("session resumed").count(), 12, "{}", daemon.log());
    });
}

/// The log is memory of the front-end, which may take it away at any time: that ends its session,
/// and nothing else.
#[test]
fn a_log_that_is_cut_away_ends_its_session_and_the_next_one_is_served() {
    let image = image();
    let daemon = Daemon::blk(&["--num-queues=2", "--blk-file", image.path().to_str().unwrap()]);
    for features in [0, VIRTIO_F_RING_PACKED] {
        let start = Start { queues: 2, size: 64, features, seed: 0x600 };
        let mut guest = Guest::connect(&daemon.socket(), start);
        let disk = Disk { can_discard: false };
        guest.begin_log();
        disk.request(&mut guest);
        Disk::settle(&mut guest);
        guest.cut_log();
        disk.request(&mut guest);
        assert!(guest.front.is_closed_within(TIMEOUT).unwrap(), "{}", daemon.log());
    }
    let start = Start { queues: 2, size: 64, features: 0, seed: 0x700 };
    let disk = Disk { can_discard: false };
    let mut guest = Guest::connect(&daemon.socket(), start);
    guest.migrate(|guest| disk.request(guest), Disk::settle);
    let cut = "session closed: guest memory was truncated";
    assert_eq!(daemon.log().matches(cut).count(), 2, "{}", daemon.log());
}
