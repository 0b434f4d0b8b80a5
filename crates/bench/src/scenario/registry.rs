//! The table of scenarios: what each shows, what it needs, how long it takes. One entry makes a
//! command of its own, a line of `list`, and a part of `run all` and of the gate's smoke test.

use super::{
    SECONDS, ScenarioArgs, blk_queues, file_blk, guest_blk, hundred, idle, multiqueue, nbd_blk,
    neighbours, null_blk, null_net, tap_small, tap_stream, tcp_crr, tcp_ladder, tcp_rr, vm_to_vm,
    xen_blk_queues, zero_copy,
};
use crate::netns;
use crate::peer;
use crate::plan::{self, Cost};
use crate::progress;
use crate::report::Found;
use clap::{ArgMatches, Args, Command, FromArgMatches};
use std::ffi::OsString;

/// All scenarios, in the order of the guide.
pub(crate) const ALL: &[&dyn Scenario] = &[
    &Entry {
        name: "null-blk",
        about: "The way to a disk that costs nothing: one queue, then four against one",
        needs: Needs::NOTHING,
        cost: Cost { setup: 1.0, runs: 34.0, each: 0.3 },
        only: Only::Cells,
        run: null_blk::run,
    },
    &Entry {
        name: "file-blk",
        about: "A file, past the page cache and through it: what a back-end adds to its cost",
        needs: Needs::NOTHING,
        cost: Cost { setup: 20.0, runs: 30.0, each: 0.4 },
        only: Only::Cells,
        run: file_blk::run,
    },
    &Entry {
        name: "nbd-blk",
        about: "A disk of an NBD server, by one connection, by two and by four",
        needs: Needs { is_root: false, programs: &[nbd_blk::NBDKIT] },
        cost: Cost { setup: 1.0, runs: 15.0, each: 0.4 },
        only: Only::Cells,
        run: nbd_blk::run,
    },
    &Entry {
        name: "guest-blk",
        about: "A disk that costs nothing in guests of QEMU and UML, by each way of polling",
        needs: Needs { is_root: false, programs: guest_blk::PROGRAMS },
        cost: Cost { setup: 30.0, runs: 24.0, each: 0.6 },
        only: Only::Cells,
        run: guest_blk::run,
    },
    &Entry {
        name: "null-net",
        about: "64-byte frames to and from a port that ends nowhere, by 1, 2 and 4 queue pairs",
        needs: Needs::NOTHING,
        cost: Cost { setup: 1.0, runs: 20.0, each: 2.2 },
        only: Only::Cells,
        run: null_net::run,
    },
    &Entry {
        name: "vm-to-vm",
        about: "From guest to guest: 64 and 1518 bytes, split and packed rings, and 64 KiB",
        needs: Needs::NOTHING,
        cost: Cost { setup: 1.0, runs: 10.0, each: 0.7 },
        only: Only::Cells,
        run: vm_to_vm::run,
    },
    &Entry {
        name: "zero-copy",
        about: "A frame that a card reads in its sender's memory, against one that is copied",
        needs: Needs { is_root: false, programs: zero_copy::PROGRAMS },
        cost: Cost { setup: 12.0, runs: 2.0, each: 1.0 },
        only: Only::Cells,
        run: zero_copy::run,
    },
    &Entry {
        name: "tap-small",
        about: "Frames of 64 and 512 bytes to a tap: such as can be merged, and such as cannot",
        needs: Needs::NAMESPACES,
        cost: Cost { setup: 1.0, runs: 36.0, each: 0.5 },
        only: Only::Cells,
        run: tap_small::run,
    },
    &Entry {
        name: "tap-stream",
        about: "TCP through a tap, both ways; 1 to 8 streams by 1, 2 and 4 queue pairs",
        needs: Needs { is_root: true, programs: &[netns::IP, tap_stream::IPERF3] },
        cost: Cost { setup: 1.0, runs: 32.0, each: 1.5 },
        only: Only::Cells,
        run: tap_stream::run,
    },
    &Entry {
        name: "tcp-rr",
        about: "Requests and responses of 256 bytes through a tap, on 1 and on 100 connections",
        needs: Needs::NAMESPACES,
        cost: Cost { setup: 1.0, runs: 8.0, each: 1.0 },
        only: Only::Cells,
        run: tcp_rr::run,
    },
    &Entry {
        name: "neighbours",
        about: "Eight guests on one worker, two of which abuse it: what the other six have of it",
        needs: Needs::NOTHING,
        cost: Cost { setup: 1.0, runs: 8.0, each: 1.0 },
        only: Only::Abusers,
        run: neighbours::run,
    },
    &Entry {
        name: "hundred",
        about: "One busy guest beside 99 that are connected and idle, against the same guest alone",
        needs: Needs::NOTHING,
        cost: Cost { setup: 1.0, runs: 8.0, each: 0.6 },
        only: Only::Cells,
        run: hundred::run,
    },
    &Entry {
        name: "idle",
        about: "A daemon with 1, 10, 100 and 1000 devices while nobody does anything",
        needs: Needs::NOTHING,
        cost: Cost { setup: 0.0, runs: 4.0, each: 6.5 },
        only: Only::Cells,
        run: idle::run,
    },
    &Entry {
        name: "blk-queues",
        about: "1 to 16 queues of a null disk and of a file, as many requests in flight on all",
        needs: Needs::NOTHING,
        cost: Cost { setup: 5.0, runs: 20.0, each: 0.3 },
        only: Only::Cells,
        run: blk_queues::run,
    },
    &Entry {
        name: "xen-blk-queues",
        about: "A Xen disk by 1 to 16 queues, grants that stay mapped or not; beside virtio-blk",
        needs: Needs::NOTHING,
        cost: Cost { setup: 1.0, runs: 27.0, each: 0.3 },
        only: Only::Cells,
        run: xen_blk_queues::run,
    },
    &Entry {
        name: "multiqueue",
        about: "1 to 8 TCP streams by 1, 2 and 4 queue pairs, small and large messages, both ways",
        needs: Needs::NAMESPACES,
        cost: Cost { setup: 1.0, runs: 51.0, each: 1.8 },
        only: Only::Cells,
        run: multiqueue::run,
    },
    &Entry {
        name: "tcp-ladder",
        about: "Requests and responses with one policy after the other, against the bare path",
        needs: Needs::NAMESPACES,
        cost: Cost { setup: 1.0, runs: 22.0, each: 0.7 },
        only: Only::Cells,
        run: tcp_ladder::run,
    },
    &Entry {
        name: "tcp-crr",
        about: "A TCP connection for each request and response through a tap, 1 and 100 at a time",
        needs: Needs::NAMESPACES,
        cost: Cost { setup: 1.0, runs: 4.0, each: 0.7 },
        only: Only::Cells,
        run: tcp_crr::run,
    },
];

