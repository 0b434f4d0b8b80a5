//! `Ring`: a flag by which a device process wakes the supervisor's thread that divides limits
//! (`lease_holders.rs`), when devices of its groups wait for time.

use rustix::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// The flag of one device process.
#[derive(Debug, Default)]
pub struct Ring {
    has_rung: AtomicBool,
    /// The eventfd that wakes the supervisor's thread; not set while the process has no lease.
    wakes: OnceLock<Arc<OwnedFd>>,
}

impl Ring {
    /// Sets the eventfd by which [`Self::ring`] wakes the thread.
    pub fn lead_to(&self, wakes: &Arc<OwnedFd>) {
        let _ = self.wakes.set(wakes.clone());
    }

    /// Sets the flag. Wakes the thread if the flag was not set.
    pub fn ring(&self) {
        let Some(wakes) = self.wakes.get() else { return };
        if !self.has_rung.swap(true, Ordering::Relaxed) {
            let _ = rustix::io::write(wakes, &1_u64.to_ne_bytes());
        }
    }

    /// Clears the flag. Returns true if it was set, so that a device of the process waits for time.
    pub fn hear(&self) -> bool {
        self.has_rung.swap(false, Ordering::Relaxed)
    }
}
