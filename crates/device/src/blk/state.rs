//! The state of a block driver that is not in its rings: its cache mode (§5.2.6.2).

use super::BlkDevice;
use crate::state::{Saved, StateError};
use manyring_wire::virtio::VIRTIO_ID_BLOCK;
use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, PoisonError};

/// Kind of the record with two bytes: the field `writeback`, and [`BlkDevice::stays_durable`].
const CACHE_MODE: u16 = 1;

/// The cache mode of a driver, as another process has saved it.
#[derive(Clone, Copy, Debug)]
pub(super) struct CacheMode {
    /// The features that this driver has negotiated.
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

    /// Adopts a saved cache mode if the driver's features are known; otherwise stores it until they
    /// are.
    ///
    /// # Errors
    /// [`StateError`]: the record is malformed.
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

    /// Adopts the stored cache mode, if the driver's features are those saved with it. Otherwise
    /// the mode belongs to another driver, and is dropped.
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
