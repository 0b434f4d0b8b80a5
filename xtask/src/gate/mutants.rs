//! `cargo xtask mutants`: breaks the code in one place at a time and counts what the tests notice.
//!
//! Not part of the gate: each mutant costs a build and a test run. Each crate is tested by its own
//! tests only, and the engine by those of the devices that it runs too.

use super::tools;
use crate::cargo::cargo;
use manyring_system::guest::cache;
use manyring_system::{Context, Outcome, check};
use std::path::Path;
use std::process::Stdio;
use std::time::{SystemTime, UNIX_EPOCH};

/// The files that must be well tested: a guest's or a front-end's words are judged here.
const JUDGES: &[&str] = &[
    "crates/wire/src/**/*.rs",
    "crates/memory/src/*.rs",
    "crates/queue/src/**/*.rs",
    "crates/transport/src/vhost_user/session.rs",
    "crates/transport/src/vhost_user/requests.rs",
    "crates/device/src/blk/virtio.rs",
    "crates/engine/src/running/epoch.rs",
    "crates/engine/src/running/life.rs",
    "crates/engine/src/running/notifier.rs",
    "crates/engine/src/running/mod.rs",
    "crates/engine/src/running/table.rs",
];
/// The engine runs queues of devices: what a guest sees of a running queue is tested with a device.
const ENGINE: &str = "crates/engine/";
const ENGINE_TESTS: [&str; 4] =
    ["--test-package", "manyring-engine", "--test-package", "manyring-device"];
/// Code that only another build compiles: loom's words of a ring.
const ELSEWHERE: &str = r"\bmodel::";
/// Mutants of a sample: some minutes.
const SAMPLE: u64 = 40;
/// Percent of the mutants that can be noticed.
const GOAL_PERCENT: u64 = 95;
/// Seconds after which a test run counts as hanging: the longest takes a tenth of it.
const TEST_SECONDS: &str = "120";
/// Mutants that no test can tell from the code, each with the reason.
const EQUIVALENTS: &str = "xtask/mutants-equivalent.txt";

/// Which mutants are tried.
#[derive(Debug, clap::Args)]
pub(crate) struct Which {
    /// Only this crate, by its folder's name.
    #[arg(value_name = "CRATE")]
    only: Option<String>,
    /// Every mutant, not a sample.
    #[arg(long)]
    all: bool,
    /// Repeats the sample that a former run has printed.
    #[arg(long, value_name = "N", conflicts_with = "all")]
    seed: Option<u64>,
}

pub(crate) fn run(which: &Which) -> Outcome {
    let equivalents = Equivalent::read(EQUIVALENTS)?;
    tools::need("mutants", "27.1.0")?;
    let files = files(which.only.as_deref())?;
    let cache = cache()?.join("mutants");
    // The copy of the tree that a run which was killed has left.
    let copies = cache.join("copies");
    let _ = std::fs::remove_dir_all(&copies);
    std::fs::create_dir_all(&copies).context(copies.display())?;
    let shard = if which.all { None } else { sample(&files, which.seed)? };
    let (engine, others): (Vec<_>, Vec<_>) = files.into_iter().partition(|g| g.starts_with(ENGINE));
    let mut score = Score::default();
    for (files, tests) in [(others, &[][..]), (engine, &ENGINE_TESTS[..])] {
        if files.is_empty() {
            continue;
        }
        let mut command = mutants(&files)?;
        command.env("TMPDIR", &copies).env("CARGO_PROFILE_DEV_DEBUG", "none").args(tests);
        // The build of the copies goes with them.
        command.env_remove("CARGO_TARGET_DIR").arg("--output").arg(&cache);
        command.args(["--jobs", "1", "--timeout", TEST_SECONDS]);
        command.args(["--cap-lints", "true", "--no-times"]);
        if let Some(shard) = &shard {
            // Each part has mutants of every file.
            command.args(["--sharding", "round-robin", "--shard", shard]);
        }
        let status = command.stdin(Stdio::null()).status().context("cargo mutants")?;
        // 2: some were missed. 3: some ran into the time limit, which is noticed too.
        check(matches!(status.code(), Some(0 | 2 | 3)), || format!("cargo mutants: {status}"))?;
        score.add(Score::read(&cache.join("mutants.out"), &equivalents)?);
    }
    score.print();
    check(score.percent() >= GOAL_PERCENT, || {
        format!("{} % of the mutants were noticed, {GOAL_PERCENT} % is the goal", score.percent())
    })
}

