//! The policy in simulated time: the rate decides how much passes, however often queues look.

use super::*;

const SECOND_NS: u64 = 1_000_000_000;
const CREDIT_NS: u64 = CREDIT_MS * 1_000_000;

fn limit(rates: Rates) -> Arc<Limit> {
    let limit = Arc::new(Limit::default());
    limit.set(rates, None, 1);
    limit
}

/// A queue that always has requests of `size` bytes, and the stops of its machine.
struct Queue {
    gate: Box<Gate>,
    stats: QueueStats,
    way: Way,
    size: u64,
    next_ns: u64,
    passed: u64,
    bytes: u64,
}

impl Queue {
    fn new(gate: Option<Box<Gate>>, way: Way, size: u64) -> Self {
        let (stats, next_ns) = (QueueStats::default(), 1);
        Self { gate: gate.unwrap(), stats, way, size, next_ns, passed: 0, bytes: 0 }
    }

    /// Takes a turn of at most 64 requests; it wakes `late_ns` late.
    fn turn(&mut self, now_ns: u64, late_ns: u64) {
        self.next_ns = now_ns + 1000;
        for _ in 0..64 {
            if !self.gate.passes(self.way, now_ns, &self.stats) {
                self.next_ns = self.gate.due_ns().unwrap() + late_ns;
                break;
            }
            self.gate.charge(self.way, self.size, now_ns);
            self.passed += 1;
            self.bytes += self.size;
        }
    }
}

/// Runs the queues until `end_ns`, each when it is due, the least first.
fn run(queues: &mut [Queue], end_ns: u64, late_ns: impl Fn(u64) -> u64) {
    loop {
        let next = queues.iter_mut().min_by_key(|queue| queue.next_ns).unwrap();
        let now_ns = next.next_ns;
        if now_ns >= end_ns {
            return;
        }
        next.turn(now_ns, late_ns(now_ns));
    }
}

/// Up to 5 ms, and 40 ms once in a while.
fn lateness(now_ns: u64) -> u64 {
    let mixed = now_ns.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33;
    if mixed.is_multiple_of(97) { 40_000_000 } else { mixed % 5_000_000 }
}

#[test]
fn what_passes_is_what_the_rate_gives_whoever_wakes_late() {
    for (ops, bytes) in [(5000, 0), (100, 0), (0, 100 << 20), (7, 1 << 20)] {
        for size in [16_384, 1 << 20] {
            for count in [1, 16] {
                for way in [Way::Read, Way::Write] {
                    let mut rates = Rates::default();
                    (rates.ops[way as usize], rates.bytes[2]) = (ops, bytes);
                    let limit = limit(rates);
                    let queue = |_| Queue::new(limit.gate(), way, size);
                    let mut queues: Vec<_> = (0..count).map(queue).collect();
                    run(&mut queues, 10 * SECOND_NS, lateness);
                    let passed = queues.iter().map(|queue| queue.passed).sum::<u64>();
                    let by_ops = if ops == 0 { u64::MAX } else { ops * 10 };
                    let by_bytes = if bytes == 0 { u64::MAX } else { bytes * 10 / size };
                    let wanted = by_ops.min(by_bytes);
                    let error = passed.abs_diff(wanted);
                    let case = format!("{ops} {bytes} {size} {count} {way:?}: {passed} {wanted}");
                    assert!(error <= wanted / 200 + 1, "{case}");
                }
            }
        }
    }
}

#[test]
fn no_stretch_of_time_has_more_than_its_rate_and_the_credit() {
    let rates = Rates { ops: [1000, 0, 0], ..Rates::default() };
    let limit = limit(rates);
    let stats = QueueStats::default();
    let mut gate = limit.gate().unwrap();
    let (mut times, mut now_ns, mut seed) = (Vec::new(), 1, 88_172_645_463_325_252_u64);
    for _ in 0..20_000 {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        now_ns += if seed.is_multiple_of(50) { seed % (2 * CREDIT_NS) } else { seed % 1_000_000 };
        if gate.passes(Way::Read, now_ns, &stats) {
            gate.charge(Way::Read, 4096, now_ns);
            times.push(now_ns);
        }
    }
    assert!(times.len() > 1000);
    for (at, from) in times.iter().enumerate().step_by(7) {
        for (to, time) in times.iter().enumerate().skip(at) {
            let bound = (time - from + CREDIT_NS) / 1_000_000 + 2;
            assert!((to - at) as u64 <= bound, "{} in {}", to - at, time - from);
        }
    }
}

#[test]
fn the_first_request_brings_no_credit_and_a_larger_burst_keeps_more() {
    let passes = |burst_ms| {
        let limit = limit(Rates { ops: [0, 0, 1000], burst_ms, ..Rates::default() });
        let (mut gate, stats) = (limit.gate().unwrap(), QueueStats::default());
        let mut count = |now_ns| {
            let mut count = 0;
            while gate.passes(Way::Write, now_ns, &stats) {
                gate.charge(Way::Write, 0, now_ns);
                count += 1;
            }
            count
        };
        (count(5 * SECOND_NS), count(100 * SECOND_NS))
    };
    assert_eq!(passes(0), (1, 51));
    assert_eq!(passes(50), (1, 51));
    assert_eq!(passes(2000), (1, 2001));
}

