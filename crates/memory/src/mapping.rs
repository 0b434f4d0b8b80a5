//! One mapping of shared memory: mapped, watched by the SIGBUS table, unmapped on drop.
#![allow(unsafe_code, reason = "allow-listed: maps and unmaps")]

use crate::error::MemoryError;
use crate::files::MemoryFiles;
use crate::iov::GuestSlice;
use crate::sigbus;
use crate::touch::unmapped;
use rustix::fd::AsFd;
use rustix::io::Errno;
use rustix::mm::{MapFlags, MremapFlags, ProtFlags, mmap, mmap_anonymous, mremap_fixed, munmap};
use std::hash::{BuildHasher, Hasher};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The size of a page of the host in bytes.
pub(crate) const PAGE: usize = 4096;

/// The most bytes that all mappings of files in this process may have together: half of a process's
/// addresses. A sparse file needs no memory. Without the bound a front-end could use up all
/// addresses, and this process could start no thread and allocate nothing more.
const FILE_BYTES_MAX: u64 = 1 << 46;

/// Any thread may unmap so few bytes, since that takes no time: a ring's journal, for example.
const SMALL: usize = 2 << 20;

/// The addresses at which windows are placed: a range of 8 TiB.
pub(crate) const WINDOWS: Range<u64> = 32 << 40..40 << 40;
/// How many addresses are tried for a window before it is refused.
const PLACES_MAX: usize = 64;

/// The bytes that a mapping of a file has taken of [`FILE_BYTES_MAX`]. Drop returns them.
#[derive(Debug)]
struct AddressShare(u64);

static TAKEN: AtomicU64 = AtomicU64::new(0);

impl AddressShare {
    fn take(bytes: u64) -> Result<Self, MemoryError> {
        let more = |taken: u64| taken.checked_add(bytes).filter(|all| *all <= FILE_BYTES_MAX);
        let taken = TAKEN.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        taken.map(|_| Self(bytes)).map_err(|_| MemoryError::Vast { max: FILE_BYTES_MAX })
    }
}

impl Drop for AddressShare {
    fn drop(&mut self) {
        TAKEN.fetch_sub(self.0, Ordering::Relaxed);
    }
}

/// Memory mapped into this process, writable and shared.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    /// The length of the mapping in bytes: whole pages, or huge pages on hugetlbfs.
    len: usize,
    /// The number of bytes that the caller has requested.
    size: usize,
    /// Bytes between the start of the mapping and the first requested byte.
    skip: usize,
    watch: Option<sigbus::Watch>,
    /// The bytes that a file's mapping has taken of [`FILE_BYTES_MAX`], returned after unmapping.
    share: Option<AddressShare>,
}

