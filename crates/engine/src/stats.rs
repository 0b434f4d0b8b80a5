//! Per-queue counters and histograms: one writer (the worker that owns the queue), any reader.
//!
//! Every counter is defined once, here, with its name and its help text; metrics and the control
//! API are made from [`QueueStats::counters`] and [`QueueStats::histograms`].

mod histogram;

pub use histogram::{BUCKETS, Histogram, ServeTimes, ServedOp};

use crate::policy::polling::{Arm, PollingNumbers};
use histogram::Histograms;
use std::sync::atomic::{AtomicU64, Ordering};

/// A counter with one writer: a load and a store, no locked instruction.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `n`. Only the queue's owner may call this.
    #[inline]
    pub fn add(&self, n: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
    }

    /// Sets a gauge. Only the queue's owner may call this.
    #[inline]
    pub fn set(&self, n: u64) {
        if self.0.load(Ordering::Relaxed) != n {
            self.0.store(n, Ordering::Relaxed);
        }
    }

    /// Returns the value.
    #[must_use]
    pub fn value(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Whether a number only grows or also falls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only grows.
    Counter,
    /// Goes up and down.
    Gauge,
}

/// A counter's definition and its value.
#[derive(Clone, Copy, Debug)]
pub struct NamedCounter<T> {
    /// Name, without prefix or `_total`.
    pub name: &'static str,
    /// A help text of one sentence, with the unit.
    pub help: &'static str,
    /// Counter or gauge.
    pub kind: Kind,
    /// The value.
    pub value: T,
}

/// The kind of a queue's device: the queue has the counters of its class and the common ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum QueueClass {
    /// A block device.
    #[default]
    Blk,
    /// A network device.
    Net,
    /// A Xen block device: its queues have the counters of a block device, and those of grants.
    XenBlk,
}

impl QueueClass {
    /// Every class.
    pub const ALL: [Self; 3] = [Self::Blk, Self::Net, Self::XenBlk];
}

/// The classes that have a counter.
#[derive(Clone, Copy)]
enum CounterClasses {
    All,
    Blk,
    Net,
    XenBlk,
}

impl CounterClasses {
    const fn has(self, class: QueueClass) -> bool {
        match self {
            Self::All => true,
            Self::Blk => matches!(class, QueueClass::Blk | QueueClass::XenBlk),
            Self::Net => matches!(class, QueueClass::Net),
            Self::XenBlk => matches!(class, QueueClass::XenBlk),
        }
    }
}

