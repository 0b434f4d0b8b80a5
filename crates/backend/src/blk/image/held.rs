//! The lock of an image with `lock_with_rings`: a guest that migrates between two processes passes
//! its image from one to the other.

use super::{Image, ImageError};
use crate::sys::file as sys;
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use std::path::Path;

impl Image {
    /// Locks the image, if it has `lock_with_rings`. May block.
    ///
    /// # Errors
    /// `InUse`: another process has locked the image. `Lock`: the file system cannot lock it.
    pub fn acquire(&self) -> Result<(), ImageError> {
        if !self.lock_with_rings {
            return Ok(());
        }
        lock(self.locked(), &self.path, !self.geometry.read_only, sys::lock_up_to_given)
    }

    /// Flushes the image, then unlocks it: the next process that locks it may be on another host,
    /// and does not see this host's page cache. No request may be in flight. May block.
    pub fn release(&self) {
        if !self.lock_with_rings {
            return;
        }
        let image = self.path.display();
        let synced = if self.geometry.read_only { Ok(()) } else { self.sync() };
        if let Err(errno) = synced {
            // Keep the lock: only this host has the last bytes.
            tracing::error!(%image, %errno, "flushing the image failed; it stays locked");
            return;
        }
        if let Err(errno) = sys::unlock(self.holder()) {
            tracing::error!(%image, %errno, "unlocking the image failed; it stays locked");
        }
    }
}

/// Locks a file, by one of the two functions of `sys`. `path` is its name for errors.
pub(super) fn lock(
    file: &OwnedFd,
    path: &Path,
    exclusive: bool,
    by: fn(&OwnedFd, bool) -> Result<(), Errno>,
) -> Result<(), ImageError> {
    by(file, exclusive).map_err(|errno| match errno {
        Errno::AGAIN | Errno::ACCESS => ImageError::in_use(path),
        errno => ImageError::Lock { path: path.to_path_buf(), errno },
    })?;
    if !exclusive && sys::has_qemu_writer(file) {
        return Err(ImageError::in_use(path));
    }
    Ok(())
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
            // A lock that is held from the opening of the image on fails as well.
            for other in [&destination, &reader] {
                assert!(matches!(other.acquire(), Err(ImageError::InUse { .. })));
            }
            let at_once = Image::open(file.path(), ImageOptions::default());
            assert!(matches!(at_once, Err(ImageError::InUse { .. })));
            source.release();
            destination.acquire().unwrap();
            assert!(matches!(source.acquire(), Err(ImageError::InUse { .. })));
            // The kernel releases the lock of a process that is killed.
            drop(destination);
            source.acquire().unwrap();
        }
    }
}
