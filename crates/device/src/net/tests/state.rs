//! A driver's settings by the control queue come to another device, but only those that this device
//! would obey.

use super::guest::*;
use crate::net::NetSide;
use crate::{Device, StateError};
use manyring_wire::net::rss::{HashConfig, RssConfig};
use manyring_wire::net::*;

/// Sets something by each command, and stops the rings as a front-end does that migrates its guest.
fn stopped_after_commands(guest: &mut Guest) -> Vec<u8> {
    let coalescing = |packets: u8| [[packets, 0, 0, 0], [50, 0, 0, 0]].concat();
    let of_queue = [&[3, 0, 0, 0][..], &coalescing(1)].concat();
    let table = [&[1, 0, 0, 0][..], &[2, 0, 0, 0, 0, 7], &[0; 4]].concat();
    let hash = HashConfig { types: 3, key: vec![7; 40] };
    let rss = RssConfig { hash, unclassified: 1, table: vec![1, 0], transmitqs: 2 };
    let hash = HashConfig { types: 1, key: vec![9; 8] };
    for (class, command, data) in [
        (class::RX, class::RX_PROMISC, vec![0]),
        (class::RX, class::RX_ALLMULTI, vec![1]),
        (class::RX, class::RX_NOBCAST, vec![1]),
        (class::MAC, class::MAC_TABLE_SET, table),
        (class::MAC, class::MAC_ADDR_SET, vec![2, 0, 0, 0, 0, 8]),
        (class::VLAN, class::VLAN_ADD, vec![5, 0]),
        (class::VLAN, class::VLAN_ADD, vec![0xff, 0xf]),
        (class::MQ, class::MQ_VQ_PAIRS_SET, vec![2, 0]),
        (class::MQ, class::MQ_RSS_CONFIG, rss.emit()),
        (class::MQ, class::MQ_HASH_CONFIG, hash.emit()),
        (class::GUEST_OFFLOADS, class::GUEST_OFFLOADS_SET, vec![2, 0, 0, 0, 0, 0, 0, 0]),
        (class::NOTF_COAL, class::NOTF_COAL_TX_SET, coalescing(4)),
        (class::NOTF_COAL, class::NOTF_COAL_RX_SET, coalescing(8)),
        (class::NOTF_COAL, class::NOTF_COAL_VQ_SET, of_queue),
    ] {
        assert_eq!(guest.command(class, command, &data), OK, "{class} {command}");
    }
    guest.stop_data();
    guest.stop_control();
    guest.device.save()
}

/// A device that nobody has set anything of, and whose rings are stopped.
fn destination() -> Guest {
    let mut guest = Guest::new(EVERYTHING);
    guest.stop_data();
    guest.stop_control();
    guest
}

impl Guest {
    fn restore(&self, state: &[u8]) -> Result<(), StateError> {
        self.runtime.block_on(self.device.restore(state))
    }

    fn set_features(&self, features: u64) {
        self.runtime.block_on(self.device.set_features(features));
    }

    /// MTU and MAC as the driver was told, the filter, the offloads and the pairs.
    fn shown(&self) -> String {
        let rules = self.device.0.rules();
        let state = self.device.0.state();
        let steering = (state.pairs_in_use, &state.port.rss, &state.hash);
        format!("{:?} {:?} {:?} {:?}", state.mac, rules.filter, rules.given, steering)
    }
}

#[test]
fn what_a_driver_has_set_goes_on_in_another_device() {
    let mut source = Guest::new(EVERYTHING);
    let state = stopped_after_commands(&mut source);
    for features_come_first in [true, false] {
        let mut guest = destination();
        let nothing = guest.shown();
        if !features_come_first {
            guest.set_features(0);
        }
        guest.restore(&state).unwrap();
        guest.set_features(EVERYTHING);
        assert_eq!(guest.shown(), source.shown());
        // QEMU says them once for each pair.
        guest.set_features(EVERYTHING);
        guest.start_data();
        guest.start_control();
        assert_eq!(guest.shown(), source.shown());
        assert!(guest.device.0.rules().filter.is_some());
        assert_eq!(guest.attached(), [true, true]);
        let all: Vec<_> = (0..4).map(|index| guest.coalescing_of(index)).collect();
        assert_eq!(all, [Ok((8, 50)), Ok((4, 50)), Ok((8, 50)), Ok((1, 50))]);
        // That device saves the state that it has restored.
        guest.stop_data();
        guest.stop_control();
        assert_eq!(guest.device.save(), state);
        // Rings that begin anew are another driver's.
        guest.start_data();
        guest.start_control();
        assert_eq!(guest.shown(), nothing);
        assert_eq!(guest.coalescing_of(3), Ok((0, 0)));
    }
}

#[test]
fn what_was_saved_is_forgotten_if_another_driver_comes() {
    let state = stopped_after_commands(&mut Guest::new(EVERYTHING));
    for others in [0, EVERYTHING & !VIRTIO_NET_F_MRG_RXBUF] {
        let guest = destination();
        guest.set_features(0);
        let mac = guest.device.mac();
        guest.restore(&state).unwrap();
        guest.set_features(others);
        guest.set_features(EVERYTHING);
        assert_eq!(guest.device.mac(), mac, "{others:#x}");
        assert!(guest.device.0.rules().filter.is_none());
    }
}

/// QEMU and Cloud Hypervisor keep the control queue themselves.
#[test]
fn a_driver_without_a_control_queue_keeps_what_it_was_told() {
    let features = EVERYTHING & !CTRL_BITS;
    let mut source = Guest::new(features);
    source.device.set_front_end_mtu(1280);
    source.stop_data();
    let state = source.device.save();
    let mut guest = Guest::new(features);
    guest.stop_data();
    guest.restore(&state).unwrap();
    assert_eq!(guest.device.0.state().mtu_told, Some(1280));
    guest.start_data();
    assert_eq!(guest.attached(), [true, true]);
}

/// A saved state is not trusted more than a driver.
#[test]
fn a_state_that_is_none_of_ours_changes_nothing() {
    let state = stopped_after_commands(&mut Guest::new(EVERYTHING));
    let guest = destination();
    let refused = |bytes: &[u8]| {
        let before = (guest.device.save(), guest.shown());
        let is_refused = guest.restore(bytes).is_err();
        assert!(!is_refused || (guest.device.save(), guest.shown()) == before, "{bytes:?}");
        is_refused
    };
    assert!(refused(&[]) && refused(b"MANYRING") && refused(&[0; 9000]));
    for at in 0..24 {
        let mut bytes = state.clone();
        bytes[at] ^= 0x80;
        assert!(refused(&bytes) || at >= 16, "byte {at} of the header");
    }
    for at in 24..state.len() {
        let mut bytes = state.clone();
        bytes[at] = bytes[at].wrapping_add(1);
        refused(&bytes);
        refused(&bytes[..at]);
    }
    // More pairs and queues than there are, and commands that only ask.
    for command in [
        Command::QueuePairs(3),
        Command::QueuePairs(0),
        Command::Rss(RssConfig {
            hash: HashConfig { types: 1, key: Vec::new() },
            unclassified: 0,
            table: vec![2],
            transmitqs: 1,
        }),
        Command::CoalesceQueue(QueueCoalescing { index: 4, coalescing: Coalescing::default() }),
        Command::CoalesceQuery(0),
        Command::AnnounceAck,
    ] {
        let command = command.emit();
        let len = u16::try_from(command.len()).unwrap();
        let record = [&[2, 0][..], &len.to_le_bytes(), &command].concat();
        assert!(refused(&[&state[..24], &record].concat()), "{record:?}");
    }
}