/// The scenario of this name.
pub(crate) fn find(name: &str) -> Option<&'static dyn Scenario> {
    ALL.iter().copied().find(|scenario| scenario.name() == name)
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

/// A scenario, whatever its arguments and its cells are.
pub(crate) trait Scenario: Sync {
    fn name(&self) -> &'static str;
    /// The purpose of the scenario, in a sentence.
    fn about(&self) -> &'static str;
    fn needs(&self) -> Needs;
    fn cost(&self) -> Cost;
    fn only(&self) -> Only;
    /// The command of this scenario, with all its options.
    fn command(&self) -> Command;
    /// Runs it as its command line says.
    fn run(&self, matches: &ArgMatches) -> Result<Box<dyn Found>, String>;
}

/// An entry of the table: arguments `A` and report `R` are those of its function.
struct Entry<A, R> {
    name: &'static str,
    about: &'static str,
    needs: Needs,
    cost: Cost,
    only: Only,
    run: fn(&A) -> Result<R, String>,
}

impl<A: Args + FromArgMatches, R: Found + 'static> Scenario for Entry<A, R> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn about(&self) -> &'static str {
        self.about
    }

    fn needs(&self) -> Needs {
        self.needs
    }

    fn cost(&self) -> Cost {
        self.cost
    }

    fn only(&self) -> Only {
        self.only
    }

    fn command(&self) -> Command {
        A::augment_args(Command::new(self.name)).about(self.about)
    }

    fn run(&self, matches: &ArgMatches) -> Result<Box<dyn Found>, String> {
        if let Some(missing) = self.needs.missing() {
            return Err(missing);
        }
        let args = A::from_arg_matches(matches).map_err(|error| error.to_string())?;
        Ok(Box::new((self.run)(&args)?))
    }
}

