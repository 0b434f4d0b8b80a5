//! `tcp-ladder`: what each policy is worth to requests and responses of 256 bytes, one by one: the
//! ladder of the small-packet studies on KVM.
//!
//! Two namespaces, joined in turn by a ring that suppresses no notification, by one that does
//! (`EVENT_IDX`), by the same with one policy more, and by an interface of the kernel's own: the
//! bare path, which every rung is put against.

use super::ScenarioArgs;
use super::net::{Daemon, FRAME_PAGES, NamespaceJoin, NetBench, PartyRun, Ring};
use super::tcp_rr::{Transaction, transact};
use crate::report::ScenarioReport;
use crate::report::net::{Compare, NetCell};

/// A ring with some policies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Rung {
    name: &'static str,
    /// Further arguments of the driver half.
    driver: &'static [&'static str],
    /// Further arguments of the daemon.
    daemon: &'static [&'static str],
    /// Client and driver half on one CPU, daemon and server on the other.
    is_pinned: bool,
}

const fn rung(
    name: &'static str,
    driver: &'static [&'static str],
    daemon: &'static [&'static str],
) -> Rung {
    Rung { name, driver, daemon, is_pinned: false }
}

/// The ladder. From the third rung on each has one policy beside suppression: what one costs is not
/// hidden by what the one before it has won.
const RUNGS: [Rung; 7] = [
    rung("no suppression", &["--unsuppressed"], &["--polling=never"]),
    rung("suppression", &[], &["--polling=never"]),
    rung("delayed free", &[], &["--polling=never", "--reclaim=auto"]),
    rung("delayed kick", &["--kick-packets=5", "--kick-us=100"], &["--polling=never"]),
    rung("moderation", &[], &["--polling=never", "--moderation=5/100us"]),
    rung("adaptive polling", &[], &["--polling=auto"]),
    Rung { is_pinned: true, ..rung("the same, pinned", &[], &["--polling=auto"]) },
];

impl Rung {
    fn way(self) -> NamespaceJoin {
        let arguments = [&["--workers=1"], self.daemon].concat();
        let driver = self.driver.iter().map(|argument| (*argument).to_owned()).collect();
        NamespaceJoin::Ring(Ring { driver, ..Ring::new(Daemon::Ours, 1, &arguments) })
    }
}

/// Runs the scenario.
pub(crate) fn run(args: &ScenarioArgs) -> Result<ScenarioReport<NetCell>, String> {
    let bench = NetBench::new(args)?;
    let mut cells = Vec::new();
    for connections in [1, 100] {
        let party = |name: &str, way: NamespaceJoin, is_pinned: bool| {
            let bench = &bench;
            let run: PartyRun<'_> = Box::new(move || {
                let on = match is_pinned {
                    true => (&bench.client, &bench.server),
                    false => (&bench.everywhere, &bench.everywhere),
                };
                transact(bench, &way, on, Transaction::Exchange, connections)
            });
            (name.to_owned(), run)
        };
        let rungs = RUNGS.iter().map(|rung| party(rung.name, rung.way(), rung.is_pinned));
        let mut parties: Vec<_> = rungs.collect();
        for is_pinned in [false, true] {
            let name = if is_pinned { "bare loop, pinned" } else { "bare loop" };
            parties.push(party(name, NamespaceJoin::Bare(FRAME_PAGES), is_pinned));
        }
        // The last one is what the others are put against.
        parties.push(party("bare path, pinned", NamespaceJoin::Veth, true));
        parties.push(party("bare path", NamespaceJoin::Veth, false));
        let name = format!("256 B, {connections} connections");
        cells.push(bench.cell((name, connections, "trans/s"), &parties, Compare::Last)?);
    }
    Ok(bench.report("tcp-ladder", cells))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::join::JoinArgs;
    use clap::{Args, Command, FromArgMatches};

    #[test]
    fn each_rung_tells_the_driver_half_what_it_understands() {
        for rung in RUNGS {
            let command = JoinArgs::augment_args(Command::new("join"));
            let usual = ["join", "--tap=t", "--socket=s"];
            let matches = command.try_get_matches_from(usual.iter().chain(rung.driver));
            let join = JoinArgs::from_arg_matches(&matches.unwrap()).unwrap();
            assert_eq!(join.unsuppressed, rung.name == "no suppression");
            assert_eq!(join.kick_packets > 0, rung.name == "delayed kick");
        }
    }

    #[test]
    fn only_the_last_rungs_look_for_work_before_they_sleep() {
        let polls = |rung: &Rung| rung.daemon.contains(&"--polling=auto");
        let names: Vec<_> = RUNGS.iter().filter(|rung| polls(rung)).map(|r| r.name).collect();
        assert_eq!(names, ["adaptive polling", "the same, pinned"]);
        let NamespaceJoin::Ring(ring) = RUNGS[3].way() else { unreachable!("a rung is a ring") };
        assert_eq!(ring.arguments, ["--workers=1", "--polling=never"]);
        assert_eq!(ring.driver, ["--kick-packets=5", "--kick-us=100"]);
    }
}
