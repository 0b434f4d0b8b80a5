//! `rss`: receive-side scaling, by which a driver chooses the receiveq of each frame with a hash
//! (virtio 1.3 §5.1.6.5.6.4), and has that hash reported (§5.1.6.4.3).
//!
//! ```text
//! frame -> which of the hash types that the driver has set fits it best
//!            none: the frame goes to the unclassified queue, and no hash is reported
//!            one:  hash = Toeplitz(key, addresses, and ports where the type has ports)
//!                  queue = table[hash & mask]
//! ```
//! The host's BPF program (`manyring-backend`, `net/tap/rss.rs`) must choose the same queue. It
//! uses the table of [`Toeplitz::words`].

use super::flow::{ETHERNET, FRAGMENT, IPV6, TYPES_IPV4, TYPES_IPV6, behind_extensions, packet_of};
use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, Unaligned};

/// Bytes of the longest key; §5.1.4 demands that a device supports at least this length.
pub const KEY_SIZE_MAX: usize = 40;
/// Entries of the longest indirection table; §5.1.4 demands at least this many.
pub const TABLE_LEN_MAX: usize = 128;
/// Most bytes that are hashed: two IPv6 addresses and two ports.
const INPUT_SIZE_MAX: usize = 36;
/// Words of the table of [`Toeplitz`]: 16 for each half byte of input.
pub const TOEPLITZ_WORDS: usize = INPUT_SIZE_MAX * 2 * 16;

/// Hash types (§5.1.6.4.3.1), by the specification's names without `VIRTIO_NET_HASH_TYPE_`.
#[allow(missing_docs, reason = "the specification's names")]
pub mod hash_type {
    pub const IPV4: u32 = 1 << 0;
    pub const TCPV4: u32 = 1 << 1;
    pub const UDPV4: u32 = 1 << 2;
    pub const IPV6: u32 = 1 << 3;
    pub const TCPV6: u32 = 1 << 4;
    pub const UDPV6: u32 = 1 << 5;
    /// All hash types that this device computes.
    pub const ALL: u32 = IPV4 | TCPV4 | UDPV4 | IPV6 | TCPV6 | UDPV6;
}

/// The protocol numbers of TCP and UDP.
pub const PROTOCOLS: [u8; 2] = [6, 17];

/// Which hash type a reported hash has: `VIRTIO_NET_HASH_REPORT_*` (§5.1.6.4.3.4).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u16)]
#[allow(missing_docs, reason = "the specification's names")]
pub enum HashReport {
    #[default]
    None = 0,
    Ipv4 = 1,
    Tcpv4 = 2,
    Udpv4 = 3,
    Ipv6 = 4,
    Tcpv6 = 5,
    Udpv6 = 6,
}

/// The hash of a frame, as it is reported to a driver that has negotiated
/// `VIRTIO_NET_F_HASH_REPORT`: the header's fields behind `num_buffers` (§5.1.6).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hash {
    /// `hash_value`.
    pub value: u32,
    /// `hash_report`.
    pub report: HashReport,
}

impl Hash {
    /// The bytes for the driver: `hash_value`, `hash_report`, and padding of zeroes.
    #[must_use]
    pub fn emit(self) -> [u8; 8] {
        let [a, b, c, d] = self.value.to_le_bytes();
        let [e, f] = (self.report as u16).to_le_bytes();
        [a, b, c, d, e, f, 0, 0]
    }
}

/// A driver's settings of the hash: the types and the key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HashConfig {
    /// [`hash_type`] bits.
    pub types: u32,
    /// The key, at most [`KEY_SIZE_MAX`] bytes. Bits behind its end count as zero.
    pub key: Vec<u8>,
}

/// The settings of receive-side scaling, which a driver makes by `VIRTIO_NET_CTRL_MQ_RSS_CONFIG`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RssConfig {
    /// The settings of the hash.
    pub hash: HashConfig,
    /// The queue pair that receives frames without a hash.
    pub unclassified: u16,
    /// The queue pair for each value of the masked hash. The number of entries is a power of two,
    /// at most [`TABLE_LEN_MAX`].
    pub table: Vec<u16>,
    /// How many transmitqs the driver uses.
    pub transmitqs: u16,
}

