//! Requests and responses over TCP from User Mode Linux, with a worker that may look on and with
//! one that never does: every answer is right, and afterwards the daemon takes no CPU time.

use super::uml_net_ping_and_iperf3::lost_nothing;
use super::{Behaviour, Scene};
use crate::guest::Kind;
use crate::guest_load::{Party, Rig, Setup};
use crate::{Outcome, check};
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "uml_tcp_rr", run };

/// Connections, and how long they ask.
const LOADS: [(usize, Duration); 2] = [(1, Duration::from_secs(1)), (32, Duration::from_secs(1))];
/// Transactions that one load makes on an idle machine, and a few loads make on any machine.
const TRANSACTIONS_MIN: u64 = 20;
const IDLE: Duration = Duration::from_secs(2);
/// A frame of the host's that is nobody's answer may come into the first spells.
const SPELLS: usize = 12;
/// A load is repeated where the host's other work left the guest no time.
const TRIES: usize = 30;

fn run(scene: &Scene<'_>) -> Outcome {
    for (polling, may_spin) in [("auto", true), ("never", false)] {
        let setup = Setup {
            daemon: &scene.stage.binary,
            bench: &scene.stage.bench,
            folder: scene.folder.path(),
            logs: &scene.logs,
            parties: &[Party { name: polling, arguments: &["--polling", polling] }],
            guest_cpu: None,
            server_cpu: None,
            daemon_cpu: None,
        };
        let mut rig = Rig::start(scene.kernel(Kind::Uml)?, &setup)?;
        let mut spins = 0;
        for (connections, time) in LOADS {
            let (mut count, what) = (0, format!("polling {polling}, {connections}"));
            for _ in 0..TRIES {
                let load = rig.rr(0, connections, time)?;
                count += load.transactions;
                let has_moved = load.moved.kicks > 0 && load.moved.calls > 0;
                check(has_moved, || format!("{what}: {load:?}"))?;
                spins += load.moved.polling.spins_hit + load.moved.polling.spins_missed;
                if count >= TRANSACTIONS_MIN && (spins > 0 || !may_spin) {
                    break;
                }
            }
            check(count >= TRANSACTIONS_MIN, || format!("{what}: {count} transactions"))?;
        }
        check((spins > 0) == may_spin, || format!("polling {polling}: {spins} spins"))?;
        lost_nothing(&rig.queues(0)?)?;
        rests(&rig).map_err(|error| format!("polling {polling}: {error}"))?;
        rig.stop()?;
    }
    Ok(())
}

/// The guest is up and idles: of a few spells there is one in which the daemon takes no tick of
/// CPU time. One that looks for work, or has a timer, takes some in each.
fn rests(rig: &Rig) -> Outcome {
    let mut ticks = Vec::new();
    while ticks.len() < SPELLS {
        ticks.push(rig.idle_ticks(IDLE)?);
        if ticks.ends_with(&[0]) {
            return Ok(());
        }
    }
    Err(format!("{ticks:?} ticks of CPU time in spells of {} idle seconds", IDLE.as_secs()))
}
