//! The rules between guests of one switch, from the guests' side: what a hostile guest sends past
//! its VLAN and its address, and what no bridge passes on. Without a VM and without root.

use crate::support::process::{Daemon, TIMEOUT, domains, wait_until};
use crate::support::program::shown;
use manyring_driver::{NetDriver, NetDriverOptions};
use manyring_wire::net::{HDR_F_NEEDS_CSUM, HDR_GSO_TCPV6, RawNetHeader};

const ALL: [u8; 6] = [0xff; 6];
/// The last bytes of frames that end a step of a test.
const END: &[u8] = b"the end of what is to be heard in this step of the test";

/// A device on the switch for each of these names, with these keys.
fn serve(switch: &str, devices: &[(&str, &str)]) -> Daemon {
    let mut config = format!(
        "[daemon]\ncontrol = '@/control'\n{}\n[[switch]]\nname = 's0'\n{switch}",
        domains()
    );
    for (name, keys) in devices {
        let device = format!("name = '{name}'\nsocket_path = '@/{name}'\nswitch = 's0'\n{keys}\n");
        config += &format!("[[net]]\n{device}");
    }
    let names: Vec<_> = devices.iter().map(|(name, _)| *name).chain(["control"]).collect();
    Daemon::run(&config, &names)
}

fn mac(n: u8) -> [u8; 6] {
    [2, 0, 0, 0, 0, n]
}

/// A frame with these tags and this EtherType.
fn frame(to: [u8; 6], from: u8, tags: &[u16], kind: u16, payload: &[u8]) -> Vec<u8> {
    let mut frame = [&to[..], &mac(from)].concat();
    for tag in tags {
        frame.extend([&[0x81, 0], &tag.to_be_bytes()[..]].concat());
    }
    frame.extend(kind.to_be_bytes());
    frame.extend(payload);
    frame.resize(frame.len().max(60), 0);
    frame
}

struct Guest {
    n: u8,
    driver: NetDriver,
    marks: u8,
}

impl Guest {
    fn with(daemon: &Daemon, name: &str, n: u8, features: u64) -> Self {
        let options = NetDriverOptions { features, ..NetDriverOptions::default() };
        let driver = NetDriver::connect(&daemon.socket_of(name), &options).unwrap();
        Self { n, driver, marks: 0 }
    }

    /// A guest that takes all offloads.
    fn connect(daemon: &Daemon, name: &str, n: u8) -> Self {
        Self::with(daemon, name, n, NetDriverOptions::default().features)
    }

    /// A guest that takes no checksum that is left open.
    fn plain(daemon: &Daemon, name: &str, n: u8) -> Self {
        Self::with(daemon, name, n, NetDriverOptions::PLAIN)
    }

    fn send_with(&mut self, header: &RawNetHeader, frame: &[u8]) {
        let tx = &mut self.driver.pairs[0].tx;
        assert!(tx.send(header, frame).unwrap());
        tx.publish(0).unwrap();
        tx.drain(TIMEOUT).unwrap();
    }

    fn send(&mut self, frame: &[u8]) {
        self.send_with(&RawNetHeader::default(), frame);
    }

    /// What has come before frames with each of these last bytes; frames that end other steps of a
    /// test are left out.
    fn heard_before(&mut self, mut lasts: Vec<Vec<u8>>) -> Vec<Vec<u8>> {
        let mut heard = Vec::new();
        while !lasts.is_empty() {
            let mut frame = Vec::new();
            self.driver.pairs[0].rx.recv_wait(&mut frame, TIMEOUT).expect("a frame");
            if frame.ends_with(END) {
                lasts.retain(|last| !frame.ends_with(last));
            } else {
                heard.push(frame);
            }
        }
        heard
    }

