//! Payloads: a request parsed, a reply emitted.

use super::{
    CONFIG_SIZE_MAX, FLAG_REPLY, FLAG_VERSION, Fds, Header, InflightArea, LogArea, Region, Row,
    StateTransfer, VringAddr, VringState,
};
use zerocopy::{FromBytes, IntoBytes};

/// Payload bit of kick, call and err messages: there is no file descriptor; poll instead.
const VRING_NOFD: u64 = 1 << 8;
/// Payload bits of kick, call and err that hold the vring index.
const VRING_INDEX_MASK: u64 = 0xff;

/// An access to the config space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConfigAccess {
    /// Offset of the first byte in the config space.
    pub offset: u32,
    /// Number of bytes.
    pub size: u32,
    /// 0: a driver's write to writable fields; 1: live migration.
    pub flags: u32,
}

/// A request that is served, parsed: its sizes, counts and sums are checked.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "named as the rows of the table, fields as the specification's")]
pub enum Request {
    GetFeatures,
    SetFeatures(u64),
    SetOwner,
    ResetOwner,
    SetMemTable(Vec<Region>),
    SetLogBase(LogArea),
    SetLogFd,
    SetVringNum(VringState),
    SetVringAddr(VringAddr),
    SetVringBase(VringState),
    GetVringBase(VringState),
    SetVringKick {
        index: usize,
        fd: bool,
    },
    SetVringCall {
        index: usize,
        fd: bool,
    },
    SetVringErr {
        index: usize,
        fd: bool,
    },
    GetProtocolFeatures,
    SetProtocolFeatures(u64),
    GetQueueNum,
    SetVringEnable(VringState),
    SendRarp([u8; 6]),
    NetSetMtu(u64),
    SetBackendReqFd,
    GetConfig(ConfigAccess),
    SetConfig(ConfigAccess, Vec<u8>),
    /// The area, and the size of the payload in bytes; the reply has the same size.
    GetInflightFd(InflightArea, usize),
    SetInflightFd(InflightArea),
    ResetDevice,
    GetMaxMemSlots,
    AddMemReg(Region),
    RemMemReg(Region),
    SetStatus(u64),
    GetStatus,
    SetDeviceStateFd(StateTransfer),
    CheckDeviceState,
}

