//! The control queue: commands of the driver (virtio 1.3 §5.1.6.5).

use super::rss::{HashConfig, RssConfig, RssError};
use super::{GUEST_OFFLOAD_BITS, MTU_MIN};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, Unaligned};

/// Bytes of class and command, which precede the data of a command.
pub const CTRL_HEADER_SIZE: usize = 2;
/// Number of VLAN ids: they are 0 to 4095.
pub const VLAN_COUNT: u16 = 4096;

/// A MAC address.
pub type MacAddress = [u8; 6];

/// Classes and their commands, by the specification's names without `VIRTIO_NET_CTRL_`.
#[allow(missing_docs, reason = "the specification's names")]
pub mod class {
    pub const RX: u8 = 0;
    pub const RX_PROMISC: u8 = 0;
    pub const RX_ALLMULTI: u8 = 1;
    pub const RX_ALLUNI: u8 = 2;
    pub const RX_NOMULTI: u8 = 3;
    pub const RX_NOUNI: u8 = 4;
    pub const RX_NOBCAST: u8 = 5;
    pub const MAC: u8 = 1;
    pub const MAC_TABLE_SET: u8 = 0;
    pub const MAC_ADDR_SET: u8 = 1;
    pub const VLAN: u8 = 2;
    pub const VLAN_ADD: u8 = 0;
    pub const VLAN_DEL: u8 = 1;
    pub const ANNOUNCE: u8 = 3;
    pub const ANNOUNCE_ACK: u8 = 0;
    pub const MQ: u8 = 4;
    pub const MQ_VQ_PAIRS_SET: u8 = 0;
    pub const MQ_RSS_CONFIG: u8 = 1;
    pub const MQ_HASH_CONFIG: u8 = 2;
    pub const GUEST_OFFLOADS: u8 = 5;
    pub const GUEST_OFFLOADS_SET: u8 = 0;
    pub const NOTF_COAL: u8 = 6;
    pub const NOTF_COAL_TX_SET: u8 = 0;
    pub const NOTF_COAL_RX_SET: u8 = 1;
    pub const NOTF_COAL_VQ_SET: u8 = 2;
    pub const NOTF_COAL_VQ_GET: u8 = 3;
}

/// The status byte by which the device answers a command (§5.1.6.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum CtrlStatus {
    /// `VIRTIO_NET_OK`
    Ok = 0,
    /// `VIRTIO_NET_ERR`
    Err = 1,
}

/// A receive mode that can be switched (§5.1.6.5.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the specification's names")]
pub enum RxMode {
    Promisc,
    AllMulti,
    AllUni,
    NoMulti,
    NoUni,
    NoBcast,
}

/// The MAC table: addresses whose frames are received beside those to the device's own address.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FilterTable {
    /// Unicast addresses.
    pub unicast: Vec<MacAddress>,
    /// Multicast addresses.
    pub multicast: Vec<MacAddress>,
}

/// When used buffer notifications may be delayed (§5.1.6.5.9). Both 0: never.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Coalescing {
    /// Number of packets after which the driver is notified.
    pub packets_max: u32,
    /// Microseconds after which the driver is notified.
    pub delay_us_max: u32,
}

/// The coalescing of one virtqueue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueCoalescing {
    /// Index of the virtqueue.
    pub index: u16,
    /// Its limits.
    pub coalescing: Coalescing,
}

/// A command of the driver, parsed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Switch a receive mode.
    Rx(RxMode, bool),
    /// Replace the MAC table.
    MacTable(FilterTable),
    /// Set the device's MAC address.
    MacAddr(MacAddress),
    /// Receive a VLAN.
    VlanAdd(u16),
    /// Do not receive a VLAN.
    VlanDel(u16),
    /// The driver has announced itself.
    AnnounceAck,
    /// Use this number of queue pairs.
    QueuePairs(u16),
    /// Choose the receiveq of each frame by its hash.
    Rss(RssConfig),
    /// Report the hash of each frame, computed by these settings.
    Hash(HashConfig),
    /// Deliver only such unfinished packets (`GUEST_*` feature bits).
    GuestOffloads(u64),
    /// Coalesce notifications of all transmitqs.
    CoalesceTx(Coalescing),
    /// Coalesce notifications of all receiveqs.
    CoalesceRx(Coalescing),
    /// Coalesce notifications of one virtqueue.
    CoalesceQueue(QueueCoalescing),
    /// Report how the notifications of one virtqueue are coalesced.
    CoalesceQuery(u16),
}