/// Runs a scenario by its words, as they would stand behind its name on the command line.
pub(crate) fn run_words(
    scenario: &dyn Scenario,
    words: &[OsString],
) -> Result<Box<dyn Found>, String> {
    let all = std::iter::once(OsString::from(scenario.name())).chain(words.iter().cloned());
    let matches = scenario.command().try_get_matches_from(all).map_err(|e| e.to_string())?;
    scenario.run(&matches)
}

/// Runs a scenario as a command of its own, prints what it found and says what was left out.
///
/// # Errors
/// It could not run, a promise was broken, or a peer is missing.
pub(crate) fn run_alone(scenario: &dyn Scenario, matches: &ArgMatches) -> Result<(), String> {
    let args = ScenarioArgs::from_arg_matches(matches).map_err(|error| error.to_string())?;
    let found = scenario.run(matches)?;
    found.print(args.json)?;
    let verdict = found.verdict().cloned().map_or(Ok(()), |verdict| verdict.print(args.json));
    let bad: Vec<String> = verdict.err().into_iter().chain(progress::left_out()).collect();
    if bad.is_empty() { Ok(()) } else { Err(bad.join("; ")) }
}

/// The lines of `list`: name, sentence, what it needs, about how long.
pub(crate) fn list() -> String {
    let line = |scenario: &&dyn Scenario| {
        let time = scenario.cost().seconds(plan::ROUNDS, SECONDS);
        let (needs, time) = (scenario.needs().words(), plan::about(time));
        let needs = if needs.is_empty() { needs } else { format!("; needs {needs}") };
        format!("{:<14} {} (about {time}{needs})\n", scenario.name(), scenario.about())
    };
    ALL.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_scenario_has_a_name_of_its_own_and_a_command_that_takes_the_options_of_all() {
        let names: BTreeSet<_> = ALL.iter().map(|scenario| scenario.name()).collect();
        assert_eq!(names.len(), ALL.len());
        for scenario in ALL {
            scenario.command().debug_assert();
            let words = [scenario.name(), "--smoke", "--rounds=2", "--against=fio"];
            let matches = scenario.command().try_get_matches_from(words).unwrap();
            let args = ScenarioArgs::from_arg_matches(&matches).unwrap();
            assert!(args.smoke, "{}", scenario.name());
            assert!(scenario.cost().seconds(1, 0.5) > 0.0);
        }
    }

    #[test]
    fn the_list_names_every_scenario_its_needs_and_its_time() {
        let list = list();
        for scenario in ALL {
            let mut lines = list.lines();
            let line = lines.find(|line| line.starts_with(scenario.name())).unwrap();
            assert!(line.contains(scenario.about()) && line.contains("(about "), "{line}");
        }
        assert!(list.contains("needs root, iproute2, iperf3"), "{list}");
    }

    #[test]
    fn all_scenarios_fit_into_the_time_with_three_rounds_at_least() {
        let costs: Vec<Cost> = ALL.iter().map(|scenario| scenario.cost()).collect();
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
