//! The cost of a wake, made of measured ones.

/// The time to wake a thread, as the polling policy uses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wake {
    /// Nanoseconds from the write that wakes a thread until that thread runs on another CPU.
    pub ns: u64,
    /// True if the time was measured on this machine, false if it is `FALLBACK`.
    pub is_measured: bool,
}

/// The assumed time where it cannot be measured: that of a virtual machine with two CPUs.
const FALLBACK: Wake = Wake { ns: 25_000, is_measured: false };
/// The least number of undisturbed wakes that give a median.
const WAKES_MIN: usize = 8;
/// A shorter time is no wake: no system call that switches threads is so fast.
const NS_MIN: u64 = 1000;
/// A median above this has the time of other threads in it. An idle CPU wakes sooner, and no worker
/// should spin for four times this long.
const NS_MAX: u64 = 200_000;

/// Returns the median of the measured wakes, or `FALLBACK` if they are too few or not plausible.
#[must_use]
pub fn settle(wakes_ns: &mut [u64]) -> Wake {
    wakes_ns.sort_unstable();
    if wakes_ns.len() < WAKES_MIN {
        return FALLBACK;
    }
    match wakes_ns.get(wakes_ns.len() / 2) {
        Some(&ns) if (NS_MIN..=NS_MAX).contains(&ns) => Wake { ns, is_measured: true },
        Some(_) | None => FALLBACK,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_counts_unless_there_are_few_wakes_or_it_is_out_of_bounds() {
        let measured = |ns| Wake { ns, is_measured: true };
        let odd_ones = [7000, 900_000, 8000, 9000, 300, 9500, 11_000, 12_000, 900_000];
        for (wakes, expected) in [
            (odd_ones.to_vec(), measured(9500)),
            (odd_ones[..8].to_vec(), measured(9500)),
            (odd_ones[..7].to_vec(), FALLBACK),
            (vec![1000; 8], measured(1000)),
            (vec![999; 8], FALLBACK),
            (vec![200_000; 8], measured(200_000)),
            (vec![200_001; 8], FALLBACK),
            (Vec::new(), FALLBACK),
        ] {
            assert_eq!(settle(&mut wakes.clone()), expected, "{wakes:?}");
        }
    }
}
