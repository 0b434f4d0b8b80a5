//! `idle`: what a daemon costs while nobody does anything: 1, 10, 100 and 1000 devices, disks and
//! networks in turn, half of them with a guest that is connected. Then the memory of a device of
//! each kind by itself, in one process and in a device process, with a guest and without.

use super::ScenarioArgs;
use super::crowd::{Crowd, CrowdDevices, Devices};
use crate::measure::cgroup::MemoryGroup;
use crate::measure::{Affinity, now};
use crate::peer;
use crate::progress;
use crate::report::ScenarioReport;
use crate::report::idle::{IdleCell, IdleSample};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Devices of each daemon.
static COUNTS: [usize; 4] = [1, 10, 100, 1000];
/// How long nobody does anything, and how long what the guests did when they connected may last.
const IDLE: Duration = Duration::from_secs(5);
const SETTLE: Duration = Duration::from_secs(1);

/// The daemons of a cell.
#[derive(Clone, Copy)]
struct Daemons {
    devices: Devices,
    has_processes: bool,
    /// The devices that have a guest.
    held: fn(usize) -> bool,
    counts: &'static [usize],
}

impl Daemons {
    fn name(self, idle: Duration) -> String {
        let kind = match self.devices {
            Devices::InTurn => return format!("{} s of nothing", idle.as_secs_f64()),
            Devices::Disks => "disks of 8 queues",
            Devices::Networks => "networks of one pair",
        };
        let form = if self.has_processes { "in a device process" } else { "in one process" };
        let guests = if (self.held)(0) { "each with a guest" } else { "without a guest" };
        format!("{kind} {form}, {guests}")
    }

    /// Those of all cells. A short run has one of a single kind: the others take the same path.
    fn all(smoke: bool) -> Vec<Self> {
        let (counts, short) =
            (&COUNTS[..if smoke { 2 } else { 4 }], &COUNTS[..3 - usize::from(smoke)]);
        let mut all =
            vec![Self { devices: Devices::InTurn, has_processes: false, held: of_half, counts }];
        for (devices, has_processes) in [Devices::Disks, Devices::Networks]
            .into_iter()
            .flat_map(|devices| [(devices, false), (devices, true)])
        {
            let of = |held: fn(usize) -> bool| Self { devices, has_processes, held, counts: short };
            all.extend([of(|_| false), of(|_| true)]);
        }
        if smoke {
            all.drain(1..all.len() - 1);
        }
        all
    }
}

/// Runs the scenario.
pub(crate) fn run(args: &ScenarioArgs) -> Result<ScenarioReport<IdleCell>, String> {
    let mut cells = Vec::new();
    for daemons in Daemons::all(args.smoke) {
        let (name, mut rounds) = (daemons.name(idle(args)), Vec::new());
        // The memory of a device is the same in each round.
        let count = if daemons.devices == Devices::InTurn { args.rounds() } else { 1 };
        for round in 1..=count {
            progress::cell(&format!("{name}, round {round} of {count}"));
            let samples = daemons.counts.iter().map(|count| watch(args, daemons, *count));
            let mut samples: Vec<IdleSample> = samples.collect::<Result<_, String>>()?;
            share(&mut samples, daemons.counts);
            rounds.push(samples);
        }
        cells.push(IdleCell::new(name, daemons.counts, &rounds));
    }
    let report = args.report("idle", cells);
    Ok(ScenarioReport { seconds: idle(args).as_secs_f64(), ..report })
}

fn idle(args: &ScenarioArgs) -> Duration {
    if args.smoke { IDLE / 25 } else { IDLE }
}

/// Sets the memory for each device: that beyond the daemon with a single device, divided.
fn share(samples: &mut [IdleSample], counts: &[usize]) {
    let alone = samples.first().copied().unwrap_or_default();
    for (sample, count) in samples.iter_mut().zip(counts) {
        let others = f64::from(u32::try_from(count - 1).unwrap_or(u32::MAX));
        let each = |all: f64, alone: f64| if *count == 1 { all } else { (all - alone) / others };
        sample.kib_per_device = each(sample.resident_kib, alone.resident_kib);
        sample.group_kib_per_device = each(sample.group_kib, alone.group_kib);
    }
}

/// Starts a daemon, connects its guests, and watches it idle.
fn watch(args: &ScenarioArgs, daemons: Daemons, count: usize) -> Result<IdleSample, String> {
    let folder = tempfile::tempdir().map_err(|e| format!("temporary folder: {e}"))?;
    let devices = CrowdDevices::new(folder.path(), count);
    let devices = devices.of(daemons.devices, daemons.has_processes);
    let manyring = peer::manyring(args.manyring.as_deref()).map_err(|e| e.to_string())?;
    let (everywhere, start) = (Affinity::current(), now());
    let group = MemoryGroup::new();
    let begin = || devices.serve(&manyring, &devices.config("", None), &args.extra, &everywhere);
    let server = group.as_ref().map_or_else(begin, |group| group.with(begin))?;
    let ready_seconds = start.elapsed().as_secs_f64();
    let start = now();
    let guests = (0..count).filter(|index| (daemons.held)(*index));
    let _crowd = Crowd::connect(&devices, guests, &everywhere)?;
    let connect_seconds = start.elapsed().as_secs_f64();
    std::thread::sleep(SETTLE.min(idle(args)));
    let all = processes(server.id());
    let cpu_seconds = || all.iter().map(|id| peer::ran_seconds(*id)).sum::<f64>();
    let (before, cpu) = (ProcStatus::of_all(&all), cpu_seconds());
    // Of a single kind only the memory is of interest.
    if daemons.devices == Devices::InTurn {
        std::thread::sleep(idle(args));
    }
    let (cpu, after) = (cpu_seconds() - cpu, ProcStatus::of_all(&all));
    Ok(IdleSample {
        ready_seconds,
        connect_seconds,
        ticks: (cpu * ticks_per_second()).round(),
        wakes: after.switches - before.switches,
        threads: after.threads,
        resident_kib: after.resident_kib,
        group_kib: group.as_ref().and_then(MemoryGroup::kib).unwrap_or(0.0),
        ..IdleSample::default()
    })
}

