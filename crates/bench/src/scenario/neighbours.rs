//! `neighbours`: whether two guests that abuse a daemon take more from six others than their share.
//!
//! One daemon with one worker, on a CPU of its own, serves eight devices. Three runs make a round:
//!
//! ```text
//! alone:   each measured guest has the daemon for itself
//! equals:  six measured guests, and two more that read as much as they can
//! abused:  six measured guests, one that floods kicks, one with requests of 1 GiB
//! ```
//! `--only messages` puts a front-end that sends messages without end in the place of the flood of
//! kicks, and `--only 'at once'` one whose first messages are measured: the daemon reads 8192 of
//! them at once, and then one in a millisecond.
//!
//! The *fair share* of a guest is what it has among equals, and at least an eighth of what it has
//! alone. The abused guests keep their shares if the two that abuse the daemon get no more from
//! their neighbours than two of their kind would.
//!
//! The guests share the other CPU, which would be no fault of the daemon's: six guests with a CPU
//! each would not wait there for the flood. So the well-behaved ones run before all others
//! (`SCHED_FIFO`), the two abusers in the remaining time. Time that a guest has still waited for
//! its CPU, and the worker for its own, is subtracted from the latencies.

use super::{ScenarioArgs, TRIES, WAITED_MAX};
use crate::load::guest::{Deed, GuestArgs, GuestResult};
use crate::measure::{Affinity, now};
use crate::peer::{self, Server};
use crate::progress;
use crate::report::neighbours::{NeighbourCell, NeighbourSample};
use crate::report::verdict::Verdict;
use crate::report::{Party, ScenarioReport};
use std::collections::HashMap;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Stdio};
use std::time::Duration;

/// A guest, and the device it uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct GuestRole {
    name: &'static str,
    device: usize,
    deed: Deed,
    depth: u16,
    size: u32,
}

const fn role(name: &'static str, device: usize, deed: Deed, depth: u16, size: u32) -> GuestRole {
    GuestRole { name, device, deed, depth, size }
}

/// The guests that are measured.
const MEASURED: [GuestRole; 6] = [
    role("disk, 4 KiB, depth 1", 0, Deed::Read, 1, 4 << 10),
    role("disk, 4 KiB, depth 8", 1, Deed::Read, 8, 4 << 10),
    role("disk, 256 KiB, depth 1", 2, Deed::Read, 1, 256 << 10),
    role("disk, 256 KiB, depth 8", 3, Deed::Read, 8, 256 << 10),
    role("network, receives, depth 8", 4, Deed::Receive, 8, FRAME),
    role("network, sends, depth 8", 5, Deed::Transmit, 8, FRAME),
];
/// Bytes of a frame.
const FRAME: u32 = 1500;
/// The abusers of the last two devices. The first one of each device takes part unless `--only`
/// names another.
const ABUSERS: [&[GuestRole]; 2] = [
    &[
        role("abuse: a flood of kicks", 6, Deed::Kicks, 1, 512),
        role("abuse: messages without end", 6, Deed::Messages, 1, 512),
        role("abuse: 8192 messages at once", 6, Deed::FirstMessages, 1, 512),
    ],
    &[role("abuse: requests of 1 GiB", 7, Deed::Giants, 8, 1 << 20)],
];
/// Who takes their places: guests that use all of their share, as the busiest measured one does.
const EQUALS: [GuestRole; 2] = [
    role("an equal", 6, Deed::Read, 8, 256 << 10),
    role("another equal", 7, Deed::Read, 8, 256 << 10),
];
/// Devices of the daemon.
const DEVICES: usize = MEASURED.len() + ABUSERS.len();

/// Runs the scenario. The second part is the verdict: which promises were broken.
pub(crate) fn run(args: &ScenarioArgs) -> Result<(ScenarioReport<NeighbourCell>, Verdict), String> {
    let stage = Stage::new(args)?;
    let abusers = abusers(args.only.as_deref());
    let mut found: Vec<[Vec<NeighbourSample>; 3]> = vec![<[_; 3]>::default(); DEVICES];
    for round in 1..=args.rounds() {
        progress::cell(&format!("round {round} of {}", args.rounds()));
        for measured in MEASURED {
            found[measured.device][ALONE].extend(stage.run(&[measured])?);
        }
        for (mix, others) in [(AMONG_EQUALS, EQUALS), (ABUSED, abusers)] {
            let samples = stage.run(&[&MEASURED[..], &others].concat())?;
            for (found, sample) in found.iter_mut().zip(samples) {
                found[mix].push(sample);
            }
        }
    }
    let is_shown = |(role, _): &(&GuestRole, _)| !EQUALS.contains(role);
    let all = MEASURED.iter().chain(&abusers).zip(found);
    let cells: Vec<_> = all.filter(is_shown).map(cell).collect();
    let broken = cells.iter().flat_map(|cell| cell.broken.clone()).collect();
    let report = args.report("neighbours", cells);
    Ok((report, Verdict::new(args.smoke, "every guest kept its share", broken)))
}

