//! `tap-small`: small frames to a tap: through our daemon, with and without merging, and by a bare
//! loop with one write for each.

use super::ScenarioArgs;
use super::net::{Daemon, NetBench, Run, own_load, result_of};
use super::null_net::{drive_as, sample_of};
use crate::load::net::{Direction, NetLoadArgs, NetLoadResult};
use crate::load::tap::Flow;
use crate::netns::Netns;
use crate::report::Report;
use crate::report::net::{Compare, NetCell, NetSample};

/// What the guest sends, and of how many bytes: such as nothing can be made of, and such as one
/// frame can be made of.
const FRAMES: [(Flow, usize, &str); 6] = [
    (Flow::Apart, 64, "64 B, each of its own flow"),
    (Flow::Apart, 512, "512 B, each of its own flow"),
    (Flow::TcpApart, 512, "512 B, TCP, each of its own flow"),
    (Flow::Udp, 64, "64 B, UDP of one flow"),
    (Flow::Udp, 512, "512 B, UDP of one flow"),
    (Flow::Tcp, 512, "512 B, TCP of one flow"),
];
/// Frames of a burst, and entries of the ring: as many as there is room for; and bursts of sixteen,
/// of which the next is filled while the daemon has one.
const BURSTS: [(usize, u16, &str); 2] = [(64, 1024, ""), (16, 32, ", 16 per burst")];

/// Runs the scenario.
pub(crate) fn run(args: &ScenarioArgs) -> Result<Report<NetCell>, String> {
    let bench = NetBench::new(args)?;
    let mut cells = Vec::new();
    for (burst, queue_size, per_burst) in BURSTS {
        for (flow, size, frames) in FRAMES {
            let load = NetLoadArgs::new(bench.socket(), Direction::Transmit, 1, args.seconds());
            let load = NetLoadArgs { flow, size, burst, queue_size, ..load };
            let through = |daemon: Daemon, merges: bool| -> Run<'_> {
                let (bench, load) = (&bench, load.clone());
                Box::new(move || send(bench, daemon, merges, &load))
            };
            let mut parties: Vec<_> = Vec::new();
            for (name, one) in bench.daemons() {
                parties.push((name.to_owned(), through(one, true)));
            }
            parties.push(("manyring, merge = false".to_owned(), through(Daemon::Ours, false)));
            let bare: Run<'_> = Box::new(|| write_bare(&bench, flow, size));
            parties.push(("bare write loop".to_owned(), bare));
            let name = format!("guest transmits {frames}, to a tap{per_burst}");
            cells.push(bench.cell((name, 1, "kpps"), &parties, Compare::First)?);
        }
    }
    Ok(bench.report("tap-small", cells))
}

/// Sends through a daemon to a tap of a new namespace.
fn send(
    bench: &NetBench<'_>,
    daemon: Daemon,
    merges: bool,
    load: &NetLoadArgs,
) -> Result<NetSample, String> {
    let space = Netns::new()?;
    space.add_tap("host", 1, None)?;
    let mut arguments = vec!["--tap=host".to_owned(), "--workers=1".to_owned()];
    if !merges {
        arguments.push("--merge=false".to_owned());
    }
    let server = bench.daemon(daemon, &arguments, Some(&space), &bench.server)?;
    drive_as(bench, &server, load)
}

/// Writes the same frames to the same tap, each by a call of its own.
fn write_bare(bench: &NetBench<'_>, flow: Flow, size: usize) -> Result<NetSample, String> {
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
            let is_one = |flow: Flow| match flow {
                Flow::Apart => !merges && !is_tcp,
                Flow::TcpApart => !merges && is_tcp,
                Flow::Udp => merges && !is_tcp,
                Flow::Tcp => merges && is_tcp,
            };
            FRAMES.iter().filter(|(flow, ..)| is_one(*flow)).map(|f| f.1).collect::<Vec<_>>()
        };
        assert_eq!((sizes(true, false), sizes(false, false)), (vec![64, 512], vec![64, 512]));
        assert_eq!((sizes(true, true), sizes(false, true)), (vec![512], vec![512]));
    }
}
