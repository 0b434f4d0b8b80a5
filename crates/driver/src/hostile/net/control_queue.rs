//! The faults that a hostile command of the control queue can have.

use manyring_wire::net::class;

/// One fault of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CtrlSpoil {
    /// A command without a device-writable byte, so without a status.
    NoStatus,
    /// A status byte and no command.
    OnlyStatus,
    /// A chain of no bytes.
    Empty,
    /// A descriptor of no bytes for the status.
    EmptyStatus,
    /// A class and no command.
    ClassAlone,
    /// An unknown class.
    ClassUnknown,
    /// A command that its class does not have.
    CommandUnknown,
    /// A receive mode command without its value.
    DataMissing,
    /// A receive mode command with a value of two bytes.
    DataLong,
    /// A command of 16 KiB.
    DataHuge,
    /// A MAC table of 2^32 - 1 entries.
    MacTableHuge,
    /// A MAC table that claims one entry more than it has.
    MacTableShort,
    /// A multicast address for the device.
    MacMulticast,
    /// A number of queue pairs of 0.
    PairsZero,
    /// More queue pairs than any device has.
    PairsTooMany,
    /// VLAN 4096.
    VlanTooLarge,
    /// Unknown offload bits.
    OffloadsUnknown,
    /// Coalescing for a virtqueue that the device does not have.
    QueueUnknown,
}

impl CtrlSpoil {
    /// Every fault.
    pub const ALL: [Self; 18] = [
        Self::NoStatus,
        Self::OnlyStatus,
        Self::Empty,
        Self::EmptyStatus,
        Self::ClassAlone,
        Self::ClassUnknown,
        Self::CommandUnknown,
        Self::DataMissing,
        Self::DataLong,
        Self::DataHuge,
        Self::MacTableHuge,
        Self::MacTableShort,
        Self::MacMulticast,
        Self::PairsZero,
        Self::PairsTooMany,
        Self::VlanTooLarge,
        Self::OffloadsUnknown,
        Self::QueueUnknown,
    ];

    /// True if the chain has a byte for the status: the device then answers `VIRTIO_NET_ERR`.
    #[must_use]
    pub fn has_status(self) -> bool {
        !matches!(self, Self::NoStatus | Self::Empty | Self::EmptyStatus)
    }

    /// The bytes of the command: class, command number and data.
    pub(super) fn command(self) -> Vec<u8> {
        match self {
            Self::OnlyStatus | Self::Empty => vec![],
            Self::ClassAlone => vec![class::RX],
            Self::ClassUnknown => vec![200, 0, 1],
            Self::CommandUnknown => vec![class::RX, 77, 1],
            Self::DataMissing => vec![class::RX, class::RX_PROMISC],
            Self::DataLong => vec![class::RX, class::RX_PROMISC, 1, 1],
            Self::DataHuge => vec![0; 16 << 10],
            Self::MacTableHuge => {
                [&[class::MAC, class::MAC_TABLE_SET, 255, 255, 255, 255][..], &[2; 26]].concat()
            }
            Self::MacTableShort => {
                [&[class::MAC, class::MAC_TABLE_SET, 2, 0, 0, 0][..], &[2; 6], &[0; 4]].concat()
            }
            Self::MacMulticast => vec![class::MAC, class::MAC_ADDR_SET, 1, 0, 0x5e, 0, 0, 1],
            Self::PairsZero => vec![class::MQ, class::MQ_VQ_PAIRS_SET, 0, 0],
            Self::PairsTooMany => vec![class::MQ, class::MQ_VQ_PAIRS_SET, 0x01, 0x80],
            Self::VlanTooLarge => vec![class::VLAN, class::VLAN_ADD, 0x00, 0x10],
            Self::OffloadsUnknown => {
                [&[class::GUEST_OFFLOADS, class::GUEST_OFFLOADS_SET][..], &[0xff; 8]].concat()
            }
            Self::QueueUnknown => {
                let (kind, set) = (class::NOTF_COAL, class::NOTF_COAL_VQ_SET);
                [&[kind, set, 0xff, 0xff, 0, 0][..], &[0; 8]].concat()
            }
            Self::NoStatus | Self::EmptyStatus => vec![class::RX, class::RX_PROMISC, 1],
        }
    }
}
