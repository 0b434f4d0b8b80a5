//! Receivers that are full, slow or gone, and senders that want too much.

use super::*;

/// Guests 1 to `last`, whose addresses the switch knows, and who have taken all frames.
fn known_guests(world: &World, last: u8) -> Vec<Guest> {
    let mut guests: Vec<_> = (1..=last).map(|n| world.guest(n)).collect();
    for guest in &mut guests {
        guest.send_all(&[frame([0xff; 6], mac(guest.n), 60, 0)]);
    }
    guests.iter_mut().for_each(|guest| drop(guest.receive()));
    guests
}

/// Guests 1 to `last`, who take no long segments and no unfinished checksums.
fn plain_guests(world: &World, last: u8) -> Vec<Guest> {
    let guests: Vec<_> = (1..=last).map(|n| world.guest(n)).collect();
    for guest in &guests {
        guest.port.set_offloads(Offloads::default()).unwrap();
    }
    guests
}

#[test]
fn a_receiver_that_takes_nothing_holds_a_senders_frames_for_fifty_milliseconds_at_most() {
    let world = World::new();
    let (mut a, mut b) = world.two();
    for n in 0..10 {
        a.send(2, 1000, n);
    }
    world.later(49);
    assert_eq!(a.reap(), []);
    world.later(1);
    assert_eq!(a.reaped(Outcome::Passed).len(), 10, "copied to its copy queue");
    assert_eq!(b.counter("stalled"), 1);
    // While copies are there, what follows is copied too, so that it overtakes nothing.
    assert_eq!(a.send(2, 1000, 10).later, 0);
    assert_eq!(b.numbers(), (0..11).collect::<Vec<_>>());
    assert_eq!(a.send(2, 1000, 11).later, 0, "and for a second, though it takes what comes");
    assert_eq!(b.numbers(), [11]);
    world.later(1000);
    assert_eq!(a.send(2, 1000, 12).later, 1, "it is served again");
    assert_eq!(b.numbers(), [12]);
}

#[test]
fn who_lets_frames_lie_again_and_again_is_lent_nothing_for_most_of_the_time() {
    let world = World::new();
    let (mut a, mut b) = world.two();
    let (mut held, mut number) = (0, 0);
    // It takes all copies, and then lets the frame lie that it is lent.
    for _ in 0..60_000 / 10 {
        let is_lent = !a.lent.is_empty();
        if !is_lent {
            b.receive();
            a.send(2, 1000, number);
            number += 1;
        }
        world.later(10);
        a.reap();
        held += if is_lent { 10 } else { 0 };
    }
    assert!(held <= 60_000 * 3 / 100, "a frame was held for {held} ms of a minute");
    // Another sender begins with that, and in a minute all is forgotten.
    let mut c = world.guest(3);
    c.greet(&mut [&mut a]);
    b.receive();
    assert_eq!(c.send(2, 1000, 1).later, 0);
    b.receive();
    world.later(70_000);
    assert_eq!(c.send(2, 1000, 2).later, 1);
    world.later(50);
    assert_eq!(c.reaped(Outcome::Passed).len(), 1);
    b.receive();
    world.later(1000);
    assert_eq!(c.send(2, 1000, 3).later, 1, "the first rest is short again");
}

#[test]
fn a_receiver_that_takes_nothing_costs_a_sender_no_more_than_its_credit() {
    let world = World::new();
    let (mut a, mut b) = world.two();
    let mut c = world.guest(3);
    c.greet(&mut [&mut a, &mut b]);
    let burst: Vec<_> = (0..64).map(|n| frame(mac(2), mac(1), 200, n)).collect();
    let later: u32 = (0..4).map(|_| a.send_all(&burst).later.count_ones()).sum();
    assert_eq!(later, 128, "the rest is dropped: it would overtake what is in the channel");
    assert_eq!((a.counter("credit_out"), a.counter("dropped_credit")), (128, 128));
    // Frames for another one are copied.
    assert_eq!(a.send(3, 200, 77).later, 0);
    assert_eq!(c.numbers(), [77]);
    // After 20 ms the channel is emptied in favour of the others.
    world.later(20);
    a.send(3, 200, 78);
    assert_eq!(a.reaped(Outcome::Passed).len(), 128);
    assert_eq!(a.send(3, 200, 79).later, 0, "its copy queue of before is still there");
    assert_eq!(c.numbers(), [78, 79]);
    assert_eq!(a.send(3, 200, 80).later, 1, "who lets nothing lie rests not");
    assert_eq!(b.receive().len(), 128);
}

#[test]
fn the_copy_queue_of_a_receiver_is_bounded_in_frame_copies_and_bytes() {
    let world = World::new();
    let (mut a, mut b) = (world.guest(1), world.guest(2));
    b.greet(&mut [&mut a]);
    b.port.set_offloads(Offloads::default()).unwrap();
    for (len, most) in [(60, 512), (4000, (1 << 20) / 4012)] {
        for n in 0..20 {
            let burst: Vec<_> =
                (0..64).map(|m| unsummed(frame(mac(2), mac(1), len, n * 64 + m))).collect();
            assert_eq!(a.send_with(&OPEN, &burst).later, 0);
        }
        assert_eq!(b.receive().len(), most, "{len} bytes");
    }
    assert_eq!(b.counter("dropped_full"), 2 * 1280 - 512 - 261);
}

