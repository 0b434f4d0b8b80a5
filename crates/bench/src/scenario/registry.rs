//! The table of scenarios: what each shows, what it needs, how long it takes. One entry makes a
//! command of its own, a line of `list`, and a part of `run all` and of the gate's smoke test.

use super::{
    SECONDS, ScenarioArgs, blk_queues, file_blk, guest_blk, hundred, idle, multiqueue, nbd_blk,
    neighbours, null_blk, null_net, tap_small, tap_stream, tcp_crr, tcp_ladder, tcp_rr, vm_to_vm,
    xen_blk_queues, zero_copy,
};
use crate::measure::now;
use crate::netns;
use crate::peer;
use crate::plan::{self, Cost};
use crate::progress;
use crate::report::document::ScenarioDocument;
use crate::report::verdict::Verdict;
use crate::report::{self, Found};
use clap::{ArgMatches, Args, Command, FromArgMatches};

/// Makes the table, of rows that say: the module and the name, what the scenario needs, its cost
/// (before the first round, runs of a round, seconds of each), what `--only` selects; its purpose.
macro_rules! scenarios {
    ($($module:ident $name:literal, $needs:expr, $setup:literal + $runs:literal x $each:literal,
       $only:ident: $about:literal;)*) => {
        /// All scenarios, in the order of the guide.
        pub(crate) const ALL: &[&dyn Scenario] = &[$(&Entry {
            facts: Facts {
                name: $name,
                about: $about,
                needs: $needs,
                cost: Cost { setup: $setup, runs: $runs, each: $each },
                only: Only::$only,
            },
            run: $module::run,
        },)*];
    };
}

scenarios! {
    null_blk "null-blk", Needs::NOTHING, 1.0 + 24.0 x 0.3, Cells:
        "The way to a disk that costs nothing, by one queue: 1 to 128 requests in flight";
    file_blk "file-blk", Needs::NOTHING, 20.0 + 30.0 x 0.4, Cells:
        "A file, past the page cache and through it: what a back-end adds to its cost";
    nbd_blk "nbd-blk",
        Needs { is_root: false, programs: &[nbd_blk::NBDKIT] }, 1.0 + 15.0 x 0.4, Cells:
        "A disk of an NBD server, by one connection, by two and by four";
    guest_blk "guest-blk",
        Needs { is_root: false, programs: guest_blk::PROGRAMS }, 30.0 + 24.0 x 0.6, Cells:
        "A disk that costs nothing in guests of QEMU and UML, by each way of polling";
    null_net "null-net", Needs::NOTHING, 1.0 + 20.0 x 2.2, Cells:
        "64-byte frames to and from a port that ends nowhere, by 1, 2 and 4 queue pairs";
    vm_to_vm "vm-to-vm", Needs::NOTHING, 1.0 + 10.0 x 0.7, Cells:
        "From guest to guest: 64 and 1518 bytes, split and packed rings, and 64 KiB";
    zero_copy "zero-copy",
        Needs { is_root: false, programs: zero_copy::PROGRAMS }, 12.0 + 2.0 x 1.0, Cells:
        "A frame that a card reads in its sender's memory, against one that is copied";
    tap_small "tap-small", Needs::NAMESPACES, 1.0 + 36.0 x 0.5, Cells:
        "Frames of 64 and 512 bytes to a tap: such as can be merged, and such as cannot";
    tap_stream "tap-stream",
        Needs { is_root: true, programs: &[netns::IP, tap_stream::IPERF3] },
        1.0 + 8.0 x 1.5, Cells:
        "A TCP stream through a tap, both ways, against a bare loop between two taps";
    tcp_rr "tcp-rr", Needs::NAMESPACES, 1.0 + 8.0 x 1.0, Cells:
        "Requests and responses of 256 bytes through a tap, on 1 and on 100 connections";
    neighbours "neighbours", Needs::NOTHING, 1.0 + 8.0 x 1.0, Abusers:
        "Eight guests on one worker, two of which abuse it: what the other six have of it";
    hundred "hundred", Needs::NOTHING, 1.0 + 8.0 x 0.6, Cells:
        "One busy guest beside 99 that are connected and idle, against the same guest alone";
    idle "idle", Needs::NOTHING, 36.0 + 4.0 x 6.5, Cells:
        "Daemons of 1 to 1000 devices while nobody does anything; the memory of a device";
    blk_queues "blk-queues", Needs::NOTHING, 5.0 + 20.0 x 0.3, Cells:
        "1 to 16 queues of a null disk and of a file, as many requests in flight on all";
    xen_blk_queues "xen-blk-queues", Needs::NOTHING, 1.0 + 27.0 x 0.3, Cells:
        "A Xen disk by 1 to 16 queues, grants that stay mapped or not; beside virtio-blk";
    multiqueue "multiqueue", Needs::NAMESPACES, 1.0 + 51.0 x 1.8, Cells:
        "1 to 8 TCP streams by 1, 2 and 4 queue pairs, small and large messages, both ways";
    tcp_ladder "tcp-ladder", Needs::NAMESPACES, 1.0 + 22.0 x 0.7, Cells:
        "Requests and responses with one policy after the other, against the bare path";
    tcp_crr "tcp-crr", Needs::NAMESPACES, 1.0 + 4.0 x 0.7, Cells:
        "A TCP connection for each request and response through a tap, 1 and 100 at a time";
}

