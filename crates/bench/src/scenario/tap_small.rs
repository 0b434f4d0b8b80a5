//! `tap-small`: small frames to a tap: through our daemon, with and without merging, and by a bare
//! loop with one write for each.

use super::ScenarioArgs;
use super::net::{Daemon, NetBench, Run, own_load, result_of};
use super::null_net::{drive_as, sample_of};
use crate::load::net::{Direction, NetLoadArgs, NetLoadResult};
use crate::load::tap::Flow;
use crate::netns::Netns;
use crate::report::Report;
use crate::report::net::{Compare, NetCell};

/// What the guest sends, and of how many bytes.
const CELLS: [(Flow, usize, &str); 4] = [
    (Flow::Apart, 64, "guest transmits 64 B, each of its own flow, to a tap"),
    (Flow::Udp, 64, "guest transmits 64 B, UDP of one flow, to a tap"),
    (Flow::Udp, 512, "guest transmits 512 B, UDP of one flow, to a tap"),
    (Flow::Tcp, 512, "guest transmits 512 B, TCP of one flow, to a tap"),
];

/// Runs the scenario.
pub(crate) fn run(args: &ScenarioArgs) -> Result<Report<NetCell>, String> {
    let bench = NetBench::new(args)?;
    let mut cells = Vec::new();
    let server = &bench.server;
    for (flow, size, name) in CELLS.into_iter() {
        let through = |daemon: Daemon, merges: bool| -> Run<'_> {
            let bench = &bench;
            Box::new(move || {
                let space = Netns::new()?;
                space.add_tap("host", 1, None)?;
                let mut arguments = vec!["--tap=host".to_owned(), "--workers=1".to_owned()];
                if !merges {
                    arguments.push("--merge=false".to_owned());
                }
                let server = bench.daemon(daemon, &arguments, Some(&space), &bench.server)?;
                let load = NetLoadArgs::new(bench.socket(), Direction::Transmit, 1, args.seconds());
                drive_as(bench, &server, &NetLoadArgs { flow, size, ..load })
            })
        };
        let bare: Run<'_> = Box::new(move || {
            let space = Netns::new()?;
            space.add_tap("host", 1, None)?;
            let options = [
                "tap-write".to_owned(),
                "--tap=host".to_owned(),
                format!("--seconds={}", args.seconds()),
                format!("--size={size}"),
                format!("--flow={}", flow.word()),
            ];
            let options: Vec<&str> = options.iter().map(String::as_str).collect();
            let mut command = own_load(Some(&space), &options)?;
            let result: NetLoadResult = result_of(&mut command, server)?;
            Ok(sample_of(&result, result.client_cpu_seconds, result.waited_seconds))
        });
        let mut parties: Vec<_> = Vec::new();
        for (name, one) in bench.daemons() {
            parties.push((name.to_owned(), through(one, true)));
        }
        parties.push(("manyring, merge = false".to_owned(), through(Daemon::Ours, false)));
        parties.push(("bare write loop".to_owned(), bare));
        cells.push(bench.cell((name.to_owned(), 1, "kpps"), &parties, Compare::First)?);
    }
    Ok(bench.report("tap-small", cells))
}
