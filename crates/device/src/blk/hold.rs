//! `Hold`: a disk whose lock goes with the rings is locked while one of them runs.
//!
//! ```text
//! first ring begins:   take the lock; another process has it? try again for 5 s, then say whose
//! it has it still:     the ring does not begin; the transport tries it again, each time once
//! last ring stopped:   nothing is in flight: make all durable, let go
//! ```
//! So of two daemons that serve one image, the guest's front-end decides which one does: it stops
//! the rings at one host before it starts them at the other. Two guests cannot run at once.

use crate::StartError;
use manyring_backend::blk::{Disk, ImageError};
use manyring_engine::aside;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Mutex;
use tokio::time::Instant;

/// How long a ring waits for the image. Its guest pauses meanwhile: the source lets go before QEMU
/// resumes the guest at the destination, and a process that was killed within milliseconds.
const PATIENCE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(10);

/// The rings of a disk that run. Held while the lock changes hands.
#[derive(Debug, Default)]
pub(super) struct Hold(Mutex<Rings>);

#[derive(Debug, Default)]
struct Rings {
    count: usize,
    /// The image was waited for in vain, and the operator knows.
    is_missed: bool,
}

impl Hold {
    /// A ring begins.
    ///
    /// # Errors
    /// [`StartError::Image`]: the reason is logged. The ring may be tried again.
    pub(super) async fn begin(&self, disk: &Arc<dyn Disk>, device: &str) -> Result<(), StartError> {
        let mut rings = self.0.lock().await;
        if rings.count == 0 {
            rings.acquire(disk, device).await?;
        }
        rings.count += 1;
        Ok(())
    }

    /// A ring has stopped, or has not begun after all.
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
        let patience = if self.is_missed { Duration::ZERO } else { PATIENCE };
        let deadline = Instant::now() + patience;
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
                        tracing::warn!(device, %error, "the guest's rings wait for the image");
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
