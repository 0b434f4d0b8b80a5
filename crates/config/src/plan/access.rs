//! The permissions of a socket: owner and group, by name or number, and mode.

use crate::place::{Place, PlanError};
use crate::tables::{RawAccount, RawSocket};
use manyring_transport::vhost_user::SocketPermissions;
use nix::errno::Errno;
use nix::unistd::{Group, User};
use serde::{Serialize, Serializer};

/// Owner, group and mode of a socket that the daemon creates. If a value is not given, the socket
/// gets it as any new file does: from the process's user, group or umask.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct AccessPlan {
    /// The user id of the owner; `None`: not given.
    owner: Option<u32>,
    /// The group id; `None`: not given.
    group: Option<u32>,
    #[serde(serialize_with = "serialize_mode")]
    mode: Option<u32>,
}

impl AccessPlan {
    pub(super) fn new(raw: &RawSocket, place: &Place) -> Result<Self, PlanError> {
        let accounts = [raw.socket_owner.as_ref(), raw.socket_group.as_ref()];
        let keys = ["socket_owner", "socket_group", "socket_mode"];
        Self::of(accounts, raw.socket_mode.as_deref(), place, keys)
    }

    /// Resolves owner, group and mode; `keys` are their names in errors, in this order.
    pub(super) fn of(
        [owner, socket_group]: [Option<&RawAccount>; 2],
        socket_mode: Option<&str>,
        place: &Place,
        keys: [&'static str; 3],
    ) -> Result<Self, PlanError> {
        let user = |name: &str| Ok(User::from_name(name)?.map(|user| user.uid.as_raw()));
        let group = |name: &str| Ok(Group::from_name(name)?.map(|group| group.gid.as_raw()));
        Ok(Self {
            owner: id(owner, place, keys[0], "user", user)?,
            group: id(socket_group, place, keys[1], "group", group)?,
            mode: mode(socket_mode, place, keys[2])?,
        })
    }

    /// Returns the permissions of a control socket: its owner alone, unless group or mode is given.
    pub fn private(&self) -> SocketPermissions {
        let mode = if self.group.is_some() { 0o660 } else { 0o600 };
        SocketPermissions { mode: self.mode.or(Some(mode)), ..self.permissions() }
    }

    /// True if neither owner, group nor mode was given.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// Returns owner, group and mode in the form that the transport takes.
    pub fn permissions(&self) -> SocketPermissions {
        SocketPermissions { owner: self.owner, group: self.group, mode: self.mode }
    }
}

/// Resolves an account to its id: a number, or a name that the host knows.
fn id(
    account: Option<&RawAccount>,
    place: &Place,
    key: &'static str,
    kind: &str,
    find: impl Fn(&str) -> Result<Option<u32>, Errno>,
) -> Result<Option<u32>, PlanError> {
    let Some(RawAccount(text)) = account else { return Ok(None) };
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        // For chown(2), the id -1 means "leave the owner as it is".
        return match text.parse() {
            Ok(id) if id != u32::MAX => Ok(Some(id)),
            _ => place.error(key, format!("{text} is not between 0 and {}", u32::MAX - 1)),
        };
    }
    match find(text) {
        Ok(Some(id)) => Ok(Some(id)),
        Ok(None) => place.error(key, format!("there is no {kind} {text:?}")),
        Err(errno) => place.error(key, format!("cannot look up the {kind} {text:?}: {errno}")),
    }
}

fn mode(text: Option<&str>, place: &Place, key: &'static str) -> Result<Option<u32>, PlanError> {
    let Some(text) = text else { return Ok(None) };
    match u32::from_str_radix(text, 8) {
        Ok(mode) if mode <= 0o777 => Ok(Some(mode)),
        _ => place.error(key, format!("{text:?} is not an octal mode up to 0777")),
    }
}

#[allow(clippy::ref_option, reason = "what serde gives")]
fn serialize_mode<S: Serializer>(mode: &Option<u32>, serializer: S) -> Result<S::Ok, S::Error> {
    mode.map(|mode| format!("{mode:04o}")).serialize(serializer)
}
