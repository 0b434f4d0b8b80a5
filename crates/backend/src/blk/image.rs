//! `Image`: a file or block device, opened, locked and measured. `file` and `uring` serve it.

mod format;
mod handover;
mod held;
mod look;
mod probe;
mod units;

pub use handover::{Ending, ImageDescriptors, Marks};

use super::guard::Guard;
use super::spares::Spares;
use super::{Geometry, holder};
use crate::sys::file as sys;
use probe::{
    Units, can_nowait, can_punch, direct_alignment, is_in_memory, leave_atime, range_unit,
    size_of_file, writes_in_parallel,
};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::{Mutex, Once, PoisonError};

/// Options for opening an image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ImageOptions {
    /// True: nothing is written, and the lock is shared.
    pub read_only: bool,
    /// True: bypass the host's page cache (`O_DIRECT`).
    pub direct: bool,
    /// The logical block size that the guest shall read; `None`: the image's own.
    pub block_size: Option<u32>,
    /// True: serve the image even if it looks like an image of another format, and no guest could
    /// have written its header.
    pub any_content: bool,
    /// True: lock the image when the first ring starts, and unlock it when the last one has
    /// stopped. So two daemons can have the image open while a guest migrates.
    pub lock_with_rings: bool,
}

/// The reasons for which an image cannot be served.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the Display text says what each field is")]
pub enum ImageError {
    #[error("cannot open {}: {errno}", path.display())]
    Open { path: PathBuf, errno: Errno },
    #[error("{} is neither a file nor a block device", path.display())]
    Kind { path: PathBuf },
    #[error("{} is smaller than one sector of 512 bytes", path.display())]
    Empty { path: PathBuf },
    #[error("{} is not whole sectors of 512 bytes: {size} bytes", path.display())]
    Sectors { path: PathBuf, size: u64 },
    #[error("{} is not whole blocks of {block_size} bytes: {size} bytes", path.display())]
    Blocks { path: PathBuf, size: u64, block_size: u32 },
    #[error(
        "{} is a {format} image: its guest would see the image, not the disk in it",
        path.display()
    )]
    Container { path: PathBuf, format: &'static str },
    #[error("{} is in use by another process{}", path.display(), named(*holder))]
    InUse {
        path: PathBuf,
        /// The ID of the process that holds the lock, if `/proc` shows it.
        holder: Option<u32>,
    },
    #[error("{} is a block device: lock_with_rings is for files", path.display())]
    LockWithRings { path: PathBuf },
    #[error("cannot lock {}: {errno}", path.display())]
    Lock { path: PathBuf, errno: Errno },
    #[error("{} does not allow direct I/O: {errno}", path.display())]
    Direct { path: PathBuf, errno: Errno },
    #[error("cannot read the size of {}: {errno}", path.display())]
    Size { path: PathBuf, errno: Errno },
    #[error("cannot read {}: {errno}", path.display())]
    Read { path: PathBuf, errno: Errno },
}

fn named(holder: Option<u32>) -> String {
    holder.map(|pid| format!(" (pid {pid})")).unwrap_or_default()
}

impl ImageError {
    fn in_use(path: &Path) -> Self {
        Self::InUse { path: path.to_path_buf(), holder: holder::pid_of(path) }
    }
}

/// An open image.
#[derive(Debug)]
pub struct Image {
    file: OwnedFd,
    /// The description for flushes by threads that may wait (`flushes.rs`).
    syncs: Mutex<OwnedFd>,
    /// Descriptions for queues' flushes that no queue uses at present.
    spare: Spares,
    /// With `direct`: the description that was opened first. It holds a block device exclusively
    /// (`O_EXCL`).
    holder: Option<OwnedFd>,
    block_device: bool,
    /// True if another process has opened the image, and has passed the descriptors to this one.
    is_handed: bool,
    direct: bool,
    device: u64,
    size: AtomicU64,
    geometry: Geometry,
    /// Alignment of memory and of offsets that `O_DIRECT` requires; 1 without it.
    memory_align: usize,
    offset_align: u64,
    /// True if the file system supports `RWF_NOWAIT`: a read that would wait fails with `EAGAIN`.
    nowait: bool,
    in_memory: bool,
    parallel: bool,
    /// The unit of `fallocate`. A part of a unit is zeroed only in the page cache, or refused.
    range_unit: u64,
    guard: Guard,
    /// The name by which messages name the image.
    path: PathBuf,
    lock_with_rings: bool,
    /// Held while the size of the file changes.
    sizing: Mutex<()>,
    /// The error with which the host lost bytes of the page cache; 0: none was lost.
    lost: AtomicI32,
    /// Set after the warning that a worker waits for this image (`offload.rs`).
    pub(super) waiting_told: Once,
}

