//! `Window`: a range of reserved addresses, into whose pages a front-end's pages are mapped.
//!
//! The queue of a Xen disk serves pages that come and go with each request, while its slices are
//! addresses in one snapshot of guest memory. A window joins the two: it is reserved once, belongs
//! to one [`GuestMemory`](crate::GuestMemory) of one region, and every page of it is mapped for its
//! whole life: either a front-end's page ([`Window::put`]) or zeroed private memory
//! ([`Window::clear`]). So no slice of it ever points at memory of anybody else, whatever is mapped
//! or unmapped in which order; a page that is cut away (SIGBUS) costs the window, which is the
//! queue's alone.
//!
//! **Where windows lie.** The kernel unmaps the memory at a fixed address before it asks the new
//! file to map itself there, and leaves a hole if the file refuses, as the grant device does for a
//! bad reference. [`Window::put`] fills the hole at once, but another thread that maps memory in
//! that moment could be given it, and then lose its memory to us. The kernel chooses the highest
//! gap (the lowest above a third of the address space in the legacy layout); windows lie far below
//! both, where it chooses nothing.
//!
//! **How many pieces.** The number of a process's mappings is limited (`vm.max_map_count`); at the
//! limit it can neither map nor unmap. Mapping a page into a window splits the mapping around it,
//! so it can use two of them. So all windows together hold a bounded number of pieces, and a
//! further one is refused: no other mapping of the process ever is.
//!
//! A sixth of them is promised to single windows when these are made: a guest whose disk hangs can
//! hold all the others until the disk answers, and its neighbours go on with their promised ones.
#![allow(unsafe_code, reason = "allow-listed: maps at addresses of ours")]

use crate::bounds::count_max;
use crate::error::MemoryError;
use crate::mapping::{Mapping, PAGE};
use rustix::fd::AsFd;
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// How many pieces are in use that were not promised to a window.
static PIECES: AtomicUsize = AtomicUsize::new(0);
/// How many pieces were promised to windows, in use or not.
static PROMISED: AtomicUsize = AtomicUsize::new(0);

/// Returns the most pieces that all windows may have.
fn pieces_max() -> usize {
    count_max()
}

/// Returns how many of these pieces may be promised.
fn promised_max() -> usize {
    pieces_max() / 6
}

/// Adds `count` to a counter, unless the sum would exceed `max`.
fn count(counter: &AtomicUsize, count: usize, max: usize) -> Result<(), MemoryError> {
    let more = |counted: usize| counted.checked_add(count).filter(|sum| *sum <= max);
    let counted = counter.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
    counted.map(drop).map_err(|_| MemoryError::Pieces { max: pieces_max() })
}

/// Returns how many pieces may stay mapped. The other third is for pieces of single requests.
pub(crate) fn room_to_keep() -> usize {
    pieces_max() / 3 * 2
}

/// True if another piece may stay mapped, beside `planned` ones that will be mapped soon.
pub(crate) fn has_room_to_keep(planned: usize) -> bool {
    PIECES.load(Ordering::Relaxed) + planned < room_to_keep()
}

/// Pages at reserved addresses, each mapped to a front-end's page or to zeroes; see the module's
/// page.
#[derive(Debug)]
pub(crate) struct Window {
    mapping: Arc<Mapping>,
    /// For each page, the piece that begins there.
    begins: Vec<Piece>,
    /// How many pieces were promised to this window (`promised`), and how many of them are unused.
    promised: usize,
    left: usize,
}

/// The kind of the piece that begins at a page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Piece {
    #[default]
    None,
    /// A piece that any window could have used.
    Common,
    /// A piece that was promised to this window.
    Promised,
}

impl Window {
    /// A window of `pages` pages of zeroed memory, allocated as they are touched. It can put
    /// `promised` pieces whatever other windows have.
    ///
    /// # Errors
    /// [`MemoryError::Map`], [`MemoryError::TooMany`]; [`MemoryError::Pieces`]: too many are
    /// promised already.
    pub(crate) fn new(pages: usize, promised: usize) -> Result<Self, MemoryError> {
        let mapping = Arc::new(Mapping::reserved(pages)?);
        // Read the bound now: a sandbox may forbid that later.
        count(&PROMISED, promised, promised_max())?;
        Ok(Self { mapping, begins: vec![Piece::None; pages], promised, left: promised })
    }

