//! The results of the guests of one daemon, and the verdict on their shares.

use super::{Party, Spread};
use serde::Serialize;

/// Least that a guest may have of its fair share: the median of the rounds.
const SHARE_MIN: f64 = 0.8;
/// Longest p99 of a guest, unless it has that among equals as well.
const P99_MAX_US: f64 = 5000.0;
/// Kicks of a second below which there is no flood.
const KICKS_MIN: f64 = 10_000.0;
/// Messages that a daemon reads in a second of a front-end that has sent too many.
const PACE: f64 = 1000.0;
/// Of messages without end, the part of the pace below which there is no flood. A front-end whose
/// socket is never empty sends all that the pace lets through. The rest is left to one that waits
/// for its CPU.
const PACED_MIN: f64 = 0.8;
/// How many times the pace a front-end must send, or its messages were not read at once. A socket
/// that fills up adds half the pace in a run of half a second.
const AT_ONCE_MIN: f64 = 2.0;
/// Share of the worker's time below which requests of 1 GiB are no load.
const GIANT_SHARE_MIN: f64 = 0.02;

/// One run of one guest.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct NeighbourSample {
    /// Requests, frames, kicks or messages in a second.
    pub(crate) rate: f64,
    /// Median latency in microseconds, without what guest and worker waited for a CPU.
    pub(crate) p50_us: f64,
    /// Latency that 99 of 100 did not exceed, without what guest and worker waited for a CPU.
    pub(crate) p99_us: f64,
    /// Largest latency, without what guest and worker waited for a CPU.
    pub(crate) max_us: f64,
    /// Latency by the clock that 99 of 100 did not exceed.
    pub(crate) p99_clock_us: f64,
    /// Share of the run that the guest waited for its own CPU.
    pub(crate) waited_share: f64,
    /// Share of this guest in the time that the worker spent on all, as the daemon counts it.
    pub(crate) worker_share: f64,
    /// In every attempt other programs used too much of the daemon's CPU.
    pub(crate) disturbed: bool,
}

/// A measured guest beside abusers, as ratios of the rounds.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct NeighbourAgainst {
    pub(crate) party: &'static str,
    pub(crate) peer: &'static str,
    pub(crate) rate: Spread,
}

/// One guest in every mix.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct NeighbourCell {
    pub(crate) name: String,
    pub(crate) parties: Vec<Party<NeighbourSample>>,
    /// Empty for a guest that abuses the daemon.
    pub(crate) against: Vec<NeighbourAgainst>,
    /// Promises that were broken, in words.
    pub(crate) broken: Vec<String>,
}

impl NeighbourCell {
    /// A guest that is measured: beside abusers, among equals and alone; with how many `guests`.
    pub(crate) fn measured(
        name: &str,
        abused: Party<NeighbourSample>,
        [equals, alone]: [Party<NeighbourSample>; 2],
        guests: usize,
    ) -> Self {
        let eighth = abused.against(&alone, |s| s.rate);
        let guests = f64::from(u32::try_from(guests).unwrap_or(u32::MAX));
        let of_alone = Spread {
            median: eighth.median * guests,
            min: eighth.min * guests,
            max: eighth.max * guests,
        };
        let p99_us = Spread::of(abused.samples.iter().map(|s| s.p99_us));
        let of_equals = abused.against(&equals, |s| s.rate);
        let mut broken = Vec::new();
        let shares =
            [(of_equals, "its rate among equals"), (of_alone, "an eighth of its rate alone")];
        for (share, of) in shares {
            if share.median < SHARE_MIN {
                broken.push(format!("{name}: {share} of {of}"));
            }
        }
        if p99_us.median > P99_MAX_US && p99_us.median > equals.median(|s| s.p99_us) {
            broken.push(format!("{name}: p99 of {:.0} us", p99_us.median));
        }
        let line = |(rate, peer)| NeighbourAgainst { party: "abused", peer, rate };
        let (against, parties) = (shares.map(line).to_vec(), vec![abused, equals, alone]);
        Self { name: name.to_owned(), parties, against, broken }
    }

    /// The guest that floods kicks, and the equal in its place.
    pub(crate) fn kicks(name: &str, parties: [Party<NeighbourSample>; 2]) -> Self {
        let is_flood = parties[0].median(|s| s.rate) >= KICKS_MIN;
        Self::abuser(name, parties, is_flood)
    }

    /// The guest that sends messages without end, and the equal in its place.
    pub(crate) fn paced(name: &str, parties: [Party<NeighbourSample>; 2]) -> Self {
        let is_flood = parties[0].median(|s| s.rate) >= PACE * PACED_MIN;
        Self::abuser(name, parties, is_flood)
    }