/// An error in a driver's configuration of the hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the Display text says what each field is")]
pub enum RssError {
    #[error("{size} bytes are too short for the command, or too long")]
    Size { size: usize },
    #[error("hash types {types:#x}, which the device does not have")]
    Types { types: u32 },
    #[error("an indirection table mask of {mask:#x}, where powers of two minus one up to 127 are")]
    Mask { mask: u16 },
    #[error("a hash key of {size} bytes, where 40 are the most")]
    Key { size: u8 },
}

/// The part of `struct virtio_net_rss_config` before its table.
#[derive(FromBytes, IntoBytes, Immutable, Unaligned)]
#[repr(C)]
struct RawRss {
    hash_types: U32,
    indirection_table_mask: U16,
    unclassified_queue: U16,
}

/// The part of `struct virtio_net_hash_config` before its key.
#[derive(FromBytes, IntoBytes, Immutable, Unaligned)]
#[repr(C)]
struct RawHash {
    hash_types: U32,
    reserved: [U16; 4],
    hash_key_length: u8,
}

impl HashConfig {
    /// Parses the data of `VIRTIO_NET_CTRL_MQ_HASH_CONFIG`, which are untrusted.
    ///
    /// # Errors
    /// [`RssError`].
    pub fn parse(data: &[u8]) -> Result<Self, RssError> {
        let wrong = RssError::Size { size: data.len() };
        let (raw, key) = RawHash::read_from_prefix(data).map_err(|_| wrong)?;
        Self::checked(raw.hash_types.get(), raw.hash_key_length, key, wrong)
    }

    fn checked(types: u32, size: u8, key: &[u8], wrong: RssError) -> Result<Self, RssError> {
        if types & !hash_type::ALL != 0 {
            return Err(RssError::Types { types });
        }
        if usize::from(size) > KEY_SIZE_MAX {
            return Err(RssError::Key { size });
        }
        if key.len() != usize::from(size) {
            return Err(wrong);
        }
        Ok(Self { types, key: key.to_vec() })
    }

    fn key_size(&self) -> u8 {
        u8::try_from(self.key.len()).unwrap_or(u8::MAX)
    }

    /// The bytes that a driver writes, `struct virtio_net_hash_config`.
    #[must_use]
    pub fn emit(&self) -> Vec<u8> {
        let (hash_types, hash_key_length) = (self.types.into(), self.key_size());
        let raw = RawHash { hash_types, reserved: [0.into(); 4], hash_key_length };
        [raw.as_bytes(), &self.key].concat()
    }
}

impl RssConfig {
    /// Parses the data of `VIRTIO_NET_CTRL_MQ_RSS_CONFIG`, which are untrusted. The device must
    /// check that the queue pairs exist: see [`Self::pairs`].
    ///
    /// # Errors
    /// [`RssError`].
    pub fn parse(data: &[u8]) -> Result<Self, RssError> {
        let wrong = RssError::Size { size: data.len() };
        let (raw, rest) = RawRss::read_from_prefix(data).map_err(|_| wrong)?;
        let mask = raw.indirection_table_mask.get();
        let len = usize::from(mask) + 1;
        if !len.is_power_of_two() || len > TABLE_LEN_MAX {
            return Err(RssError::Mask { mask });
        }
        let (table, rest) = rest.split_at_checked(len * 2).ok_or(wrong)?;
        let (transmitqs, rest) = U16::read_from_prefix(rest).map_err(|_| wrong)?;
        let (size, key) = rest.split_first().ok_or(wrong)?;
        let table = table.as_chunks().0.iter().map(|entry| u16::from_le_bytes(*entry));
        Ok(Self {
            hash: HashConfig::checked(raw.hash_types.get(), *size, key, wrong)?,
            unclassified: raw.unclassified_queue.get(),
            table: table.collect(),
            transmitqs: transmitqs.get(),
        })
    }