    /// What `others` have heard since the last such call: ends the step with a frame to all and one
    /// to each of them, all tagged like `tags`, since a frame to all may overtake one to a guest.
    fn mark(&mut self, tags: &[u16], others: &mut [&mut Self]) -> Vec<Vec<Vec<u8>>> {
        self.marks += 1;
        let last = |to: [u8; 6]| [&to[..], &[self.n, self.marks], END].concat();
        let all: Vec<_> = others.iter().map(|other| mac(other.n)).chain([ALL]).collect();
        let frames: Vec<_> =
            all.iter().map(|to| frame(*to, self.n, tags, 0x88b5, &last(*to))).collect();
        let lasts: Vec<_> = all.iter().map(|to| last(*to)).collect();
        frames.iter().for_each(|frame| self.send(frame));
        let of_all = lasts.last().unwrap();
        let each = others.iter_mut().zip(&lasts);
        each.map(|(other, last)| other.heard_before(vec![last.clone(), of_all.clone()])).collect()
    }
}

fn counted(daemon: &Daemon, name: &str, counter: &str) -> u64 {
    let device = shown(&daemon.socket_of("control"), &format!("/v1/devices/{name}"));
    device["switch"][counter].as_u64().expect("a counter of the port")
}

/// Frames of the device's transmitq that were dropped for their header.
fn bad_headers(daemon: &Daemon, name: &str) -> u64 {
    let device = shown(&daemon.socket_of("control"), &format!("/v1/devices/{name}"));
    let queues = device["queues"].as_array().expect("queues").clone();
    queues.iter().filter_map(|queue| queue["counters"]["dropped_bad_header"].as_u64()).sum()
}

fn open(start: u16, offset: u16) -> RawNetHeader {
    RawNetHeader {
        flags: HDR_F_NEEDS_CSUM,
        csum_start: start.into(),
        csum_offset: offset.into(),
        ..RawNetHeader::default()
    }
}

/// IPv4 with this protocol, from 10.0.0.1 to 10.0.0.2.
fn ipv4(protocol: u8, payload: &[u8]) -> Vec<u8> {
    let len = u16::try_from(20 + payload.len()).unwrap().to_be_bytes();
    let mut ip = vec![0x45, 0, len[0], len[1], 0, 1, 0x40, 0, 64, protocol, 0, 0];
    ip.extend([10, 0, 0, 1, 10, 0, 0, 2]);
    ip.extend(payload);
    ip
}

fn ipv6(next: u8, payload: &[u8]) -> Vec<u8> {
    let len = u16::try_from(payload.len()).unwrap().to_be_bytes();
    let mut ip = vec![0x60, 0, 0, 0, len[0], len[1], next, 64];
    ip.extend([0xfd; 32]);
    ip.extend(payload);
    ip
}

/// The internet checksum (RFC 1071) of all from `start` on.
fn checksum(frame: &[u8], start: usize) -> [u8; 2] {
    let word = |pair: &[u8]| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0));
    let mut sum: u32 = frame[start..].chunks(2).map(word).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    (!u16::try_from(sum).unwrap()).to_be_bytes()
}

const FIVE: [(&str, &str); 6] = [
    ("guarded", "mac = '02:00:00:00:00:01'\nanti_spoof = true"),
    ("plain", "mac = '02:00:00:00:00:02'"),
    ("access5", "mac = '02:00:00:00:00:03'\nvlan = 5"),
    ("trunk5", "mac = '02:00:00:00:00:04'\ntrunk = [5]"),
    ("trunk56", "mac = '02:00:00:00:00:05'\ntrunk = [5, 6]"),
    ("access6", "mac = '02:00:00:00:00:06'\nvlan = 6"),
];

