//! Slices of guest memory: a pointer and a length, given to system calls as an iovec.
#![allow(unsafe_code, reason = "allow-listed: copies bytes to and from guest memory")]

use crate::touch::touched;
use std::marker::PhantomData;
use std::ptr::NonNull;

/// From this many bytes on, memory that another CPU has just written is copied with `rep movsb`.
const LONG: usize = 2048;
/// The size of a cache line in bytes.
#[cfg(any(target_arch = "x86_64", test))]
const CACHE_LINE: usize = 64;
/// The most bytes that are prefetched.
#[cfg(any(target_arch = "x86_64", test))]
const PREFETCH_MAX: usize = 1536;

/// Bytes of guest memory, contiguous in this process and mapped for `'m`: the slice borrows the
/// mapping or the snapshot that it came from. Layout of `struct iovec`.
///
/// The guest may write the bytes at any time, so they are only ever copied, never borrowed.
/// [`crate::SliceList`] and [`crate::SliceQueue`] keep slices together with their snapshot where
/// they must outlive a borrow of it.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct GuestSlice<'m>(libc::iovec, PhantomData<&'m [u8]>);

// SAFETY: a slice is an address and a length; the memory behind it is shared by nature, and stays
// mapped for `'m` on whatever thread.
unsafe impl Send for GuestSlice<'_> {}
// SAFETY: as above; all access is by copies that assume other writers.
unsafe impl Sync for GuestSlice<'_> {}

impl std::fmt::Debug for GuestSlice<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GuestSlice({:p}, {})", self.0.iov_base, self.0.iov_len)
    }
}

impl<'m> GuestSlice<'m> {
    /// A slice of `len` bytes at `base`.
    ///
    /// # Safety
    /// The bytes must be mapped, readable and writable, for all of `'m`.
    #[inline]
    pub(crate) unsafe fn new(base: NonNull<u8>, len: usize) -> Self {
        Self::at(base.as_ptr().cast(), len)
    }

    const fn at(iov_base: *mut libc::c_void, iov_len: usize) -> Self {
        Self(libc::iovec { iov_base, iov_len }, PhantomData)
    }

    /// This slice with another lifetime.
    ///
    /// # Safety
    /// The bytes must stay mapped for all of `'k`: the keeper of the result keeps their mapping or
    /// snapshot too.
    #[inline]
    pub(crate) unsafe fn keep<'k>(self) -> GuestSlice<'k> {
        GuestSlice(self.0, PhantomData)
    }

    /// Returns the length in bytes.
    #[must_use]
    #[inline]
    pub fn len(&self) -> usize {
        self.0.iov_len
    }

    /// True if the length is 0.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the host address of the first byte, for alignment checks.
    #[must_use]
    #[inline]
    pub fn address(&self) -> usize {
        self.0.iov_base as usize
    }

    /// Returns the first `at` bytes, and the rest. A larger `at` counts as the length.
    #[must_use]
    pub fn split_at(self, at: usize) -> (Self, Self) {
        let at = at.min(self.len());
        let rest = self.0.iov_base.wrapping_byte_add(at);
        (Self::at(self.0.iov_base, at), Self::at(rest, self.len() - at))
    }

    /// Copies bytes out of guest memory. Returns how many: the shorter length of the two.
    #[inline]
    pub fn read_into(&self, bytes: &mut [u8]) -> usize {
        touched();
        let n = self.len().min(bytes.len());
        let source = self.0.iov_base.cast::<u8>();
        // SAFETY: `n` bytes are inside both; ours are mapped for `'m` (`new`), and guest memory
        // never overlaps a Rust borrow.
        unsafe { std::ptr::copy_nonoverlapping(source, bytes.as_mut_ptr(), n) };
        n
    }

    /// Copies the first `N` bytes out; `None` if there are fewer. The compiler knows `N`, so a
    /// header costs two moves and no call.
    #[must_use]
    #[inline]
    pub fn read_array<const N: usize>(&self) -> Option<[u8; N]> {
        touched();
        if self.len() < N {
            return None;
        }
        let mut bytes = [0; N];
        let source = self.0.iov_base.cast::<u8>();
        // SAFETY: `N` bytes are inside both; ours are mapped for `'m` (`new`), and guest memory
        // never overlaps a Rust borrow.
        unsafe { std::ptr::copy_nonoverlapping(source, bytes.as_mut_ptr(), N) };
        Some(bytes)
    }

