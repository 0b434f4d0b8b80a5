//! The device that a request names.

use crate::refusal::Refusal;
use crate::state::State;
use axum::http::StatusCode;
use manyring_supervisor::model::{Controlled, Entry};
use std::sync::Arc;

/// The device of this name, to be changed: one that waits for another process cannot be.
pub(super) fn find(state: &State, name: &str) -> Result<Arc<Controlled>, Refusal> {
    match entry(state, name)? {
        Entry::Served(controlled) => Ok(controlled),
        Entry::Waiting(waiting) => {
            let error = format!("the device is not served yet: {}", waiting.reason);
            Err(Refusal::new(StatusCode::CONFLICT, error))
        }
    }
}

/// The device of this name, served or waiting.
pub(super) fn entry(state: &State, name: &str) -> Result<Entry, Refusal> {
    let missing = || Refusal::new(StatusCode::NOT_FOUND, format!("no device is named {name:?}"));
    state.devices.find(name).ok_or_else(missing)
}
