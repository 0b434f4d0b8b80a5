//! The allowed numbers of keys and options. The checks of a plan and the texts of errors both use
//! this one table.

use super::key_class::{Numbers, all};
use super::place::{Place, PlanError};
use super::tables;

/// The largest number of a fault's key `*_every`, which counts requests or frames.
const OFTEN: u64 = i64::MAX as u64;

/// The ranges of keys outside `[[blk]]` and `[[net]]`, and of options. A device's key has its range
/// beside its definition in `tables.rs`.
const TABLE: [(&str, Numbers); 13] = [
    ("workers", all(1, 256)),
    ("spin_us", all(0, 1000)),
    ("wait", all(0, u32::MAX as u64)),
    ("user_devices_max", all(0, 1 << 16)),
    ("age", all(1, 65_536)),
    ("group_fwd_mask", all(0, 65_535)),
    ("domain", all(0, 65_535)),
    ("persistent_max", all(1, 1 << 20)),
    ("indirect_segments_max", all(0, 4096)),
    ("ring_page_order_max", all(0, 4)),
    ("late_tx", all(0, u32::MAX as u64)),
    // All `*_every` keys of faults have the same range.
    ("*_every", all(0, OFTEN)),
    // Options of commands that query a running daemon.
    ("watch", all(1, 86_400)),
];

fn of(key: &str) -> Option<&'static Numbers> {
    let of_device = tables::key(key).and_then(|key| key.numbers.as_ref());
    let key = if key.ends_with("_every") { "*_every" } else { key };
    let other = || TABLE.iter().find(|(name, _)| *name == key).map(|(_, numbers)| numbers);
    of_device.or_else(other)
}

/// Returns the values that `key` takes, in words like "a whole number from 1 to 256"; `None` if the
/// key takes no number.
pub fn words(key: &str) -> Option<String> {
    let Numbers { min, max, words, .. } = of(key)?;
    Some(words.map_or_else(|| format!("a whole number from {min} to {max}"), str::to_owned))
}

/// Checks that a value lies in the range of `key`. A key without a range takes every number.
pub fn check(key: &str, value: impl Into<u64>, place: &Place) -> Result<(), PlanError> {
    let value = value.into();
    match of(key) {
        Some(Numbers { min, max, .. }) if !(*min..=*max).contains(&value) => {
            place.error(key, format!("{value} is not between {min} and {max}"))
        }
        _ => Ok(()),
    }
}

/// Checks the numbers in a device's table, given as pairs of key and value. Keys that do not allow
/// every number of their range are skipped: the plan checks those.
pub(super) fn check_all(
    given: impl IntoIterator<Item = (&'static str, u64)>,
    place: &Place,
) -> Result<(), PlanError> {
    let is_whole = |(key, _): &(&str, u64)| of(key).is_some_and(|of| of.words.is_none());
    given.into_iter().filter(is_whole).try_for_each(|(key, value)| check(key, value, place))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parse;
    use manyring_device::blk::blkif::{INDIRECT_SEGMENTS_MAX, RING_PAGE_ORDER_MAX};
    use manyring_device::net::is_mtu;
    use manyring_transport::xenbus::QUEUES_MAX;

    /// The keys of the last table of `config`, as the parser lists them.
    fn keys(config: &str) -> Vec<String> {
        let error = parse(&format!("{config}no_such_key = 1\n")).unwrap_err();
        let list = error.split_once("expected one of ").expect(&error).1;
        list.split('`').skip(1).step_by(2).map(str::to_owned).collect()
    }

    #[test]
    fn every_key_that_takes_a_number_says_which() {
        let mut numeric = 0;
        for table in ["[daemon]", "[[blk]]", "[[net]]", "[[xen_blk]]", "[blk.fault]", "[net.fault]"]
        {
            let parent = match table {
                "[blk.fault]" => "[[blk]]\n",
                "[net.fault]" => "[[net]]\n",
                _ => "",
            };
            let table = format!("{parent}{table}\n");
            for key in keys(&table) {
                for value in ["'x'", "['x']", "-1", "[-1]", "true", "1.5"] {
                    let config = format!("{table}{key} = {value}\n");
                    let Err(error) = parse(&config) else { continue };
                    for name in ["usize", "u16", "u32", "u64", "i32", "i64"] {
                        assert!(!error.contains(name), "{config}-> {error}");
                    }
                    numeric += usize::from(words(&key).is_some_and(|words| error.contains(&words)));
                }
            }
        }
        assert!(numeric > 100, "{numeric}");
    }

    #[test]
    fn the_table_agrees_with_those_who_keep_to_it() {
        let max = |key| of(key).unwrap().max;
        assert_eq!(max("num_queues"), u64::from(QUEUES_MAX));
        assert_eq!(max("indirect_segments_max"), u64::from(INDIRECT_SEGMENTS_MAX));
        assert_eq!(max("ring_page_order_max"), u64::from(RING_PAGE_ORDER_MAX));
        assert!(is_mtu(68) && !is_mtu(67));
    }
}
