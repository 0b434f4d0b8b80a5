//! `xen-blk-queues`: what the rings, the grants and the queues of a Xen disk cost.
//!
//! Reads of a null disk by a front-end in a domain of a simulated Xen: by 1, 4, 8 and 16 queues,
//! whose rings of one page are full, as the reference's were, or which share this many requests;
//! with grants that stay mapped and with grants that are mapped for each request; with a table of
//! grants for each queue and with the part of one table that all queues share; and the same disk
//! through virtio-blk.

use super::blk_queues::kept_by_queues;
use super::{BLOCK, Bench, Client, Contender, How, ScenarioArgs, Work, ours};
use crate::peer;
use crate::report::ScenarioReport;
use crate::report::blk::BlkCell;
use crate::report::verdict::Verdict;
use std::ffi::OsString;

/// Queues, the most first: each number is compared with the smaller ones.
const QUEUES: [usize; 4] = [16, 8, 4, 1];
/// Requests in flight on all queues together: sixteen on each of sixteen.
const DEPTH: usize = 256;
/// Requests in flight on each queue: the entries of a ring of one page. The reference's sixteen
/// jobs had 1024 requests, which waited for entries of such rings.
const RING: usize = 32;
/// Grants that a queue keeps mapped, unless it is told otherwise: what Linux's back-end keeps.
const KEPT: usize = 1056;
/// Bytes of the requests that together lie in more pages than one table keeps.
const LARGE: usize = 65_536;
/// CPU time of a request through blkif, at most, of one through virtio-blk with either client.
const VIRTIO_MAX: f64 = 1.5;

/// Runs the scenario. The second part is the verdict.
pub(crate) fn run(args: &ScenarioArgs) -> Result<(ScenarioReport<BlkCell>, Verdict), String> {
    let mut bench = Bench::new(args, Client::Blkio)?;
    let work = |queues, size| Work {
        queues,
        depth: DEPTH / queues,
        size,
        poll: true,
        threads: Some(1),
        pinned: true,
    };
    let rings = QUEUES.map(|queues| Work { depth: RING, ..work(queues, BLOCK) });
    let party = |queues: usize| xen(args, &format!("{queues} queues"), true, KEPT);
    let parties: Vec<_> = QUEUES.into_iter().map(party).collect::<Result<_, _>>()?;
    bench.cell(&format!("{BY_RINGS}, {STAYS}"), &rings, &parties)?;
    for (grants, persistent) in [(STAYS, true), (GOES, false)] {
        let party = |queues: usize| xen(args, &format!("{queues} queues"), persistent, KEPT);
        let parties: Vec<_> = QUEUES.into_iter().map(party).collect::<Result<_, _>>()?;
        let works = QUEUES.map(|queues| work(queues, BLOCK));
        bench.cell(&format!("{BY_QUEUES}, {grants}"), &works, &parties)?;
    }
    for queues in [1, 16] {
        let parties = [xen(args, STAYS, true, KEPT)?, xen(args, GOES, false, KEPT)?];
        let name = format!("{queues} queues, QD{DEPTH} in all: grants");
        bench.cell(&name, &[work(queues, BLOCK)], &parties)?;
    }
    let parties = [
        xen(args, "a table for each queue", true, KEPT)?,
        xen(args, "a sixteenth of one table", true, KEPT / 16)?,
        xen(args, GOES, false, KEPT)?,
    ];
    let name = "64 KiB, 16 queues, QD16 each: 4096 pages, tables of 1056 grants";
    bench.cell(name, &[work(16, LARGE)], &parties)?;
    for depth in [1, 32, 64] {
        let work = Work { queues: 1, depth, size: BLOCK, poll: true, threads: None, pinned: true };
        let virtio = |name: &str| ours(args, name, &[&"--null=64G"]);
        let parties = [
            xen(args, BLKIF, true, KEPT)?,
            virtio("virtio-blk, libblkio")?,
            virtio("virtio-blk, our driver")?.driven_by(Client::Driver),
        ];
        bench.cell(&format!("{ONE_DISK}, QD{depth}, client polls"), &[work], &parties)?;
    }
    let report = bench.report("xen-blk-queues");
    let (kept, broken) = judge(&report.cells);
    Ok((report, Verdict::new(args.smoke, kept, broken)))
}

