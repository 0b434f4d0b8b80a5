//! Which worker serves which queue: together while one worker keeps up, apart when it does not and
//! a CPU is free.
//!
//! Thread-per-queue loses on few cores and with many small guests: every further busy thread takes
//! a core from the guests. So a queue leaves its worker only if that worker is saturated, serves
//! another busy queue too, and a CPU would otherwise idle.

/// A worker counts as saturated from here.
const BUSY_PERCENT: u32 = 90;
/// A worker that is busier than this gets no further queue.
const TARGET_PERCENT: u32 = 60;
/// This much of a CPU must be idle.
const IDLE_PERCENT: u32 = 60;

/// What a worker did in the last window.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WorkerLoad {
    /// Share of the window it ran.
    pub busy_percent: u32,
    /// Requests of each of its queues in the window, by a key of the caller's.
    pub queues: Vec<(usize, u64)>,
}

/// A queue to move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// The queue's key.
    pub queue: usize,
    /// The worker it goes to; one past the last is a new one.
    pub to: usize,
}

/// Decides whether a queue should move. `idle_percent` is what all CPUs idled, 100 for each.
#[must_use]
pub fn decide(workers: &[WorkerLoad], workers_max: usize, idle_percent: u32) -> Option<Move> {
    if idle_percent < IDLE_PERCENT {
        return None;
    }
    let active = |w: &WorkerLoad| w.queues.iter().filter(|(_, requests)| *requests > 0).count();
    let (from, busiest) = workers
        .iter()
        .enumerate()
        .filter(|(_, w)| w.busy_percent >= BUSY_PERCENT && active(w) > 1)
        .max_by_key(|(_, w)| w.busy_percent)?;
    let idlest = workers
        .iter()
        .enumerate()
        .filter(|(index, w)| *index != from && w.busy_percent <= TARGET_PERCENT)
        .min_by_key(|(_, w)| w.busy_percent)
        .map(|(index, _)| index);
    let fresh = (workers.len() < workers_max).then_some(workers.len());
    let to = idlest.or(fresh)?;
    // The queue that comes nearest to half of the work.
    let total: u64 = busiest.queues.iter().map(|(_, requests)| requests).sum();
    let (queue, _) = busiest
        .queues
        .iter()
        .filter(|(_, requests)| *requests > 0)
        .min_by_key(|(_, requests)| requests.abs_diff(total / 2))?;
    Some(Move { queue: *queue, to })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(busy_percent: u32, queues: &[(usize, u64)]) -> WorkerLoad {
        WorkerLoad { busy_percent, queues: queues.to_vec() }
    }

    #[test]
    fn a_saturated_worker_gives_half_of_its_work_to_a_new_one() {
        let workers = [load(99, &[(0, 10), (1, 45), (2, 45)])];
        assert_eq!(decide(&workers, 2, 100), Some(Move { queue: 1, to: 1 }));
    }

    #[test]
    fn an_idle_worker_comes_before_a_new_one() {
        let workers = [load(95, &[(0, 50), (1, 50)]), load(5, &[])];
        assert_eq!(decide(&workers, 8, 100), Some(Move { queue: 0, to: 1 }));
    }

    #[test]
    fn nothing_moves_without_an_idle_cpu_a_second_queue_or_need() {
        let two = [load(99, &[(0, 50), (1, 50)])];
        assert_eq!(decide(&two, 2, 59), None);
        assert_eq!(decide(&two, 1, 200), None);
        assert_eq!(decide(&[load(99, &[(0, 50), (1, 0)])], 2, 200), None);
        assert_eq!(decide(&[load(89, &[(0, 50), (1, 50)])], 2, 200), None);
        assert_eq!(decide(&[], 2, 200), None);
    }

    #[test]
    fn busy_workers_do_not_swap_queues() {
        let workers = [load(99, &[(0, 50), (1, 50)]), load(80, &[(2, 50)])];
        assert_eq!(decide(&workers, 2, 100), None);
    }
}