    /// Writes the first byte; does nothing if the slice is empty.
    #[inline]
    pub fn write_byte(&self, byte: u8) {
        touched();
        if !self.is_empty() {
            // SAFETY: the first byte is inside, and mapped for `'m` (`new`).
            unsafe { self.0.iov_base.cast::<u8>().write_volatile(byte) };
        }
    }

    /// Copies bytes into guest memory. Returns how many: the shorter length of the two.
    #[inline]
    pub fn write_from(&self, bytes: &[u8]) -> usize {
        touched();
        let n = self.len().min(bytes.len());
        let target = self.0.iov_base.cast::<u8>();
        // SAFETY: `n` bytes are inside both; ours are mapped for `'m` (`new`), and guest memory
        // never overlaps a Rust borrow.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), target, n) };
        n
    }

    /// Writes `N` bytes; false if the slice is shorter. The compiler knows `N` (`read_array`).
    #[inline]
    pub fn write_array<const N: usize>(&self, bytes: &[u8; N]) -> bool {
        touched();
        if self.len() < N {
            return false;
        }
        let target = self.0.iov_base.cast::<u8>();
        // SAFETY: `N` bytes are inside both; ours are mapped for `'m` (`new`), and guest memory
        // never overlaps a Rust borrow.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), target, N) };
        true
    }

    /// Copies from another slice, which may overlap. Returns how many bytes: the shorter length.
    #[inline]
    pub fn copy_from(&self, other: &GuestSlice<'_>) -> usize {
        touched();
        let n = self.len().min(other.len());
        let target = self.0.iov_base.cast::<u8>();
        // SAFETY: `n` bytes are inside both, and both are mapped as long as they are borrowed
        // (`new`); overlap is allowed.
        unsafe { std::ptr::copy(other.0.iov_base.cast::<u8>(), target, n) };
        n
    }

    /// Copies as [`Self::copy_from`] does, from bytes that another CPU has just written.
    #[inline]
    fn copy_from_afar(&self, other: &GuestSlice<'_>) -> usize {
        touched();
        let n = self.len().min(other.len());
        if n < LONG {
            return self.copy_from(other);
        }
        let (source, target) = (other.0.iov_base.cast::<u8>(), self.0.iov_base.cast::<u8>());
        // SAFETY: as in `copy_from`.
        unsafe { copy_long(source, target, n) };
        n
    }

    /// Prefetches the first two cache lines, which are written soon. Fetching a line that another
    /// CPU has written takes as long as a hundred instructions, and prefetched lines are fetched in
    /// parallel. Reads and writes nothing.
    #[inline]
    pub fn prefetch_for_write(&self) {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        {
            let first = self.0.iov_base;
            let second = first.wrapping_byte_add(CACHE_LINE);
            // The intrinsic asks to read, unless the whole program needs a CPU that has this.
            // SAFETY: a hint about addresses, which need not be mapped; CPUs without it ignore it.
            unsafe {
                std::arch::asm!(
                    "prefetchw [{}]",
                    "prefetchw [{}]",
                    in(reg) first,
                    in(reg) second,
                    options(nostack, preserves_flags, readonly)
                );
            }
        }
    }

    /// Prefetches the cache lines of a short frame, which is read soon. While a system call works
    /// on one frame, the next one is fetched from the cache of the CPU that wrote it. Reads
    /// nothing.
    #[inline]
    pub fn prefetch_for_read(&self) {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        for line in lines(self.0.iov_base.addr(), self.len()) {
            // SAFETY: a hint about addresses, which need not be mapped.
            unsafe {
                std::arch::asm!(
                    "prefetcht0 [{}]",
                    in(reg) line,
                    options(nostack, preserves_flags, readonly)
                );
            }
        }
    }

    /// Sets every byte to zero.
    pub fn fill_zero(&self) {
        touched();
        // SAFETY: all `len` bytes are mapped for `'m` (`new`).
        unsafe { std::ptr::write_bytes(self.0.iov_base.cast::<u8>(), 0, self.len()) };
    }
}

