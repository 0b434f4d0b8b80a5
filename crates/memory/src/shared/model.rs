//! Guest words as loom atomics, with the methods of the real ones.

use loom::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::Arc;

/// Orders everything before it against everything after it, loads and stores alike.
pub fn fence_full() {
    fence(Ordering::SeqCst);
}

/// Words of a ring as loom atomics of 16 bits each; wider words are put together from them. Of
/// a ring whose indexes have 32 bits, an atomic has 32 bits, and the ring is made of these; of a
/// packed ring's descriptors it has 64 bits.
#[derive(Clone, Debug)]
pub struct Words {
    cells: Arc<Vec<AtomicU16>>,
    wide: Arc<Vec<AtomicU32>>,
    long: Arc<Vec<Long>>,
}

/// A word of 64 bits that both halves read and write.
///
/// Of the accesses to an atomic, loom remembers the last one of all threads, and tries a store
/// earlier only if that one was another thread's. Where a device looks at a descriptor before it
/// writes it, loom forgets that the driver has looked too, and never runs the device first. So
/// each access counts `turn` first: loom tries every order of these. Relaxed, it orders no data.
#[derive(Debug)]
struct Long {
    word: AtomicU64,
    turn: AtomicU32,
}

impl Long {
    fn new() -> Self {
        Self { word: AtomicU64::new(0), turn: AtomicU32::new(0) }
    }
    fn load(&self, order: Ordering) -> u64 {
        self.turn.fetch_add(1, Ordering::Relaxed);
        self.word.load(order)
    }
    fn store(&self, value: u64, order: Ordering) {
        self.turn.fetch_add(1, Ordering::Relaxed);
        self.word.store(value, order);
    }
}

#[allow(clippy::cast_possible_truncation, reason = "words are cut into cells of 16 bits")]
impl Words {
    /// Makes `len` zeroed bytes.
    #[must_use]
    pub fn zeroed(len: usize) -> Self {
        let cells = Arc::new((0..len.div_ceil(2)).map(|_| AtomicU16::new(0)).collect());
        Self { cells, wide: Arc::default(), long: Arc::default() }
    }
    /// Makes `len` zeroed bytes of a ring whose words have 32 bits.
    #[must_use]
    pub fn zeroed_wide(len: usize) -> Self {
        let wide = Arc::new((0..len.div_ceil(4)).map(|_| AtomicU32::new(0)).collect());
        Self { cells: Arc::default(), wide, long: Arc::default() }
    }
    /// Makes `len` zeroed bytes of a ring whose words have 64 bits.
    #[must_use]
    pub fn zeroed_long(len: usize) -> Self {
        let long = Arc::new((0..len.div_ceil(8)).map(|_| Long::new()).collect());
        Self { cells: Arc::default(), wide: Arc::default(), long }
    }
    /// Always returns `None`: the model has no guest memory.
    #[must_use]
    pub fn new(_: Arc<crate::Mapping>, _: usize, len: usize, _: u64) -> Option<Self> {
        Some(Self::zeroed(len))
    }
    /// Returns the size in bytes.
    #[must_use]
    pub fn size(&self) -> usize {
        self.cells.len() * 2 + self.wide.len() * 4 + self.long.len() * 8
    }
    /// Always false.
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
    /// Reads two 64-bit words, in eight cells if there are such.
    #[must_use]
    pub fn load_u64_pair(&self, offset: usize) -> (u64, u64) {
        if let Some([low, high]) = self.long.get(offset / 8..offset / 8 + 2) {
            return (low.load(Ordering::Relaxed), high.load(Ordering::Relaxed));
        }
        (self.load_u64(offset), self.load_u64(offset + 8))
    }
    /// Reads two 64-bit words, the second one first and with acquire.
    #[must_use]
    pub fn load_u64_pair_acquire(&self, offset: usize) -> (u64, u64) {
        let high = self.load_u64_acquire(offset + 8);
        (self.load_u64_pair(offset).0, high)
    }
    /// Reads a 64-bit word with acquire. If it consists of cells, reads the last cell first, with
    /// acquire.
    #[must_use]
    pub fn load_u64_acquire(&self, offset: usize) -> u64 {
        if let Some(word) = self.long.get(offset / 8) {
            return word.load(Ordering::Acquire);
        }
        let last = u64::from(self.load_u16_acquire(offset + 6));
        (0..3)
            .fold(last << 48, |word, i| word | u64::from(self.load_u16(offset + 2 * i)) << (16 * i))
    }
    /// Writes a 64-bit word with release. If it consists of cells, writes the last cell last, with
    /// release.
    pub fn store_u64_release(&self, offset: usize, value: u64) {
        if let Some(word) = self.long.get(offset / 8) {
            return word.store(value, Ordering::Release);
        }
        for i in 0..3 {
            self.store_u16(offset + 2 * i, (value >> (16 * i)) as u16);
        }
        self.store_u16_release(offset + 6, (value >> 48) as u16);
    }
    /// Never: four cells cannot be replaced in one step.
    ///
    /// # Errors
    /// Always.
    pub fn compare_exchange_u64(&self, offset: usize, _: u64, _: u64) -> Result<u64, u64> {
        Err(self.load_u64(offset))
    }
    /// Writes a 64-bit word, in four cells if there are such.
    pub fn store_u64(&self, offset: usize, value: u64) {
        if let Some(word) = self.long.get(offset / 8) {
            return word.store(value, Ordering::Relaxed);
        }
        for i in 0..4 {
            self.store_u16(offset + 2 * i, (value >> (16 * i)) as u16);
        }
    }
    /// Sets bits of a byte.
    pub fn set_bits(&self, offset: usize, bits: u8) {
        let bits = u16::from(bits) << (offset % 2 * 8);
        self.cells[offset / 2].fetch_or(bits, Ordering::AcqRel);
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
    /// Writes a few words of 32 bits.
    pub fn store_few_u32s<const COUNT: usize>(&self, offset: usize, words: [u32; COUNT]) {
        self.store_u32s(offset, &words);
    }
    /// Returns the bytes at `offset`.
    #[must_use]
    pub fn part<const LEN: usize>(&self, offset: usize) -> Part<'_, LEN> {
        Part { words: self, offset }
    }
}

/// Bytes of the words of a ring.
#[derive(Clone, Copy, Debug)]
pub struct Part<'a, const LEN: usize> {
    words: &'a Words,
    offset: usize,
}

impl<const LEN: usize> Part<'_, LEN> {
    /// Reads words of an entry.
    pub fn load_u32s(&self, offset: usize, words: &mut [u32]) {
        self.words.load_u32s(self.offset + offset, words);
    }
    /// Writes words of an entry.
    pub fn store_u32s(&self, offset: usize, words: &[u32]) {
        self.words.store_u32s(self.offset + offset, words);
    }
    /// Writes a 64-bit word in four cells.
    pub fn store_u64(&self, offset: usize, value: u64) {
        self.words.store_u64(self.offset + offset, value);
    }
}
