//! The table of the queues of network devices, and the causes of dropped packets.

use super::table::{
    BATCH, Before, CALLS, CALLS_HELD, CALLS_SUPPRESSED, Column, DEVICE, FLIGHT, KICKS,
    KICKS_SUPPRESSED, Seen, WAIT_P50, WAIT_P99, WORKER, lines, number, rate, seen, text,
};
use manyring_control::snapshot::{Detail, DeviceInfo, QueueLength, ReceivingPairs, as_float};

const COLUMNS: [Column; 17] = [
    DEVICE,
    text("QUEUE", queue_name),
    WORKER,
    rate("PACKETS", |seen| seen.count("packets")),
    rate("MB", |seen| seen.megabytes("bytes_passed")),
    number("AVG-B", |seen| per_packet(seen, seen.counted("bytes_passed"))),
    number("GSO%", |seen| per_packet(seen, seen.counted("gso_packets") * 100)),
    KICKS,
    KICKS_SUPPRESSED,
    CALLS,
    CALLS_SUPPRESSED,
    CALLS_HELD,
    BATCH,
    WAIT_P50,
    WAIT_P99,
    rate("DROPS", drops),
    FLIGHT,
];
/// Prefix of the names of all counters of dropped packets.
const DROPPED: &str = "dropped_";

/// Returns the table, and below it the causes of drops. With an earlier reading `before`, counters
/// are shown per second.
pub(super) fn table(devices: &[&DeviceInfo], before: Before<'_>) -> String {
    let mut out = lines(COLUMNS, devices, before);
    for device in devices {
        for seen in seen(device, before) {
            out += &causes(&seen, before.is_some());
        }
        let former = before.and_then(|(all, _)| all.iter().find(|d| d.name == device.name));
        out += &switched(device, former);
        if before.is_none() {
            out += &queue_length(device);
            out += &receive_pairs(device);
        }
    }
    out
}

/// Returns the queue's name, or its index if the daemon's answer has no name.
fn queue_name(seen: &Seen<'_>) -> String {
    let queue = seen.queue;
    queue.name.clone().unwrap_or_else(|| queue.index.to_string())
}

fn per_packet(seen: &Seen<'_>, n: u64) -> String {
    match (seen.counted("packets"), seen.counted("bytes_passed")) {
        // There were no packets yet, or the queue is a control queue, whose commands are not
        // counted in bytes.
        (0, _) | (_, 0) => "-".to_owned(),
        (packets, _) => format!("{:.0}", as_float(n) / as_float(packets)),
    }
}

fn drops(seen: &Seen<'_>) -> String {
    // `sum` of no floats is -0.0, which would be shown as "-0".
    let drops = dropped(seen).fold(0.0, |sum, (_, scaled)| sum + scaled);
    format!("{drops:.0}")
}

/// Returns the causes of drops whose counters are not zero, each with the number of packets: in
/// all, or per second.
fn dropped<'a>(seen: &'a Seen<'a>) -> impl Iterator<Item = (&'a str, f64)> {
    let names = seen.queue.counters.keys();
    names.filter_map(|name| {
        let cause = name.strip_prefix(DROPPED)?;
        Some((cause, seen.scaled(name))).filter(|(_, scaled)| *scaled > 0.0)
    })
}

/// Returns a line with the causes of drops, for a queue that dropped packets; else empty.
fn causes(seen: &Seen<'_>, is_interval: bool) -> String {
    let digits = usize::from(is_interval);
    let all: Vec<_> = dropped(seen)
        .map(|(cause, scaled)| format!("{scaled:.digits$} {}", cause.replace('_', " ")))
        .collect();
    if all.is_empty() {
        return String::new();
    }
    let (name, unit) = (queue_name(seen), if is_interval { "/s" } else { "" });
    format!("{} {name} dropped{unit}: {}\n", seen.device.name, all.join(", "))
}