macro_rules! queue_stats {
    (counters { $($counter:ident: $of:ident $kind:ident = $help:literal,)* }
     histograms { $($histogram:ident: $hof:ident = $hhelp:literal,)* }) => {
        /// The counters and histograms of one queue, written by the worker that owns it.
        #[derive(Debug, Default)]
        #[repr(align(128))]
        pub struct QueueStats {
            class: QueueClass,
            $(#[doc = $help] pub $counter: Counter,)*
            histograms: Histograms<{ [$($hhelp),*].len() }>,
            /// Time from pop to completion of a disk's requests, in nanoseconds, by operation.
            pub serve_ns: ServeTimes,
        }

        impl QueueStats {
            /// Returns every counter of the queue's class with its name and help.
            #[must_use]
            pub fn counters(&self) -> Vec<NamedCounter<u64>> {
                let all = [$((CounterClasses::$of, NamedCounter {
                    name: stringify!($counter),
                    help: $help,
                    kind: Kind::$kind,
                    value: self.$counter.value(),
                }),)*];
                all.into_iter().filter(|(of, _)| of.has(self.class)).map(|(_, n)| n).collect()
            }

            /// Returns every histogram of the queue's class with its name and help. Names that end
            /// in `_ns` are nanoseconds.
            #[must_use]
            pub fn histograms(&self) -> Vec<NamedCounter<&Histogram>> {
                let [$($histogram),*] = self.histograms.all();
                let all = [$((CounterClasses::$hof, NamedCounter {
                    name: stringify!($histogram),
                    help: $hhelp,
                    kind: Kind::Counter,
                    value: $histogram,
                }),)*];
                all.into_iter().filter(|(of, _)| of.has(self.class)).map(|(_, n)| n).collect()
            }

            /// The number of counters in [`Self::numbers`], of which they are the first values.
            pub const COUNTERS: usize = [$(stringify!($counter)),*].len();

            /// The maximum length of [`Self::numbers`].
            pub const NUMBERS_MAX: usize = Self::COUNTERS
                + ([$($hhelp),*].len() + ServeTimes::HISTOGRAMS) * (BUCKETS + 1);

            /// Returns every number of all classes in one order, for [`Self::show`] of another
            /// process. Leaves out the histograms' numbers after the last one that is not 0: such a
            /// number never becomes 0 again.
            #[must_use]
            pub fn numbers(&self) -> Vec<u64> {
                let mut numbers = vec![$(self.$counter.value(),)*];
                numbers.extend(self.histograms.numbers());
                numbers.extend(self.serve_ns.numbers());
                let end = numbers.iter().rposition(|n| *n > 0).map_or(0, |last| last + 1);
                numbers.truncate(end.max(Self::COUNTERS));
                numbers
            }

            /// Sets all numbers to the sum of two lists in the order of [`Self::numbers`]: another
            /// process's `now`, and `before` of the processes before it. Only the owner of these
            /// numbers may call this; missing numbers count as 0.
            pub fn show(&self, before: &[u64], now: &[u64]) {
                let mut at = 0;
                let mut next = || {
                    let of = |all: &[u64]| all.get(at).copied().unwrap_or(0);
                    let pair = (of(before), of(now));
                    at += 1;
                    pair
                };
                $(let (was, is) = next();
                let is_gauge = Kind::$kind == Kind::Gauge;
                self.$counter.set(if is_gauge { is } else { was.wrapping_add(is) });)*
                let mut sum = || {
                    let (was, is) = next();
                    was.wrapping_add(is)
                };
                self.histograms.show(&mut sum);
                self.serve_ns.show(sum);
            }
        }
    };
}

queue_stats! {
    counters {
        requests: Blk Counter = "Requests completed",
        reads: Blk Counter = "Read requests completed",
        writes: Blk Counter = "Write requests completed",
        flushes: Blk Counter = "Flush requests completed",
        discards: Blk Counter = "Discard, write-zeroes and secure-erase requests completed",
        bytes_read: Blk Counter = "Bytes read from the disk",
        bytes_written: Blk Counter = "Bytes written to the disk",
        errors: Blk Counter = "Requests answered with an error",
        host_errors_eio: Blk Counter = "Tries of requests that the host failed with EIO",
        host_errors_enospc: Blk Counter = "Tries of requests that the host failed with ENOSPC",
        host_errors_edquot: Blk Counter = "Tries of requests that the host failed with EDQUOT",
        host_errors_erofs: Blk Counter = "Tries of requests that the host failed with EROFS",
        host_errors_estale: Blk Counter = "Tries of requests that the host failed with ESTALE",
        host_errors_other: Blk Counter = "Tries of requests that the host failed otherwise",
        waiting_for_space: Blk Gauge = "Write requests that wait for space on the host",
        grants_mapped: XenBlk Gauge = "Grant references that stay mapped",
        grant_hits: XenBlk Counter = "Grant references of requests that were mapped already",
        grant_misses: XenBlk Counter = "Grant references of requests that were not mapped yet",
        grants_transient: XenBlk Counter = "Grant references mapped for one request alone",
        grants_refused: XenBlk Counter = "Grant references of requests that cannot be mapped",
        grants_purged: XenBlk Counter = "Grant references unmapped to map others, or long unused",
        packets: Net Counter = "Packets passed on, one that is to be segmented counts once",
        bytes_passed: Net Counter = "Bytes of the packets passed on, without their virtio headers",
        gso_packets: Net Counter = "Packets passed on that are to be segmented",
        merged_packets: Net Counter = "Packets of the guest that left as parts of longer ones",
        merged_frames: Net Counter = "Longer packets that were made of several of the guest's",
        steered_flows: Net Counter = "Flows steered to this pair: the guest sends them by it",
        dropped_bad_header: Net Counter = "Packets dropped: their virtio header is wrong",
        dropped_short: Net Counter = "Packets dropped: shorter than their headers",
        dropped_too_long: Net Counter = "Packets dropped: longer than any packet",
        dropped_refused: Net Counter = "Packets dropped: the host refuses to pass them on",
        dropped_port_down: Net Counter = "Packets dropped: the host's interface is down or gone",
        dropped_port_full: Net Counter = "Packets dropped: the port was full to the end",
        dropped_memory: Net Counter = "Packets dropped: in guest memory that is not there",
        dropped_link_down: Net Counter = "Packets dropped: the guest's link is down",
        dropped_disabled: Net Counter = "Packets dropped: the queue is disabled",
        dropped_no_memory: Net Counter = "Packets dropped: the host is out of memory",
        dropped_filtered: Net Counter = "Packets dropped: the guest does not want them",
        dropped_offload: Net Counter = "Packets dropped: the guest does not take them unfinished",
        dropped_small_buffers: Net Counter = "Packets dropped: longer than the receive buffers",
        blocked: Net Counter = "Times the port was full",
        buffers_kept: Net Counter = "Frames sent whose buffers were kept to go back in a group",
        out_of_buffers: Net Counter = "Times the guest had too few receive buffers",
        faults: All Counter = "Times the queue was stopped by a fault of its driver",
        kicks: All Counter = "Available buffer notifications received",
        kicks_suppressed: All Counter = "Batches found by looking, without a notification",
        calls: All Counter = "Used buffer notifications sent",
        calls_suppressed: All Counter = "Completion bursts the driver wanted no notification for",
        calls_held: All Counter = "Completion bursts whose notification was held back",
        calls_by_count: All Counter = "Used buffer notifications sent: there was enough to tell",
        calls_by_time: All Counter = "Used buffer notifications sent: held back for long enough",
        calls_by_dry: All Counter = "Used buffer notifications sent: the ring ran dry",
        busy_ns: All Counter = "Time of its worker that the queue took when it had work",
        moves: All Counter = "Times the queue moved to another worker",
        limited: All Counter = "Requests or packets that had to wait for a limit, first in line",
        limited_ns: All Counter = "Time that the queue waited for a limit",
        in_flight: All Gauge = "Buffers popped and not returned",
        ring_occupancy: All Gauge = "Buffers in the ring when it was last looked at",
        running: All Gauge = "1 while the queue runs",
        worker: All Gauge = "Index of the worker that owns the queue, or owned it last",
    }
    histograms {
        batch_size: All = "Requests or packets taken at once",
        wait_ns: All = "Longest time a batch can have waited, in nanoseconds",
    }
}

impl QueueStats {
    /// Makes zeroed counters for a queue of a device of `class`.
    #[must_use]
    pub fn new(class: QueueClass) -> Self {
        Self { class, ..Self::default() }
    }

    /// Counts a batch that was taken at once, and the longest time that it can have waited. Only
    /// the queue's owner may call this.
    #[inline]
    pub fn record_batch(&self, taken: u64, waited_ns: u64) {
        // The first batch is counted in a function of its own, which allocates: so that code is not
        // in the path of all others.
        let Some([batch_size, wait_ns]) = self.histograms.allocated() else {
            return self.record_first_batch(taken, waited_ns);
        };
        batch_size.record(taken, 1);
        wait_ns.record(waited_ns, 1);
    }

    #[cold]
    #[inline(never)]
    fn record_first_batch(&self, taken: u64, waited_ns: u64) {
        let [batch_size, wait_ns] = self.histograms.to_record();
        batch_size.record(taken, 1);
        wait_ns.record(waited_ns, 1);
    }

    /// Returns the histogram of the requests or packets taken at once.
    #[must_use]
    pub fn batch_size(&self) -> &Histogram {
        let [batch_size, _] = self.histograms.all();
        batch_size
    }

    /// Returns the histogram of the longest time that a batch can have waited, in nanoseconds.
    #[must_use]
    pub fn wait_ns(&self) -> &Histogram {
        let [_, wait_ns] = self.histograms.all();
        wait_ns
    }

    /// Returns [`Self::serve_ns`], if the queue is one of a disk.
    #[must_use]
    pub fn served(&self) -> Option<&ServeTimes> {
        (self.class != QueueClass::Net).then_some(&self.serve_ns)
    }
}

/// The counters of one worker.
#[derive(Debug, Default)]
pub struct WorkerStats {
    /// The number of queues that the worker owns.
    pub queues: Counter,
    /// How often the worker slept.
    pub sleeps: Counter,
    /// Nanoseconds in which the worker slept.
    pub slept_ns: Counter,
    /// Nanoseconds in which the worker polled for work and found none.
    pub looked_ns: Counter,
    /// How often a device of the host made the worker's thread wait for four milliseconds or more,
    /// in a call that should not wait. Threads of the kernel then make the device's requests for a
    /// while.
    pub device_waits: Counter,
    /// Nanoseconds that the worker's earlier threads ran.
    pub ran_before_ns: Counter,
    /// For each queue that came from another worker: nanoseconds from the turn at which the queue
    /// took its last requests there to the end of its first turn here.
    pub pause_ns: Histogram,
    /// The numbers of the worker's polling policy.
    pub policy: PolicyStats,
}

macro_rules! policy_stats {
    ($($counter:ident: $kind:ident = $help:literal,)*) => {
        /// The numbers of a worker's polling policy: the worker writes them about once a
        /// millisecond and before it sleeps.
        #[derive(Debug, Default)]
        pub struct PolicyStats {
            $(#[doc = $help] pub $counter: Counter,)*
        }

        impl PolicyStats {
            /// Returns every number with its name and help.
            #[must_use]
            pub fn counters(&self) -> Vec<NamedCounter<u64>> {
                vec![$(NamedCounter {
                    name: stringify!($counter),
                    help: $help,
                    kind: Kind::$kind,
                    value: self.$counter.value(),
                },)*]
            }
        }
    };
}

policy_stats! {
    wake_ns: Gauge = "Time that a wake takes here, measured at the start",
    spins: Gauge = "1 while spinning is the arm in use, 0 while sleeping is",
    gain_permille: Gauge = "Cost of a request when sleeping, in thousandths of it when spinning",
    effort_permille: Gauge = "CPU time of a request when spinning, in thousandths of it asleep",
    gap_ns: Gauge = "Time between two turns with work, averaged",
    trials: Counter = "Trials of the other arm begun",
    flips: Counter = "Trials after which the other arm was used",
    stolen_looks: Counter = "Looks that were interrupted for another thread's time slice",
    looked_spinning_ns: Counter = "Time on looks that found nothing, spinning being in use",
    looked_sleeping_ns: Counter = "Time on looks that found nothing, sleeping being in use",
    spins_hit: Counter = "Spins that ended with work",
    spins_missed: Counter = "Spins that ended with sleep",
}

impl PolicyStats {
    /// Returns the counts so far, with which a new policy begins.
    pub(crate) fn counts(&self) -> PollingNumbers {
        PollingNumbers {
            trials: self.trials.value(),
            flips: self.flips.value(),
            stolen_looks: self.stolen_looks.value(),
            looked_spinning_ns: self.looked_spinning_ns.value(),
            looked_sleeping_ns: self.looked_sleeping_ns.value(),
            spins_hit: self.spins_hit.value(),
            spins_missed: self.spins_missed.value(),
            ..PollingNumbers::default()
        }
    }

    /// Stores the policy's present numbers. Only the worker may call this.
    pub(crate) fn publish(&self, numbers: &PollingNumbers) {
        self.spins.set(u64::from(numbers.arm == Arm::Spin));
        self.gain_permille.set(numbers.gain);
        self.effort_permille.set(numbers.effort);
        self.gap_ns.set(numbers.gap_ns);
        self.trials.set(numbers.trials);
        self.flips.set(numbers.flips);
        self.stolen_looks.set(numbers.stolen_looks);
        self.looked_spinning_ns.set(numbers.looked_spinning_ns);
        self.looked_sleeping_ns.set(numbers.looked_sleeping_ns);
        self.spins_hit.set(numbers.spins_hit);
        self.spins_missed.set(numbers.spins_missed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_xen_disk_has_the_counters_of_a_disk_and_those_of_its_grants() {
        let names = |class| {
            let counters = QueueStats::new(class).counters();
            counters.into_iter().map(|counter| counter.name).collect::<Vec<_>>()
        };
        let (blk, net, xen) =
            (names(QueueClass::Blk), names(QueueClass::Net), names(QueueClass::XenBlk));
        assert!(blk.iter().all(|name| xen.contains(name)));
        let own: Vec<_> = xen.iter().filter(|name| !blk.contains(name)).collect();
        assert!(own.contains(&&"grant_hits") && own.iter().all(|name| name.starts_with("grant")));
        assert!(own.iter().all(|name| !net.contains(name)) && !xen.contains(&"packets"));
    }

    #[test]
    fn a_queue_without_a_batch_takes_little_memory_and_shows_each_histogram_empty() {
        assert!(size_of::<QueueStats>() <= 896, "{}", size_of::<QueueStats>());
        let stats = QueueStats::new(QueueClass::Blk);
        let all: Vec<_> = stats.histograms().iter().map(|h| (h.name, h.value.count())).collect();
        assert_eq!(all, [("batch_size", 0), ("wait_ns", 0)]);
        let zeroes = stats.numbers();
        stats.show(&zeroes, &zeroes);
        assert!(format!("{stats:?}").matches("<uninit>").count() == 3, "{stats:?}");
        stats.record_batch(3, 40);
        assert_eq!((stats.batch_size().sum(), stats.wait_ns().sum()), (3, 40));
        assert!(zeroes.len() < 100 && stats.numbers().len() > 2 * BUCKETS);
        stats.serve_ns.record(ServedOp::Other, u64::MAX, 1);
        assert_eq!(stats.numbers().len(), QueueStats::NUMBERS_MAX);
    }

    #[test]
    fn what_another_process_counted_is_shown_on_top_of_what_was_before() {
        let theirs = QueueStats::new(QueueClass::Blk);
        theirs.reads.add(3);
        theirs.in_flight.set(2);
        theirs.serve_ns.record(ServedOp::Write, 100, 4);
        theirs.serve_ns.record(ServedOp::Flush, 9, 1);
        let numbers = theirs.numbers();
        let shown = QueueStats::new(QueueClass::Blk);
        shown.show(&[], &numbers);
        assert_eq!(shown.numbers(), numbers);
        shown.show(&numbers, &numbers);
        assert_eq!((shown.reads.value(), shown.in_flight.value()), (6, 2));
        let sums: Vec<_> = shown.serve_ns.ops().map(|(op, h)| (op, h.count(), h.sum())).collect();
        assert_eq!(sums[1..3], [("write", 8, 800), ("flush", 2, 18)]);
        // Fewer numbers than there are, and more.
        shown.show(&[], &numbers[..1]);
        shown.show(&[], &[u64::MAX; QueueStats::NUMBERS_MAX + 1]);
    }
}
