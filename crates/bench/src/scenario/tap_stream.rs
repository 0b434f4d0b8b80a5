//! `tap-stream`: TCP in segments of up to 64 KiB between two namespaces: through our driver half,
//! our daemon and its tap, and by a bare loop between two taps; then sessions by queue pairs.

use super::ScenarioArgs;
use super::net::{
    Beside, Daemon, FRAME_PAGES, NamespaceJoin, NetBench, PartyRun, RING_PAGES, Ring, Road,
    WHOLE_SECONDS,
};
use crate::measure::Affinity;
use crate::netns::address;
use crate::peer;
use crate::report::ScenarioReport;
use crate::report::net::{Compare, NetCell, NetSample};
use std::path::Path;
use std::process::Command;

/// TCP streams between namespaces.
pub(super) const IPERF3: (&str, &str) = ("iperf3", "iperf3");
/// Where the first stream's server listens; the others' follow.
const FIRST_PORT: u16 = 5201;

/// The TCP streams of a load.
#[derive(Clone, Copy, Debug)]
pub(super) struct TcpLoad {
    /// From the host's side to the guest's.
    pub(super) to_guest: bool,
    /// Connections, each of a client and a server of its own.
    pub(super) sessions: usize,
    /// Bytes of each write of the sender; `None`: the tool's own choice.
    pub(super) message: Option<usize>,
}

/// Runs the scenario.
pub(crate) fn run(args: &ScenarioArgs) -> Result<ScenarioReport<NetCell>, String> {
    let bench = NetBench::new(args)?;
    let mut cells = Vec::new();
    for to_guest in [false, true] {
        cells.push(against_bare(&bench, to_guest)?);
    }
    for to_guest in [false, true] {
        for sessions in if args.smoke { &[2][..] } else { &[1, 2, 4, 8] } {
            cells.push(by_pairs(&bench, to_guest, *sessions)?);
        }
    }
    Ok(bench.report("tap-stream", cells))
}

fn way(to_guest: bool) -> &'static str {
    if to_guest { "host to guest" } else { "guest to host" }
}

/// One stream, one pair, client and joiner on one CPU, back-end and server on the other.
fn against_bare(bench: &NetBench<'_>, to_guest: bool) -> Result<Option<NetCell>, String> {
    let on = (&bench.client, &bench.server);
    let load = TcpLoad { to_guest, sessions: 1, message: None };
    let party = |name: &str, way: NamespaceJoin| {
        let run: PartyRun<'_> = Box::new(move || stream(bench, &way, on, load));
        (name.to_owned(), run)
    };
    let ring = |daemon| NamespaceJoin::Ring(Ring::new(daemon, 1, &["--workers=1"]));
    let daemons = bench.daemons().into_iter();
    let mut parties: Vec<_> = daemons.map(|(name, daemon)| party(name, ring(daemon))).collect();
    parties.push(party("bare loop", NamespaceJoin::Bare(FRAME_PAGES)));
    parties.push(party("bare loop, ring's pages", NamespaceJoin::Bare(RING_PAGES)));
    let name = format!("{}, one stream, one pair", way(to_guest));
    bench.cell((name, 1, "Mbit/s"), &parties, Compare::First)
}

/// This many streams by 4, 2 and 1 queue pairs, wherever the system puts them.
fn by_pairs(
    bench: &NetBench<'_>,
    to_guest: bool,
    sessions: usize,
) -> Result<Option<NetCell>, String> {
    let load = TcpLoad { to_guest, sessions, message: None };
    let party = |pairs: u16| {
        let way = NamespaceJoin::Ring(Ring::new(Daemon::Ours, pairs, &[]));
        let on = (&bench.everywhere, &bench.everywhere);
        let run: PartyRun<'_> = Box::new(move || stream(bench, &way, on, load));
        (format!("manyring, {pairs} pairs"), run)
    };
    let name = format!("{}, {sessions} streams by queue pairs", way(to_guest));
    bench.cell((name, sessions, "Mbit/s"), &[party(4), party(2), party(1)], Compare::Last)
}

/// Streams for a second, each from a process of its own to one of its own, as netperf has it: one
/// process that drives all streams in turn never waits for any of them, and is what is measured
/// then.
pub(super) fn stream(
    bench: &NetBench<'_>,
    way: &NamespaceJoin,
    on: (&Affinity, &Affinity),
    load: TcpLoad,
) -> Result<NetSample, String> {
    let iperf3 = peer::find(IPERF3).map_err(|e| e.to_string())?;
    let seconds = WHOLE_SECONDS;
    let mut road = Road::new(bench, way, on, seconds)?;
    let ports = || (FIRST_PORT..).take(load.sessions);
    let start = |port| Beside::start(&mut server(&road, &iperf3, port), on.1);
    let servers: Vec<Beside> = ports().map(start).collect::<Result<_, _>>()?;
    for (port, server) in ports().zip(&servers) {
        server.await_listening((address(super::net::HOST), port))?;
    }
    road.begin(&servers);
    let start = |port| Beside::start(&mut client(&road, &iperf3, load, (port, seconds)), on.0);
    let clients: Vec<Beside> = ports().map(start).collect::<Result<_, _>>()?;
    let (mut throughput, mut longest) = (0.0, 0.0_f64);
    for client in clients {
        let (rate, seconds) = parse(&client.finish()?)?;
        throughput += rate;
        longest = longest.max(seconds);
    }
    Ok(NetSample { throughput, ..road.finish(longest, &servers)? })
}

fn server(road: &Road, iperf3: &Path, port: u16) -> Command {
    let mut command = road.host.inside(iperf3);
    command
        .args(["--server", "--one-off", "--bind", &address(super::net::HOST)])
        .arg(format!("--port={port}"));
    command
}

fn client(road: &Road, iperf3: &Path, load: TcpLoad, (port, seconds): (u16, u32)) -> Command {
    let mut command = road.guest.inside(iperf3);
    command
        .args(["--json", "--connect-timeout=2000", "--client", &address(super::net::HOST)])
        .arg(format!("--port={port}"))
        .arg(format!("--time={seconds}"));
    if load.to_guest {
        command.arg("--reverse");
    }
    if let Some(bytes) = load.message {
        command.arg(format!("--length={bytes}"));
    }
    command
}

/// Mbit/s and seconds of a report of iperf3.
fn parse(report: &serde_json::Value) -> Result<(f64, f64), String> {
    let number = |pointer: &str| {
        let value = report.pointer(pointer).and_then(serde_json::Value::as_f64);
        value.ok_or_else(|| format!("no {pointer} in iperf3's report: {}", report["error"]))
    };
    let seconds = number("/end/sum_received/seconds")?;
    Ok((number("/end/sum_received/bits_per_second")? / 1e6, seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_received_counts_and_an_error_is_named() {
        let report = serde_json::json!(
            {"end": {"sum_received": {"seconds": 1.5, "bits_per_second": 2.5e9}}}
        );
        assert_eq!(parse(&report), Ok((2500.0, 1.5)));
        let report = serde_json::json!({"error": "server is busy", "end": {}});
        let error = parse(&report).unwrap_err();
        assert!(error.contains("server is busy"), "{error}");
    }
}