// SAFETY: a mapping is an address range; all access goes through `Words` (atomics) and
// `GuestSlice` (copies), which assume that others write at the same time.
unsafe impl Send for Mapping {}
// SAFETY: as above; `&Mapping` gives out addresses only.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `size` bytes of `file`, which lies in memory, from `offset` on. An offset inside a page
    /// is allowed: the mapping then begins at the page's start.
    ///
    /// # Errors
    /// Those of [`Self::of_file_in`].
    pub fn of_file(file: impl AsFd, offset: u64, size: u64) -> Result<Self, MemoryError> {
        Self::of_file_in(MemoryFiles::InMemory, file, offset, size)
    }

    /// Maps `size` bytes of `file` from `offset` on, as [`Self::of_file`], where `files` allows the
    /// file.
    ///
    /// # Errors
    /// [`MemoryError::NotAFile`], [`MemoryError::OnDisk`] or [`MemoryError::FileSystem`] if its
    /// file system could make us wait, [`MemoryError::TooShort`] if the file does not hold the
    /// range, [`MemoryError::Map`], [`MemoryError::TooMany`], [`MemoryError::Vast`]. May block if
    /// the file system does: not for the control thread.
    pub fn of_file_in(
        files: MemoryFiles,
        file: impl AsFd,
        offset: u64,
        size: u64,
    ) -> Result<Self, MemoryError> {
        let stat = rustix::fs::fstat(&file).map_err(MemoryError::Map)?;
        if !rustix::fs::FileType::from_raw_mode(stat.st_mode).is_file() {
            return Err(MemoryError::NotAFile);
        }
        files.check(&file)?;
        let file_size = u64::try_from(stat.st_size).unwrap_or(0);
        let end = offset.checked_add(size).ok_or(MemoryError::Overflow)?;
        if size == 0 || end > file_size {
            return Err(MemoryError::TooShort { file_size, end });
        }
        // hugetlbfs reports its page size here, and maps at its multiples only.
        let page = u64::try_from(stat.st_blksize).unwrap_or(4096).max(4096);
        let skip = offset % page;
        let whole = size.checked_add(skip).and_then(|n| n.checked_next_multiple_of(page));
        let whole = whole.ok_or(MemoryError::Overflow)?;
        let (share, len) = (AddressShare::take(whole)?, host_size(whole));
        // SAFETY: the kernel chooses a free place for the mapping: no memory in use is replaced.
        let base = unsafe {
            mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                &file,
                offset - skip,
            )
        }
        .map_err(MemoryError::Map)?;
        let mut mapping =
            Self::watched(base, len, host_size(size), host_size(skip), host_size(page))?;
        mapping.share = Some(share);
        Ok(mapping)
    }

    /// Maps `size` bytes of zeroed memory, allocated as it is touched.
    ///
    /// # Errors
    /// [`MemoryError::Map`].
    pub fn anonymous(size: u64) -> Result<Self, MemoryError> {
        Self::zeroed(size, MapFlags::PRIVATE)
    }

    /// Maps `size` bytes of zeroed memory that can be mapped a second time ([`Self::joined`]).
    ///
    /// # Errors
    /// [`MemoryError::Map`].
    pub fn anonymous_shared(size: u64) -> Result<Self, MemoryError> {
        Self::zeroed(size, MapFlags::SHARED)
    }

    fn zeroed(size: u64, kind: MapFlags) -> Result<Self, MemoryError> {
        let len = host_size(size);
        // SAFETY: as in `of_file_in`.
        let base = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                kind | MapFlags::NORESERVE,
            )
        }
        .map_err(MemoryError::Map)?;
        let base = NonNull::new(base.cast()).ok_or(MemoryError::Overflow)?;
        Ok(Self { base, len, size: len, skip: 0, watch: None, share: None })
    }

    /// Maps the pages of all `parts`, which are shared memory, one after another. Nothing watches
    /// this mapping: it is for the kernel, which pins its pages, and is not read or written here.
    ///
    /// # Errors
    /// [`MemoryError::Map`]: a part cannot be mapped a second time, as private memory and some huge
    /// pages cannot.
    pub fn joined(parts: &[Arc<Self>]) -> Result<Self, MemoryError> {
        let len = parts.iter().try_fold(0usize, |len, part| len.checked_add(part.len));
        let whole = Self::anonymous(len.ok_or(MemoryError::Overflow)? as u64)?;
        let mut at = 0;
        for part in parts {
            let flags = MremapFlags::MAYMOVE;
            let target = whole.base.as_ptr().wrapping_add(at).cast();
            // SAFETY: an old length of 0 leaves the old mapping as it is; the replaced addresses
            // lie in `whole`, which this function has reserved, and into which nothing points yet.
            unsafe { mremap_fixed(part.base.as_ptr().cast(), 0, part.len, flags, target) }
                .map_err(MemoryError::Map)?;
            at += part.len;
        }
        Ok(whole)
    }

    /// Returns the host addresses of all pages.
    #[must_use]
    pub fn addresses(&self) -> Range<usize> {
        let base = self.base.as_ptr().addr();
        base..base + self.len
    }

    /// Maps `size` bytes that the kernel shares through a socket (the rings of AF_XDP), from
    /// `offset` on, which is a number of the socket's kind and no place in a file. Such memory
    /// cannot be cut away. The mapping keeps the socket open until it is dropped.
    ///
    /// # Errors
    /// [`MemoryError::Map`]: the socket has no such memory, or less of it.
    pub fn of_socket(socket: impl AsFd, offset: u64, size: u64) -> Result<Self, MemoryError> {
        let len = host_size(size);
        // SAFETY: the kernel chooses a free place for the mapping: no memory in use is replaced.
        let base = unsafe {
            mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::POPULATE,
                &socket,
                offset,
            )
        }
        .map_err(MemoryError::Map)?;
        let base = NonNull::new(base.cast()).ok_or(MemoryError::Overflow)?;
        Ok(Self { base, len, size: len, skip: 0, watch: None, share: None })
    }

    /// Reserves `pages` pages of zeroed memory at a random place among [`WINDOWS`], for a
    /// [`crate::window::Window`].
    ///
    /// # Errors
    /// [`MemoryError::Map`], [`MemoryError::TooMany`].
    pub(crate) fn reserved(pages: usize) -> Result<Self, MemoryError> {
        let len = pages.checked_mul(PAGE).ok_or(MemoryError::Overflow)?;
        let base = reserve(len)?;
        Self::watched(base, len, len, 0, PAGE)
    }

    fn watched(
        base: *mut core::ffi::c_void,
        len: usize,
        size: usize,
        skip: usize,
        page: usize,
    ) -> Result<Self, MemoryError> {
        let base = NonNull::new(base.cast::<u8>()).ok_or(MemoryError::Overflow)?;
        let mut mapping = Self { base, len, size, skip, watch: None, share: None };
        mapping.watch = Some(sigbus::Watch::new(base.as_ptr() as usize, len, page)?);
        Ok(mapping)
    }

    /// Returns the requested size in bytes.
    #[must_use]
    pub fn size(&self) -> usize {
        self.size
    }

    /// True once the file was truncated while mapped: parts of the mapping are zeroes since then.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.watch.as_ref().is_some_and(sigbus::Watch::is_broken)
    }

    /// Returns `len` bytes at `offset`; `None` if they are not all inside. The bytes stay mapped
    /// while the mapping is borrowed, since only its drop unmaps it. Truncated memory is replaced
    /// in place.
    #[must_use]
    #[inline]
    pub fn slice(&self, offset: usize, len: usize) -> Option<GuestSlice<'_>> {
        if offset > self.size || self.size - offset < len {
            return None;
        }
        // SAFETY: the bytes are inside (checked above) and mapped while `self` is borrowed.
        Some(unsafe { GuestSlice::new(self.address(offset), len) })
    }

    /// Returns the host address of byte `offset`, which must be inside the mapping or at its end.
    pub(crate) fn address(&self, offset: usize) -> NonNull<u8> {
        debug_assert!(offset <= self.size());
        // SAFETY: skip + offset <= len, as checked by every caller, so this stays in the mapping.
        unsafe { self.base.add(self.skip + offset) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.share.is_some() && self.len > SMALL {
            unmapped();
        }
        self.watch = None;
        // SAFETY: `base` and `len` are those of our mmap; nothing refers to it any more.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// Reserves `len` bytes at a random address in [`WINDOWS`].
fn reserve(len: usize) -> Result<*mut core::ffi::c_void, MemoryError> {
    let room =
        (WINDOWS.end - WINDOWS.start).checked_sub(len as u64).ok_or(MemoryError::Overflow)?;
    let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    let flags = flags | MapFlags::NORESERVE | MapFlags::FIXED_NOREPLACE;
    let mut refusal = Errno::NOMEM;
    for _ in 0..PLACES_MAX {
        // The address is random, so that nobody can predict it.
        let random = std::hash::RandomState::new().build_hasher().finish();
        let place = WINDOWS.start + random % (room + 1) / PAGE as u64 * PAGE as u64;
        let place = std::ptr::without_provenance_mut(host_size(place));
        // SAFETY: with FIXED_NOREPLACE the kernel replaces no other mapping.
        match unsafe { mmap_anonymous(place, len, prot, flags) } {
            Ok(base) => return Ok(base),
            Err(errno) => refusal = errno,
        }
    }
    Err(MemoryError::Map(refusal))
}

#[allow(clippy::cast_possible_truncation, reason = "64-bit hosts only, see manyring-wire")]
const fn host_size(size: u64) -> usize {
    size as usize
}
