//! The results of all rounds: medians, ranges, and ratios of the rounds.

use super::REQUEST_BYTES;
use crate::guest_load::{Moved, Spread, Stream, ratio, write_disturbed};
use std::fmt::{Display, Formatter, Result};

/// The load of the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cell {
    /// Writes to TCP sockets as fast as it can.
    Writes(Stream),
    /// Asks on one connection, and waits for each answer.
    Requests,
}

/// One load by one daemon.
#[derive(Clone, Debug)]
pub(super) struct Measured {
    /// Bytes in a second that arrived, or answers.
    pub(super) rate: f64,
    /// Bytes of the guest's programs that arrived at the host's.
    pub(super) bytes: u64,
    /// The counters of the daemon during the load.
    pub(super) moved: Moved,
}

/// One cell of one round: without and with, one right after the other.
#[derive(Clone, Debug)]
pub(super) struct Pair {
    pub(super) cell: Cell,
    pub(super) off: Measured,
    pub(super) auto: Measured,
    /// The share of all CPUs that other programs took during both loads, in per cent.
    pub(super) others_percent: u64,
}

/// All of them, in the order in which they ran.
#[derive(Clone, Debug, Default)]
pub(super) struct Table {
    pub(super) pairs: Vec<Pair>,
}

/// One of the two of a pair.
type Side = fn(&Pair) -> &Measured;

impl Table {
    /// The cells, in the order in which they ran.
    fn cells(&self) -> Vec<Cell> {
        let mut cells = Vec::new();
        for pair in &self.pairs {
            if !cells.contains(&pair.cell) {
                cells.push(pair.cell);
            }
        }
        cells
    }

    /// The rounds of a cell.
    fn rounds(&self, cell: Cell) -> impl Iterator<Item = &Pair> + Clone {
        self.pairs.iter().filter(move |pair| pair.cell == cell)
    }

    fn write_side(&self, f: &mut Formatter<'_>, cell: Cell, name: &str, side: Side) -> Result {
        let of = |value: fn(&Measured) -> f64| {
            Spread::of(self.rounds(cell).map(|pair| value(side(pair))))
        };
        let rate = of(|measured| measured.rate);
        let (scale, digits) = if cell == Cell::Requests { (1.0, 0) } else { (1e6, 2) };
        let shown = |rate: f64| format!("{:.digits$}", rate / scale);
        writeln!(
            f,
            "  {name:<5} {:>8} {:>17} {:>11.0} {:>12.0} {:>9.2}",
            shown(rate.median),
            format!("({} to {})", shown(rate.min), shown(rate.max)),
            of(frame_bytes).median,
            of(buffers_kept).median,
            of(cpu_ms_per_mb).median
        )
    }

    fn write_cell(&self, f: &mut Formatter<'_>, cell: Cell) -> Result {
        writeln!(f, "{cell}")?;
        writeln!(
            f,
            "  {:<5} {:>8} {:>17} {:>11} {:>12} {:>9}",
            "",
            cell.unit(),
            "(range)",
            "frame bytes",
            "buffers kept",
            "CPU ms/MB"
        )?;
        self.write_side(f, cell, "off", |pair| &pair.off)?;
        self.write_side(f, cell, "auto", |pair| &pair.auto)?;
        let ratio = |value: fn(&Measured) -> f64| {
            Spread::of(self.rounds(cell).map(|pair| value(&pair.auto) / value(&pair.off)))
        };
        writeln!(
            f,
            "  auto / off: {} {}, frame bytes {}, CPU for each byte {}",
            cell.unit(),
            ratio(|measured| measured.rate),
            ratio(frame_bytes),
            ratio(cpu_ms_per_mb)
        )?;
        write_disturbed(f, self.rounds(cell).map(|pair| pair.others_percent))
    }
}

impl Cell {
    /// The unit of its rate.
    fn unit(self) -> &'static str {
        match self {
            Self::Writes(_) => "MB/s",
            Self::Requests => "trans/s",
        }
    }
}

