//! The features and the config space of a network device (virtio 1.3 §5.1.3, §5.1.4).

use super::{NetOptions, State};
use manyring_backend::net::Port;
use manyring_wire::net::rss::{KEY_SIZE_MAX, TABLE_LEN_MAX, hash_type};
use manyring_wire::net::{
    CTRL_BITS, Duplex, NetConfig, Offloads, SPEED_UNKNOWN, VIRTIO_NET_F_HASH_REPORT,
    VIRTIO_NET_F_MAC, VIRTIO_NET_F_MQ, VIRTIO_NET_F_MRG_RXBUF, VIRTIO_NET_F_MTU, VIRTIO_NET_F_RSS,
    VIRTIO_NET_F_SPEED_DUPLEX, VIRTIO_NET_F_STATUS, VIRTIO_NET_S_ANNOUNCE, VIRTIO_NET_S_LINK_UP,
};
use manyring_wire::virtio::{
    VIRTIO_F_ANY_LAYOUT, VIRTIO_F_EVENT_IDX, VIRTIO_F_IN_ORDER, VIRTIO_F_INDIRECT_DESC,
    VIRTIO_F_RING_PACKED, VIRTIO_F_VERSION_1,
};
use serde::{Deserialize, Serialize};
use zerocopy::IntoBytes;

/// When the transmitqs of a device return buffers to the driver; the operator's choice.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reclaim {
    /// Buffers return to the driver as soon as their frames are sent.
    #[default]
    Off,
    /// Buffers return in groups, while that makes the guest send longer frames.
    Auto,
}

/// The offloads of the port that a device uses: partial checksums and large segments, both ways.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Offload {
    /// All offloads of the port.
    #[default]
    All,
    /// Partial checksums only: every frame fits the MTU.
    Csum,
    /// No offloads: for switches and middle boxes that need frames as they are on a cable.
    None,
}

impl Offload {
    /// Returns the offloads of `port` that this choice allows.
    fn of(self, port: Offloads) -> Offloads {
        match self {
            Self::All => port,
            Self::Csum => Offloads { csum: port.csum, ..Offloads::default() },
            Self::None => Offloads::default(),
        }
    }
}

/// The features that every network device offers.
const ALWAYS: u64 = VIRTIO_F_VERSION_1
    | VIRTIO_F_ANY_LAYOUT
    | VIRTIO_F_INDIRECT_DESC
    | VIRTIO_F_EVENT_IDX
    | VIRTIO_F_IN_ORDER
    | VIRTIO_F_RING_PACKED
    | VIRTIO_NET_F_MAC
    | VIRTIO_NET_F_MRG_RXBUF
    | VIRTIO_NET_F_STATUS
    | CTRL_BITS;

/// Returns the features that this device offers.
pub(super) fn features(options: &NetOptions, port: &dyn Port, mtu: Option<u16>) -> u64 {
    let when = |condition: bool, feature: u64| if condition { feature } else { 0 };
    ALWAYS
        | options.offload.of(port.taken()).host_features()
        | options.offload.of(port.given()).guest_features()
        | when(options.queue_pairs > 1, VIRTIO_NET_F_MQ)
        | when(options.queue_pairs > 1 && port.can_hash(), VIRTIO_NET_F_RSS)
        | when(options.hash_report, VIRTIO_NET_F_HASH_REPORT)
        | when(mtu.is_some(), VIRTIO_NET_F_MTU)
        | when(options.speed.is_some(), VIRTIO_NET_F_SPEED_DUPLEX)
}

/// Returns the present config space.
pub(super) fn config(options: &NetOptions, state: &State) -> NetConfig {
    let status = if state.port.is_link_up() { VIRTIO_NET_S_LINK_UP } else { 0 }
        | if state.announces { VIRTIO_NET_S_ANNOUNCE } else { 0 };
    let duplex = if options.speed.is_some() { Duplex::Full } else { Duplex::Unknown };
    NetConfig {
        mac: state.mac,
        status: status.into(),
        max_virtqueue_pairs: u16::try_from(options.queue_pairs).unwrap_or(u16::MAX).into(),
        mtu: state.mtu_told.unwrap_or(0).into(),
        speed: options.speed.unwrap_or(SPEED_UNKNOWN).into(),
        duplex: duplex as u8,
        rss_max_key_size: u8::try_from(KEY_SIZE_MAX).unwrap_or(u8::MAX),
        rss_max_indirection_table_length: u16::try_from(TABLE_LEN_MAX).unwrap_or(u16::MAX).into(),
        supported_hash_types: hash_type::ALL.into(),
    }
}

/// Reads the config space; bytes past its end are zero.
pub(super) fn read(config: &NetConfig, offset: u32, bytes: &mut [u8]) {
    bytes.fill(0);
    let space = config.as_bytes();
    let start = (offset as usize).min(space.len());
    let end = start.saturating_add(bytes.len()).min(space.len());
    bytes[..end - start].copy_from_slice(&space[start..end]);
}