    /// How many queue pairs the device must have and use for this configuration. The driver may
    /// have written any number of a pair, and any `max_tx_vq`.
    #[must_use]
    pub fn pairs(&self) -> usize {
        let of = |pair: u16| usize::from(pair) + 1;
        let most = self.table.iter().copied().map(of).max().unwrap_or(0);
        most.max(of(self.unclassified)).max(usize::from(self.transmitqs))
    }

    /// The bytes that a driver writes, `struct virtio_net_rss_config`.
    #[must_use]
    pub fn emit(&self) -> Vec<u8> {
        let mask = u16::try_from(self.table.len().saturating_sub(1)).unwrap_or(u16::MAX);
        let raw = RawRss {
            hash_types: self.hash.types.into(),
            indirection_table_mask: mask.into(),
            unclassified_queue: self.unclassified.into(),
        };
        let mut bytes = raw.as_bytes().to_vec();
        bytes.extend(self.table.iter().flat_map(|pair| pair.to_le_bytes()));
        bytes.extend(self.transmitqs.to_le_bytes());
        bytes.push(self.hash.key_size());
        bytes.extend(&self.hash.key);
        bytes
    }
}

/// A Toeplitz hash with a key: for each set bit n of the input, xors the 32 bits of the key that
/// begin at bit n.
///
/// The table has a word for each of the 16 values of each half byte of input: one lookup for four
/// bits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Toeplitz(Box<[u32]>);

impl Toeplitz {
    /// The hash with this key; bits behind the key's end count as zero.
    #[must_use]
    pub fn new(key: &[u8]) -> Self {
        let bit = |at: usize| {
            let byte = key.get(at / 8).copied().unwrap_or(0);
            u32::from(byte >> (7 - at % 8) & 1)
        };
        let window = |at: usize| (at..at + 32).fold(0, |word, at| word << 1 | bit(at));
        let of = |at: usize| {
            let (half, value) = (at / 16, at % 16);
            let set = (0..4).filter(|bit| value >> (3 - bit) & 1 == 1);
            set.fold(0, |hash, bit| hash ^ window(half * 4 + bit))
        };
        Self((0..TOEPLITZ_WORDS).map(of).collect())
    }

    /// The hash of `input`; only the first 36 bytes count.
    #[must_use]
    #[inline]
    pub fn hash(&self, input: &[u8]) -> u32 {
        let halves = input.iter().flat_map(|byte| [byte >> 4, byte & 0xf]);
        let tables = self.0.as_chunks::<16>().0.iter();
        halves.zip(tables).fold(0, |hash, (half, table)| hash ^ table[usize::from(half)])
    }

    /// The table: 16 words for each half byte of the input; the high half comes first.
    #[must_use]
    pub fn words(&self) -> &[u32] {
        &self.0
    }
}

/// Computes the hash of frames by a driver's settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hasher {
    config: HashConfig,
    toeplitz: Toeplitz,
}

/// The bytes of a frame that are hashed, and the hash type.
struct Input {
    bytes: [u8; INPUT_SIZE_MAX],
    len: usize,
    report: HashReport,
}

impl Input {
    fn new(parts: [&[u8]; 2], report: HashReport) -> Self {
        let (mut bytes, mut len) = ([0; INPUT_SIZE_MAX], 0);
        for part in parts {
            if let Some(target) = bytes.get_mut(len..len + part.len()) {
                target.copy_from_slice(part);
                len += part.len();
            }
        }
        Self { bytes, len, report }
    }
}

impl Hasher {
    /// A hasher for the types and the key that a driver has set.
    #[must_use]
    pub fn new(config: HashConfig) -> Self {
        let toeplitz = Toeplitz::new(&config.key);
        Self { config, toeplitz }
    }

    /// The driver's settings of the hash.
    #[must_use]
    pub fn config(&self) -> &HashConfig {
        &self.config
    }

    /// The hash function.
    #[must_use]
    pub fn toeplitz(&self) -> &Toeplitz {
        &self.toeplitz
    }