/// Why a command is refused; its status byte becomes `VIRTIO_NET_ERR`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the Display text says what each field is")]
pub enum CommandError {
    #[error("a command of {size} bytes has no class and no command")]
    Short { size: usize },
    #[error("class {class} has no command {command}")]
    Unknown { class: u8, command: u8 },
    #[error("command {command} of class {class} with {size} bytes of data")]
    Size { class: u8, command: u8, size: usize },
    #[error("a MAC table of {count} entries in {size} bytes")]
    Table { count: u32, size: usize },
    #[error("{mac:02x?} is no unicast address")]
    Mac { mac: MacAddress },
    #[error("VLAN id {id} is not below {VLAN_COUNT}")]
    Vlan { id: u16 },
    #[error("unknown offloads {bits:#x}")]
    Offloads { bits: u64 },
    #[error("receive-side scaling: {0}")]
    Rss(#[from] RssError),
}

#[derive(FromBytes, Immutable, Unaligned)]
#[repr(C)]
struct RawCoalescing {
    packets_max: U32,
    delay_us_max: U32,
}

#[derive(FromBytes, Immutable, Unaligned)]
#[repr(C)]
struct RawQueueCoalescing {
    index: U16,
    reserved: U16,
    coalescing: RawCoalescing,
}

impl From<RawCoalescing> for Coalescing {
    fn from(raw: RawCoalescing) -> Self {
        Self { packets_max: raw.packets_max.get(), delay_us_max: raw.delay_us_max.get() }
    }
}

impl Command {
    /// Parses the bytes that the driver wrote before the status byte.
    ///
    /// # Errors
    /// [`CommandError`].
    pub fn parse(bytes: &[u8]) -> Result<Self, CommandError> {
        let Some((&[class, command], data)) = bytes.split_first_chunk() else {
            return Err(CommandError::Short { size: bytes.len() });
        };
        let wrong = CommandError::Size { class, command, size: data.len() };
        let flag = || match data {
            [value] => Ok(*value != 0),
            _ => Err(wrong),
        };
        let short = || U16::read_from_bytes(data).map(U16::get).map_err(|_| wrong);
        let vlan = || match short()? {
            id if id < VLAN_COUNT => Ok(id),
            id => Err(CommandError::Vlan { id }),
        };
        let coalescing =
            || RawCoalescing::read_from_bytes(data).map(Coalescing::from).map_err(|_| wrong);
        Ok(match (class, command) {
            (class::RX, class::RX_PROMISC) => Self::Rx(RxMode::Promisc, flag()?),
            (class::RX, class::RX_ALLMULTI) => Self::Rx(RxMode::AllMulti, flag()?),
            (class::RX, class::RX_ALLUNI) => Self::Rx(RxMode::AllUni, flag()?),
            (class::RX, class::RX_NOMULTI) => Self::Rx(RxMode::NoMulti, flag()?),
            (class::RX, class::RX_NOUNI) => Self::Rx(RxMode::NoUni, flag()?),
            (class::RX, class::RX_NOBCAST) => Self::Rx(RxMode::NoBcast, flag()?),
            (class::MAC, class::MAC_TABLE_SET) => Self::MacTable(parse_tables(data)?),
            (class::MAC, class::MAC_ADDR_SET) => match MacAddress::try_from(data) {
                Ok(mac) if is_unicast(mac) => Self::MacAddr(mac),
                Ok(mac) => return Err(CommandError::Mac { mac }),
                Err(_) => return Err(wrong),
            },
            (class::VLAN, class::VLAN_ADD) => Self::VlanAdd(vlan()?),
            (class::VLAN, class::VLAN_DEL) => Self::VlanDel(vlan()?),
            (class::ANNOUNCE, class::ANNOUNCE_ACK) if data.is_empty() => Self::AnnounceAck,
            (class::ANNOUNCE, class::ANNOUNCE_ACK) => return Err(wrong),
            (class::MQ, class::MQ_VQ_PAIRS_SET) => Self::QueuePairs(short()?),
            (class::MQ, class::MQ_RSS_CONFIG) => Self::Rss(RssConfig::parse(data)?),
            (class::MQ, class::MQ_HASH_CONFIG) => Self::Hash(HashConfig::parse(data)?),
            (class::GUEST_OFFLOADS, class::GUEST_OFFLOADS_SET) => {
                let bits = U64::read_from_bytes(data).map(U64::get).map_err(|_| wrong)?;
                if bits & !GUEST_OFFLOAD_BITS != 0 {
                    return Err(CommandError::Offloads { bits });
                }
                Self::GuestOffloads(bits)
            }
            (class::NOTF_COAL, class::NOTF_COAL_TX_SET) => Self::CoalesceTx(coalescing()?),
            (class::NOTF_COAL, class::NOTF_COAL_RX_SET) => Self::CoalesceRx(coalescing()?),
            (class::NOTF_COAL, class::NOTF_COAL_VQ_SET) => {
                let raw = RawQueueCoalescing::read_from_bytes(data).map_err(|_| wrong)?;
                let (index, coalescing) = (raw.index.get(), raw.coalescing.into());
                Self::CoalesceQueue(QueueCoalescing { index, coalescing })
            }
            // A driver writes the index and a reserved field. Some drivers write the index alone,
            // or add space for the parameters.
            (class::NOTF_COAL, class::NOTF_COAL_VQ_GET) if matches!(data.len(), 2 | 4 | 12) => {
                Self::CoalesceQuery(u16::from_le_bytes([data[0], data[1]]))
            }
            (class::NOTF_COAL, class::NOTF_COAL_VQ_GET) => return Err(wrong),
            _ => return Err(CommandError::Unknown { class, command }),
        })
    }
}

impl Command {
    /// The bytes that a driver writes before the status byte: class, command, data.
    #[must_use]
    pub fn emit(&self) -> Vec<u8> {
        let (class, command, data) = match self {
            Self::Rx(mode, on) => (class::RX, mode.command(), vec![u8::from(*on)]),
            Self::MacTable(table) => (class::MAC, class::MAC_TABLE_SET, table.emit()),
            Self::MacAddr(mac) => (class::MAC, class::MAC_ADDR_SET, mac.to_vec()),
            Self::VlanAdd(id) => (class::VLAN, class::VLAN_ADD, id.to_le_bytes().to_vec()),
            Self::VlanDel(id) => (class::VLAN, class::VLAN_DEL, id.to_le_bytes().to_vec()),
            Self::AnnounceAck => (class::ANNOUNCE, class::ANNOUNCE_ACK, Vec::new()),
            Self::QueuePairs(pairs) => {
                (class::MQ, class::MQ_VQ_PAIRS_SET, pairs.to_le_bytes().to_vec())
            }
            Self::Rss(config) => (class::MQ, class::MQ_RSS_CONFIG, config.emit()),
            Self::Hash(config) => (class::MQ, class::MQ_HASH_CONFIG, config.emit()),
            Self::GuestOffloads(bits) => {
                (class::GUEST_OFFLOADS, class::GUEST_OFFLOADS_SET, bits.to_le_bytes().to_vec())
            }
            Self::CoalesceTx(all) => {
                (class::NOTF_COAL, class::NOTF_COAL_TX_SET, all.emit().to_vec())
            }
            Self::CoalesceRx(all) => {
                (class::NOTF_COAL, class::NOTF_COAL_RX_SET, all.emit().to_vec())
            }
            Self::CoalesceQueue(one) => {
                (class::NOTF_COAL, class::NOTF_COAL_VQ_SET, one.emit().to_vec())
            }
            Self::CoalesceQuery(index) => {
                let [low, high] = index.to_le_bytes();
                (class::NOTF_COAL, class::NOTF_COAL_VQ_GET, vec![low, high, 0, 0])
            }
        };
        [vec![class, command], data].concat()
    }
}

impl RxMode {
    /// Every receive mode.
    pub const ALL: [Self; 6] =
        [Self::Promisc, Self::AllMulti, Self::AllUni, Self::NoMulti, Self::NoUni, Self::NoBcast];

