//! The records of a block device: the nodes that real ends write, and nodes that contradict.

use super::*;
use proptest::prelude::*;

fn nodes(list: &[(&str, &str)]) -> Nodes {
    list.iter().map(|(name, value)| ((*name).to_owned(), value.as_bytes().to_vec())).collect()
}

fn read_back(writes: Writes) -> Nodes {
    writes.into_iter().map(|(name, value)| (name, value.into_bytes())).collect()
}

fn offer() -> Offer {
    Offer {
        barrier: false,
        flush: true,
        discard: Some(Discard { alignment: 0, granularity: Some(4096), secure: false }),
        persistent: true,
        indirect_segments_max: 256,
        ring_page_order_max: 4,
        queues_max: 8,
    }
}

/// The nodes of a front-end of one queue; `more` adds nodes or replaces their values.
fn simple(more: &[(&str, &str)]) -> Nodes {
    let mut all = nodes(&[("ring-ref", "8"), ("event-channel", "5")]);
    all.extend(nodes(more));
    all
}

fn error(nodes: &Nodes) -> String {
    Connection::parse(nodes, &offer()).unwrap_err().to_string()
}

#[test]
fn front_end_of_one_queue_writes_its_nodes_at_the_top() {
    let queue = |gref| vec![Queue { ring_refs: vec![gref], event_channel: 5 }];
    let connection = Connection::parse(&simple(&[]), &offer()).unwrap();
    let expected =
        Connection { abi: Abi::Native, ring_page_order: 0, persistent: false, queues: queue(8) };
    assert_eq!(connection, expected);
    let more =
        [("multi-queue-num-queues", "1"), ("protocol", "x86_32-abi"), ("feature-persistent", "1")];
    let connection = Connection::parse(&simple(&more), &offer()).unwrap();
    let expected = Connection { abi: Abi::X86_32, persistent: true, ..expected };
    assert_eq!(connection, expected);
}

#[test]
fn ring_of_one_page_may_be_named_as_the_first_of_several() {
    let list = nodes(&[("ring-page-order", "0"), ("ring-ref0", "9"), ("event-channel", "5")]);
    let connection = Connection::parse(&list, &offer()).unwrap();
    assert_eq!(connection.queues[0].ring_refs, [9]);
}

#[test]
fn front_end_of_two_queues_of_two_pages_is_parsed_by_its_folders() {
    let list = nodes(&[
        ("multi-queue-num-queues", "2"),
        ("ring-page-order", "1"),
        ("queue-0", ""),
        ("queue-0/ring-ref0", "10"),
        ("queue-0/ring-ref1", "11"),
        ("queue-0/event-channel", "3"),
        ("queue-1", ""),
        ("queue-1/ring-ref0", "12"),
        ("queue-1/ring-ref1", "13"),
        ("queue-1/event-channel", "4"),
    ]);
    let connection = Connection::parse(&list, &offer()).unwrap();
    let queues = [
        Queue { ring_refs: vec![10, 11], event_channel: 3 },
        Queue { ring_refs: vec![12, 13], event_channel: 4 },
    ];
    assert_eq!((connection.ring_page_order, &connection.queues[..]), (1, &queues[..]));
    for name in ["queue-1/ring-ref1", "queue-0/event-channel"] {
        let mut list = list.clone();
        list.remove(name);
        assert_eq!(error(&list), format!("{name}: there is no such node"));
        list.insert(name.to_owned(), b"10x".to_vec());
        assert_eq!(error(&list), format!("{name}: \"10x\" is not a decimal number"));
    }
}

#[test]
fn page_or_event_channel_that_is_named_twice_is_refused() {
    let list = |gref, channel| {
        nodes(&[
            ("multi-queue-num-queues", "2"),
            ("queue-0/ring-ref", "10"),
            ("queue-0/event-channel", "3"),
            ("queue-1/ring-ref", gref),
            ("queue-1/event-channel", channel),
        ])
    };
    assert!(Connection::parse(&list("11", "4"), &offer()).is_ok());
    let text = "queue-1/ring-ref: 10 is what queue-0/ring-ref has already";
    assert_eq!(error(&list("10", "4")), text);
    let text = "queue-1/event-channel: 3 is what queue-0/event-channel has already";
    assert_eq!(error(&list("11", "3")), text);
}

