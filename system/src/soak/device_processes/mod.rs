//! The soak of device processes: guests of User Mode Linux and QEMU whose fio compares all that it
//! reads, whose iperf3 sends and receives, and that the host pings, while their device processes
//! are killed, the daemon is killed, or the next daemon takes over
//! (`docs/design/0021-device-processes.md`).

mod deaths;
mod ground;
mod migrations;
mod pings;
mod steps;
mod unit;

use super::random::Random;
use super::{Kills, fresh_logs};
use crate::command::wait_for;
use crate::daemon::{Daemon, DaemonOptions};
use crate::guest::Kind;
use crate::{Context, Outcome, check, cleanup, packages};
use deaths::Deaths;
use ground::{Ground, LIMIT, Tenant};
pub use migrations::run as run_migrations;
use rustix::process::{Signal, kill_process};
use std::path::Path;
use std::time::{Duration, Instant};
pub use unit::run as run_supervisor_of_systemd;

/// Words of a daemon's log that nothing of this may cause. Front-ends keep their sessions.
const FAULTS: [&str; 4] = [" ERROR ", "panicked", "queue stopped: ", "session closed"];
/// A device process that has lived longer has no pause before the next one starts.
const LONG_LIFE_MS: u64 = 2000;
/// The longest pauses of a kind.
#[derive(Clone, Copy, Debug, Default)]
struct Worst {
    count: u32,
    longest: Duration,
    sum: Duration,
}

impl Worst {
    fn note(&mut self, pause: Duration) {
        self.count += 1;
        self.longest = self.longest.max(pause);
        self.sum += pause;
    }

    fn say(&self, what: &str) {
        if self.count > 0 {
            let mean = (self.sum / self.count).as_millis();
            let longest = self.longest.as_millis();
            println!(
                "soak: {what}: {} times, {mean} ms at the mean, {longest} ms at most",
                self.count
            );
        }
    }
}

/// Kills device processes under a guest of User Mode Linux and one of QEMU, in turn.
///
/// # Errors
/// A guest read what it had not written, lost a session or has no answer; or the log has a fault.
pub fn run_device_processes(kills: &Kills) -> Outcome {
    println!("soak: {} kills of device processes, seed {}", kills.count, kills.seed);
    let (mut ground, daemon) = begin(kills, &[Kind::Uml, Kind::Qemu])?;
    let mut random = Random::new(kills.seed);
    let (mut long, mut brief) = (Worst::default(), Worst::default());
    let mut lives = vec![Instant::now(); ground.tenants.len()];
    for kill in 1..=kills.count {
        let turn = kill as usize % ground.tenants.len();
        let tenant = &ground.tenants[turn];
        // Now and then a device process dies again as soon as it has started.
        let is_brief = random.below(6) == 0;
        let life = match is_brief {
            true => random.below(300),
            false => LONG_LIFE_MS + 50 + random.below(400),
        };
        let until = lives[turn] + Duration::from_millis(life);
        std::thread::sleep(until.saturating_duration_since(Instant::now()));
        let (starts, killed) = (device_processes(&daemon, tenant.name)?, Instant::now());
        let last = starts
            .last()
            .and_then(|device_process| cleanup::pid(*device_process))
            .ok_or("no device process runs")?;
        kill_process(last, Signal::KILL).context("the device process")?;
        wait_for("the next device process", LIMIT, || {
            Ok((device_processes(&daemon, tenant.name)?.len() > starts.len()).then_some(()))
        })?;
        lives[turn] = Instant::now();
        tenant.pings()?.wait_beyond(lives[turn])?;
        let worst = if is_brief { &mut brief } else { &mut long };
        worst.note(tenant.pings()?.worst_since(killed));
        let before = requests(&daemon, tenant.name)?;
        wait_for("the next request of a disk", LIMIT, || {
            Ok((requests(&daemon, tenant.name)? > before).then_some(()))
        })?;
        if kill % 10 == 0 {
            println!("soak: {kill} kills");
        }
    }
    long.say("no ping was answered after the end of a device process");
    brief.say("no ping was answered after the end of a device process that had just begun");
    finish(&mut ground, daemon, 0)
}

/// Kills the daemon, with all of its device processes, under a guest of QEMU, which connects again.
///
/// # Errors
/// The guest read what it had not written, or has no answer; a device process outlives its daemon;
/// or the log has a fault.
pub fn run_supervisor(kills: &Kills) -> Outcome {
    println!(
        "soak: {} kills of the daemon and its device processes, seed {}",
        kills.count, kills.seed
    );
    let (mut ground, mut daemon) = begin(kills, &[Kind::Qemu])?;
    let mut random = Random::new(kills.seed);
    let mut pauses = Worst::default();
    for kill in 1..=kills.count {
        // QEMU before 8.2 never uses a socket again that it loses while it connects.
        std::thread::sleep(Duration::from_millis(1000 + random.below(1500)));
        let log_before = daemon.log()?.len();
        let (device_processes, killed) = (all_device_processes(&daemon)?, Instant::now());
        daemon.crash()?;
        daemon = ground.serve()?;
        for device_process in device_processes {
            wait_for("the end of a device process without a daemon", LIMIT, || {
                Ok((!Path::new(&format!("/proc/{device_process}")).exists()).then_some(()))
            })?;
        }
        wait_for("QEMU to connect again", LIMIT, || {
            let log = daemon.log()?;
            let life = log.get(log_before..).unwrap_or_default();
            Ok((life.matches("front-end connected").count() >= 2).then_some(()))
        })?;
        let pings = ground.tenants[0].pings()?;
        pings.wait_beyond(Instant::now())?;
        pauses.note(pings.worst_since(killed));
        if kill % 10 == 0 {
            println!("soak: {kill} kills");
        }
    }
    pauses.say("no ping was answered after the end of the daemon");
    finish(&mut ground, daemon, 0)
}

