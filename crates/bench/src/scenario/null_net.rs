//! `null-net`: what the way to a network costs when the network costs nothing.
//!
//! 64-byte frames to a port that forgets them and from one that generates them: our daemon and
//! testpmd's vhost port, each behind our own driver half and behind testpmd's; that one once with a
//! small pool of buffers and once with a pool larger than the TLB reaches.

use super::net::{Daemon, NetBench, PartyRun};
use super::{ScenarioArgs, WAITED_MAX};
use crate::direction::Direction;
use crate::load::net::{NetLoadArgs, NetLoadResult};
use crate::measure::now;
use crate::own_load::{own_load, result_of};
use crate::peer::Server;
use crate::peer::testpmd::{self, BackEnd};
use crate::report::ScenarioReport;
use crate::report::net::{Compare, NetCell, NetSample};

/// The peer, as a party.
const TESTPMD_VHOST: &str = "testpmd vhost";
/// Bytes of a frame.
const SIZE: usize = 64;

/// Runs the scenario.
pub(crate) fn run(args: &ScenarioArgs) -> Result<ScenarioReport<NetCell>, String> {
    let bench = NetBench::new(args)?;
    let mut cells = Vec::new();
    for direction in [Direction::Transmit, Direction::Receive] {
        for pairs in [1, 2, 4] {
            cells.push(by_our_driver(&bench, direction, pairs)?);
        }
        if args.takes_part(TESTPMD_VHOST) {
            // The pools differ in nothing that could be broken.
            for pool in testpmd::POOLS.into_iter().take(if args.smoke { 1 } else { 2 }) {
                cells.push(by_testpmd(&bench, direction, pool)?);
            }
        }
    }
    Ok(bench.report("null-net", cells))
}

fn by_our_driver(
    bench: &NetBench<'_>,
    direction: Direction,
    pairs: u16,
) -> Result<Option<NetCell>, String> {
    let through = |daemon: Daemon| -> PartyRun<'_> {
        Box::new(move || {
            let server = bench.daemon(daemon, &null(pairs), None, &bench.server)?;
            drive(bench, &server, direction, pairs)
        })
    };
    let peer: PartyRun<'_> = Box::new(move || {
        let cpu = bench.args.server_cpu;
        let peer = BackEnd::start(&bench.socket(), direction, pairs, cpu);
        drive(bench, &peer.map_err(|e| e.to_string())?.server, direction, pairs)
    });
    let daemons = bench.daemons().into_iter();
    let mut parties: Vec<_> = daemons.map(|(name, one)| (name.to_owned(), through(one))).collect();
    parties.push((TESTPMD_VHOST.to_owned(), peer));
    let name = format!("guest {}s {SIZE} B, our driver half, {pairs} pairs", direction.word());
    bench.cell((name, usize::from(pairs), "kpps"), &parties, Compare::First)
}

/// testpmd's own driver half in front of both, with this many buffers.
fn by_testpmd(
    bench: &NetBench<'_>,
    direction: Direction,
    pool: u32,
) -> Result<Option<NetCell>, String> {
    let front = move |server: &Server| {
        let (cpu, start) = (server.cpu_seconds(), now());
        let rate = testpmd::front_end(&bench.socket(), direction, pool, bench.args.client_cpu);
        let throughput = rate.map_err(|e| e.to_string())? / 1000.0;
        let cpu = (server.cpu_seconds() - cpu) / start.elapsed().as_secs_f64() * 100.0;
        let avg_pkt_size = 64.0;
        let sample = NetSample { throughput, cpu, avg_pkt_size, ..NetSample::default() };
        Ok(NetSample { backend_cpu: cpu, ..sample })
    };
    let ours: PartyRun<'_> =
        Box::new(move || front(&bench.daemon(Daemon::Ours, &null(1), None, &bench.server)?));
    let peer: PartyRun<'_> = Box::new(move || {
        let peer = BackEnd::start(&bench.socket(), direction, 1, bench.args.server_cpu);
        front(&peer.map_err(|e| e.to_string())?.server)
    });
    let parties = [("manyring".to_owned(), ours), (TESTPMD_VHOST.to_owned(), peer)];
    let way = direction.word();
    let name = format!("guest {way}s {SIZE} B, testpmd's driver half, 1 pair, pool of {pool}");
    bench.cell((name, 1, "kpps"), &parties, Compare::First)
}

/// A null port that also generates.
fn null(pairs: u16) -> Vec<String> {
    vec![
        "--null".to_owned(),
        format!("--generate={SIZE}"),
        format!("--queue-pairs={pairs}"),
        "--workers=1".to_owned(),
    ]
}

/// Drives a back-end by our driver half.
pub(super) fn drive(
    bench: &NetBench<'_>,
    server: &Server,
    direction: Direction,
    pairs: u16,
) -> Result<NetSample, String> {
    let load = NetLoadArgs::new(bench.socket(), direction, pairs, bench.args.seconds());
    drive_as(bench, server, &load)
}

/// Lets our own driver half do as `load` says, once.
pub(super) fn drive_as(
    bench: &NetBench<'_>,
    server: &Server,
    load: &NetLoadArgs,
) -> Result<NetSample, String> {
    let mut command = own_load(None, &["net"])?;
    command.args(load.arguments());
    let (cpu, waited, start) = (server.cpu_seconds(), server.waited_seconds(), now());
    let result: NetLoadResult = result_of(&mut command, &bench.client)?;
    // A server that polls waits for its CPU while the client starts, too.
    let share = (server.waited_seconds() - waited) / start.elapsed().as_secs_f64();
    let waited = share * result.seconds + result.waited_seconds;
    Ok(sample_of(&result, server.cpu_seconds() - cpu, waited))
}

/// The sample of a load, from the CPU seconds of the back-end and the time that both waited.
#[allow(clippy::cast_precision_loss, reason = "counts of one run")]
pub(super) fn sample_of(result: &NetLoadResult, cpu: f64, waited: f64) -> NetSample {
    let packets = result.packets as f64;
    // A back-end that polls on its one CPU does so before the load and after it as well.
    let cpu = (cpu / result.seconds * 100.0).min(100.0);
    NetSample {
        throughput: packets / result.seconds / 1000.0,
        cpu,
        backend_cpu: cpu,
        avg_pkt_size: result.bytes as f64 / packets,
        kicks_per_packet: result.kicks as f64 / packets,
        calls_per_packet: result.calls as f64 / packets,
        disturbed: waited > result.seconds * WAITED_MAX,
        ..NetSample::default()
    }
}
