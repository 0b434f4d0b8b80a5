//! `RingFeatures`: the negotiated virtio features that concern a ring.

/// The negotiated virtio features that concern a ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RingFeatures {
    /// `VIRTIO_F_EVENT_IDX`
    pub event_idx: bool,
    /// `VIRTIO_F_INDIRECT_DESC`
    pub indirect: bool,
    /// `VIRTIO_F_IN_ORDER`
    pub in_order: bool,
    /// `VIRTIO_F_RING_PACKED`: the ring's format.
    pub packed: bool,
}

impl RingFeatures {
    /// Takes the ring's features out of the negotiated virtio features.
    #[must_use]
    pub const fn from_bits(features: u64) -> Self {
        Self {
            event_idx: features & manyring_wire::virtio::VIRTIO_F_EVENT_IDX != 0,
            indirect: features & manyring_wire::virtio::VIRTIO_F_INDIRECT_DESC != 0,
            in_order: features & manyring_wire::virtio::VIRTIO_F_IN_ORDER != 0,
            packed: features & manyring_wire::virtio::VIRTIO_F_RING_PACKED != 0,
        }
    }
}
