//! `Request`: a client's request to xenstore, parsed and emitted.

use super::{
    ErrorName, Message, Path, Permission, StoreHeader, StoreMessageError, StoreOp, Watched,
};
use super::{append, number, strings};

/// A request, parsed: its paths, numbers and permissions are right.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "named as the operations, fields as the specification's")]
pub enum Request<'a> {
    Directory(Path<'a>),
    /// The children of a node from byte `offset` of their list on.
    DirectoryPart {
        path: Path<'a>,
        offset: u32,
    },
    Read(Path<'a>),
    GetPerms(Path<'a>),
    /// `depth`: how many levels below the node a change may lie; `None`: any number.
    Watch {
        watched: Watched<'a>,
        token: &'a [u8],
        depth: Option<u32>,
    },
    Unwatch {
        watched: Watched<'a>,
        token: &'a [u8],
    },
    TransactionStart,
    TransactionEnd {
        commit: bool,
    },
    Introduce {
        domain: u16,
        gfn: i64,
        port: u32,
    },
    Release(u16),
    GetDomainPath(u16),
    Write {
        path: Path<'a>,
        value: &'a [u8],
    },
    Mkdir(Path<'a>),
    Rm(Path<'a>),
    SetPerms {
        path: Path<'a>,
        permissions: Vec<Permission>,
    },
    IsDomainIntroduced(u16),
    Resume(u16),
    SetTarget {
        domain: u16,
        target: u16,
    },
    ResetWatches,
    /// An operation that a server need not support: `CONTROL`, features and quotas.
    Optional(StoreOp, &'a [u8]),
}

impl<'a> Request<'a> {
    /// Parses a request.
    ///
    /// # Errors
    /// The error to refuse the request with: [`ErrorName::Enosys`] for an operation that clients
    /// cannot send, else [`ErrorName::Einval`].
    pub fn parse(message: &Message<'a>) -> Result<Self, ErrorName> {
        let op = StoreOp::from_id(message.header.kind).ok_or(ErrorName::Enosys)?;
        match op {
            StoreOp::Error | StoreOp::WatchEvent => Err(ErrorName::Enosys),
            StoreOp::TransactionStart if message.header.tx_id != 0 => Err(ErrorName::Ebusy),
            _ => Self::parse_payload(op, message.payload).ok_or(ErrorName::Einval),
        }
    }

    fn parse_payload(op: StoreOp, payload: &'a [u8]) -> Option<Self> {
        let path = || Path::parse(only(payload)?).ok();
        let domain = || number(only(payload)?);
        Some(match op {
            StoreOp::Directory => Self::Directory(path()?),
            StoreOp::DirectoryPart => {
                let [path, offset] = first(payload)?;
                Self::DirectoryPart { path: Path::parse(path).ok()?, offset: number(offset)? }
            }
            StoreOp::Read => Self::Read(path()?),
            StoreOp::GetPerms => Self::GetPerms(path()?),
            StoreOp::Watch => {
                let [watched, token] = first(payload)?;
                // An empty third string is the reserved field, from a client that does not know
                // `depth`.
                let depth = match strings(payload).nth(2) {
                    None | Some([]) => None,
                    Some(depth) => Some(number(depth)?),
                };
                Self::Watch { watched: Watched::parse(watched).ok()?, token, depth }
            }
            StoreOp::Unwatch => {
                let [watched, token] = first(payload)?;
                Self::Unwatch { watched: Watched::parse(watched).ok()?, token }
            }
            StoreOp::TransactionStart => Self::TransactionStart,
            StoreOp::TransactionEnd => match only(payload)? {
                b"T" => Self::TransactionEnd { commit: true },
                b"F" => Self::TransactionEnd { commit: false },
                _ => return None,
            },
            StoreOp::Introduce => {
                let [domain, gfn, port] = first(payload)?;
                Self::Introduce { domain: number(domain)?, gfn: signed(gfn)?, port: number(port)? }
            }
            StoreOp::Release => Self::Release(domain()?),
            StoreOp::GetDomainPath => Self::GetDomainPath(domain()?),
            StoreOp::Write => {
                let end = payload.iter().position(|byte| *byte == 0)?;
                Self::Write { path: Path::parse(&payload[..end]).ok()?, value: &payload[end + 1..] }
            }
            StoreOp::Mkdir => Self::Mkdir(path()?),
            StoreOp::Rm => Self::Rm(path()?),
            StoreOp::SetPerms => {
                let mut strings = strings(payload);
                let path = Path::parse(strings.next()?).ok()?;
                let permissions: Vec<_> = strings.map(Permission::parse).collect::<Option<_>>()?;
                (!permissions.is_empty()).then_some(Self::SetPerms { path, permissions })?
            }
            StoreOp::IsDomainIntroduced => Self::IsDomainIntroduced(domain()?),
            StoreOp::Resume => Self::Resume(domain()?),
            StoreOp::SetTarget => {
                let [domain, target] = first(payload)?;
                Self::SetTarget { domain: number(domain)?, target: number(target)? }
            }
            StoreOp::ResetWatches => Self::ResetWatches,
            StoreOp::Control
            | StoreOp::GetFeature
            | StoreOp::SetFeature
            | StoreOp::GetQuota
            | StoreOp::SetQuota => Self::Optional(op, payload),
            StoreOp::WatchEvent | StoreOp::Error => return None,
        })
    }

    /// The operation of this request.
    #[must_use]
    pub const fn op(&self) -> StoreOp {
        match self {
            Self::Directory(_) => StoreOp::Directory,
            Self::DirectoryPart { .. } => StoreOp::DirectoryPart,
            Self::Read(_) => StoreOp::Read,
            Self::GetPerms(_) => StoreOp::GetPerms,
            Self::Watch { .. } => StoreOp::Watch,
            Self::Unwatch { .. } => StoreOp::Unwatch,
            Self::TransactionStart => StoreOp::TransactionStart,
            Self::TransactionEnd { .. } => StoreOp::TransactionEnd,
            Self::Introduce { .. } => StoreOp::Introduce,
            Self::Release(_) => StoreOp::Release,
            Self::GetDomainPath(_) => StoreOp::GetDomainPath,
            Self::Write { .. } => StoreOp::Write,
            Self::Mkdir(_) => StoreOp::Mkdir,
            Self::Rm(_) => StoreOp::Rm,
            Self::SetPerms { .. } => StoreOp::SetPerms,
            Self::IsDomainIntroduced(_) => StoreOp::IsDomainIntroduced,
            Self::Resume(_) => StoreOp::Resume,
            Self::SetTarget { .. } => StoreOp::SetTarget,
            Self::ResetWatches => StoreOp::ResetWatches,
            Self::Optional(op, _) => *op,
        }
    }

    /// Appends the request, with the number `req_id`, which the reply repeats. `tx_id` is the
    /// transaction, or 0 for none.
    ///
    /// # Errors
    /// [`StoreMessageError::TooLong`], [`StoreMessageError::Nul`]: nothing was appended.
    pub fn emit(
        &self,
        req_id: u32,
        tx_id: u32,
        out: &mut Vec<u8>,
    ) -> Result<(), StoreMessageError> {
        let header = StoreHeader { kind: self.op().id(), req_id, tx_id, size: 0 };
        append(out, header, &self.payload()?)
    }

    fn payload(&self) -> Result<Vec<u8>, StoreMessageError> {
        let token_of = |watched: &Watched<'_>, token: &[u8]| {
            if token.contains(&0) {
                return Err(StoreMessageError::Nul { name: self.op().name() });
            }
            Ok([watched.as_str().as_bytes(), b"\0", token, b"\0"].concat())
        };
        Ok(match self {
            Self::Directory(path)
            | Self::Read(path)
            | Self::GetPerms(path)
            | Self::Mkdir(path)
            | Self::Rm(path) => format!("{path}\0").into_bytes(),
            Self::DirectoryPart { path, offset } => format!("{path}\0{offset}\0").into_bytes(),
            Self::Watch { watched, token, depth } => {
                let mut payload = token_of(watched, token)?;
                if let Some(depth) = depth {
                    payload.extend_from_slice(format!("{depth}\0").as_bytes());
                }
                payload
            }
            Self::Unwatch { watched, token } => token_of(watched, token)?,
            Self::TransactionStart | Self::ResetWatches => b"\0".to_vec(),
            Self::TransactionEnd { commit } => if *commit { b"T\0" } else { b"F\0" }.to_vec(),
            Self::Introduce { domain, gfn, port } => {
                format!("{domain}\0{gfn}\0{port}\0").into_bytes()
            }
            Self::Release(domain)
            | Self::GetDomainPath(domain)
            | Self::IsDomainIntroduced(domain)
            | Self::Resume(domain) => format!("{domain}\0").into_bytes(),
            Self::Write { path, value } => [path.as_str().as_bytes(), b"\0", value].concat(),
            Self::SetPerms { path, permissions } => {
                let list = permissions.iter().map(|entry| format!("{entry}\0"));
                [format!("{path}\0")].into_iter().chain(list).collect::<String>().into_bytes()
            }
            Self::SetTarget { domain, target } => format!("{domain}\0{target}\0").into_bytes(),
            Self::Optional(_, payload) => payload.to_vec(),
        })
    }
}

/// The string of a payload that has only one. With two strings, the result has a nul byte in it,
/// which is refused in a path and in a number.
fn only(payload: &[u8]) -> Option<&[u8]> {
    let (nul, string) = payload.split_last()?;
    (*nul == 0).then_some(string)
}

/// The first `N` strings of a payload; more may follow.
fn first<const N: usize>(payload: &[u8]) -> Option<[&[u8]; N]> {
    let mut strings = strings(payload);
    let mut found = [&payload[..0]; N];
    for place in &mut found {
        *place = strings.next()?;
    }
    Some(found)
}

/// A decimal number that may be negative.
fn signed(text: &[u8]) -> Option<i64> {
    match text.strip_prefix(b"-") {
        Some(digits) => number::<i64>(digits).map(|n| -n),
        None => number(text),
    }
}
