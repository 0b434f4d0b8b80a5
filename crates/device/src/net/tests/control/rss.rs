//! The driver chooses the pair of each frame by its hash: the port is told, in an order in which no
//! frame goes to a pair that nobody serves.

use super::*;
use manyring_wire::net::rss::{HashConfig, RssConfig, hash_type};

pub(super) fn hash() -> HashConfig {
    HashConfig { types: hash_type::ALL, key: vec![0x6d; 40] }
}

pub(super) fn config(table: &[u16]) -> RssConfig {
    RssConfig { hash: hash(), unclassified: 0, table: table.to_vec(), transmitqs: 1 }
}

impl Guest {
    fn hash_by(&mut self, config: &RssConfig) -> u8 {
        self.command(class::MQ, class::MQ_RSS_CONFIG, &config.emit())
    }

    fn set_pairs(&mut self, pairs: u8) -> u8 {
        self.command(class::MQ, class::MQ_VQ_PAIRS_SET, &[pairs, 0])
    }
}

#[test]
fn a_hash_is_told_when_its_pairs_are_attached_and_forgotten_before_they_are_detached() {
    let mut guest = Guest::new(EVERYTHING);
    assert_eq!(guest.hash_by(&config(&[0, 1])), OK);
    assert_eq!(guest.attached(), [true, true]);
    assert_eq!(guest.set_pairs(1), OK);
    assert_eq!(guest.attached(), [true, false]);
    let both = vec![true, true];
    assert_eq!(
        guest.port.script().rss_calls,
        [(Some(config(&[0, 1])), both.clone()), (None, both)]
    );
    // A table that names fewer pairs than are in use takes none of them away.
    assert_eq!(guest.set_pairs(2), OK);
    assert_eq!(guest.hash_by(&config(&[0])), OK);
    assert_eq!(guest.attached(), [true, true]);
    let calls = guest.port.script().rss_calls.len();
    assert_eq!(guest.hash_by(&config(&[0])), OK);
    assert_eq!(guest.port.script().rss_calls.len(), calls, "nothing has changed");
}

#[test]
fn a_hash_that_chooses_a_pair_which_is_not_there_is_refused_and_changes_nothing() {
    let mut guest = Guest::new(EVERYTHING);
    let good = config(&[1, 0]);
    assert_eq!(guest.hash_by(&good), OK);
    for bad in [
        config(&[0, 2]),
        config(&[0xffff]),
        RssConfig { unclassified: 2, ..good.clone() },
        RssConfig { unclassified: 0x8000, ..good.clone() },
        RssConfig { transmitqs: 3, ..good.clone() },
    ] {
        assert_eq!(guest.hash_by(&bad), ERR, "{bad:?}");
    }
    let mut lie = good.emit();
    lie[4] = 2;
    assert_eq!(guest.command(class::MQ, class::MQ_RSS_CONFIG, &lie), ERR, "a mask of 2");
    let told: Vec<_> = guest.port.script().rss_calls.iter().map(|call| call.0.clone()).collect();
    assert_eq!(told, [Some(good)]);
    assert!(guest.events.try_recv().is_err(), "none of that is a fault of the ring");
}

#[test]
fn a_port_that_refuses_a_hash_keeps_the_one_before() {
    let mut guest = Guest::new(EVERYTHING);
    assert_eq!(guest.hash_by(&config(&[1, 0])), OK);
    guest.port.script().refuses_rss = true;
    assert_eq!(guest.hash_by(&config(&[0, 1])), ERR);
    guest.port.script().refuses_rss = false;
    let state = guest.device.0.state();
    assert_eq!(state.port.rss.as_ref().map(|rss| rss.config().clone()), Some(config(&[1, 0])));
}

#[test]
fn the_next_driver_has_set_no_hash() {
    let mut guest = Guest::new(EVERYTHING);
    assert_eq!(guest.hash_by(&config(&[1, 0])), OK);
    assert!(guest.device.0.rules().hash.is_some());
    guest.stop_data();
    guest.stop_control();
    guest.start_data();
    guest.start_control();
    assert!(guest.device.0.rules().hash.is_none());
    assert_eq!(guest.port.script().rss_calls.last().map(|call| call.0.clone()), Some(None));
    // Nor has one without a control queue.
    assert_eq!(guest.hash_by(&config(&[1, 0])), OK);
    guest.stop_data();
    guest.stop_control();
    guest.runtime.block_on(guest.device.set_features(VIRTIO_F_VERSION_1));
    assert_eq!(guest.port.script().rss_calls.last().map(|call| call.0.clone()), Some(None));
}

#[test]
fn the_hash_that_was_set_last_is_reported_if_that_was_negotiated() {
    let other = HashConfig { types: hash_type::IPV4, key: vec![1; 40] };
    let reported = |guest: &Guest| guest.device.0.rules().hash.map(|hash| hash.config().clone());
    let mut guest = Guest::new(EVERYTHING);
    assert_eq!(reported(&guest), None);
    assert_eq!(guest.command(class::MQ, class::MQ_HASH_CONFIG, &other.emit()), OK);
    assert_eq!(reported(&guest), Some(other.clone()));
    assert_eq!(guest.hash_by(&config(&[0])), OK);
    assert_eq!(reported(&guest), Some(hash()));
    assert_eq!(guest.command(class::MQ, class::MQ_HASH_CONFIG, &other.emit()), OK);
    assert_eq!(reported(&guest), Some(other));
    let mut guest = Guest::new(EVERYTHING & !VIRTIO_NET_F_HASH_REPORT);
    assert_eq!(guest.hash_by(&config(&[0])), OK);
    assert_eq!(reported(&guest), None);
}
