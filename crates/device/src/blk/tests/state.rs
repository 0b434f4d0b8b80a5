//! The cache mode of a driver goes with it to another process.

use super::*;
use crate::StateError;
use crate::state::Saved;

const FLUSHES: u64 = VIRTIO_F_VERSION_1 | VIRTIO_BLK_F_FLUSH;

fn restore(device: &BlkDevice, state: &[u8]) -> Result<(), StateError> {
    device.take(&Saved::parse(state, device.virtio_id(), device.features())?)
}

/// A driver that chose write-through must not find its writes in a cache at the destination.
#[test]
fn the_cache_mode_goes_with_its_driver_whenever_its_features_come() {
    let source = Guest::plain();
    drop(source.device.set_features(FLUSHES));
    source.device.write_config(CONFIG_WRITEBACK, &[0]).unwrap();
    for is_reset in [false, true] {
        if is_reset {
            // QEMU writes status 0 when it pauses its guest.
            source.device.reset_config();
        }
        let state = source.device.save();
        for features_come_first in [true, false] {
            let guest = Guest::plain();
            let is_durable = || guest.shared().write_through.load(Ordering::Relaxed);
            if features_come_first {
                drop(guest.device.set_features(FLUSHES));
                assert!(!is_durable());
            }
            restore(&guest.device, &state).unwrap();
            drop(guest.device.set_features(FLUSHES));
            assert!(is_durable());
            assert_eq!(guest.device.save(), state);
            // The next driver begins with what the operator has set.
            drop(guest.device.set_features(0));
            drop(guest.device.set_features(FLUSHES));
            assert!(!is_durable());
        }
    }
}

#[test]
fn a_state_of_another_driver_or_that_is_none_changes_nothing() {
    let source = Guest::plain();
    drop(source.device.set_features(FLUSHES));
    source.device.write_config(CONFIG_WRITEBACK, &[0]).unwrap();
    let state = source.device.save();
    let guest = Guest::plain();
    let is_durable = || guest.shared().write_through.load(Ordering::Relaxed);
    for at in 0..state.len() {
        let mut bytes = state.clone();
        bytes[at] ^= 0x82;
        assert!(restore(&guest.device, &bytes).is_err(), "byte {at}");
        assert!(restore(&guest.device, &state[..at]).is_err() || at == 24, "{at} bytes");
    }
    let twice = [&state, &state[24..]].concat();
    assert!(restore(&guest.device, &twice).is_err());
    drop(guest.device.set_features(FLUSHES));
    assert!(!is_durable());
    drop(guest.device.set_features(0));
    restore(&guest.device, &state).unwrap();
    drop(
        guest
            .device
            .set_features(VIRTIO_F_VERSION_1 | VIRTIO_BLK_F_FLUSH | VIRTIO_BLK_F_CONFIG_WCE),
    );
    assert!(!is_durable(), "it was another driver's");
}
