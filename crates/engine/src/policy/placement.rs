//! Which worker serves which queue: together while one worker keeps up, apart when it does not and
//! a CPU is free, together again when the workers mostly sleep.
//!
//! Thread-per-queue loses on few cores and with many small guests: every further busy thread takes
//! a core from the guests. So a queue leaves its worker only if that worker is saturated, serves
//! another busy queue too, and a CPU would otherwise idle. A load is a time: the nanoseconds that
//! the turns of a queue took in the window that was measured.
//!
//! ```text
//! decide:  move what spread says; if that is nothing, move what gather says
//! spread:  donors  = saturated workers with several busy units that may move
//!          targets = the least loaded workers, each with an idle CPU that it may use while a donor
//!          has more than the fair share of donors and targets:
//!              the longest unit goes to the least loaded target, if that stays below the donor
//! gather:  each worker that mostly sleeps, the last one first:
//!              all its queues go to the first worker that then still sleeps half of its time
//! ```
//! 1. A unit is what moves as one: the receiveq and the transmitq of a pair, which share a port and
//!    a guest's CPU, or a queue of a disk. A pair that saturates a worker alone comes apart.
//! 2. All moves of a decision are made at once: sixteen busy queues are spread by one decision, and
//!    a second one corrects what the first could not know, since a saturated worker shows only how
//!    its queues share its time, and not how much they want.
//! 3. Queues do not move to and fro. A worker gives queues away from [`BUSY_PERCENT`] on, and
//!    gathering fills it to [`GATHERED_PERCENT`] at most. After a spread nothing is gathered for
//!    [`HOLD_NS`]. A spread within [`REGRET_NS`] of a gathering shows that the gathering was wrong:
//!    then that time grows by [`REGRET_FACTOR`].
//! 4. Queues and workers whose place the operator has chosen are loads like others. They never
//!    move, and a worker that is bound to CPUs counts only those as free.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

/// A worker that worked for this percentage of a window, or longer, is saturated.
pub const BUSY_PERCENT: u64 = 90;
/// A worker that worked for more than this percentage of a window is no target of a spread.
pub const TARGET_PERCENT: u64 = 60;
/// This much of a CPU must idle for each worker that gets queues by a spread.
pub const IDLE_PERCENT: u64 = 60;
/// If the workers' threads waited for a CPU for more than this percentage of the time in which they
/// could have run, a spread moves nothing: a further busy thread would wait too.
pub const CONTENDED_PERCENT: u64 = 20;
/// Gathering empties no worker that worked for more than this percentage of a window.
pub const RESTING_PERCENT: u64 = 25;
/// Gathering fills a worker to this percentage of a window at most.
pub const GATHERED_PERCENT: u64 = 50;
/// A spread moves no unit that worked for less than this percentage of the window, and does not
/// count it as busy.
const WORTH_PERCENT: u64 = 2;
/// Nanoseconds after a spread in which nothing is gathered.
pub const HOLD_NS: u64 = 5_000_000_000;
/// The maximum to which [`HOLD_NS`] grows.
pub const HOLD_NS_MAX: u64 = 1_800_000_000_000;
/// A spread within this many nanoseconds after a gathering shows that the gathering was wrong.
pub const REGRET_NS: u64 = 60_000_000_000;
/// After such a spread, the time without gathering is multiplied by this factor.
pub const REGRET_FACTOR: u64 = 4;

/// The CPU time of a worker's thread in a window, and the CPUs on which the thread may run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WorkerLoad {
    /// Nanoseconds in which the thread ran and had work.
    pub worked_ns: u64,
    /// Nanoseconds in which the thread ran, with or without work.
    pub ran_ns: u64,
    /// Nanoseconds in which the thread was runnable, but waited for a CPU.
    pub delayed_ns: u64,
    /// The CPUs to which the thread is bound; `None`: all CPUs of the process.
    pub cpus: Option<Vec<usize>>,
    /// True if the worker can get queues.
    pub is_open: bool,
}

