//! The table of the workers, with the queues that moved to them.

use super::table::{align, us};
use manyring_control::snapshot::as_float;
use manyring_serve::worker_view::{StuckInfo, WorkerInfo};

/// Returns a line for each worker that runs or has run. `before` is an earlier reading with the
/// seconds since then: with it, the line shows the numbers of that interval.
pub(super) fn table(workers: &[WorkerInfo], before: Option<(&[WorkerInfo], f64)>) -> String {
    let cpu = if before.is_some() { "CPU %" } else { "CPU s" };
    let sleeps = if before.is_some() { "SLEEPS/s" } else { "SLEEPS" };
    let names = ["WORKER", "STATE", "CPUS", "QUEUES", cpu, sleeps, "MOVES", "PAUSE p50", "p99 us"];
    let mut rows = vec![names.map(str::to_owned)];
    for worker in workers {
        let old = before.and_then(|(all, _)| all.iter().find(|old| old.name() == worker.name()));
        let since =
            |of: fn(&WorkerInfo) -> u64| as_float(of(worker).saturating_sub(old.map_or(0, of)));
        let seconds = before.map_or(1.0, |(_, seconds)| seconds);
        let ran = since(|worker| worker.ran_ns) / 1e9;
        let came =
            old.map_or_else(|| worker.pause_ns.clone(), |old| worker.pause_ns.since(&old.pause_ns));
        rows.push([
            worker.name(),
            if worker.running { "runs" } else { "ended" }.to_owned(),
            worker.place(),
            worker.queues.to_string(),
            if before.is_some() {
                format!("{:.0}", ran / seconds * 100.0)
            } else {
                format!("{ran:.1}")
            },
            format!("{:.0}", since(|worker| worker.sleeps) / seconds),
            came.count.to_string(),
            us(came.p50),
            us(came.p99),
        ]);
    }
    align([false, true, true, false, false, false, false, false, false], &rows)
}

/// Returns a line for each thread that is blocked in a system call, with the device that it serves.
pub(super) fn stuck(threads: &[StuckInfo]) -> String {
    let line = |stuck: &StuckInfo| {
        let device = if stuck.device.is_empty() { "several devices" } else { &stuck.device };
        let seconds = as_float(stuck.stuck_ns) / 1e9;
        let (thread, StuckInfo { state, waits_in, .. }) = (stuck.name(), stuck);
        format!("{thread}: stuck for {seconds:.1} s by {device}, in {waits_in} (state {state})\n")
    };
    threads.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::super::table::words;
    use super::*;
    use manyring_serve::worker_view::Summary;

    fn worker(ran_ns: u64, sleeps: u64, pauses: &[(u64, u64)]) -> WorkerInfo {
        let pause_ns = Summary { buckets: pauses.to_vec(), ..Summary::default() };
        WorkerInfo {
            process: String::new(),
            index: 3,
            running: true,
            cpus: Some(vec![0, 1, 4]),
            node: None,
            guest_pages: Vec::new(),
            queues: 7,
            sleeps,
            slept_ns: 0,
            ran_ns,
            looked_ns: 0,
            device_waits: 0,
            pause_ns: pause_ns.since(&Summary::default()),
            polling: Default::default(),
        }
    }

    #[test]
    fn a_worker_shows_its_cpu_time_and_the_pauses_of_what_came() {
        let all = table(&[worker(2_500_000_000, 9, &[(20_000, 3)])], None);
        let shown = ["3", "runs", "0-1,4", "7", "2.5", "9", "3", "20.0", "20.0"];
        assert_eq!(words(&all, 1), shown, "{all}");
        assert_eq!(all.lines().next().map(str::len), all.lines().nth(1).map(str::len), "{all}");
    }

    #[test]
    fn an_interval_shows_the_share_of_a_cpu() {
        let before = worker(1_000_000_000, 5, &[(20_000, 3)]);
        let now = worker(2_000_000_000, 25, &[(20_000, 3), (900_000, 1)]);
        let interval = table(&[now], Some((&[before], 2.0)));
        let shown = ["3", "runs", "0-1,4", "7", "50", "10", "1", "900.0", "900.0"];
        assert_eq!(words(&interval, 1), shown, "{interval}");
    }

    #[test]
    fn a_thread_that_does_not_come_back_is_shown_with_the_device_that_holds_it() {
        let worker = StuckInfo {
            process: String::new(),
            thread: "worker-0".to_owned(),
            device: "disk".to_owned(),
            state: "D".to_owned(),
            waits_in: "folio_wait_bit_common".to_owned(),
            stuck_ns: 2_340_000_000,
        };
        let shared = StuckInfo { device: String::new(), process: "a".to_owned(), ..worker.clone() };
        assert_eq!(
            stuck(&[worker, shared]),
            "worker-0: stuck for 2.3 s by disk, in folio_wait_bit_common (state D)\n\
             a/worker-0: stuck for 2.3 s by several devices, in folio_wait_bit_common (state D)\n"
        );
    }

    #[test]
    fn one_of_a_device_process_is_compared_with_itself_and_shown_with_the_device_processes_name() {
        let of = |process: &str, ran_ns| WorkerInfo {
            process: process.to_owned(),
            ..worker(ran_ns, 0, &[])
        };
        let before = [of("", 9_000_000_000), of("a", 1_000_000_000)];
        let shown = table(&[of("a", 2_000_000_000)], Some((&before, 2.0)));
        assert_eq!((words(&shown, 1)[0], words(&shown, 1)[4]), ("a/3", "50"), "{shown}");
    }

    #[test]
    fn one_that_has_ended_and_is_not_bound_says_so() {
        let ended = WorkerInfo { running: false, cpus: None, ..worker(0, 0, &[]) };
        assert_eq!(words(&table(&[ended], None), 1)[..3], ["3", "ended", "any"]);
    }
}
