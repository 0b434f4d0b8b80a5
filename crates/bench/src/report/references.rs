//! The figures of the reference systems, to stand beside ours: public documents of 2010 to 2015 on
//! multi-queue paravirtual I/O. Their machines are not this one: what compares is the shape.

use super::document::CellDocument;
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

/// The cell of the tap tables that a party of this run repeats: TCP streams between the guest and
/// its host, by the number of sessions and of queue pairs.
pub(crate) fn multiqueue_tap(
    scenario: &str,
    cell: &CellDocument,
    party: &str,
) -> Option<&'static TapCell> {
    if !["tap-stream", "multiqueue"].contains(&scenario) {
        return None;
    }
    let name = format!("{}, {party}", cell.name);
    let pairs = count_before(&name, "pair")?;
    let sessions = ["stream", "session"].iter().find_map(|word| count_before(&name, word));
    let sessions = sessions.or(cell.sessions)?;
    let is_to_guest = ["to guest", "to the guest"].iter().any(|words| name.contains(words));
    let way = if is_to_guest { "local2g" } else { "g2local" };
    let size = if name.contains("512") { "512" } else { "default" };
    let wanted = format!("{way}_{size}");
    MULTIQUEUE_TAP.iter().find(|reference| {
        let is_place = reference.smp == pairs && reference.sessions == sessions;
        // One pair here compares to their multi-queue code with one queue.
        is_place && reference.is_multiqueue && reference.scenario == wanted
    })
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
    if let Some(tap) = multiqueue_tap(scenario, cell, party) {
        return Some(Columns {
            heads: &["ref. Mbit/s", "cpu %", "normalized"],
            figures: vec![tap.throughput, tap.cpu, tap.normalized],
            cell: format!("{}, {} queues", tap.scenario, tap.smp),
        });
    }
    let is_theirs = cell.name.contains("null") && !cell.name.contains("for each request");
    if !["blk-queues", "xen-blk-queues"].contains(&scenario) || !is_theirs {
        return None;
    }
    let queues = count_before(party, "queue")?;
    let (_, before, after) = XEN_QUEUES.iter().find(|(count, ..)| *count == queues)?;
    Some(Columns {
        heads: &["ref. k/s before", "k/s with all patches"],
        figures: vec![*before, *after],
        cell: format!("xen-block, null device, {queues} queues"),
    })
}

/// xen-block by queues: thousands of requests in a second with multi-queue alone, and with grants
/// and page pools of each queue.
const XEN_QUEUES: [(usize, f64, f64); 4] =
    [(1, 810.0, 810.0), (4, 1064.0, 1410.0), (8, 780.0, 1354.0), (16, 700.0, 1440.0)];

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
        "tcp-rr" | "tcp-crr" | "tcp-ladder" => SMALL_PACKETS,
        "blk-queues" | "null-blk" => &[XEN_BLOCK],
        "xen-blk-queues" => XEN_GRANTS,
        "multiqueue" | "tap-small" => SLIDES,
        _ => &[],
    }
}

const SMALL_PACKETS: &[ReferenceTable] = &[ReferenceTable {
    title: "Reference: small packets on KVM",
    about: "TCP requests and responses of 256 bytes on 100 connections, each step of the study \
            by itself. Over 60 % of the transmitted packets kicked.",
    heads: &["step", "trans/s", "exits/s", "of bare metal"],
    rows: &[
        &["bare metal", "206390", "", "100 %"],
        &["baseline", "87070", "148445", "42 %"],
        &["delayed free of sent buffers", "90886", "142682", "44 %"],
        &["delayed kick", "107106", "102587", "52 %"],
        &["pinned receive interrupt", "153697", "62603", "74 %"],
    ],
}];

const XEN_BLOCK: ReferenceTable = ReferenceTable {
    title: "Reference: xen-block multi-queue",
    about: "4 KiB reads of a null device, 16 jobs by 64 requests; thousands of requests in a \
            second by the number of queues.",
    heads: &["state of the patches", "1 queue", "4 queues", "8 queues", "16 queues"],
    rows: &[
        &["multi-queue alone", "810", "1064", "780", "700"],
        &["with grants of each queue", "810", "1230", "1024", "850"],
        &["and page pools of each queue", "810", "1410", "1354", "1440"],
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

const SLIDES: &[ReferenceTable] = &[ReferenceTable {
    title: "Reference: where multi-queue lost",
    about: "A guest sends TCP in writes of 512 bytes, 2 sessions. With more queues TCP batches \
            less: packets are smaller, and throughput is half.",
    heads: &["queues", "Mbit/s", "cpu %", "packets", "average packet, B"],
    rows: &[
        &["single", "9263", "46.84", "2737788", "5689"],
        &["multiple", "4662", "56.11", "3775715", "1598"],
    ],
}];

#[cfg(test)]
mod tests {
    use super::*;

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
    }

    #[test]
    fn a_party_finds_the_cell_that_it_repeats() {
        let cell = |name: &str, sessions| CellDocument {
            name: name.to_owned(),
            sessions: Some(sessions),
            ..CellDocument::default()
        };
        let stream = cell("guest to host, 2 streams by queue pairs", 2);
        let found = multiqueue_tap("tap-stream", &stream, "manyring, 4 pairs").unwrap();
        assert_eq!((found.scenario, found.smp, found.sessions), ("g2local_default", 4, 2));
        let small = cell("host to guest, 512 B, 8 sessions", 8);
        let found = multiqueue_tap("multiqueue", &small, "1 pair").unwrap();
        assert_eq!((found.scenario, found.smp, found.sessions), ("local2g_512", 1, 8));
        assert_eq!(multiqueue_tap("tap-stream", &stream, "bare loop"), None);
        assert_eq!(multiqueue_tap("tcp-rr", &stream, "4 pairs"), None);
    }

    #[test]
    fn a_null_disk_finds_the_figure_of_as_many_queues() {
        let cell = |name: &str| CellDocument { name: name.to_owned(), ..CellDocument::default() };
        let null = cell("null disk, QD256 in all");
        let found = beside_party("blk-queues", &null, "16 queues").unwrap();
        assert_eq!((found.figures.as_slice(), found.heads.len()), (&[700.0, 1440.0][..], 2));
        assert_eq!(beside_party("blk-queues", &null, "2 queues"), None);
        assert_eq!(beside_party("blk-queues", &cell("a file"), "16 queues"), None);
        assert_eq!(beside_party("null-blk", &null, "16 queues"), None);
        assert_eq!(beside_party("xen-blk-queues", &null, "16 queues"), Some(found));
        let mapped = cell("null disk, QD256 in all, grants mapped for each request");
        assert_eq!(beside_party("xen-blk-queues", &mapped, "16 queues"), None);
    }

    #[test]
    fn tables_beside_a_scenario_have_as_many_cells_as_heads() {
        for scenario in ["tcp-rr", "blk-queues", "xen-blk-queues", "multiqueue"] {
            for table in beside(scenario) {
                assert!(table.rows.iter().all(|row| row.len() == table.heads.len()));
            }
        }
        assert!(beside("neighbours").is_empty());
    }
}
