//! The results of a scenario of disks: requests, latencies, and CPU time per million requests.

use super::{Distance, Party, Sample, Spread};
use serde::Serialize;

/// One run of one party.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct BlkSample {
    /// Requests per second.
    pub(crate) iops: f64,
    /// Median latency in microseconds.
    pub(crate) p50_us: f64,
    /// 99th percentile of the latencies in microseconds.
    pub(crate) p99_us: f64,
    /// CPU seconds of the server per million requests; without a server, of the whole program.
    pub(crate) cpu_per_million: f64,
    /// CPU seconds of the client per million requests; 0 without a client.
    pub(crate) client_cpu_per_million: f64,
    /// Histogram: latency in microseconds and number of requests; empty if the client reports none.
    pub(crate) latency_us: Vec<(f64, u64)>,
    /// Nanoseconds that a cache line needed from one CPU to the other, if that was measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) line_ns: Option<u64>,
    /// In every attempt other programs took too much CPU time, or the host moved the CPUs.
    pub(crate) disturbed: bool,
}

impl Sample for BlkSample {
    fn is_disturbed(&self) -> bool {
        self.disturbed
    }

    fn line_ns(&self) -> Option<u64> {
        self.line_ns
    }

    fn set_line(&mut self, line_ns: Option<u64>) {
        self.line_ns = line_ns;
    }

    fn disturb(&mut self) {
        self.disturbed = true;
    }
}

/// The first party compared with another one: ratios of the rounds.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct BlkAgainst {
    pub(crate) peer: String,
    pub(crate) iops: Spread,
    pub(crate) cpu_per_million: Spread,
    /// `iops` by the distance of the CPUs, if that was not the same in all rounds.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) by_distance: Vec<Distance>,
}

/// One load, measured on each party in turn.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct BlkCell {
    pub(crate) name: String,
    pub(crate) parties: Vec<Party<BlkSample>>,
    pub(crate) against: Vec<BlkAgainst>,
}

impl BlkCell {
    /// Compares the first party with each of the others, round by round.
    pub(crate) fn new(name: String, parties: Vec<Party<BlkSample>>) -> Self {
        let against = match &parties[..] {
            [ours, peers @ ..] => peers.iter().map(|peer| against(ours, peer)).collect(),
            [] => Vec::new(),
        };
        Self { name, parties, against }
    }

    /// For each party: the best of the parties behind it, and the ratios of their rounds.
    pub(crate) fn against_best_behind(&self) -> Vec<(&str, &str, Spread)> {
        let iops = |party: &Party<BlkSample>| party.median(|s| s.iops);
        let line = |(index, party): (usize, &'_ Party<BlkSample>)| {
            let behind = self.parties[index + 1..].iter();
            let best = behind.max_by(|a, b| iops(a).total_cmp(&iops(b)))?;
            Some((index, best, party.against(best, |s| s.iops)))
        };
        let lines = self.parties.iter().enumerate().filter_map(line);
        lines.map(|(at, best, kept)| (&*self.parties[at].name, &*best.name, kept)).collect()
    }
}

fn against(ours: &Party<BlkSample>, peer: &Party<BlkSample>) -> BlkAgainst {
    BlkAgainst {
        peer: peer.name.clone(),
        iops: ours.against(peer, |s| s.iops),
        cpu_per_million: ours.against(peer, |s| s.cpu_per_million),
        by_distance: ours.against_by_distance(peer, |s| s.iops),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn party(name: &str, iops: &[f64]) -> Party<BlkSample> {
        let sample = |iops| BlkSample {
            iops,
            p50_us: 1.0,
            p99_us: 1.0,
            cpu_per_million: 1000.0 / iops,
            client_cpu_per_million: 0.0,
            ..BlkSample::default()
        };
        Party { name: name.to_owned(), samples: iops.iter().map(|i| sample(*i)).collect() }
    }

    #[test]
    fn a_ratio_is_the_median_of_the_rounds_not_the_ratio_of_medians() {
        let ours = party("ours", &[10.0, 40.0, 30.0]);
        let peer = party("peer", &[10.0, 10.0, 60.0]);
        let cell = BlkCell::new("c".to_owned(), vec![ours, peer]);
        let against = &cell.against[0];
        assert_eq!(against.iops, Spread { median: 1.0, min: 0.5, max: 4.0 });
        assert_eq!(against.cpu_per_million.median, 1.0);
    }
}
