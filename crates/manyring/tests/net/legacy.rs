//! Drivers of before virtio 1.0, over a tap: firmware's network boot and old guests. Without
//! mergeable buffers their headers have ten bytes. It needs root.

use crate::support::datagram::{Host, datagram, payload};
use crate::support::process::{Daemon, TIMEOUT};
use crate::support::space::{in_own_space, run};
use manyring_driver::{ControlOwner, NetDriver, NetDriverOptions};
use manyring_wire::net::{
    HDR_F_NEEDS_CSUM, HDR_GSO_NONE, RawNetHeader, RxMode, VIRTIO_NET_F_GUEST_CSUM,
    VIRTIO_NET_F_MRG_RXBUF,
};
use manyring_wire::virtio::{VIRTIO_F_ANY_LAYOUT, VIRTIO_F_VERSION_1};

const CONFIG: &str =
    "[[net]]\nname = 'lan'\nsocket_path = '@/lan'\ntap = 'lan0'\nqueue_pairs = 2\n";
const OWNERS: [ControlOwner; 2] = [ControlOwner::FrontEnd, ControlOwner::Device];

/// A legacy driver, without the features of `but`.
fn legacy(control: ControlOwner, but: u64) -> NetDriverOptions {
    let all = NetDriverOptions::default().features | VIRTIO_F_ANY_LAYOUT;
    let features = all & NetDriverOptions::LEGACY & !but;
    NetDriverOptions { control, features, queue_pairs: 2, ..NetDriverOptions::default() }
}

/// A datagram of each length to the host, header and frame in one descriptor and each in its own;
/// and one back.
fn talks(guest: &mut NetDriver, host: &Host) {
    let pair = &mut guest.pairs[0];
    for len in [1usize, 100, 1400] {
        let bytes = (0..=250).cycle().take(len).collect::<Vec<u8>>();
        let frame = datagram(1, &bytes);
        assert!(pair.tx.send(&RawNetHeader::default(), &frame).unwrap());
        let (head, rest) = frame.split_at(14);
        assert!(pair.tx.send_parts(&RawNetHeader::default(), &[head, rest]).unwrap());
        pair.tx.publish(0).unwrap();
        pair.tx.drain(TIMEOUT).unwrap();
        assert_eq!((host.receive(), host.receive()), (bytes.clone(), bytes.clone()));
        host.send(1, &bytes);
        let mut frame = Vec::new();
        while payload(&frame) != Some(&bytes[..]) {
            frame.clear();
            let header = pair.rx.recv_wait(&mut frame, TIMEOUT).unwrap();
            assert_eq!(header.gso_type, HDR_GSO_NONE);
        }
    }
}

#[test]
fn a_legacy_driver_has_its_network_whoever_owns_the_control_queue() {
    for control in OWNERS {
        in_own_space(|| {
            let daemon = Daemon::run(CONFIG, &["lan"]);
            let host = Host::on("lan0");
            // Headers of 10 bytes, then of 12; then those of a driver that follows virtio 1.0.
            for but in [VIRTIO_NET_F_MRG_RXBUF, 0] {
                let options = legacy(control, but);
                let mut guest = NetDriver::connect(&daemon.socket_of("lan"), &options).unwrap();
                assert_eq!(guest.features & VIRTIO_F_VERSION_1, 0);
                assert_ne!(guest.features & VIRTIO_F_ANY_LAYOUT, 0, "any layout is served");
                assert_eq!(guest.features & VIRTIO_NET_F_MRG_RXBUF == 0, but != 0);
                talks(&mut guest, &host);
                guest.set_queue_pairs(2).unwrap();
                if control == ControlOwner::Device {
                    let commands = guest.control().unwrap();
                    commands.set_rx_mode(RxMode::AllMulti, true).unwrap();
                    commands.set_guest_offloads(VIRTIO_NET_F_GUEST_CSUM).unwrap();
                }
                talks(&mut guest, &host);
            }
            let options =
                NetDriverOptions { control, queue_pairs: 2, ..NetDriverOptions::default() };
            let mut guest = NetDriver::connect(&daemon.socket_of("lan"), &options).unwrap();
            talks(&mut guest, &host);
            drop(guest);
            let options = legacy(control, VIRTIO_NET_F_MRG_RXBUF);
            talks(&mut NetDriver::connect(&daemon.socket_of("lan"), &options).unwrap(), &host);
            assert!(!daemon.log().contains("ERROR"), "{}", daemon.log());
        });
    }
}