/// The globs to look at: those of [`JUDGES`], or a whole crate that has none of them.
fn files(only: Option<&str>) -> Outcome<Vec<String>> {
    let Some(name) = only else { return Ok(JUDGES.iter().map(|&glob| glob.to_owned()).collect()) };
    let folder = format!("crates/{name}/");
    check(Path::new(&folder).is_dir(), || format!("there is no crate {name} in crates/"))?;
    let judges: Vec<String> =
        JUDGES.iter().filter(|g| g.starts_with(&folder)).map(|&glob| glob.to_owned()).collect();
    Ok(if judges.is_empty() { vec![format!("{folder}src/**/*.rs")] } else { judges })
}

/// `cargo mutants` on some files.
fn mutants(files: &[String]) -> Outcome<std::process::Command> {
    let mut command = cargo(&["mutants", "--colors", "never"]);
    command.env("PATH", tools::path()?).args(["--exclude-re", ELSEWHERE]);
    for glob in files {
        command.args(["--file", glob]);
    }
    Ok(command)
}

/// Which part of all mutants is the sample; none: all of them.
fn sample(files: &[String], seed: Option<u64>) -> Outcome<Option<String>> {
    let list = manyring_system::command::text(mutants(files)?.arg("--list"))?;
    let parts = (list.lines().count() as u64).div_ceil(SAMPLE);
    if parts < 2 {
        return Ok(None);
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).context("clock")?;
    let seed = seed.unwrap_or(now.as_secs());
    println!("xtask: one of {parts} parts of the mutants, seed {seed}; --all tries every one");
    Ok(Some(format!("{}/{parts}", seed % parts)))
}

/// A mutant that no test can tell from the code.
#[derive(Debug, PartialEq, Eq)]
struct Equivalent {
    file: String,
    /// As cargo-mutants says it: `replace | with ^ in Offloads::of_guest`.
    what: String,
    /// A part of the line that is mutated; empty: any line of the function.
    at: String,
}

impl Equivalent {
    fn read(path: &str) -> Outcome<Vec<Self>> {
        Self::parse(&std::fs::read_to_string(path).context(path)?)
    }

    /// Paragraphs of a mutant's name, `at:` a part of its line, `why:` the reason.
    fn parse(text: &str) -> Outcome<Vec<Self>> {
        let mut all: Vec<Self> = Vec::new();
        for paragraph in text.split("\n\n") {
            let mut lines = paragraph.lines().map(str::trim).filter(|l| !l.starts_with('#'));
            let Some(name) = lines.next() else { continue };
            let wrong = || format!("{EQUIVALENTS}: {name}: FILE: WHAT, `at: ..`, `why: ..`");
            let (file, what) = name.split_once(": ").ok_or_else(wrong)?;
            let (mut at, mut has_reason) = (String::new(), false);
            for line in lines {
                if let Some(part) = line.strip_prefix("at: ") {
                    part.clone_into(&mut at);
                }
                has_reason |= line.starts_with("why: ");
            }
            check(has_reason, wrong)?;
            all.push(Self { file: file.to_owned(), what: what.to_owned(), at });
        }
        Ok(all)
    }

    /// True if this is the mutant of a name: `FILE:LINE:COLUMN: WHAT`.
    fn is(&self, name: &str, line_of: impl Fn(&str, usize) -> Option<String>) -> bool {
        let Some((place, what)) = name.split_once(": ") else { return false };
        let mut parts = place.split(':');
        let (file, line) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
        if (file, what) != (self.file.as_str(), self.what.as_str()) {
            return false;
        }
        let line = line.parse().ok().and_then(|number| line_of(file, number));
        self.at.is_empty() || line.is_some_and(|text| text.contains(&self.at))
    }
}

/// Line `number` of a file, from 1 on.
fn line_of(file: &str, number: usize) -> Option<String> {
    let text = std::fs::read_to_string(file).ok()?;
    text.lines().nth(number.checked_sub(1)?).map(str::to_owned)
}

