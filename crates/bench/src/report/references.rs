//! The figures of the reference systems, to stand beside ours: public documents of 2010 to 2015 on
//! multi-queue paravirtual I/O. Their machines are not this one: what compares is the shape.

use super::document::{CellDocument, NORMALIZED, TO_ONE};
use std::sync::LazyLock;

/// All cells of the multi-queue tap tables: TCP streams of a guest, by sessions and queues.
static MULTIQUEUE_TAP: LazyLock<Vec<TapCell>> = LazyLock::new(|| {
    let text = include_str!("../../references/multiqueue-tap.csv");
    text.lines().skip(1).filter_map(TapCell::parse).collect()
});

/// A cell of those tables.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TapCell {
    /// Who sends to whom, and the bytes of a write: `g2local_512`.
    pub(crate) scenario: &'static str,
    pub(crate) is_multiqueue: bool,
    /// Virtual CPUs of the guest; with multi-queue, also its number of queue pairs.
    pub(crate) smp: usize,
    pub(crate) sessions: usize,
    pub(crate) throughput: f64,
    pub(crate) cpu: f64,
    pub(crate) normalized: f64,
}

impl TapCell {
    fn parse(line: &'static str) -> Option<Self> {
        let mut fields = line.split(',');
        let (scenario, mode) = (fields.next()?, fields.next()?);
        let mut number = || fields.next()?.parse::<f64>().ok();
        let smp = number()?;
        let _queues = number()?;
        let sessions = number()?;
        let count = |number: f64| (1..=64).find(|n| (f64::from(*n) - number).abs() < 0.1);
        Some(Self {
            scenario,
            is_multiqueue: mode == "mq",
            smp: usize::try_from(count(smp)?).ok()?,
            sessions: usize::try_from(count(sessions)?).ok()?,
            throughput: number()?,
            cpu: number()?,
            normalized: number()?,
        })
    }
}

/// The cell of the tap tables that stands beside a party of this run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct TapBeside {
    /// The party's queue pairs.
    pub(crate) pairs: usize,
    pub(crate) cell: &'static TapCell,
    /// The throughput of `cell` to that of a single queue of the same guest.
    pub(crate) to_one: f64,
}

/// The cell of the tap tables that a party of this run repeats: TCP streams between the guest and
/// its host, by the number of sessions and of queue pairs. One pair repeats the single queue of the
/// guest whose queues the cell has most of: a guest with one virtual CPU is slower on any queue.
pub(crate) fn multiqueue_tap(
    scenario: &str,
    cell: &CellDocument,
    party: &str,
) -> Option<TapBeside> {
    let ways = [("host to guest", "local2g"), ("to the guest", "local2g")];
    let ways =
        ways.into_iter().chain([("guest to host", "g2local"), ("from the guest", "g2local")]);
    let (_, way) = ways.into_iter().find(|(begin, _)| cell.name.starts_with(begin))?;
    if !["tap-stream", "multiqueue"].contains(&scenario) {
        return None;
    }
    let pairs = count_before(party, "pair")?;
    let sessions = ["stream", "session"].iter().find_map(|word| count_before(&cell.name, word));
    let sessions = sessions.or(cell.sessions)?;
    let most = cell.parties.iter().filter_map(|party| count_before(&party.name, "pair")).max();
    let smp = if pairs == 1 { most? } else { pairs };
    let size = if cell.name.contains("512") { "512" } else { "default" };
    let wanted = format!("{way}_{size}");
    let find = |is_multiqueue: bool| {
        let is_place = |one: &&TapCell| one.smp == smp && one.sessions == sessions;
        let mut cells = MULTIQUEUE_TAP.iter().filter(is_place);
        cells.find(|one| one.is_multiqueue == is_multiqueue && one.scenario == wanted)
    };
    let (cell, one) = (find(pairs > 1)?, find(false)?);
    Some(TapBeside { pairs, cell, to_one: cell.throughput / one.throughput })
}

/// The reference's figures that a party of this run is compared with.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Columns {
    pub(crate) heads: &'static [&'static str],
    pub(crate) figures: Vec<f64>,
    /// Which of the reference's cells it is.
    pub(crate) cell: String,
}

