//! VLANs, isolation, forged addresses, and guests that accept no offloads.

use super::*;
use manyring_wire::net::{FRAME_SIZE_MAX, HDR_GSO_TCPV4};
use vlan_rules::Vlans;

fn with(name: &str, change: impl FnOnce(&mut PortOptions)) -> PortOptions {
    let mut options = PortOptions::new(name, 1);
    change(&mut options);
    options
}

#[test]
fn a_broadcast_reaches_everybody_else_and_isolated_ports_only_who_is_not() {
    let world = World::new();
    let mut up = world.guest(9);
    let isolated = |n: u8| world.guest_on(n, with("i", |options| options.isolated = true));
    let (mut a, mut b) = (isolated(1), isolated(2));
    a.send_all(&[frame([0xff; 6], mac(1), 60, 1)]);
    assert_eq!((up.receive().len(), b.receive().len(), a.receive().len()), (1, 0, 0));
    b.send_all(&[frame([0xff; 6], mac(2), 60, 1)]);
    up.send_all(&[frame([0xff; 6], mac(9), 60, 1)]);
    assert_eq!((a.receive().len(), b.receive().len(), up.receive().len()), (1, 1, 1));
    // It knows where the other one is, and may not go there.
    a.send(2, 60, 2);
    a.send(9, 60, 3);
    assert_eq!((b.receive().len(), a.counter("dropped_isolated")), (0, 1));
    assert_eq!(up.numbers(), [3]);
}

#[test]
fn vlans_are_apart_and_a_trunk_has_their_tags() {
    let world = World::new();
    let on = |n: u8, vlans: Vlans| world.guest_on(n, with("v", |options| options.vlans = vlans));
    let (mut a, mut b) = (on(1, Vlans::Access(5)), on(2, Vlans::Access(5)));
    let (mut c, mut trunk) = (on(3, Vlans::Access(6)), on(9, Vlans::Trunk(vec![5, 6])));
    let greeting = frame([0xff; 6], mac(1), 60, 7);
    a.send_all(std::slice::from_ref(&greeting));
    assert_eq!(b.receive(), std::slice::from_ref(&greeting));
    assert_eq!(c.receive().len(), 0);
    let mut tagged = greeting.clone();
    tagged.splice(12..12, [0x81, 0, 0, 5]);
    assert_eq!(trunk.receive(), [tagged.clone()]);
    // Back: the tag comes off, and a tag of another VLAN goes elsewhere.
    let mut back = frame(mac(1), mac(9), 60, 8);
    back.splice(12..12, [0x81, 0, 0, 5]);
    trunk.send_all(&[back]);
    assert_eq!(a.receive(), [frame(mac(1), mac(9), 60, 8)]);
    // A guest on an access port chooses no VLAN, and the trunk takes none that is not its own.
    a.send_all(&[tagged.clone()]);
    tagged[15] = 7;
    trunk.send_all(&[tagged, frame([0xff; 6], mac(9), 60, 9)]);
    assert_eq!((a.counter("dropped_vlan"), trunk.counter("dropped_vlan")), (1, 2));
    assert_eq!((b.receive().len(), c.receive().len()), (0, 0));
}

/// A broadcast of guest `n` with this tag.
fn tagged(n: u8, tci: u16, number: u32) -> Vec<u8> {
    let mut bytes = frame([0xff; 6], mac(n), 60, number);
    let [high, low] = tci.to_be_bytes();
    bytes.splice(12..12, [0x81, 0, high, low]);
    bytes
}