#[test]
fn a_legacy_drivers_checksums_may_be_left_to_the_host() {
    in_own_space(|| {
        let daemon = Daemon::run(CONFIG, &["lan"]);
        let host = Host::on("lan0");
        let options = legacy(ControlOwner::FrontEnd, VIRTIO_NET_F_MRG_RXBUF);
        let mut guest = NetDriver::connect(&daemon.socket_of("lan"), &options).unwrap();
        let header = RawNetHeader {
            flags: HDR_F_NEEDS_CSUM,
            csum_start: 34.into(),
            csum_offset: 6.into(),
            ..RawNetHeader::default()
        };
        let tx = &mut guest.pairs[0].tx;
        // Datagrams of one length that come together: merged, and cut again.
        for number in 0..16u8 {
            assert!(tx.send(&header, &datagram(1, &[number; 1000])).unwrap());
        }
        tx.publish(0).unwrap();
        tx.drain(TIMEOUT).unwrap();
        (0..16).for_each(|number| assert_eq!(host.receive(), [number; 1000]));
        // The host leaves its own unfinished for a guest that takes it.
        host.send(1, &[7; 500]);
        let (rx, mut frame) = (&mut guest.pairs[0].rx, Vec::new());
        let mut header = RawNetHeader::default();
        while payload(&frame) != Some(&[7; 500]) {
            frame.clear();
            header = rx.recv_wait(&mut frame, TIMEOUT).unwrap();
        }
        assert_eq!((header.flags, header.csum_start.get()), (HDR_F_NEEDS_CSUM, 34));
    });
}

#[test]
fn a_legacy_driver_is_served_behind_every_decoration_of_its_port() {
    in_own_space(|| {
        let more = "pcap = '@/all.pcap'\nreclaim = 'auto'\n\
            fault = { late_tx = 3, block_tx_every = 5, no_memory_every = 7 }\n";
        let mut daemon = Daemon::run(&[CONFIG, more].concat(), &["lan"]);
        let host = Host::on("lan0");
        let options = legacy(ControlOwner::FrontEnd, VIRTIO_NET_F_MRG_RXBUF);
        let mut guest = NetDriver::connect(&daemon.socket_of("lan"), &options).unwrap();
        for _ in 0..4 {
            talks(&mut guest, &host);
        }
        drop(guest);
        daemon.stop();
        let capture = std::fs::read(daemon.folder().join("all.pcap")).unwrap();
        let sent = datagram(1, &[0]);
        assert!(capture.windows(sent.len()).any(|window| window == sent), "from its first byte");
    });
}

#[test]
fn a_legacy_guest_and_a_modern_one_share_a_worker() {
    in_own_space(|| {
        let both = "[daemon]\nworkers = 1\n[[net]]\nname = 'old'\nsocket_path = '@/old'\n\
            tap = 'old0'\nqueue_pairs = 2\n[[net]]\nname = 'new'\nsocket_path = '@/new'\n\
            null = true\ngenerate = 64\n";
        let daemon = Daemon::run(both, &["old", "new"]);
        let host = Host::on("old0");
        let options = legacy(ControlOwner::FrontEnd, VIRTIO_NET_F_MRG_RXBUF);
        let mut old = NetDriver::connect(&daemon.socket_of("old"), &options).unwrap();
        let modern = NetDriverOptions::default();
        let mut new = NetDriver::connect(&daemon.socket_of("new"), &modern).unwrap();
        // The null port lends its frames: a legacy guest of one too.
        let frames = |guest: &mut NetDriver| {
            for _ in 0..300 {
                let mut frame = Vec::new();
                guest.pairs[0].rx.recv_wait(&mut frame, TIMEOUT).unwrap();
                assert_eq!(frame.len(), 64);
            }
        };
        for _ in 0..3 {
            talks(&mut old, &host);
            frames(&mut new);
        }
        drop(new);
        let options = NetDriverOptions { queue_pairs: 1, ..options };
        let mut new = NetDriver::connect(&daemon.socket_of("new"), &options).unwrap();
        talks(&mut old, &host);
        frames(&mut new);
        run("ip link set old0 down");
    });
}
