//! The vhost-user protocol: header, payloads and THE TABLE, one row per request.
//!
//! Pinned to the protocol as documented with QEMU 11.0; request 44 and the feature bits 21 and 22
//! are those of 11.1. All numbers are in the host's byte order, as the protocol demands.

mod request;

pub use request::{ConfigAccess, ParseError, Reply, Request};

use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Bytes of the message header.
pub const HEADER_SIZE: usize = 12;
/// Largest payload this back-end accepts: a config write of [`CONFIG_SIZE_MAX`] is the longest.
pub const PAYLOAD_SIZE_MAX: usize = 4096;
/// Most regions, and so file descriptors, of one `SET_MEM_TABLE`.
pub const TABLE_REGIONS_MAX: usize = 8;
/// Memory slots offered with `CONFIGURE_MEM_SLOTS`: the most that QEMU and libblkio can use.
pub const MEM_SLOTS: u64 = 509;
/// Largest config space access of one message.
pub const CONFIG_SIZE_MAX: u32 = 256;
/// Most vrings that a message can name: the index in kick, call and err messages has 8 bits.
pub const VRINGS_MAX: usize = 256;

/// Header flag bits 0..2: the protocol version.
pub const FLAG_VERSION: u32 = 1;
/// Mask of the version in the header flags.
pub const FLAG_VERSION_MASK: u32 = 3;
/// Header flag: this is a reply.
pub const FLAG_REPLY: u32 = 4;
/// Header flag: the sender wants an acknowledgement (`REPLY_ACK`).
pub const FLAG_NEED_REPLY: u32 = 8;

/// Virtio feature bit that announces the protocol features; never reaches a driver.
pub const F_PROTOCOL_FEATURES: u64 = 1 << 30;
/// Virtio feature bit of the migration log: the device marks its writes; never reaches a driver.
pub const F_LOG_ALL: u64 = 1 << 26;

