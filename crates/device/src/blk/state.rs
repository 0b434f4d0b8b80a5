//! What a disk's driver has set beside its rings: whether it wants write-back (§5.2.6.2).

use super::BlkDevice;
use crate::state::{Saved, StateError};
use manyring_wire::virtio::VIRTIO_ID_BLOCK;
use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, PoisonError};

/// The field `writeback`, and whether writes stay durable whatever it says: one byte each.
const CACHE_MODE: u16 = 1;

/// The cache mode of a driver that comes from another process.
#[derive(Clone, Copy, Debug)]
pub(super) struct CacheMode {
    /// The driver it belongs to has negotiated these.
    features: u64,
    writeback: bool,
    stays_durable: bool,
}

impl BlkDevice {
    pub(super) fn saved(&self) -> Saved {
        let mut saved = Saved::new(VIRTIO_ID_BLOCK, self.features.load(Ordering::Relaxed));
        let flags = [&self.writeback, &self.stays_durable];
        saved.add(CACHE_MODE, flags.map(|flag| u8::from(flag.load(Ordering::Relaxed))));
        saved
    }

    /// Takes what was saved. If its driver's features are not known yet, they come next.
    pub(super) fn take(&self, saved: &Saved) -> Result<(), StateError> {
        let mut mode = None;
        for record in &saved.records {
            let ([writeback @ (0 | 1), stays_durable @ (0 | 1)], CACHE_MODE, None) =
                (record.array()?, record.kind, mode)
            else {
                return Err(record.wrong());
            };
            let (writeback, stays_durable) = (writeback == 1, stays_durable == 1);
            mode = Some(CacheMode { features: saved.features, writeback, stays_durable });
        }
        *self.awaited() = mode;
        let features = self.features.load(Ordering::Relaxed);
        if features != 0 {
            self.adopt(features);
        }
        Ok(())
    }

    /// The driver's features are known: it goes on with what was saved for it, if these are the
    /// same. Nobody goes on with what was saved for another driver.
    pub(super) fn adopt(&self, features: u64) {
        let mode = self.awaited().take().filter(|mode| mode.features == features);
        if let Some(mode) = mode {
            self.writeback.store(mode.writeback, Ordering::Relaxed);
            self.stays_durable.store(mode.stays_durable, Ordering::Relaxed);
            self.apply_cache_mode();
        }
    }

    fn awaited(&self) -> MutexGuard<'_, Option<CacheMode>> {
        self.awaited.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
