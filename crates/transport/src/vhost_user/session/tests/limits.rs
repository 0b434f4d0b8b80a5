//! Changes of rings that run, regions that come and go, and every limit of a session.

use super::*;

const OTHER: Region =
    Region { guest_addr: 0x10_0000, size: 0x10_0000, user_addr: 0x7010_0000, mmap_offset: 0x4000 };

fn bytes_of(region: Region) -> Vec<u8> {
    [&[0; 8], region.as_bytes()].concat()
}

impl Peer {
    fn with_offer(offer: DeviceOffer) -> Self {
        Self(Session::new(offer))
    }

    fn kick(&mut self, index: u64) -> Vec<Effect<u32>> {
        self.effects("SET_VRING_KICK", index.as_bytes(), &[7])
    }

    /// Negotiated, mapped, vring 0 running.
    fn running() -> Self {
        let mut peer = Self::new();
        peer.negotiate();
        peer.map();
        peer.describe(0);
        assert_eq!(peer.kick(0), [Effect::Kick(0, Some(7)), Effect::Start(0)]);
        peer
    }

    fn add(&mut self, region: Region) -> Vec<Effect<u32>> {
        self.effects("ADD_MEM_REG", &bytes_of(region), &[9])
    }

    fn remove(&mut self, region: Region) -> Vec<Effect<u32>> {
        self.effects("REM_MEM_REG", &bytes_of(region), &[])
    }

    fn reply(&mut self, name: &str) -> Answer {
        self.send(name, &[], &[]).unwrap().answer
    }
}

#[test]
fn a_new_size_stops_a_running_ring_and_the_same_size_does_not() {
    let mut peer = Peer::running();
    assert_eq!(peer.effects("SET_VRING_NUM", [0u32, 128].as_bytes(), &[]), []);
    assert_eq!(peer.effects("SET_VRING_NUM", [0u32, 256].as_bytes(), &[]), [Effect::Stop(0)]);
    peer.0.stopped(0, 3.into());
    assert_eq!(peer.0.vring(0).unwrap().size(), 256);
    assert_eq!(peer.kick(0), [Effect::Kick(0, Some(7)), Effect::Start(0)]);
    // One that does not run is not stopped.
    assert_eq!(peer.effects("SET_VRING_NUM", [1u32, 256].as_bytes(), &[]), []);
    assert_eq!(peer.effects("SET_VRING_NUM", [1u32, 128].as_bytes(), &[]), []);
}

#[test]
fn a_new_size_lets_a_refused_ring_start() {
    let mut peer = Peer::running();
    peer.0.refuse(0);
    let effects = peer.effects("SET_VRING_NUM", [0u32, 64].as_bytes(), &[]);
    assert_eq!(effects, [Effect::Start(0)]);
    peer.0.refuse(0);
    assert_eq!(peer.kick(0), [Effect::Kick(0, Some(7)), Effect::Start(0)]);
}

#[test]
fn one_of_two_regions_that_was_removed_can_be_added_again() {
    let mut peer = Peer::new();
    peer.negotiate();
    assert_eq!(peer.add(REGION), [Effect::Memory(MemoryChange::Add(REGION, 9))]);
    assert_eq!(peer.add(OTHER), [Effect::Memory(MemoryChange::Add(OTHER, 9))]);
    assert_eq!(peer.remove(OTHER), [Effect::Memory(MemoryChange::Remove(OTHER))]);
    assert_eq!(peer.add(REGION), [], "it is still there");
    assert_eq!(peer.add(OTHER), [Effect::Memory(MemoryChange::Add(OTHER, 9))]);
    assert_eq!(peer.remove(REGION), [Effect::Memory(MemoryChange::Remove(REGION))]);
    assert_eq!(peer.add(REGION), [Effect::Memory(MemoryChange::Add(REGION, 9))]);
    assert_eq!(peer.add(OTHER), [], "it is still there");
}

#[test]
fn a_region_is_removed_by_its_addresses_and_size_wherever_it_lies_in_its_file() {
    let mut peer = Peer::new();
    peer.negotiate();
    peer.add(REGION);
    for other in [
        Region { guest_addr: 0x1000, ..REGION },
        Region { size: 0x1000, ..REGION },
        Region { user_addr: 0x1000, ..REGION },
    ] {
        peer.remove(other);
        assert_eq!(peer.add(REGION), [], "it is still there");
    }
    peer.remove(Region { mmap_offset: 0x8000, ..REGION });
    assert_eq!(peer.add(REGION), [Effect::Memory(MemoryChange::Add(REGION, 9))]);
}

