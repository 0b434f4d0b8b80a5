//! `Histogram`: counts of values by their size; `Histograms`: several that are allocated with their
//! first value; `ServeTimes`: one for each operation of a disk.

use super::Counter;
use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;

/// The number of buckets of a histogram: 4 per power of two.
pub const BUCKETS: usize = 252;

/// A log-linear histogram of 64-bit values, 4 buckets per power of two, 2 KiB. Its alignment keeps
/// other data out of its cache lines, and out of the line that a CPU fetches with each of them:
/// another worker writes the data next to it.
#[derive(Debug)]
#[repr(align(128))]
pub struct Histogram {
    buckets: [Counter; BUCKETS],
    sum: Counter,
}

/// A histogram without a value, returned in place of one that is not allocated.
static EMPTY: Histogram = Histogram::new();

impl Default for Histogram {
    fn default() -> Self {
        Self::new()
    }
}

impl Histogram {
    const fn new() -> Self {
        Self {
            buckets: [const { Counter(AtomicU64::new(0)) }; BUCKETS],
            sum: Counter(AtomicU64::new(0)),
        }
    }

    /// Returns the bucket of `value`: given by its highest set bit and the two bits below.
    #[must_use]
    #[inline]
    #[allow(clippy::cast_possible_truncation, reason = "below 4")]
    pub fn bucket(value: u64) -> usize {
        if value < 4 {
            return value as usize;
        }
        let power = value.ilog2();
        let low = (value >> (power - 2)) as usize & 3;
        4 * (power as usize - 1) + low
    }

    /// Returns the largest value of bucket `index`.
    #[must_use]
    pub fn bucket_max(index: usize) -> u64 {
        if index < 4 {
            return index as u64;
        }
        let (power, low) = (index / 4 + 1, (index % 4) as u64);
        let step = 1u64 << (power - 2);
        (4 + low).wrapping_mul(step).wrapping_add(step).wrapping_sub(1)
    }

    /// Counts `count` values at once.
    #[inline]
    pub fn record(&self, value: u64, count: u64) {
        debug_assert!(!std::ptr::eq(self, &raw const EMPTY), "nobody owns it");
        self.buckets[Self::bucket(value)].add(count);
        self.sum.add(value.wrapping_mul(count));
    }

    /// Returns the largest value and the count of each bucket that is not empty.
    pub fn filled(&self) -> impl Iterator<Item = (u64, u64)> {
        self.buckets.iter().enumerate().filter_map(|(index, bucket)| {
            let count = bucket.value();
            (count > 0).then(|| (Self::bucket_max(index), count))
        })
    }

    /// Returns every number of the histogram.
    fn cells(&self) -> impl Iterator<Item = &Counter> {
        self.buckets.iter().chain([&self.sum])
    }

    /// Returns the sum of all values.
    #[must_use]
    pub fn sum(&self) -> u64 {
        self.sum.value()
    }

    /// Returns the number of values.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.buckets.iter().map(Counter::value).sum()
    }

    /// Returns the value that `percent` of all values do not exceed, as its bucket's; 0 if empty.
    #[must_use]
    pub fn percentile(&self, percent: u64) -> u64 {
        let rank = (self.count() * percent).div_ceil(100);
        let mut seen = 0;
        self.filled()
            .find_map(|(max, count)| {
                seen += count;
                (seen >= rank).then_some(max)
            })
            .unwrap_or(0)
    }
}

/// Histograms that get their values together. They are allocated (2 KiB each) with the first value:
/// of the queues of a thousand devices most have never run.
#[derive(Debug)]
pub(super) struct Histograms<const N: usize>(OnceLock<Box<[Histogram; N]>>);

impl<const N: usize> Default for Histograms<N> {
    fn default() -> Self {
        Self(OnceLock::new())
    }
}

impl<const N: usize> Histograms<N> {
    /// Returns the histograms, if they are allocated.
    #[inline]
    pub(super) fn allocated(&self) -> Option<&[Histogram; N]> {
        self.0.get().map(|all| &**all)
    }

    /// Returns the histograms for their first value, and allocates them. Only the queue's owner may
    /// call this.
    pub(super) fn to_record(&self) -> &[Histogram; N] {
        self.0.get_or_init(Self::allocate)
    }

    #[cold]
    #[inline(never)]
    fn allocate() -> Box<[Histogram; N]> {
        Box::new(std::array::from_fn(|_| Histogram::new()))
    }

    /// Returns the histograms, which are empty if none has a value yet.
    pub(super) fn all(&self) -> [&Histogram; N] {
        self.0.get().map_or([&EMPTY; N], |all| all.each_ref())
    }

    /// True if a histogram may have a value.
    fn is_allocated(&self) -> bool {
        self.0.get().is_some()
    }

    /// Returns every number of the histograms.
    pub(super) fn numbers(&self) -> impl Iterator<Item = u64> {
        self.all().into_iter().flat_map(Histogram::cells).map(Counter::value)
    }

    /// Sets every number to what `next` returns, in the order of [`Self::numbers`]. Nothing is
    /// allocated for numbers that are all 0.
    pub(super) fn show(&self, next: impl FnMut() -> u64) {
        let numbers: Vec<_> = std::iter::repeat_with(next).take(N * (BUCKETS + 1)).collect();
        if self.is_allocated() || numbers.iter().any(|n| *n > 0) {
            let cells = self.to_record().iter().flat_map(Histogram::cells);
            cells.zip(numbers).for_each(|(cell, n)| cell.set(n));
        }
    }
}