/// The time that a queue's turns took in a window, and the queue's worker and unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueLoad {
    /// The number by which the caller and [`Move`] name the queue.
    pub key: usize,
    /// The index of the queue's worker.
    pub worker: usize,
    /// The unit of the queue: queues of one worker with the same number move together.
    pub unit: usize,
    /// Nanoseconds that the queue's turns with work took.
    pub busy_ns: u64,
    /// True if the operator has chosen the queue's worker: the queue never moves.
    pub is_pinned: bool,
}

/// One window of measurement, on which a decision is based.
#[derive(Clone, Debug, Default)]
pub struct PlacementWindow {
    /// The end of the window, in nanoseconds.
    pub now_ns: u64,
    /// The length of the window, in nanoseconds.
    pub len_ns: u64,
    /// Every worker that runs or may be started, by index.
    pub workers: Vec<WorkerLoad>,
    /// Every queue that a worker serves.
    pub queues: Vec<QueueLoad>,
    /// The nanoseconds that each CPU of this process idled in the window, by the CPU's number.
    pub idle_ns: BTreeMap<usize, u64>,
}

impl PlacementWindow {
    fn percent(&self, percent: u64) -> u64 {
        self.len_ns * percent / 100
    }
}

/// A queue to move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// The number of the queue ([`QueueLoad::key`]).
    pub queue: usize,
    /// The index of the worker to which the queue moves.
    pub to: usize,
}

/// Queues of one worker that move together.
#[derive(Clone, Debug)]
struct Unit {
    keys: Vec<usize>,
    worker: usize,
    busy_ns: u64,
    is_pinned: bool,
}

/// Decides which queues move, and keeps the times of its last decisions.
#[derive(Clone, Debug)]
pub struct Placement {
    gathered_at_ns: Option<u64>,
    /// The value of `gathered_at_ns` before the last decision.
    gathered_before_ns: Option<u64>,
    /// Nothing is gathered before this time.
    hold_until_ns: u64,
    hold_ns: u64,
}

impl Default for Placement {
    fn default() -> Self {
        Self { gathered_at_ns: None, gathered_before_ns: None, hold_until_ns: 0, hold_ns: HOLD_NS }
    }
}

impl Placement {
    /// Returns the queues that should move now.
    #[must_use]
    pub fn decide(&mut self, window: &PlacementWindow) -> Vec<Move> {
        self.gathered_before_ns = self.gathered_at_ns;
        let moves = spread(window);
        if !moves.is_empty() {
            let regrets =
                self.gathered_at_ns.is_some_and(|at| window.now_ns.saturating_sub(at) < REGRET_NS);
            let longer_ns = (self.hold_ns * REGRET_FACTOR).min(HOLD_NS_MAX);
            self.hold_ns = if regrets { longer_ns } else { HOLD_NS };
            self.hold_until_ns = window.now_ns + self.hold_ns;
            return moves;
        }
        if window.now_ns < self.hold_until_ns {
            return moves;
        }
        let moves = gather(window);
        if !moves.is_empty() {
            self.gathered_at_ns = Some(window.now_ns);
        }
        moves
    }

    /// Call when none of the queues of the last decision could move: then a later spread does not
    /// show that this gathering was wrong.
    pub fn forget_last(&mut self) {
        self.gathered_at_ns = self.gathered_before_ns;
    }
}

/// Returns the units of all workers. A pair whose halves are on different workers is two units.
fn units(window: &PlacementWindow) -> Vec<Unit> {
    let mut units: BTreeMap<(usize, usize), Unit> = BTreeMap::new();
    for queue in &window.queues {
        let QueueLoad { key, worker, unit, busy_ns, is_pinned } = *queue;
        let fresh = Unit { keys: vec![], worker, busy_ns: 0, is_pinned: false };
        let unit = units.entry((worker, unit)).or_insert(fresh);
        unit.keys.push(key);
        unit.busy_ns += busy_ns;
        unit.is_pinned |= is_pinned;
    }
    units.into_values().collect()
}

