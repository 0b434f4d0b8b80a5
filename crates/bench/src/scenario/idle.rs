//! `idle`: what a daemon costs while nobody does anything: 1, 10, 100 and 1000 devices, disks and
//! networks in turn, half of them with a guest that is connected.

use super::ScenarioArgs;
use super::crowd::{Crowd, CrowdDevices};
use crate::measure::{Affinity, Calibration, machine, now};
use crate::peer::{self, Server};
use crate::progress;
use crate::report::ScenarioReport;
use crate::report::idle::{IdleCell, IdleSample};
use std::path::Path;
use std::time::Duration;

/// Devices of each daemon.
const COUNTS: [usize; 4] = [1, 10, 100, 1000];
/// How long nobody does anything, and how long what the guests did when they connected may last.
const IDLE: Duration = Duration::from_secs(5);
const SETTLE: Duration = Duration::from_secs(1);

/// Runs the scenario.
pub(crate) fn run(args: &ScenarioArgs) -> Result<ScenarioReport<IdleCell>, String> {
    let counts = if args.smoke { &COUNTS[..2] } else { &COUNTS };
    let mut rounds = Vec::new();
    for round in 1..=args.rounds() {
        progress::cell(&format!("round {round} of {}", args.rounds()));
        let daemons = counts.iter().map(|count| watch(args, *count));
        let mut samples: Vec<IdleSample> = daemons.collect::<Result<_, String>>()?;
        share(&mut samples, counts);
        rounds.push(samples);
    }
    let seconds = idle(args).as_secs_f64();
    let name = format!("{seconds} s of nothing");
    Ok(ScenarioReport {
        scenario: "idle",
        machine: machine(),
        calibration: Calibration::measure(args.client_cpu, args.server_cpu),
        rounds: args.rounds(),
        seconds,
        cells: vec![IdleCell::new(name, counts, &rounds)],
    })
}

fn idle(args: &ScenarioArgs) -> Duration {
    if args.smoke { IDLE / 25 } else { IDLE }
}

/// Sets the memory for each device: that beyond the daemon with a single device, divided.
fn share(samples: &mut [IdleSample], counts: &[usize]) {
    let alone = samples.first().map_or(0.0, |sample| sample.resident_kib);
    for (sample, count) in samples.iter_mut().zip(counts) {
        sample.kib_per_device = match count {
            1 => sample.resident_kib,
            count => {
                let others = f64::from(u32::try_from(count - 1).unwrap_or(u32::MAX));
                (sample.resident_kib - alone) / others
            }
        };
    }
}

/// Starts a daemon, connects its guests, and watches it idle.
fn watch(args: &ScenarioArgs, count: usize) -> Result<IdleSample, String> {
    let folder = tempfile::tempdir().map_err(|e| format!("temporary folder: {e}"))?;
    let devices = CrowdDevices::new(folder.path(), count);
    let config = folder.path().join("config");
    std::fs::write(&config, devices.config("", None))
        .map_err(|e| format!("{}: {e}", config.display()))?;
    let manyring = peer::manyring(args.manyring.as_deref()).map_err(|e| e.to_string())?;
    let mut arguments: Vec<std::ffi::OsString> =
        vec!["run".into(), "--log-level=error".into(), "--config".into(), config.into()];
    arguments.extend(args.extra.iter().cloned());
    let (everywhere, start) = (Affinity::current(), now());
    let server = Server::start(&manyring, &arguments, &devices.last_socket(), &everywhere);
    let server = server.map_err(|e| e.to_string())?;
    let ready_seconds = start.elapsed().as_secs_f64();
    let start = now();
    let _crowd = Crowd::connect(&devices, held(count), &everywhere)?;
    let connect_seconds = start.elapsed().as_secs_f64();
    std::thread::sleep(SETTLE.min(idle(args)));
    let before = ProcStatus::of(server.id());
    let cpu = server.cpu_seconds();
    std::thread::sleep(idle(args));
    let (cpu, after) = (server.cpu_seconds() - cpu, ProcStatus::of(server.id()));
    Ok(IdleSample {
        ready_seconds,
        connect_seconds,
        ticks: (cpu * ticks_per_second()).round(),
        wakes: after.switches - before.switches,
        threads: after.threads,
        resident_kib: after.resident_kib,
        kib_per_device: 0.0,
    })
}

/// The devices that have a guest: of every four, the first two (a disk and a network).
fn held(count: usize) -> impl Iterator<Item = usize> {
    (0..count).filter(|index| index % 4 < 2)
}

#[allow(clippy::cast_precision_loss, reason = "a hundred or a thousand")]
fn ticks_per_second() -> f64 {
    rustix::param::clock_ticks_per_second() as f64
}

/// The counts that the kernel reports for a process and its threads.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct ProcStatus {
    resident_kib: f64,
    threads: f64,
    /// Voluntary switches of all threads: each ends with a sleep.
    switches: f64,
}

impl ProcStatus {
    fn of(pid: u32) -> Self {
        let folder = format!("/proc/{pid}");
        let text = |path: &Path| std::fs::read_to_string(path.join("status")).unwrap_or_default();
        let tasks = std::fs::read_dir(format!("{folder}/task")).into_iter().flatten().flatten();
        let tasks: Vec<String> = tasks.map(|task| text(&task.path())).collect();
        Self::parse(&text(Path::new(&folder)), &tasks)
    }

    fn parse(process: &str, tasks: &[String]) -> Self {
        Self {
            resident_kib: number(process, "VmRSS:"),
            threads: number(process, "Threads:"),
            switches: tasks.iter().map(|task| number(task, "voluntary_ctxt_switches:")).sum(),
        }
    }
}

/// The number behind a key of `/proc/PID/status`; 0 if the kernel does not say.
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
        let process = "Name:\tmanyring\nVmRSS:\t   5120 kB\nThreads:\t3\n";
        let status = ProcStatus::parse(process, &[task(10), task(32)]);
        assert_eq!(status, ProcStatus { resident_kib: 5120.0, threads: 3.0, switches: 42.0 });
        assert_eq!(ProcStatus::parse("", &[]), ProcStatus::default());
    }

    #[test]
    fn a_device_takes_what_the_daemon_takes_beyond_its_first_one() {
        let sample = |resident_kib| IdleSample { resident_kib, ..IdleSample::default() };
        let mut samples = [sample(5000.0), sample(5900.0), sample(14_900.0)];
        share(&mut samples, &[1, 10, 100]);
        assert_eq!(samples.map(|s| s.kib_per_device), [5000.0, 100.0, 100.0]);
    }

    #[test]
    fn half_of_the_devices_have_a_guest_and_of_either_kind_alike() {
        let guests: Vec<usize> = held(1000).collect();
        assert_eq!(guests.len(), 500);
        assert_eq!(guests.iter().filter(|index| *index % 2 == 0).count(), 250);
        assert_eq!(held(1).count(), 1);
    }
}