/// Names a protocol feature bit and its printable name, once.
macro_rules! protocol_features {
    ($($(#[$doc:meta])* $name:ident = $bit:literal;)*) => {
        $($(#[$doc])* pub const $name: u64 = 1 << $bit;)*
        /// Every protocol feature bit of the pinned specification, with its name.
        pub const PROTOCOL_FEATURES: &[(u64, &str)] = &[$(($name, stringify!($name))),*];
    };
}

protocol_features! {
    /// `GET_QUEUE_NUM`; several queues.
    PROTOCOL_F_MQ = 0;
    /// The migration log comes as a file.
    PROTOCOL_F_LOG_SHMFD = 1;
    /// `SEND_RARP`.
    PROTOCOL_F_RARP = 2;
    /// Any request may ask for an acknowledgement.
    PROTOCOL_F_REPLY_ACK = 3;
    /// `NET_SET_MTU`.
    PROTOCOL_F_MTU = 4;
    /// The back-end request channel.
    PROTOCOL_F_BACKEND_REQ = 5;
    /// `SET_VRING_ENDIAN`.
    PROTOCOL_F_CROSS_ENDIAN = 6;
    /// Crypto sessions.
    PROTOCOL_F_CRYPTO_SESSION = 7;
    /// Postcopy migration.
    PROTOCOL_F_PAGEFAULT = 8;
    /// `GET_CONFIG`, `SET_CONFIG`.
    PROTOCOL_F_CONFIG = 9;
    /// The back-end may send file descriptors.
    PROTOCOL_F_BACKEND_SEND_FD = 10;
    /// Host notifiers.
    PROTOCOL_F_HOST_NOTIFIER = 11;
    /// In-flight tracking in shared memory.
    PROTOCOL_F_INFLIGHT_SHMFD = 12;
    /// `RESET_DEVICE`.
    PROTOCOL_F_RESET_DEVICE = 13;
    /// Kicks and calls as messages.
    PROTOCOL_F_INBAND_NOTIFICATIONS = 14;
    /// `ADD_MEM_REG`, `REM_MEM_REG`, `GET_MAX_MEM_SLOTS`.
    PROTOCOL_F_CONFIGURE_MEM_SLOTS = 15;
    /// `SET_STATUS`, `GET_STATUS`.
    PROTOCOL_F_STATUS = 16;
    /// Xen memory mappings.
    PROTOCOL_F_XEN_MMAP = 17;
    /// Shared objects.
    PROTOCOL_F_SHARED_OBJECT = 18;
    /// Device state for migration.
    PROTOCOL_F_DEVICE_STATE = 19;
    /// `GET_VRING_BASE` need not wait for requests in flight.
    PROTOCOL_F_GET_VRING_BASE_INFLIGHT = 20;
    /// Ring addresses are guest addresses.
    PROTOCOL_F_GPA_ADDRESSES = 21;
    /// Shared memory regions mapped by the back-end.
    PROTOCOL_F_SHMEM_MAP = 22;
}

/// A message header, checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Request id.
    pub request: u32,
    /// Bits `FLAG_*`: version, reply, need_reply.
    pub flags: u32,
    /// Bytes of payload that follow.
    pub size: u32,
}

impl Header {
    /// Parses the 12 bytes of a header; refuses a wrong version and a payload that is too long.
    ///
    /// # Errors
    /// [`ParseError::Version`], [`ParseError::TooLong`].
    pub fn parse(bytes: &[u8; HEADER_SIZE]) -> Result<Self, ParseError> {
        let word =
            |i: usize| u32::from_ne_bytes([bytes[i], bytes[i + 1], bytes[i + 2], bytes[i + 3]]);
        let header = Self { request: word(0), flags: word(4), size: word(8) };
        if header.flags & FLAG_VERSION_MASK != FLAG_VERSION {
            return Err(ParseError::Version { flags: header.flags });
        }
        if header.size as usize > PAYLOAD_SIZE_MAX {
            return Err(ParseError::TooLong { request: header.request, size: header.size });
        }
        Ok(header)
    }

    /// The 12 bytes of this header.
    #[must_use]
    pub fn emit(self) -> [u8; HEADER_SIZE] {
        let mut bytes = [0; HEADER_SIZE];
        bytes[0..4].copy_from_slice(&self.request.to_ne_bytes());
        bytes[4..8].copy_from_slice(&self.flags.to_ne_bytes());
        bytes[8..12].copy_from_slice(&self.size.to_ne_bytes());
        bytes
    }

    /// True if the sender set `need_reply`.
    #[must_use]
    pub const fn needs_reply(self) -> bool {
        self.flags & FLAG_NEED_REPLY != 0
    }
}

/// A vring state description.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub struct VringState {
    /// Vring index.
    pub index: u32,
    /// The size, the base or the enable flag, depending on the request.
    pub num: u32,
}

/// A vring address description; the ring addresses are user addresses of the front-end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub struct VringAddr {
    /// Vring index.
    pub index: u32,
    /// Bit 0: log writes of the used ring.
    pub flags: u32,
    /// Address of the descriptor table.
    pub descriptor: u64,
    /// Address of the used ring.
    pub used: u64,
    /// Address of the available ring.
    pub available: u64,
    /// Guest address for logging; meaningless without the log (UML sends all ones).
    pub log: u64,
}

/// A memory region description.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub struct Region {
    /// Guest physical address of the first byte.
    pub guest_addr: u64,
    /// Size in bytes.
    pub size: u64,
    /// Address of the first byte in the front-end.
    pub user_addr: u64,
    /// Offset of the first byte in the region's file.
    pub mmap_offset: u64,
}

impl Region {
    /// True if the region is not empty and no sum of its fields overflows.
    #[must_use]
    pub const fn is_sound(&self) -> bool {
        self.size != 0
            && self.guest_addr.checked_add(self.size).is_some()
            && self.user_addr.checked_add(self.size).is_some()
            && self.mmap_offset.checked_add(self.size).is_some()
    }
}

/// A description of the in-flight region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub struct InflightArea {
    /// Bytes of the region.
    pub size: u64,
    /// Offset of the first byte in the region's file.
    pub offset: u64,
    /// Number of virtqueues that have a part of the region.
    pub queues: u16,
    /// Entries of each queue's part.
    pub queue_size: u16,
    /// QEMU sends and expects these bytes too, because its structure is padded to its alignment.
    /// The structure of the specification ends before them.
    pub padding: [u16; 2],
}

/// A description of the migration log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub struct LogArea {
    /// Bytes of the log.
    pub size: u64,
    /// Offset of the first byte in the log's file.
    pub offset: u64,
}

/// The direction of a device's state, and the phase (`SET_DEVICE_STATE_FD`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub struct StateTransfer {
    /// [`STATE_SAVE`] or [`STATE_LOAD`].
    pub direction: u32,
    /// [`STATE_STOPPED`], the only phase that the specification defines.
    pub phase: u32,
}

/// Direction: from the back-end to the front-end.
pub const STATE_SAVE: u32 = 0;
/// Direction: from the front-end to the back-end.
pub const STATE_LOAD: u32 = 1;
/// Phase: all rings of the device are stopped.
pub const STATE_STOPPED: u32 = 0;
/// Answer to `SET_DEVICE_STATE_FD`: no file descriptor comes with it.
pub const STATE_NO_FD: u64 = 1 << 8;
/// Answer to `SET_DEVICE_STATE_FD` (in its lowest eight bits) and to `CHECK_DEVICE_STATE`: the
/// request failed.
pub const STATE_FAILED: u64 = 1;

