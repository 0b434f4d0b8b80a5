//! CPU time that programs take which are not of this run.

use crate::{Context, Outcome};
use std::collections::BTreeMap;
use std::fmt::Formatter;
use std::time::Instant;

/// Share of all CPUs that other programs may take during a load, in per cent.
const OTHERS_PERCENT_MAX: u64 = 10;
/// How often a load is tried that other programs disturb.
const TRIES: usize = 4;

/// Runs `once`. Returns its result, and the share of the CPUs that other programs took during it,
/// in per cent. Tries again while they take too much, and returns the try in which they took least.
///
/// # Errors
/// Those of `once`, or /proc cannot be read.
pub(crate) fn least_disturbed<T>(mut once: impl FnMut() -> Outcome<T>) -> Outcome<(T, u64)> {
    let mut once = || -> Outcome<(T, u64)> {
        let before = Others::now()?;
        let result = once()?;
        Ok((result, Others::now()?.percent_since(&before)))
    };
    let mut best = once()?;
    for _ in 1..TRIES {
        if best.1 <= OTHERS_PERCENT_MAX {
            break;
        }
        let next = once()?;
        if next.1 < best.1 {
            best = next;
        }
    }
    Ok(best)
}

/// Writes a line about the loads that were disturbed, if there are any; given the shares that other
/// programs took of the CPUs during each load.
///
/// # Errors
/// Those of `f`.
pub(crate) fn write_disturbed(
    f: &mut Formatter<'_>,
    percents: impl Iterator<Item = u64> + Clone,
) -> std::fmt::Result {
    let disturbed = percents.clone().filter(|percent| *percent > OTHERS_PERCENT_MAX).count();
    if disturbed == 0 {
        return Ok(());
    }
    let (count, most) = (percents.clone().count(), percents.max().unwrap_or(0));
    writeln!(
        f,
        "  DISTURBED by other programs, which took up to {most} % of the CPUs: {disturbed} of \
         {count} runs; do not use"
    )
}

/// The CPU time that other programs have used so far.
#[derive(Clone, Copy, Debug)]
struct Others {
    /// Clock ticks of all CPUs that were neither idle nor used by this program's processes.
    ticks: u64,
    at: Instant,
}

impl Others {
    fn now() -> Outcome<Self> {
        let all = std::fs::read_to_string("/proc/stat").context("/proc/stat")?;
        let ours = of_family(std::process::id(), &processes()?);
        // A process of this program may have run between the two readings.
        let ticks = busy(&all).saturating_sub(ours);
        Ok(Self { ticks, at: Instant::now() })
    }

    /// The share of all CPUs that other programs took since `before`, in per cent.
    fn percent_since(&self, before: &Self) -> u64 {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from) as u64;
        let milliseconds = u64::try_from((self.at - before.at).as_millis()).unwrap_or(u64::MAX);
        let all = milliseconds * rustix::param::clock_ticks_per_second() * cpus / 1000;
        self.ticks.saturating_sub(before.ticks) * 100 / all.max(1)
    }
}

/// A process: its parent, and the clock ticks of it and of its children that have ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Process {
    parent: u32,
    ticks: u64,
}

/// All processes that there are.
fn processes() -> Outcome<BTreeMap<u32, Process>> {
    let entries = std::fs::read_dir("/proc").context("/proc")?.flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    // One that ends at this moment has no file any more.
    let stat = |pid| std::fs::read_to_string(format!("/proc/{pid}/stat")).ok();
    Ok(pids.filter_map(|pid| Some((pid, parse(&stat(pid)?)?))).collect())
}

/// Of `/proc/PID/stat`: the parent is field 4, the times are the fields 14 to 17.
fn parse(stat: &str) -> Option<Process> {
    let mut fields = stat.rsplit_once(") ")?.1.split(' ').skip(1);
    let parent = fields.next()?.parse().ok()?;
    let times = fields.skip(9).take(4);
    Some(Process { parent, ticks: times.map(|time| time.parse::<u64>().unwrap_or(0)).sum() })
}

/// The ticks of the process `root` and of all that it has started, or that these have.
fn of_family(root: u32, processes: &BTreeMap<u32, Process>) -> u64 {
    let is_family = |pid: u32| {
        let parent = |pid: &u32| processes.get(pid).map(|process| process.parent);
        std::iter::successors(Some(pid), parent).any(|pid| pid == root)
    };
    processes.iter().filter(|(pid, _)| is_family(**pid)).map(|(_, process)| process.ticks).sum()
}

/// The first line of `/proc/stat` without idle and waiting; guests are counted twice there.
fn busy(stat: &str) -> u64 {
    let fields = stat.lines().next().into_iter().flat_map(|line| line.split_whitespace().skip(1));
    let ticks = fields.take(8).map(|field| field.parse::<u64>().unwrap_or(0));
    ticks.enumerate().filter(|(index, _)| !matches!(index, 3 | 4)).map(|(_, ticks)| ticks).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn busy_is_what_is_neither_idle_nor_waiting() {
        assert_eq!(busy("cpu  1 2 4 1000 2000 8 16 32 64 128\ncpu0 7 7 7 7"), 63);
    }

    #[test]
    fn a_process_has_a_parent_and_the_time_of_itself_and_its_ended_children() {
        let stat = "9 (a) b) S 4 9 9 0 -1 4194304 1 2 3 4 1000 200 30 4 20 0 1 0 77";
        assert_eq!(parse(stat), Some(Process { parent: 4, ticks: 1234 }));
        let own = std::fs::read_to_string("/proc/self/stat").unwrap();
        assert_eq!(
            parse(&own).map(|process| process.parent),
            Some(std::os::unix::process::parent_id())
        );
    }

    #[test]
    fn a_family_is_a_process_and_all_below_it() {
        let processes = [(1, 0, 1), (5, 1, 10), (6, 5, 100), (7, 6, 1000), (8, 1, 10_000)];
        let processes = processes.map(|(pid, parent, ticks)| (pid, Process { parent, ticks }));
        assert_eq!(of_family(5, &processes.into()), 1110);
    }

    #[test]
    fn what_others_took_is_a_share_of_all_cpus() {
        let at = Instant::now();
        let before = Others { ticks: 50, at };
        let after = |ticks| Others { ticks, at: at + std::time::Duration::from_secs(10) };
        let cpus = std::thread::available_parallelism().map_or(1, usize::from) as u64;
        let tenth = rustix::param::clock_ticks_per_second() * cpus;
        assert_eq!(after(50).percent_since(&before), 0);
        assert_eq!(after(50 + tenth).percent_since(&before), 10);
        // The kernel may count this program's ticks later than those of all programs.
        assert_eq!(after(40).percent_since(&before), 0);
    }
}
