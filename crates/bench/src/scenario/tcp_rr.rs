//! `tcp-rr`: requests and responses of 256 bytes over TCP, on 1 and on 100 connections: through our
//! daemon, through one that never looks before it sleeps, one that always does, and by a bare loop.

use super::ScenarioArgs;
use super::counts::NotificationCounts;
use super::net::{
    Beside, Daemon, FRAME_PAGES, NamespaceJoin, NetBench, PartyRun, Ring, Road, WHOLE_SECONDS,
};
use crate::load::rr::RrResult;
use crate::measure::Affinity;
use crate::own_load::{own_load, result_of};
use crate::peer;
use crate::report::ScenarioReport;
use crate::report::net::{Compare, NetCell, NetSample};

/// Where the server listens.
const PORT: u16 = 7777;
/// The daemon's name of its device.
const DEVICE: &str = "net0";

/// The operation that a client repeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Transaction {
    /// A request and its response.
    Exchange,
    /// A connection, a request, its response, and the end of the connection.
    Whole,
}

impl Transaction {
    /// The client, and more arguments of its server.
    const fn programs(self) -> (&'static str, &'static [&'static str]) {
        match self {
            Self::Exchange => ("rr", &[]),
            Self::Whole => ("crr", &["--close"]),
        }
    }
}

/// Runs the scenario.
pub(crate) fn run(args: &ScenarioArgs) -> Result<ScenarioReport<NetCell>, String> {
    let bench = NetBench::new(args)?;
    let mut cells = Vec::new();
    for connections in [1, 100] {
        let run = |way: NamespaceJoin| -> PartyRun<'_> {
            let bench = &bench;
            let on = (&bench.client, &bench.server);
            Box::new(move || transact(bench, &way, on, Transaction::Exchange, connections))
        };
        let ring = |daemon, more: &[&str]| {
            let arguments = [&["--workers=1"], more].concat();
            run(NamespaceJoin::Ring(Ring::new(daemon, 1, &arguments)))
        };
        let daemons = bench.daemons().into_iter();
        let mut parties: Vec<_> =
            daemons.map(|(name, daemon)| (name.to_owned(), ring(daemon, &[]))).collect();
        for (name, option) in
            [("sleeps at once", "--polling=never"), ("always spins", "--polling=always")]
        {
            parties.push((format!("manyring, {name}"), ring(Daemon::Ours, &[option])));
        }
        parties.push(("bare loop".to_owned(), run(NamespaceJoin::Bare(FRAME_PAGES))));
        let name = format!("256 B, {connections} connections");
        cells.push(bench.cell((name, connections, "trans/s"), &parties, Compare::First)?);
    }
    Ok(bench.report("tcp-rr", cells))
}

/// Runs a client on this many connections in the guest's namespace, its server in the host's; with
/// what each transaction took of our own daemon.
pub(super) fn transact(
    bench: &NetBench<'_>,
    way: &NamespaceJoin,
    on: (&Affinity, &Affinity),
    transaction: Transaction,
    connections: usize,
) -> Result<NetSample, String> {
    let control = bench.control();
    let (mut way, mut is_asked) = (way.clone(), false);
    if let NamespaceJoin::Ring(ring) = &mut way
        && ring.daemon == Daemon::Ours
    {
        ring.arguments.push(format!("--control={}", control.display()));
        is_asked = true;
    }
    let manyring = peer::manyring(bench.args.manyring.as_deref()).map_err(|e| e.to_string())?;
    let look = || match is_asked {
        true => NotificationCounts::ask(&manyring, &control, DEVICE).map(Some),
        false => Ok(None),
    };
    let mut road = Road::new(bench, &way, on, WHOLE_SECONDS)?;
    let listen = format!("--listen={}", Road::host_port(PORT));
    let (client, more) = transaction.programs();
    let arguments: Vec<&str> =
        ["rr-server", &listen, "--seconds=20"].into_iter().chain(more.iter().copied()).collect();
    let mut server = own_load(Some(&road.host), &arguments)?;
    let server = Beside::start(&mut server, on.1)?;
    let to = format!("--server={}", Road::host_port(PORT));
    let (count, seconds) = (format!("--connections={connections}"), bench.args.seconds());
    let time = format!("--seconds={seconds}");
    let mut command = own_load(Some(&road.guest), &[client, &to, &count, &time])?;
    let before = look()?;
    road.begin(std::slice::from_ref(&server));
    let result: RrResult = result_of(&mut command, on.0)?;
    let after = look()?;
    let costs = road.finish(seconds, std::slice::from_ref(&server))?;
    let cpu_seconds = costs.backend_cpu / 100.0 * seconds;
    let each = |(after, before): (NotificationCounts, NotificationCounts)| {
        after.per_operation(before, cpu_seconds, result.rate * seconds)
    };
    let per_operation = after.zip(before).map(each);
    let RrResult { rate: throughput, p50_us, p99_us, .. } = result;
    Ok(NetSample { throughput, p50_us, p99_us, per_operation, ..costs })
}