#[test]
fn front_end_that_asks_for_more_than_was_offered_is_refused() {
    let small = Offer { ring_page_order_max: 1, queues_max: 2, ..offer() };
    let refused = |more| Connection::parse(&simple(more), &small).unwrap_err().to_string();
    assert_eq!(refused(&[("ring-page-order", "2")]), "ring-page-order: 2 is not from 0 to 1");
    assert_eq!(refused(&[("num-ring-pages", "4")]), "num-ring-pages: 4 is not from 1 to 2");
    let text = "multi-queue-num-queues: 3 is not from 1 to 2";
    assert_eq!(refused(&[("multi-queue-num-queues", "3")]), text);
    let text = "multi-queue-num-queues: 0 is not from 1 to 4294967295";
    assert_eq!(refused(&[("multi-queue-num-queues", "0")]), text);
    // Whatever was offered, a number of queues is no reason to look for millions of nodes.
    let generous = Offer { queues_max: u32::MAX, ..offer() };
    let list = simple(&[("multi-queue-num-queues", "4294967295")]);
    let error = Connection::parse(&list, &generous).unwrap_err().to_string();
    assert_eq!(error, "multi-queue-num-queues: 4294967295 is not from 1 to 256");
    assert_eq!(
        refused(&[("protocol", "z80-abi")]),
        "protocol: \"z80-abi\" is no ABI that is served"
    );
}

#[test]
fn size_of_rings_may_be_told_under_either_name_but_not_under_both_differently() {
    let order = |more: &[(&str, &str)]| {
        let mut list = simple(more);
        list.extend((0..4).map(|n| (format!("ring-ref{n}"), format!("{}", n + 20).into_bytes())));
        Connection::parse(&list, &offer()).map(|connection| connection.ring_page_order)
    };
    assert_eq!(order(&[("ring-page-order", "2")]), Ok(2));
    assert_eq!(order(&[("num-ring-pages", "4")]), Ok(2));
    assert_eq!(order(&[("num-ring-pages", "4"), ("ring-page-order", "2")]), Ok(2));
    let contradicted = order(&[("num-ring-pages", "2"), ("ring-page-order", "2")]).unwrap_err();
    assert_eq!(contradicted.to_string(), "num-ring-pages: 2 contradicts ring-page-order");
}

#[test]
fn assignment_of_a_tool_stack_is_parsed() {
    let list = nodes(&[
        ("frontend", "/local/domain/7/device/vbd/51712"),
        ("frontend-id", "7"),
        ("online", "1"),
        ("state", "1"),
        ("mode", "r"),
        ("params", "/var/lib/disks/\u{e4}.img"),
    ]);
    let assignment = Assignment::parse(&list).unwrap();
    assert_eq!((assignment.frontend_id, assignment.writable, assignment.online), (7, false, true));
    assert_eq!(assignment.frontend, "/local/domain/7/device/vbd/51712");
    assert_eq!(assignment.params, "/var/lib/disks/\u{e4}.img");
    assert!(assignment.discard_enable && !assignment.removable);
    let refused = |name: &str, value: &str| {
        let mut list = list.clone();
        list.insert(name.to_owned(), value.as_bytes().to_vec());
        Assignment::parse(&list).unwrap_err().to_string()
    };
    assert_eq!(refused("frontend-id", "32752"), "frontend-id: 32752 is not from 0 to 32751");
    assert_eq!(refused("mode", "rw"), "mode: \"rw\" is not one of r, w, w!");
    assert_eq!(refused("online", ""), "online: \"\" is neither 0 nor 1");
    let missing = Assignment::parse(&nodes(&[("frontend-id", "1")])).unwrap_err();
    assert_eq!(missing.to_string(), "frontend: there is no such node");
}

#[test]
fn offer_of_a_back_end_that_writes_nothing_is_that_of_the_defaults() {
    let expected = Offer { queues_max: 1, ..Offer::default() };
    assert_eq!(Offer::parse(&Nodes::new()), Ok(expected));
    let old = Offer::parse(&nodes(&[("max-ring-pages", "4")])).unwrap();
    assert_eq!(old.ring_page_order_max, 2);
    let none = Offer { indirect_segments_max: 0, ..offer() };
    let writes = none.emit();
    assert!(writes.iter().all(|(name, _)| name != "feature-max-indirect-segments"));
}