#[test]
fn a_checksum_request_takes_no_guest_to_another_vlan_and_gives_it_no_other_address() {
    let daemon = serve("", &FIVE);
    let mut guarded = Guest::connect(&daemon, "guarded", 1);
    let mut plain = Guest::plain(&daemon, "plain", 2);
    let mut access5 = Guest::connect(&daemon, "access5", 3);
    let mut trunk5 = Guest::connect(&daemon, "trunk5", 4);
    // One receiver has checksums finished, the other one finishes them itself.
    let mut trunk56 = Guest::plain(&daemon, "trunk56", 5);
    let mut access6 = Guest::connect(&daemon, "access6", 6);
    let arp = [&[0, 1, 8, 0, 6, 4, 0, 2][..], &mac(1), &[10, 0, 0, 1], &mac(9), &[10, 0, 0, 2]];
    let from_guarded = [
        (open(10, 0), frame(ALL, 1, &[], 0x88b5, &[7; 46])),
        (open(6, 0), frame(ALL, 1, &[], 0x0800, &ipv4(6, &[7; 40]))),
        (open(22, 0), frame(ALL, 1, &[], 0x0806, &arp.concat())),
        (open(26, 0), frame(ALL, 1, &[], 0x0806, &arp.concat())),
        // The option of neighbour discovery that names the sender, and what makes a message one.
        (open(54, 26), frame(ALL, 1, &[], 0x86dd, &ipv6(58, &[136; 32]))),
        (open(54, 0), frame(ALL, 1, &[], 0x86dd, &ipv6(58, &[128; 32]))),
        (open(54, 0), frame(ALL, 1, &[], 0x86dd, &ipv6(60, &[58, 0, 1, 4, 0, 0, 0, 0, 129, 7]))),
    ];
    for (header, bytes) in &from_guarded {
        guarded.send_with(header, bytes);
    }
    let cut = RawNetHeader { gso_type: HDR_GSO_TCPV6, gso_size: 8.into(), ..open(54, 16) };
    guarded.send_with(&cut, &frame(ALL, 1, &[], 0x86dd, &ipv6(58, &[136; 64])));
    let heard = guarded.mark(&[], &mut [&mut plain]);
    assert_eq!(heard, [Vec::<Vec<u8>>::new()]);
    assert_eq!(bad_headers(&daemon, "guarded"), from_guarded.len() as u64 + 1);
    // To VLAN 6: by the tag that the switch inserts, and by the guest's own.
    access5.send_with(&open(10, 0), &frame(ALL, 3, &[], 0x88b5, &[7; 46]));
    access5.send_with(&open(10, 2), &frame(ALL, 3, &[], 0x0800, &ipv4(6, &[7; 40])));
    trunk5.send_with(&open(14, 0), &frame(ALL, 4, &[5], 0x88b5, &[7; 46]));
    trunk5.send_with(&open(14, 0), &frame(ALL, 4, &[5], 0x0800, &ipv4(17, &[7; 40])));
    assert_eq!(access5.mark(&[], &mut [&mut trunk5, &mut trunk56]), [[[0u8; 0]; 0]; 2]);
    assert_eq!(trunk5.mark(&[5], &mut [&mut access5, &mut trunk56]), [[[0u8; 0]; 0]; 2]);
    assert_eq!(trunk56.mark(&[6], &mut [&mut access6]), [[[0u8; 0]; 0]]);
    assert_eq!((bad_headers(&daemon, "access5"), bad_headers(&daemon, "trunk5")), (2, 2));
}