#[test]
fn frames_for_a_guest_that_has_gone_come_back_and_the_next_ones_are_dropped() {
    let world = World::new();
    let (mut a, mut b) = world.two();
    for n in 0..5 {
        a.send(2, 300, n);
    }
    assert_eq!(b.take(2).len(), 2);
    b.rx = None;
    let outcomes: Vec<_> = a.reap().iter().map(|returned| returned.outcome).collect();
    let passed = outcomes.iter().filter(|outcome| **outcome == Outcome::Passed).count();
    assert_eq!((passed, outcomes.len()), (2, 5));
    assert_eq!(a.send(2, 300, 6).later, 0);
    assert_eq!(b.counter("dropped_no_queue"), 1);
    // It is back.
    b.rx = Some(b.port.open_rx(0).unwrap());
    assert_eq!(a.send(2, 300, 7).later, 0, "it went with frames that it was lent");
    assert_eq!(b.numbers(), [7]);
    world.later(1000);
    assert_eq!(a.send(2, 300, 8).later, 1);
    assert_eq!(b.numbers(), [8]);
}

#[test]
fn a_sender_that_goes_takes_its_frames_with_it() {
    let world = World::new();
    let (mut a, mut b) = world.two();
    a.send(2, 300, 1);
    drop(std::mem::replace(&mut a.tx, a.port.open_tx(0).unwrap()));
    a.lent.clear();
    a.frames.release();
    assert_eq!(Arc::strong_count(&a.memory), 1, "no burst keeps it");
    assert_eq!(b.receive(), Vec::<Vec<u8>>::new());
    a.send(2, 300, 2);
    assert_eq!(b.numbers(), [2]);
    // The port itself goes: its address is not known any more, and nobody is told wrong.
    drop(a);
    b.send(1, 60, 3);
    assert_eq!(b.counter("flooded"), 2);
    assert!(world.switch.stations().iter().all(|(station, _)| station.address == mac(2)));
}

#[test]
fn a_sender_floods_no_more_than_it_may_in_a_second() {
    let world = World::new();
    let mut a = world.guest_on(1, PortOptions { floods_max: 100, ..PortOptions::new("a", 1) });
    let mut b = world.guest(2);
    for _ in 0..4 {
        a.send_all(&vec![frame([0xff; 6], mac(1), 60, 9); 64]);
    }
    assert_eq!((b.receive().len(), a.counter("dropped_flood")), (100, 156));
    world.later(1000);
    a.send_all(&[frame([0xff; 6], mac(1), 60, 9)]);
    assert_eq!(b.receive().len(), 1);
}

#[test]
fn a_sender_of_many_addresses_is_known_by_eight_and_takes_nobodys_place() {
    let world = World::new();
    let (mut a, mut b) = world.two();
    for n in 10..200 {
        a.send_all(&[frame(mac(2), mac(n), 60, 1)]);
    }
    b.receive();
    let known = |world: &World, name: &str| {
        world.switch.stations().iter().filter(|(_, port)| port == name).count()
    };
    assert_eq!((known(&world, "g1"), known(&world, "g2")), (8, 1));
    assert_eq!(a.counter("not_learnt"), 190 - 7);
}

#[test]
fn a_frame_to_where_it_comes_from_goes_nowhere() {
    let world = World::new();
    let (mut a, mut b) = world.two();
    a.send(1, 60, 1);
    assert_eq!((a.receive().len(), b.receive().len(), a.counter("dropped_own")), (0, 0, 1));
}

#[test]
fn channels_to_a_receiver_without_buffers_do_not_add_up() {
    let world = World::new();
    let mut a = world.guest(200);
    let others = known_guests(&world, 40);
    // Nobody takes anything from now on: channels are emptied, and left for those that have none.
    for round in 0..400 {
        let frames: Vec<_> = (1..=40).map(|n| frame(mac(n), mac(200), 300, round)).collect();
        a.send_all(&frames);
        world.later(500);
        a.reap();
    }
    for other in &others {
        let inbox = other.port.inbox();
        assert!(inbox.unseen() <= 66, "{} channels", inbox.unseen());
    }
}

#[test]
fn what_goes_by_the_copy_queue_is_not_overtaken_by_a_new_channel() {
    let world = World::new();
    let mut a = world.guest(200);
    let mut others = known_guests(&world, 33);
    let frames: Vec<_> = (1..=33).map(|n| frame(mac(n), mac(200), 300, 1)).collect();
    assert_eq!(a.send_all(&frames).later.count_ones(), 32, "the last one goes by the copy queue");
    for other in &mut others[..32] {
        assert_eq!(other.numbers(), [1]);
    }
    a.reap();
    assert_eq!(a.send(33, 300, 2).later, 0, "its copy queue is there still");
    assert_eq!(others[32].numbers(), [1, 2]);
    assert_eq!(a.send(33, 300, 3).later, 1);
    assert_eq!(others[32].numbers(), [3]);
}

