//! The policy on a machine in a script: it uses several pairs where they gain, and one elsewhere.

use super::*;

const PAIRS: usize = 4;
const SECOND_NS: u64 = 1_000_000_000;
/// The frames of a receiver that is as fast as one worker: bytes per millisecond.
const ONE: f64 = 100_000.0;

/// A receiver: the throughput of 1, 2 .. pairs, as multiples of [`ONE`].
type Capacity = [f64; PAIRS];
/// A second pair has a CPU of its own.
const FREE: Capacity = [1.0, 1.9, 2.8, 3.7];
/// One flow, which has one pair wherever it goes.
const ONE_FLOW: Capacity = [1.0; PAIRS];
/// The worker of a second pair takes the guest's CPU.
const TWO_CPUS: Capacity = [1.0, 0.8, 0.7, 0.6];

/// A guest, and the policy of its device.
struct Machine {
    policy: ReceivePairs,
    capacity: Capacity,
    /// How far the rate of a window is off, at most.
    noise: f64,
    random: u64,
    now_ns: u64,
    /// When the pairs changed, and how many there are since then.
    changes: Vec<(u64, usize)>,
    /// Windows with 1, 2 .. pairs.
    windows: [u32; PAIRS],
    delivered: f64,
    best: f64,
}

impl Machine {
    fn new(capacity: Capacity) -> Self {
        let (noise, random) = (0.05, 7);
        let (changes, windows) = (Vec::new(), [0; PAIRS]);
        let policy = ReceivePairs::default();
        let (now_ns, delivered, best) = (0, 0.0, 0.0);
        Self { policy, capacity, noise, random, now_ns, changes, windows, delivered, best }
    }

    /// A number between -1 and 1, which is nearly 0 on average.
    fn random(&mut self) -> f64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        f64::from(u32::try_from(self.random % 20_001).unwrap()) / 10_000.0 - 1.0
    }

    /// Runs for some seconds with a load, as a multiple of [`ONE`], by the window and the pairs.
    fn run(&mut self, seconds: u64, load: impl Fn(u64, usize) -> f64) -> &mut Self {
        for window in 0..seconds * SECOND_NS / WINDOW_NS {
            let pairs = self.policy.pairs();
            let load = load(window, pairs);
            self.window(load, PAIRS);
        }
        self
    }

    fn window(&mut self, load: f64, of: usize) {
        let pairs = self.policy.pairs();
        let capacity = self.capacity[pairs - 1] * (1.0 + self.noise * self.random());
        let passed = load.min(capacity);
        self.delivered += passed;
        self.best += load.min(self.capacity[..of].iter().copied().fold(0.0, f64::max));
        let busy = passed / capacity;
        self.now_ns += WINDOW_NS;
        self.decide(&Window {
            now_ns: self.now_ns,
            len_ns: WINDOW_NS,
            pairs: of,
            bytes: whole(passed * ONE * 100.0),
            busiest_permille: whole(busy * 1000.0),
            work_permille: whole(busy * 1000.0 * f64::from(u32::try_from(pairs).unwrap())),
            waiting_permille: 0,
        });
    }

    fn decide(&mut self, window: &Window) {
        let before = self.policy.pairs();
        self.windows[before - 1] += 1;
        let pairs = self.policy.decide(window);
        assert_eq!(pairs, self.policy.pairs());
        assert!((1..=window.pairs.max(1)).contains(&pairs), "{pairs} of {}", window.pairs);
        if pairs != before {
            self.changes.push((self.now_ns / 1_000_000, pairs));
        }
    }

    /// Asserts that so many pairs are in use.
    #[track_caller]
    fn uses(&self, pairs: usize) {
        assert_eq!(self.policy.pairs(), pairs, "{:?}", self.changes);
    }

    /// Asserts that all but a part of the windows, in thousandths, had so many pairs.
    #[track_caller]
    fn used(&self, pairs: usize, but: u32) {
        let all: u32 = self.windows.iter().sum();
        let others = all - self.windows[pairs - 1];
        assert!(others * 1000 <= all * but, "{:?} {:?}", self.windows, self.changes);
    }

    #[track_caller]
    fn changed_at_most(&self, count: usize) {
        assert!(self.changes.len() <= count, "{}: {:?}", self.changes.len(), self.changes);
    }
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "small and positive")]
fn whole(number: f64) -> u64 {
    number as u64
}

#[test]
fn one_slow_flow_has_one_pair() {
    let mut machine = Machine::new(ONE_FLOW);
    machine.run(600, |_, _| 0.3).uses(1);
    assert_eq!(machine.changes, []);
}

