//! `tap-small`: small frames, each of a flow of its own, to a tap: through our daemon, and by a
//! bare loop with one write for each.

use super::ScenarioArgs;
use super::net::{Daemon, NetBench, Run, own_load, result_of};
use super::null_net::{drive, sample_of};
use crate::load::net::{Direction, NetLoadResult};
use crate::netns::Netns;
use crate::report::Report;
use crate::report::net::{Compare, NetCell};

/// Runs the scenario.
pub(crate) fn run(args: &ScenarioArgs) -> Result<Report<NetCell>, String> {
    let bench = NetBench::new(args)?;
    let through = |daemon: Daemon| -> Run<'_> {
        let bench = &bench;
        Box::new(move || {
            let space = Netns::new()?;
            space.add_tap("host", 1, None)?;
            let arguments = ["--tap=host".to_owned(), "--workers=1".to_owned()];
            let server = bench.daemon(daemon, &arguments, Some(&space), &bench.server)?;
            drive(bench, &server, Direction::Transmit, 1)
        })
    };
    let bare: Run<'_> = Box::new(|| {
        let space = Netns::new()?;
        space.add_tap("host", 1, None)?;
        let seconds = format!("--seconds={}", args.seconds());
        let mut command = own_load(Some(&space), &["tap-write", "--tap=host", &seconds])?;
        let result: NetLoadResult = result_of(&mut command, &bench.server)?;
        Ok(sample_of(&result, result.client_cpu_seconds, result.waited_seconds))
    });
    let daemons = bench.daemons().into_iter();
    let mut parties: Vec<_> = daemons.map(|(name, one)| (name.to_owned(), through(one))).collect();
    parties.push(("bare write loop".to_owned(), bare));
    let name = "guest transmits 64 B, each of its own flow, to a tap".to_owned();
    let cell = bench.cell((name, 1, "kpps"), &parties, Compare::First)?;
    drop(parties);
    Ok(bench.report("tap-small", [cell]))
}
