//! The guests as processes: started, watched, killed in the middle, and asked what they saw.

use super::Options;
use super::guest::{Orders, Role};
use super::random::Random;
use super::stage::{ROLES, Stage, numbers};
use crate::command::wait_for;
use crate::{Context, Outcome, check, cleanup};
use serde_json::Value;
use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

/// Longest time for a guest to begin, or to compare a whole disk and leave.
const TIMEOUT: Duration = Duration::from_secs(120);

/// A guest's process; dropped, it is killed.
#[derive(Debug)]
struct Process(Child);

impl Process {
    /// Starts a guest; what it says is appended to the file `log`.
    fn start(stage: &Stage, orders: &Orders, log: &Path) -> Outcome<Self> {
        let out = OpenOptions::new().create(true).append(true).open(log).context(log.display())?;
        let errors = out.try_clone().context(log.display())?;
        let mut command = stage.guest(orders)?;
        let child = command.stdout(out).stderr(errors).spawn().context("a guest")?;
        cleanup::adopt(child.id());
        Ok(Self(child))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
        cleanup::forget(self.0.id());
    }
}

/// The four that behave well.
#[derive(Debug)]
pub(super) struct Behaved(Vec<One>);

#[derive(Debug)]
struct One {
    name: String,
    process: Process,
    log: PathBuf,
}

impl Behaved {
    /// Starts them, and waits until all are at work.
    pub(super) fn start(stage: &Stage, random: &mut Random) -> Outcome<Self> {
        let mut all = Vec::new();
        for number in numbers(|role| matches!(role, Role::Blk | Role::Net)) {
            let index = usize::from(number);
            let (role, seed, daemon) = (ROLES[index], random.next(), stage.daemon_pid());
            let more = match role {
                Role::Blk => stage.image(index).display().to_string(),
                _ => String::new(),
            };
            let socket = stage.socket(index);
            let orders = Orders { role, socket, seed, daemon, number, more };
            let log = stage.logs.join(format!("guest-{number}.log"));
            File::create(&log).context(log.display())?;
            let name = format!("guest {number} ({role:?})");
            all.push(One { name, process: Process::start(stage, &orders, &log)?, log });
        }
        let mut behaved = Self(all);
        wait_for("the well-behaved guests' start", TIMEOUT, || {
            behaved.check_running()?;
            let ready = behaved.0.iter().map(One::said).collect::<Outcome<Vec<_>>>()?;
            Ok(ready.iter().all(|text| text.contains("ready")).then_some(()))
        })?;
        Ok(behaved)
    }

    /// Fails if one of them has ended.
    pub(super) fn check_running(&mut self) -> Outcome {
        for one in &mut self.0 {
            if one.process.0.try_wait().context(&one.name)?.is_some() {
                return Err(format!("{} gave up", one.name));
            }
        }
        Ok(())
    }

    /// Asks them to end. Gives what they saw, and what those say that give no report.
    pub(super) fn finish(mut self) -> (Vec<Report>, Vec<String>) {
        for one in &mut self.0 {
            drop(one.process.0.stdin.take());
        }
        let (mut reports, mut complaints) = (Vec::new(), Vec::new());
        for one in self.0 {
            match one.finish() {
                Ok(report) => reports.push(report),
                Err(sentence) => complaints.push(sentence),
            }
        }
        (reports, complaints)
    }
}

impl One {
    fn said(&self) -> Outcome<String> {
        std::fs::read_to_string(&self.log).context(self.log.display())
    }

    fn finish(mut self) -> Outcome<Report> {
        let end = format!("the end of {}", self.name);
        let ended = wait_for(&end, TIMEOUT, || self.process.0.try_wait().context(&self.name))?;
        let said = self.said()?;
        let last = said.lines().last().unwrap_or_default();
        check(ended.success(), || format!("{} gave up: {last}", self.name))?;
        let values = serde_json::from_str(last).context(format!("{}: {last}", self.name))?;
        Ok(Report { name: self.name, values })
    }
}