#[test]
fn reads_do_not_take_from_writes_and_both_take_from_the_sum() {
    let limit = limit(Rates { ops: [10, 20, 25], ..Rates::default() });
    let mut queues = [Way::Read, Way::Write].map(|way| Queue::new(limit.gate(), way, 512));
    run(&mut queues, 10 * SECOND_NS, |_| 0);
    let passed = queues.each_ref().map(|queue| queue.passed);
    assert!(passed[0] <= 101 && passed[1] <= 201, "{passed:?}");
    assert!((249..=252).contains(&(passed[0] + passed[1])), "{passed:?}");
}

#[test]
fn a_changed_rate_counts_at_once_and_what_is_owed_stays_owed_in_units() {
    let rates = |ops| Rates { ops: [0, 0, ops], ..Rates::default() };
    let limit = limit(rates(1));
    let (mut gate, stats) = (limit.gate().unwrap(), QueueStats::default());
    let now_ns = SECOND_NS;
    assert!(gate.passes(Way::Read, now_ns, &stats));
    gate.charge(Way::Read, 0, now_ns);
    assert!(!gate.passes(Way::Read, now_ns, &stats));
    assert_eq!(gate.due_ns(), Some(2 * SECOND_NS));
    limit.set(rates(100), None, now_ns);
    assert!(!gate.passes(Way::Read, now_ns, &stats));
    assert_eq!(gate.due_ns(), Some(now_ns + 10_000_000));
    limit.set(rates(0), None, now_ns);
    assert!(gate.passes(Way::Read, now_ns, &stats) && limit.gate().is_none());
    limit.set(rates(100), None, now_ns);
    assert!(gate.passes(Way::Read, now_ns, &stats), "a new limit begins without debt");
}

#[test]
fn waits_are_counted_once_with_their_time() {
    let limit = limit(Rates { ops: [1, 0, 0], ..Rates::default() });
    let mut queue = Queue::new(limit.gate(), Way::Read, 512);
    // It looks four times in each second, as a queue does whose disk completes requests.
    for step in 0..40 {
        let now_ns = SECOND_NS + step * SECOND_NS / 4;
        let passes = queue.gate.passes(Way::Read, now_ns, &queue.stats);
        if passes {
            queue.gate.charge(Way::Read, 512, now_ns);
        }
        assert_eq!(passes, step.is_multiple_of(4), "{step}");
    }
    assert_eq!(queue.stats.limited.value(), 10);
    assert_eq!(queue.stats.limited_ns.value(), 9 * SECOND_NS * 3 / 4 + SECOND_NS / 2);
}

/// Queues of one device that look one after the other, always in this order.
#[test]
fn a_queue_that_always_looks_after_another_one_has_its_part() {
    let ops = [10_000, 0, 0];
    let bytes = [100 << 20, 0, 0];
    for (rates, size) in
        [(Rates { ops, ..Rates::default() }, 4096), (Rates { bytes, ..Rates::default() }, 1 << 20)]
    {
        let limit = limit(rates);
        let mut gates = [limit.gate().unwrap(), limit.gate().unwrap()];
        let (stats, mut passed, mut now_ns) = (QueueStats::default(), [0u64; 2], 1);
        while now_ns < 10 * SECOND_NS {
            for (gate, passed) in gates.iter_mut().zip(&mut passed) {
                if gate.is_closed(now_ns) {
                    continue;
                }
                gate.open();
                let count = (0..64).take_while(|_| gate.admits(Way::Read, size, now_ns, &stats));
                let count = count.count() as u64;
                let mut settled = Passed::default();
                settled[0] = (count, count * size);
                gate.settle(settled, now_ns);
                *passed += count;
            }
            now_ns =
                gates.iter().filter_map(|gate| gate.due_ns()).min().unwrap().max(now_ns + 1000);
        }
        let all: u64 = passed.iter().sum();
        let due = if size == 4096 { 100_000 } else { 1000 };
        assert!(all.abs_diff(due) <= due / 100, "{passed:?}");
        assert!(passed[1] >= all / 8, "{passed:?}");
    }
}

#[test]
fn what_was_charged_and_never_passed_is_given_back() {
    let limit = limit(Rates { ops: [10, 0, 0], ..Rates::default() });
    let (stats, mut gate) = (QueueStats::default(), limit.gate().unwrap());
    assert!(gate.admits(Way::Read, 1, 1, &stats));
    assert!(!gate.admits(Way::Read, 1, 1, &stats));
    let arrival_ns = limit.own.all[0].arrival_ns();
    drop(gate);
    assert_eq!(arrival_ns - limit.own.all[0].arrival_ns(), SECOND_NS / 10);
}
