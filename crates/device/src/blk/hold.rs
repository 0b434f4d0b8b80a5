//! `Hold`: for a disk with `lock_with_rings`, holds the image's lock while any ring runs.
//!
//! ```text
//! first ring starts:   lock the image; if it is locked, retry for 5 s, then log by whom
//! still locked:        the ring does not start; the transport retries later, with one attempt each
//! last ring stopped:   nothing is in flight: flush the image, unlock it
//! ```
//! So the guest's front-end decides which of two daemons serves an image: it stops the rings on one
//! host before it starts them on the other. Two guests cannot run on the image at once.

use crate::StartError;
use manyring_backend::blk::{Disk, ImageError};
use manyring_engine::aside;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Mutex;
use tokio::time::Instant;

/// How long a ring waits for the image's lock, while its guest is blocked. In a migration, the
/// source unlocks the image before QEMU resumes the guest at the destination. The lock of a killed
/// process is released within milliseconds.
const TIMEOUT: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(10);

/// The running rings of a disk. The mutex is held while the image is locked or unlocked.
#[derive(Debug, Default)]
pub(super) struct Hold(Mutex<Rings>);

#[derive(Debug, Default)]
struct Rings {
    count: usize,
    /// True after a wait for the image's lock has failed and the failure was logged.
    is_missed: bool,
}

impl Hold {
    /// Counts a ring that starts; the first one locks the image.
    ///
    /// # Errors
    /// [`StartError::Image`]: the image is locked elsewhere; the log says where. The caller may try
    /// again.
    pub(super) async fn begin(&self, disk: &Arc<dyn Disk>, device: &str) -> Result<(), StartError> {
        let mut rings = self.0.lock().await;
        if rings.count == 0 {
            rings.acquire(disk, device).await?;
        }
        rings.count += 1;
        Ok(())
    }

    /// Counts a ring that has stopped, or failed to start; the last one unlocks the image.
    pub(super) async fn end(&self, disk: &Arc<dyn Disk>) {
        let mut rings = self.0.lock().await;
        rings.count = rings.count.saturating_sub(1);
        if rings.count == 0 {
            let disk = disk.clone();
            aside(move || disk.release()).await;
        }
    }
}

impl Rings {
    async fn acquire(&mut self, disk: &Arc<dyn Disk>, device: &str) -> Result<(), StartError> {
        let max_wait = if self.is_missed { Duration::ZERO } else { TIMEOUT };
        let deadline = Instant::now() + max_wait;
        loop {
            let disk = disk.clone();
            match aside(move || disk.acquire()).await {
                Some(Ok(())) => {
                    self.is_missed = false;
                    return Ok(());
                }
                Some(Err(ImageError::InUse { .. })) if Instant::now() < deadline => {
                    tokio::time::sleep(PAUSE).await;
                }
                Some(Err(error)) => {
                    if !std::mem::replace(&mut self.is_missed, true) {
                        tracing::warn!(
                            device,
                            %error,
                            "locking the image failed; the guest's rings wait; retrying"
                        );
                    }
                    return Err(StartError::Image);
                }
                None => return Err(StartError::Image),
            }
        }
    }
}

#[cfg(test)]
mod tests;