#[test]
fn a_priority_is_no_vlan_and_what_has_none_reaches_ports_of_every_vlan_only() {
    let world = World::new();
    let on = |n: u8, vlans: Vlans| world.guest_on(n, with("v", |options| options.vlans = vlans));
    let (mut all, mut other) = (on(1, Vlans::All), on(2, Vlans::All));
    let (mut access, mut trunk) = (on(3, Vlans::Access(5)), on(4, Vlans::Trunk(vec![5])));
    // A priority, the number that no VLAN has, and VLAN 5 with a priority.
    let frames = [tagged(1, 0xe000, 1), tagged(1, 0x0fff, 2), tagged(1, 0xe005, 3)];
    all.send_all(&frames);
    assert_eq!(other.receive(), frames, "as they are");
    assert_eq!(access.numbers(), [3], "without the tag");
    assert_eq!(trunk.receive(), [frames[2].clone()]);
    // A port of a VLAN takes a priority as its VLAN's; the trunk takes its own tag alone.
    access.send_all(&[tagged(3, 0xe000, 4), tagged(3, 0x0fff, 5), tagged(3, 0xe005, 6)]);
    trunk.send_all(&[tagged(4, 0xe000, 7), tagged(4, 0x0fff, 8), tagged(4, 0xe005, 9)]);
    assert_eq!((access.counter("dropped_vlan"), trunk.counter("dropped_vlan")), (2, 2));
    assert_eq!((access.numbers(), trunk.receive()), (vec![9], vec![tagged(3, 0xe005, 4)]));
    let seen = [tagged(3, 0xe005, 4), tagged(4, 0xe005, 9)];
    assert_eq!(all.receive(), seen, "with their priority");
    // A second tag behind the priority would come to guests of the VLAN as theirs.
    let mut double = tagged(3, 0xe000, 10);
    double.splice(16..16, [0x81, 0, 0, 6]);
    access.send_all(&[double]);
    assert_eq!((access.counter("dropped_vlan"), trunk.receive().len()), (3, 0));
    // The frame ends within its VLAN tag, so it counts as one without a tag.
    let short = tagged(1, 5, 11)[..14].to_vec();
    all.send_all(std::slice::from_ref(&short));
    let seen = [&seen[..], &[short]].concat();
    assert_eq!(other.receive(), seen);
    assert_eq!((access.receive().len(), trunk.receive().len()), (0, 0));
}

#[test]
fn a_hint_of_the_driver_shorter_than_a_tag_costs_no_frame_whose_tag_is_taken_off() {
    let world = World::new();
    let on = |n: u8, vlans: Vlans| world.guest_on(n, with("v", |options| options.vlans = vlans));
    let mut trunk = on(9, Vlans::Trunk(vec![5]));
    let (mut a, mut b) = (on(1, Vlans::Access(5)), on(2, Vlans::Access(5)));
    for hdr_len in [0, 2, 3, 4, 5, 60] {
        let header = RawNetHeader { hdr_len: hdr_len.into(), ..RawNetHeader::default() };
        let bytes = tagged(9, 5, 7);
        trunk.send_with(&header, std::slice::from_ref(&bytes));
        let plain = [&bytes[..12], &bytes[16..]].concat();
        assert_eq!((a.receive(), b.receive()), (vec![plain.clone()], vec![plain]), "{hdr_len}");
    }
}

#[test]
fn a_frame_that_becomes_too_long_by_a_tag_is_counted_where_it_does_not_arrive() {
    let world = World::new();
    let on = |n: u8, vlans: Vlans| world.guest_on(n, with("v", |options| options.vlans = vlans));
    let (mut trunk, mut a) = (on(9, Vlans::Trunk(vec![5])), on(1, Vlans::Access(5)));
    for (to, len) in [([0xff; 6], FRAME_SIZE_MAX), (mac(9), FRAME_SIZE_MAX - 3)] {
        let before = trunk.counter("dropped_unfinished");
        a.send_all(&[frame(to, mac(1), len, 3)]);
        assert_eq!((trunk.receive(), trunk.counter("dropped_unfinished")), (vec![], before + 1));
    }
    a.send_all(&[frame([0xff; 6], mac(1), FRAME_SIZE_MAX - 4, 3)]);
    assert_eq!(trunk.receive().len(), 1);
}

#[test]
fn an_address_of_two_ports_is_nobodys_for_long_and_others_are_not_disturbed() {
    let world = World::new();
    let (mut a, mut b) = world.two();
    let mut thief = world.guest(3);
    let mut c = world.guest(4);
    c.greet(&mut [&mut a, &mut b, &mut thief]);
    // Both say in turn that they have address 2.
    for _ in 0..20 {
        thief.send_all(&[frame(mac(4), mac(2), 60, 0)]);
        b.send_all(&[frame(mac(4), mac(2), 60, 0)]);
    }
    assert_eq!(thief.counter("moves") + b.counter("moves"), 4);
    assert!(thief.counter("flaps") + b.counter("flaps") > 0, "then it stays for this second");
    c.receive();
    for n in 0..50 {
        a.send(2, 200, n);
        a.send(4, 200, n);
    }
    assert_eq!(c.numbers(), (0..50).collect::<Vec<_>>());
    assert_eq!(thief.receive().len() + b.receive().len(), 50, "each went to one of them");
    // A port loses an address that sends nothing.
    world.later(1000);
    b.send_all(&[frame(mac(4), mac(2), 60, 0)]);
    world.later(1000);
    a.send(2, 200, 51);
    assert_eq!((b.numbers(), thief.receive().len()), (vec![51], 0));
}

