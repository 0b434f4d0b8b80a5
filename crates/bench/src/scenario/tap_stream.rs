//! `tap-stream`: TCP in segments of up to 64 KiB between two namespaces: through our driver half,
//! our daemon and its tap, and by a bare loop between two taps. `multiqueue` has several sessions.

use super::ScenarioArgs;
use super::net::{
    Beside, FRAME_PAGES, NamespaceJoin, NetBench, PartyRun, RING_PAGES, Ring, Road, WHOLE_SECONDS,
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
/// Where the server listens.
const PORT: u16 = 5201;

/// Runs the scenario.
pub(crate) fn run(args: &ScenarioArgs) -> Result<ScenarioReport<NetCell>, String> {
    let bench = NetBench::new(args)?;
    let mut cells = Vec::new();
    for to_guest in [false, true] {
        cells.push(against_bare(&bench, to_guest)?);
    }
    Ok(bench.report("tap-stream", cells))
}

fn way(to_guest: bool) -> &'static str {
    if to_guest { "host to guest" } else { "guest to host" }
}

/// One stream, one pair, client and joiner on one CPU, back-end and server on the other.
fn against_bare(bench: &NetBench<'_>, to_guest: bool) -> Result<Option<NetCell>, String> {
    let on = (&bench.client, &bench.server);
    let party = |name: &str, way: NamespaceJoin| {
        let run: PartyRun<'_> = Box::new(move || stream(bench, &way, on, to_guest));
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

/// A stream for a second, from a process to another one.
fn stream(
    bench: &NetBench<'_>,
    way: &NamespaceJoin,
    on: (&Affinity, &Affinity),
    to_guest: bool,
) -> Result<NetSample, String> {
    let iperf3 = peer::find(IPERF3).map_err(|e| e.to_string())?;
    let mut road = Road::new(bench, way, on, WHOLE_SECONDS)?;
    let server = Beside::start(&mut server(&road, &iperf3), on.1)?;
    server.await_listening((address(super::net::HOST), PORT))?;
    let beside = std::slice::from_ref(&server);
    road.begin(beside);
    let client = Beside::start(&mut client(&road, &iperf3, to_guest), on.0)?;
    let (throughput, seconds) = parse(&client.finish()?)?;
    Ok(NetSample { throughput, ..road.finish(seconds, beside)? })
}

fn server(road: &Road, iperf3: &Path) -> Command {
    let mut command = road.host.inside(iperf3);
    command
        .args(["--server", "--one-off", "--bind", &address(super::net::HOST)])
        .arg(format!("--port={PORT}"));
    command
}

fn client(road: &Road, iperf3: &Path, to_guest: bool) -> Command {
    let mut command = road.guest.inside(iperf3);
    command
        .args(["--json", "--connect-timeout=2000", "--client", &address(super::net::HOST)])
        .arg(format!("--port={PORT}"))
        .arg(format!("--time={WHOLE_SECONDS}"));
    if to_guest {
        command.arg("--reverse");
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
