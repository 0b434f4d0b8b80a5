//! Guests whose disk and network have packed rings: fio finds what it wrote, connections outlive
//! daemons that are killed under load, and so do requests that are in flight.

use super::qemu_survives_sigkills_under_load::{HAS_PACKED, survive};
use super::{Behaviour, Scene};
use crate::command::wait_for;
use crate::daemon::Daemon;
use crate::guest::{GuestOptions, Kind, Net};
use crate::net::{Far, Flow, Namespace, WORDS};
use crate::{Outcome, check};
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "qemu_packed_rings", run };

/// Each job has its own CPU, so its own queue. Then the network, both ways.
const SCRIPT: &str = r#"
[ "$(cut -c35 /sys/class/net/eth0/device/features)" = 1 ] || fail "the network is not packed"
must fio --name=verify --filename=$DISK --size=24M --offset_increment=24M --numjobs=2 \
    --rw=randrw --rwmixread=30 --bsrange=512-64k --blockalign=512 --verify=crc32c \
    --verify_fatal=1 --do_verify=1 --ioengine=libaio --iodepth=16 --direct=1 --thread \
    --cpus_allowed=0-1 --cpus_allowed_policy=split --group_reporting --eta=never
network
pings $HOST
await verified
timeout 120 iperf3 -c $HOST -p 5201 -f m -t 12 > /tmp/there 2>&1 &
there=$!
timeout 120 iperf3 -c $HOST -p 5202 -f m -t 12 -R > /tmp/back 2>&1 &
back=$!
await loaded
for load in there back; do
    eval wait \$$load || { cat /tmp/$load; fail "a connection was lost"; }
    grep receiver /tmp/$load | tail -n 1 | sed "s/^/FLOW $load /"
done
agrees $HOST 512 "after the last kill"
"#;

const LIMIT: Duration = Duration::from_secs(420);
/// The daemon of the network is killed so often, each after packets went both ways.
const KILLS: u32 = 3;
const PACKETS: u64 = 200;

fn run(scene: &Scene<'_>) -> Outcome {
    verify(scene)?;
    survive(scene, true)
}

fn verify(scene: &Scene<'_>) -> Outcome {
    let image = scene.image(64)?;
    let daemon = scene.serve(&image, &["--num-queues", "2"])?;
    let namespace = Namespace::new()?;
    namespace.lasting_tap("tap0")?;
    let net = scene.serve_net(&namespace, &["--tap", "tap0", "--must-exist"])?;
    let _far = Far::start(&namespace, scene.folder.path())?;
    let (script, socket) = (format!("{WORDS}{HAS_PACKED}{SCRIPT}"), net.socket());
    let options = GuestOptions {
        queues: 2,
        cpus: 2,
        is_packed: true,
        net: Some(Net { socket: &socket, pairs: 1 }),
        net_properties: ",packed=on",
        programs: &["fio", "iperf3"],
        script: &script,
        ..GuestOptions::default()
    };
    let mut guest = scene.boot(Kind::Qemu, &daemon, options)?;
    guest.reach("verified", LIMIT)?;
    for (index, queue) in daemon.queues()?.iter().enumerate() {
        let (requests, errors) = (queue.value("requests")?, queue.value("errors")?);
        check(requests > 100 && errors == 0, || {
            format!("queue {index} served {requests} requests, {errors} with an error")
        })?;
    }
    guest.proceed()?;
    guest.reach("loaded", LIMIT)?;
    let net = kill_often(net)?;
    guest.proceed()?;
    let said = guest.finish(LIMIT)?;
    check(said.contains("err= 0"), || "fio does not report success".into())?;
    for name in ["there", "back"] {
        Flow::arrived(&said, name)?;
    }
    let log = net.log()?;
    check(!log.contains("queue stopped: "), || format!("a queue has a fault: {log}"))?;
    net.stop()?;
    daemon.stop()
}

/// Kills the daemon of the network under load. The one that follows is told a stale base.
fn kill_often(mut net: Daemon) -> Outcome<Daemon> {
    for _ in 0..KILLS {
        until_moved(&net)?;
        let options = net.crash()?;
        let socket = options.socket();
        net = Daemon::start(options, &socket)?;
    }
    until_moved(&net)?;
    Ok(net)
}

fn until_moved(net: &Daemon) -> Outcome {
    wait_for("packets both ways", LIMIT, || {
        let queues = net.queues()?;
        let moved = queues.iter().take(2).map(|queue| queue.value("packets"));
        let moved = moved.collect::<Outcome<Vec<u64>>>()?;
        Ok(moved.iter().all(|packets| *packets > PACKETS).then_some(()))
    })
}