/// Returns each queue of `unit` as a unit of its own.
fn apart(unit: &Unit, window: &PlacementWindow) -> Vec<Unit> {
    let of_unit = window.queues.iter().filter(|queue| unit.keys.contains(&queue.key));
    of_unit
        .map(|queue| Unit { keys: vec![queue.key], busy_ns: queue.busy_ns, ..unit.clone() })
        .collect()
}

/// True if the workers' threads waited for CPUs too long ([`CONTENDED_PERCENT`]).
fn is_contended(window: &PlacementWindow) -> bool {
    let sum = |of: fn(&WorkerLoad) -> u64| window.workers.iter().map(of).sum::<u64>();
    let (ran_ns, delayed_ns) = (sum(|w| w.ran_ns), sum(|w| w.delayed_ns));
    delayed_ns * 100 > (ran_ns + delayed_ns) * CONTENDED_PERCENT
}

/// Returns the units that `worker` can give to others; `None` if it is not saturated, or has only
/// one busy unit.
fn units_to_give(window: &PlacementWindow, worker: usize, units: &[Unit]) -> Option<Vec<Unit>> {
    if window.workers.get(worker)?.worked_ns < window.percent(BUSY_PERCENT) {
        return None;
    }
    let worth_ns = window.percent(WORTH_PERCENT);
    let is_busy = |unit: &Unit| unit.busy_ns > 0 && unit.busy_ns >= worth_ns;
    let of_worker = units.iter().filter(|unit| unit.worker == worker);
    let mut busy: Vec<Unit> = of_worker.filter(|unit| is_busy(unit)).cloned().collect();
    if let [alone] = &busy[..] {
        busy = apart(alone, window).into_iter().filter(is_busy).collect();
    }
    (busy.len() > 1).then(|| busy.into_iter().filter(|unit| !unit.is_pinned).collect())
}

/// Returns the moves of units from saturated workers to targets, each with a free CPU.
fn spread(window: &PlacementWindow) -> Vec<Move> {
    let units = units(window);
    let mut donors = BTreeMap::new();
    for worker in 0..window.workers.len() {
        if let Some(given) = units_to_give(window, worker, &units) {
            donors.insert(worker, given);
        }
    }
    let movable = donors.values().map(Vec::len).sum();
    if movable == 0 || is_contended(window) {
        return Vec::new();
    }
    let mut targets = targets(window, &donors.keys().copied().collect::<Vec<_>>(), movable);
    let mut loads: BTreeMap<usize, u64> =
        donors.keys().map(|donor| (*donor, window.workers[*donor].worked_ns)).collect();
    let total_ns: u64 = loads.values().chain(targets.values()).sum();
    let fair_ns = total_ns / (loads.len() + targets.len()) as u64;
    let mut moves = Vec::new();
    while let Some((donor, donor_ns)) = most(&loads).filter(|(_, ns)| *ns > fair_ns)
        && let Some((target, target_ns)) = least(&targets)
    {
        let given = donors.entry(donor).or_default();
        let fits = |unit: &Unit| target_ns + unit.busy_ns < donor_ns;
        let fitting = given.iter().enumerate().filter(|(_, unit)| fits(unit));
        // Of equally long units take the first.
        let longest = fitting.rev().max_by_key(|(_, unit)| unit.busy_ns).map(|(at, _)| at);
        let Some(unit) = longest.map(|at| given.remove(at)) else {
            loads.remove(&donor);
            continue;
        };
        loads.insert(donor, donor_ns.saturating_sub(unit.busy_ns));
        targets.insert(target, target_ns + unit.busy_ns);
        moves.extend(unit.keys.iter().map(|key| Move { queue: *key, to: target }));
    }
    moves
}