    /// The guest whose messages are read at once, and the equal in its place.
    pub(crate) fn at_once(name: &str, parties: [Party<NeighbourSample>; 2]) -> Self {
        let is_flood = parties[0].median(|s| s.rate) >= PACE * AT_ONCE_MIN;
        Self::abuser(name, parties, is_flood)
    }

    /// The guest with requests of 1 GiB, few of which end within a run, and the equal in its place.
    pub(crate) fn giant(name: &str, parties: [Party<NeighbourSample>; 2]) -> Self {
        let is_load = parties[0].median(|s| s.worker_share) >= GIANT_SHARE_MIN;
        Self::abuser(name, parties, is_load)
    }

    fn abuser(name: &str, parties: [Party<NeighbourSample>; 2], is_one: bool) -> Self {
        let too_little = format!("{name}: too little of it to say anything about its neighbours");
        let broken = if is_one { Vec::new() } else { vec![too_little] };
        Self { name: name.to_owned(), parties: parties.into(), against: Vec::new(), broken }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn party(samples: &[(f64, f64)]) -> Party<NeighbourSample> {
        let sample = |(rate, p99_us): &(f64, f64)| NeighbourSample {
            rate: *rate,
            p99_us: *p99_us,
            worker_share: 0.1,
            ..NeighbourSample::default()
        };
        Party { name: String::new(), samples: samples.iter().map(sample).collect() }
    }

    /// The broken promises of a guest, from its rates and latencies abused and among equals, and
    /// its rate alone.
    fn broken(abused: (f64, f64), equals: (f64, f64), alone: f64) -> Vec<String> {
        let others = [party(&[equals]), party(&[(alone, 1.0)])];
        NeighbourCell::measured("g", party(&[abused]), others, 8).broken
    }

    #[test]
    fn a_guest_below_its_share_or_late_beside_abusers_only_breaks_the_promise() {
        for (abused, equals, alone, count) in [
            ((80.0, 4999.0), (100.0, 1.0), 800.0, 0),
            ((79.0, 1.0), (100.0, 1.0), 100.0, 1),
            ((79.0, 1.0), (79.0, 1.0), 800.0, 1),
            ((79.0, 1.0), (100.0, 1.0), 800.0, 2),
            ((100.0, 5001.0), (100.0, 1.0), 100.0, 1),
            ((100.0, 5001.0), (100.0, 5002.0), 100.0, 0),
            ((0.0, 0.0), (100.0, 1.0), 100.0, 2),
        ] {
            let broken = broken(abused, equals, alone);
            assert_eq!(broken.len(), count, "{abused:?} {equals:?} {alone}: {broken:?}");
        }
    }

    #[test]
    fn shares_are_medians_of_the_rounds() {
        let abused = party(&[(1.0, 9000.0), (9.0, 2.0), (9.0, 1.0)]);
        let others = [party(&[(10.0, 1.0); 3]), party(&[(80.0, 1.0); 3])];
        let cell = NeighbourCell::measured("g", abused, others, 8);
        let shares: Vec<f64> = cell.against.iter().map(|line| line.rate.median).collect();
        assert_eq!(shares, [0.9, 0.9]);
        assert!(cell.broken.is_empty(), "{:?}", cell.broken);
    }

    #[test]
    fn abuse_that_does_not_happen_proves_nothing() {
        let with_equal = |abused| [abused, party(&[(1e6, 0.0)])];
        let (none, flood) = (with_equal(party(&[(9999.0, 0.0)])), with_equal(party(&[(1e4, 0.0)])));
        assert_eq!(NeighbourCell::kicks("f", none.clone()).broken.len(), 1);
        assert!(NeighbourCell::kicks("f", flood).broken.is_empty());
        let at = |rate| with_equal(party(&[(rate, 0.0)]));
        assert_eq!(NeighbourCell::paced("m", at(799.0)).broken.len(), 1);
        assert!(NeighbourCell::paced("m", at(1000.0)).broken.is_empty());
        assert_eq!(NeighbourCell::at_once("m", at(1000.0)).broken.len(), 1, "the pace was reached");
        assert!(NeighbourCell::at_once("m", at(5000.0)).broken.is_empty());
        assert!(NeighbourCell::giant("g", none).broken.is_empty(), "its requests are few");
        let idle = Party { name: String::new(), samples: vec![NeighbourSample::default()] };
        assert_eq!(NeighbourCell::giant("g", with_equal(idle)).broken.len(), 1);
    }
}
