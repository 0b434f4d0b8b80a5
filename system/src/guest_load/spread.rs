//! The results of several rounds: the median, and how far they lie apart.

use std::fmt::{Display, Formatter, Result};

/// Median, smallest and largest.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
}

impl Spread {
    pub(crate) fn of(values: impl IntoIterator<Item = f64>) -> Self {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        let at = |index: usize| values.get(index).copied().unwrap_or(0.0);
        let (half, last) = (values.len() / 2, values.len().saturating_sub(1));
        Self { median: f64::midpoint(at(half), at(last / 2)), min: at(0), max: at(last) }
    }
}

/// A ratio.
impl Display for Spread {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        write!(f, "{:.2}x ({:.2} to {:.2})", self.median, self.min, self.max)
    }
}

/// `count` for each of `of`.
#[allow(clippy::cast_precision_loss, reason = "a ratio needs no more than 52 bits")]
pub(crate) fn ratio(count: u64, of: u64) -> f64 {
    count as f64 / of as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_odd_number_is_the_one_in_the_middle() {
        assert_eq!(Spread::of([5.0, 1.0, 2.0]), Spread { median: 2.0, min: 1.0, max: 5.0 });
    }
}