/// Has daemons take over from each other under a guest of User Mode Linux and one of QEMU; then
/// daemons die at each step of a takeover, at last those whose front-ends connect again.
///
/// # Errors
/// As [`run_device_processes`]; or a daemon did not take over, or after a death nobody went on.
pub fn run_takeovers(kills: &Kills) -> Outcome {
    packages::need("the deaths at each step", &["strace"])?;
    println!("soak: {} takeovers, seed {}", kills.count, kills.seed);
    let (mut ground, mut daemon) = begin(kills, &[Kind::Uml, Kind::Qemu])?;
    let mut random = Random::new(kills.seed);
    let mut taken = Worst::default();
    let next = next_of(&ground);
    for takeover in 1..=kills.count {
        std::thread::sleep(Duration::from_millis(LONG_LIFE_MS + random.below(500)));
        let began = Instant::now();
        daemon = daemon.taken_over_by(&next)?;
        note_pauses(&ground, began, &mut taken)?;
        if takeover % 10 == 0 {
            println!("soak: {takeover} takeovers");
        }
    }
    taken.say("no ping was answered while the next daemon took over");
    let mut survived = Worst::default();
    let (mut deaths, daemon) = Deaths::begin(&ground, daemon, next)?;
    let daemon = deaths.all(daemon, &deaths::SURVIVED, &mut random, &mut survived)?;
    survived.say("no ping was answered while a daemon died at a step");
    finish(&mut ground, daemon, deaths::SURVIVED.len())?;
    // A guest of User Mode Linux does not connect again.
    let logs = fresh_logs(kills.logs.join("crashes"))?;
    let (mut ground, daemon) = begin(&Kills { logs, ..kills.clone() }, &[Kind::Qemu])?;
    let mut crashed = Worst::default();
    let (mut deaths, daemon) = Deaths::begin(&ground, daemon, next_of(&ground))?;
    let daemon = deaths.all(daemon, &deaths::CRASHES, &mut random, &mut crashed)?;
    crashed.say("no ping was answered while the only daemon died at a step");
    finish(&mut ground, daemon, deaths::CRASHES.len())
}

/// How to start a daemon that takes over.
fn next_of(ground: &Ground) -> DaemonOptions {
    ground.options(&["--takeover", &ground.control().display().to_string()])
}

fn note_pauses(ground: &Ground, began: Instant, worst: &mut Worst) -> Outcome {
    let now = Instant::now();
    for tenant in &ground.tenants {
        let pings = tenant.pings()?;
        pings.wait_beyond(now)?;
        worst.note(pings.worst_since(began));
    }
    Ok(())
}

/// Serves and boots guests, and says how they are before anything is killed.
fn begin(kills: &Kills, kinds: &[Kind]) -> Outcome<(Ground, Daemon)> {
    packages::need("the soak of device processes", &["fio", "gcc", "binutils", "iperf3"])?;
    let mut ground = Ground::prepare(kills, kinds)?;
    let daemon = ground.serve()?;
    ground.boot()?;
    let began = Instant::now();
    std::thread::sleep(Duration::from_millis(2 * LONG_LIFE_MS));
    for Tenant { name, .. } in &ground.tenants {
        check(device_processes(&daemon, name)?.len() == 1, || {
            format!("{name} is not in one device process")
        })?;
    }
    let mut before = Worst::default();
    note_pauses(&ground, began, &mut before)?;
    before.say("no ping was answered before anything was killed");
    Ok((ground, daemon))
}

/// Ends the guests and the daemon, and says what the guests saw.
fn finish(ground: &mut Ground, daemon: Daemon, deaths: usize) -> Outcome {
    for tenant in &mut ground.tenants {
        let report = tenant.finish()?;
        println!(
            "soak: {}: {} runs of fio compared all that they read, 0 wrong, 0 errors; the slowest \
             request took {} ms, {} ms before anything was killed",
            tenant.name, report.runs, report.worst, report.calm
        );
    }
    let log = daemon.log()?;
    let is_fault = |line: &&str| FAULTS.iter().any(|fault| line.contains(fault));
    let faults: Vec<_> = log.lines().filter(is_fault).collect();
    println!("soak: {} faults in the log; {deaths} daemons died at a step", faults.len());
    check(faults.is_empty(), || format!("the log has faults, the first: {}", faults[0]))?;
    daemon.stop()
}

/// Requests of a guest's disk that were served so far.
fn requests(daemon: &Daemon, name: &str) -> Outcome<u64> {
    let queues = daemon.queues_of(&format!("{name}-disk"))?;
    queues.iter().map(|queue| queue.value("requests")).sum()
}

/// The processes of all device processes of this name that daemons have started, in that order.
fn device_processes(daemon: &Daemon, name: &str) -> Outcome<Vec<u32>> {
    let device_process = format!("process=\"{name}\"");
    let log = daemon.log()?;
    let starts = log.lines().filter(|line| line.contains("device process started"));
    let of_it = starts.filter(|line| line.contains(&device_process));
    Ok(of_it.filter_map(|line| line.rsplit_once("pid=")?.1.trim().parse().ok()).collect())
}

/// The processes of all device processes that run.
fn all_device_processes(daemon: &Daemon) -> Outcome<Vec<u32>> {
    let log = daemon.log()?;
    let starts = log.lines().filter(|line| line.contains("device process started"));
    let pids = starts.filter_map(|line| line.rsplit_once("pid=")?.1.trim().parse().ok());
    Ok(pids.filter(|pid: &u32| Path::new(&format!("/proc/{pid}")).exists()).collect())
}