/// The reference's cell that a party of this run repeats, if there is one.
pub(crate) fn beside_party(scenario: &str, cell: &CellDocument, party: &str) -> Option<Columns> {
    if let Some(TapBeside { cell: tap, to_one, .. }) = multiqueue_tap(scenario, cell, party) {
        let queues = if tap.is_multiqueue { tap.smp } else { 1 };
        return Some(Columns {
            heads: &["ref. Mbit/s", "cpu %", "normalized", "to one queue"],
            figures: vec![tap.throughput, tap.cpu, tap.normalized, to_one],
            cell: format!("{}, {queues} queues, {} virtual CPUs", tap.scenario, tap.smp),
        });
    }
    let queues = count_before(party, "queue")?;
    let (_, states) = xen_states(scenario, cell, queues)?;
    Some(Columns {
        heads: &["ref. k/s before", "with grants", "and pools"],
        figures: states.to_vec(),
        cell: format!("xen-block, null device, {queues} queues"),
    })
}

/// The reference's figures for a party, in the unit of ours, each with the name of its curve.
pub(crate) fn curves(
    scenario: &str,
    cell: &CellDocument,
    party: &str,
    key: &str,
) -> Vec<(String, f64)> {
    if let Some(TapBeside { cell: tap, to_one, .. }) = multiqueue_tap(scenario, cell, party) {
        let figure = match key {
            "throughput" => tap.throughput,
            "cpu" => tap.cpu,
            NORMALIZED => tap.normalized,
            TO_ONE => to_one,
            _ => return Vec::new(),
        };
        return vec![("reference".to_owned(), figure)];
    }
    let states = count_before(party, "queue").and_then(|n| xen_states(scenario, cell, n));
    let factor = match key {
        "iops" => 1000.0,
        TO_ONE => 1.0 / XEN_QUEUES[0].1[0],
        _ => return Vec::new(),
    };
    let named = XEN_STATES.iter().zip(states.map_or([0.0; 3], |(_, states)| states));
    let named = named.filter(|(_, figure)| *figure > 0.0);
    named.map(|(name, figure)| (format!("reference: {name}"), figure * factor)).collect()
}

/// The row of as many queues, where a cell is a null disk whose grants stay mapped.
fn xen_states(scenario: &str, cell: &CellDocument, queues: usize) -> Option<(usize, [f64; 3])> {
    let is_theirs = cell.name.contains("null") && !cell.name.contains("for each request");
    if !["blk-queues", "xen-blk-queues"].contains(&scenario) || !is_theirs {
        return None;
    }
    XEN_QUEUES.into_iter().find(|(count, _)| *count == queues)
}

/// xen-block by queues: thousands of requests in a second in each state of the patches.
const XEN_QUEUES: [(usize, [f64; 3]); 4] = [
    (1, [810.0, 810.0, 810.0]),
    (4, [1064.0, 1230.0, 1410.0]),
    (8, [780.0, 1024.0, 1354.0]),
    (16, [700.0, 850.0, 1440.0]),
];
const XEN_STATES: [&str; 3] = ["multi-queue alone", "grants of each queue", "and page pools"];

/// The gain of many queues over one in a scenario of the tap tables: the geometric mean of the
/// cells of guests with several virtual CPUs.
pub(crate) fn geomean_of(scenario: &str) -> f64 {
    let cells = |is_multiqueue: bool| {
        let of_several = |cell: &&TapCell| cell.scenario == scenario && cell.smp > 1;
        MULTIQUEUE_TAP.iter().filter(of_several).filter(move |c| c.is_multiqueue == is_multiqueue)
    };
    let same = |a: &TapCell, b: &TapCell| a.smp == b.smp && a.sessions == b.sessions;
    let ratio = |many: &TapCell| {
        let one = cells(false).find(|one| same(one, many))?;
        Some(many.throughput / one.throughput)
    };
    geomean(cells(true).filter_map(ratio))
}

/// The geometric mean; 1 of nothing.
pub(crate) fn geomean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0.0), |(sum, count), v| (sum + v.ln(), count + 1.0));
    if count > 0.0 { (sum / count).exp() } else { 1.0 }
}

/// The number in front of a word: 4 of `manyring, 4 pairs`.
pub(crate) fn count_before(name: &str, word: &str) -> Option<usize> {
    let words: Vec<&str> = name.split([' ', ',']).filter(|part| !part.is_empty()).collect();
    let pair = words
        .windows(2)
        .find(|pair| pair[1].starts_with(word) && pair[0].parse::<usize>().is_ok())?;
    pair[0].parse().ok()
}

/// A table of a reference that stands beside a scenario as a whole.
pub(crate) struct ReferenceTable {
    pub(crate) title: &'static str,
    pub(crate) about: &'static str,
    pub(crate) heads: &'static [&'static str],
    pub(crate) rows: &'static [&'static [&'static str]],
}

