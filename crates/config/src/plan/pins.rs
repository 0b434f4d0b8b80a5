//! The operator's placement: the CPUs of each worker (`worker_cpus`), and the worker of each queue
//! (`queue_workers`).

use super::Plan;
use crate::place::{Place, PlanError};
use manyring_engine::allowed_cpus;

/// A thread can be pinned only to CPUs with numbers below this one, the number of bits of
/// `cpu_set_t`.
const CPU_END: usize = 1024;

/// Parses the CPUs of each worker, and checks that this process may use each of them.
pub(super) fn worker_cpus(
    raw: Option<&[String]>,
    place: &Place,
) -> Result<Vec<Vec<usize>>, PlanError> {
    let (raw, allowed) = (raw.unwrap_or_default(), allowed_cpus());
    let mut all = Vec::with_capacity(raw.len());
    for text in raw {
        let Some(cpus) = parse_cpus(text) else {
            let problem = format!("{text:?} is not a list of CPUs like \"0-3,8\"");
            return place.error("worker_cpus", problem);
        };
        if let Some(cpu) = cpus.iter().find(|cpu| !allowed.contains(cpu)) {
            let (cpu, allowed) = (*cpu, in_words(&allowed));
            let problem = format!("CPU {cpu} is not available; this process may use {allowed}");
            return place.error("worker_cpus", problem);
        }
        all.push(cpus);
    }
    Ok(all)
}

/// Checks that `queue_workers` does not list more workers than the device has queues or pairs.
pub(super) fn queue_workers(
    raw: Option<&[usize]>,
    count: usize,
    place: &Place,
) -> Result<Vec<usize>, PlanError> {
    let workers = raw.unwrap_or_default();
    if workers.len() > count {
        let problem = format!("{} workers are given for {count} queues or pairs", workers.len());
        return place.error("queue_workers", problem);
    }
    Ok(workers.to_vec())
}

/// Checks that each worker which a device names in `queue_workers` exists.
pub(super) fn check(plan: &Plan) -> Result<(), PlanError> {
    let workers = plan.daemon.workers;
    for device in plan.devices() {
        if let Some(worker) = device.queue_workers.iter().find(|worker| **worker >= workers) {
            let problem = format!("worker {worker} is not between 0 and {}", workers - 1);
            return device.place.error("queue_workers", problem);
        }
    }
    Ok(())
}

/// Parses a list of CPUs like `0-3,8`, in the kernel's format.
fn parse_cpus(text: &str) -> Option<Vec<usize>> {
    let mut cpus = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let number = |text: &str| text.trim().parse().ok().filter(|cpu| *cpu < CPU_END);
        let (first, last): (usize, usize) = (number(first)?, number(last)?);
        if first > last {
            return None;
        }
        cpus.extend(first..=last);
    }
    cpus.sort_unstable();
    cpus.dedup();
    Some(cpus)
}

/// Writes CPUs as a list like `0-3,8`.
pub fn in_words(cpus: &[usize]) -> String {
    let runs = cpus.chunk_by(|a, b| a + 1 == *b).filter_map(|run| match run {
        [] => None,
        [cpu] => Some(cpu.to_string()),
        [first, .., last] => Some(format!("{first}-{last}")),
    });
    runs.collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::super::tests::plan;
    use super::*;

    #[test]
    fn lists_of_cpus_are_read_and_written_as_the_kernel_does() {
        for (text, cpus) in [
            ("0", vec![0]),
            ("0-3", vec![0, 1, 2, 3]),
            ("8,0-1, 4 - 5", vec![0, 1, 4, 5, 8]),
            ("1,1-2", vec![1, 2]),
            ("1023", vec![1023]),
        ] {
            assert_eq!(parse_cpus(text), Some(cpus), "{text}");
        }
        for text in ["", ",", "0-", "-1", "3-1", "a", "0-1-2", "1024", "0-18446744073709551615"] {
            assert_eq!(parse_cpus(text), None, "{text}");
        }
        assert_eq!(in_words(&[0, 1, 2, 4, 6, 7]), "0-2,4,6-7");
        assert_eq!(in_words(&[]), "");
    }

    #[test]
    fn a_set_of_cpus_makes_a_worker_unless_the_number_of_workers_is_given() {
        let cpu = allowed_cpus()[0];
        let disk = "[[blk]]\nsocket_path = '/s'\nnull = '1G'\nqueue_workers = [1, 0]\n";
        let sets = format!("[daemon]\nworker_cpus = ['{cpu}', '{cpu}']\n");
        let two = plan(&format!("{sets}{disk}")).unwrap();
        assert_eq!((two.daemon.workers, &two.daemon.worker_cpus), (2, &vec![vec![cpu]; 2]));
        assert_eq!(two.blk[0].device.queue_workers, [1, 0]);
        let five = plan(&format!("{sets}workers = 5\n{disk}")).unwrap();
        assert_eq!((five.daemon.workers, five.daemon.worker_cpus.len()), (5, 2));
    }

    #[test]
    fn what_cannot_be_chosen_is_refused_by_its_key() {
        let cpu = allowed_cpus()[0];
        let foreign = (0..CPU_END).find(|cpu| !allowed_cpus().contains(cpu)).unwrap();
        let disk = "[[blk]]\nname = 'd'\nsocket_path = '/s'\nnull = '1G'\nnum_queues = 2\n";
        let net = "[[net]]\nname = 'n'\nsocket_path = '/n'\nnull = true\nqueue_pairs = 1\n";
        let sets = "[daemon]: worker_cpus: ";
        for (daemon, device, words) in [
            (format!("worker_cpus = ['{foreign}']"), disk.to_owned(), sets.to_owned() + "CPU "),
            (
                "worker_cpus = ['x']".to_owned(),
                disk.to_owned(),
                sets.to_owned() + "\"x\" is not a ",
            ),
            (
                format!("workers = 1\nworker_cpus = ['{cpu}', '{cpu}']"),
                disk.to_owned(),
                sets.to_owned() + "2 sets of CPUs for 1 workers",
            ),
            (
                "workers = 2".to_owned(),
                format!("{disk}queue_workers = [0, 2]\n"),
                "[[blk]] d: queue_workers: worker 2 is not between 0 and 1".to_owned(),
            ),
            (
                "workers = 2".to_owned(),
                format!("{disk}queue_workers = [0, 1, 0]\n"),
                "[[blk]] d: queue_workers: 3 workers".to_owned(),
            ),
            (
                "workers = 2".to_owned(),
                format!("{net}queue_workers = [0, 1]\n"),
                "[[net]] n: queue_workers: 2 workers".to_owned(),
            ),
        ] {
            let text = format!("[daemon]\n{daemon}\n{device}");
            let error = plan(&text).expect_err(&text);
            assert!(error.starts_with(&words), "{text}\n-> {error}");
        }
    }
}