/// The layout of a payload, and with it the sizes that the payload may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Payload {
    /// No payload.
    None,
    /// A `u64`.
    U64,
    /// [`VringState`].
    VringState,
    /// [`VringAddr`].
    VringAddr,
    /// Count, padding, regions; may be longer than its count (UML).
    MemTable,
    /// Padding and one [`Region`].
    MemRegion,
    /// [`LogArea`].
    Log,
    /// [`StateTransfer`].
    StateTransfer,
    /// An IOTLB message.
    Iotlb,
    /// Offset, size, flags, and as many bytes as the size says.
    Config,
    /// [`InflightArea`], with or without its padding.
    Inflight,
    /// Any size: the table only names the request.
    Opaque,
}

impl Payload {
    /// Smallest and largest payload in bytes.
    #[must_use]
    pub const fn sizes(self) -> (usize, usize) {
        match self {
            Self::None => (0, 0),
            Self::U64 | Self::VringState | Self::StateTransfer => (8, 8),
            Self::VringAddr | Self::MemRegion => (40, 40),
            Self::MemTable => (8, 8 + TABLE_REGIONS_MAX * size_of::<Region>()),
            Self::Log => (16, 16),
            Self::Iotlb => (32, 32),
            // A size beyond the config space passes here too. The answer then says that the access
            // failed, and the session goes on.
            Self::Config => (12, PAYLOAD_SIZE_MAX),
            Self::Inflight => (20, 24),
            Self::Opaque => (0, PAYLOAD_SIZE_MAX),
        }
    }
}

/// How many file descriptors a message has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fds {
    /// None.
    None,
    /// Exactly one.
    One,
    /// One, or none if bit 8 of the payload is set.
    OneUnlessFlag,
    /// One for each region of the table.
    PerRegion,
    /// None or one: the request is not served, and the descriptor is closed.
    Any,
}

impl Fds {
    /// The largest number of file descriptors.
    #[must_use]
    pub const fn count_max(self) -> usize {
        match self {
            Self::None => 0,
            Self::One | Self::OneUnlessFlag | Self::Any => 1,
            Self::PerRegion => TABLE_REGIONS_MAX,
        }
    }
}

/// One row of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// Request id.
    pub id: u32,
    /// Name as in the specification, without `VHOST_USER_`.
    pub name: &'static str,
    /// Shape of the payload.
    pub payload: Payload,
    /// How many file descriptors a message has.
    pub fds: Fds,
    /// True if the request has a reply of its own, so that `REPLY_ACK` does not apply.
    pub replies: bool,
    /// Protocol features, at least one of which must be negotiated; 0: none is needed.
    pub needs: u64,
    /// True if this back-end serves the request.
    pub served: bool,
}

const fn row(id: u32, name: &'static str, payload: Payload, fds: Fds) -> Row {
    Row { id, name, payload, fds, replies: false, needs: 0, served: true }
}

impl Row {
    const fn replies(self) -> Self {
        Self { replies: true, ..self }
    }
    const fn needs(self, features: u64) -> Self {
        Self { needs: features, ..self }
    }
    const fn not_served(self) -> Self {
        Self { served: false, ..self }
    }
}

