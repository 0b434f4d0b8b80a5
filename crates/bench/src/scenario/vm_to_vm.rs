//! `vm-to-vm`: frames from one guest to another, of 64 and 1518 bytes by split and packed rings,
//! and segments of 64 KiB: through a switch of our daemon, and through testpmd, which forwards
//! between two vhost ports. The segments are compared with one copy of their bytes in memory.
//!
//! One thread drives both guests, by the same lean driver halves for every back-end.

use super::ScenarioArgs;
use super::net::{NetBench, PartyRun};
use super::null_net::sample_of;
use crate::load::net::NetLoadResult;
use crate::load::vm::{MACS, VmLoadArgs};
use crate::measure::now;
use crate::own_load::{own_load, result_of};
use crate::peer::Server;
use crate::peer::testpmd::BackEnd;
use crate::report::ScenarioReport;
use crate::report::net::{Compare, NetCell, NetSample};
use std::fmt::Write as _;
use std::path::PathBuf;

/// The peers, as parties.
const TESTPMD: &str = "testpmd io";
const MEMCPY: &str = "one memcpy";
/// Bytes of the longest frame.
const LONG: usize = 65_000;

/// Runs the scenario.
pub(crate) fn run(args: &ScenarioArgs) -> Result<ScenarioReport<NetCell>, String> {
    let bench = NetBench::new(args)?;
    let mut cells = Vec::new();
    let all = [(64, false), (LONG, false), (64, true), (1518, false), (1518, true)];
    for (size, packed) in all.into_iter().take(if args.smoke { 2 } else { all.len() }) {
        let sockets = [bench.own_file("from"), bench.own_file("to")];
        let [from, to] = sockets.clone();
        let seconds = args.seconds();
        let load = VmLoadArgs {
            from: Some(from),
            to: Some(to),
            size,
            packed,
            seconds,
            cpu: None,
            json: true,
        };
        let copied = VmLoadArgs { from: None, to: None, ..load.clone() };
        let (bench, sockets, load) = (&bench, &sockets, &load);
        let ours: PartyRun<'_> =
            Box::new(move || drive(bench, Some(&switch(bench, sockets)?), load));
        let mut parties = vec![("manyring".to_owned(), ours)];
        if size < LONG {
            let peer: PartyRun<'_> = Box::new(move || {
                let peer = BackEnd::between(sockets, bench.args.server_cpu);
                drive(bench, Some(&peer.map_err(|e| e.to_string())?.server), load)
            });
            parties.push((TESTPMD.to_owned(), peer));
        } else {
            let peer: PartyRun<'_> = Box::new(move || drive(bench, None, &copied));
            parties.push((MEMCPY.to_owned(), peer));
        }
        let rings = if packed { "packed" } else { "split" };
        let what = if size < LONG { "B" } else { "B, still to be cut" };
        let name = format!("guest to guest {size} {what}, {rings} rings");
        cells.push(bench.cell((name, 1, "kpps"), &parties, Compare::First)?);
    }
    Ok(bench.report("vm-to-vm", cells))
}

/// A daemon with a switch and two ports at these sockets.
fn switch(bench: &NetBench<'_>, sockets: &[PathBuf; 2]) -> Result<Server, String> {
    let config = bench.own_file("switch.toml");
    let mut text = "[daemon]\nworkers = 1\n[[switch]]\nname = 's0'\n".to_owned();
    for (index, (socket, mac)) in sockets.iter().zip(MACS).enumerate() {
        let mac: Vec<_> = mac.iter().map(|byte| format!("{byte:02x}")).collect();
        let (socket, mac) = (socket.display(), mac.join(":"));
        let _ = write!(
            text,
            "[[net]]\nname = 'g{index}'\nsocket_path = '{socket}'\nswitch = 's0'\nmac = '{mac}'\n"
        );
    }
    std::fs::write(&config, text).map_err(|error| format!("{}: {error}", config.display()))?;
    let _ = std::fs::remove_file(&sockets[0]);
    bench.daemon_of(&config, &sockets[1])
}

/// Drives both guests once. Without a server: copies in memory.
fn drive(
    bench: &NetBench<'_>,
    server: Option<&Server>,
    load: &VmLoadArgs,
) -> Result<NetSample, String> {
    let mut command = own_load(None, &["vm"])?;
    command.args(load.arguments());
    let of_server = || server.map_or((0.0, 0.0), |s| (s.cpu_seconds(), s.waited_seconds()));
    let ((cpu, waited), start) = (of_server(), now());
    let result: NetLoadResult = result_of(&mut command, &bench.client)?;
    let (cpu_after, waited_after) = of_server();
    let share = (waited_after - waited) / start.elapsed().as_secs_f64();
    Ok(sample_of(&result, cpu_after - cpu, share * result.seconds + result.waited_seconds))
}