/// A process and those that it has started.
fn processes(id: u32) -> Vec<u32> {
    let tasks = std::fs::read_dir(format!("/proc/{id}/task")).into_iter().flatten().flatten();
    let children = tasks.map(|task| std::fs::read_to_string(task.path().join("children")));
    let children: String = children.map(Result::unwrap_or_default).collect();
    let children = children.split_whitespace().filter_map(|id| id.parse().ok());
    std::iter::once(id).chain(children.flat_map(processes)).collect()
}

/// True for the first two of every four devices: a disk and a network.
fn of_half(index: usize) -> bool {
    index % 4 < 2
}

#[allow(clippy::cast_precision_loss, reason = "a hundred or a thousand")]
fn ticks_per_second() -> f64 {
    rustix::param::clock_ticks_per_second() as f64
}

/// The counts that the kernel reports for processes and their threads.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct ProcStatus {
    /// A page that several processes have is divided by their number.
    resident_kib: f64,
    threads: f64,
    /// Voluntary switches of all threads: each ends with a sleep.
    switches: f64,
}

impl ProcStatus {
    fn of_all(processes: &[u32]) -> Self {
        let text = |path: &Path| std::fs::read_to_string(path).unwrap_or_default();
        let (mut memory, mut tasks) = (Vec::new(), Vec::new());
        for id in processes {
            let folder = PathBuf::from(format!("/proc/{id}"));
            memory.push(text(&folder.join("smaps_rollup")));
            let threads = std::fs::read_dir(folder.join("task")).into_iter().flatten().flatten();
            tasks.extend(threads.map(|task| text(&task.path().join("status"))));
        }
        Self::parse(&memory, &tasks)
    }

    fn parse(memory: &[String], tasks: &[String]) -> Self {
        let sum = |texts: &[String], key| texts.iter().map(|text| number(text, key)).sum();
        Self {
            resident_kib: sum(memory, "Pss:"),
            threads: tasks.iter().map(|_| 1.0).sum(),
            switches: sum(tasks, "voluntary_ctxt_switches:"),
        }
    }
}

/// The number behind a key of a file of `/proc/PID`; 0 if the kernel does not say.
fn number(status: &str, key: &str) -> f64 {
    let line = status.lines().find_map(|line| line.strip_prefix(key));
    let word = line.and_then(|line| line.split_whitespace().next());
    word.and_then(|word| word.parse().ok()).unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_sleeps_as_often_as_all_its_threads() {
        let task = |wakes: u32| {
            format!("voluntary_ctxt_switches:\t{wakes}\nnonvoluntary_ctxt_switches:\t7\n")
        };
        let memory = |kib: u32| format!("Rss:  7000 kB\nPss:   {kib} kB\n");
        let status = ProcStatus::parse(&[memory(5000), memory(120)], &[task(10), task(32)]);
        assert_eq!(status, ProcStatus { resident_kib: 5120.0, threads: 2.0, switches: 42.0 });
        assert_eq!(ProcStatus::parse(&[], &[]), ProcStatus::default());
    }

    #[test]
    fn a_device_takes_what_the_daemon_takes_beyond_its_first_one() {
        let sample = |resident_kib| IdleSample {
            resident_kib,
            group_kib: 2.0 * resident_kib,
            ..IdleSample::default()
        };
        let mut samples = [sample(5000.0), sample(5900.0), sample(14_900.0)];
        share(&mut samples, &[1, 10, 100]);
        assert_eq!(samples.map(|s| s.kib_per_device), [5000.0, 100.0, 100.0]);
        assert_eq!(samples.map(|s| s.group_kib_per_device), [10_000.0, 200.0, 200.0]);
    }

    #[test]
    fn half_of_the_devices_have_a_guest_and_of_either_kind_alike() {
        let guests: Vec<usize> = (0..1000).filter(|index| of_half(*index)).collect();
        assert_eq!(guests.len(), 500);
        assert_eq!(guests.iter().filter(|index| *index % 2 == 0).count(), 250);
        assert!(of_half(0));
    }

    #[test]
    fn each_kind_has_a_cell_in_each_form_and_a_short_run_one_of_them() {
        let names = |smoke| Daemons::all(smoke).into_iter().map(|of| of.name(IDLE));
        let (all, short): (Vec<_>, Vec<_>) = (names(false).collect(), names(true).collect());
        let last = "networks of one pair in a device process, each with a guest";
        assert_eq!((all.len(), all[0].as_str(), all[8].as_str()), (9, "5 s of nothing", last));
        assert_eq!(short, [all[0].as_str(), last]);
    }

    #[test]
    fn a_process_is_counted_with_those_that_it_has_started() {
        let mut child = std::process::Command::new("/bin/sleep").arg("9").spawn().unwrap();
        let all = processes(std::process::id());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(all[0] == std::process::id() && all.contains(&child.id()), "{all:?}");
    }
}
