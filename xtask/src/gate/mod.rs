//! `cargo xtask ci`: the gate. Every step is a command of its own too; each is timed.

mod ahead;
pub(crate) mod bench;
mod counts;
pub(crate) mod deny;
pub(crate) mod fuzz;
pub(crate) mod mutants;
mod tools;

use crate::cargo::{cargo, see, target};
use crate::{programs, test, tidy};
use ahead::Ahead;
use manyring_system::runner::Totals;
use manyring_system::{Outcome, check, lanes, watch};
use std::process::Command;
use std::time::{Duration, Instant};

/// A step gives the tests it ran; one that counts none counts as one.
type Step = (&'static str, fn() -> Outcome<Totals>);

/// The cheap ones first: what fails, should fail early. Steps of one row run at the same time: the
/// benches wait most of the time, for guests' boots and for moments to pass, and no time that they
/// take is judged. What runs beside them waits for nothing.
const STEPS: &[&[Step]] = &[
    &[("fmt", || one(see(&mut cargo(&["fmt", "--all", "--check"]))))],
    &[("tidy", || one(tidy::run(false)))],
    &[("clippy", || one(clippy()))],
    &[("doc", || one(doc()))],
    &[("test", tests)],
    &[("crates", || one(crates()))],
    &[("deny", || one(deny::run()))],
    &[
        ("fuzz-smoke", || one(fuzz::smoke(fuzz::SMOKE_SECONDS))),
        ("bench-smoke", || one(bench::smoke_beside_tests())),
        ("loom", loom),
        ("examples", programs::examples),
    ],
];

/// How long a step may take, and how long that of the tests, whose parts have limits of their own.
const STEP_LIMIT: Duration = Duration::from_secs(1800);
const TESTS_LIMIT: Duration = Duration::from_secs(7200);

/// Runs all steps, also after one has failed, and ends with the totals.
pub(crate) fn run() -> Outcome {
    let start = Instant::now();
    let mut totals = Totals::default();
    let mut report = Vec::new();
    for steps in STEPS {
        lanes::each(steps.to_vec(), steps.len(), took, |(line, counted)| {
            println!("== {line}");
            totals.add(counted);
            report.push(line);
        });
    }
    println!("\n{}", report.join("\n"));
    println!("{:12}        {:6.0} s", "all", start.elapsed().as_secs_f64());
    println!("\n{}", totals.report());
    check(totals.failed == 0, || "the gate is closed".into())
}

/// Runs a step. Gives its line of the report, and what it counted.
fn took((name, step): Step) -> (String, Totals) {
    println!("\n== {name}");
    let begin = Instant::now();
    let limit = if name == "test" { TESTS_LIMIT } else { STEP_LIMIT };
    let counted = watch::within(name, limit, step).unwrap_or_else(|sentence| {
        println!("xtask: {sentence}");
        let mut counted = Totals::default();
        counted.fail(name, &sentence);
        counted
    });
    let word = if counted.failed == 0 { "passed" } else { "FAILED" };
    (format!("{name:12} {word} {:6.0} s  {counted}", begin.elapsed().as_secs_f64()), counted)
}

fn one(outcome: Outcome) -> Outcome<Totals> {
    outcome.map(|()| Totals::of_one())
}

fn clippy() -> Outcome {
    // The feature is the entry point of a bench, which is left out without it.
    let mut clippy = cargo(&["clippy", "--workspace", "--all-targets"]);
    see(clippy.args(["--features", "manyring-device/bench", "--", "-D", "warnings"]))
}

fn doc() -> Outcome {
    let mut doc = cargo(&["doc", "--workspace", "--no-deps"]);
    see(doc.env("RUSTDOCFLAGS", "-D warnings"))
}

/// Checks that every crate for others can be packaged: its description, its files, the versions of
/// its dependencies. The package is not built here, which takes minutes.
fn crates() -> Outcome {
    let mut package =
        cargo(&["package", "--workspace", "--no-verify", "--allow-dirty", "--offline"]);
    let own = ["xtask", "manyring-system", "manyring-bench"];
    see(package.args(own.iter().flat_map(|name| ["--exclude", name])))
}

/// Runs all tests. The programs of later steps are built beside them.
fn tests() -> Outcome<Totals> {
    let ahead = Ahead::start();
    let totals = test::all(None);
    ahead.finish();
    totals
}

/// The race tests of rings and of a switch.
pub(crate) fn loom() -> Outcome<Totals> {
    programs::test(&mut loom_tests()?)
}

/// Runs the race tests on loom's atomics: another build of the same code, in its own folder.
fn loom_tests() -> Outcome<Command> {
    let packages = ["--package", "manyring-queue", "--package", "manyring-backend"];
    let mut command = cargo(&["test", "--release", "--test", "interleave*"]);
    command.args(packages);
    command.env("RUSTFLAGS", "--cfg loom").env("CARGO_TARGET_DIR", target()?.join("loom"));
    Ok(command)
}
