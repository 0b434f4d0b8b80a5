//! Tables of single decisions, and scripted loads over many windows of a simulated host.

use super::*;

const WINDOW_NS: u64 = 50_000_000;
const LONG_NS: u64 = 1_000_000_000;

/// A window in percent: each worker's load, each queue's worker, unit and load, each CPU's idling.
fn window(workers: &[u64], queues: &[(usize, usize, u64)], idle: &[u64]) -> PlacementWindow {
    let ns = |percent: u64| WINDOW_NS * percent / 100;
    let worker = |percent: &u64| WorkerLoad {
        worked_ns: ns(*percent),
        ran_ns: ns(*percent),
        delayed_ns: 0,
        cpus: None,
        is_open: true,
    };
    let queue = |(key, (worker, unit, busy)): (usize, &(usize, usize, u64))| QueueLoad {
        key,
        worker: *worker,
        unit: *unit,
        busy_ns: ns(*busy),
        is_pinned: false,
    };
    PlacementWindow {
        now_ns: 0,
        len_ns: WINDOW_NS,
        workers: workers.iter().map(worker).collect(),
        queues: queues.iter().enumerate().map(queue).collect(),
        idle_ns: idle.iter().enumerate().map(|(cpu, percent)| (cpu, ns(*percent))).collect(),
    }
}

/// Which queue goes where, of a placement that has decided nothing before.
fn decided(window: &PlacementWindow) -> Vec<(usize, usize)> {
    Placement::default().decide(window).iter().map(|m| (m.queue, m.to)).collect()
}