/// Returns a line with the counters of a switch port that are not zero, else empty. With an earlier
/// reading `former`, the growth since then is shown.
fn switched(device: &DeviceInfo, former: Option<&DeviceInfo>) -> String {
    let Detail::Net { switch, .. } = &device.detail else { return String::new() };
    let before = |name: &String| match former.map(|former| &former.detail) {
        Some(Detail::Net { switch, .. }) => switch.get(name).copied().unwrap_or(0),
        _ => 0,
    };
    let all = switch.iter().map(|(name, value)| (name, value.saturating_sub(before(name))));
    let all = all.filter(|(_, value)| *value > 0);
    let all: Vec<_> = all.map(|(name, n)| format!("{n} {}", name.replace('_', " "))).collect();
    if all.is_empty() {
        return String::new();
    }
    format!("{} switch: {}\n", device.name, all.join(", "))
}

/// Returns a line with the queue length of the interface; empty for a port without one.
fn queue_length(device: &DeviceInfo) -> String {
    let Detail::Net { txqueuelen: Some(length), .. } = &device.detail else { return String::new() };
    let QueueLength { frames, source, changes } = length;
    let name = &device.name;
    format!(
        "{name} txqueuelen: {frames} frames in all queues ({source}), changed {changes} times\n"
    )
}

/// A line with the pairs to which the host delivers; empty if it delivers to all.
fn receive_pairs(device: &DeviceInfo) -> String {
    let Detail::Net { receive_pairs: Some(receives), .. } = &device.detail else {
        return String::new();
    };
    let ReceivingPairs { pairs, source, changes } = receives;
    if source == "all" {
        return String::new();
    }
    let name = &device.name;
    format!("{name} receive_pairs: delivered to {pairs} ({source}), changed {changes} times\n")
}

#[cfg(test)]
mod tests {
    use super::super::table::{queue_of, words};
    use super::super::tables;
    use super::*;
    use manyring_control::snapshot::QueueInfo;
    use std::collections::BTreeMap;

    fn device(packets: u64, filtered: u64) -> DeviceInfo {
        let rx = [
            ("running", 1),
            ("packets", packets),
            ("bytes_passed", packets * 1000),
            ("gso_packets", packets / 4),
            ("dropped_filtered", filtered),
            ("dropped_small_buffers", filtered / 2),
            ("dropped_short", 0),
        ];
        let running = [("running", 1)];
        let named = |name: &str, queue: QueueInfo| QueueInfo { name: Some(name.into()), ..queue };
        DeviceInfo {
            name: "lan".into(),
            kind: "net".into(),
            detail: Detail::Net {
                port: "tap".into(),
                interface: Some("tap0".into()),
                mac: "02:00:00:00:00:01".into(),
                mtu: None,
                host_mtu: Some(1500),
                link: "up".into(),
                queue_pairs: 2,
                attached_pairs: 1,
                txqueuelen: None,
                receive_pairs: None,
                switch: BTreeMap::new(),
            },
            state: "serving".into(),
            origin: "file".into(),
            waits_for: None,
            reason: None,
            pending_keys: Vec::new(),
            process: None,
            connected: true,
            socket: "/run/lan.sock".into(),
            queues: vec![
                named("rx0", queue_of(0, &rx, "wait_ns", &[(1023, 5)])),
                named("tx0", queue_of(1, &running, "", &[])),
                named("ctrl", queue_of(2, &[("packets", 2)], "", &[])),
                named("tx1", queue_of(3, &[], "", &[])),
            ],
        }
    }

    #[test]
    fn queues_have_the_names_that_the_daemon_gives_them() {
        let table = table(&[&device(1000, 0)], None);
        let names: Vec<_> = (1..4).map(|line| words(&table, line)[1]).collect();
        assert_eq!((names, table.lines().count()), (vec!["rx0", "tx0", "ctrl"], 4), "{table}");
        let line = words(&table, 1);
        assert_eq!(line[..7], ["lan", "rx0", "0", "1000", "1.0", "1000", "25"], "{table}");
        assert_eq!(line[13..], ["1.0", "1.0", "0", "0"], "{table}");
        for line in [2, 3] {
            assert_eq!(words(&table, line)[5..7], ["-", "-"], "no size, no average: {table}");
        }
    }