/// The tables that belong to a scenario.
pub(crate) fn beside(scenario: &str) -> &'static [ReferenceTable] {
    match scenario {
        "tcp-rr" | "tcp-ladder" => SMALL_PACKETS,
        "zero-copy" => ZERO_COPY,
        "blk-queues" | "null-blk" => &[XEN_BLOCK],
        "xen-blk-queues" => XEN_GRANTS,
        "multiqueue" | "tap-small" => SLIDES,
        _ => &[],
    }
}

const SMALL_PACKETS: &[ReferenceTable] = &[ReferenceTable {
    title: "Reference: small packets on KVM",
    about: "TCP requests and responses of 256 bytes on 100 connections; each step of the study \
            beside those before it. Over 60 % of the transmitted packets kicked.",
    heads: &["step", "trans/s", "exits/s", "of bare metal"],
    rows: &[
        &["bare metal", "206,390", "", "100 %"],
        &["baseline", "87,070", "148,445", "42 %"],
        &["delayed free of sent buffers", "90,886", "142,682", "44 %"],
        &["delayed kick", "107,106", "102,587", "52 %"],
        &["pinned receive interrupt", "153,697", "62,603", "74 %"],
    ],
}];

const XEN_BLOCK: ReferenceTable = ReferenceTable {
    title: "Reference: xen-block multi-queue",
    about: "4 KiB reads of a null device, 16 jobs by 64 requests; thousands of requests in a \
            second by the number of queues.",
    heads: &["state of the patches", "1 queue", "4 queues", "8 queues", "16 queues"],
    rows: &[
        &["multi-queue alone", "810", "1,064", "780", "700"],
        &["with grants of each queue", "810", "1,230", "1,024", "850"],
        &["and page pools of each queue", "810", "1,410", "1,354", "1,440"],
    ],
};

const XEN_GRANTS: &[ReferenceTable] = &[
    XEN_BLOCK,
    ReferenceTable {
        title: "What is compared with the reference's steps",
        about: "The reference's back-end had one table of grants and one pool of pages for all \
                queues of a disk, each behind a lock, and gave each queue its own. A queue of \
                ours is owned by one worker and has never shared either, so there is no party \
                with the lock; each step stands beside what it is worth here.",
        heads: &["step of the reference", "what stands for it"],
        rows: &[
            &["multi-queue alone", "1 to 16 queues, grants mapped for each request"],
            &["grants that stay mapped", "grants that stay mapped, against the same"],
            &[
                "grants of each queue",
                "a table of 1056 for each queue, against a sixteenth of one such table: the room \
                 that sharing leaves to each of 16 queues, without the lock",
            ],
            &["page pools of each queue", "always: a queue reserves its addresses once"],
        ],
    },
];

const ZERO_COPY: &[ReferenceTable] = &[ReferenceTable {
    title: "Reference: macvtap without a copy",
    about: "One TCP stream of a guest, Mbit/s; CPU is that of QEMU / of the vhost thread, of 64 \
            KiB one figure each. Ours are frames, not messages: compare the CPU time of the rows.",
    heads: &["message", "without a copy", "cpu %", "copied", "cpu %"],
    rows: &[
        &["4 KiB", "7,408.57", "92.1 / 22.6", "4,913.17", "118.1 / 84.1"],
        &["8 KiB", "9,129.90", "", "7,094.55", ""],
        &["16 KiB", "9,178.81", "", "8,927.1", ""],
        &["64 KiB", "9,171.43", "24.9", "9,085.85", "82.4"],
    ],
}];