#[test]
fn a_guarded_guest_sends_as_itself_only() {
    let world = World::new();
    let mut a = world.guest_on(1, with("a", |options| options.only = Some(mac(1))));
    let mut b = world.guest(2);
    b.greet(&mut [&mut a]);
    let mut arp = frame([0xff; 6], mac(1), 12, 0)[..12].to_vec();
    arp.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 2]);
    arp.extend(mac(7));
    arp.extend([0; 30]);
    let frames = [frame(mac(2), mac(1), 200, 1), frame(mac(2), mac(7), 200, 2), arp];
    let sent = a.send_all(&frames);
    assert_eq!((sent.refused, sent.lost, sent.later), (2, 0b110, 0b1));
    assert_eq!((b.numbers(), a.counter("dropped_spoofed")), (vec![1], 2));
    assert!(world.switch.stations().iter().all(|(station, _)| station.address != mac(7)));
}

#[test]
fn frames_to_groups_of_bridges_end_at_the_switch_unless_it_is_to_pass_them() {
    for mask in [0, 1 << 14, 0xfffd] {
        let world = World::passing(mask);
        let mut a = world.guest_on(1, with("a", |options| options.only = Some(mac(1))));
        let (mut b, up) = (world.guest(2), world.guest(9));
        for group in 0..32u8 {
            let to = [1, 0x80, 0xc2, 0, 0, group];
            let bytes = frame(to, mac(1), 60, group.into());
            let sent = a.send_all(std::slice::from_ref(&bytes));
            assert_eq!(sent.refused, 0, "the guest has broken no rule");
            let passes = group > 15 || mask >> group & 1 == 1;
            assert_eq!(b.receive().len(), usize::from(passes), "{group} {mask:x}");
            // With a tag, and from the network.
            a.send_all(&[[&bytes[..12], &[0x81, 0, 0, 5], &bytes[12..]].concat()]);
            up.port.copy_path().send(&[&[0; HEADER_SIZE], &frame(to, mac(9), 60, 1)[..]].concat());
            assert_eq!(b.receive().len(), 2 * usize::from(passes), "{group} {mask:x}");
        }
        let dropped = u64::from(mask.count_zeros());
        assert_eq!(a.counter("dropped_reserved"), 2 * dropped);
        assert_eq!(up.counter("dropped_reserved"), dropped);
    }
}

#[test]
fn a_configured_address_is_its_ports_alone_whether_it_sends_or_not() {
    for only in [None, Some(mac(1))] {
        let world = World::new();
        let pin = |options: &mut PortOptions| (options.mac, options.only) = (Some(mac(1)), only);
        let mut silent = world.guest_on(1, with("silent", pin));
        let (mut b, mut thief) = world.two_more();
        b.send(1, 200, 1);
        assert_eq!((silent.numbers(), thief.receive().len()), (vec![1], 0));
        // Who sends as this address gets nothing for it.
        thief.send_all(&[frame(mac(2), mac(1), 60, 2)]);
        assert_eq!((b.numbers(), thief.counter("not_learnt")), (vec![2], 1));
        world.later(1_000_000);
        b.send(1, 200, 3);
        assert_eq!((silent.numbers(), thief.receive().len()), (vec![3], 0), "it does not age");
        silent.send(2, 60, 4);
        assert_eq!(b.numbers(), [4]);
        // While the guest is not there, its frames go nowhere, and the address is nobody's.
        drop(silent.rx.take());
        thief.send_all(&[frame(mac(2), mac(1), 60, 5)]);
        b.send(1, 60, 6);
        assert_eq!((b.numbers(), thief.receive().len()), (vec![5], 0));
        assert_eq!((silent.counter("dropped_no_queue"), thief.counter("moves")), (1, 0));
    }
}