/// The outcome of the mutants.
#[derive(Debug, Default)]
struct Score {
    caught: usize,
    timeouts: usize,
    unviable: usize,
    equivalent: usize,
    missed: Vec<String>,
    /// Listed as equivalent, and yet noticed.
    wrongly_listed: Vec<String>,
}

impl Score {
    fn read(folder: &Path, equivalents: &[Equivalent]) -> Outcome<Self> {
        let names = |file: &str| -> Outcome<Vec<String>> {
            let path = folder.join(file);
            let text = std::fs::read_to_string(&path).context(path.display())?;
            Ok(text.lines().map(str::to_owned).collect())
        };
        let is_listed = |name: &String| equivalents.iter().any(|e| e.is(name, line_of));
        let (caught, timeouts) = (names("caught.txt")?, names("timeout.txt")?);
        let (listed, missed): (Vec<_>, Vec<_>) =
            names("missed.txt")?.into_iter().partition(is_listed);
        Ok(Self {
            caught: caught.len(),
            timeouts: timeouts.len(),
            unviable: names("unviable.txt")?.len(),
            equivalent: listed.len(),
            missed,
            wrongly_listed: caught.into_iter().filter(is_listed).collect(),
        })
    }

    fn add(&mut self, other: Self) {
        let Self { caught, timeouts, unviable, equivalent, missed, wrongly_listed } = other;
        self.caught += caught;
        self.timeouts += timeouts;
        self.unviable += unviable;
        self.equivalent += equivalent;
        self.missed.extend(missed);
        self.wrongly_listed.extend(wrongly_listed);
    }

    /// Percent noticed of those that can be, rounded down.
    fn percent(&self) -> u64 {
        let noticed = (self.caught + self.timeouts) as u64;
        let all = noticed + self.missed.len() as u64;
        (noticed * 100).checked_div(all).unwrap_or(100)
    }

    fn print(&self) {
        let Self { caught, timeouts, unviable, equivalent, missed, wrongly_listed } = self;
        println!("\n{caught} caught, {} missed, {timeouts} timeouts", missed.len());
        println!("{unviable} unviable, {equivalent} equivalent: not counted");
        println!("{} % of what can be noticed was noticed", self.percent());
        for name in missed {
            println!("missed: {name}");
        }
        for name in wrongly_listed {
            println!("listed as equivalent, but noticed: {name}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: &str = "# Equivalents

        a/b.rs: replace | with ^ in F::g
          at: x | y
          why: no bit is in both.

        a/c.rs: replace < with <= in h
          why: the same.";

    #[test]
    fn equivalents_are_told_by_file_function_and_line() {
        let all = Equivalent::parse(LIST).unwrap();
        assert_eq!(all.len(), 2);
        let line = |_: &str, number| Some(if number == 7 { "let z = x | y;" } else { "" }.into());
        let is = |name: &str| all.iter().any(|e| e.is(name, line));
        assert!(is("a/b.rs:7:3: replace | with ^ in F::g"));
        assert!(!is("a/b.rs:8:3: replace | with ^ in F::g"), "another line");
        assert!(!is("a/b.rs:7:3: replace | with & in F::g"), "another mutant");
        assert!(is("a/c.rs:8:3: replace < with <= in h"), "any line");
    }

    #[test]
    fn an_equivalent_without_a_reason_is_refused() {
        assert!(Equivalent::parse("a/b.rs: replace | with ^ in F::g\n  at: x").is_err());
        assert!(Equivalent::parse("a/b.rs\n  why: so.").is_err());
    }

    #[test]
    fn the_list_of_the_tree_is_read() {
        let path = format!("{}/../{EQUIVALENTS}", env!("CARGO_MANIFEST_DIR"));
        assert!(Equivalent::read(&path).is_ok());
    }

    #[test]
    fn the_score_counts_what_can_be_noticed() {
        let mut score = Score { caught: 18, timeouts: 1, unviable: 5, ..Score::default() };
        assert_eq!(score.percent(), 100);
        score.missed.push("one".into());
        assert_eq!(score.percent(), 95);
        assert_eq!(Score::default().percent(), 100);
        score.add(Score { caught: 10, missed: vec!["two".into()], ..Score::default() });
        assert_eq!((score.caught, score.missed.len(), score.percent()), (28, 2, 93));
    }
}