    /// The hash of the frame that begins with `start`; [`FLOW_BYTES`](super::flow::FLOW_BYTES)
    /// bytes are enough. `HashReport::None`: the frame fits none of the hash types that the driver
    /// has set.
    #[must_use]
    #[inline]
    pub fn hash_of(&self, start: &[u8]) -> Hash {
        let Some(input) = self.input_of(start) else { return Hash::default() };
        let value = self.toeplitz.hash(&input.bytes[..input.len]);
        Hash { value, report: input.report }
    }

    /// The input of the hash: both addresses, and the ports of a whole TCP or UDP packet if the
    /// driver has set that type. `None` for a frame without an IPv4 or IPv6 packet. Extension
    /// headers of IPv6 are skipped as far as [`flow`](super::flow) skips them (§5.1.6.4.3.3: no
    /// hash type with `_EX` is offered). Behind others, only the addresses count.
    fn input_of(&self, start: &[u8]) -> Option<Input> {
        let (window, at) = packet_of(start)?;
        let kind = u16::from_be_bytes([window[ETHERNET - 2], window[ETHERNET - 1]]);
        let ip = start.get(at + ETHERNET..)?;
        if TYPES_IPV4.contains(&kind) {
            let is_whole = u16::from_be_bytes([ip[6], ip[7]]) & FRAGMENT == 0;
            let protocol = is_whole.then_some(ip[9]);
            let types = [hash_type::IPV4, hash_type::TCPV4, hash_type::UDPV4];
            let reports = [HashReport::Ipv4, HashReport::Tcpv4, HashReport::Udpv4];
            let behind = ip.get(usize::from(ip[0] & 0xf) * 4..).unwrap_or_default();
            return self.choose(&ip[12..20], (protocol, behind), types, reports);
        }
        if !TYPES_IPV6.contains(&kind) {
            return None;
        }
        let (ip, behind) = ip.split_at_checked(IPV6)?;
        let types = [hash_type::IPV6, hash_type::TCPV6, hash_type::UDPV6];
        let reports = [HashReport::Ipv6, HashReport::Tcpv6, HashReport::Udpv6];
        let (protocol, at) = behind_extensions(behind, ip[6], 0);
        let behind = behind.get(at..).unwrap_or_default();
        self.choose(&ip[8..40], (protocol, behind), types, reports)
    }

    /// The input for the first hash type that the driver has set and the packet fits: with the
    /// ports of TCP or UDP, or the addresses alone. `behind` are the bytes behind the IP header.
    fn choose(
        &self,
        addresses: &[u8],
        (protocol, behind): (Option<u8>, &[u8]),
        types: [u32; 3],
        reports: [HashReport; 3],
    ) -> Option<Input> {
        let is_set = |at: usize| self.config.types & types[at] != 0;
        let place = PROTOCOLS.iter().position(|known| Some(*known) == protocol);
        if let (Some(place), Some(ports)) = (place, behind.get(..4))
            && is_set(place + 1)
        {
            return Some(Input::new([addresses, ports], reports[place + 1]));
        }
        is_set(0).then(|| Input::new([addresses, &[]], reports[0]))
    }
}

/// Chooses the receiveq of frames by receive-side scaling.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rss {
    hasher: Hasher,
    config: RssConfig,
}

impl Rss {
    /// Uses the settings of a driver.
    #[must_use]
    pub fn new(config: RssConfig) -> Self {
        Self { hasher: Hasher::new(config.hash.clone()), config }
    }

    /// The driver's settings of receive-side scaling.
    #[must_use]
    pub fn config(&self) -> &RssConfig {
        &self.config
    }

    /// The hash by which the receiveq is chosen.
    #[must_use]
    pub fn hasher(&self) -> &Hasher {
        &self.hasher
    }

    /// The queue pair that receives the frame that begins with `start`.
    #[must_use]
    #[inline]
    pub fn pair_of(&self, start: &[u8]) -> usize {
        let Hash { value, report } = self.hasher.hash_of(start);
        let entry = crate::host_size(u64::from(value)) & (self.config.table.len() - 1);
        let known = self.config.table.get(entry).filter(|_| report != HashReport::None);
        usize::from(*known.unwrap_or(&self.config.unclassified))
    }
}

#[cfg(test)]
mod tests;