impl Image {
    /// Opens, locks and measures `path`. Changes no byte of the image, but sets an attribute of the
    /// file which says that a guest can write to it from now on.
    ///
    /// # Errors
    /// [`ImageError`], one for each reason. After `InUse` a later attempt may succeed: the kernel
    /// closes the files of a killed process only when its last thread has ended, and files that its
    /// io_uring held some time after that.
    pub fn open(path: &Path, options: ImageOptions) -> Result<Self, ImageError> {
        Self::open_held((path, path), options, None)
    }

    /// As [`Self::open`], but uses `held`, the description by which another process opened and
    /// locked this file ([`Self::hand_off`]). If `held` belongs to another file, or lacks the
    /// needed access, it is ignored. The file is opened at `path`; `name` is its name in errors and
    /// in the log.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_held(
        (path, name): (&Path, &Path),
        options: ImageOptions,
        held: Option<OwnedFd>,
    ) -> Result<Self, ImageError> {
        let at = || name.to_path_buf();
        let open_error = |errno| ImageError::Open { path: at(), errno };
        // Check the kind before opening: opening a fifo blocks, opening a terminal may affect it.
        let stat = rustix::fs::stat(path).map_err(open_error)?;
        let block_device = match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => false,
            FileType::BlockDevice => true,
            _ => return Err(ImageError::Kind { path: at() }),
        };
        if block_device && options.lock_with_rings {
            return Err(ImageError::LockWithRings { path: at() });
        }
        let access = if options.read_only { OFlags::RDONLY } else { OFlags::RDWR };
        let mut flags = access | OFlags::CLOEXEC | OFlags::NOCTTY;
        if block_device && !options.read_only {
            flags |= OFlags::EXCL;
        }
        let open = |flags| rustix::fs::open(path, flags, Mode::empty());
        let held = held.filter(|held| handover::is_of(held, &stat, access));
        let is_locked = held.is_some() || options.lock_with_rings;
        let plain = held.map_or_else(|| open(flags), Ok).map_err(|errno| match errno {
            Errno::BUSY => ImageError::in_use(name),
            errno => open_error(errno),
        })?;
        leave_atime(&plain);
        if !is_locked {
            held::lock(&plain, name, !options.read_only, sys::lock)?;
        }
        let file_size =
            size_of_file(&plain).map_err(|errno| ImageError::Size { path: at(), errno })?;
        if file_size < 512 {
            return Err(ImageError::Empty { path: at() });
        }
        // Check the format before the size: an image of another format may have any size.
        if !options.any_content {
            format::check(&plain, name, (block_device, file_size))?;
        }
        if !file_size.is_multiple_of(512) {
            return Err(ImageError::Sectors { path: at(), size: file_size });
        }
        if let Some(block_size) = options.block_size
            && !file_size.is_multiple_of(block_size.into())
        {
            return Err(ImageError::Blocks { path: at(), size: file_size, block_size });
        }
        let direct = options.direct.then(|| {
            // The second description must not ask for O_EXCL: the first one holds the device.
            open((flags & !OFlags::EXCL) | OFlags::DIRECT)
                .map_err(|errno| ImageError::Direct { path: at(), errno })
        });
        let direct = direct.transpose()?;
        direct.iter().for_each(leave_atime);
        if !options.read_only {
            format::note(&plain, name, block_device);
        }
        let (file, holder) = match direct {
            Some(direct) => (direct, Some(plain)),
            None => (plain, None),
        };
        let syncs = describe(&file).map_err(open_error)?;
        let measured = (block_device, options.read_only, file_size);
        let image = Self::measured(file, holder, syncs, measured, options.direct);
        Ok(Self { path: at(), lock_with_rings: options.lock_with_rings, ..image })
    }

    fn measured(
        file: OwnedFd,
        holder: Option<OwnedFd>,
        syncs: OwnedFd,
        (block_device, read_only, file_size): (bool, bool, u64),
        direct: bool,
    ) -> Self {
        let (memory_align, offset_align) =
            if direct { direct_alignment(&file, block_device) } else { (1, 1) };
        let units = Units::of(&file, block_device);
        let range_unit = range_unit(&file, block_device, direct, &units).max(offset_align);
        let can_punch = !read_only && can_punch(&file, block_device, file_size);
        let secure = block_device
            && !read_only
            // Probe with a range that is not whole sectors: a device that supports secure erase
            // refuses the range with EINVAL, another one fails with another error.
            && sys::secure_erase(&file, 1, 1) == Err(Errno::INVAL);
        let geometry = Geometry {
            size: file_size,
            block_size: units.logical,
            physical_block_size: units.physical,
            min_io_size: units.minimum,
            opt_io_size: units.optimal,
            read_only,
            discard_max: if can_punch { u64::MAX } else { 0 },
            write_zeroes_max: if read_only { 0 } else { u64::MAX },
            secure_erase_max: if secure { u64::MAX } else { 0 },
        };
        let nowait = can_nowait(&file);
        let in_memory = !block_device && is_in_memory(&file);
        let parallel = block_device || writes_in_parallel(&file);
        let stat = rustix::fs::fstat(&file);
        let device = stat.map_or(0, |s| if block_device { s.st_rdev } else { s.st_dev });
        Self {
            size: AtomicU64::new(geometry.size),
            file,
            syncs: Mutex::new(syncs),
            spare: Spares::default(),
            holder,
            block_device,
            is_handed: false,
            direct,
            device,
            geometry,
            memory_align,
            offset_align,
            range_unit,
            guard: Guard::default(),
            path: PathBuf::new(),
            lock_with_rings: false,
            sizing: Mutex::default(),
            nowait,
            in_memory,
            parallel,
            lost: AtomicI32::new(0),
            waiting_told: Once::new(),
        }
    }

    /// Returns a description of the file for the flushes of one queue. A new description gets
    /// reports of losses that happen from now on.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE` or `ENOMEM`: no further description can be opened.
    pub(super) fn lend_description(&self) -> Result<OwnedFd, Errno> {
        self.spare.take().map_or_else(|| describe(&self.file), Ok)
    }

    /// Keeps the description of a queue that has ended for the next queue, for a while.
    pub(super) fn take_back(&self, description: OwnedFd) {
        self.spare.put(description);
    }

    /// Flushes the image, on a thread that may wait. Flushes of several threads wait for each
    /// other.
    ///
    /// # Errors
    /// As [`Self::synced`].
    pub(super) fn sync(&self) -> Result<(), Errno> {
        let file = self.syncs.lock().unwrap_or_else(PoisonError::into_inner);
        self.synced(rustix::fs::fdatasync(&*file))
    }

    /// Returns the answer to a flush whose call ended with `result`, and remembers a loss of bytes.
    ///
    /// If pages could not be written, Linux reports that to one call for each description, and
    /// treats the pages as clean from then on: other flushes of that time, and all later ones,
    /// would tell the guest that lost bytes are durable. So after the first such error every flush
    /// of this image fails, until it is opened again.
    ///
    /// File systems report the device's error: `EIO`, `ENOSPC`, `ENODATA` for a bad medium,
    /// `ENOLINK` and `EREMOTEIO` for a path or a target that failed, `ETIMEDOUT`. Every error
    /// counts as a loss, with two exceptions. A call that failed before it wrote pages has lost
    /// nothing. And bytes of a direct disk do not go through the page cache: the device may still
    /// have them, and write them at the next flush.
    ///
    /// # Errors
    /// The error of the call. After a flush of this image has lost bytes it is always `EIO`: with
    /// `ENOSPC` the caller would wait for space, and repeat a durable write.
    pub(crate) fn synced(&self, result: Result<(), Errno>) -> Result<(), Errno> {
        if let Err(errno) = result
            && !matches!(errno, Errno::INTR | Errno::AGAIN | Errno::CANCELED | Errno::BADF)
            && !self.is_direct()
            && self.lost.swap(errno.raw_os_error(), Ordering::AcqRel) == 0
        {
            tracing::error!(
                %errno,
                image = %self.path.display(),
                "writing back an image failed and data of its guest is lost; its flushes fail \
                 from now on"
            );
        }
        match self.lost.load(Ordering::Acquire) {
            0 => result,
            _ => Err(Errno::IO),
        }
    }

    /// Returns the geometry, with the size as last measured.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        Geometry { size: self.size.load(Ordering::Acquire), ..self.geometry }
    }

    /// Changes the size of the file to `size`, if given; then measures the image again.
    ///
    /// # Errors
    /// `EOPNOTSUPP`: the size of a block device cannot be set. `EROFS`: the image is read-only.
    /// `EINVAL`: the size is zero, or not whole sectors. Any other: the host cannot change or
    /// measure it.
    pub fn resize(&self, size: Option<u64>) -> Result<Geometry, Errno> {
        let _sizing = self.sizing.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(size) = size {
            if self.block_device {
                return Err(Errno::OPNOTSUPP);
            }
            if self.geometry.read_only {
                return Err(Errno::ROFS);
            }
            if size == 0 || !size.is_multiple_of(512) {
                return Err(Errno::INVAL);
            }
            rustix::fs::ftruncate(&self.file, size)?;
        }
        let size = size_of_file(&self.file)?;
        if size == 0 || !size.is_multiple_of(512) {
            return Err(Errno::INVAL);
        }
        self.size.store(size, Ordering::Release);
        Ok(self.geometry())
    }

    /// Returns the present size in bytes of the file or block device. Does not change the size
    /// against which requests are checked.
    ///
    /// # Errors
    /// The host cannot measure it.
    pub fn measure(&self) -> Result<u64, Errno> {
        size_of_file(&self.file)
    }

    /// Returns the description for reads and writes.
    #[must_use]
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Returns the description for `fallocate`. Linux refuses to zero or discard dirty pages of a
    /// block device (`EBUSY`), unless the description holds the device exclusively.
    #[must_use]
    pub fn holder(&self) -> BorrowedFd<'_> {
        self.holder.as_ref().unwrap_or(&self.file).as_fd()
    }

    /// True if the image is opened with `O_DIRECT`.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.direct
    }

    /// True if `RWF_DSYNC` alone makes a write durable, which holds only for direct I/O. If pages
    /// of several writes into the page cache were lost, Linux reports that to one of the writes,
    /// whichever pages are its own, and to no later flush. So a write into the page cache must be
    /// followed by a flush, whose error the image remembers (`synced`).
    #[must_use]
    pub fn syncs_by_write(&self) -> bool {
        self.is_direct()
    }

    /// True if the file system supports `RWF_NOWAIT`.
    #[must_use]
    pub fn has_nowait(&self) -> bool {
        self.nowait
    }

    /// True if the file lies in memory (tmpfs): reads and writes copy, and wait for no disk.
    #[must_use]
    pub fn is_in_memory(&self) -> bool {
        self.in_memory
    }

    /// True if several kernel threads can write to the image by direct I/O at the same time; false:
    /// they make one write after another.
    #[must_use]
    pub fn writes_in_parallel(&self) -> bool {
        self.parallel
    }

    /// For tests: opens an image that was closed a moment ago. The kernel closes a file that an
    /// io_uring held some time after the ring is closed.
    #[cfg(test)]
    pub(super) fn open_again(path: &Path, options: ImageOptions) -> Self {
        for _ in 0..6000 {
            match Self::open(path, options) {
                Err(ImageError::InUse { .. }) => {
                    std::thread::sleep(std::time::Duration::from_millis(5));
                }
                opened => return opened.unwrap(),
            }
        }
        panic!("{} stays locked", path.display())
    }

    /// For tests: this image, as if the host's unit were 4096 bytes.
    #[cfg(test)]
    pub(super) fn taken_for_large_units(self) -> Self {
        Self { offset_align: 4096, range_unit: 4096, ..self }
    }

    /// For tests: this image, as if it were a block device.
    #[cfg(test)]
    pub(super) fn taken_for_block_device(self) -> Self {
        Self { block_device: true, ..self }
    }

    /// For tests: this image, as if its file system made one write after another.
    #[cfg(test)]
    pub(super) fn taken_to_write_in_turn(self) -> Self {
        Self { parallel: false, ..self }
    }

    /// For tests: this image, as if its file system did not support `RWF_NOWAIT`.
    #[cfg(test)]
    pub(super) fn taken_to_wait(self) -> Self {
        Self { nowait: false, ..self }
    }

    /// Returns the name by which the image was opened, perhaps by another process.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// True for a block device.
    #[must_use]
    pub fn is_block_device(&self) -> bool {
        self.block_device
    }

    /// Returns the number (`st_dev`) of the host's device on which the bytes lie.
    #[must_use]
    pub fn device(&self) -> u64 {
        self.device
    }
}

