//! `Ring`: whether a device process has said that devices of its groups need something, for the
//! thread that divides (`leases.rs`).

use rustix::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// See the module.
#[derive(Debug, Default)]
pub struct Ring {
    has_rung: AtomicBool,
    /// An eventfd of the supervisor's own; not set: the process has no lease.
    wakes: OnceLock<Arc<OwnedFd>>,
}

impl Ring {
    /// The process rings whoever waits for this eventfd.
    pub fn lead_to(&self, wakes: &Arc<OwnedFd>) {
        let _ = self.wakes.set(wakes.clone());
    }

    /// The process has rung.
    pub fn ring(&self) {
        let Some(wakes) = self.wakes.get() else { return };
        if !self.has_rung.swap(true, Ordering::Relaxed) {
            let _ = rustix::io::write(wakes, &1_u64.to_ne_bytes());
        }
    }

    /// Whether the process has rung since the last call.
    pub fn hear(&self) -> bool {
        self.has_rung.swap(false, Ordering::Relaxed)
    }
}