#[test]
fn requests_are_checked_against_what_was_offered_and_what_the_disk_is() {
    let disk = DiskGeometry { sectors: 16, sector_size: 4096, physical_sector_size: 4096, info: 0 };
    let limits = offer().limits(&disk, false);
    assert_eq!((limits.sectors, limits.block_shift, limits.writable), (16, 3, false));
    assert!(limits.flush && limits.discard && !limits.barrier && !limits.discard_secure);
    assert_eq!(limits.indirect_segments_max, 256);
    let plain = Offer::default().limits(&DiskGeometry { sector_size: 512, ..disk }, true);
    assert!(plain.writable && !plain.discard && plain.block_shift == 0);
}

#[test]
fn disk_whose_size_is_not_in_whole_blocks_is_refused() {
    let disk = DiskGeometry { sectors: 16, sector_size: 4096, physical_sector_size: 8192, info: 4 };
    assert_eq!(DiskGeometry::parse(&read_back(disk.emit())), Ok(disk));
    let error =
        |disk: DiskGeometry| DiskGeometry::parse(&read_back(disk.emit())).unwrap_err().to_string();
    let text = "sectors: 8704 is no multiple of 4096";
    assert_eq!(error(DiskGeometry { sectors: 17, ..disk }), text);
    let text = "physical-sector-size: 6144 is no multiple of 4096";
    assert_eq!(error(DiskGeometry { physical_sector_size: 6144, ..disk }), text);
    let text = "sector-size: 1536 is not a power of two";
    assert_eq!(error(DiskGeometry { sector_size: 1536, ..disk }), text);
    assert!(error(DiskGeometry { sectors: u64::MAX, ..disk }).starts_with("sectors: "));
    let least = DiskGeometry::parse(&nodes(&[("sectors", "3")])).unwrap();
    assert_eq!((least.sector_size, least.physical_sector_size), (512, 512));
}

proptest! {
    #[test]
    fn connection_emitted_parses_back(
        abi in 0..3_usize, order in 0..5_u32, count in 1..9_u32, persistent in any::<bool>(),
    ) {
        let queues = (0..count).map(|index| Queue {
            ring_refs: (0..1 << order).map(|page| 100 * index + page).collect(),
            event_channel: 7 + index,
        });
        let connection = Connection {
            abi: Abi::ALL[abi],
            ring_page_order: order,
            persistent,
            queues: queues.collect(),
        };
        let parsed = Connection::parse(&read_back(connection.emit()), &offer());
        prop_assert_eq!(parsed, Ok(connection));
    }

    #[test]
    fn offer_emitted_parses_back(
        flags in prop::array::uniform4(any::<bool>()), indirect in 0..=4096_u16,
        order in 0..5_u32, queues in 1..300_u32, extent in prop::option::of(1..9000_u32),
    ) {
        let [barrier, flush, persistent, secure] = flags;
        let discard = extent.map(|n| Discard { alignment: n, granularity: Some(n), secure });
        let offer = Offer {
            barrier, flush, discard, persistent,
            indirect_segments_max: indirect, ring_page_order_max: order, queues_max: queues,
        };
        prop_assert_eq!(Offer::parse(&read_back(offer.emit())), Ok(offer));
    }

    /// Whatever a guest writes into its nodes, it is refused or has what it says.
    #[test]
    fn nodes_of_noise_are_refused_or_hold_together(
        values in prop::collection::vec((0..12_usize, "[0-9]{0,3}|.{0,5}"), 0..12),
    ) {
        const NAMES: [&str; 12] = [
            "multi-queue-num-queues", "ring-page-order", "num-ring-pages", "protocol", "ring-ref",
            "ring-ref0", "ring-ref1", "event-channel", "feature-persistent", "queue-0/ring-ref",
            "queue-1/ring-ref", "queue-0/event-channel",
        ];
        let mut list = simple(&[]);
        for (name, value) in values {
            list.insert(NAMES[name].to_owned(), value.into_bytes());
        }
        if let Ok(connection) = Connection::parse(&list, &offer()) {
            prop_assert!((1..=8).contains(&connection.queues.len()));
            for queue in &connection.queues {
                prop_assert_eq!(queue.ring_refs.len(), 1 << connection.ring_page_order);
                prop_assert!(queue.event_channel > 0);
            }
        }
        let _ = (Offer::parse(&list), DiskGeometry::parse(&list), Assignment::parse(&list));
    }
}