/// Opens another description of an open file, for flushes only: without write access.
///
/// If the file cannot be opened through `/proc` (`/proc` is hidden, this process may not read the
/// file any more, the device is gone), duplicates the descriptor instead. Then flushes share one
/// description, and it is undefined which of them gets the report of a loss. A lack of descriptors
/// or memory is an error instead: it passes, but the duplicate would stay.
fn describe(file: &OwnedFd) -> Result<OwnedFd, Errno> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOCTTY;
    match rustix::io::retry_on_intr(|| rustix::fs::open(&path, flags, Mode::empty())) {
        Err(errno @ (Errno::MFILE | Errno::NFILE | Errno::NOMEM)) => Err(errno),
        Err(_) => rustix::io::fcntl_dupfd_cloexec(file, 0),
        opened => opened,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn reads_of_an_image_are_not_noted_in_its_journal() {
        // Older than a day, and than the last change: a file system that notes reads at all would
        // note the next one (`relatime`).
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(8192).unwrap();
        let long_ago = std::time::SystemTime::UNIX_EPOCH + Duration::from_secs(1 << 20);
        let times = std::fs::FileTimes::new().set_accessed(long_ago);
        for direct in [false, true] {
            file.as_file().set_times(times).unwrap();
            let options = ImageOptions { direct, ..ImageOptions::default() };
            let image = Image::open(file.path(), options).unwrap();
            let mut bytes = [0; 4096];
            rustix::io::pread(image.holder(), &mut bytes, 0).unwrap();
            if !direct {
                rustix::io::pread(image.file(), &mut bytes, 0).unwrap();
            }
            let accessed = file.as_file().metadata().unwrap().accessed().unwrap();
            assert_eq!(accessed, long_ago, "direct {direct}");
        }
    }

    #[test]
    fn a_flush_that_lost_something_fails_those_after_it_until_the_image_is_opened_anew() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(8192).unwrap();
        let open = |direct| {
            Image::open(file.path(), ImageOptions { direct, ..ImageOptions::default() }).unwrap()
        };
        let image = open(false);
        for harmless in [Errno::INTR, Errno::AGAIN, Errno::CANCELED, Errno::BADF] {
            assert_eq!(image.synced(Err(harmless)), Err(harmless));
            assert_eq!(image.synced(Ok(())), Ok(()), "nothing was lost by {harmless}");
        }
        drop(image);
        for lost in [
            Errno::IO,
            Errno::NOSPC,
            Errno::DQUOT,
            Errno::NODATA,
            Errno::NOLINK,
            Errno::REMOTEIO,
            Errno::TIMEDOUT,
        ] {
            let image = open(false);
            let lines = crate::tests::told_by(|| {
                assert_eq!(image.synced(Err(lost)), Err(Errno::IO));
                assert_eq!(image.synced(Ok(())), Err(Errno::IO));
            });
            let name = format!(" image={}", file.path().display());
            assert!(lines.len() == 1 && lines[0].contains(&name), "{lines:?}");
        }
        assert_eq!(open(false).synced(Ok(())), Ok(()));
        // No page is between the guest and the disk.
        let image = open(true);
        assert_eq!(image.synced(Err(Errno::IO)), Err(Errno::IO));
        assert_eq!(image.synced(Ok(())), Ok(()));
    }

    #[test]
    fn an_image_that_is_locked_is_in_use_until_it_is_dropped() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(4096).unwrap();
        let open = || Image::open(file.path(), ImageOptions::default());
        let first = open().unwrap();
        let second = open();
        assert!(matches!(second, Err(ImageError::InUse { .. })), "{second:?}");
        drop(first);
        assert!(open().is_ok());
    }
}
