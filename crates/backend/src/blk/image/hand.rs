//! An image that another process serves: its descriptors, and whether all of them are closed again.
//!
//! The lock of an image belongs to the description by which it was opened, which stays here. Each
//! description that is given away carries a shared lock of its own, on one byte far behind the end
//! of any image. A description lives until its last request has ended, also one that the io_uring
//! of a dead process still has: so that byte can be locked exclusively only when all of them have.
//! Whoever opens the image locks all bytes, this one too, and so waits for them as well.

use super::probe::leave_atime;
use super::{Image, ImageError, ImageOptions, describe};
use crate::blk::spares::Spares;
use crate::sys::file as sys;
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::fs::{FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use std::path::{Path, PathBuf};

/// A process gets at most this many descriptions to flush the image by. One message carries at most
/// 253 descriptors (`SCM_MAX_FD`), and some of these are for something else.
const FLUSHES_MAX: usize = 200;

/// The descriptors that the house sends to a room, so that the room can serve an image which the
/// house has opened and keeps locked.
#[derive(Debug)]
pub struct Handed {
    /// The description for reads and writes.
    pub file: OwnedFd,
    /// The first flushes for the image itself, each further one for a queue.
    pub flushes: Vec<OwnedFd>,
}

impl Image {
    /// Descriptions of the image for a process that serves `queues` queues of it. May block.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE` or `ENOMEM`: the host has no further descriptor or memory.
    pub fn hand(&self, queues: usize) -> Result<Handed, Errno> {
        self.let_go_of_mark()?;
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        let access = if self.geometry.read_only { OFlags::RDONLY } else { OFlags::RDWR };
        let direct = if self.direct { OFlags::DIRECT } else { OFlags::empty() };
        let flags = access | direct | OFlags::CLOEXEC | OFlags::NOCTTY;
        let file = rustix::fs::open(path, flags, Mode::empty())?;
        leave_atime(&file);
        let flushes = (0..=queues.min(FLUSHES_MAX)).map(|_| describe(&self.file));
        let flushes = flushes.collect::<Result<Vec<_>, _>>()?;
        // Where the lock goes with the rings, the process marks them when it has the lock.
        if !self.lock_with_rings {
            flushes.iter().chain([&file]).try_for_each(sys::mark)?;
        }
        Ok(Handed { file, flushes })
    }

    /// Unlocks the mark byte, so that only processes that were given descriptions hold a lock on
    /// it.
    ///
    /// # Errors
    /// `ENOLCK`: the system has no lock to give.
    pub fn let_go_of_mark(&self) -> Result<(), Errno> {
        sys::unmark(self.locked())
    }

    /// True if all descriptions that were given away are closed, and their requests have ended. May
    /// block as long as a lock of the file system may. Always true for an image whose lock goes
    /// with the rings: another daemon may have it, and all requests end before this one gets the
    /// lock.
    ///
    /// # Errors
    /// The error of the file system, if it cannot tell whether the mark is locked.
    pub fn is_let_go(&self) -> Result<bool, Errno> {
        if self.lock_with_rings {
            return Ok(true);
        }
        sys::is_marked(self.locked()).map(|is_marked| !is_marked)
    }

    /// The image that another process has opened by the name `path` and locked. That name is for
    /// messages: the descriptors, and the access that `options` names, say all. May block.
    ///
    /// # Errors
    /// [`ImageError`]: `handed` has no description for flushes, or the image has no size.
    pub fn handed(handed: Handed, path: &Path, options: ImageOptions) -> Result<Self, ImageError> {
        let ImageOptions { read_only, direct, .. } = options;
        let Handed { file, mut flushes } = handed;
        let stat = rustix::fs::fstat(&file).map(|stat| FileType::from_raw_mode(stat.st_mode));
        let block_device = stat == Ok(FileType::BlockDevice);
        let at = || path.to_path_buf();
        let syncs = flushes.pop().ok_or(ImageError::Kind { path: at() })?;
        let size =
            super::size_of_file(&file).map_err(|errno| ImageError::Size { path: at(), errno })?;
        let image = Self::measured(file, None, syncs, (block_device, read_only, size), direct);
        Ok(Self { path: at(), spare: Spares::kept(flushes), is_handed: true, ..image })
    }

    /// True if the image is a block device that this process holds (`O_EXCL`), so that `fallocate`
    /// may zero and discard every range of it at any time.
    #[must_use]
    pub fn holds_device(&self) -> bool {
        self.block_device && !self.is_handed
    }

    /// The description that holds the lock, for a process that serves the image after this one.
    ///
    /// # Errors
    /// `EMFILE`: the process has no further descriptor.
    pub fn bequeath(&self) -> Result<OwnedFd, Errno> {
        rustix::io::fcntl_dupfd_cloexec(self.locked(), 3)
    }

    /// The description that holds the image's lock.
    fn locked(&self) -> &OwnedFd {
        self.holder.as_ref().unwrap_or(&self.file)
    }
}

/// True if a description is of this file, opened with this access.
pub(super) fn is_of(held: &OwnedFd, file: &Stat, access: OFlags) -> bool {
    let is_same = |found: Stat| (found.st_dev, found.st_ino) == (file.st_dev, file.st_ino);
    let has_access = |flags: OFlags| flags & OFlags::RWMODE == access;
    rustix::fs::fstat(held).is_ok_and(is_same)
        && rustix::fs::fcntl_getfl(held).is_ok_and(has_access)
}

impl Handed {
    /// Copies of the descriptors, by which a process that was given them can mark them. Messages
    /// name the image by `path`.
    ///
    /// # Errors
    /// `EMFILE`: the process has no further descriptor.
    pub fn marks(&self, path: &Path) -> Result<Marks, Errno> {
        let all = self.flushes.iter().chain([&self.file]);
        let copy = |fd: &OwnedFd| rustix::io::fcntl_dupfd_cloexec(fd, 3);
        Ok(Marks { path: path.to_path_buf(), fds: all.map(copy).collect::<Result<_, _>>()? })
    }
}

/// The descriptions that a process was given of an image whose lock goes with the rings. While
/// rings run they are marked, so that the image waits for their requests if the process dies.
#[derive(Debug)]
pub struct Marks {
    path: PathBuf,
    fds: Vec<OwnedFd>,
}

impl Marks {
    /// Marks all of them, or none. The owner has locked the image for them.
    ///
    /// # Errors
    /// `EAGAIN`, `EACCES`: another process has locked the image.
    pub fn set(&self) -> Result<(), Errno> {
        let set = self.fds.iter().try_for_each(sys::mark);
        if set.is_err() {
            self.clear();
        }
        set
    }

    /// Removes the marks, when no request is under way any more.
    pub fn clear(&self) {
        for fd in &self.fds {
            if let Err(errno) = sys::unmark(fd) {
                let image = self.path.display();
                tracing::error!(%image, %errno, "image stays locked until this process ends");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_that_was_given_away_is_in_use_until_the_last_description_is_closed() {
        for read_only in [false, true] {
            let file = tempfile::NamedTempFile::new().unwrap();
            file.as_file().set_len(8192).unwrap();
            let options = ImageOptions { read_only, ..ImageOptions::default() };
            let image = Image::open(file.path(), options).unwrap();
            assert_eq!(image.is_let_go(), Ok(true));
            let Handed { file: given, flushes } = image.hand(2).unwrap();
            assert_eq!(flushes.len(), 3);
            assert_eq!(image.is_let_go(), Ok(false));
            drop(flushes);
            assert_eq!(image.is_let_go(), Ok(false));
            let again = image.hand(1).unwrap();
            // The process that opened the image is gone; the one that was given it is still there.
            drop(image);
            let writes = || Image::open(file.path(), ImageOptions::default());
            assert!(matches!(writes(), Err(ImageError::InUse { .. })));
            drop(again);
            assert!(matches!(writes(), Err(ImageError::InUse { .. })));
            drop(given);
            let image = writes().unwrap();
            assert_eq!(image.is_let_go(), Ok(true));
        }
    }

    #[test]
    fn a_mark_that_stays_is_told_of_with_the_name_of_its_image() {
        let file = tempfile::NamedTempFile::new().unwrap();
        // A description that takes no locks.
        let fd = rustix::fs::open(file.path(), OFlags::PATH, Mode::empty()).unwrap();
        let marks = Marks { path: file.path().to_path_buf(), fds: vec![fd] };
        let lines = crate::tests::told_by(|| marks.clear());
        let name = format!(" image={}", file.path().display());
        assert!(lines.len() == 1 && lines[0].contains(&name), "{lines:?}");
    }

    #[test]
    fn what_was_given_serves_and_its_locks_are_still_there() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(8192).unwrap();
        let image = Image::open(file.path(), ImageOptions::default()).unwrap();
        let options = ImageOptions::default();
        let handed = Image::handed(image.hand(4).unwrap(), file.path(), options).unwrap();
        assert_eq!(handed.path(), file.path());
        assert_eq!(handed.geometry(), image.geometry());
        rustix::io::pwrite(handed.file(), b"here", 512).unwrap();
        let lent = handed.lend_description().unwrap();
        handed.sync().unwrap();
        assert_eq!(image.is_let_go(), Ok(false));
        drop(handed);
        assert_eq!(image.is_let_go(), Ok(false));
        drop(lent);
        assert_eq!(image.is_let_go(), Ok(true));
        assert_eq!(&std::fs::read(file.path()).unwrap()[512..516], b"here");
    }
}
