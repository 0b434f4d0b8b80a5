//! Guest words with the memory order in the method name: all guest atomics live here.
//!
//! Under `cfg(loom)` the words are loom atomics, so that the race tests run the real ring code.
#![allow(unsafe_code, reason = "allow-listed: atomics at guest addresses")]

#[cfg(not(loom))]
pub use real::{Words, fence_full};

#[cfg(loom)]
pub use model::{Words, fence_full};

/// Keeps what was stored before in front of what is stored after it, for whoever looks when this
/// process was killed. A process is killed between two instructions, and its end comes before the
/// start of whoever looks: only the compiler could exchange the two. No instruction.
#[inline]
pub fn fence_compiler() {
    std::sync::atomic::compiler_fence(std::sync::atomic::Ordering::SeqCst);
}

#[cfg(not(loom))]
mod real {
    use crate::killed::before_store;
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
            before_store();
            self.u16_at(offset).store(value.to_le(), Ordering::Relaxed);
        }

        /// Writes a word; what we wrote before is seen by a peer that reads it with acquire.
        #[inline]
        pub fn store_u16_release(&self, offset: usize, value: u16) {
            before_store();
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
            before_store();
            // SAFETY: in range (asserted); descriptor tables are 16-aligned, offsets 8-aligned.
            let word = unsafe { AtomicU64::from_ptr(self.at::<u64>(offset)) };
            word.store(value, Ordering::Relaxed);
        }

        #[inline]
        fn u64_at(&self, offset: usize) -> &AtomicU64 {
            let word = self.at::<u64>(offset);
            assert!(word.is_aligned());
            // SAFETY: in range and aligned (asserted), alive as long as `mapping`.
            unsafe { AtomicU64::from_ptr(word) }
        }

        /// Reads a 64-bit word (an entry of a grant table); what its writer wrote before is seen
        /// after.
        #[must_use]
        #[inline]
        pub fn load_u64_acquire(&self, offset: usize) -> u64 {
            u64::from_le(self.u64_at(offset).load(Ordering::Acquire))
        }

        /// Replaces a 64-bit word that is still `old` by `new`. What was written before is seen by
        /// whoever reads the new word with acquire, and the other way round.
        ///
        /// # Errors
        /// The word, if it is another one.
        #[inline]
        pub fn compare_exchange_u64(&self, offset: usize, old: u64, new: u64) -> Result<u64, u64> {
            let (word, old, new) = (self.u64_at(offset), old.to_le(), new.to_le());
            word.compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire)
                .map(u64::from_le)
                .map_err(u64::from_le)
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
            before_store();
            let words = self.at::<[u32; 2]>(offset).cast::<u32>();
            // SAFETY: as in `load_pair`, with one check for both words.
            let id = unsafe { AtomicU32::from_ptr(words) };
            // SAFETY: as above; the second of the two.
            let len = unsafe { AtomicU32::from_ptr(words.wrapping_add(1)) };
            id.store(pair.0.to_le(), Ordering::Relaxed);
            len.store(pair.1.to_le(), Ordering::Relaxed);
        }

        /// Words of 32 bits from `offset` on: one check for all of them.
        #[inline]
        fn u32s_at(&self, offset: usize, count: usize) -> *mut u32 {
            assert!(offset <= self.len && (self.len - offset) / 4 >= count);
            let first = self.base.as_ptr().wrapping_add(offset).cast::<u32>();
            assert!(first.is_aligned());
            first
        }

        #[inline]
        fn u32_at(&self, offset: usize) -> &AtomicU32 {
            // SAFETY: in range and aligned (asserted), alive as long as `mapping`.
            unsafe { AtomicU32::from_ptr(self.u32s_at(offset, 1)) }
        }

        /// Reads an index of 32 bits without order.
        #[must_use]
        #[inline]
        pub fn load_u32(&self, offset: usize) -> u32 {
            u32::from_le(self.u32_at(offset).load(Ordering::Relaxed))
        }

        /// Reads an index of 32 bits; what the peer wrote before it published it is seen after.
        #[must_use]
        #[inline]
        pub fn load_u32_acquire(&self, offset: usize) -> u32 {
            u32::from_le(self.u32_at(offset).load(Ordering::Acquire))
        }

        /// Writes an index of 32 bits without order.
        #[inline]
        pub fn store_u32(&self, offset: usize, value: u32) {
            before_store();
            self.u32_at(offset).store(value.to_le(), Ordering::Relaxed);
        }

        /// Writes an index of 32 bits; what we wrote before is seen by a peer that reads it with
        /// acquire.
        #[inline]
        pub fn store_u32_release(&self, offset: usize, value: u32) {
            before_store();
            self.u32_at(offset).store(value.to_le(), Ordering::Release);
        }

        /// Copies words of 32 bits (an entry of a Xen ring) out, each once and without order.
        #[inline]
        pub fn load_u32s(&self, offset: usize, words: &mut [u32]) {
            let first = self.u32s_at(offset, words.len());
            for (n, word) in words.iter_mut().enumerate() {
                // SAFETY: all words are in range and aligned (asserted in `u32s_at`).
                let place = unsafe { AtomicU32::from_ptr(first.wrapping_add(n)) };
                *word = u32::from_le(place.load(Ordering::Relaxed));
            }
        }

        /// Writes words of 32 bits (an entry of a Xen ring) without order.
        #[inline]
        pub fn store_u32s(&self, offset: usize, words: &[u32]) {
            let first = self.u32s_at(offset, words.len());
            for (n, word) in words.iter().enumerate() {
                // SAFETY: as in `load_u32s`.
                let place = unsafe { AtomicU32::from_ptr(first.wrapping_add(n)) };
                before_store();
                place.store(word.to_le(), Ordering::Relaxed);
            }
        }
    }
}

