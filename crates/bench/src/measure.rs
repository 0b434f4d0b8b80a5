//! Clocks, latencies, random offsets, CPUs: what every measurement needs.

use hdrhistogram::Histogram;
use rustix::thread::CpuSet;
use rustix::time::{ClockId, clock_gettime};
use std::time::{Duration, Instant};

/// The only place of this program that reads the wall clock.
#[allow(clippy::disallowed_methods, reason = "a benchmark measures time; read here only")]
pub(crate) fn now() -> Instant {
    Instant::now()
}

/// CPU time of this process so far, in seconds.
pub(crate) fn own_cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::try_from(time).unwrap_or_default().as_secs_f64()
}

/// Runs the calling thread, and those it starts later, on one CPU.
pub(crate) fn pin(cpu: usize) -> Result<(), rustix::io::Errno> {
    let mut set = CpuSet::new();
    set.set(cpu);
    rustix::thread::sched_setaffinity(None, &set)
}

/// Latencies of requests.
#[derive(Clone, Debug)]
pub(crate) struct Latencies(Histogram<u64>);

/// Longest latency that is told apart from longer ones, in nanoseconds: one minute.
const LATENCY_NS_MAX: u64 = 60_000_000_000;

impl Latencies {
    pub(crate) fn new() -> Self {
        // Two digits; the bounds are constants that the library accepts.
        let histogram = Histogram::new_with_bounds(1, LATENCY_NS_MAX, 2);
        Self(histogram.unwrap_or_else(|_| unreachable!("constant bounds")))
    }

    /// One request took this long.
    #[inline]
    pub(crate) fn record(&mut self, latency: Duration) {
        self.0.saturating_record(u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX));
    }

    pub(crate) fn add(&mut self, other: &Self) {
        let _ = self.0.add(&other.0);
    }

    /// Requests recorded.
    pub(crate) fn count(&self) -> u64 {
        self.0.len()
    }

    /// Microseconds that this share of the requests did not exceed.
    #[allow(clippy::cast_precision_loss, reason = "two digits are kept")]
    pub(crate) fn quantile_us(&self, share: f64) -> f64 {
        self.0.value_at_quantile(share) as f64 / 1000.0
    }
}

/// Random numbers with a seed: xorshift64*.
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        // Neighbouring seeds must not give neighbouring streams, and the state is never 0.
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// A number below `bound`, which is not 0.
    #[inline]
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let random = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d);
        // Multiply and take the high half instead of a division: this runs once per request.
        u64::try_from((u128::from(random) * u128::from(bound)) >> 64).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_numbers_reach_the_whole_range_and_never_leave_it() {
        for seed in 0..32 {
            let mut random = Random::new(seed);
            let mut seen = [false; 7];
            for _ in 0..1000 {
                seen[usize::try_from(random.below(7)).unwrap()] = true;
            }
            assert_eq!(seen, [true; 7], "seed {seed}");
        }
    }

    #[test]
    fn quantiles_are_those_of_what_was_recorded() {
        let mut latencies = Latencies::new();
        (1..=100).for_each(|us| latencies.record(Duration::from_micros(us)));
        assert_eq!(latencies.count(), 100);
        assert!((latencies.quantile_us(0.5) - 50.0).abs() < 1.0);
        assert!((latencies.quantile_us(0.99) - 99.0).abs() < 1.5);
    }
}
