//! `tcp-rr`: requests and responses of 256 bytes over TCP, on 1 and on 100 connections: through our
//! daemon, through one that never looks before it sleeps, one that always does, and by a bare loop.

use super::ScenarioArgs;
use super::net::{
    Beside, Daemon, FRAME_PAGES, NetBench, Road, Run, WHOLE_SECONDS, Way, own_load, result_of,
};
use crate::load::rr::RrResult;
use crate::report::Report;
use crate::report::net::{Compare, NetCell, NetSample};

/// Where the server listens.
const PORT: u16 = 7777;

/// Runs the scenario.
pub(crate) fn run(args: &ScenarioArgs) -> Result<Report<NetCell>, String> {
    let bench = NetBench::new(args)?;
    let mut cells = Vec::new();
    for connections in [1, 100] {
        let run = |way: Way| -> Run<'_> {
            let bench = &bench;
            Box::new(move || transact(bench, &way, connections))
        };
        let arguments = |more: &[&str]| {
            let all = std::iter::once("--workers=1").chain(more.iter().copied());
            all.map(str::to_owned).collect()
        };
        let ring = |daemon, more: &[&str]| run(Way::Ring(daemon, 1, arguments(more)));
        let daemons = bench.daemons().into_iter();
        let mut parties: Vec<_> =
            daemons.map(|(name, daemon)| (name.to_owned(), ring(daemon, &[]))).collect();
        for (name, option) in
            [("sleeps at once", "--polling=never"), ("always spins", "--polling=always")]
        {
            parties.push((format!("manyring, {name}"), ring(Daemon::Ours, &[option])));
        }
        parties.push(("bare loop".to_owned(), run(Way::Bare(FRAME_PAGES))));
        let name = format!("256 B, {connections} connections");
        cells.push(bench.cell((name, connections, "trans/s"), &parties, Compare::First)?);
    }
    Ok(bench.report("tcp-rr", cells))
}

fn transact(bench: &NetBench<'_>, way: &Way, connections: usize) -> Result<NetSample, String> {
    let on = (&bench.client, &bench.server);
    let mut road = Road::new(bench, way, on, WHOLE_SECONDS)?;
    let listen = format!("--listen={}", Road::host_port(PORT));
    let mut server = own_load(Some(&road.host), &["rr-server", &listen, "--seconds=20"])?;
    let server = Beside::start(&mut server, on.1)?;
    let to = format!("--server={}", Road::host_port(PORT));
    let (count, seconds) = (format!("--connections={connections}"), bench.args.seconds());
    let time = format!("--seconds={seconds}");
    let mut command = own_load(Some(&road.guest), &["rr", &to, &count, &time])?;
    road.begin(&server);
    let result: RrResult = result_of(&mut command, on.0)?;
    let costs = road.finish(seconds, &server)?;
    Ok(NetSample { throughput: result.rate, p50_us: result.p50_us, ..costs })
}