/// Returns at most `count` workers that a spread may fill, each with the time that it has worked.
/// For each of them, some CPU that it may use is idle.
fn targets(window: &PlacementWindow, donors: &[usize], count: usize) -> BTreeMap<usize, u64> {
    let is_target = |index: &usize, worker: &WorkerLoad| {
        let has_room = worker.worked_ns <= window.percent(TARGET_PERCENT);
        worker.is_open && has_room && !donors.contains(index)
    };
    let mut candidates: Vec<_> = window.workers.iter().enumerate().collect();
    candidates.retain(|(index, worker)| is_target(index, worker));
    candidates.sort_by_key(|(index, worker)| (worker.worked_ns, *index));
    let mut idle_ns = window.idle_ns.clone();
    let mut chosen = BTreeMap::new();
    for (index, worker) in candidates {
        if chosen.len() < count && takes_cpu(window, &mut idle_ns, worker.cpus.as_deref()) {
            chosen.insert(index, worker.worked_ns);
        }
    }
    chosen
}

/// Subtracts the time of one CPU from `idle_ns`. Returns false, and subtracts nothing, if the CPUs
/// that are `allowed` idle for too short a time.
fn takes_cpu(
    window: &PlacementWindow,
    idle_ns: &mut BTreeMap<usize, u64>,
    allowed: Option<&[usize]>,
) -> bool {
    let is_allowed = |cpu: &usize| allowed.is_none_or(|allowed| allowed.contains(cpu));
    let mut cpus: Vec<_> = idle_ns.iter_mut().filter(|(cpu, _)| is_allowed(cpu)).collect();
    let total_ns: u64 = cpus.iter().map(|(_, ns)| **ns).sum();
    if total_ns == 0 || total_ns < window.percent(IDLE_PERCENT) {
        return false;
    }
    cpus.sort_by_key(|(_, ns)| std::cmp::Reverse(**ns));
    let mut wanted_ns = window.len_ns;
    for (_, ns) in cpus {
        let taken_ns = wanted_ns.min(*ns);
        *ns -= taken_ns;
        wanted_ns -= taken_ns;
    }
    true
}

fn most(loads: &BTreeMap<usize, u64>) -> Option<(usize, u64)> {
    loads.iter().map(|(worker, ns)| (*worker, *ns)).max_by_key(|(_, ns)| *ns)
}

fn least(loads: &BTreeMap<usize, u64>) -> Option<(usize, u64)> {
    loads.iter().map(|(worker, ns)| (*worker, *ns)).min_by_key(|(_, ns)| *ns)
}

/// Returns the moves that empty workers which mostly sleep. All queues of such a worker go to one
/// other worker, which then still sleeps enough.
fn gather(window: &PlacementWindow) -> Vec<Move> {
    let units = units(window);
    let mut loads = BTreeMap::new();
    for unit in &units {
        if let Some(worker) = window.workers.get(unit.worker) {
            loads.insert(unit.worker, worker.worked_ns);
        }
    }
    let mut moves = Vec::new();
    let workers: Vec<_> = loads.keys().rev().copied().collect();
    for leaver in workers {
        let mut own = units.iter().filter(|unit| unit.worker == leaver);
        let Some(leaver_ns) = loads.get(&leaver).copied() else { continue };
        if leaver_ns > window.percent(RESTING_PERCENT) || own.any(|unit| unit.is_pinned) {
            continue;
        }
        let fits = |(_, ns): &(&usize, &u64)| **ns + leaver_ns <= window.percent(GATHERED_PERCENT);
        let is_other = |at: usize| at != leaver && window.workers[at].is_open;
        let mut others = loads.iter().filter(|(at, _)| is_other(**at));
        let Some((&keeper, _)) = others.find(fits) else { continue };
        loads.remove(&leaver);
        *loads.entry(keeper).or_default() += leaver_ns;
        let leaving = window.queues.iter().filter(|queue| queue.worker == leaver);
        moves.extend(leaving.map(|queue| Move { queue: queue.key, to: keeper }));
    }
    moves
}