#[test]
fn a_saturated_worker_gets_all_pairs_where_cpus_are_free_and_keeps_them() {
    let mut machine = Machine::new(FREE);
    machine.run(10, |_, _| 9.0).uses(4);
    assert_eq!(machine.changes.len(), 3, "{:?}", machine.changes);
    machine.run(600, |_, _| 9.0);
    // Trials of fewer pairs, which become rare.
    machine.used(4, 40);
    machine.changed_at_most(3 + 2 * 5);
    assert!(machine.delivered > machine.best * 0.97, "{} {}", machine.delivered, machine.best);
}

#[test]
fn where_a_second_pair_costs_more_than_it_gives_there_is_one() {
    let mut machine = Machine::new(TWO_CPUS);
    machine.run(600, |_, _| 9.0).uses(1);
    machine.used(1, 20);
    // After 1, 6, 15, 32, 65, 130, 258 and 515 seconds.
    machine.changed_at_most(2 * 8);
    assert!(machine.delivered > machine.best * 0.99, "{} {}", machine.delivered, machine.best);
    // Also if that shows less than the rates differ from window to window.
    for seed in 1..20 {
        let mut machine = Machine { noise: 0.4, random: seed, ..Machine::new(TWO_CPUS) };
        machine.run(600, |_, _| 9.0).uses(1);
        machine.used(1, 50);
    }
}

#[test]
fn one_flow_that_fills_its_worker_keeps_one_pair() {
    for seed in 1..20 {
        let mut machine = Machine { random: seed, ..Machine::new(ONE_FLOW) };
        machine.run(600, |_, _| 9.0).uses(1);
        machine.used(1, 50);
        machine.changed_at_most(2 * 8);
    }
}

#[test]
fn pairs_are_added_as_long_as_each_gains() {
    let mut machine = Machine::new([1.0, 1.8, 1.7, 1.6]);
    machine.run(600, |_, _| 9.0).uses(2);
    machine.used(2, 60);
    assert!(machine.delivered > machine.best * 0.98, "{} {}", machine.delivered, machine.best);
    // A gain below what a pair costs is none.
    let mut machine = Machine::new([1.0, 1.02, 1.03, 1.04]);
    machine.run(600, |_, _| 9.0).uses(1);
}

#[test]
fn a_gain_is_found_in_noise_and_noise_is_no_gain() {
    let mut kept = [0; 2];
    for seed in 1..40 {
        for (at, capacity) in [[1.0, 1.4, 1.4, 1.4], ONE_FLOW].into_iter().enumerate() {
            let mut machine = Machine { noise: 0.3, random: seed, ..Machine::new(capacity) };
            machine.run(30, |_, _| 9.0);
            kept[at] += u32::from(machine.policy.pairs() > 1);
        }
    }
    assert!(kept[0] >= 37 && kept[1] <= 2, "{kept:?} of 39");
}

#[test]
fn a_burst_changes_nothing() {
    let mut machine = Machine::new(FREE);
    machine.run(600, |window, _| if window % 10 < 5 { 9.0 } else { 0.1 }).uses(1);
    assert_eq!(machine.changes, []);
}

#[test]
fn pairs_are_given_up_when_the_work_fits_fewer_and_not_before() {
    let mut machine = Machine::new([1.0, 2.0, 3.0, 4.0]);
    machine.run(60, |_, _| 9.0).uses(4);
    let before = machine.changes.len();
    machine.run(3, |_, _| 1.1);
    // At 1.1 workers' time, two have 55 % each.
    machine.uses(2);
    machine.run(3, |_, _| 0.1).uses(1);
    assert_eq!(machine.changes.len(), before + 2, "both at once, without trials");
    // Less than 2 s of little work change nothing.
    let mut machine = Machine::new([1.0, 2.0, 3.0, 4.0]);
    machine.run(20, |_, _| 9.0).run(1, |_, _| 0.1).run(5, |_, _| 9.0).uses(4);
    assert_eq!(machine.changes.len(), 3, "{:?}", machine.changes);
}

