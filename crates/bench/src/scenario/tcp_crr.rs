//! `tcp-crr`: connect, request, response and close for each transaction, 256 bytes, on 1 and on 100
//! connections at a time: through our daemon and by a bare loop.

use super::ScenarioArgs;
use super::net::{Daemon, FRAME_PAGES, NamespaceJoin, NetBench, PartyRun, Ring};
use super::tcp_rr::{Transaction, transact};
use crate::report::ScenarioReport;
use crate::report::net::{Compare, NetCell};

/// Runs the scenario.
pub(crate) fn run(args: &ScenarioArgs) -> Result<ScenarioReport<NetCell>, String> {
    let bench = NetBench::new(args)?;
    let mut cells = Vec::new();
    for connections in [1, 100] {
        let run = |way: NamespaceJoin| -> PartyRun<'_> {
            let bench = &bench;
            let on = (&bench.client, &bench.server);
            Box::new(move || transact(bench, &way, on, Transaction::Whole, connections))
        };
        let ring =
            |daemon: Daemon| run(NamespaceJoin::Ring(Ring::new(daemon, 1, &["--workers=1"])));
        let daemons = bench.daemons().into_iter();
        let mut parties: Vec<_> =
            daemons.map(|(name, daemon)| (name.to_owned(), ring(daemon))).collect();
        parties.push(("bare loop".to_owned(), run(NamespaceJoin::Bare(FRAME_PAGES))));
        let name = format!("256 B, a connection each, {connections} at a time");
        cells.push(bench.cell((name, connections, "trans/s"), &parties, Compare::First)?);
    }
    Ok(bench.report("tcp-crr", cells))
}