/// Copies `n` bytes, which may overlap, by the CPU's own instruction for that if it is a fast one:
/// lines that another CPU has written arrive a fifth sooner than by the C library, which copies
/// such pieces in a loop. Their order within the copy is the same.
///
/// # Safety
/// As for [`std::ptr::copy`].
#[inline(never)]
unsafe fn copy_long(source: *const u8, target: *mut u8, n: usize) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if target.addr().wrapping_sub(source.addr()) >= n && is_x86_feature_detected!("ermsb") {
        // SAFETY: `n` bytes are mapped at both; no byte is read after another one was written over
        // it, since the target does not begin inside of the source. The direction flag is clear
        // wherever Rust's code runs.
        unsafe {
            std::arch::asm!(
                "rep movsb",
                inout("rcx") n => _,
                inout("rsi") source => _,
                inout("rdi") target => _,
                options(nostack, preserves_flags)
            );
        }
        return;
    }
    // SAFETY: of the caller.
    unsafe { std::ptr::copy(source, target, n) };
}

/// Returns the addresses of the cache lines of `len` bytes at `base` that are prefetched. A frame
/// lies behind its header of 12 bytes, so it can touch one line more than its length suggests.
#[cfg(any(target_arch = "x86_64", test))]
#[inline]
fn lines(base: usize, len: usize) -> impl Iterator<Item = usize> {
    let end = base.saturating_add(len.min(PREFETCH_MAX));
    (base & !(CACHE_LINE - 1)..end).step_by(CACHE_LINE)
}