/// The names of the cells and parties that the verdict uses.
const BY_RINGS: &str = "null disk, QD32 on each queue, one thread polls all queues";
const BY_QUEUES: &str = "null disk, QD256 in all, one thread polls all queues";
const ONE_DISK: &str = "one disk, one queue";
const BLKIF: &str = "blkif";
const STAYS: &str = "grants that stay mapped";
const GOES: &str = "grants mapped for each request";

/// Our daemon, serving a disk of a simulated Xen; a queue keeps this many grants mapped.
fn xen(
    args: &ScenarioArgs,
    name: &str,
    persistent: bool,
    persistent_max: usize,
) -> Result<Contender, String> {
    let program = peer::manyring(args.manyring.as_deref()).map_err(|e| e.to_string())?;
    let most: usize = QUEUES.into_iter().max().unwrap_or(1);
    let mut arguments: Vec<OsString> = vec![
        format!("--num-queues={most}").into(),
        format!("--persistent-max={persistent_max}").into(),
    ];
    arguments.extend(args.extra.iter().cloned());
    Ok(Contender::new(name, How::Xen { program, arguments, persistent }))
}

/// The results in words, and the broken promises: no number of queues is worse than a smaller one,
/// and one disk costs about the same through either ring.
fn judge(cells: &[BlkCell]) -> (String, Vec<String>) {
    let is_by_queues = |name: &str| [BY_RINGS, BY_QUEUES].iter().any(|by| name.starts_with(by));
    let stays = |cell: &&BlkCell| is_by_queues(&cell.name) && cell.name.ends_with(STAYS);
    let (mut kept, mut broken) = kept_by_queues(cells.iter().filter(stays));
    let mut worst: Option<(f64, String)> = None;
    for cell in cells.iter().filter(|cell| cell.name.starts_with(ONE_DISK)) {
        for against in &cell.against {
            let cpu = against.cpu_per_million;
            let peer = &against.peer;
            let words = format!("{}: {BLKIF} takes {cpu} of the CPU time of {peer}", cell.name);
            if cpu.median > VIRTIO_MAX {
                broken.push(words.clone());
            }
            if worst.as_ref().is_none_or(|(before, _)| cpu.median > *before) {
                worst = Some((cpu.median, words));
            }
        }
    }
    if let Some((_, words)) = worst {
        kept += &format!("; the most of virtio-blk's CPU time: {words}");
    }
    (kept, broken)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Party;
    use crate::report::blk::BlkSample;

    fn cell(name: &str, parties: &[(&str, f64, f64)]) -> BlkCell {
        let party = |(name, iops, cpu_per_million): &(&str, f64, f64)| Party {
            name: (*name).to_owned(),
            samples: vec![BlkSample {
                iops: *iops,
                cpu_per_million: *cpu_per_million,
                ..BlkSample::default()
            }],
        };
        BlkCell::new(name.to_owned(), parties.iter().map(party).collect())
    }

    #[test]
    fn only_queues_whose_grants_stay_are_judged_by_smaller_numbers_of_them() {
        let slow = [("16 queues", 90.0, 1.0), ("1 queues", 100.0, 1.0)];
        let (_, broken) = judge(&[cell(&format!("{BY_QUEUES}, {STAYS}"), &slow)]);
        assert_eq!(broken.len(), 1, "{broken:?}");
        let (_, broken) = judge(&[cell(&format!("{BY_QUEUES}, {GOES}"), &slow)]);
        assert!(broken.is_empty(), "{broken:?}");
    }

    #[test]
    fn a_ring_that_takes_more_than_one_and_a_half_times_the_cpu_of_the_other_breaks_the_promise() {
        let name = format!("{ONE_DISK}, QD1, client polls");
        for (blkif, count) in [(0.4, 0), (0.3, 0), (0.61, 1), (0.2, 0)] {
            let parties = [(BLKIF, 1.0, blkif), ("virtio-blk", 1.0, 0.4)];
            let (kept, broken) = judge(&[cell(&name, &parties)]);
            assert_eq!(broken.len(), count, "{blkif}: {broken:?}");
            assert!(kept.contains("the most of virtio-blk's CPU time: one disk"), "{kept}");
        }
    }
}
