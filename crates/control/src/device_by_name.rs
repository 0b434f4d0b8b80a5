//! Looks up the device that a request names, for resize, link, MTU and announce. PUT, PATCH and
//! DELETE look up the plan instead (`devices/carry_out.rs` of the supervisor).

use crate::refusal::Refusal;
use crate::state::State;
use axum::http::StatusCode;
use manyring_supervisor::model::{Controlled, Entry};
use std::sync::Arc;

/// Finds the device that a request wants to change. Fails with status 404 if no device has the
/// name, and with 409 if the device is not served yet.
pub(super) fn find(state: &State, name: &str) -> Result<Arc<Controlled>, Refusal> {
    match entry(state, name)? {
        Entry::Served(controlled) => Ok(controlled),
        Entry::Waiting(waiting) => {
            let error = format!("the device is not served yet: {}", waiting.reason);
            Err(Refusal::new(StatusCode::CONFLICT, error))
        }
    }
}

/// Finds the device of this name, whether it is served or waits for a resource. Fails with status
/// 404 if no device has the name.
pub(super) fn entry(state: &State, name: &str) -> Result<Entry, Refusal> {
    let missing = || Refusal::new(StatusCode::NOT_FOUND, format!("no device is named {name:?}"));
    state.devices.find(name).ok_or_else(missing)
}
