//! The numbers that keys and options may have: one table for the checks of a plan, and for the
//! words of the errors where something else is written.

use super::place::{Place, PlanError};

/// The numbers of a key, whatever device it belongs to.
struct Numbers {
    key: &'static str,
    min: u64,
    max: u64,
    /// Unless every whole number between the two is meant.
    words: Option<&'static str>,
}

const fn all(key: &'static str, min: u64, max: u64) -> Numbers {
    Numbers { key, min, max, words: None }
}

const fn some(key: &'static str, min: u64, max: u64, words: &'static str) -> Numbers {
    Numbers { key, min, max, words: Some(words) }
}

/// The largest number of a signed type of the kernel, which is that of a file descriptor too.
const INT_MAX: u64 = 0x7fff_ffff;
/// A number of requests or frames.
const OFTEN: u64 = i64::MAX as u64;

const TABLE: [Numbers; 30] = [
    all("workers", 1, 256),
    all("spin_us", 0, 1000),
    all("wait", 0, u32::MAX as u64),
    all("user_devices_max", 0, 1 << 16),
    all("fd", 3, INT_MAX),
    all("handshake_timeout", 1, 3600),
    some("logical_block_size", 512, 4096, "512 or 4096"),
    all("num_queues", 1, 256),
    some("queue_size", 4, 1024, "a power of two from 4 to 1024"),
    all("queue_workers", 0, 255),
    all("tap_fds", 3, INT_MAX),
    some("generate", 0, 65_553, "0, or a whole number from 60 to 65553"),
    // Kick and call name 256 vrings, one of them the control queue.
    all("queue_pairs", 1, 127),
    all("mtu", 68, 65_535),
    // In Mbit/s; the config space has no room for a higher speed (§5.1.4).
    all("speed", 1, INT_MAX),
    all("sndbuf", 1, INT_MAX),
    all("txqueuelen", 1, 1_000_000),
    all("vlan", 1, 4094),
    all("trunk", 1, 4094),
    all("macs_max", 1, 4096),
    all("floods_max", 1, 1_000_000),
    all("age", 1, 65_536),
    all("group_fwd_mask", 0, 65_535),
    all("domain", 0, 65_535),
    all("persistent_max", 1, 1 << 20),
    all("indirect_segments_max", 0, 4096),
    all("ring_page_order_max", 0, 4),
    all("late_tx", 0, u32::MAX as u64),
    // Those of a network device's faults have one range.
    all("*_every", 0, OFTEN),
    // Options of commands that ask a daemon.
    all("watch", 1, 86_400),
];

fn of(key: &str) -> Option<&'static Numbers> {
    let key = if key.ends_with("_every") { "*_every" } else { key };
    TABLE.iter().find(|numbers| numbers.key == key)
}

/// The values that `key` takes, in words, like "a whole number from 1 to 256"; `None` if it takes
/// no number.
pub fn words(key: &str) -> Option<String> {
    let Numbers { min, max, words, .. } = of(key)?;
    Some(words.map_or_else(|| format!("a whole number from {min} to {max}"), str::to_owned))
}

/// Checks a number of `key` in this place.
pub fn check(key: &str, value: impl Into<u64>, place: &Place) -> Result<(), PlanError> {
    let value = value.into();
    match of(key) {
        Some(Numbers { min, max, .. }) if !(*min..=*max).contains(&value) => {
            place.error(key, format!("{value} is not between {min} and {max}"))
        }
        _ => Ok(()),
    }
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