/// The scenario of this name.
pub(crate) fn find(name: &str) -> Option<&'static dyn Scenario> {
    ALL.iter().copied().find(|scenario| scenario.facts().name == name)
}

/// The requirements of a scenario. Peers are not among them: a missing one is left out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Needs {
    /// Network namespaces and taps: root, or `CAP_NET_ADMIN` and `CAP_SYS_ADMIN`.
    pub(crate) is_root: bool,
    /// Programs, each with its Debian package.
    pub(crate) programs: &'static [(&'static str, &'static str)],
}

impl Needs {
    const NOTHING: Self = Self { is_root: false, programs: &[] };
    const NAMESPACES: Self = Self { is_root: true, programs: &[netns::IP] };

    /// For people: `root, iproute2`.
    fn words(&self) -> String {
        let root = self.is_root.then_some("root");
        let packages = self.programs.iter().map(|(_, package)| *package);
        root.into_iter().chain(packages).collect::<Vec<_>>().join(", ")
    }

    /// The first requirement that is missing, with the way to get it.
    fn missing(&self) -> Option<String> {
        if self.is_root && !rustix::process::geteuid().is_root() {
            return Some("it needs root, for network namespaces and taps".to_owned());
        }
        let missing = self.programs.iter().find_map(|program| peer::find(*program).err());
        missing.map(|error| error.to_string())
    }
}

/// The parts of a scenario that `--only` selects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Only {
    /// A cell by its name: each can be run by itself.
    Cells,
    /// One of the abusers of `neighbours`: its cells are measured together.
    Abusers,
}

/// The row of a scenario.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Facts {
    pub(crate) name: &'static str,
    /// The purpose of the scenario, in a sentence.
    pub(crate) about: &'static str,
    pub(crate) needs: Needs,
    pub(crate) cost: Cost,
    pub(crate) only: Only,
}

/// A scenario, whatever its arguments and its cells are.
pub(crate) trait Scenario: Sync {
    fn facts(&self) -> Facts;
    /// The command of this scenario, with all its options.
    fn command(&self) -> Command;
    /// Runs it as its command line says.
    fn run(&self, matches: &ArgMatches) -> Result<Box<dyn Found>, String>;
}

/// An entry of the table: arguments `A` and report `R` are those of its function.
struct Entry<A, R> {
    facts: Facts,
    run: fn(&A) -> Result<R, String>,
}

impl<A: Args + FromArgMatches, R: Found + 'static> Scenario for Entry<A, R> {
    fn facts(&self) -> Facts {
        self.facts
    }

    fn command(&self) -> Command {
        A::augment_args(Command::new(self.facts.name)).about(self.facts.about)
    }

    fn run(&self, matches: &ArgMatches) -> Result<Box<dyn Found>, String> {
        if let Some(missing) = self.facts.needs.missing() {
            return Err(missing);
        }
        let args = A::from_arg_matches(matches).map_err(|error| error.to_string())?;
        Ok(Box::new((self.run)(&args)?))
    }
}