#[test]
fn without_memory_no_ring_starts() {
    let mut peer = Peer::new();
    peer.negotiate();
    peer.map();
    peer.remove(REGION);
    peer.describe(0);
    assert_eq!(peer.kick(0), [Effect::Kick(0, Some(7))]);
    assert_eq!(peer.add(OTHER), [Effect::Memory(MemoryChange::Add(OTHER, 9)), Effect::Start(0)]);
}

#[test]
fn a_ring_that_was_refused_before_its_memory_came_starts_with_it() {
    let mut peer = Peer::running();
    peer.0.refuse(0);
    let added = peer.add(OTHER);
    assert_eq!(added, [Effect::Memory(MemoryChange::Add(OTHER, 9)), Effect::Start(0)]);
    peer.0.refuse(0);
    let table = [1u32.as_bytes(), &[0; 4], REGION.as_bytes()].concat();
    let effects = peer.effects("SET_MEM_TABLE", &table, &[11]);
    let replaced = Effect::Memory(MemoryChange::Replace(vec![(REGION, 11)]));
    assert_eq!(effects, [replaced, Effect::Start(0)]);
    // The session now knows the regions of the table alone.
    assert_eq!(peer.add(OTHER), [Effect::Memory(MemoryChange::Add(OTHER, 9))]);
    assert_eq!(peer.add(REGION), []);
}

#[test]
fn memory_slots_end_at_their_number() {
    let mut peer = Peer::new();
    peer.negotiate();
    for n in 0..MEM_SLOTS {
        peer.add(Region { guest_addr: n << 21, ..REGION });
    }
    let region = Region { guest_addr: MEM_SLOTS << 21, ..REGION };
    let refused = peer.send("ADD_MEM_REG", &bytes_of(region), &[9]);
    assert_eq!(refused, Err(SessionError::Slots { max: MEM_SLOTS }));
    peer.remove(Region { guest_addr: 0, ..REGION });
    assert_eq!(peer.add(region), [Effect::Memory(MemoryChange::Add(region, 9))]);
}

#[test]
fn a_request_does_nothing_where_its_feature_is_not_offered() {
    let requests = [
        ("SEND_RARP", 0x0102u64.as_bytes(), Effect::SendRarp([2, 1, 0, 0, 0, 0])),
        ("NET_SET_MTU", 1500u64.as_bytes(), Effect::SetMtu(1500)),
    ];
    for (name, payload, effect) in requests {
        let mut disk = Peer::new();
        disk.negotiate();
        let refused = disk.send(name, payload, &[]);
        assert!(!refused.is_ok_and(|outcome| outcome.effects.contains(&effect)), "{name}");
        let offer = DeviceOffer { protocol: OFFERED | OFFERED_NET, ..OFFER };
        let mut card = Peer::with_offer(offer);
        card.negotiate();
        assert_eq!(card.effects(name, payload, &[]), [effect]);
    }
    // Requests that need no feature are served by every device.
    let mut bare = Peer::with_offer(DeviceOffer { protocol: 0, ..OFFER });
    assert!(bare.send("SET_OWNER", &[], &[]).is_ok());
    assert_eq!(bare.reply("GET_PROTOCOL_FEATURES"), Answer::Reply(Reply::U64(0)));
}

#[test]
fn what_is_offered_is_told() {
    let mut peer = Peer::with_offer(DeviceOffer { queue_count: 3, ..OFFER });
    let told = |value| Answer::Reply(Reply::U64(value));
    assert_eq!(peer.reply("GET_FEATURES"), told(OFFER.features | OF_TRANSPORT));
    assert_eq!(peer.reply("GET_PROTOCOL_FEATURES"), told(OFFERED));
    peer.negotiate();
    assert_eq!(peer.reply("GET_QUEUE_NUM"), told(3));
    assert_eq!(peer.reply("GET_MAX_MEM_SLOTS"), told(MEM_SLOTS));
    assert_eq!(peer.reply("GET_STATUS"), told(0));
    peer.effects("SET_STATUS", 0x1_0fu64.as_bytes(), &[]);
    assert_eq!(peer.reply("GET_STATUS"), told(0x0f), "the status has eight bits");
    let read = [[4u32, 2, 0].as_bytes(), &[0, 0]].concat();
    let access = ConfigAccess { offset: 4, size: 2, flags: 0 };
    let outcome = peer.send("GET_CONFIG", &read, &[]).unwrap();
    assert_eq!(outcome, Outcome { effects: vec![], answer: Answer::Config(access) });
    let write = Effect::WriteConfig(access, vec![0, 0]);
    assert_eq!(peer.effects("SET_CONFIG", &read, &[]), [write]);
    assert_eq!(peer.effects("SET_BACKEND_REQ_FD", &[], &[5]), [Effect::BackendChannel(5)]);
    assert_eq!(peer.effects("RESET_OWNER", &[], &[]), []);
}

