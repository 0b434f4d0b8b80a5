//! The results of a network scenario: the columns of the reference tables, and ratios.

use super::{Distance, Party, Sample, Spread, ratio};
use serde::Serialize;

/// One run of one party.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct NetSample {
    /// In the unit of the cell.
    pub(crate) throughput: f64,
    /// Per cent of one CPU: the back-end, and whatever joins taps to it.
    pub(crate) cpu: f64,
    /// Per cent of one CPU that the back-end alone takes; without one, what is done to the host's
    /// tap.
    pub(crate) backend_cpu: f64,
    /// Packets that the guest sent, from its start to its end; 0 if nobody counts them.
    pub(crate) packets_sent: f64,
    /// Bytes of a packet on the ring.
    pub(crate) avg_pkt_size: f64,
    /// Kicks for each packet.
    pub(crate) kicks_per_packet: f64,
    /// Calls for each packet.
    pub(crate) calls_per_packet: f64,
    /// Median latency in microseconds; 0 if it was not measured.
    pub(crate) p50_us: f64,
    /// 99 of 100 operations took no more than this many microseconds; 0 if it was not measured.
    pub(crate) p99_us: f64,
    /// The costs of one operation for the back-end, if these are measured.
    #[serde(flatten)]
    pub(crate) per_operation: Option<PerOperation>,
    /// Nanoseconds that a cache line needed from one CPU to the other, if that was measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) line_ns: Option<u64>,
    /// In every attempt other programs took too much CPU time, or the host moved the CPUs.
    pub(crate) disturbed: bool,
}

/// The costs of one request, frame or transaction for a back-end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct PerOperation {
    /// CPU time of the back-end, in microseconds.
    pub(crate) cpu_us_per_op: f64,
    /// Kicks that the back-end has counted.
    pub(crate) kicks_per_op: f64,
    /// Calls that the back-end has sent.
    pub(crate) calls_per_op: f64,
}

impl Sample for NetSample {
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

/// One party against another: ratios of the rounds.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct NetAgainst {
    pub(crate) party: String,
    pub(crate) peer: String,
    pub(crate) throughput: Spread,
    pub(crate) cpu_per_unit: Spread,
    pub(crate) backend_cpu_per_unit: Spread,
    /// `throughput` by the distance of the CPUs, if that was not the same in all rounds.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) by_distance: Vec<Distance>,
}

/// Which parties are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Compare {
    /// The first with each of the others.
    First,
    /// Each of the others with the last.
    Last,
}

/// One load, measured on each party in turn.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct NetCell {
    pub(crate) name: String,
    pub(crate) sessions: usize,
    pub(crate) unit: &'static str,
    pub(crate) parties: Vec<Party<NetSample>>,
    pub(crate) against: Vec<NetAgainst>,
}

impl NetCell {
    pub(crate) fn new(
        (name, sessions, unit): (String, usize, &'static str),
        parties: Vec<Party<NetSample>>,
        compare: Compare,
    ) -> Self {
        let pairs = match (compare, &parties[..]) {
            (Compare::First, [first, rest @ ..]) => rest.iter().map(|peer| (first, peer)).collect(),
            (Compare::Last, [rest @ .., last]) => rest.iter().map(|one| (one, last)).collect(),
            _ => Vec::new(),
        };
        let against = pairs.into_iter().map(|(one, peer)| against(one, peer)).collect();
        Self { name, sessions, unit, parties, against }
    }
}

fn against(one: &Party<NetSample>, peer: &Party<NetSample>) -> NetAgainst {
    NetAgainst {
        party: one.name.clone(),
        peer: peer.name.clone(),
        throughput: one.against(peer, |s| s.throughput),
        cpu_per_unit: one.against(peer, |s| ratio(s.cpu, s.throughput)),
        backend_cpu_per_unit: one.against(peer, |s| ratio(s.backend_cpu, s.throughput)),
        by_distance: one.against_by_distance(peer, |s| s.throughput),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn party(name: &str, rates: &[f64]) -> Party<NetSample> {
        let sample = |throughput| NetSample { throughput, cpu: 50.0, ..NetSample::default() };
        Party { name: name.to_owned(), samples: rates.iter().map(|r| sample(*r)).collect() }
    }

    #[test]
    fn parties_are_compared_with_the_first_or_with_the_last() {
        let parties = || vec![party("4", &[8.0]), party("2", &[4.0]), party("1", &[2.0])];
        let name = || (String::new(), 1, "x");
        let ratios = |compare| {
            let cell = NetCell::new(name(), parties(), compare);
            let one = |a: &NetAgainst| (a.party.clone(), a.peer.clone(), a.throughput.median);
            cell.against.iter().map(one).collect::<Vec<_>>()
        };
        let line = |party: &str, peer: &str, ratio| (party.to_owned(), peer.to_owned(), ratio);
        assert_eq!(ratios(Compare::First), [line("4", "2", 2.0), line("4", "1", 4.0)]);
        assert_eq!(ratios(Compare::Last), [line("4", "1", 4.0), line("2", "1", 2.0)]);
    }

    #[test]
    fn what_an_operation_takes_stands_among_the_numbers_of_a_sample_if_it_was_asked() {
        let asked = PerOperation { cpu_us_per_op: 1.5, ..PerOperation::default() };
        let json = |per_operation| {
            serde_json::to_value(NetSample { per_operation, ..NetSample::default() }).unwrap()
        };
        assert_eq!(json(Some(asked))["cpu_us_per_op"], 1.5);
        assert!(json(None).get("cpu_us_per_op").is_none());
    }
}