/// Who abuses the daemon: with `--only TEXT` those whose names contain it, to tell them apart. An
/// equal takes the place of an abuser that is not wanted.
fn abusers(only: Option<&str>) -> [GuestRole; 2] {
    let is_wanted = |role: &&GuestRole| only.is_none_or(|text| role.name.contains(text));
    std::array::from_fn(|n| *ABUSERS[n].iter().find(is_wanted).unwrap_or(&EQUALS[n]))
}

/// Runs of a round.
const ABUSED: usize = 0;
const AMONG_EQUALS: usize = 1;
const ALONE: usize = 2;

fn cell((role, [abused, equals, alone]): (&GuestRole, [Vec<NeighbourSample>; 3])) -> NeighbourCell {
    let party = |name: &str, samples| Party { name: name.to_owned(), samples };
    let abused = party("abused", abused);
    match role.deed {
        Deed::Kicks => NeighbourCell::kicks(role.name, [abused, party("an equal", equals)]),
        Deed::Messages => NeighbourCell::paced(role.name, [abused, party("an equal", equals)]),
        Deed::FirstMessages => {
            NeighbourCell::at_once(role.name, [abused, party("an equal", equals)])
        }
        Deed::Giants => NeighbourCell::giant(role.name, [abused, party("an equal", equals)]),
        _ => {
            let others = [party("among equals", equals), party("alone", alone)];
            NeighbourCell::measured(role.name, abused, others, DEVICES)
        }
    }
}

/// The parts that all runs share.
struct Stage<'a> {
    args: &'a ScenarioArgs,
    folder: tempfile::TempDir,
    manyring: PathBuf,
    /// Well-behaved guests can be put before all others on their CPU.
    is_favoured: bool,
}

/// Time for polling and placement to settle, as a share of a run.
const WARM_UP: f64 = 0.4;

impl<'a> Stage<'a> {
    fn new(args: &'a ScenarioArgs) -> Result<Self, String> {
        let folder = tempfile::tempdir().map_err(|e| format!("temporary folder: {e}"))?;
        std::fs::write(folder.path().join("config"), config(folder.path()))
            .map_err(|e| format!("temporary folder: {e}"))?;
        let manyring = peer::manyring(args.manyring.as_deref()).map_err(|e| e.to_string())?;
        let probe = peer::favoured(Path::new("true")).output();
        let is_favoured = probe.is_ok_and(|output| output.status.success());
        if !is_favoured {
            eprintln!("manyring-bench: without SCHED_FIFO the flood takes its neighbours' CPU");
        }
        Ok(Self { args, folder, manyring, is_favoured })
    }

    /// One run with these guests; again if other programs had too much of the daemon's CPU.
    fn run(&self, roles: &[GuestRole]) -> Result<Vec<NeighbourSample>, String> {
        let tries = if self.args.smoke { 1 } else { TRIES };
        let mut samples = self.run_once(roles)?;
        for _ in 1..tries {
            if progress::is_late() || !samples.iter().any(|sample| sample.disturbed) {
                break;
            }
            samples = self.run_once(roles)?;
        }
        Ok(samples)
    }

