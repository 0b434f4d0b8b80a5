//! Guest words with the memory order in the method name: all guest atomics live here.
//!
//! Under `cfg(loom)` the words are loom atomics, so that the race tests run the real ring code.
#![allow(unsafe_code, reason = "allow-listed: atomics at guest addresses")]

#[cfg(not(loom))]
pub use real::{Words, fence_full};

#[cfg(loom)]
pub use model::{Words, fence_full};

#[cfg(not(loom))]
mod real {
    use crate::mapping::Mapping;
    use std::ptr::NonNull;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering, fence};

    /// Orders everything before it against everything after it, loads and stores alike.
    #[inline]
    pub fn fence_full() {
        fence(Ordering::SeqCst);
    }

    /// Words of a ring in guest memory, little-endian, at byte offsets. Keeps its mapping alive.
    ///
    /// Every access checks its offset: one predictable compare each.
    #[derive(Clone, Debug)]
    pub struct Words {
        base: NonNull<u8>,
        len: usize,
        mapping: Arc<Mapping>,
    }

    // SAFETY: words are atomics in shared memory, and `mapping` keeps the memory alive.
    unsafe impl Send for Words {}
    // SAFETY: as above.
    unsafe impl Sync for Words {}

    impl Words {
        /// `len` bytes at `offset` of `mapping`; `None` if they are out of range or if the first
        /// is not aligned to `align` (that of the ring area, so that its words are aligned too).
        #[must_use]
        pub fn new(mapping: Arc<Mapping>, offset: usize, len: usize, align: u64) -> Option<Self> {
            mapping.slice(offset, len)?;
            let base = mapping.address(offset);
            let aligned = (base.as_ptr() as u64).is_multiple_of(align);
            aligned.then_some(Self { base, len, mapping })
        }

        /// Bytes.
        #[must_use]
        pub fn size(&self) -> usize {
            self.len
        }

        /// True once the memory was cut away under us.
        #[must_use]
        pub fn is_broken(&self) -> bool {
            self.mapping.is_broken()
        }

        #[inline]
        fn at<T>(&self, offset: usize) -> *mut T {
            assert!(offset <= self.len && self.len - offset >= size_of::<T>());
            self.base.as_ptr().wrapping_add(offset).cast::<T>()
        }

        #[inline]
        fn u16_at(&self, offset: usize) -> &AtomicU16 {
            // SAFETY: in range (asserted), 2-aligned (rings are), alive as long as `mapping`.
            unsafe { AtomicU16::from_ptr(self.at::<u16>(offset)) }
        }

        /// Reads a word without order.
        #[must_use]
        #[inline]
        pub fn load_u16(&self, offset: usize) -> u16 {
            u16::from_le(self.u16_at(offset).load(Ordering::Relaxed))
        }

        /// Reads a word; what the peer wrote before it published the word is seen after.
        #[must_use]
        #[inline]
        pub fn load_u16_acquire(&self, offset: usize) -> u16 {
            u16::from_le(self.u16_at(offset).load(Ordering::Acquire))
        }

        /// Writes a word without order.
        #[inline]
        pub fn store_u16(&self, offset: usize, value: u16) {
            self.u16_at(offset).store(value.to_le(), Ordering::Relaxed);
        }

        /// Writes a word; what we wrote before is seen by a peer that reads it with acquire.
        #[inline]
        pub fn store_u16_release(&self, offset: usize, value: u16) {
            self.u16_at(offset).store(value.to_le(), Ordering::Release);
        }

        /// Reads two 64-bit words (a descriptor) without order: one check for both.
        #[must_use]
        #[inline]
        pub fn load_u64_pair(&self, offset: usize) -> (u64, u64) {
            let words = self.at::<[u64; 2]>(offset).cast::<u64>();
            // SAFETY: 16 bytes from the offset are in range (asserted); descriptor tables are
            // 16-aligned, and so are the offsets in them.
            let low = unsafe { AtomicU64::from_ptr(words) };
            // SAFETY: as above; the second of the two.
            let high = unsafe { AtomicU64::from_ptr(words.wrapping_add(1)) };
            (low.load(Ordering::Relaxed), high.load(Ordering::Relaxed))
        }

        /// Writes a 64-bit word (half a descriptor) without order.
        #[inline]
        pub fn store_u64(&self, offset: usize, value: u64) {
            // SAFETY: in range (asserted); descriptor tables are 16-aligned, offsets 8-aligned.
            let word = unsafe { AtomicU64::from_ptr(self.at::<u64>(offset)) };
            word.store(value, Ordering::Relaxed);
        }

        /// Reads a used element: id and length, without order.
        #[must_use]
        #[inline]
        pub fn load_pair(&self, offset: usize) -> (u32, u32) {
            // SAFETY: in range (asserted); used rings are 4-aligned and so are their elements.
            let id = unsafe { AtomicU32::from_ptr(self.at::<u32>(offset)) };
            // SAFETY: as above.
            let len = unsafe { AtomicU32::from_ptr(self.at::<u32>(offset + 4)) };
            (u32::from_le(id.load(Ordering::Relaxed)), u32::from_le(len.load(Ordering::Relaxed)))
        }

        /// Writes a used element: id and length, without order.
        #[inline]
        pub fn store_pair(&self, offset: usize, pair: (u32, u32)) {
            let words = self.at::<[u32; 2]>(offset).cast::<u32>();
            // SAFETY: as in `load_pair`, with one check for both words.
            let id = unsafe { AtomicU32::from_ptr(words) };
            // SAFETY: as above; the second of the two.
            let len = unsafe { AtomicU32::from_ptr(words.wrapping_add(1)) };
            id.store(pair.0.to_le(), Ordering::Relaxed);
            len.store(pair.1.to_le(), Ordering::Relaxed);
        }
    }
}

