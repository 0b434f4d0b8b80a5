//! What the API says, as JSON: written by the daemon, read by `manyring stats`.

use super::{Controlled, State};
use crate::assemble::Kind;
use manyring_device::QueueStats;
use manyring_device::net::NetDevice;
use manyring_device::stats::Histogram;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// `GET /v1/devices`
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Devices {
    pub(crate) devices: Vec<DeviceInfo>,
}

/// `GET /v1/devices/{name}`
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct DeviceInfo {
    pub(crate) name: String,
    pub(crate) kind: String,
    #[serde(flatten)]
    pub(crate) detail: Detail,
    pub(crate) connected: bool,
    pub(crate) socket: String,
    pub(crate) queues: Vec<QueueInfo>,
}

/// What only devices of one kind have.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(untagged)]
pub(crate) enum Detail {
    Blk {
        disk: String,
        /// Bytes.
        size: u64,
        read_only: bool,
    },
    Net {
        port: String,
        mac: String,
        /// Bytes; what the guest is told.
        mtu: Option<u16>,
        /// `up` or `down`.
        link: String,
        queue_pairs: usize,
    },
}

/// One queue of a device.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct QueueInfo {
    pub(crate) index: usize,
    pub(crate) counters: BTreeMap<String, u64>,
    pub(crate) histograms: BTreeMap<String, Summary>,
}

/// A histogram: its percentiles, and its filled buckets as pairs of largest value and count.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub(crate) struct Summary {
    pub(crate) count: u64,
    pub(crate) sum: u64,
    pub(crate) p50: u64,
    pub(crate) p90: u64,
    pub(crate) p99: u64,
    pub(crate) max: u64,
    pub(crate) buckets: Vec<(u64, u64)>,
}

/// `GET /v1/workers`
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Workers {
    pub(crate) workers: Vec<WorkerInfo>,
}

/// One worker thread.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct WorkerInfo {
    pub(crate) index: usize,
    pub(crate) queues: u64,
    pub(crate) sleeps: u64,
    pub(crate) slept_ns: u64,
}

impl Devices {
    pub(crate) fn new(state: &State) -> Self {
        Self { devices: state.devices.iter().map(DeviceInfo::new).collect() }
    }
}

impl DeviceInfo {
    pub(crate) fn new(controlled: &Controlled) -> Self {
        let part = &controlled.part;
        let device = &part.device;
        let queues = (0..device.queue_count())
            .filter_map(|index| Some(QueueInfo::new(index, &*device.stats(index)?)))
            .collect();
        let (kind, detail) = match &part.kind {
            Kind::Blk(blk) => {
                let (disk, size) = (blk.disk().kind().to_owned(), blk.size());
                ("blk", Detail::Blk { disk, size, read_only: blk.is_read_only() })
            }
            Kind::Net(net) => ("net", Detail::net(net)),
        };
        Self {
            name: device.name().to_owned(),
            kind: kind.to_owned(),
            detail,
            connected: *part.connected.borrow(),
            socket: part.socket.clone(),
            queues,
        }
    }
}

impl Detail {
    fn net(net: &NetDevice) -> Self {
        let [a, b, c, d, e, f] = net.mac();
        Self::Net {
            port: net.port().kind().to_owned(),
            mac: format!("{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}"),
            mtu: net.mtu(),
            link: if net.is_link_up() { "up" } else { "down" }.to_owned(),
            queue_pairs: net.queue_pairs(),
        }
    }
}

impl QueueInfo {
    fn new(index: usize, stats: &QueueStats) -> Self {
        let counters = stats.counters().into_iter().map(|c| (c.name.to_owned(), c.value));
        let histograms =
            stats.histograms().into_iter().map(|h| (h.name.to_owned(), Summary::of(h.value)));
        Self { index, counters: counters.collect(), histograms: histograms.collect() }
    }

    /// A counter's value, 0 if this daemon has none of that name.
    pub(crate) fn counter(&self, name: &str) -> u64 {
        self.counters.get(name).copied().unwrap_or(0)
    }

    /// A histogram, empty if this daemon has none of that name.
    pub(crate) fn histogram(&self, name: &str) -> Summary {
        self.histograms.get(name).cloned().unwrap_or_default()
    }
}

impl Summary {
    fn of(histogram: &Histogram) -> Self {
        Self::new(histogram.filled().collect(), histogram.sum())
    }

    fn new(buckets: Vec<(u64, u64)>, sum: u64) -> Self {
        let count = buckets.iter().map(|b| b.1).sum();
        let percentile = |percent: u64| {
            let rank = (u128::from(count) * u128::from(percent)).div_ceil(100);
            let mut seen = 0;
            let found = buckets.iter().find(|b| {
                seen += u128::from(b.1);
                seen >= rank
            });
            found.map_or(0, |b| b.0)
        };
        let (p50, p90, p99) = (percentile(50), percentile(90), percentile(99));
        let max = buckets.last().map_or(0, |b| b.0);
        Self { count, sum, p50, p90, p99, max, buckets }
    }

    /// What came since `before`, of the same histogram.
    pub(crate) fn since(&self, before: &Self) -> Self {
        let old: BTreeMap<_, _> = before.buckets.iter().copied().collect();
        let buckets = self.buckets.iter().filter_map(|&(max, count)| {
            let new = count.saturating_sub(old.get(&max).copied().unwrap_or(0));
            (new > 0).then_some((max, new))
        });
        Self::new(buckets.collect(), self.sum.wrapping_sub(before.sum))
    }
}

impl Workers {
    pub(crate) fn new(state: &State) -> Self {
        let workers =
            state.pool.worker_stats().into_iter().enumerate().map(|(index, stats)| WorkerInfo {
                index,
                queues: stats.queues.value(),
                sleeps: stats.sleeps.value(),
                slept_ns: stats.slept_ns.value(),
            });
        Self { workers: workers.collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_has_the_histograms_own_percentiles() {
        let histogram = Histogram::default();
        for value in [1, 1, 5, 100, 7000, 1 << 40] {
            histogram.record(value, value % 7 + 1);
        }
        let summary = Summary::of(&histogram);
        assert_eq!((summary.count, summary.sum), (histogram.count(), histogram.sum()));
        let percentiles = [50, 90, 99, 100].map(|p| histogram.percentile(p));
        assert_eq!([summary.p50, summary.p90, summary.p99, summary.max], percentiles);
    }

    #[test]
    fn an_interval_counts_only_what_is_new() {
        let histogram = Histogram::default();
        histogram.record(10, 1000);
        let before = Summary::of(&histogram);
        histogram.record(5000, 4);
        let interval = Summary::of(&histogram).since(&before);
        assert_eq!((interval.count, interval.sum), (4, 20_000));
        assert!(interval.p50 >= 5000, "{interval:?}");
        assert_eq!(before.since(&before), Summary::default());
    }
}
