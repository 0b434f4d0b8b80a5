//! The keys of a limit: of a device, or of a group of devices.

use super::place::{Place, PlanError};

/// What a limit limits: a disk, a network device, or a group of devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Of {
    Disk,
    Net,
    /// A group: its keys decide whether it limits disks or network devices.
    Group,
}

/// The field of the engine's `Rates` that a key sets, with the index in `ops` or `bytes`.
#[derive(Clone, Copy)]
pub(super) enum Slot {
    Ops(usize),
    Bytes(usize),
    Burst,
}

pub(super) const DISK: [(&str, Slot); 6] = [
    ("read_iops", Slot::Ops(0)),
    ("write_iops", Slot::Ops(1)),
    ("iops", Slot::Ops(2)),
    ("read_bps", Slot::Bytes(0)),
    ("write_bps", Slot::Bytes(1)),
    ("bps", Slot::Bytes(2)),
];
pub(super) const NET: [(&str, Slot); 4] = [
    ("tx_pps", Slot::Ops(0)),
    ("rx_pps", Slot::Ops(1)),
    ("tx_bps", Slot::Bytes(0)),
    ("rx_bps", Slot::Bytes(1)),
];
const BOTH: [(&str, Slot); 1] = [("burst_ms", Slot::Burst)];

impl Of {
    fn keys(self) -> Vec<(&'static str, Slot)> {
        let own: &[&[_]] = match self {
            Self::Disk => &[&DISK, &BOTH],
            Self::Net => &[&NET, &BOTH],
            Self::Group => &[&DISK, &NET, &BOTH],
        };
        own.concat()
    }

    /// Returns the name of a key as errors show it.
    pub(super) fn path(self, key: &str) -> String {
        if self == Self::Group { key.to_owned() } else { format!("limit.{key}") }
    }

    /// Finds a key of a limit. `None`: the key is `group`, which only the limit of a device has.
    /// Fails if there is no such key.
    pub(super) fn find(
        self,
        key: &str,
        place: &Place,
    ) -> Result<Option<(&'static str, Slot)>, PlanError> {
        let known = self.keys();
        let is_group = key == "group" && self != Self::Group;
        let found = known.iter().find(|(name, _)| *name == key).copied();
        if found.is_some() || is_group {
            return Ok(found);
        }
        let names: Vec<_> = known.iter().map(|(name, _)| *name).collect();
        let group = if self == Self::Group { "" } else { ", group" };
        let problem = format!("unknown key; there are {}{group}", names.join(", "));
        place.error(&self.path(key), problem)
    }
}

/// Returns the names of all keys of a limit, in the order of the documentation.
pub(crate) fn limit_keys() -> impl Iterator<Item = &'static str> {
    Of::Group.keys().into_iter().map(|(name, _)| name).chain(["group"])
}

pub(super) fn slot_of(key: &str) -> Option<Slot> {
    Of::Group.keys().into_iter().find(|(name, _)| *name == key).map(|(_, slot)| slot)
}