    #[test]
    fn the_queue_length_of_the_interface_is_shown_once() {
        let mut device = device(1, 0);
        let Detail::Net { txqueuelen, .. } = &mut device.detail else { panic!("a network") };
        *txqueuelen = Some(QueueLength { frames: 1000, source: "auto".into(), changes: 3 });
        let line = "lan txqueuelen: 1000 frames in all queues (auto), changed 3 times";
        assert_eq!(table(&[&device], None).lines().last(), Some(line));
        let former = [device.clone()];
        let interval = table(&[&device], Some((&former[..], 1.0)));
        assert!(!interval.contains("txqueuelen"), "{interval}");
        let Detail::Net { receive_pairs, .. } = &mut device.detail else { panic!("a network") };
        *receive_pairs = Some(ReceivingPairs { pairs: 2, source: "auto".into(), changes: 3 });
        let line = "lan receive_pairs: delivered to 2 (auto), changed 3 times";
        assert_eq!(table(&[&device], None).lines().last(), Some(line));
    }

    #[test]
    fn what_was_dropped_is_listed_below_with_its_causes() {
        let text = table(&[&device(8, 12)], None);
        assert_eq!(words(&text, 1)[15], "18", "{text}");
        let last = text.lines().last().unwrap();
        assert_eq!(last, "lan rx0 dropped: 12 filtered, 6 small buffers", "{text}");
    }

    #[test]
    fn a_port_of_a_switch_has_a_line_for_what_it_counts() {
        let counting = |floods: u64| {
            let mut device = device(8, 0);
            let Detail::Net { switch, .. } = &mut device.detail else { panic!("a network") };
            *switch = [("flooded".to_owned(), floods), ("dropped_full".to_owned(), 2)].into();
            device
        };
        let text = table(&[&counting(5)], None);
        assert_eq!(text.lines().last().unwrap(), "lan switch: 2 dropped full, 5 flooded", "{text}");
        let text = table(&[&counting(7)], Some((&[counting(5)], 1.0)));
        assert_eq!(text.lines().last().unwrap(), "lan switch: 2 flooded", "{text}");
    }

    #[test]
    fn watching_shows_what_happened_in_the_interval() {
        let before = [device(1000, 12)];
        let after = device(3000, 13);
        let text = table(&[&after], Some((&before, 2.0)));
        assert!(text.contains("PACKETS/s") && text.contains("DROPS/s"), "{text}");
        assert_eq!(words(&text, 1)[3..6], ["1000", "1.0", "1000"], "{text}");
        assert_eq!(text.lines().last().unwrap(), "lan rx0 dropped/s: 0.5 filtered", "{text}");
        let quiet = table(&[&after], Some((std::slice::from_ref(&after), 2.0)));
        assert!(!quiet.contains("dropped"), "{quiet}");
    }

    #[test]
    fn disks_and_networks_have_a_table_each() {
        let blk = DeviceInfo {
            kind: "blk".into(),
            detail: Detail::Blk {
                disk: "null".into(),
                size: 512,
                read_only: false,
                logical_block_size: 512,
                physical_block_size: 512,
                connections: Vec::new(),
            },
            queues: Vec::new(),
            ..device(0, 0)
        };
        let both = tables(&[device(1, 0), blk.clone()], None);
        let heads: Vec<_> = both.lines().filter(|line| line.starts_with("DEVICE")).collect();
        assert_eq!(heads.len(), 2, "{both}");
        assert!(heads[0].contains("REQUESTS") && heads[1].contains("PACKETS"), "{both}");
        assert!(both.contains("\n\nDEVICE"), "{both}");
        for (devices, word) in [(vec![blk], "REQUESTS"), (vec![device(1, 0)], "PACKETS")] {
            let one = tables(&devices, None);
            assert_eq!((one.matches("DEVICE").count(), one.contains(word)), (1, true), "{one}");
        }
    }
}