#[test]
fn a_configured_address_is_behind_the_uplink_while_its_guest_is_not_here() {
    let world = World::new();
    let mut up = world.guest_on(9, with("up", |options| options.is_uplink = true));
    let mut coming = world.guest_on(1, with("coming", |options| options.mac = Some(mac(1))));
    let (mut b, mut c) = world.two_more();
    let rx = coming.rx.take();
    drop(rx);
    b.send(1, 60, 1);
    assert_eq!((up.numbers(), c.receive().len()), (vec![1], 0), "to the uplink alone");
    up.send_all(&[frame(mac(2), mac(1), 60, 2), frame(mac(1), mac(9), 60, 3)]);
    assert_eq!((b.numbers(), c.receive().len()), (vec![2], 0), "not to others");
    // It comes here: from its first queue on the frames are its own, before it has sent any.
    coming.rx = Some(coming.port.open_rx(0).unwrap());
    b.send(1, 60, 4);
    up.send_all(&[frame(mac(1), mac(9), 60, 5)]);
    assert_eq!((coming.numbers(), up.receive().len()), (vec![4, 5], 0));
}

#[test]
fn an_address_is_configured_for_one_port_of_each_vlan_or_for_nobody() {
    let world = World::new();
    let on = |n: u8, vlans: Vlans| {
        let options = with("v", |options| (options.vlans, options.mac) = (vlans, Some(mac(1))));
        world.guest_on(n, options)
    };
    let (mut five, mut six) = (on(1, Vlans::Access(5)), on(1, Vlans::Access(6)));
    let mut trunk = world.guest_on(9, with("t", |o| o.vlans = Vlans::Trunk(vec![5, 6])));
    let to = |vlan: u8, number: u32| {
        let mut bytes = frame(mac(1), mac(9), 60, number);
        bytes.splice(12..12, [0x81, 0, 0, vlan]);
        bytes
    };
    trunk.send_all(&[to(5, 1), to(6, 2)]);
    assert_eq!((five.numbers(), six.numbers()), (vec![1], vec![2]));
    // Two of one VLAN: the address is learnt, as if it were configured for neither.
    let mut twin = on(1, Vlans::Access(5));
    trunk.send_all(&[to(5, 3)]);
    assert_eq!((five.numbers(), twin.numbers(), six.receive().len()), (vec![3], vec![3], 0));
    twin.send(9, 60, 4);
    trunk.send_all(&[to(5, 5)]);
    assert_eq!((five.receive().len(), twin.numbers()), (0, vec![5]));
}

/// A header that asks for a checksum from `start` on, to be put at `start + offset`.
fn open(start: u16, offset: u16) -> RawNetHeader {
    RawNetHeader { csum_start: start.into(), csum_offset: offset.into(), ..OPEN }
}

/// Neighbour advertisement over IPv6 of guest `n`, whose link-layer address is `link`.
fn advertisement(n: u8, link: [u8; 6]) -> Vec<u8> {
    let mut bytes = [&[0x33, 0x33, 0, 0, 0, 1][..], &mac(n), &[0x86, 0xdd]].concat();
    bytes.extend([0x60, 0, 0, 0, 0, 32, 58, 255]);
    bytes.extend([0xfe; 32]);
    bytes.extend([136, 0, 0, 0, 0x20, 0, 0, 0]);
    bytes.extend([0xfe; 16]);
    bytes.extend([2, 1]);
    bytes.extend(link);
    bytes
}

#[test]
fn a_checksum_is_written_into_nothing_that_was_judged() {
    let world = World::new();
    let mut a = world.guest_on(1, with("a", |options| options.only = Some(mac(1))));
    let (mut b, mut takes) = (world.guest(2), world.guest(3));
    b.port.set_offloads(Offloads::default()).unwrap();
    let lies = [
        // The device refuses these on arrival; a driver can make such frames while it looks.
        (open(54, 26), advertisement(1, mac(1))),
        (open(54, 0), advertisement(1, mac(1))),
        (open(34, 16), advertisement(1, mac(1))),
        (open(34, 16), frame([0xff; 6], mac(1), 200, 1)),
    ];
    for (header, bytes) in &lies {
        let sent = a.send_with(header, std::slice::from_ref(bytes));
        assert_eq!((sent.refused, sent.lost), (1, 1), "{header:?}");
    }
    assert_eq!((b.receive().len(), takes.receive().len()), (0, 0));
    assert_eq!(a.counter("dropped_unfinished"), 4);
    let whole = advertisement(1, mac(1));
    a.send_with(&open(54, 2), std::slice::from_ref(&whole));
    assert_eq!(takes.receive(), std::slice::from_ref(&whole));
    let seen = b.receive();
    assert_eq!((&seen[0][..56], &seen[0][58..]), (&whole[..56], &whole[58..]));
    // A port without a guard: what a receiver's copy is finished by was judged with it.
    for bytes in [frame(mac(2), mac(3), 200, 1), frame(mac(2), mac(3), 60, 1)] {
        b.greet(&mut [&mut takes]);
        takes.send_with(&open(10, 0), &[bytes]);
        assert_eq!(b.receive().len(), 0);
    }
    assert_eq!(b.counter("dropped_unfinished"), 2);
}

