//! Formats numbers in at most six characters.

/// Formats a rate per second, of requests or bytes: 1234, 12.3k, 4.5M, 1.2G.
pub(super) fn rate(value: f64) -> String {
    scaled(value, 1000.0, &["", "k", "M", "G", "T"])
}

/// Formats a time given in nanoseconds: 850ns, 12us, 3.4ms, 1.2s.
pub(super) fn time(ns: f64) -> String {
    if ns <= 0.0 {
        return "-".to_owned();
    }
    scaled(ns, 1000.0, &["ns", "us", "ms", "s"])
}

/// Formats a size in bytes: 512B, 64KiB, 1.5GiB.
pub(super) fn size(bytes: f64) -> String {
    scaled(bytes, 1024.0, &["B", "KiB", "MiB", "GiB", "TiB", "PiB"])
}

/// Formats a number with the smallest unit of `units` in which it has at most three digits before
/// the point; without a unit, up to four digits. Numbers in the first unit have no fraction.
fn scaled(value: f64, step: f64, units: &[&str]) -> String {
    let mut value = value.max(0.0);
    let mut unit = 0;
    // If the first unit is empty, four digits fit the space of three digits and a unit.
    let most = if units[0].is_empty() { 9999.5 } else { 999.5 };
    while value >= if unit == 0 { most } else { 999.5 } && unit + 1 < units.len() {
        value /= step;
        unit += 1;
    }
    let digits = usize::from(unit > 0 && value < 99.95);
    format!("{value:.digits$}{}", units[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short_and_keep_three_digits() {
        let rates = [0.0, 7.4, 9999.0, 10_000.0, 123_456.0, 2.5e9, -3.0];
        assert_eq!(rates.map(rate), ["0", "7", "9999", "10.0k", "123k", "2.5G", "0"]);
        let times = [0.0, 850.0, 12_300.0, 3.4e6, 1.25e9, 5e12];
        assert_eq!(times.map(time), ["-", "850ns", "12.3us", "3.4ms", "1.2s", "5000s"]);
        let sizes = [512.0, 65_536.0, 1.5 * 1_073_741_824.0];
        assert_eq!(sizes.map(size), ["512B", "64.0KiB", "1.5GiB"]);
    }
}
