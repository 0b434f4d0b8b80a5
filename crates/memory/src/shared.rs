//! Guest words with the memory order in the method name: all guest atomics live here.
//!
//! Under `cfg(loom)` the words are loom atomics, so that the race tests run the real ring code.
#![allow(unsafe_code, reason = "allow-listed: atomics at guest addresses")]

#[cfg(not(loom))]
pub use real::{Part, Words, fence_full};

#[cfg(loom)]
pub use model::{Part, Words, fence_full};

/// Keeps stores before it in order with stores after it, for a process that reads them after this
/// one was killed. A process is killed between two instructions, and its successor starts after its
/// end. So only the compiler could reorder the stores, and no instruction is needed.
#[inline]
pub fn fence_compiler() {
    std::sync::atomic::compiler_fence(std::sync::atomic::Ordering::SeqCst);
}

#[cfg(not(loom))]
mod real {
    use crate::killed::before_store;
    use crate::mapping::Mapping;
    use crate::touch::touched;
    use std::marker::PhantomData;
    use std::ptr::NonNull;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering, fence};

    /// Orders all loads and stores before it against all loads and stores after it.
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

        /// Returns the size in bytes.
        #[must_use]
        pub fn size(&self) -> usize {
            self.len
        }

        /// True once the memory was truncated while it was mapped.
        #[must_use]
        pub fn is_broken(&self) -> bool {
            self.mapping.is_broken()
        }

        #[inline]
        fn at<T>(&self, offset: usize) -> *mut T {
            touched();
            assert!(offset <= self.len && self.len - offset >= size_of::<T>());
            self.base.as_ptr().wrapping_add(offset).cast::<T>()
        }

        #[inline]
        fn u16_at(&self, offset: usize) -> &AtomicU16 {
            // SAFETY: in range (asserted), 2-aligned (rings are), alive while `mapping` is held.
            unsafe { AtomicU16::from_ptr(self.at::<u16>(offset)) }
        }

        /// Reads a word without order.
        #[must_use]
        #[inline]
        pub fn load_u16(&self, offset: usize) -> u16 {
            u16::from_le(self.u16_at(offset).load(Ordering::Relaxed))
        }

        /// Reads a word with acquire: writes of the peer from before it published the word are seen
        /// after this.
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

        /// Writes a word with release: a peer that reads it with acquire sees all writes from
        /// before this.
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

        /// Reads two 64-bit words (a descriptor), the second one first and with acquire: one check
        /// for both.
        #[must_use]
        #[inline]
        pub fn load_u64_pair_acquire(&self, offset: usize) -> (u64, u64) {
            let words = self.at::<[u64; 2]>(offset).cast::<u64>();
            // SAFETY: as in `load_u64_pair`; the second of the two.
            let high = unsafe { AtomicU64::from_ptr(words.wrapping_add(1)) };
            let high = high.load(Ordering::Acquire);
            // SAFETY: as above; the first.
            let low = unsafe { AtomicU64::from_ptr(words) };
            (low.load(Ordering::Relaxed), high)
        }

        /// Writes a 64-bit word (half a descriptor) without order.
        #[inline]
        pub fn store_u64(&self, offset: usize, value: u64) {
            before_store();
            // SAFETY: in range (asserted); descriptor tables are 16-aligned, offsets 8-aligned.
            let word = unsafe { AtomicU64::from_ptr(self.at::<u64>(offset)) };
            word.store(value, Ordering::Relaxed);
        }

        /// Sets bits of a byte whose bits others set and clear. If all of them are set already,
        /// nothing is stored. A peer that clears them sees the writes from before a full fence that
        /// precedes this call.
        pub fn set_bits(&self, offset: usize, bits: u8) {
            // SAFETY: in range (asserted); a byte is aligned anywhere.
            let byte = unsafe { AtomicU8::from_ptr(self.at::<u8>(offset)) };
            if byte.load(Ordering::Relaxed) & bits != bits {
                before_store();
                byte.fetch_or(bits, Ordering::AcqRel);
            }
        }

        /// Writes a 64-bit word (the flags of a packed ring's descriptor are in it) with release: a
        /// peer that reads it with acquire sees all writes from before this.
        #[inline]
        pub fn store_u64_release(&self, offset: usize, value: u64) {
            before_store();
            self.u64_at(offset).store(value, Ordering::Release);
        }

        #[inline]
        fn u64_at(&self, offset: usize) -> &AtomicU64 {
            let word = self.at::<u64>(offset);
            assert!(word.is_aligned());
            // SAFETY: in range and aligned (asserted), alive while `mapping` is held.
            unsafe { AtomicU64::from_ptr(word) }
        }

        /// Reads a 64-bit word (an entry of a grant table) with acquire: its writer's earlier
        /// writes are seen after this.
        #[must_use]
        #[inline]
        pub fn load_u64_acquire(&self, offset: usize) -> u64 {
            u64::from_le(self.u64_at(offset).load(Ordering::Acquire))
        }

        /// Replaces a 64-bit word that is still `old` by `new`, with acquire and release: a peer
        /// that reads the new word with acquire sees the writes from before this, and the other way
        /// round.
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

        /// Returns the address of `count` words of 32 bits at `offset`, after one check for all.
        #[inline]
        fn u32s_at(&self, offset: usize, count: usize) -> *mut u32 {
            touched();
            assert!(offset <= self.len && (self.len - offset) / 4 >= count);
            let first = self.base.as_ptr().wrapping_add(offset).cast::<u32>();
            assert!(first.is_aligned());
            first
        }

        #[inline]
        fn u32_at(&self, offset: usize) -> &AtomicU32 {
            // SAFETY: in range and aligned (asserted), alive while `mapping` is held.
            unsafe { AtomicU32::from_ptr(self.u32s_at(offset, 1)) }
        }

        /// Reads an index of 32 bits without order.
        #[must_use]
        #[inline]
        pub fn load_u32(&self, offset: usize) -> u32 {
            u32::from_le(self.u32_at(offset).load(Ordering::Relaxed))
        }

        /// Reads an index of 32 bits with acquire: writes of the peer from before it published the
        /// index are seen after this.
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

        /// Writes an index of 32 bits with release: a peer that reads it with acquire sees all
        /// writes from before this.
        #[inline]
        pub fn store_u32_release(&self, offset: usize, value: u32) {
            before_store();
            self.u32_at(offset).store(value.to_le(), Ordering::Release);
        }

        /// Copies words of 32 bits (an entry of a Xen ring) out, each once and without order: two
        /// at a time where they lie on a border of eight bytes.
        #[inline]
        pub fn load_u32s(&self, offset: usize, words: &mut [u32]) {
            let first = self.u32s_at(offset, words.len());
            // SAFETY: all words are in range and aligned (asserted in `u32s_at`), and alive while
            // `mapping` is held.
            unsafe { load_from(first, words) };
        }

        /// Writes words of 32 bits (an entry of a Xen ring) without order, two at a time likewise.
        #[inline]
        pub fn store_u32s(&self, offset: usize, words: &[u32]) {
            let first = self.u32s_at(offset, words.len());
            // SAFETY: as in `load_u32s`.
            unsafe { store_to(first, words) };
        }

        /// Writes a few words of 32 bits (a response of a Xen ring) without order, one at a time:
        /// they come from registers, and need not be stored in private memory first.
        #[inline]
        pub fn store_few_u32s<const COUNT: usize>(&self, offset: usize, words: [u32; COUNT]) {
            let first = self.u32s_at(offset, COUNT);
            for (n, word) in words.into_iter().enumerate() {
                before_store();
                // SAFETY: one of the words, all of which are in range and aligned (asserted in
                // `u32s_at`), and alive while `mapping` is held.
                let place = unsafe { AtomicU32::from_ptr(first.wrapping_add(n)) };
                place.store(word.to_le(), Ordering::Relaxed);
            }
        }

        /// The `LEN` bytes at `offset`, an entry of a Xen ring or a record. Reads and writes at
        /// constant offsets within it are not checked again.
        ///
        /// # Panics
        /// If they are not all inside, or not aligned to four bytes.
        #[inline]
        pub fn part<const LEN: usize>(&self, offset: usize) -> Part<'_, LEN> {
            Part { first: self.u32s_at(offset, LEN / 4), words: PhantomData }
        }
    }

    /// Bytes of the words of a ring that were checked together.
    #[derive(Clone, Copy, Debug)]
    pub struct Part<'a, const LEN: usize> {
        first: *mut u32,
        words: PhantomData<&'a Words>,
    }

    impl<const LEN: usize> Part<'_, LEN> {
        #[inline]
        fn u32s_at(&self, offset: usize, count: usize) -> *mut u32 {
            assert!(offset.is_multiple_of(4) && offset <= LEN && (LEN - offset) / 4 >= count);
            self.first.wrapping_byte_add(offset)
        }

        /// As [`Words::load_u32s`].
        #[inline]
        pub fn load_u32s(&self, offset: usize, words: &mut [u32]) {
            let first = self.u32s_at(offset, words.len());
            // SAFETY: all words are in range (asserted here), which is inside of words that are
            // alive and aligned (`Words::part`).
            unsafe { load_from(first, words) };
        }

        /// As [`Words::store_u32s`].
        #[inline]
        pub fn store_u32s(&self, offset: usize, words: &[u32]) {
            let first = self.u32s_at(offset, words.len());
            // SAFETY: as in `load_u32s`.
            unsafe { store_to(first, words) };
        }

        /// As [`Words::store_u64`].
        #[inline]
        pub fn store_u64(&self, offset: usize, value: u64) {
            let word = self.u32s_at(offset, 2).cast::<u64>();
            assert!(word.is_aligned());
            before_store();
            // SAFETY: in range and aligned (asserted), alive as in `load_u32s`.
            unsafe { AtomicU64::from_ptr(word) }.store(value, Ordering::Relaxed);
        }
    }

    /// Copies words out of shared memory.
    ///
    /// # Safety
    /// `words.len()` words lie at `first`, which is aligned, and stay mapped during the call.
    #[inline]
    unsafe fn load_from(first: *mut u32, words: &mut [u32]) {
        let load_pair = |n: usize, pair: &mut [u32; 2]| {
            let place = first.cast::<u64>().wrapping_add(n);
            // SAFETY: two of the words, the first of which is aligned to eight bytes (below).
            let both = unsafe { AtomicU64::from_ptr(place) }.load(Ordering::Relaxed);
            *pair = halves(u64::from_le(both));
        };
        let (mut at, mut singles) = (first, words);
        if first.cast::<u64>().is_aligned() {
            let (pairs, last) = singles.as_chunks_mut();
            at = first.wrapping_add(2 * pairs.len());
            match pairs {
                // Most requests have one segment: this case needs no loop.
                [pair] => load_pair(0, pair),
                pairs => pairs.iter_mut().enumerate().for_each(|(n, pair)| load_pair(n, pair)),
            }
            singles = last;
        }
        for word in singles {
            // SAFETY: one of the words.
            *word = u32::from_le(unsafe { AtomicU32::from_ptr(at) }.load(Ordering::Relaxed));
            at = at.wrapping_add(1);
        }
    }

    /// Copies words into shared memory.
    ///
    /// # Safety
    /// As for [`load_from`].
    #[inline]
    unsafe fn store_to(first: *mut u32, words: &[u32]) {
        let store_pair = |n: usize, [low, high]: &[u32; 2]| {
            before_store();
            let both = u64::from(*low) | u64::from(*high) << 32;
            let place = first.cast::<u64>().wrapping_add(n);
            // SAFETY: as in `load_from`.
            unsafe { AtomicU64::from_ptr(place) }.store(both.to_le(), Ordering::Relaxed);
        };
        let (mut at, mut singles) = (first, words);
        if first.cast::<u64>().is_aligned() {
            let (pairs, last) = singles.as_chunks();
            at = first.wrapping_add(2 * pairs.len());
            match pairs {
                [pair] => store_pair(0, pair),
                pairs => pairs.iter().enumerate().for_each(|(n, pair)| store_pair(n, pair)),
            }
            singles = last;
        }
        for word in singles {
            before_store();
            // SAFETY: as in `load_from`.
            unsafe { AtomicU32::from_ptr(at) }.store(word.to_le(), Ordering::Relaxed);
            at = at.wrapping_add(1);
        }
    }

    /// Splits a word of 64 bits into two of 32 bits, the low one first.
    #[inline]
    #[allow(clippy::cast_possible_truncation, reason = "a word is cut into its halves")]
    const fn halves(both: u64) -> [u32; 2] {
        [both as u32, (both >> 32) as u32]
    }
}

#[cfg(loom)]
mod model;