#[test]
fn a_saturated_worker_gives_its_longest_queues_away() {
    type Case = (&'static str, Vec<u64>, Vec<(usize, usize, u64)>, Vec<(usize, usize)>);
    let table: [Case; 7] = [
        ("one of two", vec![99, 0], vec![(0, 0, 49), (0, 1, 49)], vec![(0, 1)]),
        ("the longest", vec![99, 0], vec![(0, 0, 9), (0, 1, 50), (0, 2, 40)], vec![(1, 1)]),
        ("a long one beside short ones", vec![99, 0], vec![(0, 0, 2), (0, 1, 95)], vec![(1, 1)]),
        (
            "to the least loaded worker",
            vec![99, 50, 5],
            vec![(0, 0, 49), (0, 1, 49), (1, 2, 50), (2, 3, 5)],
            vec![(0, 2)],
        ),
        (
            "several, to several",
            vec![99, 0, 0],
            vec![(0, 0, 16), (0, 1, 16), (0, 2, 16), (0, 3, 16), (0, 4, 16), (0, 5, 16)],
            vec![(0, 1), (1, 2), (2, 1), (3, 2)],
        ),
        (
            "two saturated ones",
            vec![99, 99, 0],
            vec![(0, 0, 49), (0, 1, 49), (1, 2, 33), (1, 3, 33), (1, 4, 33)],
            vec![(2, 2), (0, 2)],
        ),
        (
            "pairs as units",
            vec![99, 0],
            vec![(0, 0, 20), (0, 0, 30), (0, 1, 20), (0, 1, 29)],
            vec![(0, 1), (1, 1)],
        ),
    ];
    for (name, workers, queues, moves) in table {
        assert_eq!(decided(&window(&workers, &queues, &[100; 4])), moves, "{name}");
    }
}

#[test]
fn nothing_is_spread_without_need_gain_or_a_free_cpu() {
    let two = [(0, 0, 49), (0, 1, 49)];
    let mut table = vec![
        ("no CPU idles", window(&[99, 0], &two, &[30, 29])),
        ("no CPU is ours", window(&[99, 0], &two, &[])),
        ("there is no further worker", window(&[99], &two, &[100; 4])),
        ("it is not saturated", window(&[89, 0], &two, &[100; 4])),
        ("one queue alone is busy", window(&[99, 0], &[(0, 0, 98), (0, 1, 1)], &[100; 4])),
        ("the others are too busy", window(&[99, 61], &two, &[100; 4])),
        ("they would only swap", window(&[99, 60], &[(0, 0, 49), (0, 1, 49)], &[100; 4])),
        ("there is no worker", window(&[], &[], &[100; 4])),
        ("nothing was measured", PlacementWindow::default()),
    ];
    let mut closed = window(&[99, 0], &two, &[100; 4]);
    closed.workers[1].is_open = false;
    table.push(("the other worker is closed", closed));
    let mut contended = window(&[99, 0], &two, &[100; 4]);
    contended.workers[0].delayed_ns = contended.workers[0].ran_ns / 3;
    table.push(("its thread waits for CPUs", contended));
    let mut bound = window(&[99, 0], &two, &[0, 100]);
    bound.workers[1].cpus = Some(vec![0]);
    table.push(("the CPU of the other worker is busy", bound));
    let mut pinned = window(&[99, 0], &two, &[100; 4]);
    pinned.queues.iter_mut().for_each(|queue| queue.is_pinned = true);
    table.push(("all queues are pinned", pinned));
    for (name, window) in table {
        assert_eq!(decided(&window), [], "{name}");
    }
}

#[test]
fn a_pinned_queue_stays_and_the_other_one_goes() {
    let mut window = window(&[99, 0], &[(0, 0, 60), (0, 1, 39)], &[100; 4]);
    window.queues[0].is_pinned = true;
    assert_eq!(decided(&window), [(1, 1)]);
}

#[test]
fn a_pair_that_saturates_its_worker_alone_comes_apart() {
    let alone = window(&[99, 0], &[(0, 0, 60), (0, 0, 39)], &[100; 2]);
    assert_eq!(decided(&alone), [(0, 1)]);
    let beside = window(&[99, 0], &[(0, 0, 60), (0, 0, 29), (0, 1, 10)], &[100; 2]);
    assert_eq!(decided(&beside), [(0, 1), (1, 1)], "a worker can hold it");
}

#[test]
fn workers_that_mostly_sleep_give_their_queues_back() {
    type Case = (&'static str, Vec<u64>, Vec<(usize, usize, u64)>, Vec<(usize, usize)>);
    let table: [Case; 8] = [
        ("to the first", vec![10, 10], vec![(0, 0, 9), (1, 1, 9)], vec![(1, 0)]),
        (
            "from all of them",
            vec![5, 5, 5],
            vec![(0, 0, 4), (1, 1, 4), (2, 2, 0), (2, 3, 4)],
            vec![(2, 0), (3, 0), (1, 0)],
        ),
        ("to a busier one", vec![5, 40], vec![(0, 0, 4), (1, 1, 39)], vec![(0, 1)]),
        ("to one with room", vec![45, 10, 10], vec![(0, 0, 44), (1, 1, 9), (2, 2, 9)], {
            vec![(2, 1)]
        }),
        ("but to no empty one", vec![0, 10], vec![(1, 1, 9)], vec![]),
        ("unless it is too much", vec![30, 25], vec![(0, 0, 30), (1, 1, 24)], vec![]),
        ("unless they are busy", vec![26, 26], vec![(0, 0, 20), (1, 1, 20)], vec![]),
        ("a pair comes together", vec![8, 8], vec![(0, 0, 8), (1, 0, 8)], vec![(1, 0)]),
    ];
    for (name, workers, queues, moves) in table {
        assert_eq!(decided(&window(&workers, &queues, &[100; 4])), moves, "{name}");
    }
    let mut pinned = window(&[5, 5], &[(0, 0, 4), (1, 1, 4)], &[100; 4]);
    pinned.queues[1].is_pinned = true;
    assert_eq!(decided(&pinned), [(0, 1)], "to where the pinned one is");
    pinned.queues[0].is_pinned = true;
    assert_eq!(decided(&pinned), []);
}

/// A host on which queues want time, and get what their workers have.
struct Host {
    cpus: usize,
    /// Which part of all CPUs others use, in percent of one.
    others: u64,
    /// Worker, unit, and percent of a CPU that it wants.
    queues: Vec<(usize, usize, u64)>,
    workers_max: usize,
    placement: Placement,
    now_ns: u64,
    moved: usize,
}

impl Host {
    fn new(cpus: usize, wanted: &[u64]) -> Self {
        let queues = wanted.iter().enumerate().map(|(unit, wanted)| (0, unit, *wanted));
        Self {
            cpus,
            others: 0,
            queues: queues.collect(),
            workers_max: cpus,
            placement: Placement::default(),
            now_ns: 0,
            moved: 0,
        }
    }

    fn loads(&self) -> Vec<u64> {
        let wanted = |worker| {
            let own = self.queues.iter().filter(move |queue| queue.0 == worker);
            own.map(|queue| queue.2).sum::<u64>()
        };
        (0..self.workers_max).map(wanted).collect()
    }

    /// One window and its decision; how many queues move.
    fn step(&mut self) -> usize {
        let wanted = self.loads();
        // A worker costs something of its own, and has no more than a CPU.
        let worked: Vec<_> = wanted.iter().map(|n| (n + n.min(&1)).min(100)).collect();
        let shown = |(worker, unit, n): &(usize, usize, u64)| {
            (*worker, *unit, if wanted[*worker] > 100 { n * 100 / wanted[*worker] } else { *n })
        };
        let queues: Vec<_> = self.queues.iter().map(shown).collect();
        let all = self.cpus as u64 * 100;
        let idle = all.saturating_sub(worked.iter().sum::<u64>() + self.others);
        let mut window = window(&worked, &queues, &vec![idle / self.cpus as u64; self.cpus]);
        let is_saturated = worked.iter().any(|n| *n >= BUSY_PERCENT);
        self.now_ns += if is_saturated { WINDOW_NS } else { LONG_NS };
        window.now_ns = self.now_ns;
        let moves = self.placement.decide(&window);
        for Move { queue, to } in &moves {
            self.queues[*queue].0 = *to;
        }
        self.moved += moves.len();
        moves.len()
    }

    /// Plays for this many seconds; how many queues have moved.
    fn play(&mut self, seconds: u64) -> usize {
        let (moved, until_ns) = (self.moved, self.now_ns + seconds * 1_000_000_000);
        while self.now_ns < until_ns {
            self.step();
        }
        self.moved - moved
    }

    fn want(&mut self, percent: u64) {
        self.queues.iter_mut().for_each(|queue| queue.2 = percent);
    }

    fn serving(&self) -> usize {
        self.loads().iter().filter(|load| **load > 0).count()
    }
}

#[test]
fn sixteen_busy_queues_are_spread_by_two_decisions_at_most() {
    for cpus in [2, 3, 4, 8, 16] {
        for wanted in [20, 50, 100] {
            let mut host = Host::new(cpus, &[wanted; 16]);
            let decisions = (0..100).filter(|_| host.step() > 0).count();
            let most = host.loads().into_iter().max();
            let fair = (16 * wanted).div_ceil(cpus as u64) + wanted;
            assert!(decisions <= 2, "{cpus} CPUs, {wanted} %: {decisions}");
            assert!(most <= Some(fair.max(100)), "{cpus} CPUs, {wanted} %: {:?}", host.loads());
        }
    }
}

#[test]
fn a_load_that_stays_moves_queues_once_and_never_again() {
    let table: [&[u64]; 9] = [
        &[60, 50],
        &[95, 5],
        &[30, 30, 30, 30],
        &[100, 100, 100, 100, 100, 100],
        &[55, 55, 10, 10, 10],
        &[12; 9],
        &[90, 3, 3, 3],
        &[1; 64],
        &[46, 45],
    ];
    for wanted in table {
        for cpus in [2, 4] {
            let mut host = Host::new(cpus, wanted);
            host.play(30);
            assert_eq!(host.play(3600), 0, "{wanted:?} on {cpus} CPUs: {:?}", host.queues);
        }
    }
}

#[test]
fn a_load_that_goes_leaves_one_worker_awake() {
    let mut host = Host::new(4, &[50; 8]);
    host.play(10);
    assert_eq!(host.serving(), 4);
    host.want(1);
    assert_eq!(host.play(60), 6, "those that are not on the first worker");
    assert_eq!((host.serving(), host.loads()[0]), (1, 8));
    assert_eq!(host.play(3600), 0);
}

#[test]
fn a_load_that_comes_and_goes_moves_queues_less_and_less() {
    let mut host = Host::new(4, &[50; 8]);
    let hour = |host: &mut Host| {
        let moved = host.moved;
        for _ in 0..180 {
            host.want(50);
            host.play(10);
            host.want(1);
            host.play(10);
        }
        host.moved - moved
    };
    let first = hour(&mut host);
    let second = hour(&mut host);
    assert!((1..100).contains(&first) && second <= 30, "{first} moves, then {second}");
}

#[test]
fn a_load_near_the_limits_does_not_swing() {
    // Random walks around what would be spread and gathered.
    for seed in 0..50u64 {
        let mut random = seed;
        let mut host = Host::new(4, &[25, 25, 25, 25]);
        for _ in 0..3600 {
            for queue in &mut host.queues {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                queue.2 = 5 + (random >> 33) % 30;
            }
            host.play(1);
        }
        assert!(host.moved < 100, "seed {seed}: {} moves in an hour", host.moved);
    }
}

#[test]
fn queues_stay_together_where_others_use_the_cpus() {
    let mut host = Host::new(2, &[60, 60]);
    host.others = 100;
    assert_eq!(host.play(60), 0);
    host.others = 0;
    assert_eq!(host.play(1), 1, "a CPU has become free");
}

#[test]
fn a_gathering_that_did_not_come_about_was_not_wrong() {
    for came_about in [true, false] {
        let mut placement = Placement::default();
        let long = |now_ns, at: usize| PlacementWindow {
            now_ns,
            len_ns: LONG_NS,
            ..window(&[5, 5], &[(0, 0, 1), (at, 1, 1)], &[100, 100])
        };
        assert_eq!(placement.decide(&long(0, 1)).len(), 1, "it gathers");
        if !came_about {
            placement.forget_last();
        }
        let mut busy = window(&[99, 0], &[(0, 0, 49), (0, 1, 49)], &[0, 100]);
        busy.now_ns = LONG_NS;
        assert_eq!(placement.decide(&busy).len(), 1, "it spreads");
        let after_hold = LONG_NS + HOLD_NS + 1;
        let gathers_again = !placement.decide(&long(after_hold, 1)).is_empty();
        assert_eq!(gathers_again, !came_about);
    }
}
