//! Small TCP writes of a guest with two networks, of which one keeps buffers of sent frames
//! (`--reclaim auto`) and one does not: both carry the streams whole, and only one keeps buffers.

use super::uml_net_ping_and_iperf3::lost_nothing;
use super::{Behaviour, Scene};
use crate::guest::Kind;
use crate::guest_load::{Rig, Setup, Stream};
use crate::guest_reclaim::PARTIES;
use crate::{Outcome, check};
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "uml_reclaim", run };

const WRITES: Stream = Stream { size: 200, nodelay: true, connections: 1 };
const TIME: Duration = Duration::from_secs(1);
/// Bytes that one load sends on an idle machine, and a few loads send on any machine.
const BYTES_MIN: u64 = 20_000;
/// On a busy host the guest waits for its CPU again and again. The law begins anew after each pause
/// of a millisecond, so that there may be loads in which no buffer is kept.
const TRIES: usize = 60;

fn run(scene: &Scene<'_>) -> Outcome {
    let setup = Setup {
        daemon: &scene.stage.binary,
        bench: &scene.stage.bench,
        folder: scene.folder.path(),
        logs: &scene.logs,
        parties: &PARTIES,
        guest_cpu: None,
        server_cpu: None,
        daemon_cpu: None,
    };
    let mut rig = Rig::start(scene.kernel(Kind::Uml)?, &setup)?;
    for (index, party) in PARTIES.iter().enumerate() {
        let (mut bytes, mut kept) = (0, 0);
        for _ in 0..TRIES {
            let load = rig.stream(index, WRITES, TIME)?;
            let what = || format!("reclaim {}: {load:?}", party.name);
            check(load.bytes % 200 == 0, what)?;
            check(load.moved.bytes_sent > load.bytes, what)?;
            (bytes, kept) = (bytes + load.bytes, kept + load.moved.buffers_kept);
            if bytes >= BYTES_MIN && (party.name == "off" || kept > 0) {
                break;
            }
        }
        check(bytes >= BYTES_MIN, || format!("reclaim {}: {bytes} bytes", party.name))?;
        let keeps = party.name == "auto";
        check((kept > 0) == keeps, || format!("reclaim {}: {kept} buffers kept", party.name))?;
        lost_nothing(&rig.queues(index)?)?;
    }
    rig.stop()
}