/// Why a message of the front-end cannot be parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the Display text says what each field is")]
pub enum ParseError {
    #[error("header flags {flags:#x} name no known protocol version")]
    Version { flags: u32 },
    #[error("request {request} has a payload of {size} bytes, more than any request has")]
    TooLong { request: u32, size: u32 },
    #[error("request {request} is not in the table")]
    Unknown { request: u32 },
    #[error("{name} is not served")]
    NotServed { name: &'static str },
    #[error("{name} has a payload of {size} bytes")]
    Size { name: &'static str, size: usize },
    #[error("{name} with {count} regions in {size} bytes")]
    Regions { name: &'static str, count: u32, size: usize },
    #[error("{name} with an empty or overflowing region")]
    Region { name: &'static str },
    #[error("{name} of {size} bytes at offset {offset} of the config space, with {payload} bytes")]
    Config { name: &'static str, offset: u32, size: u32, payload: usize },
    #[error("{name} with {count} file descriptors, {expected} expected")]
    Fds { name: &'static str, count: usize, expected: usize },
}

impl Request {
    /// Parses the payload of `row` that came with `fds` file descriptors.
    ///
    /// # Errors
    /// [`ParseError`]: a size, count or sum that is wrong, or a row that is not served.
    pub fn parse(row: &'static Row, payload: &[u8], fds: usize) -> Result<Self, ParseError> {
        let name = row.name;
        let size = payload.len();
        let (min, max) = row.payload.sizes();
        if size < min || size > max {
            return Err(ParseError::Size { name, size });
        }
        if !row.served {
            return Err(ParseError::NotServed { name });
        }
        let request = Self::parse_payload(row, payload)?;
        let expected = match (&request, row.fds) {
            (Self::SetMemTable(regions), _) => regions.len(),
            (Self::SetVringKick { fd, .. }, _)
            | (Self::SetVringCall { fd, .. }, _)
            | (Self::SetVringErr { fd, .. }, _) => usize::from(*fd),
            (_, Fds::One) => 1,
            (_, Fds::Any) => fds,
            _ => 0,
        };
        if fds != expected {
            return Err(ParseError::Fds { name, count: fds, expected });
        }
        Ok(request)
    }

    fn parse_payload(row: &'static Row, payload: &[u8]) -> Result<Self, ParseError> {
        let name = row.name;
        let size = payload.len();
        let wrong_size = ParseError::Size { name, size };
        let number = || u64::read_from_bytes(payload).map_err(|_| wrong_size);
        let state = || VringState::read_from_bytes(payload).map_err(|_| wrong_size);
        let vring = || {
            let value = number()?;
            let index = crate::host_size(value & VRING_INDEX_MASK);
            Ok::<_, ParseError>((index, value & VRING_NOFD == 0))
        };
        Ok(match row.id {
            1 => Self::GetFeatures,
            2 => Self::SetFeatures(number()?),
            3 => Self::SetOwner,
            4 => Self::ResetOwner,
            5 => Self::SetMemTable(parse_table(name, payload)?),
            6 => Self::SetLogBase(LogArea::read_from_bytes(payload).map_err(|_| wrong_size)?),
            7 => Self::SetLogFd,
            8 => Self::SetVringNum(state()?),
            9 => Self::SetVringAddr(VringAddr::read_from_bytes(payload).map_err(|_| wrong_size)?),
            10 => Self::SetVringBase(state()?),
            11 => Self::GetVringBase(state()?),
            12 => vring().map(|(index, fd)| Self::SetVringKick { index, fd })?,
            13 => vring().map(|(index, fd)| Self::SetVringCall { index, fd })?,
            14 => vring().map(|(index, fd)| Self::SetVringErr { index, fd })?,
            15 => Self::GetProtocolFeatures,
            16 => Self::SetProtocolFeatures(number()?),
            17 => Self::GetQueueNum,
            18 => Self::SetVringEnable(state()?),
            19 => {
                let [a, b, c, d, e, f, ..] = number()?.to_ne_bytes();
                Self::SendRarp([a, b, c, d, e, f])
            }
            20 => Self::NetSetMtu(number()?),
            21 => Self::SetBackendReqFd,
            24 => Self::GetConfig(parse_config(name, payload)?.0),
            25 => parse_config(name, payload).map(|(access, b)| Self::SetConfig(access, b))?,
            31 => Self::GetInflightFd(parse_inflight(name, payload)?, size),
            32 => Self::SetInflightFd(parse_inflight(name, payload)?),
            34 => Self::ResetDevice,
            36 => Self::GetMaxMemSlots,
            37 => Self::AddMemReg(parse_region(name, payload)?),
            38 => Self::RemMemReg(parse_region(name, payload)?),
            39 => Self::SetStatus(number()?),
            40 => Self::GetStatus,
            42 => Self::SetDeviceStateFd(
                StateTransfer::read_from_bytes(payload).map_err(|_| wrong_size)?,
            ),
            43 => Self::CheckDeviceState,
            _ => return Err(ParseError::NotServed { name }),
        })
    }
}

/// Parses count, padding and regions. The payload may be longer than the count says, as UML's is. A
/// count too large for the payload is refused.
fn parse_table(name: &'static str, payload: &[u8]) -> Result<Vec<Region>, ParseError> {
    let size = payload.len();
    let (count, rest) =
        u32::read_from_prefix(payload).map_err(|_| ParseError::Size { name, size })?;
    let wrong = ParseError::Regions { name, count, size };
    let body = rest.get(4..).ok_or(wrong)?;
    if count as usize > body.len() / size_of::<Region>() {
        return Err(wrong);
    }
    let regions: Vec<Region> = body
        .chunks_exact(size_of::<Region>())
        .take(count as usize)
        .filter_map(|bytes| Region::read_from_bytes(bytes).ok())
        .collect();
    if regions.iter().all(Region::is_sound) {
        Ok(regions)
    } else {
        Err(ParseError::Region { name })
    }
}

fn parse_region(name: &'static str, payload: &[u8]) -> Result<Region, ParseError> {
    let region = payload
        .get(8..)
        .and_then(|bytes| Region::read_from_bytes(bytes).ok())
        .ok_or(ParseError::Size { name, size: payload.len() })?;
    if region.is_sound() { Ok(region) } else { Err(ParseError::Region { name }) }
}

fn parse_inflight(name: &'static str, payload: &[u8]) -> Result<InflightArea, ParseError> {
    let mut area = InflightArea::default();
    let wrong = ParseError::Size { name, size: payload.len() };
    area.as_mut_bytes().get_mut(..payload.len()).ok_or(wrong)?.copy_from_slice(payload);
    Ok(area)
}

fn parse_config(name: &'static str, payload: &[u8]) -> Result<(ConfigAccess, Vec<u8>), ParseError> {
    let wrong = ParseError::Size { name, size: payload.len() };
    let (words, body) = <[u32; 3]>::read_from_prefix(payload).map_err(|_| wrong)?;
    let [offset, size, flags] = words;
    let in_space = offset.checked_add(size).is_some_and(|end| end <= CONFIG_SIZE_MAX);
    if !in_space || size as usize != body.len() {
        return Err(ParseError::Config { name, offset, size, payload: body.len() });
    }
    Ok((ConfigAccess { offset, size, flags }, body.to_vec()))
}

/// The payload of a reply, or of a back-end request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// A `u64`; also an acknowledgement, where 0 means success.
    U64(u64),
    /// A vring state.
    VringState(VringState),
    /// A config space read: the access and its bytes. An access of size 0 says that the read
    /// failed.
    Config(ConfigAccess, Vec<u8>),
    /// An in-flight region, and the size of the payload in bytes.
    Inflight(InflightArea, usize),
}

impl Reply {
    /// The bytes of the payload.
    #[must_use]
    pub fn emit(&self) -> Vec<u8> {
        match self {
            Self::U64(value) => value.to_ne_bytes().to_vec(),
            Self::VringState(state) => state.as_bytes().to_vec(),
            Self::Inflight(area, size) => area.as_bytes().iter().copied().take(*size).collect(),
            Self::Config(access, bytes) => {
                let mut payload = Vec::with_capacity(12 + bytes.len());
                for word in [access.offset, access.size, access.flags] {
                    payload.extend_from_slice(&word.to_ne_bytes());
                }
                payload.extend_from_slice(bytes);
                payload
            }
        }
    }

    /// A whole reply message to `request`.
    #[must_use]
    #[allow(clippy::cast_possible_truncation, reason = "payloads are at most PAYLOAD_SIZE_MAX")]
    pub fn message(&self, request: u32) -> Vec<u8> {
        let payload = self.emit();
        let flags = FLAG_VERSION | FLAG_REPLY;
        let mut message = Header { request, flags, size: payload.len() as u32 }.emit().to_vec();
        message.extend_from_slice(&payload);
        message
    }
}