    /// Returns the mapping, for a snapshot of guest memory or the words of a ring.
    pub(crate) fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }

    /// Returns the number of pages.
    pub(crate) fn pages(&self) -> usize {
        self.mapping.size() / PAGE
    }

    /// Maps `pages` to the file's bytes from `offset` on: one piece, which is cleared as a whole.
    /// The pages hold zeroes if it fails.
    ///
    /// # Errors
    /// [`MemoryError::Map`]; [`MemoryError::Pieces`] if all windows together have the most that may
    /// be.
    ///
    /// # Panics
    /// If the pages are not all inside.
    pub(crate) fn put(
        &mut self,
        pages: Range<usize>,
        file: impl AsFd,
        offset: u64,
        is_writable: bool,
    ) -> Result<(), MemoryError> {
        let (base, len) = self.bytes(&pages);
        self.begins[pages.start] = self.take_piece()?;
        let write = if is_writable { ProtFlags::WRITE } else { ProtFlags::empty() };
        let flags = MapFlags::SHARED | MapFlags::FIXED | MapFlags::NORESERVE;
        // SAFETY: these addresses are the window's (`bytes`), and the holder of a slice of them
        // only copies bytes, whatever is mapped there.
        let mapped = unsafe { mmap(base, len, ProtFlags::READ | write, flags, file, offset) };
        mapped.map(drop).map_err(|errno| {
            self.clear(pages);
            MemoryError::Map(errno)
        })
    }

    /// Takes a piece: one that any window can use, or else one that was promised to this window.
    fn take_piece(&mut self) -> Result<Piece, MemoryError> {
        match count(&PIECES, 1, pieces_max() - promised_max()) {
            Ok(()) => Ok(Piece::Common),
            Err(error) => {
                self.left = self.left.checked_sub(1).ok_or(error)?;
                Ok(Piece::Promised)
            }
        }
    }

    /// Replaces `pages` by zeroed memory, which unmaps the front-end's pages there.
    ///
    /// # Panics
    /// If the pages are not all inside, or if the kernel refuses: a page that cannot be taken back
    /// would stay with a guest that believes it free.
    pub(crate) fn clear(&mut self, pages: Range<usize>) {
        let (base, len) = self.bytes(&pages);
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        let flags = flags | MapFlags::FIXED | MapFlags::NORESERVE;
        // SAFETY: as in `put`.
        let mapped = unsafe { mmap_anonymous(base, len, prot, flags) };
        assert!(mapped.is_ok(), "pages of a window cannot be cleared: {mapped:?}");
        self.forget(pages);
    }

    /// Frees the pieces that begin in `pages`.
    fn forget(&mut self, pages: Range<usize>) {
        let mut common = 0;
        for piece in self.begins[pages].iter_mut().map(std::mem::take) {
            match piece {
                Piece::None => {}
                Piece::Common => common += 1,
                Piece::Promised => self.left += 1,
            }
        }
        PIECES.fetch_sub(common, Ordering::Relaxed);
    }

    /// Returns the address and length of `pages`, which are checked to be inside.
    fn bytes(&self, pages: &Range<usize>) -> (*mut core::ffi::c_void, usize) {
        assert!(pages.start <= pages.end && pages.end <= self.pages(), "{pages:?} of a window");
        let base = self.mapping.address(pages.start * PAGE);
        (base.as_ptr().cast(), pages.len() * PAGE)
    }
}

impl Drop for Window {
    /// Frees the pieces. The mapping may be held for longer, with pieces that are not counted.
    fn drop(&mut self) {
        self.forget(0..self.begins.len());
        PROMISED.fetch_sub(self.promised, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mapping::WINDOWS;
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

    fn file(pages: u64) -> rustix::fd::OwnedFd {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create("pages", flags).unwrap();
        ftruncate(&file, pages * PAGE as u64).unwrap();
        file
    }

    fn first_byte(window: &Window, page: usize) -> u8 {
        let [byte] = window.mapping().slice(page * PAGE, 1).unwrap().read_array().unwrap();
        byte
    }

    #[test]
    fn a_page_that_was_put_is_the_files_and_a_cleared_one_is_zero_again() {
        let (mut window, file) = (Window::new(8, 0).unwrap(), file(4));
        rustix::io::pwrite(&file, b"x", 3 * PAGE as u64).unwrap();
        window.put(5..6, &file, 3 * PAGE as u64, true).unwrap();
        assert_eq!((first_byte(&window, 4), first_byte(&window, 5)), (0, b'x'));
        window.mapping().slice(5 * PAGE, 1).unwrap().write_byte(b'y');
        window.clear(5..6);
        assert_eq!(first_byte(&window, 5), 0);
        let mut byte = [0];
        rustix::io::pread(&file, &mut byte, 3 * PAGE as u64).unwrap();
        assert_eq!(byte, *b"y");
    }

    #[test]
    fn a_file_that_refuses_to_be_mapped_leaves_zeroes_and_no_hole() {
        let (mut window, file) = (Window::new(4, 0).unwrap(), file(4));
        window.put(1..3, &file, 0, true).unwrap();
        // From now on the file refuses when the kernel has already unmapped what lay there.
        fcntl_add_seals(&file, SealFlags::FUTURE_WRITE).unwrap();
        assert!(matches!(window.put(1..3, &file, 0, true), Err(MemoryError::Map(_))));
        window.mapping().slice(PAGE, 1).unwrap().write_byte(1);
        assert_eq!((first_byte(&window, 1), first_byte(&window, 2)), (1, 0));
    }

    #[test]
    fn memory_of_others_never_lies_where_windows_lie() {
        let (window, other) = (Window::new(4, 0).unwrap(), Mapping::anonymous(1 << 20).unwrap());
        let is_place = |address: usize| WINDOWS.contains(&(address as u64));
        assert!(is_place(window.mapping().slice(0, 1).unwrap().address()));
        assert!(!is_place(other.slice(0, 1).unwrap().address()));
        assert!(!is_place(Box::new(1).as_ref() as *const i32 as usize));
    }

    #[test]
    #[should_panic(expected = "of a window")]
    fn pages_past_the_end_are_nobodys() {
        Window::new(4, 0).unwrap().clear(3..5);
    }
}
