//! Reads `/proc/PID/stat`: the memory and the CPU time that a process uses (proc(5)).

use std::fs;
use std::os::unix::fs::FileExt;

/// Clock ticks in a second of CPU time.
pub const TICKS: u64 = 100;

/// The memory and CPU time that another process uses.
#[derive(Clone, Copy, Debug, Default)]
pub struct Used {
    /// Resident memory in bytes.
    pub resident_bytes: u64,
    /// Nanoseconds of CPU time since the start of the process.
    pub cpu_ns: u64,
}

impl Used {
    /// Reads the usage of the process that opened this `/proc/self/stat`; zeroes if the process is
    /// gone. The kernel takes no lock for this read that the process may hold.
    pub(crate) fn of(stat: &fs::File) -> Self {
        let mut text = [0; 1024];
        let read = stat.read_at(&mut text, 0).unwrap_or(0);
        let stat = String::from_utf8_lossy(&text[..read]);
        let number = |index| field(&stat, index).unwrap_or(0);
        let page = u64::try_from(rustix::param::page_size()).unwrap_or(0);
        let ticks = number(14).saturating_add(number(15));
        let cpu_ns = ticks.saturating_mul(1_000_000_000 / TICKS);
        Self { resident_bytes: number(24).saturating_mul(page), cpu_ns }
    }
}

/// Returns field `number` of `/proc/self/stat`, counted from 1 as in proc(5). Only fields from 3
/// on.
pub fn field(stat: &str, number: usize) -> Option<u64> {
    // The program's name may contain blanks and brackets: so look for the last `)`, behind which
    // field 3 begins.
    let (_, behind) = stat.rsplit_once(") ")?;
    behind.split_whitespace().nth(number.checked_sub(3)?)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_counted_behind_the_name() {
        let stat = "7 (a) b) S 1 2 3 4";
        assert_eq!([4, 5, 7, 8].map(|n| field(stat, n)), [Some(1), Some(2), Some(4), None]);
        assert_eq!(field(stat, 2), None);
        assert_eq!(field("", 20), None);
    }

    #[test]
    fn what_a_process_uses_is_seen_from_another_one() {
        let mut other = std::process::Command::new("sh");
        let mut other = other.args(["-c", "while :; do :; done"]).spawn().unwrap();
        let stat = fs::File::open(format!("/proc/{}/stat", other.id())).unwrap();
        // The kernel counts a tick of it after a while.
        while Used::of(&stat).cpu_ns == 0 {
            std::thread::yield_now();
        }
        let used = Used::of(&stat);
        assert!(used.resident_bytes >= 4096, "{used:?}");
        other.kill().unwrap();
        other.wait().unwrap();
        assert_eq!(Used::of(&stat).resident_bytes, 0);
    }
}
