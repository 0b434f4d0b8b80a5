//! Unfinished frames through the whole daemon: two guests on one bridge, of which one sends
//! segments uncut and checksums open, TCP and UDP, IPv4 and IPv6, and the other takes them so, or
//! does not: then the host's kernel must have finished them. And notifications that one queue's
//! driver wants held back. Needs root.

use crate::support::process::{Daemon, TIMEOUT};
use crate::support::space::{in_own_space, run};
use manyring_driver::{ControlOwner, NetDriver, NetDriverOptions};
use manyring_wire::net::{
    Coalescing, CtrlStatus, HDR_F_NEEDS_CSUM, HDR_GSO_NONE, HDR_GSO_TCPV4, HDR_GSO_TCPV6,
    HDR_GSO_UDP_L4, QueueCoalescing, RawNetHeader, VIRTIO_NET_F_HOST_USO,
    VIRTIO_NET_F_VQ_NOTF_COAL, receiveq,
};
use std::net::UdpSocket;
use std::time::{Duration, SystemTime};

const CONFIG: &str = "[[net]]\nname = 'a'\nsocket_path = '@/a'\ntap = 'mra'\nbridge = 'br0'\n\
    [[net]]\nname = 'b'\nsocket_path = '@/b'\ntap = 'mrb'\nbridge = 'br0'\n";
const TCP: u8 = 6;
const UDP: u8 = 17;
const PIECE: usize = 1000;
const PIECES: usize = 12;
/// A group's address: the bridge passes it to everybody.
const TO: [u8; 6] = [0x03, 0, 0, 0, 0, 0x01];
const FROM: [u8; 6] = [0x02, 0, 0, 0, 0, 0x0a];

/// Starts the daemon on two taps of a bridge that learns nothing and says nothing.
fn serve() -> Daemon {
    run("sysctl -q -w net.ipv6.conf.all.disable_ipv6=1 net.ipv6.conf.default.disable_ipv6=1");
    run("ip link add br0 type bridge mcast_snooping 0");
    run("ip link set br0 up");
    Daemon::run(CONFIG, &["a", "b"])
}

fn guest(daemon: &Daemon, name: &str, features: u64) -> NetDriver {
    let options = NetDriverOptions { features, ..NetDriverOptions::default() };
    NetDriver::connect(&daemon.socket_of(name), &options).unwrap()
}

/// The internet checksum (RFC 1071).
fn checksum(bytes: &[u8]) -> u16 {
    let word = |pair: &[u8]| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0));
    let mut sum: u32 = bytes.chunks(2).map(word).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !u16::try_from(sum).unwrap()
}

/// The addresses of a packet of this version, and the sum over its pseudo header's other fields.
fn pseudo(ip: &[u8], protocol: u8, len: usize) -> Vec<u8> {
    let addresses = if ip[0] >> 4 == 4 { &ip[12..20] } else { &ip[8..40] };
    let len = u16::try_from(len).unwrap().to_be_bytes();
    [addresses, &[0, protocol], &len].concat()
}