/// Runs a scenario as its command line says: its part of the document of a run, and its verdict.
pub(crate) fn run(
    scenario: &dyn Scenario,
    matches: &ArgMatches,
    command: String,
) -> Result<(ScenarioDocument, Option<Verdict>), String> {
    let (Facts { name, about, only, .. }, start) = (scenario.facts(), now());
    let found = scenario.run(matches)?;
    let report = serde_json::from_value(found.to_json()?).map_err(|error| error.to_string())?;
    let verdict = found.verdict().cloned();
    let document = ScenarioDocument {
        name: name.to_owned(),
        about: about.to_owned(),
        command,
        by_cell: only == Only::Cells,
        took_seconds: start.elapsed().as_secs_f64().round(),
        report,
        broken: verdict.as_ref().map_or_else(Vec::new, |verdict| verdict.broken().to_vec()),
        kept: verdict.as_ref().and_then(Verdict::kept).map(str::to_owned),
    };
    Ok((document, verdict))
}

/// Runs a scenario as a command of its own, prints what it found and says what was left out.
///
/// # Errors
/// It could not run, a promise was broken, or a peer is missing.
pub(crate) fn run_alone(scenario: &dyn Scenario, matches: &ArgMatches) -> Result<(), String> {
    let args = ScenarioArgs::from_arg_matches(matches).map_err(|error| error.to_string())?;
    let (document, verdict) = run(scenario, matches, String::new())?;
    if args.json {
        let text = serde_json::to_string_pretty(&document.report).map_err(|e| e.to_string())?;
        println!("{text}");
    } else {
        print!("{}", report::text(&document));
    }
    let verdict = verdict.map_or(Ok(()), |verdict| verdict.print(args.json));
    let bad: Vec<String> = verdict.err().into_iter().chain(progress::left_out()).collect();
    if bad.is_empty() { Ok(()) } else { Err(bad.join("; ")) }
}

/// The lines of `list`: name, sentence, what it needs, about how long.
pub(crate) fn list() -> String {
    let line = |scenario: &&dyn Scenario| {
        let Facts { name, about, needs, cost, .. } = scenario.facts();
        let (needs, time) = (needs.words(), plan::about(cost.seconds(plan::ROUNDS, SECONDS)));
        let needs = if needs.is_empty() { needs } else { format!("; needs {needs}") };
        format!("{name:<14} {about} (about {time}{needs})\n")
    };
    ALL.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_scenario_has_a_name_of_its_own_and_a_command_that_takes_the_options_of_all() {
        let names: BTreeSet<_> = ALL.iter().map(|scenario| scenario.facts().name).collect();
        assert_eq!(names.len(), ALL.len());
        for scenario in ALL {
            scenario.command().debug_assert();
            let words = [scenario.facts().name, "--smoke", "--rounds=2", "--against=fio"];
            let matches = scenario.command().try_get_matches_from(words).unwrap();
            let args = ScenarioArgs::from_arg_matches(&matches).unwrap();
            assert!(args.smoke, "{}", scenario.facts().name);
            assert!(scenario.facts().cost.seconds(1, 0.5) > 0.0);
        }
    }

    #[test]
    fn the_list_names_every_scenario_its_needs_and_its_time() {
        let list = list();
        for scenario in ALL {
            let mut lines = list.lines();
            let line = lines.find(|line| line.starts_with(scenario.facts().name)).unwrap();
            assert!(line.contains(scenario.facts().about) && line.contains("(about "), "{line}");
        }
        assert!(list.contains("needs root, iproute2, iperf3"), "{list}");
    }

    #[test]
    fn all_scenarios_fit_into_the_time_with_three_rounds_at_least() {
        let costs: Vec<Cost> = ALL.iter().map(|scenario| scenario.facts().cost).collect();
        let rounds = plan::rounds(&costs, SECONDS, plan::BUDGET);
        assert!(rounds >= 3, "the time is enough for {rounds} rounds");
    }

    #[test]
    fn what_a_scenario_needs_and_does_not_find_is_named_with_its_package() {
        let needs = Needs { is_root: false, programs: &[("no-such-program", "its-package")] };
        assert!(needs.missing().unwrap().contains("apt-get install its-package"));
        assert_eq!(Needs::NOTHING.missing(), None);
    }
}
