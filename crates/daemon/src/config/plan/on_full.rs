//! The fate of a guest's writes on a full host: the key `on_full`.

use super::{Place, PlanError};
use manyring_device::blk::OnFull;
use serde::Serialize;

/// The fate of writes for which the host has no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum OnFullPlan {
    /// They wait until there is.
    Wait,
    /// The guest gets an I/O error.
    Report,
}

impl OnFullPlan {
    pub(super) fn new(raw: Option<&str>, place: &Place) -> Result<Self, PlanError> {
        match raw {
            None | Some("wait") => Ok(Self::Wait),
            Some("report") => Ok(Self::Report),
            Some(other) => {
                let problem = format!("{other:?} is neither \"wait\" nor \"report\"");
                place.error("on_full", problem)
            }
        }
    }

    /// As the device knows it.
    pub(crate) fn policy(self) -> OnFull {
        match self {
            Self::Wait => OnFull::Wait,
            Self::Report => OnFull::Report,
        }
    }
}