/// THE TABLE: every request of a front-end, by id. Row `n` is request `n + 1`.
#[rustfmt::skip]
pub const REQUESTS: [Row; 44] = [
    row(1, "GET_FEATURES", Payload::None, Fds::None).replies(),
    row(2, "SET_FEATURES", Payload::U64, Fds::None),
    row(3, "SET_OWNER", Payload::None, Fds::None),
    row(4, "RESET_OWNER", Payload::None, Fds::None),
    row(5, "SET_MEM_TABLE", Payload::MemTable, Fds::PerRegion),
    row(6, "SET_LOG_BASE", Payload::Log, Fds::One).replies().needs(PROTOCOL_F_LOG_SHMFD),
    row(7, "SET_LOG_FD", Payload::None, Fds::One).needs(PROTOCOL_F_LOG_SHMFD),
    row(8, "SET_VRING_NUM", Payload::VringState, Fds::None),
    row(9, "SET_VRING_ADDR", Payload::VringAddr, Fds::None),
    row(10, "SET_VRING_BASE", Payload::VringState, Fds::None),
    row(11, "GET_VRING_BASE", Payload::VringState, Fds::None).replies(),
    row(12, "SET_VRING_KICK", Payload::U64, Fds::OneUnlessFlag),
    row(13, "SET_VRING_CALL", Payload::U64, Fds::OneUnlessFlag),
    row(14, "SET_VRING_ERR", Payload::U64, Fds::OneUnlessFlag),
    row(15, "GET_PROTOCOL_FEATURES", Payload::None, Fds::None).replies(),
    row(16, "SET_PROTOCOL_FEATURES", Payload::U64, Fds::None),
    row(17, "GET_QUEUE_NUM", Payload::None, Fds::None).replies().needs(PROTOCOL_F_MQ),
    row(18, "SET_VRING_ENABLE", Payload::VringState, Fds::None),
    row(19, "SEND_RARP", Payload::U64, Fds::None).needs(PROTOCOL_F_RARP),
    row(20, "NET_SET_MTU", Payload::U64, Fds::None).needs(PROTOCOL_F_MTU),
    row(21, "SET_BACKEND_REQ_FD", Payload::None, Fds::One).needs(PROTOCOL_F_BACKEND_REQ),
    row(22, "IOTLB_MSG", Payload::Iotlb, Fds::None).replies().not_served(),
    row(23, "SET_VRING_ENDIAN", Payload::VringState, Fds::None)
        .needs(PROTOCOL_F_CROSS_ENDIAN).not_served(),
    row(24, "GET_CONFIG", Payload::Config, Fds::None).replies().needs(PROTOCOL_F_CONFIG),
    row(25, "SET_CONFIG", Payload::Config, Fds::None).needs(PROTOCOL_F_CONFIG),
    row(26, "CREATE_CRYPTO_SESSION", Payload::Opaque, Fds::None)
        .replies().needs(PROTOCOL_F_CRYPTO_SESSION).not_served(),
    row(27, "CLOSE_CRYPTO_SESSION", Payload::U64, Fds::None)
        .needs(PROTOCOL_F_CRYPTO_SESSION).not_served(),
    row(28, "POSTCOPY_ADVISE", Payload::None, Fds::None)
        .replies().needs(PROTOCOL_F_PAGEFAULT).not_served(),
    row(29, "POSTCOPY_LISTEN", Payload::None, Fds::None).needs(PROTOCOL_F_PAGEFAULT).not_served(),
    row(30, "POSTCOPY_END", Payload::None, Fds::None)
        .replies().needs(PROTOCOL_F_PAGEFAULT).not_served(),
    row(31, "GET_INFLIGHT_FD", Payload::Inflight, Fds::None)
        .replies().needs(PROTOCOL_F_INFLIGHT_SHMFD),
    row(32, "SET_INFLIGHT_FD", Payload::Inflight, Fds::One).needs(PROTOCOL_F_INFLIGHT_SHMFD),
    row(33, "GPU_SET_SOCKET", Payload::None, Fds::Any).not_served(),
    row(34, "RESET_DEVICE", Payload::None, Fds::None).needs(PROTOCOL_F_RESET_DEVICE),
    row(35, "VRING_KICK", Payload::VringState, Fds::None)
        .needs(PROTOCOL_F_INBAND_NOTIFICATIONS).not_served(),
    row(36, "GET_MAX_MEM_SLOTS", Payload::None, Fds::None)
        .replies().needs(PROTOCOL_F_CONFIGURE_MEM_SLOTS),
    row(37, "ADD_MEM_REG", Payload::MemRegion, Fds::One).needs(PROTOCOL_F_CONFIGURE_MEM_SLOTS),
    row(38, "REM_MEM_REG", Payload::MemRegion, Fds::Any).needs(PROTOCOL_F_CONFIGURE_MEM_SLOTS),
    row(39, "SET_STATUS", Payload::U64, Fds::None).needs(PROTOCOL_F_STATUS),
    row(40, "GET_STATUS", Payload::None, Fds::None).replies().needs(PROTOCOL_F_STATUS),
    row(41, "GET_SHARED_OBJECT", Payload::Opaque, Fds::None)
        .replies().needs(PROTOCOL_F_SHARED_OBJECT).not_served(),
    row(42, "SET_DEVICE_STATE_FD", Payload::StateTransfer, Fds::One)
        .replies().needs(PROTOCOL_F_DEVICE_STATE),
    row(43, "CHECK_DEVICE_STATE", Payload::None, Fds::None)
        .replies().needs(PROTOCOL_F_DEVICE_STATE),
    row(44, "GET_SHMEM_CONFIG", Payload::None, Fds::None)
        .replies().needs(PROTOCOL_F_SHMEM_MAP).not_served(),
];

/// The row of a request id. `None`: the table has no such request.
#[must_use]
pub fn row_of(request: u32) -> Option<&'static Row> {
    REQUESTS.get(request.checked_sub(1)? as usize)
}

/// Back-end request: the config space has changed.
pub const BACKEND_CONFIG_CHANGE_MSG: u32 = 2;

#[cfg(test)]
mod tests;