/// Bytes of a frame that the guest sent, on average.
fn frame_bytes(measured: &Measured) -> f64 {
    ratio(measured.moved.bytes_sent, measured.moved.frames_sent)
}

/// Frames whose buffers were kept.
fn buffers_kept(measured: &Measured) -> f64 {
    ratio(measured.moved.buffers_kept, 1)
}

/// Milliseconds that the worker ran for each megabyte that arrived.
fn cpu_ms_per_mb(measured: &Measured) -> f64 {
    measured.moved.ran.as_secs_f64() * 1e3 / ratio(measured.bytes, 1_000_000)
}

impl Display for Cell {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let Self::Writes(stream) = self else {
            return write!(f, "requests and responses of {REQUEST_BYTES} bytes, 1 connection");
        };
        let nodelay = if stream.nodelay { "with" } else { "without" };
        let plural = if stream.connections == 1 { "" } else { "s" };
        write!(
            f,
            "writes of {} bytes {nodelay} TCP_NODELAY, {} connection{plural}",
            stream.size, stream.connections
        )
    }
}

impl Display for Table {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        self.cells().into_iter().try_for_each(|cell| self.write_cell(f, cell))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn measured(rate: f64, frames_sent: u64, buffers_kept: u64, ran_ms: u64) -> Measured {
        let ran = Duration::from_millis(ran_ms);
        let moved =
            Moved { frames_sent, bytes_sent: 3_000_000, buffers_kept, ran, ..Moved::default() };
        Measured { rate, bytes: 2_000_000, moved }
    }

    fn pair(cell: Cell, rates: [f64; 2], others_percent: u64) -> Pair {
        let (off, auto) = (measured(rates[0], 10_000, 0, 40), measured(rates[1], 5_000, 4_000, 30));
        Pair { cell, off, auto, others_percent }
    }

    #[test]
    fn each_cell_has_both_daemons_and_the_ratios_of_its_rounds() {
        let cell = Cell::Writes(Stream { size: 200, nodelay: true, connections: 8 });
        let pairs = vec![
            pair(cell, [10e6, 12e6], 10),
            pair(Cell::Requests, [5000.0, 4500.0], 0),
            pair(cell, [2e6, 4e6], 11),
            pair(Cell::Requests, [5000.0, 5500.0], 0),
        ];
        let text = Table { pairs }.to_string();
        let (writes, requests) = text.split_once("requests and responses").unwrap();
        assert!(writes.starts_with("writes of 200 bytes with TCP_NODELAY, 8 connections\n"));
        let words = |text: &str, name: &str| -> Vec<String> {
            let mut lines = text.lines().filter(|line| line.starts_with(&format!("  {name} ")));
            lines.next().unwrap().split_whitespace().map(str::to_owned).collect()
        };
        let off = ["off", "6.00", "(2.00", "to", "10.00)", "300", "0", "20.00"];
        assert_eq!(words(writes, "off"), off, "{text}");
        let auto = ["auto", "8.00", "(4.00", "to", "12.00)", "600", "4000", "15.00"];
        assert_eq!(words(writes, "auto "), auto, "{text}");
        let ratios = "auto / off: MB/s 1.60x (1.20 to 2.00), frame bytes 2.00x (2.00 to 2.00), \
            CPU for each byte 0.75x (0.75 to 0.75)";
        assert!(writes.contains(ratios), "{text}");
        assert!(writes.contains("up to 11 % of the CPUs: 1 of 2 runs; do not use"), "{text}");
        assert!(requests.starts_with(" of 256 bytes, 1 connection\n"), "{text}");
        assert_eq!(words(requests, "off")[1], "5000", "{text}");
        assert!(requests.contains("auto / off: trans/s 1.00x (0.90 to 1.10)"), "{text}");
        assert!(!requests.contains("DISTURBED"), "{text}");
    }
}
