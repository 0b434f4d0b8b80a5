//! Where a packed ring goes on, as the flags of its own descriptors tell.
//!
//! A split ring has its used index in guest memory. A packed ring has none: a process that is
//! killed takes its place in the ring along, and a front-end without an in-flight region then sets
//! a base that is stale. But the flag `used` of a descriptor is written by the device alone: a
//! driver that makes the descriptor available again copies the flag that the device has left there
//! (virtio 1.3 §2.8.1: the two flags differ then, and `avail` is the new lap's). So, where each
//! descriptor that goes back gets the flag, those of a chain behind its first one too,
//!
//! ```text
//!   flag `used`      1 1 1 1 1 0 0 0      used so far on an odd lap | used on the lap before
//!                              ^ the place
//! ```
//! A burst is shown by the store of its first descriptor. Until then its other descriptors are
//! written from the last one down, so that the used descriptors of a burst whose process was killed
//! before it was shown lie apart:
//!
//! ```text
//!   flag `used`      1 1 0 0 1 1 0 0      k: the first that was not shown, e: the end of the burst
//!                        k       e        [k ..] are available still, [.. e) are used
//! ```
//! Both may go around the ring's end, where the flag's meaning turns over. The flag `avail` then
//! tells which of the readings is right: no two of them agree with it.
//!
//! Everything here is read from a guest: a ring that a hostile driver has written gets some place
//! in it, and one whose flags tell nothing keeps its front-end's base.

use crate::place::{F_AVAIL, F_USED, Place};

/// The place at which a ring goes on, and the burst that was being written there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    /// The first descriptor that was not published.
    pub(crate) from: Place,
    /// Number of descriptors of the unpublished burst, from `from` on; 0 without a burst.
    pub(crate) burst: u16,
    /// How many descriptors of the burst, counted from `from`, were not written as used.
    pub(crate) unwritten: u16,
}

/// Most runs of descriptors with the same flag `used`: two for a lap, and two more for a burst.
const RUNS: usize = 4;

/// Finds the place in a ring of `size` descriptors. `flags` reads the flags of one descriptor.
/// `None` if the flags were not written by a device that leaves a trail.
pub(crate) fn find(size: u16, flags: impl Fn(u16) -> u16) -> Option<Found> {
    let is_used = |at: u16| flags(at) & F_USED != 0;
    let mut starts = Vec::with_capacity(RUNS);
    for at in (1..size).filter(|at| is_used(*at) != is_used(at - 1)) {
        starts.push(at);
        if starts.len() == RUNS {
            return None;
        }
    }
    // Where the available descriptors at the start of `begin..end` end.
    let available_to = |begin: u16, end: u16| {
        let is_there = |at: &u16| flags(*at) & F_AVAIL == (flags(*at) & F_USED) >> 8;
        (begin..end).rev().find(is_there).map_or(begin, |at| at + 1)
    };
    let first = is_used(0);
    let burst = |(at, wrap), unwritten, burst| Found { from: Place { at, wrap }, burst, unwritten };
    let (bursts, clean) = match starts[..] {
        // Bursts as long as the ring.
        [] => {
            let k = available_to(0, size);
            (vec![burst((k, !first), size - k, size)], Some(burst((0, !first), 0, 0)))
        }
        [a] => {
            let (k, l) = (available_to(0, a), available_to(a, size));
            let whole =
                vec![burst((k, !first), a - k, size), burst((l, first), size - l + a, size)];
            (whole, Some(burst((a, first), 0, 0)))
        }
        [a, b] => {
            let at_the_end = burst((a, first), b - a, size - a);
            let across = burst((b, !first), size - b, size - b + a);
            (vec![at_the_end, burst((0, !first), a, b), across], None)
        }
        [a, b, c] => {
            let across = burst((b, !first), c - b, size - b + a);
            let split = burst((c, first), size - c + a, size - c + b);
            (vec![burst((a, first), b - a, c - a), across, split], None)
        }
        _ => (Vec::new(), None),
    };
    bursts.into_iter().find(|found| is_as_written(*found, size, &flags)).or(clean)
}

/// True if the ring's flags fit `found`: a burst of which a part was written.
fn is_as_written(found: Found, size: u16, flags: impl Fn(u16) -> u16) -> bool {
    let is_in_ring = found.from.at < size && (1..found.burst).contains(&found.unwritten);
    is_in_ring
        && (0..found.burst).all(|n| {
            let place = found.from.add(n, size);
            let flags = flags(place.at);
            if n < found.unwritten { place.is_avail(flags) } else { place.is_used(flags) }
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ops::Range;

    /// The flags of a ring of `size` whose device has used all before `used`, and whose driver has
    /// made `available` more available, of which the device has written those that `written` says.
    fn ring(size: u16, used: Place, available: u16, written: &Range<u16>) -> Vec<u16> {
        let mut flags = vec![0; usize::from(size)];
        for n in 0..size {
            let place = used.sub(size, size).add(n, size);
            flags[usize::from(place.at)] = place.used_flags();
        }
        for n in 0..available {
            let place = used.add(n, size);
            let is_written = written.contains(&n);
            let now = if is_written { place.used_flags() } else { place.avail_flags() };
            flags[usize::from(place.at)] = now;
        }
        flags
    }

    fn check_each_place(size: u16) {
        for (at, wrap) in (0..size).flat_map(|at| [(at, false), (at, true)]) {
            for (available, burst) in (0..=size).flat_map(|n| (0..=n).map(move |m| (n, m))) {
                for unwritten in 1..=burst.max(1) {
                    let from = Place { at, wrap };
                    let flags = ring(size, from, available, &(unwritten..burst));
                    let found = find(size, |at| flags[usize::from(at)]);
                    let (burst, unwritten) =
                        if unwritten < burst { (burst, unwritten) } else { (0, 0) };
                    let expected = Found { from, burst, unwritten };
                    assert_eq!(found, Some(expected), "{available} available: {flags:x?}");
                }
            }
        }
    }

    #[test]
    fn the_place_is_found_whatever_is_available_and_whatever_of_a_burst_is_written() {
        for size in [1, 2, 3, 4, 7] {
            check_each_place(size);
        }
    }

    #[test]
    fn chain_that_the_driver_is_writing_does_not_matter() {
        let size = 7;
        // All of the chain but the flags of its first descriptor is written. It does not fill the
        // ring.
        for (at, wrap) in (0..size).flat_map(|at| [(at, false), (at, true)]) {
            for (available, more) in (0..size).flat_map(|n| (1..size - n).map(move |m| (n, m))) {
                let from = Place { at, wrap };
                let mut flags = ring(size, from, available, &(0..0));
                for n in available + 1..=available + more {
                    let place = from.add(n, size);
                    flags[usize::from(place.at)] = place.avail_flags();
                }
                if more + 1 < size {
                    let found = find(size, |at| flags[usize::from(at)]);
                    assert_eq!(found, Some(Found { from, burst: 0, unwritten: 0 }), "{flags:x?}");
                }
            }
        }
    }

    #[test]
    fn a_new_ring_begins_at_its_start_and_one_without_a_trail_tells_nothing() {
        let found = find(7, |_| 0).unwrap();
        assert_eq!((found.from, found.burst), (Place { at: 0, wrap: true }, 0));
        let alternating = |at: u16| if at.is_multiple_of(2) { F_USED } else { 0 };
        assert_eq!(find(7, alternating), None);
        // The used descriptors of two chains that no driver has made available.
        assert_eq!(find(7, |at| if at == 1 || at == 3 { F_USED } else { 0 }), None);
    }
}
