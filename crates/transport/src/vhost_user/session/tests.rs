//! Messages that front-ends really send, as calls of the state machine. A file descriptor is a
//! number.

mod limits;
mod log;

use super::*;
use manyring_wire::vhost_user::{
    FLAG_NEED_REPLY, FLAG_VERSION, PROTOCOL_F_INFLIGHT_SHMFD, PROTOCOL_F_MTU, PROTOCOL_F_RARP,
    REQUESTS,
};
use zerocopy::IntoBytes;

/// The protocol features of network devices.
const OFFERED_NET: u64 = PROTOCOL_F_RARP | PROTOCOL_F_MTU;
/// The protocol features of disks.
const OFFERED_BLK: u64 = PROTOCOL_F_INFLIGHT_SHMFD;
const OFFER: DeviceOffer = DeviceOffer {
    protocol: OFFERED,
    features: 1 << 32 | 1 << 29,
    queue_count: 4,
    queue_size_max: 32768,
};
const REGION: Region =
    Region { guest_addr: 0, size: 0x10_0000, user_addr: 0x7000_0000, mmap_offset: 0 };

struct Peer(Session);

impl Peer {
    fn new() -> Self {
        Self(Session::new(OFFER))
    }

    fn send(
        &mut self,
        name: &str,
        payload: &[u8],
        fds: &[u32],
    ) -> Result<Outcome<u32>, SessionError> {
        self.send_flagged(name, payload, fds, 0)
    }

    fn send_flagged(
        &mut self,
        name: &str,
        payload: &[u8],
        fds: &[u32],
        flags: u32,
    ) -> Result<Outcome<u32>, SessionError> {
        let request = REQUESTS.iter().find(|r| r.name == name).unwrap().id;
        let size = u32::try_from(payload.len()).unwrap();
        let header = Header { request, flags: FLAG_VERSION | flags, size };
        self.0.handle(header, payload, fds.to_vec())
    }

    fn effects(&mut self, name: &str, payload: &[u8], fds: &[u32]) -> Vec<Effect<u32>> {
        self.send(name, payload, fds).unwrap().effects
    }

    fn negotiate(&mut self) {
        self.effects("SET_OWNER", &[], &[]);
        self.effects("SET_FEATURES", (1u64 << 32 | F_PROTOCOL_FEATURES).as_bytes(), &[]);
        self.effects("SET_PROTOCOL_FEATURES", OFFERED.as_bytes(), &[]);
    }

    fn map(&mut self) {
        self.effects("ADD_MEM_REG", &region(), &[9]);
    }

    /// All of a vring but its kick.
    fn describe(&mut self, index: u32) {
        self.effects("SET_VRING_NUM", [index, 128].as_bytes(), &[]);
        self.effects("SET_VRING_BASE", [index, 0].as_bytes(), &[]);
        self.effects("SET_VRING_ADDR", addr(index, 0x7000_0000).as_bytes(), &[]);
    }
}

fn region() -> Vec<u8> {
    [&[0; 8], REGION.as_bytes()].concat()
}

fn addr(index: u32, descriptor: u64) -> VringAddr {
    let (used, available) = (descriptor + 0x2000, descriptor + 0x1000);
    VringAddr { index, flags: 0, descriptor, used, available, log: u64::MAX }
}

#[test]
fn a_vring_starts_with_its_kick_when_all_else_is_known() {
    let mut peer = Peer::new();
    peer.negotiate();
    peer.map();
    peer.describe(0);
    let effects = peer.effects("SET_VRING_KICK", 0u64.as_bytes(), &[7]);
    assert_eq!(effects, [Effect::Kick(0, Some(7)), Effect::Start(0)]);
    assert!(!peer.0.is_enabled(0));
    assert_eq!(
        peer.effects("SET_VRING_ENABLE", [0u32, 1].as_bytes(), &[]),
        [Effect::Enable(0, true)]
    );
}

