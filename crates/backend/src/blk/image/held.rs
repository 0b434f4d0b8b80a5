//! The lock of an image that goes with the rings: a guest that migrates between two processes hands
//! its image over.

use super::{Image, ImageError, lock};
use crate::sys::file as sys;

impl Image {
    /// Takes the lock, if it is not held from the start on. May block.
    ///
    /// # Errors
    /// [`ImageError::InUse`], [`ImageError::Lock`].
    pub fn acquire(&self) -> Result<(), ImageError> {
        let Some(path) = &self.unlocked else { return Ok(()) };
        lock(self.holder.as_ref().unwrap_or(&self.file), path, !self.geometry.read_only)
    }

    /// Gives it back, when all that was written is on the disk: whoever takes the lock next may be
    /// on another host, and reads past the page cache of this one. No request is in flight. May
    /// block.
    pub fn release(&self) {
        let Some(path) = &self.unlocked else { return };
        let synced = if self.geometry.read_only { Ok(()) } else { self.sync() };
        if let Err(errno) = synced {
            // Nobody else may have the image now: this host alone has what was written last.
            let path = path.display();
            tracing::error!(%path, %errno, "image stays locked: it cannot be made durable");
            return;
        }
        if let Err(errno) = sys::unlock(self.holder()) {
            tracing::error!(path = %path.display(), %errno, "image stays locked");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blk::ImageOptions;

    #[test]
    fn an_image_whose_lock_goes_with_the_rings_is_handed_over() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(4096).unwrap();
        for direct in [false, true] {
            let with_rings =
                ImageOptions { direct, lock_with_rings: true, ..ImageOptions::default() };
            let read_only = ImageOptions { read_only: true, ..with_rings };
            let open = |options| Image::open(file.path(), options).unwrap();
            let [source, destination, reader] = [with_rings, with_rings, read_only].map(open);
            source.acquire().unwrap();
            // Also for whoever takes the lock at the start.
            for other in [&destination, &reader] {
                assert!(matches!(other.acquire(), Err(ImageError::InUse { .. })));
            }
            let at_once = Image::open(file.path(), ImageOptions::default());
            assert!(matches!(at_once, Err(ImageError::InUse { .. })));
            source.release();
            destination.acquire().unwrap();
            assert!(matches!(source.acquire(), Err(ImageError::InUse { .. })));
            // A process that is killed lets go.
            drop(destination);
            source.acquire().unwrap();
        }
    }
}