/// The report of a well-behaved guest.
#[derive(Debug)]
pub(super) struct Report {
    name: String,
    values: Value,
}

impl Report {
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// A number of the report; 0 if it has none of that name.
    pub(super) fn number(&self, field: &str) -> u64 {
        self.values[field].as_u64().unwrap_or(0)
    }

    pub(super) fn text(&self, field: &str) -> &str {
        self.values[field].as_str().unwrap_or_default()
    }
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ms = |field| {
            let micros = Duration::from_micros(self.number(field));
            format!("{:.2} ms", micros.as_secs_f64() * 1000.0)
        };
        let number = |field| self.number(field);
        write!(
            f,
            "{}: {} {}, {} wrong",
            self.name,
            number("count"),
            self.text("what"),
            number("wrong")
        )?;
        if self.text("what") == "frames" {
            write!(f, ", {} lost", number("lost"))?;
        }
        write!(f, "; p50 {}, p99 {}, slowest {}", ms("p50_us"), ms("p99_us"), ms("max_us"))?;
        write!(
            f,
            "; {} over the promise by the clock, {} of them",
            number("late"),
            number("broken")
        )?;
        write!(f, " for no reason of the host's (worst {})", ms("worst_us"))?;
        write!(f, "; its threads waited {} ms for a CPU", number("run_delay_ms"))?;
        match self.text("what") {
            "requests" => write!(f, ", the host's disk was late for {} ms", number("disk_late_ms")),
            _ => Ok(()),
        }
    }
}

/// The four hostile guests: as soon as one is gone, the next takes its place.
#[derive(Debug)]
pub(super) struct Hostiles {
    slots: Vec<Slot>,
    tricks: String,
    started: u64,
    killed: u64,
}

#[derive(Debug)]
struct Slot {
    number: u8,
    /// Seeds and lives of its guests: the same for the same seed of the soak, however long a
    /// process takes to start.
    random: Random,
    living: Option<(Process, Instant)>,
}

impl Hostiles {
    /// Starts them.
    pub(super) fn new(stage: &Stage, options: &Options, random: &mut Random) -> Outcome<Self> {
        let hostile = |role| matches!(role, Role::HostileBlk | Role::HostileNet);
        let slot = |number| Slot { number, random: Random::new(random.next()), living: None };
        let slots = numbers(hostile).map(slot).collect();
        let tricks = options.tricks.clone();
        let mut hostiles = Self { slots, tricks, started: 0, killed: 0 };
        hostiles.turn(stage)?;
        Ok(hostiles)
    }

    /// Kills those whose time is over, in the middle of whatever they do, and starts others.
    pub(super) fn turn(&mut self, stage: &Stage) -> Outcome {
        let now = Instant::now();
        for slot in &mut self.slots {
            if let Some((process, end)) = &mut slot.living {
                // One that ended by itself was cut off from its own memory.
                let is_gone = process.0.try_wait().context("a hostile guest")?.is_some();
                if !is_gone && now < *end {
                    continue;
                }
                self.killed += u64::from(!is_gone);
                slot.living = None;
            }
            let index = usize::from(slot.number);
            let orders = Orders {
                role: ROLES[index],
                socket: stage.socket(index),
                seed: slot.random.next(),
                daemon: stage.daemon_pid(),
                number: slot.number,
                more: self.tricks.clone(),
            };
            let log = stage.logs.join(format!("guest-{}.log", slot.number));
            let process = Process::start(stage, &orders, &log)?;
            let life = Duration::from_millis(1500 + slot.random.below(5000));
            slot.living = Some((process, now + life));
            self.started += 1;
        }
        Ok(())
    }

    pub(super) fn started(&self) -> u64 {
        self.started
    }

    pub(super) fn killed(&self) -> u64 {
        self.killed
    }
}
