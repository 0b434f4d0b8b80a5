//! `blk-queues`: whether more queues ever cost a disk something.
//!
//! 4 KiB random reads by libblkio, with as many in flight on 16 queues together as on one; on a
//! null disk and on a file in the page cache; by a thread for each queue, as far as there are CPUs,
//! and by one thread that sleeps on all of them.

use super::file_blk::{image, warm};
use super::{BLOCK, Bench, Client, ScenarioArgs, Work, ours};
use crate::report::ScenarioReport;
use crate::report::blk::BlkCell;
use crate::report::verdict::Verdict;
use std::ffi::OsStr;

/// Queues, the most first: each number is compared with the smaller ones.
const QUEUES: [usize; 5] = [16, 8, 4, 2, 1];
/// Requests in flight on all queues together: sixteen on each of sixteen.
const DEPTH: usize = 256;
/// The least share of the best smaller number's throughput that a number of queues must keep.
const KEPT_MIN: f64 = 0.96;
/// Size of the file.
const MEBIBYTES: usize = 256;

/// Runs the scenario. The second part is the verdict.
pub(crate) fn run(args: &ScenarioArgs) -> Result<(ScenarioReport<BlkCell>, Verdict), String> {
    let mut bench = Bench::new(args, Client::Blkio)?;
    let image = image(None, if args.smoke { MEBIBYTES / 16 } else { MEBIBYTES })?;
    warm(image.path())?;
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let disks: [(&str, &[&dyn AsRef<OsStr>]); 2] = [
        ("null disk", &[&"--null=64G"]),
        ("file in the page cache", &[&"--blk-file", &image.path()]),
    ];
    for (disk, options) in disks {
        for threads in [cpus, 1] {
            let mut contenders = Vec::new();
            for queues in QUEUES {
                let number = format!("--num-queues={queues}");
                let arguments: Vec<_> = options.iter().copied().chain([&number as _]).collect();
                contenders.push(ours(args, &format!("{queues} queues"), &arguments)?);
            }
            let work = |queues| Work {
                queues,
                depth: DEPTH / queues,
                size: BLOCK,
                poll: false,
                threads: Some(threads.min(queues)),
                pinned: false,
            };
            let name = match threads {
                1 => format!("{disk}, QD{DEPTH} in all, one thread sleeps on all queues"),
                _ => {
                    format!("{disk}, QD{DEPTH} in all, a thread for each queue, {threads} at most")
                }
            };
            bench.cell(&name, &QUEUES.map(work), &contenders)?;
        }
    }
    let report = bench.report("blk-queues");
    let (worst, broken) = kept_by_queues(&report.cells);
    Ok((report, Verdict::new(args.smoke, worst, broken)))
}

/// The worst of all, in words, and what is below the promise.
pub(super) fn kept_by_queues<'a>(
    cells: impl IntoIterator<Item = &'a BlkCell>,
) -> (String, Vec<String>) {
    let mut all: Vec<(f64, String)> = Vec::new();
    for cell in cells {
        for (more, less, kept) in cell.against_best_behind() {
            let words = format!("{}: {more} have {kept} of {less}", cell.name);
            all.push((kept.median, words));
        }
    }
    all.sort_by(|(a, _), (b, _)| a.total_cmp(b));
    let worst = all.first().map_or(String::new(), |(_, words)| format!("; the worst is {words}"));
    let broken = all.into_iter().filter(|(kept, _)| *kept < KEPT_MIN).map(|(_, words)| words);
    let kept = format!("each number of queues has {KEPT_MIN} of the best smaller one, or more");
    (kept + &worst, broken.collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Party;
    use crate::report::blk::BlkSample;

    fn cell(rates: [f64; 3]) -> BlkCell {
        let party = |(name, iops): (&str, f64)| Party {
            name: format!("{name} queues"),
            samples: vec![BlkSample { iops, ..BlkSample::default() }],
        };
        let parties = ["4", "2", "1"].into_iter().zip(rates).map(party);
        BlkCell::new("c".to_owned(), parties.collect())
    }

    #[test]
    fn a_number_of_queues_below_the_best_smaller_one_breaks_the_promise() {
        // Four queues are faster than one, and slower than two.
        let (worst, broken) = kept_by_queues(&[cell([95.0, 100.0, 50.0])]);
        assert_eq!(broken, ["c: 4 queues have 0.95x (0.95 to 0.95) of 2 queues"]);
        assert!(worst.contains("the worst is c: 4 queues"), "{worst}");
        assert_eq!(kept_by_queues(&[cell([97.0, 100.0, 101.0])]).1, Vec::<String>::new());
        assert_eq!(kept_by_queues(&[cell([90.0, 100.0, 110.0])]).1.len(), 2);
        assert_eq!(kept_by_queues(&[]).1, Vec::<String>::new());
    }
}