#[test]
fn offered_features_are_taken_and_others_named() {
    let mut peer = Peer::new();
    let all = OFFER.features | F_PROTOCOL_FEATURES;
    let effects = peer.effects("SET_FEATURES", all.as_bytes(), &[]);
    assert_eq!(effects, [Effect::Features(OFFER.features)]);
    assert_eq!(peer.0.features(), all);
    let refused = peer.send("SET_FEATURES", (all | 1 << 5).as_bytes(), &[]);
    assert_eq!(refused, Err(SessionError::Features { bits: 1 << 5 }));
    assert_eq!(peer.effects("SET_PROTOCOL_FEATURES", OFFERED.as_bytes(), &[]), []);
    let more = OFFERED | PROTOCOL_F_RARP;
    let refused = peer.send("SET_PROTOCOL_FEATURES", more.as_bytes(), &[]);
    assert_eq!(refused, Err(SessionError::ProtocolFeatures { bits: PROTOCOL_F_RARP }));
}

#[test]
fn the_last_vring_is_served_and_the_next_is_none() {
    for name in ["SET_VRING_NUM", "SET_VRING_BASE", "SET_VRING_ENABLE", "GET_VRING_BASE"] {
        let mut peer = Peer::new();
        assert!(peer.send(name, [3u32, 1].as_bytes(), &[]).is_ok(), "{name}");
        let refused = peer.send(name, [4u32, 1].as_bytes(), &[]);
        assert_eq!(refused, Err(SessionError::Index { name, index: 4, count: 4 }));
    }
    for (name, effect) in [
        ("SET_VRING_KICK", Effect::Kick(3, None)),
        ("SET_VRING_CALL", Effect::Call(3, None)),
        ("SET_VRING_ERR", Effect::Err(3, None)),
    ] {
        let mut peer = Peer::new();
        assert_eq!(peer.effects(name, (3u64 | 1 << 8).as_bytes(), &[]), [effect]);
        let refused = peer.send(name, 4u64.as_bytes(), &[1]);
        assert_eq!(refused, Err(SessionError::Index { name, index: 4, count: 4 }));
    }
    let mut peer = Peer::new();
    assert!(peer.send("SET_VRING_ADDR", addr(3, 0).as_bytes(), &[]).is_ok());
    assert!(peer.send("SET_VRING_ADDR", addr(4, 0).as_bytes(), &[]).is_err());
    assert_eq!(peer.effects("SET_VRING_ERR", 0u64.as_bytes(), &[6]), [Effect::Err(0, Some(6))]);
}

#[test]
fn sizes_bases_and_enables_are_taken_up_to_their_largest_value() {
    let mut peer = Peer::new();
    for size in [1, 2, 512, 1024, 0x8000] {
        assert!(peer.send("SET_VRING_NUM", [0, size].as_bytes(), &[]).is_ok());
    }
    for size in [0, 3, 1023, 0x7fff, 0x1_0000, 0x1_0001] {
        let refused = peer.send("SET_VRING_NUM", [0u32, size].as_bytes(), &[]);
        assert!(matches!(refused, Err(SessionError::Value { .. })), "{size}");
    }
    assert_eq!(peer.effects("SET_VRING_BASE", [0u32, 0xffff].as_bytes(), &[]), []);
    assert_eq!(peer.0.vring(0).unwrap().base(), 0xffff.into());
    let refused = peer.send("SET_VRING_BASE", [0u32, 0x1_0000].as_bytes(), &[]);
    assert!(matches!(refused, Err(SessionError::Value { value: 0x1_0000, .. })));
    let refused = peer.send("SET_VRING_ENABLE", [0u32, 2].as_bytes(), &[]);
    assert!(matches!(refused, Err(SessionError::Value { value: 2, .. })));
}

