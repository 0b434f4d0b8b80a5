//! `Lost`: the devices that were taken from a device process.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

/// The most names that are remembered: the last ones.
const LOST_MAX: usize = 1024;

/// The names of devices that were taken from a device process. Only the supervisor adds names,
/// never a report of the process.
#[derive(Debug, Default)]
pub(super) struct Lost(Mutex<VecDeque<String>>);

impl Lost {
    pub(super) fn add(&self, device: &str) {
        let mut lost = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        lost.retain(|name| name != device);
        if lost.len() >= LOST_MAX {
            lost.pop_front();
        }
        lost.push_back(device.to_owned());
    }

    pub(super) fn has(&self, device: &str) -> bool {
        let lost = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        lost.iter().any(|name| name == device)
    }
}