#[test]
fn what_an_uplink_brings_is_checked_as_what_a_guest_sends() {
    let world = World::new();
    let up = world.guest(9);
    let (mut b, mut takes) = (world.guest(2), world.guest(3));
    b.port.set_offloads(Offloads::default()).unwrap();
    let frame_copy = |header: &RawNetHeader, bytes: &[u8]| {
        [zerocopy::IntoBytes::as_bytes(header), bytes].concat()
    };
    let (lie, right) = (frame([0xff; 6], mac(9), 90, 1), unsummed(frame([0xff; 6], mac(9), 90, 2)));
    let mut copy_path = up.port.copy_path();
    copy_path.send(&frame_copy(&open(10, 0), &lie));
    copy_path.send(&frame_copy(&open(34, 16), &lie));
    assert_eq!((b.receive().len(), takes.receive().len()), (0, 0));
    assert_eq!(up.counter("dropped_unfinished"), 2);
    copy_path.send(&frame_copy(&OPEN, &right));
    assert_eq!((b.receive().len(), takes.receive()), (1, vec![right]));
}

#[test]
fn a_group_sends_nothing() {
    let world = World::new();
    let (mut a, mut b) = world.two();
    let sent = a.send_all(&[frame(mac(2), [3, 0, 0, 0, 0, 1], 60, 1)]);
    assert_eq!((sent.refused, b.receive().len()), (1, 0));
}

/// A TCP frame over IPv4 with `payload` bytes, uncut.
fn tcp(payload: usize) -> (RawNetHeader, Vec<u8>) {
    let mut bytes = [&mac(2)[..], &mac(1), &[8, 0, 0x45, 0]].concat();
    bytes.extend(u16::try_from(40 + payload).unwrap().to_be_bytes());
    bytes.extend([0, 1, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    bytes.extend([0, 1, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0x50, 0x10, 1, 0, 0, 0, 0, 0]);
    bytes.extend(vec![0x5a; payload]);
    let header = RawNetHeader {
        flags: HDR_F_NEEDS_CSUM,
        gso_type: HDR_GSO_TCPV4,
        gso_size: 1000.into(),
        csum_start: 34.into(),
        csum_offset: 16.into(),
        ..RawNetHeader::default()
    };
    (header, bytes)
}

#[test]
fn segments_are_whole_for_a_guest_who_takes_them_and_cut_for_one_who_does_not() {
    let world = World::new();
    let (mut a, mut b) = world.two();
    let (header, bytes) = tcp(3500);
    assert_eq!(a.send_with(&header, std::slice::from_ref(&bytes)).later, 1);
    assert_eq!(b.receive(), std::slice::from_ref(&bytes));
    b.port.set_offloads(Offloads::default()).unwrap();
    assert_eq!(
        a.send_with(&header, std::slice::from_ref(&bytes)).later,
        0,
        "it is copied, and its sender done with it"
    );
    let lens: Vec<_> = b.receive().iter().map(Vec::len).collect();
    assert_eq!(lens, [1054, 1054, 1054, 554]);
    assert_eq!((b.counter("segmented"), b.counter("dropped_unfinished")), (1, 0));
    // However its driver has laid out the headers.
    for piece in [1, 7, 13, 33, 53] {
        let whole = vec![bytes.len()];
        let pieces = [vec![piece; 60 / piece], whole].concat();
        a.send_in_pieces(&header, &bytes, &pieces);
        let again: Vec<_> = b.receive().iter().map(Vec::len).collect();
        assert_eq!(again, lens, "{piece}");
    }
    assert_eq!(b.counter("segmented"), 6);
    let lie = RawNetHeader { gso_size: 1.into(), ..header };
    a.send_with(&lie, &[bytes]);
    assert_eq!((b.receive().len(), b.counter("dropped_unfinished")), (0, 1));
}