#[test]
fn each_part_of_a_vring_is_waited_for() {
    type Part = fn(&mut Peer) -> Vec<Effect<u32>>;
    let parts: [Part; 5] = [
        |p| p.effects("SET_FEATURES", F_PROTOCOL_FEATURES.as_bytes(), &[]),
        |p| p.add(REGION),
        |p| p.effects("SET_VRING_NUM", [2u32, 128].as_bytes(), &[]),
        |p| p.effects("SET_VRING_ADDR", addr(2, 0x7000_0000).as_bytes(), &[]),
        |p| p.kick(2),
    ];
    for last in 0..parts.len() {
        let mut peer = Peer::new();
        peer.effects("SET_PROTOCOL_FEATURES", OFFERED.as_bytes(), &[]);
        for (_, part) in parts.iter().enumerate().filter(|(n, _)| *n != last) {
            assert!(!part(&mut peer).contains(&Effect::Start(2)), "without part {last}");
        }
        assert!(parts[last](&mut peer).contains(&Effect::Start(2)), "part {last} comes last");
    }
}

#[test]
fn enabling_changes_a_running_ring_at_once_and_is_kept_for_the_others() {
    let mut peer = Peer::running();
    let enable = |peer: &mut Peer, index: u32, num: u32| {
        peer.effects("SET_VRING_ENABLE", [index, num].as_bytes(), &[])
    };
    assert_eq!(enable(&mut peer, 0, 1), [Effect::Enable(0, true)]);
    assert_eq!(enable(&mut peer, 0, 0), [Effect::Enable(0, false)]);
    assert!(!peer.0.is_enabled(0));
    assert_eq!(enable(&mut peer, 1, 1), []);
    assert!(peer.0.is_enabled(1) && !peer.0.is_enabled(2) && !peer.0.is_enabled(4));
    // Without protocol features a ring is enabled until the front-end says otherwise.
    let mut old = Peer::new();
    old.effects("SET_FEATURES", (1u64 << 32).as_bytes(), &[]);
    assert_eq!(enable(&mut old, 1, 0), []);
    assert!(old.0.is_enabled(0) && !old.0.is_enabled(1));
}

#[test]
fn a_ring_whose_base_was_asked_for_waits_for_a_new_kick() {
    let mut peer = Peer::running();
    let outcome = peer.send("GET_VRING_BASE", [0u32, 0].as_bytes(), &[]).unwrap();
    assert_eq!(outcome, Outcome { effects: vec![Effect::Stop(0)], answer: Answer::Base(0) });
    peer.0.stopped(0, 9.into());
    let reset = peer.effects("SET_STATUS", 0u64.as_bytes(), &[]);
    assert_eq!(reset, [Effect::ResetConfig], "the ring stays as it is");
    // One that never ran: its base is the one that was set, and its kick is forgotten too.
    peer.effects("SET_VRING_BASE", [1u32, 40].as_bytes(), &[]);
    peer.kick(1);
    let outcome = peer.send("GET_VRING_BASE", [1u32, 0].as_bytes(), &[]).unwrap();
    assert_eq!(outcome, Outcome { effects: vec![], answer: Answer::Base(1) });
    peer.effects("SET_VRING_NUM", [1u32, 128].as_bytes(), &[]);
    assert_eq!(peer.effects("SET_VRING_ADDR", addr(1, 0x7000_0000).as_bytes(), &[]), []);
    // A report of a ring that does not run changes nothing.
    peer.0.stopped(1, 77.into());
    assert_eq!(peer.0.vring(1).unwrap().base(), 40.into());
}

#[test]
fn a_reset_stops_what_runs_and_forgets_the_rest() {
    let mut peer = Peer::running();
    peer.describe(2);
    peer.effects("SET_STATUS", 15u64.as_bytes(), &[]);
    assert_eq!(
        peer.effects("RESET_DEVICE", &[], &[]),
        [Effect::Stop(0), Effect::Inflight(None), Effect::Features(0)]
    );
    assert_eq!(peer.0.features(), 0);
    assert_eq!(peer.0.vring(2).copied(), Some(Vring::default()));
    assert_eq!(peer.reply("GET_STATUS"), Answer::Reply(Reply::U64(0)));
    // Memory stays, and so does what was agreed about the protocol.
    peer.effects("SET_FEATURES", F_PROTOCOL_FEATURES.as_bytes(), &[]);
    peer.describe(2);
    assert_eq!(peer.kick(2), [Effect::Kick(2, Some(7)), Effect::Start(2)]);
    let outcome = peer.send_flagged("SET_OWNER", &[], &[], FLAG_NEED_REPLY).unwrap();
    assert_eq!(outcome.answer, Answer::Ack);
}