/// Returns the slices as the iovec array of a system call. The borrow keeps the bytes mapped only
/// during the call. A call that continues after it has returned (io_uring) must keep them mapped by
/// other means.
#[must_use]
#[inline]
pub fn as_iovecs<'a>(slices: &'a [GuestSlice<'_>]) -> &'a [libc::iovec] {
    touched();
    // SAFETY: a slice is an iovec (`repr(transparent)`).
    unsafe { std::slice::from_raw_parts(slices.as_ptr().cast(), slices.len()) }
}

/// Returns the bytes of all slices together.
#[must_use]
#[inline]
pub fn total_len(slices: &[GuestSlice]) -> u64 {
    // Most often there is one slice, for which the loop would cost twenty instructions more.
    if let [only] = slices {
        return only.len() as u64;
    }
    slices.iter().map(|s| s.len() as u64).sum()
}

/// Removes the first `n` bytes, after a system call that has transferred only a part.
pub fn advance(slices: &mut Vec<GuestSlice<'_>>, mut n: usize) {
    let mut whole = 0;
    for slice in slices.iter_mut() {
        if n < slice.len() {
            *slice = slice.split_at(n).1;
            break;
        }
        n -= slice.len();
        whole += 1;
    }
    slices.drain(..whole);
}

/// Copies the first bytes of `slices` into `bytes`. Returns how many were copied.
#[inline]
pub fn copy_from_slices(slices: &[GuestSlice], bytes: &mut [u8]) -> usize {
    let mut done = 0;
    for slice in slices {
        if done == bytes.len() {
            break;
        }
        done += slice.read_into(&mut bytes[done..]);
    }
    done
}

/// Copies `bytes` to the beginning of `slices`. Returns how many were copied.
#[inline]
pub fn copy_to_slices(slices: &[GuestSlice], bytes: &[u8]) -> usize {
    let mut done = 0;
    for slice in slices {
        if done == bytes.len() {
            break;
        }
        done += slice.write_from(&bytes[done..]);
    }
    done
}

/// Copies the bytes of `sources`, in order, to `targets` behind their first `skip` bytes. Returns
/// how many were copied. Frames go from guest to guest by this function, so another CPU has just
/// written the bytes.
pub fn copy_between<'a>(
    targets: impl Iterator<Item = &'a GuestSlice<'a>>,
    mut skip: usize,
    sources: &[GuestSlice<'_>],
) -> usize {
    let (mut done, mut sources) = (0, sources.iter().copied().filter(|s| !s.is_empty()));
    let Some(mut source) = sources.next() else { return 0 };
    for target in targets {
        let (skipped, mut room) = target.split_at(skip);
        skip -= skipped.len();
        while !room.is_empty() {
            let copied = room.copy_from_afar(&source);
            done += copied;
            room = room.split_at(copied).1;
            source = source.split_at(copied).1;
            if source.is_empty() {
                let Some(next) = sources.next() else { return done };
                source = next;
            }
        }
    }
    done
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Mapping;

    #[test]
    fn bytes_cross_slice_borders() {
        let mapping = Mapping::anonymous(4096).unwrap();
        let parts = [mapping.slice(10, 3).unwrap(), mapping.slice(100, 5).unwrap()];
        assert_eq!(copy_to_slices(&parts, b"abcdefgh-too-long"), 8);
        let mut out = [0; 8];
        assert_eq!(copy_from_slices(&parts, &mut out), 8);
        assert_eq!(&out, b"abcdefgh");
        assert_eq!(total_len(&parts), 8);
    }

    #[test]
    fn long_copies_are_right_wherever_they_overlap() {
        let mapping = Mapping::anonymous(1 << 16).unwrap();
        let bytes: Vec<u8> = (0..1 << 16).map(|n: u32| (n % 251) as u8).collect();
        let whole = mapping.slice(0, 1 << 16).unwrap();
        for len in [LONG - 1, LONG, LONG + 13, 5000] {
            for (from, to) in [(0, 20_001), (20_001, 0), (100, 101), (101, 100), (7, 7), (9, 2000)]
            {
                whole.write_from(&bytes);
                let target = mapping.slice(to, len).unwrap();
                let source = [mapping.slice(from, len).unwrap()];
                assert_eq!(copy_between([target].iter(), 0, &source), len);
                let mut expected = bytes.clone();
                expected.copy_within(from..from + len, to);
                let mut seen = vec![0; bytes.len()];
                whole.read_into(&mut seen);
                assert!(seen == expected, "{len} bytes from {from} to {to}");
            }
        }
    }

    #[test]
    fn every_line_of_a_slice_is_asked_for_wherever_it_begins_in_its_first_one() {
        let of = |base, len| lines(base, len).collect::<Vec<_>>();
        assert_eq!(of(0x1000, 0), []);
        assert_eq!(of(0x1000, 64), [0x1000]);
        // A frame of 64 bytes behind a header of 12.
        assert_eq!(of(0x100c, 64), [0x1000, 0x1040]);
        assert_eq!(of(0x103f, 2), [0x1000, 0x1040]);
        assert_eq!(of(0x1000, 1 << 20).len(), PREFETCH_MAX / CACHE_LINE);
    }

    #[test]
    fn an_array_is_written_whole_or_not_at_all() {
        let mapping = Mapping::anonymous(4096).unwrap();
        let slice = mapping.slice(8, 4).unwrap();
        assert!(slice.write_array(b"abcd") && !slice.write_array(b"vwxyz"));
        assert!(slice.write_array(b"ef"));
        assert_eq!(slice.read_array(), Some(*b"efcd"));
        assert_eq!(mapping.slice(12, 1).unwrap().read_array(), Some([0]));
    }

    #[test]
    fn bytes_between_slices_cross_the_borders_of_both() {
        let mapping = Mapping::anonymous(4096).unwrap();
        let slice = |at, len| mapping.slice(at, len).unwrap();
        slice(0, 10).write_from(b"0123456789");
        let sources = [slice(0, 3), slice(3, 0), slice(3, 1), slice(4, 6)];
        for (skip, seen) in [(0, &b"01234567"[..]), (1, b"\x000123456"), (4, b"\0\0\0\x000123")] {
            let targets = [slice(100, 2), slice(102, 0), slice(102, 2), slice(104, 4)];
            slice(100, 20).fill_zero();
            let copied = copy_between(targets.iter(), skip, &sources);
            assert_eq!(copied, 8 - skip, "skip {skip}");
            let mut bytes = [0; 9];
            slice(100, 9).read_into(&mut bytes);
            assert_eq!((&bytes[..8], bytes[8]), (seen, 0), "skip {skip}");
        }
        let long = [slice(200, 4), slice(204, 100)];
        assert_eq!(copy_between(long.iter(), 6, &sources), 10, "there are no more");
        assert_eq!(copy_between(long.iter(), 104, &sources), 0, "there is no room");
        assert_eq!(copy_between(long.iter(), 0, &[]), 0);
    }

    #[test]
    fn advance_drops_whole_slices_and_a_part() {
        let mapping = Mapping::anonymous(4096).unwrap();
        let mut parts = vec![mapping.slice(0, 4).unwrap(), mapping.slice(4, 4).unwrap()];
        copy_to_slices(&parts, b"01234567");
        advance(&mut parts, 5);
        let mut out = [0; 3];
        assert_eq!((parts.len(), copy_from_slices(&parts, &mut out)), (1, 3));
        assert_eq!(&out, b"567");
        advance(&mut parts, 3);
        assert!(parts.is_empty());
    }
}