#[cfg(loom)]
mod model {
    use loom::sync::atomic::{AtomicU16, Ordering, fence};
    use std::sync::Arc;

    /// Orders everything before it against everything after it, loads and stores alike.
    pub fn fence_full() {
        fence(Ordering::SeqCst);
    }

    /// Words of a ring as loom atomics of 16 bits each; wider words are put together from them.
    #[derive(Clone, Debug)]
    pub struct Words {
        cells: Arc<Vec<AtomicU16>>,
    }

    #[allow(clippy::cast_possible_truncation, reason = "words are cut into cells of 16 bits")]
    impl Words {
        /// `len` zeroed bytes.
        #[must_use]
        pub fn zeroed(len: usize) -> Self {
            Self { cells: Arc::new((0..len.div_ceil(2)).map(|_| AtomicU16::new(0)).collect()) }
        }
        /// Never maps: the model has no guest memory.
        #[must_use]
        pub fn new(_: Arc<crate::Mapping>, _: usize, len: usize, _: u64) -> Option<Self> {
            Some(Self::zeroed(len))
        }
        /// Bytes.
        #[must_use]
        pub fn size(&self) -> usize {
            self.cells.len() * 2
        }
        /// Never.
        #[must_use]
        pub fn is_broken(&self) -> bool {
            false
        }
        /// Reads a word without order.
        #[must_use]
        pub fn load_u16(&self, offset: usize) -> u16 {
            self.cells[offset / 2].load(Ordering::Relaxed)
        }
        /// Reads a word with acquire.
        #[must_use]
        pub fn load_u16_acquire(&self, offset: usize) -> u16 {
            self.cells[offset / 2].load(Ordering::Acquire)
        }
        /// Writes a word without order.
        pub fn store_u16(&self, offset: usize, value: u16) {
            self.cells[offset / 2].store(value, Ordering::Relaxed);
        }
        /// Writes a word with release.
        pub fn store_u16_release(&self, offset: usize, value: u16) {
            self.cells[offset / 2].store(value, Ordering::Release);
        }
        fn load_u64(&self, offset: usize) -> u64 {
            (0..4).map(|i| u64::from(self.load_u16(offset + 2 * i)) << (16 * i)).sum()
        }
        /// Reads two 64-bit words in eight cells.
        #[must_use]
        pub fn load_u64_pair(&self, offset: usize) -> (u64, u64) {
            (self.load_u64(offset), self.load_u64(offset + 8))
        }
        /// Writes a 64-bit word in four cells.
        pub fn store_u64(&self, offset: usize, value: u64) {
            for i in 0..4 {
                self.store_u16(offset + 2 * i, (value >> (16 * i)) as u16);
            }
        }
        /// Reads a used element in four cells.
        #[must_use]
        pub fn load_pair(&self, offset: usize) -> (u32, u32) {
            let word = self.load_u64(offset);
            (word as u32, (word >> 32) as u32)
        }
        /// Writes a used element in four cells.
        pub fn store_pair(&self, offset: usize, pair: (u32, u32)) {
            self.store_u64(offset, u64::from(pair.0) | u64::from(pair.1) << 32);
        }
    }
}