    fn run_once(&self, roles: &[GuestRole]) -> Result<Vec<NeighbourSample>, String> {
        let config = self.folder.path().join("config");
        let mut arguments: Vec<OsString> =
            vec!["run".into(), "--log-level=error".into(), "--config".into(), config.into()];
        arguments.extend(self.args.extra.iter().cloned());
        let (last, cpu) = (socket(self.folder.path(), DEVICES - 1), self.args.server_cpu);
        let server = Server::start(&self.manyring, &arguments, &last, &Affinity::one(cpu))
            .map_err(|e| e.to_string())?;
        let start = |role: &GuestRole| {
            self.start(role, server.id()).map_err(|problem| format!("{}: {problem}", role.name))
        };
        let mut guests: Vec<Running> = roles.iter().map(start).collect::<Result<_, _>>()?;
        guests.iter_mut().try_for_each(Running::await_ready)?;
        let length = Duration::from_secs_f64(self.args.seconds());
        std::thread::sleep(length.mul_f64(WARM_UP));
        let (busy, began) = (self.busy()?, now());
        let (waited, ran) = (server.waited_seconds(), peer::ran_seconds(server.id()));
        guests.iter_mut().for_each(Running::order);
        std::thread::sleep(length.saturating_sub(began.elapsed()));
        let busy = difference(&busy, &self.busy()?);
        let all_busy_ns = busy.values().sum::<f64>().max(1.0);
        let (waited, ran) =
            (server.waited_seconds() - waited, peer::ran_seconds(server.id()) - ran);
        let took = began.elapsed().as_secs_f64();
        // The worker and the thread that reads messages wait for each other too, on their one CPU.
        // Other programs had no more of it than the daemon did not use.
        let others = waited.min(took - ran) / took;
        // In this order: those that are measured end before those that abuse them.
        guests.iter_mut().for_each(Running::order);
        let sample = |(guest, role): (Running, &GuestRole)| {
            let result = guest.finish().map_err(|problem| format!("{}: {problem}", role.name))?;
            let busy_ns = busy.get(&name(role.device)).copied().unwrap_or(0.0);
            Ok(sample_of(&result, busy_ns / all_busy_ns, others > WAITED_MAX))
        };
        guests.into_iter().zip(roles).map(sample).collect()
    }

    fn start(&self, role: &GuestRole, daemon: u32) -> Result<Running, String> {
        let program = std::env::current_exe().map_err(|e| e.to_string())?;
        let is_abuser = role.deed.is_abuse();
        let mut command = if self.is_favoured && !is_abuser {
            peer::favoured(&program)
        } else {
            peer::apart(&program)
        };
        let socket = socket(self.folder.path(), role.device);
        let GuestRole { deed, depth, size, .. } = *role;
        let daemon = Some(daemon);
        let arguments = GuestArgs { socket, deed, depth, size, daemon }.arguments();
        command.args(["load", "guest"]).args(arguments);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        // A flood before all others would drive the machine's other programs to the daemon's CPU.
        let spawn = if is_abuser { peer::spawn_among_others } else { peer::spawn };
        let child = spawn(&mut command, &Affinity::one(self.args.client_cpu));
        Running::new(child.map_err(|e| e.to_string())?)
    }

    /// Nanoseconds that the queues of each device have taken of the worker, as the daemon counts.
    fn busy(&self) -> Result<HashMap<String, f64>, String> {
        let control = control(self.folder.path());
        Ok(busy_of(&super::counts::shown(&self.manyring, &control)?))
    }
}

/// The time of each device's queues out of `manyring stats --json`.
fn busy_of(shown: &serde_json::Value) -> HashMap<String, f64> {
    let list = |value: &serde_json::Value| value.as_array().cloned().unwrap_or_default();
    let of_queue = |queue: &serde_json::Value| queue["counters"]["busy_ns"].as_f64();
    let of_device = |device: serde_json::Value| {
        let busy_ns = list(&device["queues"]).iter().filter_map(of_queue).sum();
        (device["name"].as_str().unwrap_or_default().to_owned(), busy_ns)
    };
    list(&shown["devices"]).into_iter().map(of_device).collect()
}

fn difference(before: &HashMap<String, f64>, after: &HashMap<String, f64>) -> HashMap<String, f64> {
    let less = |(name, busy): (&String, &f64)| {
        (name.clone(), busy - before.get(name).copied().unwrap_or(0.0))
    };
    after.iter().map(less).collect()
}

#[allow(clippy::cast_precision_loss, reason = "a rate needs no more than 52 bits")]
fn sample_of(result: &GuestResult, worker_share: f64, disturbed: bool) -> NeighbourSample {
    let seconds = result.seconds.max(1e-9);
    NeighbourSample {
        rate: result.count as f64 / seconds,
        p50_us: result.p50_us,
        p99_us: result.p99_us,
        max_us: result.max_us,
        p99_clock_us: result.p99_clock_us,
        waited_share: result.waited_seconds / seconds,
        worker_share,
        disturbed,
    }
}

/// A guest that runs; it is ended on drop.
struct Running {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Running {
    fn new(mut child: Child) -> Result<Self, String> {
        let output = child.stdout.take().ok_or("a guest without an output")?;
        Ok(Self { child, output: BufReader::new(output) })
    }