#[test]
fn a_flood_of_segments_is_cut_once_for_all_who_do_not_take_it_whole() {
    let world = World::new();
    let mut a = world.guest(200);
    let mut others = plain_guests(&world, 8);
    a.send_with(&OPEN, &[unsummed(frame([0xff; 6], mac(200), 300, 5))]);
    let frame_copies: Vec<_> = others.iter().map(|other| other.port.inbox().first()).collect();
    assert!(
        frame_copies.iter().all(|frame_copy| Arc::ptr_eq(frame_copy, &frame_copies[0])),
        "one copy"
    );
    assert!(others.iter_mut().all(|other| other.receive().len() == 1));
}

#[test]
fn a_flood_is_copied_once_for_each_change_of_its_tag_whatever_the_order_of_ports() {
    let world = World::new();
    let on = |n: u8, vlans: Vlans| {
        world.guest_on(n, PortOptions { vlans, ..PortOptions::new(format!("g{n}"), 1) })
    };
    let mut a = on(200, Vlans::Access(5));
    let kinds = [Vlans::Access(5), Vlans::Trunk(vec![5]), Vlans::All];
    let mut others: Vec<_> = (1..=12).map(|n| on(n, kinds[usize::from(n % 3)].clone())).collect();
    let copies = |others: &mut [Guest]| {
        let frame_copies: Vec<_> = others.iter().map(|other| other.port.inbox().first()).collect();
        assert!(others.iter_mut().all(|other| other.receive().len() == 1));
        frame_copies
            .iter()
            .map(|frame_copy| Arc::as_ptr(frame_copy).addr())
            .collect::<HashSet<_>>()
            .len()
    };
    // A tag with a priority alone: an access port takes it off, the others set the VLAN.
    let mut tagged = frame([0xff; 6], mac(200), 900, 1);
    tagged.splice(12..12, [0x81, 0, 0x60, 0]);
    a.send_all(&[tagged]);
    assert_eq!(copies(&mut others), 2);
    a.send_all(&[frame([0xff; 6], mac(200), 900, 1)]);
    assert_eq!(copies(&mut others), 2, "without a tag");
    // The bytes of each copy are counted, also of one that cannot be made.
    let mut copy_path = a.port.copy_path();
    let mut flood = |size: usize| {
        let header = [0; HEADER_SIZE];
        copy_path.send(&[&header[..], &frame([0xff; 6], mac(200), size, 1)].concat());
        copy_path.spent
    };
    assert_eq!(flood(900), 12 * 512 + 2 * (HEADER_SIZE + 900));
    let size = manyring_wire::net::FRAME_SIZE_MAX;
    assert_eq!(flood(size), 4 * 512 + 2 * (HEADER_SIZE + size), "too long for a tag");
}

#[test]
fn a_flood_of_segments_costs_no_more_than_a_bounded_number_of_frame_copies() {
    let world = World::new();
    let mut a = world.guest(200);
    let mut others = plain_guests(&world, 40);
    // TCP over IPv4, 512 segments of 4 bytes.
    let mut bytes = [&[0xff; 6][..], &mac(200), &[8, 0]].concat();
    bytes.extend([0x45, 0, 0, 0, 0, 0, 0, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    bytes.extend([0, 1, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0x50, 0, 0, 0, 0, 0, 0, 0]);
    bytes.resize(54 + 512 * 4, 7);
    let header = RawNetHeader {
        flags: 1,
        gso_type: 1,
        gso_size: 4.into(),
        hdr_len: 54.into(),
        csum_start: 34.into(),
        csum_offset: 16.into(),
        ..RawNetHeader::default()
    };
    a.send_with(&header, &[bytes]);
    let got: Vec<_> = others.iter_mut().map(|other| other.receive().len()).collect();
    let (all, none) = (got.iter().filter(|n| **n == 512).count(), 40 - 16);
    assert_eq!((all, got.iter().filter(|n| **n == 0).count()), (16, none), "{got:?}");
    assert_eq!(others.iter().map(|other| other.counter("dropped_full")).sum::<u64>(), 24);
    // The limit is one frame's: the next flood goes to all.
    a.send_all(&[frame([0xff; 6], mac(200), 60, 1)]);
    assert!(others.iter_mut().all(|other| other.receive().len() == 1));
}

#[test]
fn more_receivers_than_a_queue_has_channels_get_copies() {
    let world = World::new();
    let mut a = world.guest(200);
    let mut others = known_guests(&world, 40);
    let frames: Vec<_> = (1..=40).map(|n| frame(mac(n), mac(200), 300, n.into())).collect();
    let sent = a.send_all(&frames);
    assert_eq!(sent.later.count_ones(), 32);
    for other in &mut others {
        assert_eq!(other.numbers(), [u32::from(other.n)]);
    }
    assert_eq!(a.reaped(Outcome::Passed).len(), 32);
    // The channels are free again, for those who had none.
    assert_eq!(a.send_all(&frames[32..]).later.count_ones(), 8);
    assert_eq!(others[39].numbers(), [40]);
}
