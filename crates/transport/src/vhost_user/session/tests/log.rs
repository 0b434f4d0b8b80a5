//! The migration log, in the orders in which QEMU and Cloud Hypervisor send their messages.

use super::*;
use manyring_wire::vhost_user::LogArea;

const FEATURES: u64 = 1 << 32 | F_PROTOCOL_FEATURES;
const LOGGED: u64 = FEATURES | F_LOG_ALL;
const AREA: LogArea = LogArea { size: 4096, offset: 0 };

impl Peer {
    fn features(&mut self, bits: u64) -> Vec<Effect<u32>> {
        self.effects("SET_FEATURES", bits.as_bytes(), &[])
    }

    fn log(&mut self) -> Vec<Effect<u32>> {
        let outcome = self.send("SET_LOG_BASE", AREA.as_bytes(), &[8]).unwrap();
        // QEMU waits for it although it does not ask; Cloud Hypervisor asks.
        assert_eq!(outcome.answer, Answer::Reply(Reply::U64(0)));
        outcome.effects
    }

    fn run(&mut self, index: u32) -> Vec<Effect<u32>> {
        self.describe(index);
        self.effects("SET_VRING_KICK", u64::from(index).as_bytes(), &[5])
    }

    fn is_running(&self, index: usize) -> bool {
        self.0.vring(index).unwrap().running
    }

    fn ring_is_logged(&mut self, index: u32, flags: u32) {
        let addr = VringAddr { flags, ..addr(index, 0x7000_0000) };
        assert!(self.effects("SET_VRING_ADDR", addr.as_bytes(), &[]).is_empty());
    }
}

fn running() -> Peer {
    let mut peer = Peer::new();
    peer.negotiate();
    peer.map();
    assert!(peer.run(0).contains(&Effect::Start(0)));
    peer
}

#[test]
fn the_log_of_a_device_that_runs_comes_before_its_bit_and_goes_with_it() {
    let mut peer = running();
    assert_eq!(peer.log(), [Effect::Log(Some((AREA, 8)))]);
    // The device hears nothing of the bit, and the ring nothing of its flag.
    assert_eq!(peer.features(LOGGED), []);
    peer.ring_is_logged(0, 1);
    assert_eq!(peer.0.features(), FEATURES);
    // Each round of Cloud Hypervisor's has a log of its own.
    assert_eq!(peer.log(), [Effect::Log(Some((AREA, 8)))]);
    assert_eq!(peer.features(LOGGED), [], "again, while it runs");
    // Cancelled.
    assert_eq!(peer.features(FEATURES), [Effect::Log(None)]);
    peer.ring_is_logged(0, 0);
    assert!(peer.is_running(0));
    // Without the bit the device judges whether the same again is a driver that begins anew.
    assert_eq!(peer.features(FEATURES), [Effect::Features(1 << 32)]);
}

#[test]
fn a_device_that_starts_while_its_guest_migrates_waits_for_its_log() {
    let mut peer = Peer::new();
    peer.effects("SET_PROTOCOL_FEATURES", OFFERED.as_bytes(), &[]);
    assert_eq!(peer.features(LOGGED), [Effect::Features(1 << 32)]);
    peer.map();
    assert!(!peer.run(0).contains(&Effect::Start(0)) && !peer.is_running(0));
    assert_eq!(peer.log(), [Effect::Log(Some((AREA, 8))), Effect::Start(0)]);
    // The guest boots again: what the log is then is said when the rings are there.
    let stopped = peer.effects("GET_VRING_BASE", [0u32, 0].as_bytes(), &[]);
    assert_eq!(stopped, [Effect::Stop(0)]);
    peer.0.stopped(0, 3.into());
    assert_eq!(peer.features(LOGGED), [Effect::Log(None), Effect::Features(1 << 32)]);
    assert!(!peer.run(0).contains(&Effect::Start(0)));
    assert_eq!(peer.log(), [Effect::Log(Some((AREA, 8))), Effect::Start(0)]);
}

#[test]
fn a_log_that_came_first_serves_rings_that_start_later() {
    let mut peer = Peer::new();
    peer.negotiate();
    peer.log();
    assert_eq!(peer.features(LOGGED), [Effect::Features(1 << 32)]);
    peer.map();
    assert!(peer.run(0).contains(&Effect::Start(0)));
}

#[test]
fn a_reset_forgets_the_log() {
    let mut peer = running();
    peer.log();
    peer.features(LOGGED);
    assert!(peer.effects("RESET_DEVICE", &[], &[]).contains(&Effect::Log(None)));
    peer.features(FEATURES);
    assert!(peer.run(0).contains(&Effect::Start(0)), "no log is waited for");
}

#[test]
fn a_log_without_a_file_or_of_another_form_ends_the_session() {
    for (payload, fds) in [(&[0; 16][..], &[][..]), (&[0; 16], &[8, 9]), (&[0; 8], &[8])] {
        assert!(running().send("SET_LOG_BASE", payload, fds).is_err(), "{payload:?} {fds:?}");
    }
}