const SLIDES: &[ReferenceTable] = &[ReferenceTable {
    title: "Reference: where multi-queue lost",
    about: "A guest sends TCP in writes of 512 bytes, 2 sessions. With more queues TCP batches \
            less: packets are smaller, and throughput is half.",
    heads: &["queues", "Mbit/s", "cpu %", "packets", "average packet, B"],
    rows: &[
        &["single", "9,263", "46.84", "2,737,788", "5,689"],
        &["multiple", "4,662", "56.11", "3,775,715", "1,598"],
    ],
}];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::document::PartyDocument;

    #[test]
    fn all_cells_of_the_tap_tables_are_there_and_normalized_is_throughput_by_cpu() {
        assert_eq!(MULTIQUEUE_TAP.len(), 256);
        for cell in MULTIQUEUE_TAP.iter() {
            assert_eq!((cell.throughput / cell.cpu).floor(), cell.normalized, "{cell:?}");
        }
    }

    #[test]
    fn what_many_queues_reached_of_one_is_what_the_references_say() {
        for (scenario, expected) in [
            ("g2ext_512", 0.739),
            ("ext2g_512", 1.178),
            ("g2local_512", 0.557),
            ("g2local_default", 1.049),
            ("local2g_512", 0.929),
            ("local2g_default", 1.192),
        ] {
            let found = geomean_of(scenario);
            assert!((found - expected).abs() < 0.0006, "{scenario}: {found}");
        }
        assert_eq!(geomean(std::iter::empty()), 1.0);
        assert!((geomean([8.0, 1.0, 1.0].into_iter()) - 2.0).abs() < 1e-9);
    }

    fn cell(name: &str, sessions: Option<usize>, pairs: &[usize]) -> CellDocument {
        let party =
            |pairs: &usize| PartyDocument { name: format!("{pairs} pairs"), samples: Vec::new() };
        let parties = pairs.iter().map(party).collect();
        CellDocument { name: name.to_owned(), sessions, parties, ..CellDocument::default() }
    }

    #[test]
    fn a_party_finds_the_cell_that_it_repeats() {
        let stream = cell("guest to host, 2 streams by queue pairs", Some(2), &[4, 2, 1]);
        let found = multiqueue_tap("tap-stream", &stream, "manyring, 4 pairs").unwrap();
        let TapCell { scenario, smp, sessions, .. } = found.cell;
        assert_eq!((*scenario, *smp, *sessions, found.pairs), ("g2local_default", 4, 2, 4));
        assert_eq!(multiqueue_tap("tap-stream", &stream, "bare loop"), None);
        assert_eq!(multiqueue_tap("tcp-rr", &stream, "4 pairs"), None);
    }

    #[test]
    fn beside_one_pair_stands_the_single_queue_of_the_same_guest() {
        let small = cell("from the guest, 512 B, 2 sessions", Some(2), &[4, 2, 1]);
        let [four, one] =
            ["4 pairs", "1 pair"].map(|party| multiqueue_tap("multiqueue", &small, party).unwrap());
        assert_eq!((one.cell.is_multiqueue, one.cell.smp, one.to_one), (false, 4, 1.0));
        // The document's loss is a loss here.
        assert!(four.to_one < 0.5 && four.cell.throughput < one.cell.throughput, "{four:?}");
    }

    #[test]
    fn a_cell_that_is_judged_by_nobody_is_beside_no_cell_of_the_documents() {
        let own =
            cell("each queue with the whole length, to the guest, 512 B, 8 sessions", None, &[4]);
        assert_eq!(multiqueue_tap("multiqueue", &own, "4 pairs"), None);
        let to = cell("to the guest, 512 B, 8 sessions", None, &[4]);
        let found = multiqueue_tap("multiqueue", &to, "4 pairs").unwrap();
        assert_eq!(found.cell.scenario, "local2g_512");
    }

    #[test]
    fn a_scenario_has_the_tables_of_its_own_document_alone() {
        let titles = |scenario: &str| beside(scenario).iter().map(|table| table.title).collect();
        let none: Vec<&str> = titles("tcp-crr");
        assert!(none.is_empty(), "{none:?}: it has no figures of connections");
        let copies: Vec<&str> = titles("zero-copy");
        assert_eq!(copies, ["Reference: macvtap without a copy"]);
        assert!(SMALL_PACKETS[0].about.contains("each step of the study beside those before it"));
    }

    #[test]
    fn a_null_disk_finds_the_figure_of_as_many_queues() {
        let cell = |name: &str| cell(name, None, &[]);
        let null = cell("null disk, QD256 in all");
        let found = beside_party("blk-queues", &null, "16 queues").unwrap();
        assert_eq!((found.figures.as_slice(), found.heads.len()), (&[700.0, 850.0, 1440.0][..], 3));
        assert_eq!(beside_party("blk-queues", &null, "2 queues"), None);
        assert_eq!(beside_party("blk-queues", &cell("a file"), "16 queues"), None);
        assert_eq!(beside_party("null-blk", &null, "16 queues"), None);
        assert_eq!(beside_party("xen-blk-queues", &null, "16 queues"), Some(found));
        let mapped = cell("null disk, QD256 in all, grants mapped for each request");
        assert_eq!(beside_party("xen-blk-queues", &mapped, "16 queues"), None);
    }

    #[test]
    fn tables_beside_a_scenario_have_as_many_cells_as_heads() {
        for scenario in ["tcp-rr", "blk-queues", "xen-blk-queues", "multiqueue", "zero-copy"] {
            for table in beside(scenario) {
                assert!(table.rows.iter().all(|row| row.len() == table.heads.len()));
            }
        }
        assert!(beside("neighbours").is_empty());
    }
}