#[test]
fn a_steady_load_never_asks_for_more_and_for_fewer() {
    for tenths in 1..50 {
        let mut machine = Machine::new(FREE);
        let load = f64::from(tenths) / 10.0;
        machine.run(60, |_, _| load);
        let (settled, pairs) = (machine.changes.len(), machine.policy.pairs());
        machine.run(600, |_, _| load).uses(pairs);
        // Trials only: each ends where it began, and they become rare.
        let trials = &machine.changes[settled..];
        assert!(trials.len() <= 24, "{load}: {trials:?}");
        assert!(trials.iter().skip(1).step_by(2).all(|(_, to)| *to == pairs), "{load} {trials:?}");
        let reached = machine.capacity[pairs - 1].min(load) / load.min(3.7);
        assert!(reached > 0.94, "{load}: {reached} with {pairs}");
    }
}

#[test]
fn a_load_that_comes_and_goes_gets_its_pairs_each_time() {
    let mut machine = Machine::new(FREE);
    machine.run(1200, |window, _| if window / 600 % 2 == 0 { 9.0 } else { 0.1 });
    // In each minute of load three are added; with the end of the load they go, all at once.
    machine.changed_at_most(10 * 6);
    assert!(machine.delivered > machine.best * 0.9, "{} {}", machine.delivered, machine.best);
}

#[test]
fn frames_that_wait_for_a_worker_without_cpu_time_count_as_a_saturated_worker() {
    let mut machine = Machine::new(FREE);
    for _ in 0..100 {
        machine.now_ns += WINDOW_NS;
        let pairs = machine.policy.pairs();
        machine.decide(&Window {
            now_ns: machine.now_ns,
            len_ns: WINDOW_NS,
            pairs: PAIRS,
            bytes: whole(machine.capacity[pairs - 1] * ONE),
            busiest_permille: 400,
            work_permille: 300,
            waiting_permille: 800,
        });
    }
    machine.uses(4);
}

#[test]
fn a_guest_that_comes_and_takes_the_cpus_is_noticed() {
    let mut machine = Machine::new(FREE);
    machine.run(20, |_, _| 9.0).uses(4);
    machine.capacity = TWO_CPUS;
    machine.run(300, |_, _| 9.0).uses(1);
    // And that it has gone.
    machine.capacity = FREE;
    machine.run(300, |_, _| 9.0).uses(4);
}

#[test]
fn a_guest_that_uses_fewer_pairs_gets_frames_by_no_other() {
    let mut machine = Machine::new(FREE);
    machine.run(20, |_, _| 9.0).uses(4);
    for of in [2, 1, 4, 0, 3, 4] {
        (0..100).for_each(|_| machine.window(9.0, of));
        assert!(machine.policy.pairs() <= of.max(1));
    }
    machine.run(60, |_, _| 9.0).uses(4);
    // In the middle of a trial.
    let mut machine = Machine::new(FREE);
    while !machine.policy.is_trying() {
        machine.window(9.0, PAIRS);
    }
    machine.uses(2);
    machine.window(9.0, 1);
    machine.uses(1);
    assert!(!machine.policy.is_trying());
}

#[test]
fn no_guest_causes_changes_without_end() {
    const HOUR: u64 = 3600;
    // One for each pair in half a minute, and those of the first waits.
    let bound = usize::try_from(HOUR).unwrap() / 30 * PAIRS;
    for (on, off) in [(1, 1), (9, 21), (10, 20), (20, 25), (30, 21), (50, 50), (310, 25)] {
        let mut machine = Machine::new(FREE);
        machine.run(HOUR, |window, _| if window % (on + off) < on { 9.0 } else { 0.0 });
        machine.changed_at_most(bound);
    }
    // It sees the pairs: much throughput for each one more, and nothing when it has all.
    for last in 2..=PAIRS {
        let mut machine = Machine::new(FREE);
        machine.run(HOUR, |_, pairs| if pairs < last { 9.0 } else { 0.0 });
        machine.changed_at_most(bound);
        let mut machine = Machine::new(FREE);
        let full = std::cell::Cell::new(0);
        machine.run(HOUR, |_, pairs| {
            full.set(if pairs < last { 0 } else { full.get() + 1 });
            if full.get() < 12 { 9.0 } else { 0.0 }
        });
        machine.changed_at_most(bound);
        // It uses fewer pairs itself then.
        let mut machine = Machine::new(FREE);
        for window in 0..HOUR * 10 {
            let of = if machine.policy.pairs() >= last && window % 2 == 0 { 1 } else { PAIRS };
            machine.window(9.0, of);
        }
        machine.changed_at_most(bound);
    }
    for seed in 1..10 {
        let mut machine = Machine { noise: 0.9, random: seed, ..Machine::new(FREE) };
        machine.run(HOUR, |_, _| 9.0);
        machine.changed_at_most(bound);
    }
}
