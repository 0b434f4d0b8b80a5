//! The key `on_full`: whether writes wait or fail while the host's file system is full.

use super::{Place, PlanError};
use manyring_device::blk::OnFull;

pub(super) fn on_full(raw: Option<&str>, place: &Place) -> Result<OnFull, PlanError> {
    match raw {
        None | Some("wait") => Ok(OnFull::Wait),
        Some("report") => Ok(OnFull::Report),
        Some(other) => {
            let problem = format!("{other:?} is neither \"wait\" nor \"report\"");
            place.error("on_full", problem)
        }
    }
}
