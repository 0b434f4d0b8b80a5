//! The soak: one daemon, eight guests, four of them hostile; nobody may notice the others.
//!
//! Four guests behave well: they write, send, and compare every byte that comes back. Four are
//! hostile: they change their tricks every second and are killed in the middle of them. Each guest
//! is a process (`guest`), the daemon a child with disks on files and taps in a network namespace
//! (`stage`). The end is a report: what the well-behaved saw, and what the daemon still holds
//! (`traces`) when everybody has left. Two other soaks kill: the daemon or a disk's server
//! (`kills`), and device processes (`device processes`). Every number that looks random comes from
//! one seed.

mod beside;
mod device_processes;
mod guest;
mod kills;
mod processes;
mod random;
mod scanners;
mod stage;
mod traces;

pub use device_processes::{
    run_device_processes, run_migrations, run_supervisor, run_supervisor_of_systemd, run_takeovers,
};
pub use guest::run as run_guest;
pub(crate) use kills::COMPARE;
pub use kills::{Kills, Store, run as run_kills, run_stores as run_store_kills};
pub use scanners::Scanners;

use crate::{Context, Outcome, check};
use processes::{Behaved, Hostiles, Report};
use random::Random;
use stage::Stage;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use traces::Traces;

/// How to soak.
#[derive(Clone, Debug)]
pub struct Options {
    /// The daemon.
    pub binary: PathBuf,
    /// How long the hostile guests are there.
    pub time: Duration,
    /// The seed of the tricks, their order, and the times of the kills.
    pub seed: u64,
    /// Only these tricks, with commas between; all of them if it is empty.
    pub tricks: String,
    /// Where the logs of daemon and guests go; the folder is there.
    pub logs: PathBuf,
    /// The longest delay that is allowed, in place of 50 ms, if a machine is too busy for it.
    pub promise: Duration,
}

impl Options {
    /// The promise that the project makes.
    pub const PROMISE: Duration = guest::PROMISE;
}

/// Soaks, and prints the report.
///
/// # Errors
/// A promise was broken; the report says which.
pub fn run(options: &Options) -> Outcome {
    guest::check_names(&options.tricks)?;
    println!("soak: {} s, seed {}", options.time.as_secs(), options.seed);
    let mut stage = Stage::new(options)?;
    stage.serve_everybody()?;
    // Memory that a worker allocates when it first serves is no trace of a guest.
    std::thread::sleep(Duration::from_millis(500));
    let before = Traces::of(stage.daemon_pid())?;
    let mut random = Random::new(options.seed);
    let mut behaved = Behaved::start(&stage, &mut random)?;
    println!("soak: four guests are well-behaved, four are hostile from now on");
    let end = soak(options, &mut stage, &mut behaved, &mut random);
    let mut breaks: Vec<String> = end.err().into_iter().collect();
    let (reports, complaints) = behaved.finish();
    breaks.extend(complaints);
    for report in &reports {
        println!("soak: {report}");
        breaks.extend(report.breaks(options.promise));
    }
    breaks.extend(afterwards(&mut stage, &before));
    for sentence in &breaks {
        println!("soak: BROKEN: {sentence}");
    }
    if breaks.is_empty() {
        stage.stop()?;
    }
    let sentence =
        || format!("{} promises are broken; repeat with --seed {}", breaks.len(), options.seed);
    check(breaks.is_empty(), sentence)
}

/// Lets the hostile guests play for the time that was asked for.
fn soak(
    options: &Options,
    stage: &mut Stage,
    behaved: &mut Behaved,
    random: &mut Random,
) -> Outcome {
    let mut hostiles = Hostiles::new(stage, options, random)?;
    let start = Instant::now();
    let mut minutes = 1;
    let outcome = loop {
        let passed = start.elapsed();
        if passed >= options.time {
            break Ok(());
        }
        let going = stage.check_running().and_then(|()| behaved.check_running());
        if let Err(sentence) = going.and_then(|()| hostiles.turn(stage)) {
            break Err(format!("after {} s: {sentence}", passed.as_secs()));
        }
        if passed >= Duration::from_secs(60 * minutes) {
            println!("soak: {minutes} min, {} hostile sessions were killed", hostiles.killed());
            minutes += 1;
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    println!(
        "soak: {} hostile guests came, {} of them were killed",
        hostiles.started(),
        hostiles.killed()
    );
    outcome
}

/// Everybody has left: what does the daemon still hold, does it rest, does it serve?
fn afterwards(stage: &mut Stage, before: &Traces) -> Vec<String> {
    let mut breaks = Vec::new();
    let mut judge = |what: &str, outcome: Outcome| {
        if let Err(sentence) = outcome {
            breaks.push(format!("{what}: {sentence}"));
        }
    };
    if let Err(sentence) = stage.check_running() {
        judge("afterwards", Err(sentence));
        return breaks;
    }
    judge("a new guest", stage.serve_everybody());
    let pid = stage.daemon_pid();
    judge("left behind", traces::settle(pid, before, &stage.logs));
    match Traces::of(pid) {
        Ok(after) => println!("soak: before: {before}\nsoak: after:  {after}"),
        Err(sentence) => judge("traces", Err(sentence)),
    }
    judge("at rest", traces::rests(pid));
    breaks
}

/// Says what a guest saw, and which promises that breaks.
impl Report {
    fn breaks(&self, promise: Duration) -> Vec<String> {
        let mut breaks = Vec::new();
        let name = self.name();
        let number = |field| self.number(field);
        if number("wrong") > 0 {
            let (wrong, first) = (number("wrong"), self.text("first_wrong"));
            breaks.push(format!("{name}: {wrong} times wrong, first: {first}"));
        }
        let worst = Duration::from_micros(number("worst_us"));
        if worst > promise {
            let (took, what) = (number("worst_took_us") / 1000, self.text("worst"));
            let left = worst.as_millis();
            let (why, count) = (self.text("worst_why"), number("broken").max(1));
            breaks.push(format!(
                "{name}: {what} took {took} ms, {left} ms of them for no reason of the host's \
                 ({why}); {count} such requests"
            ));
        }
        if number("count") == 0 || number("lost") * 5 > number("count") {
            let (lost, count) = (number("lost"), number("count"));
            breaks.push(format!("{name}: {lost} of {count} frames or requests are lost"));
        }
        breaks
    }
}

/// A folder for the logs of a soak that somebody asked for: it stays.
///
/// # Errors
/// It cannot be made.
pub fn fresh_logs(folder: PathBuf) -> Outcome<PathBuf> {
    if folder.exists() {
        std::fs::remove_dir_all(&folder).context(folder.display())?;
    }
    std::fs::create_dir_all(&folder).context(folder.display())?;
    Ok(folder)
}