#[cfg(loom)]
mod model {
    use loom::sync::atomic::{AtomicU16, AtomicU32, Ordering, fence};
    use std::sync::Arc;

    /// Orders everything before it against everything after it, loads and stores alike.
    pub fn fence_full() {
        fence(Ordering::SeqCst);
    }

    /// Words of a ring as loom atomics of 16 bits each; wider words are put together from them. Of
    /// a ring whose indexes have 32 bits, an atomic has 32 bits, and the ring is made of these.
    #[derive(Clone, Debug)]
    pub struct Words {
        cells: Arc<Vec<AtomicU16>>,
        wide: Arc<Vec<AtomicU32>>,
    }

    #[allow(clippy::cast_possible_truncation, reason = "words are cut into cells of 16 bits")]
    impl Words {
        /// `len` zeroed bytes.
        #[must_use]
        pub fn zeroed(len: usize) -> Self {
            let cells = Arc::new((0..len.div_ceil(2)).map(|_| AtomicU16::new(0)).collect());
            Self { cells, wide: Arc::default() }
        }
        /// `len` zeroed bytes of a ring whose words have 32 bits.
        #[must_use]
        pub fn zeroed_wide(len: usize) -> Self {
            let wide = Arc::new((0..len.div_ceil(4)).map(|_| AtomicU32::new(0)).collect());
            Self { cells: Arc::default(), wide }
        }
        /// Never maps: the model has no guest memory.
        #[must_use]
        pub fn new(_: Arc<crate::Mapping>, _: usize, len: usize, _: u64) -> Option<Self> {
            Some(Self::zeroed(len))
        }
        /// Bytes.
        #[must_use]
        pub fn size(&self) -> usize {
            self.cells.len() * 2 + self.wide.len() * 4
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
        /// Reads a 64-bit word in four cells.
        #[must_use]
        pub fn load_u64_acquire(&self, offset: usize) -> u64 {
            self.load_u64(offset)
        }
        /// Never: four cells cannot be replaced in one step.
        ///
        /// # Errors
        /// Always.
        pub fn compare_exchange_u64(&self, offset: usize, _: u64, _: u64) -> Result<u64, u64> {
            Err(self.load_u64(offset))
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
        /// Reads an index without order.
        #[must_use]
        pub fn load_u32(&self, offset: usize) -> u32 {
            self.wide[offset / 4].load(Ordering::Relaxed)
        }
        /// Reads an index with acquire.
        #[must_use]
        pub fn load_u32_acquire(&self, offset: usize) -> u32 {
            self.wide[offset / 4].load(Ordering::Acquire)
        }
        /// Writes an index without order.
        pub fn store_u32(&self, offset: usize, value: u32) {
            self.wide[offset / 4].store(value, Ordering::Relaxed);
        }
        /// Writes an index with release.
        pub fn store_u32_release(&self, offset: usize, value: u32) {
            self.wide[offset / 4].store(value, Ordering::Release);
        }
        /// Reads words of an entry.
        pub fn load_u32s(&self, offset: usize, words: &mut [u32]) {
            for (n, word) in words.iter_mut().enumerate() {
                *word = self.load_u32(offset + 4 * n);
            }
        }
        /// Writes words of an entry.
        pub fn store_u32s(&self, offset: usize, words: &[u32]) {
            for (n, word) in words.iter().enumerate() {
                self.store_u32(offset + 4 * n, *word);
            }
        }
    }
}