/// A frame whose payload counts up, uncut, its checksum open; and its header.
fn uncut(version: u8, protocol: u8) -> (RawNetHeader, Vec<u8>) {
    let l4_size = if protocol == TCP { 20 } else { 8 };
    let len = u16::try_from(l4_size + PIECE * PIECES).unwrap().to_be_bytes();
    let mut ip = if version == 4 {
        let whole = u16::try_from(20 + l4_size + PIECE * PIECES).unwrap().to_be_bytes();
        let mut ip = vec![0x45, 0, whole[0], whole[1], 0, 1, 0x40, 0, 64, protocol, 0, 0];
        ip.extend([10, 55, 0, 2, 10, 55, 0, 9]);
        let sum = checksum(&ip).to_be_bytes();
        ip[10..12].copy_from_slice(&sum);
        ip
    } else {
        let mut ip = vec![0x60, 0, 0, 0, len[0], len[1], protocol, 64];
        ip.extend([0xfd, 0x55, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2]);
        ip.extend([0xfd, 0x55, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9]);
        ip
    };
    let ip_size = ip.len();
    let mut l4 = vec![0x12, 0x34, 0x12, 0x35];
    l4.resize(l4_size, 0);
    let sum_at = if protocol == TCP { 16 } else { 6 };
    if protocol == TCP {
        (l4[12], l4[13]) = (5 << 4, 0x10);
    } else {
        l4[4..6].copy_from_slice(&len);
    }
    let open = !checksum(&pseudo(&ip, protocol, l4_size + PIECE * PIECES));
    l4[sum_at..sum_at + 2].copy_from_slice(&open.to_be_bytes());
    ip.extend(l4);
    ip.extend((0..=u8::MAX).cycle().take(PIECE * PIECES));
    let ether_type: [u8; 2] = if version == 4 { [0x08, 0] } else { [0x86, 0xdd] };
    let header = RawNetHeader {
        flags: HDR_F_NEEDS_CSUM,
        gso_type: match (version, protocol) {
            (4, TCP) => HDR_GSO_TCPV4,
            (_, TCP) => HDR_GSO_TCPV6,
            _ => HDR_GSO_UDP_L4,
        },
        hdr_len: u16::try_from(14 + ip_size + l4_size).unwrap().into(),
        gso_size: u16::try_from(PIECE).unwrap().into(),
        csum_start: u16::try_from(14 + ip_size).unwrap().into(),
        csum_offset: u16::try_from(sum_at).unwrap().into(),
        ..RawNetHeader::default()
    };
    (header, [&TO[..], &FROM, &ether_type, &ip].concat())
}

fn send(guest: &mut NetDriver, header: &RawNetHeader, frame: &[u8]) {
    let tx = &mut guest.pairs[0].tx;
    assert!(tx.send(header, frame).unwrap());
    tx.publish(0).unwrap();
    tx.drain(TIMEOUT).unwrap();
}

/// The next frame from `FROM`: the kernel says things of its own.
fn recv(guest: &mut NetDriver) -> (RawNetHeader, Vec<u8>) {
    loop {
        let mut frame = Vec::new();
        let header = guest.pairs[0].rx.recv_wait(&mut frame, TIMEOUT).unwrap();
        if frame[6..12] == FROM {
            return (header, frame);
        }
    }
}

const KINDS: [(u8, u8); 4] = [(4, TCP), (6, TCP), (4, UDP), (6, UDP)];

#[test]
fn who_takes_unfinished_frames_gets_them_as_they_were_sent() {
    in_own_space(|| {
        let daemon = serve();
        let all = NetDriverOptions::default().features;
        let (mut near, mut far) = (guest(&daemon, "a", all), guest(&daemon, "b", all));
        assert!(near.features & VIRTIO_NET_F_HOST_USO != 0, "this kernel cuts datagrams");
        for (version, protocol) in KINDS {
            let (header, sent) = uncut(version, protocol);
            send(&mut near, &header, &sent);
            let (got, frame) = recv(&mut far);
            assert_eq!((got.gso_type, got.gso_size), (header.gso_type, header.gso_size));
            assert_eq!(got.flags & HDR_F_NEEDS_CSUM, HDR_F_NEEDS_CSUM);
            assert!(frame == sent, "IPv{version}, protocol {protocol}: {} bytes", frame.len());
        }
    });
}

#[test]
fn who_does_not_take_them_gets_finished_ones() {
    in_own_space(|| {
        let daemon = serve();
        let mut near = guest(&daemon, "a", NetDriverOptions::default().features);
        let mut far = guest(&daemon, "b", NetDriverOptions::PLAIN);
        for (version, protocol) in KINDS {
            let (header, sent) = uncut(version, protocol);
            send(&mut near, &header, &sent);
            let l4_at = usize::from(header.csum_start.get());
            let payload_at = usize::from(header.hdr_len.get());
            let mut payload: Vec<u8> = Vec::new();
            for piece in 0..PIECES {
                let (got, frame) = recv(&mut far);
                let kind = format!("IPv{version}, protocol {protocol}, piece {piece}");
                assert_eq!((got.gso_type, got.flags), (HDR_GSO_NONE, 0), "{kind}");
                let l4 = &frame[l4_at..];
                let sum = checksum(&[&pseudo(&frame[14..], protocol, l4.len()), l4].concat());
                assert_eq!(sum, 0, "{kind}: a wrong checksum");
                assert_eq!(frame.len(), payload_at + PIECE, "{kind}");
                payload.extend(&frame[payload_at..]);
            }
            assert!(payload == sent[payload_at..], "IPv{version}, protocol {protocol}");
        }
    });
}