/// The operation of a disk request. Each has a histogram of its times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ServedOp {
    /// A read.
    Read,
    /// A write.
    Write,
    /// A flush.
    Flush,
    /// A discard, a write of zeroes or a secure erase.
    Discard,
    /// A request that never reached the disk: it was refused, or asked for the disk's serial.
    Other,
}

/// The number of operations that most queues do all the time: the first ones of [`ServedOp`].
const OFTEN: usize = 2;
/// The number of operations that most queues do seldom or never: the others.
const RARE: usize = 3;

/// A histogram for each operation of a disk. Those of the rare operations are allocated separately.
#[derive(Debug, Default)]
pub struct ServeTimes {
    /// The histograms of reads and of writes.
    often: Histograms<OFTEN>,
    rare: Histograms<RARE>,
}

impl ServeTimes {
    /// The number of histograms.
    pub(super) const HISTOGRAMS: usize = OFTEN + RARE;

    /// Counts `count` requests that took `value` each. Only the queue's owner may call this.
    #[inline]
    pub fn record(&self, op: ServedOp, value: u64, count: u64) {
        match self.often.allocated().and_then(|often| often.get(op as usize)) {
            Some(histogram) => histogram.record(value, count),
            None => self.record_rare(op as usize, value, count),
        }
    }

    /// Records the time of a rare operation, or the first time of another one.
    #[cold]
    #[inline(never)]
    fn record_rare(&self, op: usize, value: u64, count: u64) {
        match op.checked_sub(OFTEN) {
            Some(index) => self.rare.to_record()[index].record(value, count),
            None => self.often.to_record()[op].record(value, count),
        }
    }

    /// Returns the name and histogram of each operation that may have values.
    pub fn ops(&self) -> impl Iterator<Item = (&'static str, &Histogram)> {
        let rare = self.rare.is_allocated().then(|| self.rare.all());
        ["read", "write", "flush", "discard", "other"]
            .into_iter()
            .zip(self.often.all().into_iter().chain(rare.into_iter().flatten()))
    }

    /// Returns the largest value and the count of each bucket of all operations together that is
    /// not empty.
    #[must_use]
    pub fn filled(&self) -> Vec<(u64, u64)> {
        let count = |index: usize| self.ops().map(|(_, h)| h.buckets[index].value()).sum();
        let all = (0..BUCKETS).map(|index| (Histogram::bucket_max(index), count(index)));
        all.filter(|(_, count)| *count > 0).collect()
    }

    /// Returns the sum of the values of all operations.
    #[must_use]
    pub fn sum(&self) -> u64 {
        self.ops().fold(0, |sum, (_, histogram)| sum.wrapping_add(histogram.sum()))
    }

    /// Returns the number of values of all operations.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.ops().map(|(_, histogram)| histogram.count()).sum()
    }

    /// Returns the values of all counters in a fixed order.
    pub(super) fn numbers(&self) -> impl Iterator<Item = u64> {
        self.often.numbers().chain(self.rare.numbers())
    }

    /// Sets every number to what `next` returns, in the order of [`Self::numbers`].
    pub(super) fn show(&self, mut next: impl FnMut() -> u64) {
        self.often.show(&mut next);
        self.rare.show(next);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_lies_in_its_bucket_and_not_in_the_one_before() {
        let edges = (0..64).flat_map(|p| {
            let v = 1u64 << p;
            [v - 1, v, v + v / 4, v.saturating_add(v / 2), v.saturating_add(v - 1)]
        });
        for value in edges.chain([u64::MAX]) {
            let index = Histogram::bucket(value);
            assert!(index < BUCKETS, "{value}");
            assert!(value <= Histogram::bucket_max(index), "{value} in {index}");
            assert!(index == 0 || value > Histogram::bucket_max(index - 1), "{value} in {index}");
        }
    }

    #[test]
    fn percentiles_come_from_the_right_bucket() {
        let histogram = Histogram::default();
        histogram.record(10, 98);
        histogram.record(1000, 2);
        assert_eq!(histogram.percentile(50), 11);
        assert!(histogram.percentile(99) >= 1000);
        assert_eq!((histogram.count(), histogram.sum()), (100, 2980));
    }

    #[test]
    fn times_of_operations_are_told_apart_and_added_up() {
        let times = ServeTimes::default();
        assert_eq!((times.ops().count(), times.numbers().count()), (2, 5 * (BUCKETS + 1)));
        times.record(ServedOp::Read, 3, 2);
        times.record(ServedOp::Discard, 3, 1);
        times.record(ServedOp::Other, 1000, 1);
        let counts: Vec<_> = times.ops().map(|(name, h)| (name, h.count())).collect();
        let each = [("read", 2), ("write", 0), ("flush", 0), ("discard", 1), ("other", 1)];
        assert_eq!(counts, each);
        assert_eq!((times.count(), times.sum()), (4, 1009));
        assert_eq!(times.filled(), [(3, 3), (1023, 1)]);
        assert_eq!(times.numbers().count(), 5 * (BUCKETS + 1));
    }
}