    /// The command number that switches this mode.
    const fn command(self) -> u8 {
        match self {
            Self::Promisc => class::RX_PROMISC,
            Self::AllMulti => class::RX_ALLMULTI,
            Self::AllUni => class::RX_ALLUNI,
            Self::NoMulti => class::RX_NOMULTI,
            Self::NoUni => class::RX_NOUNI,
            Self::NoBcast => class::RX_NOBCAST,
        }
    }
}

impl FilterTable {
    /// The unicast and the multicast table, each as a count and its entries.
    fn emit(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for table in [&self.unicast, &self.multicast] {
            bytes.extend(u32::try_from(table.len()).unwrap_or(u32::MAX).to_le_bytes());
            bytes.extend(table.concat());
        }
        bytes
    }
}

impl Coalescing {
    /// The answer to [`Command::CoalesceQuery`], `struct virtio_net_ctrl_coal`.
    #[must_use]
    pub fn emit(self) -> [u8; 8] {
        let mut bytes = [0; 8];
        bytes[0..4].copy_from_slice(&self.packets_max.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.delay_us_max.to_le_bytes());
        bytes
    }
}

impl QueueCoalescing {
    /// The data of the command that sets these parameters, `struct virtio_net_ctrl_coal_vq`.
    #[must_use]
    pub fn emit(self) -> [u8; 12] {
        let mut bytes = [0; 12];
        bytes[0..2].copy_from_slice(&self.index.to_le_bytes());
        bytes[4..12].copy_from_slice(&self.coalescing.emit());
        bytes
    }
}

/// True for an address that a device may have: neither a group address nor zero.
fn is_unicast(mac: MacAddress) -> bool {
    mac[0] & 1 == 0 && mac != [0; 6]
}

/// Parses the unicast and the multicast table, each a count and its entries.
fn parse_tables(data: &[u8]) -> Result<FilterTable, CommandError> {
    let (unicast, rest) = parse_table(data)?;
    let (multicast, rest) = parse_table(rest)?;
    if rest.is_empty() {
        Ok(FilterTable { unicast, multicast })
    } else {
        let size = data.len();
        Err(CommandError::Size { class: class::MAC, command: class::MAC_TABLE_SET, size })
    }
}

fn parse_table(data: &[u8]) -> Result<(Vec<MacAddress>, &[u8]), CommandError> {
    let size = data.len();
    let wrong = |count| CommandError::Table { count, size };
    let (count, rest) = U32::read_from_prefix(data).map_err(|_| wrong(0))?;
    let count = count.get();
    let (macs, _) = rest.as_chunks::<6>();
    let len = crate::host_size(u64::from(count));
    let macs = macs.get(..len).ok_or(wrong(count))?;
    Ok((macs.to_vec(), &rest[len * 6..]))
}

/// Parses `aa:bb:cc:dd:ee:ff`. `None` also for an address that a device may not have.
#[must_use]
pub fn parse_mac(text: &str) -> Option<MacAddress> {
    let mut mac = [0; 6];
    let mut parts = text.split(':');
    for byte in &mut mac {
        let is_hex = |p: &&str| p.len() == 2 && p.bytes().all(|b| b.is_ascii_hexdigit());
        let part = parts.next().filter(is_hex)?;
        *byte = u8::from_str_radix(part, 16).ok()?;
    }
    (parts.next().is_none() && is_unicast(mac)).then_some(mac)
}

/// True if a device may have this MTU.
#[must_use]
pub const fn is_mtu(mtu: u16) -> bool {
    mtu >= MTU_MIN
}