#[test]
fn uncut_datagrams_reach_a_socket_of_the_host_one_by_one() {
    in_own_space(|| {
        let daemon = serve();
        run("ip addr add 10.55.0.9/24 dev br0");
        let mut near = guest(&daemon, "a", NetDriverOptions::default().features);
        let socket = UdpSocket::bind("10.55.0.9:4661").unwrap();
        socket.set_read_timeout(Some(TIMEOUT)).unwrap();
        let (header, mut frame) = uncut(4, UDP);
        let mac = std::fs::read_to_string("/sys/class/net/br0/address").unwrap();
        let mac = mac.trim().split(':').map(|byte| u8::from_str_radix(byte, 16).unwrap());
        frame.splice(..6, mac);
        send(&mut near, &header, &frame);
        let mut payload: Vec<u8> = Vec::new();
        for _ in 0..PIECES {
            let mut datagram = [0; 2048];
            let (len, from) = socket.recv_from(&mut datagram).unwrap();
            assert_eq!((len, from.to_string().as_str()), (PIECE, "10.55.0.2:4660"));
            payload.extend(&datagram[..len]);
        }
        assert!(payload == frame[usize::from(header.hdr_len.get())..]);
    });
}

#[test]
fn a_queue_holds_its_notifications_back_as_its_driver_wants() {
    in_own_space(|| {
        let daemon = serve();
        let mut near = guest(&daemon, "a", NetDriverOptions::default().features);
        let options =
            NetDriverOptions { control: ControlOwner::Device, ..NetDriverOptions::default() };
        let mut far = NetDriver::connect(&daemon.socket_of("b"), &options).unwrap();
        assert!(far.features & VIRTIO_NET_F_VQ_NOTF_COAL != 0);
        let delay = Duration::from_millis(400);
        coalesce(&mut far, delay);
        let frame = [&TO[..], &FROM, &[0x88, 0xb5], &[7; 50]].concat();
        // One alone waits for its time.
        let rx = &mut far.pairs[0].rx;
        assert!(!rx.enable_notifications());
        let before = SystemTime::now();
        send(&mut near, &RawNetHeader::default(), &frame);
        recv_called(&mut far);
        assert!(before.elapsed().unwrap() >= delay, "the call came early");
        // Eight do not, however long that time is.
        let delay = Duration::from_secs(30);
        coalesce(&mut far, delay);
        assert!(!far.pairs[0].rx.enable_notifications());
        let before = SystemTime::now();
        (0..8).for_each(|_| send(&mut near, &RawNetHeader::default(), &frame));
        recv_called(&mut far);
        assert!(before.elapsed().unwrap() < delay, "the eighth did not count");
    });
}

/// Asks for a call of the first receiveq after eight frames, or `delay` after the first of them.
fn coalesce(guest: &mut NetDriver, delay: Duration) {
    let delay_us_max = u32::try_from(delay.as_micros()).unwrap();
    let coalescing = Coalescing { packets_max: 8, delay_us_max };
    let index = u16::try_from(receiveq(0)).unwrap();
    let wanted = QueueCoalescing { index, coalescing };
    let control = guest.control().unwrap();
    assert_eq!(control.coalesce_queue(wanted).unwrap(), CtrlStatus::Ok);
    assert_eq!(control.coalescing_of(index).unwrap(), Some(wanted));
}

/// Sleeps until the device calls, and takes what there is.
fn recv_called(guest: &mut NetDriver) {
    let rx = &mut guest.pairs[0].rx;
    assert!(rx.vring().wait_call(TIMEOUT).unwrap(), "no call came");
    let mut count = 0;
    while rx.recv(&mut Vec::new()).unwrap().is_some() {
        rx.refill().unwrap();
        count += 1;
    }
    assert!(count > 0, "a call for nothing");
}
