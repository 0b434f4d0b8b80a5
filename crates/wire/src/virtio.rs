//! Common to all virtio devices: feature bits, status bits, device ids (virtio 1.3 §2, §6).

/// A legacy driver may split buffers as it likes (§6.3): a header may share a descriptor with the
/// data behind it. Drivers of virtio 1.0 may do this without the bit.
pub const VIRTIO_F_ANY_LAYOUT: u64 = 1 << 27;
/// Ring feature: a descriptor may point to a table of descriptors (§2.7.5.3).
pub const VIRTIO_F_INDIRECT_DESC: u64 = 1 << 28;
/// Ring feature: `used_event` and `avail_event` replace the flags (§2.7.7, §2.7.10).
pub const VIRTIO_F_EVENT_IDX: u64 = 1 << 29;
/// The device follows virtio 1.0 or later (§6.1).
pub const VIRTIO_F_VERSION_1: u64 = 1 << 32;
/// The rings are packed (§2.8).
pub const VIRTIO_F_RING_PACKED: u64 = 1 << 34;
/// Ring feature: the device uses buffers in the order in which the driver made them available
/// (§2.7.9, §2.7.6.3).
pub const VIRTIO_F_IN_ORDER: u64 = 1 << 35;

/// Device id of a network card (§5.1.1).
pub const VIRTIO_ID_NET: u32 = 1;
/// Device id of a block device (§5.2.1).
pub const VIRTIO_ID_BLOCK: u32 = 2;

/// Device status: the driver has acknowledged the device (§2.1).
pub const STATUS_ACKNOWLEDGE: u8 = 1;
/// Device status: the driver can drive this device.
pub const STATUS_DRIVER: u8 = 2;
/// Device status: the driver is set up and drives the device.
pub const STATUS_DRIVER_OK: u8 = 4;
/// Device status: feature negotiation is complete.
pub const STATUS_FEATURES_OK: u8 = 8;
/// Device status: the device has an error it cannot recover from.
pub const STATUS_DEVICE_NEEDS_RESET: u8 = 64;
/// Device status: the guest has given the device up because of an error.
pub const STATUS_FAILED: u8 = 128;