#[test]
fn checksums_in_a_tunnel_of_sctp_and_behind_extension_headers_arrive_finished_or_as_they_are() {
    let daemon = serve("", &FIVE[..3]);
    let mut guarded = Guest::connect(&daemon, "guarded", 1);
    let mut plain = Guest::plain(&daemon, "plain", 2);
    let tcp: Vec<u8> = (0..40).collect();
    let inner = [&[2; 12][..], &[8, 0], &ipv4(6, &tcp)].concat();
    let vxlan = [&[0x12, 0x34, 0x12, 0xb5, 0, 90, 0, 0, 8, 0, 0, 0, 0, 0, 7, 0][..], &inner];
    let gre = [&[0, 0, 8, 0][..], &ipv4(6, &tcp)].concat();
    let options = [&[6, 0, 1, 4, 0, 0, 0, 0][..], &tcp].concat();
    let frames = [
        (open(34, 16), frame(mac(2), 1, &[], 0x0800, &ipv4(6, &tcp))),
        (open(38, 6), frame(mac(2), 1, &[0x2000], 0x0800, &ipv4(17, &tcp))),
        (open(34 + 16 + 14 + 20, 16), frame(mac(2), 1, &[], 0x0800, &ipv4(17, &vxlan.concat()))),
        (open(34 + 4 + 20, 16), frame(mac(2), 1, &[], 0x0800, &ipv4(47, &gre))),
        (open(34, 8), frame(mac(2), 1, &[], 0x0800, &ipv4(132, &tcp))),
        (open(62, 16), frame(mac(2), 1, &[], 0x86dd, &ipv6(60, &options))),
        (open(54, 2), frame(mac(2), 1, &[], 0x86dd, &ipv6(58, &[128; 40]))),
    ];
    for (header, bytes) in &frames {
        guarded.send_with(header, bytes);
    }
    let [finished] = guarded.mark(&[], &mut [&mut plain]).try_into().unwrap();
    assert_eq!(finished.len(), frames.len());
    for ((header, sent), seen) in frames.iter().zip(&finished) {
        let start = usize::from(header.csum_start.get());
        let at = start + usize::from(header.csum_offset.get());
        let mut right = sent.clone();
        right[at..at + 2].copy_from_slice(&checksum(sent, start));
        assert_eq!(seen, &right, "from {start}");
    }
    assert_eq!(counted(&daemon, "plain", "finished"), frames.len() as u64);
    drop(plain);
    let mut takes = Guest::connect(&daemon, "plain", 2);
    takes.mark(&[], &mut [&mut guarded]);
    for (header, bytes) in &frames {
        guarded.send_with(header, bytes);
    }
    let sent: Vec<_> = frames.into_iter().map(|(_, bytes)| bytes).collect();
    assert_eq!(guarded.mark(&[], &mut [&mut takes]), [sent]);
    assert!(wait_until(|| bad_headers(&daemon, "guarded") == 0));
}

#[test]
fn a_tag_with_a_priority_alone_is_no_vlan_on_any_port() {
    let daemon = serve(
        "",
        &[
            FIVE[1],
            FIVE[2],
            FIVE[4],
            ("more5", "vlan = 5\nanti_spoof = true\nmac = '02:00:00:00:00:07'"),
        ],
    );
    let mut plain = Guest::connect(&daemon, "plain", 2);
    let mut access5 = Guest::connect(&daemon, "access5", 3);
    let mut trunk56 = Guest::connect(&daemon, "trunk56", 5);
    let mut more5 = Guest::connect(&daemon, "more5", 7);
    let priority = |n: u8, tags: &[u16]| frame(ALL, n, tags, 0x88b5, &[n; 60]);
    // From a port of a VLAN, with and without a guard: to its VLAN, with the priority on a trunk.
    for is_guarded in [false, true] {
        let both = (&mut access5, &mut more5);
        let (guest, other) = if is_guarded { (both.1, both.0) } else { both };
        guest.send(&priority(guest.n, &[0xa000]));
        let tagged = vec![priority(guest.n, &[0xa005])];
        let heard = guest.mark(&[], &mut [other, &mut trunk56, &mut plain]);
        assert_eq!(heard, [vec![priority(guest.n, &[])], tagged.clone(), tagged]);
    }
    // From a port of every VLAN: as it is, and to no VLAN.
    plain.send(&priority(2, &[0x6000]));
    plain.mark(&[5], &mut [&mut access5, &mut trunk56, &mut more5]).iter().for_each(|heard| {
        assert_eq!(heard, &[[0u8; 0]; 0]);
    });
    // The station is the same with and without the priority.
    access5.send(&frame(mac(2), 3, &[], 0x88b5, &[1; 60]));
    plain.send(&frame(mac(9), 2, &[0x2000], 0x88b5, &[2; 60]));
    trunk56.send(&frame(ALL, 5, &[], 0x88b5, &[3; 60]));
    trunk56.send(&frame(ALL, 5, &[0xe000], 0x88b5, &[3; 60]));
    access5.send(&frame(ALL, 3, &[0x2000, 6], 0x88b5, &[4; 60]));
    assert!(wait_until(|| counted(&daemon, "trunk56", "dropped_vlan") == 2));
    assert!(wait_until(|| counted(&daemon, "access5", "dropped_vlan") == 1));
}