#[test]
fn a_ring_that_was_begun_and_is_not_served_names_the_messages_that_are_missing() {
    let mut peer = Peer::new();
    peer.negotiate();
    peer.effects("SET_VRING_CALL", 0u64.as_bytes(), &[8]);
    assert_eq!(peer.0.unsent(), None, "as QEMU while the firmware runs");
    peer.map();
    peer.effects("SET_VRING_NUM", [1u32, 128].as_bytes(), &[]);
    let lacks = |names: &[&'static str]| Some(Unsent::OfVring(1, names.to_vec()));
    let kick_and_enable = ["SET_VRING_KICK", "SET_VRING_ENABLE"];
    assert_eq!(peer.0.unsent(), lacks(&[&["SET_VRING_ADDR"][..], &kick_and_enable].concat()));
    peer.describe(1);
    assert_eq!(peer.0.unsent(), lacks(&kick_and_enable));
    peer.effects("SET_VRING_KICK", 1u64.as_bytes(), &[7]);
    assert_eq!(peer.0.unsent(), lacks(&["SET_VRING_ENABLE"]));
    peer.effects("SET_VRING_ENABLE", [1u32, 0].as_bytes(), &[]);
    assert_eq!(peer.0.unsent(), None, "disabled on purpose, as when a VMM pauses its guest");
    peer.effects("SET_VRING_ENABLE", [1u32, 1].as_bytes(), &[]);
    peer.describe(0);
    assert_eq!(peer.0.unsent(), None, "a guest may use some queues of many");
    peer.effects("GET_VRING_BASE", [0u32, 0].as_bytes(), &[]);
    peer.effects("GET_VRING_BASE", [1u32, 0].as_bytes(), &[]);
    peer.0.stopped(1, 0.into());
    peer.effects("SET_VRING_CALL", 1u64.as_bytes(), &[8]);
    assert_eq!(peer.0.unsent(), None, "the guest is stopped");
    peer.describe(0);
    assert_eq!(peer.0.unsent(), Some(Unsent::OfVring(0, kick_and_enable.to_vec())));
}

#[test]
fn a_ring_that_waits_for_the_host_or_begins_anew_lacks_nothing_of_its_front_end() {
    let mut peer = Peer::new();
    peer.effects("SET_FEATURES", (1u64 << 32).as_bytes(), &[]);
    peer.map();
    peer.describe(0);
    assert_eq!(peer.0.unsent(), Some(Unsent::OfVring(0, vec!["SET_VRING_KICK"])));
    peer.effects("SET_VRING_KICK", 0u64.as_bytes(), &[7]);
    peer.0.refuse(0);
    assert_eq!(peer.0.unsent(), None);
    assert_eq!(peer.0.retry::<u32>(&[0]), [Effect::Start(0)]);
    assert_eq!(peer.0.unsent(), None);
    // User Mode Linux stops a ring so.
    peer.effects("SET_VRING_BASE", [0u32, 0].as_bytes(), &[]);
    assert_eq!(peer.0.unsent(), None);
}

#[test]
fn kick_before_call_and_call_after_start_are_both_fine() {
    let mut peer = Peer::new();
    peer.negotiate();
    peer.map();
    peer.describe(1);
    peer.effects("SET_VRING_KICK", 1u64.as_bytes(), &[7]);
    let effects = peer.effects("SET_VRING_CALL", 1u64.as_bytes(), &[8]);
    assert_eq!(effects, [Effect::Call(1, Some(8))]);
}

#[test]
fn enable_before_features_and_memory_is_kept() {
    let mut peer = Peer::new();
    assert_eq!(peer.effects("SET_VRING_ENABLE", [0u32, 1].as_bytes(), &[]), []);
    peer.describe(0);
    peer.effects("SET_VRING_KICK", 0u64.as_bytes(), &[7]);
    peer.map();
    let effects = peer.effects("SET_FEATURES", F_PROTOCOL_FEATURES.as_bytes(), &[]);
    assert_eq!(effects, [Effect::Features(0), Effect::Start(0)]);
    assert!(peer.0.is_enabled(0));
}

#[test]
fn without_protocol_features_rings_are_enabled_from_the_start() {
    let mut peer = Peer::new();
    peer.effects("SET_FEATURES", (1u64 << 32).as_bytes(), &[]);
    assert!(peer.0.is_enabled(0));
}

#[test]
fn a_vring_that_could_not_start_is_tried_again_while_its_front_end_wants_it() {
    let mut peer = Peer::new();
    peer.negotiate();
    peer.map();
    for index in 0..3u32 {
        peer.describe(index);
        peer.effects("SET_VRING_KICK", u64::from(index).as_bytes(), &[7]);
        peer.0.refuse(index as usize);
    }
    // No message but one of its own starts it.
    assert_eq!(peer.effects("SET_VRING_ENABLE", [0u32, 1].as_bytes(), &[]), []);
    peer.effects("GET_VRING_BASE", [1u32, 0].as_bytes(), &[]);
    // Vring 2 was refused for good: it is not among those that are tried.
    assert_eq!(peer.0.retry::<u32>(&[0, 1, 9]), [Effect::Start(0)]);
    assert_eq!(peer.0.retry::<u32>(&[0, 1]), [], "it runs, and the other was stopped");
    peer.0.refuse(0);
    peer.effects("RESET_DEVICE", &[], &[]);
    assert_eq!(peer.0.retry::<u32>(&[0]), []);
}

#[test]
fn set_features_twice_is_fine() {
    let mut peer = Peer::new();
    peer.negotiate();
    peer.negotiate();
    assert_eq!(peer.0.features(), 1 << 32 | F_PROTOCOL_FEATURES);
}

#[test]
fn a_session_that_begins_with_disable_and_get_vring_base_is_answered() {
    let mut peer = Peer::new();
    peer.effects("SET_VRING_ENABLE", [0u32, 0].as_bytes(), &[]);
    let outcome = peer.send("GET_VRING_BASE", [0u32, 0].as_bytes(), &[]).unwrap();
    assert_eq!(outcome, Outcome { effects: vec![], answer: Answer::Base(0) });
}

#[test]
fn the_same_region_added_again_is_acknowledged_and_changes_nothing() {
    let mut peer = Peer::new();
    peer.negotiate();
    peer.map();
    let again = peer.send_flagged("ADD_MEM_REG", &region(), &[10], FLAG_NEED_REPLY).unwrap();
    assert_eq!(again, Outcome { effects: vec![], answer: Answer::Ack });
}

#[test]
fn an_unknown_region_removed_is_acknowledged() {
    let mut peer = Peer::new();
    peer.negotiate();
    let outcome = peer.send_flagged("REM_MEM_REG", &region(), &[], FLAG_NEED_REPLY).unwrap();
    assert_eq!(outcome.answer, Answer::Ack);
}

#[test]
fn get_vring_base_stops_and_a_new_kick_starts_again() {
    let mut peer = Peer::new();
    peer.negotiate();
    peer.map();
    peer.describe(0);
    peer.effects("SET_VRING_KICK", 0u64.as_bytes(), &[7]);
    let outcome = peer.send("GET_VRING_BASE", [0u32, 0].as_bytes(), &[]).unwrap();
    assert_eq!(outcome.effects, [Effect::Stop(0)]);
    peer.0.stopped(0, 55.into());
    assert_eq!(peer.0.vring(0).unwrap().base(), 55.into());
    let effects = peer.effects("SET_VRING_KICK", 0u64.as_bytes(), &[8]);
    assert_eq!(effects, [Effect::Kick(0, Some(8)), Effect::Start(0)]);
}

#[test]
fn a_new_base_for_a_running_ring_restarts_it_with_the_next_kick() {
    let mut peer = Peer::new();
    peer.negotiate();
    peer.map();
    peer.describe(0);
    peer.effects("SET_VRING_KICK", 0u64.as_bytes(), &[7]);
    assert_eq!(peer.effects("SET_VRING_BASE", [0u32, 0].as_bytes(), &[]), [Effect::Stop(0)]);
    peer.0.stopped(0, 99.into());
    assert_eq!(peer.0.vring(0).unwrap().base(), 0.into());
    assert_eq!(peer.effects("SET_VRING_ADDR", addr(0, 0x7000_8000).as_bytes(), &[]), []);
    let effects = peer.effects("SET_VRING_KICK", 0u64.as_bytes(), &[8]);
    assert_eq!(effects, [Effect::Kick(0, Some(8)), Effect::Start(0)]);
}

#[test]
fn new_addresses_of_a_running_ring_move_it_and_the_same_do_not() {
    let mut peer = Peer::new();
    peer.negotiate();
    peer.map();
    peer.describe(0);
    peer.effects("SET_VRING_KICK", 0u64.as_bytes(), &[7]);
    assert_eq!(peer.effects("SET_VRING_ADDR", addr(0, 0x7000_0000).as_bytes(), &[]), []);
    let effects = peer.effects("SET_VRING_ADDR", addr(0, 0x7000_8000).as_bytes(), &[]);
    assert!(matches!(effects[..], [Effect::Relocate(0, _)]));
}

#[test]
fn a_memory_table_on_running_rings_is_passed_on_without_new_addresses() {
    let mut peer = Peer::new();
    peer.negotiate();
    peer.map();
    peer.describe(0);
    peer.effects("SET_VRING_KICK", 0u64.as_bytes(), &[7]);
    let table = [1u32.as_bytes(), &[0; 4], REGION.as_bytes()].concat();
    let effects = peer.effects("SET_MEM_TABLE", &table, &[11]);
    assert_eq!(effects, [Effect::Memory(MemoryChange::Replace(vec![(REGION, 11)]))]);
}

#[test]
fn a_refused_vring_is_tried_again_only_when_something_changes() {
    let mut peer = Peer::new();
    peer.negotiate();
    peer.map();
    peer.describe(0);
    peer.effects("SET_VRING_KICK", 0u64.as_bytes(), &[7]);
    peer.0.refuse(0);
    assert_eq!(peer.effects("SET_STATUS", 15u64.as_bytes(), &[]), []);
    let effects = peer.effects("SET_VRING_ADDR", addr(0, 0x7000_4000).as_bytes(), &[]);
    assert_eq!(effects, [Effect::Start(0)]);
}

#[test]
fn fewer_rings_started_than_offered_is_fine() {
    let mut peer = Peer::new();
    peer.negotiate();
    peer.map();
    peer.describe(2);
    let effects = peer.effects("SET_VRING_KICK", 2u64.as_bytes(), &[7]);
    assert_eq!(effects, [Effect::Kick(2, Some(7)), Effect::Start(2)]);
}

#[test]
fn status_zero_clears_no_index() {
    let mut peer = Peer::new();
    peer.negotiate();
    peer.map();
    peer.describe(0);
    peer.effects("SET_VRING_BASE", [0u32, 17].as_bytes(), &[]);
    assert_eq!(peer.effects("SET_STATUS", 15u64.as_bytes(), &[]), []);
    assert_eq!(peer.effects("SET_STATUS", 0u64.as_bytes(), &[]), [Effect::ResetConfig]);
    assert_eq!(peer.0.vring(0).unwrap().base(), 17.into());
    let outcome = peer.send("GET_STATUS", &[], &[]).unwrap();
    assert_eq!(outcome.answer, Answer::Reply(Reply::U64(0)));
}

#[test]
fn reset_device_stops_rings_and_keeps_memory() {
    let mut peer = Peer::new();
    peer.negotiate();
    peer.map();
    peer.describe(0);
    peer.effects("SET_VRING_KICK", 0u64.as_bytes(), &[7]);
    let effects = peer.effects("RESET_DEVICE", &[], &[]);
    assert_eq!(effects, [Effect::Stop(0), Effect::Inflight(None), Effect::Features(0)]);
    peer.negotiate();
    peer.describe(0);
    let effects = peer.effects("SET_VRING_KICK", 0u64.as_bytes(), &[7]);
    assert_eq!(effects, [Effect::Kick(0, Some(7)), Effect::Start(0)]);
}

#[test]
fn an_acknowledgement_needs_the_feature_and_the_flag() {
    let mut peer = Peer::new();
    let early = peer.send_flagged("SET_OWNER", &[], &[], FLAG_NEED_REPLY).unwrap();
    assert_eq!(early.answer, Answer::None);
    peer.negotiate();
    let asked = peer.send_flagged("SET_OWNER", &[], &[], FLAG_NEED_REPLY).unwrap();
    assert_eq!(asked.answer, Answer::Ack);
    let own = peer.send_flagged("GET_FEATURES", &[], &[], FLAG_NEED_REPLY).unwrap();
    assert!(matches!(own.answer, Answer::Reply(_)));
}

#[test]
fn every_power_of_two_up_to_32768_is_a_ring_size() {
    let mut peer = Peer::new();
    for size in (0..16).map(|bit| 1u32 << bit) {
        peer.effects("SET_VRING_NUM", [0u32, size].as_bytes(), &[]);
        assert_eq!(u32::from(peer.0.vring(0).unwrap().size()), size);
    }
}

/// Offset, size and flags of a config access, and this many bytes.
fn config(offset: u32, size: u32, bytes: usize) -> Vec<u8> {
    [[offset, size, 0].as_bytes(), &vec![1; bytes]].concat()
}

/// Accesses that the config space does not have, or that contradict themselves.
fn wrong_config_accesses() -> Vec<Vec<u8>> {
    vec![
        config(256, 1, 1),
        config(255, 2, 2),
        config(u32::MAX, 4, 4),
        config(0, 257, 257),
        config(0, 1, 256),
        config(0, 8, 0),
        config(0, u32::MAX, 0),
    ]
}

#[test]
fn a_config_read_that_cannot_be_is_answered_with_size_0() {
    let mut peer = Peer::new();
    peer.negotiate();
    for payload in wrong_config_accesses() {
        let Outcome { effects, answer } = peer.send("GET_CONFIG", &payload, &[]).unwrap();
        assert!(matches!(effects[..], [Effect::Refuse(ParseError::Config { .. })]), "{effects:?}");
        let Answer::Reply(reply) = answer else { panic!("{answer:?}") };
        assert_eq!(reply.emit(), [&payload[..4], &[0; 8]].concat());
    }
    let outcome = peer.send("GET_CONFIG", &config(255, 1, 1), &[]).unwrap();
    assert!(matches!(outcome.answer, Answer::Config(_)) && outcome.effects.is_empty());
}

#[test]
fn a_config_write_that_cannot_be_changes_nothing_and_is_refused_if_asked() {
    let mut peer = Peer::new();
    peer.negotiate();
    for payload in wrong_config_accesses() {
        for (flags, answer) in [(0, Answer::None), (FLAG_NEED_REPLY, Answer::Ack)] {
            let outcome = peer.send_flagged("SET_CONFIG", &payload, &[], flags).unwrap();
            // The refused effect turns the acknowledgement into a 1.
            assert!(matches!(outcome.effects[..], [Effect::Refuse(_)]), "{:?}", outcome.effects);
            assert_eq!(outcome.answer, answer);
        }
    }
}

#[test]
fn what_is_not_served_is_refused_if_it_asks_and_has_no_answer_of_its_own() {
    for row in REQUESTS.iter().filter(|row| row.needs & OFFERED == 0) {
        if row.needs == 0 && row.served {
            continue;
        }
        let mut peer = Peer::new();
        let payload = vec![0; row.payload.sizes().0];
        let early = peer.send_flagged(row.name, &payload, &[], FLAG_NEED_REPLY);
        assert!(early.is_err(), "{}: acknowledgements are not negotiated", row.name);
        peer.negotiate();
        assert!(peer.send(row.name, &payload, &[]).is_err(), "{}: asks for nothing", row.name);
        let asked = peer.send_flagged(row.name, &payload, &[7], FLAG_NEED_REPLY);
        if row.replies {
            assert!(asked.is_err(), "{}: waits for another answer", row.name);
        } else {
            let refusal = Effect::Refuse(ParseError::NotServed { name: row.name });
            let wanted = Outcome { effects: vec![refusal], answer: Answer::Ack };
            assert_eq!(asked, Ok(wanted), "{}", row.name);
        }
    }
}

#[test]
fn an_unknown_request_is_refused_if_it_asks_and_ends_the_session_else() {
    let mut peer = Peer::new();
    peer.negotiate();
    let header = |flags| Header { request: 200, flags: FLAG_VERSION | flags, size: 0 };
    let asked = peer.0.handle(header(FLAG_NEED_REPLY), &[], vec![7]).unwrap();
    let refusal = Effect::Refuse(ParseError::Unknown { request: 200 });
    assert_eq!(asked, Outcome { effects: vec![refusal], answer: Answer::Ack });
    assert!(peer.0.handle(header(0), &[], vec![7]).is_err());
}

#[test]
fn a_front_end_with_more_queues_than_the_device_hears_so_in_one_line() {
    let error = Peer::new().send("SET_VRING_CALL", 5u64.as_bytes(), &[7]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "SET_VRING_CALL for vring 5 of a device with 4: the front-end is set to more queues or \
         queue pairs than the device has"
    );
}

#[test]
fn what_breaks_the_protocol_ends_the_session() {
    let ends = |name: &str, payload: &[u8]| Peer::new().send(name, payload, &[]).is_err();
    assert!(ends("SET_FEATURES", (1u64 << 33).as_bytes()));
    assert!(ends("SET_PROTOCOL_FEATURES", (1u64 << 14).as_bytes()));
    assert!(ends("SET_VRING_NUM", [0u32, 100].as_bytes()));
    assert!(ends("SET_VRING_NUM", [0u32, 0].as_bytes()));
    assert!(ends("SET_VRING_NUM", [0u32, 0x1_0000].as_bytes()));
    assert!(ends("SET_VRING_NUM", [4u32, 128].as_bytes()));
    assert!(ends("SET_VRING_BASE", [0u32, 0x1_0000].as_bytes()));
    assert!(ends("SET_VRING_ENABLE", [0u32, 2].as_bytes()));
    assert!(ends("GET_INFLIGHT_FD", &[0; 20]));
    assert!(ends("SET_LOG_BASE", &[0; 16]));
}

#[test]
fn every_feature_that_is_offered_has_its_requests_served() {
    for row in &REQUESTS {
        let offered = OFFERED | OFFERED_NET | OFFERED_BLK;
        if row.needs & offered != 0 {
            assert!(row.served, "{}", row.name);
        }
        if row.served && row.needs != 0 {
            assert!(row.needs & offered != 0, "{}", row.name);
        }
    }
}
