//! The table of the queues of block devices.

use super::table::{
    BATCH, Before, CALLS, CALLS_HELD, CALLS_SUPPRESSED, Column, DEVICE, FLIGHT, KICKS,
    KICKS_SUPPRESSED, WAIT_P50, WAIT_P99, WORKER, lines, number, rate, us,
};
use manyring_control::snapshot::DeviceInfo;

const COLUMNS: [Column; 18] = [
    DEVICE,
    number("QUEUE", |seen| seen.queue.index.to_string()),
    WORKER,
    rate("REQUESTS", |seen| seen.count("requests")),
    rate("READ MB", |seen| seen.megabytes("bytes_read")),
    rate("WRITE MB", |seen| seen.megabytes("bytes_written")),
    KICKS,
    KICKS_SUPPRESSED,
    CALLS,
    CALLS_SUPPRESSED,
    CALLS_HELD,
    BATCH,
    WAIT_P50,
    WAIT_P99,
    number("SERVE p50", |seen| us(seen.histogram("serve_ns").p50)),
    number("p99 us", |seen| us(seen.histogram("serve_ns").p99)),
    rate("ERRORS", |seen| seen.count("errors")),
    FLIGHT,
];

/// Returns the table. With an earlier reading `before`, counters are shown per second.
pub(super) fn table(devices: &[&DeviceInfo], before: Before<'_>) -> String {
    lines(COLUMNS, devices, before)
}

#[cfg(test)]
mod tests {
    use super::super::table::{queue_of, words};
    use super::*;
    use manyring_control::snapshot::Detail;

    fn device(requests: u64, serve: &[(u64, u64)]) -> DeviceInfo {
        let counters = [("requests", requests), ("running", 1), ("worker", 3)];
        DeviceInfo {
            name: "root".into(),
            kind: "blk".into(),
            detail: Detail::Blk {
                disk: "uring".into(),
                size: 1 << 30,
                read_only: false,
                logical_block_size: 512,
                physical_block_size: 4096,
                connections: Vec::new(),
            },
            state: "serving".into(),
            origin: "file".into(),
            waits_for: None,
            reason: None,
            pending_keys: Vec::new(),
            process: None,
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
    fn each_number_stands_below_its_name() {
        let mut busy = device(0, &[]);
        let counters = [
            ("worker", 1),
            ("requests", 2),
            ("bytes_read", 3_000_000),
            ("bytes_written", 4_000_000),
            ("kicks", 5),
            ("kicks_suppressed", 6),
            ("calls", 7),
            ("calls_suppressed", 8),
            ("calls_held", 9),
            ("errors", 11),
            ("in_flight", 12),
        ];
        busy.queues = vec![queue_of(0, &counters, "batch_size", &[(10, 1)])];
        let expected = "root 0 1 2 3.0 4.0 5 6 7 8 9 10 0.0 0.0 0.0 0.0 11 12";
        assert_eq!(words(&table(&[&busy], None), 1).join(" "), expected);
    }

    #[test]
    fn watching_shows_what_happened_in_the_interval() {
        let before = [device(1000, &[(1023, 5)])];
        let after = device(3000, &[(1023, 5), (4095, 7)]);
        let table = table(&[&after], Some((&before, 2.0)));
        assert!(table.starts_with("DEVICE") && table.contains("REQUESTS/s"), "{table}");
        let line = words(&table, 1);
        assert_eq!((line[3], line[14]), ("1000", "4.1"), "{table}");
    }

    #[test]
    fn a_device_without_a_queue_has_a_line_too() {
        let mut idle = device(0, &[]);
        idle.queues.clear();
        assert_eq!(words(&table(&[&idle], None), 1), ["root", "none"]);
    }
}
