//! The table of the queues of block devices.

use super::table::{Before, Column, Seen, lines, number, rate, text, us};
use crate::control::snapshot::DeviceInfo;

const COLUMNS: [Column; 17] = [
    text("DEVICE"),
    number("QUEUE"),
    number("WORKER"),
    rate("REQUESTS"),
    rate("READ MB"),
    rate("WRITE MB"),
    rate("KICKS"),
    rate("KICKS-"),
    rate("CALLS"),
    rate("CALLS-"),
    number("BATCH"),
    number("WAIT p50"),
    number("p99 us"),
    number("SERVE p50"),
    number("p99 us"),
    rate("ERRORS"),
    number("FLIGHT"),
];

/// The table; numbers are per second if there is a `before`.
pub(super) fn table(devices: &[&DeviceInfo], before: Before<'_>) -> String {
    lines(COLUMNS, devices, before, row)
}

fn row(device: &DeviceInfo, seen: Seen<'_>) -> [String; COLUMNS.len()] {
    let (wait, serve) = (seen.histogram("wait_ns"), seen.histogram("serve_ns"));
    [
        device.name.clone(),
        seen.queue.index.to_string(),
        seen.queue.counter("worker").to_string(),
        seen.count("requests"),
        seen.megabytes("bytes_read"),
        seen.megabytes("bytes_written"),
        seen.count("kicks"),
        seen.count("kicks_suppressed"),
        seen.count("calls"),
        seen.count("calls_suppressed"),
        seen.histogram("batch_size").p50.to_string(),
        us(wait.p50),
        us(wait.p99),
        us(serve.p50),
        us(serve.p99),
        seen.count("errors"),
        seen.queue.counter("in_flight").to_string(),
    ]
}

#[cfg(test)]
mod tests {
    use super::super::table::{queue_of, words};
    use super::*;
    use crate::control::snapshot::Detail;

    fn device(requests: u64, serve: &[(u64, u64)]) -> DeviceInfo {
        let counters = [("requests", requests), ("running", 1), ("worker", 3)];
        DeviceInfo {
            name: "root".into(),
            kind: "blk".into(),
            detail: Detail::Blk { disk: "uring".into(), size: 1 << 30, read_only: false },
            connected: true,
            socket: "/run/root.sock".into(),
            queues: vec![queue_of(0, &counters, "serve_ns", serve), queue_of(1, &[], "", &[])],
        }
    }

    #[test]
    fn a_table_shows_the_queues_that_run_and_aligns_them() {
        let table = table(&[&device(1000, &[(1023, 5)])], None);
        assert_eq!(words(&table, 1)[..4], ["root", "0", "3", "1000"]);
        assert_eq!(table.lines().count(), 2, "queue 1 has never run:\n{table}");
        let widths: Vec<_> = table.lines().map(str::len).collect();
        assert_eq!(widths[0], widths[1], "{table}");
    }

    #[test]
    fn watching_shows_what_happened_in_the_interval() {
        let before = [device(1000, &[(1023, 5)])];
        let after = device(3000, &[(1023, 5), (4095, 7)]);
        let table = table(&[&after], Some((&before, 2.0)));
        assert!(table.starts_with("DEVICE") && table.contains("REQUESTS/s"), "{table}");
        let line = words(&table, 1);
        assert_eq!((line[3], line[13]), ("1000", "4.1"), "{table}");
    }

    #[test]
    fn a_device_without_a_queue_has_a_line_too() {
        let mut idle = device(0, &[]);
        idle.queues.clear();
        assert_eq!(words(&table(&[&idle], None), 1), ["root", "none"]);
    }
}
