//! `tap-small`: small frames to a tap: through our daemon, with and without merging, and by a bare
//! loop with one write for each; and by several queue pairs, with and without steering.

use super::ScenarioArgs;
use super::net::{Daemon, NetBench, PartyRun};
use super::null_net::{drive_as, sample_of};
use crate::direction::Direction;
use crate::load::frame::FlowKind;
use crate::load::net::{NetLoadArgs, NetLoadResult};
use crate::netns::Netns;
use crate::own_load::{own_load, result_of};
use crate::report::ScenarioReport;
use crate::report::net::{Compare, NetCell, NetSample};

/// The frames that the guest sends, with their bytes: frames that cannot be merged, and frames that
/// can be merged into one.
const FRAMES: [(FlowKind, usize, &str); 6] = [
    (FlowKind::Apart, 64, "64 B, each of its own flow"),
    (FlowKind::Apart, 512, "512 B, each of its own flow"),
    (FlowKind::TcpApart, 512, "512 B, TCP, each of its own flow"),
    (FlowKind::Udp, 64, "64 B, UDP of one flow"),
    (FlowKind::Udp, 512, "512 B, UDP of one flow"),
    (FlowKind::Tcp, 512, "512 B, TCP of one flow"),
];
/// Frames of a burst, and entries of the ring: the most that there is room for; and bursts of
/// sixteen, of which the next is filled while the daemon has one.
const BURSTS: [(usize, u16, &str); 2] = [(64, 1024, ""), (16, 32, ", 16 per burst")];
/// Queue pairs of a guest that has several.
const PAIRS: u16 = 4;
/// Options that switch off one feature of the daemon.
const NO_MERGE: &str = "--merge=false";
const NO_STEER: &str = "--steer=false";

/// Runs the scenario.
pub(crate) fn run(args: &ScenarioArgs) -> Result<ScenarioReport<NetCell>, String> {
    let bench = NetBench::new(args)?;
    let mut cells = Vec::new();
    for (burst, queue_size, per_burst) in BURSTS {
        for (flow, size, frames) in FRAMES {
            let load = NetLoadArgs::new(bench.socket(), Direction::Transmit, 1, args.seconds());
            let load = NetLoadArgs { flow, size, burst, queue_size, ..load };
            let through = |daemon: Daemon, without: Option<&'static str>| -> PartyRun<'_> {
                let (bench, load) = (&bench, load.clone());
                Box::new(move || send(bench, daemon, without, &load))
            };
            let mut parties: Vec<_> = Vec::new();
            for (name, one) in bench.daemons() {
                parties.push((name.to_owned(), through(one, None)));
            }
            parties.push((
                "manyring, merge = false".to_owned(),
                through(Daemon::Ours, Some(NO_MERGE)),
            ));
            let bare: PartyRun<'_> = Box::new(|| write_bare(&bench, flow, size));
            parties.push(("bare write loop".to_owned(), bare));
            let name = format!("guest transmits {frames}, to a tap{per_burst}");
            cells.push(bench.cell((name, 1, "kpps"), &parties, Compare::First)?);
        }
    }
    for (flow, size, frames) in
        FRAMES.into_iter().filter(|(flow, size, _)| is_for_pairs(*flow, *size))
    {
        let through = |daemon: Daemon, pairs: u16, without: Option<&'static str>| -> PartyRun<'_> {
            let direction = Direction::Transmit;
            let load = NetLoadArgs::new(bench.socket(), direction, pairs, bench.args.seconds());
            let (bench, load) = (&bench, NetLoadArgs { flow, size, ..load });
            Box::new(move || send(bench, daemon, without, &load))
        };
        let mut parties: Vec<_> = Vec::new();
        for (name, one) in bench.daemons() {
            parties.push((name.to_owned(), through(one, PAIRS, None)));
        }
        let host = through(Daemon::Ours, PAIRS, Some(NO_STEER));
        parties.push(("manyring, steer = false".to_owned(), host));
        parties.push(("manyring, 1 pair".to_owned(), through(Daemon::Ours, 1, None)));
        let name = format!("guest transmits {frames}, to a tap by {PAIRS} pairs");
        cells.push(bench.cell((name, 1, "kpps"), &parties, Compare::First)?);
    }
    Ok(bench.report("tap-small", cells))
}

/// Frames that are sent by several pairs too.
fn is_for_pairs(flow: FlowKind, size: usize) -> bool {
    size == 64 && matches!(flow, FlowKind::Apart | FlowKind::Udp)
}

/// Sends through a daemon to a tap of a new namespace.
fn send(
    bench: &NetBench<'_>,
    daemon: Daemon,
    without: Option<&str>,
    load: &NetLoadArgs,
) -> Result<NetSample, String> {
    let space = Netns::new()?;
    space.add_tap("host", load.queue_pairs, None)?;
    let mut arguments = vec!["--tap=host".to_owned(), "--workers=1".to_owned()];
    arguments.push(format!("--queue-pairs={}", load.queue_pairs));
    arguments.extend(without.map(str::to_owned));
    let server = bench.daemon(daemon, &arguments, Some(&space), &bench.server)?;
    drive_as(bench, &server, load)
}

/// Writes the same frames to the same tap, each by a call of its own.
fn write_bare(bench: &NetBench<'_>, flow: FlowKind, size: usize) -> Result<NetSample, String> {
    let space = Netns::new()?;
    space.add_tap("host", 1, None)?;
    let options = [
        "tap-write".to_owned(),
        "--tap=host".to_owned(),
        format!("--seconds={}", bench.args.seconds()),
        format!("--size={size}"),
        format!("--flow={}", flow.word()),
    ];
    let options: Vec<&str> = options.iter().map(String::as_str).collect();
    let mut command = own_load(Some(&space), &options)?;
    let result: NetLoadResult = result_of(&mut command, &bench.server)?;
    Ok(sample_of(&result, result.client_cpu_seconds, result.waited_seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_a_row_with_and_one_without_merging_of_each_kind_and_size() {
        let sizes = |merges: bool, is_tcp: bool| {
            let is_one = |flow: FlowKind| match flow {
                FlowKind::Apart => !merges && !is_tcp,
                FlowKind::TcpApart => !merges && is_tcp,
                FlowKind::Udp => merges && !is_tcp,
                FlowKind::Tcp => merges && is_tcp,
            };
            FRAMES.iter().filter(|(flow, ..)| is_one(*flow)).map(|f| f.1).collect::<Vec<_>>()
        };
        assert_eq!((sizes(true, false), sizes(false, false)), (vec![64, 512], vec![64, 512]));
        assert_eq!((sizes(true, true), sizes(false, true)), (vec![512], vec![512]));
    }
}