#[test]
fn frames_for_the_next_bridge_end_at_the_switch_and_a_key_passes_some() {
    let groups = [0, 1, 2, 3, 0xe, 0xf, 0x10, 0x21];
    let pvst = [1, 0, 0xc, 0xcc, 0xcc, 0xcd];
    for (key, passed) in
        [("", vec![0x10, 0x21]), ("group_fwd_mask = 0x4001\n", vec![0, 0xe, 0x10, 0x21])]
    {
        let daemon = serve(key, &FIVE[..3]);
        let mut plain = Guest::connect(&daemon, "plain", 2);
        let mut guarded = Guest::connect(&daemon, "guarded", 1);
        let mut access5 = Guest::connect(&daemon, "access5", 3);
        for guest in [&mut guarded, &mut access5] {
            for group in groups {
                let to = [1, 0x80, 0xc2, 0, 0, group];
                guest.send(&frame(to, guest.n, &[], 38, &[0x42, 0x42, 3]));
            }
            guest.send(&frame(pvst, guest.n, &[], 0x88b5, &[1]));
            let [heard] = guest.mark(&[], &mut [&mut plain]).try_into().unwrap();
            let seen: Vec<_> = heard.iter().map(|frame| frame[5]).collect();
            assert_eq!(seen, [&passed[..], &[0xcd]].concat());
        }
        let dropped = (groups.len() - passed.len()) as u64;
        for name in ["guarded", "access5"] {
            assert_eq!(counted(&daemon, name, "dropped_reserved"), dropped);
        }
    }
}

#[test]
fn frames_to_a_configured_address_go_to_its_silent_guest_alone() {
    for keys in ["mac = '02:00:00:00:00:01'", FIVE[0].1] {
        let daemon =
            serve("", &[("silent", keys), FIVE[1], ("thief", "mac = '02:00:00:00:00:03'")]);
        let mut silent = Guest::connect(&daemon, "silent", 1);
        let mut plain = Guest::connect(&daemon, "plain", 2);
        let mut thief = Guest::connect(&daemon, "thief", 3);
        let to_silent = |n: u8| frame(mac(1), 2, &[], 0x88b5, &[n; 60]);
        plain.send(&to_silent(1));
        let heard = plain.mark(&[], &mut [&mut silent, &mut thief]);
        assert_eq!(heard, [vec![to_silent(1)], vec![]]);
        // Another guest that sends as this address does not get its frames.
        thief.send(&frame(mac(2), 1, &[], 0x88b5, &[2; 60]));
        plain.send(&to_silent(3));
        let heard = plain.mark(&[], &mut [&mut silent, &mut thief]);
        assert_eq!(heard, [vec![to_silent(3)], vec![]]);
        assert_eq!(counted(&daemon, "thief", "not_learnt"), 1);
        // Nor while its guest is away.
        drop(silent);
        assert!(wait_until(|| {
            plain.send(&to_silent(4));
            counted(&daemon, "silent", "dropped_no_queue") > 0
        }));
        assert_eq!(plain.mark(&[], &mut [&mut thief]), [[[0u8; 0]; 0]]);
        assert_eq!(counted(&daemon, "plain", "flooded"), 3);
    }
}
