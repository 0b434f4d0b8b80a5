//! Passes an image to another process: makes its descriptors, and tells later whether all of them
//! are closed again.
//!
//! The lock of an image belongs to the description by which it was opened, which stays in this
//! process. Each description that is passed on carries a shared lock of its own, on one *mark* byte
//! far behind the end of any image. A description lives until its last request has ended, also one
//! that is still in the io_uring of a dead process. So the mark byte can be locked exclusively only
//! when all passed descriptions are closed. A process that opens the image locks all bytes, the
//! mark byte too, and so has to wait for these descriptions as well. The seccomp filter of a
//! process that gets descriptions lets it neither lock nor unlock.
//!
//! The descriptions of a read-only image are marked with a byte of their own, one for each process,
//! since other processes read the image, too. The descriptions of an image with `lock_with_rings`
//! are marked while rings run, and once more, with a byte of their own, when the process has lost
//! the image. For that, the owner keeps a copy of each.

use super::probe::leave_atime;
use super::{Image, ImageError, ImageOptions, describe};
use crate::blk::holder;
use crate::blk::spares::Spares;
use crate::sys::file::{self as sys, Mark};
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::fs::{FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use std::any::Any;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The most descriptions for flushes that a process gets. One message carries at most 253
/// descriptors (`SCM_MAX_FD`), and some of these have other purposes.
const FLUSHES_MAX: usize = 200;

/// The descriptors that the supervisor sends to a device process, so that the device process can
/// serve an image which the supervisor has opened and keeps locked.
#[derive(Debug)]
pub struct ImageDescriptors {
    /// The description for reads and writes.
    pub file: OwnedFd,
    /// Descriptions for flushes: the first is the image's own, each further one is for a queue.
    pub flushes: Vec<OwnedFd>,
}

impl Image {
    /// Makes descriptions of the image, for a process that serves `queues` queues of it. May block.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE` or `ENOMEM`: the host has no further descriptor or memory.
    pub fn hand(&self, queues: usize) -> Result<ImageDescriptors, Errno> {
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        let access = if self.geometry.read_only { OFlags::RDONLY } else { OFlags::RDWR };
        let direct = if self.direct { OFlags::DIRECT } else { OFlags::empty() };
        let flags = access | direct | OFlags::CLOEXEC | OFlags::NOCTTY;
        let file = rustix::fs::open(path, flags, Mode::empty())?;
        leave_atime(&file);
        let flushes = (0..=queues.min(FLUSHES_MAX)).map(|_| describe(&self.file));
        let flushes = flushes.collect::<Result<Vec<_>, _>>()?;
        if self.is_marked_at_once() {
            self.let_go_of_mark()?;
            flushes.iter().chain([&file]).try_for_each(|fd| sys::mark(fd, Mark::GIVEN))?;
        }
        Ok(ImageDescriptors { file, flushes })
    }

    /// True if passed descriptions are marked as long as they live; false if they are marked while
    /// rings run ([`Marks`]), or never.
    fn is_marked_at_once(&self) -> bool {
        !self.lock_with_rings && !self.geometry.read_only
    }

    /// True if passed descriptions are marked while rings run, and once more when the process has
    /// lost the image.
    fn is_marked_while_rings_run(&self) -> bool {
        self.lock_with_rings && !self.geometry.read_only
    }

    /// Unlocks the mark byte on this process's own description, so that only passed descriptions
    /// hold a lock on it.
    fn let_go_of_mark(&self) -> Result<(), Errno> {
        sys::unmark(self.locked(), Mark::GIVEN)
    }

    /// True if all passed descriptions are closed, and their requests have ended. May block as long
    /// as a lock of the file system may. Always true for a read-only image, and with
    /// `lock_with_rings`, since another daemon may have the image: see [`Ending`] for these.
    ///
    /// # Errors
    /// The file system cannot tell whether the byte is locked.
    pub fn is_let_go(&self) -> Result<bool, Errno> {
        if !self.is_marked_at_once() {
            return Ok(true);
        }
        sys::is_marked(self.locked(), Mark::GIVEN).map(|is_marked| !is_marked)
    }

    /// Returns how many descriptions [`Self::marks`] copies, of those for `queues` queues.
    #[must_use]
    pub fn copies(&self, queues: usize) -> usize {
        if self.is_marked_while_rings_run() { 2 + queues.min(FLUSHES_MAX) } else { 0 }
    }

    /// Makes the marks for the descriptions in `handed`; `None` if these carry the common mark as
    /// long as they live. With `lock_with_rings` and write access, copies the descriptions, to mark
    /// them while rings run. `part` is dropped with the copies: by it the owner counts them.
    ///
    /// # Errors
    /// `EMFILE`: no descriptor is free. `EAGAIN`: another process has locked all bytes of a
    /// read-only image. Any other: the file system cannot lock the byte.
    pub fn marks(
        &self,
        handed: &ImageDescriptors,
        part: impl Any + Send + Sync,
    ) -> Result<Option<Marks>, Errno> {
        if self.is_marked_at_once() {
            return Ok(None);
        }
        let (own, may_write) = (Mark::chosen(), !self.geometry.read_only);
        let mut all = handed.flushes.iter().chain([&handed.file]);
        let fds = if self.is_marked_while_rings_run() {
            let copy = |fd: &OwnedFd| rustix::io::fcntl_dupfd_cloexec(fd, 3);
            all.map(copy).collect::<Result<_, _>>()?
        } else {
            all.try_for_each(|fd| sys::mark(fd, own))?;
            Vec::new()
        };
        let copies = Arc::new(Copies { fds, _part: Box::new(part) });
        Ok(Some(Marks { copies, own, may_write }))
    }

    /// Locks an image with `lock_with_rings`, for rings of a process to which the descriptions of
    /// `marks` were passed. May block.
    ///
    /// # Errors
    /// `InUse`: another process has locked the image. `Lock`: the file system cannot lock it.
    pub fn acquire_for(&self, marks: Option<&Marks>) -> Result<(), ImageError> {
        self.acquire()?;
        let Some(Marks { copies, may_write: true, .. }) = marks else { return Ok(()) };
        let set = self.let_go_of_mark().and_then(|()| copies.mark(Mark::GIVEN));
        set.map_err(|errno| {
            self.release_for(marks);
            ImageError::Lock { path: self.path.clone(), errno }
        })
    }

    /// Undoes [`Self::acquire_for`], after the rings have stopped. May block.
    pub fn release_for(&self, marks: Option<&Marks>) {
        for fd in marks.iter().flat_map(|marks| &marks.copies.fds) {
            if let Err(errno) = sys::unmark(fd, Mark::GIVEN) {
                let image = self.path.display();
                tracing::error!(
                    %image,
                    %errno,
                    "unlocking failed; image stays locked until its process ends"
                );
            }
        }
        self.release();
    }

    /// Makes an image of descriptors from another process, which has opened and locked it. `path`
    /// is only a name for messages; the access is that of `options`. May block.
    ///
    /// # Errors
    /// [`ImageError`]: `handed` has no description for flushes, or the image has no size.
    pub fn handed(
        handed: ImageDescriptors,
        path: &Path,
        options: ImageOptions,
    ) -> Result<Self, ImageError> {
        let ImageOptions { read_only, direct, .. } = options;
        let ImageDescriptors { file, mut flushes } = handed;
        let stat = rustix::fs::fstat(&file).map(|stat| FileType::from_raw_mode(stat.st_mode));
        let block_device = stat == Ok(FileType::BlockDevice);
        let at = || path.to_path_buf();
        let syncs = flushes.pop().ok_or(ImageError::Kind { path: at() })?;
        let size =
            super::size_of_file(&file).map_err(|errno| ImageError::Size { path: at(), errno })?;
        let image = Self::measured(file, None, syncs, (block_device, read_only, size), direct);
        Ok(Self { path: at(), spare: Spares::kept(flushes), is_handed: true, ..image })
    }

    /// True if this process holds a block device exclusively (`O_EXCL`), so that `fallocate` may
    /// zero and discard every range of it at any time.
    #[must_use]
    pub fn holds_device(&self) -> bool {
        self.block_device && !self.is_handed
    }

    /// Returns the description that holds the lock, for the process that serves the image after
    /// this one.
    ///
    /// # Errors
    /// `EMFILE`: no descriptor is free.
    pub fn hand_off(&self) -> Result<OwnedFd, Errno> {
        rustix::io::fcntl_dupfd_cloexec(self.locked(), 3)
    }

    /// Returns the ID of another process that has locked the image; `None` if /proc shows none. May
    /// block.
    #[must_use]
    pub fn other_holder(&self) -> Option<u32> {
        holder::pid_of(&self.path)
    }

    /// Returns the description that holds the image's lock.
    pub(super) fn locked(&self) -> &OwnedFd {
        self.holder.as_ref().unwrap_or(&self.file)
    }
}

/// True if the description `held` belongs to this file and was opened with this access.
pub(super) fn is_of(held: &OwnedFd, file: &Stat, access: OFlags) -> bool {
    let is_same = |found: Stat| (found.st_dev, found.st_ino) == (file.st_dev, file.st_ino);
    let has_access = |flags: OFlags| flags & OFlags::RWMODE == access;
    rustix::fs::fstat(held).is_ok_and(is_same)
        && rustix::fs::fcntl_getfl(held).is_ok_and(has_access)
}

/// The descriptions of an image with `lock_with_rings`, or of a read-only one, that were passed to
/// a process. With `lock_with_rings` the descriptions are marked while rings run, so that the image
/// stays locked for their requests if the process dies; this object has a copy of each. A
/// description lives as long as its copy, whatever has ended.
#[derive(Debug)]
pub struct Marks {
    copies: Arc<Copies>,
    /// The mark byte of the process that got the descriptions. If `copies` has any, they are
    /// marked with this byte when that process has lost the image; otherwise, for a read-only
    /// image, the passed descriptions are marked from the beginning.
    own: Mark,
    may_write: bool,
}

/// Copies of the descriptions that were passed to a process.
#[derive(Debug)]
struct Copies {
    fds: Vec<OwnedFd>,
    _part: Box<dyn Any + Send + Sync>,
}

impl Copies {
    fn mark(&self, mark: Mark) -> Result<(), Errno> {
        self.fds.iter().try_for_each(|fd| sys::mark(fd, mark))
    }
}

impl Marks {
    /// Call when the process has ended, or no longer has the descriptions. Returns an object that
    /// tells whether the process's requests have ended, also requests that it did not end although
    /// it said that its rings had stopped. Until that object is dropped they count as under way.
    /// May block as long as a lock of the file system may.
    #[must_use]
    pub fn end(&self) -> Ending {
        let copies = self.copies.clone();
        let marked = copies.mark(self.own).inspect_err(|errno| {
            tracing::debug!(%errno, "marking a description failed");
        });
        let unmarked = Mutex::new(marked.is_err().then_some(copies));
        Ending { own: self.own, may_write: self.may_write, unmarked }
    }
}

/// The requests that a process may still have under way after it has lost an image.
#[derive(Debug)]
pub struct Ending {
    own: Mark,
    may_write: bool,
    /// Copies of the descriptions while they cannot be marked, because another daemon has locked
    /// all bytes of the image. Without a mark it is unknown when their requests have ended.
    unmarked: Mutex<Option<Arc<Copies>>>,
}

impl Ending {
    /// Makes an object for requests of a process whose descriptions have locked the byte `mark`.
    /// `unmarked`: copies of its descriptions, if these are still to be marked. `part` is dropped
    /// with the copies: by it the owner counts them.
    #[must_use]
    pub fn of(
        mark: i64,
        may_write: bool,
        unmarked: Vec<OwnedFd>,
        part: impl Any + Send + Sync,
    ) -> Self {
        let is_marked = unmarked.is_empty();
        let copies = Arc::new(Copies { fds: unmarked, _part: Box::new(part) });
        let unmarked = Mutex::new((!is_marked).then_some(copies));
        Self { own: Mark::at(mark), may_write, unmarked }
    }

    /// Returns copies of the descriptions that could not be marked yet, for another process that
    /// waits for the requests instead of this one.
    ///
    /// # Errors
    /// `EMFILE`: no descriptor is free.
    pub fn unmarked(&self) -> Result<Vec<OwnedFd>, Errno> {
        let unmarked = self.lock().clone();
        let fds = unmarked.iter().flat_map(|copies| &copies.fds);
        fds.map(|fd| rustix::io::fcntl_dupfd_cloexec(fd, 3)).collect()
    }

    /// True if another process has had the image locked since these descriptions were to be marked.
    /// That process got the image although requests may have been under way, and may have written
    /// since.
    #[must_use]
    pub fn is_elsewhere(&self) -> bool {
        self.lock().is_some()
    }

    fn lock(&self) -> MutexGuard<'_, Option<Arc<Copies>>> {
        self.unmarked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the mark byte that the descriptions have locked.
    #[must_use]
    pub fn mark(&self) -> i64 {
        self.own.byte()
    }

    /// False if the process could only read: its remaining requests can write only to the memory of
    /// its own guests, and harm nobody else.
    #[must_use]
    pub fn may_write(&self) -> bool {
        self.may_write
    }

    /// True when all descriptions are closed and their requests have ended. If they are not marked
    /// yet, tries that again. May block as long as a lock of the file system may.
    ///
    /// # Errors
    /// The file system cannot lock the byte, or cannot tell whether it is locked.
    pub fn is_over(&self, image: &Image) -> Result<bool, Errno> {
        // Do not hold the mutex during calls of the file system: the control thread calls
        // [`Self::unmarked`].
        let unmarked = self.lock().clone();
        if let Some(copies) = unmarked {
            match copies.mark(self.own) {
                Ok(()) => *self.lock() = None,
                Err(Errno::AGAIN | Errno::ACCESS) => return Ok(false),
                Err(errno) => return Err(errno),
            }
        }
        sys::is_marked(image.locked(), self.own).map(|is_marked| !is_marked)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_that_was_given_away_is_in_use_until_the_last_description_is_closed() {
        let file = image_file();
        let open = || Image::open(file.path(), ImageOptions::default());
        let image = open().unwrap();
        assert_eq!(image.is_let_go(), Ok(true));
        let ImageDescriptors { file: given, flushes } = image.hand(2).unwrap();
        assert_eq!(flushes.len(), 3);
        assert_eq!(image.is_let_go(), Ok(false));
        drop(flushes);
        assert_eq!(image.is_let_go(), Ok(false));
        let again = image.hand(1).unwrap();
        // The process that opened the image is gone; the one that was given it is still there.
        drop(image);
        assert!(matches!(open(), Err(ImageError::InUse { .. })));
        drop(again);
        assert!(matches!(open(), Err(ImageError::InUse { .. })));
        drop(given);
        let image = open().unwrap();
        assert_eq!(image.is_let_go(), Ok(true));
    }

    #[test]
    fn an_image_that_is_only_read_is_given_to_several_and_waits_for_nobody() {
        let file = image_file();
        let options = ImageOptions { read_only: true, ..ImageOptions::default() };
        let open = || Image::open(file.path(), options);
        let one = open().unwrap();
        let given = one.hand(2).unwrap();
        let other = open().unwrap();
        let _other_given = other.hand(2).unwrap();
        assert_eq!([one.is_let_go(), other.is_let_go()], [Ok(true); 2]);
        let writes = || Image::open(file.path(), ImageOptions::default());
        assert!(matches!(writes(), Err(ImageError::InUse { .. })));
        // A process that keeps what it has no more could read what others write then.
        assert_eq!(one.copies(2), 0);
        let marks = one.marks(&given, ()).unwrap().unwrap();
        assert!(marks.copies.fds.is_empty());
        let ending = marks.end();
        assert!(!ending.may_write());
        assert_eq!(ending.is_over(&one), Ok(false));
        drop(given);
        assert_eq!(ending.is_over(&one), Ok(true), "others still read the image");
        drop([one, other]);
        writes().unwrap();
    }

    #[test]
    fn an_image_that_is_only_read_is_marked_when_it_is_given_though_its_lock_goes_with_rings() {
        let file = image_file();
        let options =
            ImageOptions { read_only: true, lock_with_rings: true, ..ImageOptions::default() };
        let reads = Image::open(file.path(), options).unwrap();
        let given = reads.hand(2).unwrap();
        // One after the other might have it while another process has locked it for its own.
        let writes = Image::open(file.path(), ImageOptions::default()).unwrap();
        assert_eq!(reads.marks(&given, ()).unwrap_err(), Errno::AGAIN);
        drop(writes);
        let marks = reads.marks(&given, ()).unwrap().unwrap();
        assert_eq!((reads.copies(2), marks.copies.fds.len()), (0, 0));
        reads.acquire_for(Some(&marks)).unwrap();
        reads.release_for(Some(&marks));
        let ending = marks.end();
        assert_eq!((ending.is_elsewhere(), ending.is_over(&reads)), (false, Ok(false)));
        drop(given);
        assert_eq!(ending.is_over(&reads), Ok(true));
    }

    #[test]
    fn requests_that_a_process_kept_under_way_are_waited_for_though_its_rings_have_stopped() {
        let file = image_file();
        let options = ImageOptions { lock_with_rings: true, ..ImageOptions::default() };
        let [image, elsewhere] = [(); 2].map(|()| Image::open(file.path(), options).unwrap());
        let handed = image.hand(1).unwrap();
        let marks = image.marks(&handed, ()).unwrap();
        assert_eq!(marks.as_ref().unwrap().copies.fds.len(), image.copies(1));
        image.acquire_for(marks.as_ref()).unwrap();
        assert!(matches!(elsewhere.acquire(), Err(ImageError::InUse { .. })));
        // Its rings run, it dies, and the supervisor as well: another daemon waits for its
        // requests.
        image.release();
        assert!(matches!(elsewhere.acquire(), Err(ImageError::InUse { .. })));
        image.release_for(marks.as_ref());
        elsewhere.acquire().unwrap();
        let ending = marks.unwrap().end();
        let known = [Ending::of(ending.mark(), true, Vec::new(), ()), ending];
        let are_over = || known.each_ref().map(|ending| ending.is_over(&image));
        assert_eq!(are_over(), [Ok(false); 2], "whatever it has said");
        drop(handed);
        assert_eq!(are_over(), [Ok(true); 2]);
    }

    #[test]
    fn requests_that_no_mark_tells_of_are_not_over_while_another_daemon_has_the_image() {
        let file = image_file();
        let options = ImageOptions { lock_with_rings: true, ..ImageOptions::default() };
        let image = Image::open(file.path(), options).unwrap();
        let handed = image.hand(1).unwrap();
        // No ring runs: the other daemon gets a lock of all bytes.
        let elsewhere = Image::open(file.path(), ImageOptions::default()).unwrap();
        let marks = image.marks(&handed, ()).unwrap().unwrap();
        let ending = marks.end();
        drop(marks);
        let left = ending.unmarked().unwrap();
        assert_eq!(left.len(), image.copies(1));
        // A daemon that takes over waits for them as well.
        let known = [Ending::of(ending.mark(), true, left, ()), ending];
        let are_over = || known.each_ref().map(|ending| ending.is_over(&image));
        assert_eq!(are_over(), [Ok(false); 2], "the process has the image");
        drop(elsewhere);
        assert_eq!(are_over(), [Ok(false); 2], "marked by now, and under way");
        assert!(!known.iter().any(Ending::is_elsewhere));
        drop(handed);
        assert_eq!(are_over(), [Ok(true); 2]);
    }

    fn image_file() -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(8192).unwrap();
        file
    }

    #[test]
    fn what_was_given_serves_and_its_locks_are_still_there() {
        let file = image_file();
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