    /// Waits until something has come back to the guest.
    fn await_ready(&mut self) -> Result<(), String> {
        let mut line = String::new();
        self.output.read_line(&mut line).map_err(|e| e.to_string())?;
        if line.trim() == "ready" { Ok(()) } else { Err(self.last_words()) }
    }

    /// Tells the guest to go on to its next phase. One that has ended says why in its output.
    fn order(&mut self) {
        if let Some(input) = &mut self.child.stdin {
            let _ = input.write_all(b"next\n");
        }
    }

    fn finish(mut self) -> Result<GuestResult, String> {
        let mut text = String::new();
        self.output.read_to_string(&mut text).map_err(|e| e.to_string())?;
        serde_json::from_str(&text).map_err(|_| self.last_words())
    }

    fn last_words(&mut self) -> String {
        let mut text = String::new();
        if let Some(stderr) = &mut self.child.stderr {
            let _ = stderr.read_to_string(&mut text);
        }
        format!("the guest ended: {}", text.trim())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn name(device: usize) -> String {
    format!("guest{device}")
}

fn socket(folder: &Path, device: usize) -> PathBuf {
    folder.join(name(device))
}

fn control(folder: &Path) -> PathBuf {
    folder.join("control")
}

/// The daemon's configuration: one process with one worker; disks in memory, so that the worker
/// itself moves every byte, and ports that end nowhere.
fn config(folder: &Path) -> String {
    let control = control(folder);
    let mut text = "[daemon]\ndomains = 'one'\nworkers = 1\n".to_owned();
    let _ = writeln!(text, "control = '{}'", control.display());
    for GuestRole { device, deed, .. } in MEASURED.iter().chain(&abusers(None)) {
        let (kind, more) = match deed {
            Deed::Read | Deed::Kicks | Deed::Messages | Deed::FirstMessages => {
                ("blk", "memory = '64M'".to_owned())
            }
            Deed::Giants => ("blk", "memory = '1G'".to_owned()),
            Deed::Receive => ("net", format!("null = true\ngenerate = {FRAME}")),
            Deed::Transmit => ("net", "null = true".to_owned()),
        };
        let (name, socket) = (name(*device), socket(folder, *device));
        let socket = socket.display();
        let _ = write!(text, "\n[[{kind}]]\nname = '{name}'\nsocket_path = '{socket}'\n{more}\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_guest_has_a_device_of_its_own_and_equals_use_those_of_the_abusers() {
        let devices =
            |roles: &[GuestRole]| roles.iter().map(|role| role.device).collect::<Vec<_>>();
        assert_eq!(devices(&MEASURED), [0, 1, 2, 3, 4, 5]);
        assert_eq!(devices(&EQUALS), [6, 7]);
        for (abusers, equal) in ABUSERS.iter().zip(EQUALS) {
            assert!(abusers.iter().all(|role| role.device == equal.device), "{abusers:?}");
        }
        let text = config(Path::new("/f"));
        assert_eq!((text.matches("[[blk]]").count(), text.matches("[[net]]").count()), (6, 2));
        assert!(text.contains("workers = 1\ncontrol = '/f/control'"), "{text}");
        assert!(text.contains("name = 'guest4'\nsocket_path = '/f/guest4'\nnull = true\ngenerate"));
    }

    #[test]
    fn kicks_and_giants_abuse_unless_others_are_named_and_equals_stand_in_for_the_rest() {
        for (only, deeds) in [
            (None, [Deed::Kicks, Deed::Giants]),
            (Some("kicks"), [Deed::Kicks, Deed::Read]),
            (Some("messages"), [Deed::Messages, Deed::Read]),
            (Some("at once"), [Deed::FirstMessages, Deed::Read]),
            (Some("GiB"), [Deed::Read, Deed::Giants]),
            (Some("nobody"), [Deed::Read, Deed::Read]),
        ] {
            assert_eq!(abusers(only).map(|role| role.deed), deeds, "{only:?}");
        }
    }

    #[test]
    fn the_time_of_a_guest_is_that_of_all_queues_of_its_device() {
        let shown = |busy: u64| {
            serde_json::json!({"devices": [
                {"name": "guest0", "queues": [{"counters": {"busy_ns": 5}}]},
                {"name": "guest6", "queues": [
                    {"counters": {"busy_ns": busy}}, {"counters": {"busy_ns": 2 * busy}}]},
            ]})
        };
        let taken = difference(&busy_of(&shown(100)), &busy_of(&shown(250)));
        assert_eq!((taken["guest0"], taken["guest6"]), (0.0, 450.0));
    }
}
