//! The driver leaves and comes back, the guest boots again, the daemon is killed under load:
//! traffic resumes.

use super::{Behaviour, Scene};
use crate::daemon::Daemon;
use crate::guest::{GuestOptions, Kind, Net};
use crate::net::{Far, Flow, Namespace};
use crate::{Outcome, check};
use std::path::Path;
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "qemu_net_survives", run };

const SCRIPT: &str = r#"
works() {
    pings $HOST
    agrees $HOST 512 "$1"
    agrees $HOST6 512 "$1"
}
mark boot
read -r boot
network
works "boot $boot"
if [ $boot = 1 ]; then
    device=$(basename $(readlink -f /sys/class/net/eth0/device))
    for round in 1 2 3; do
        echo $device > /sys/bus/virtio/drivers/virtio_net/unbind
        [ -d /sys/class/net/eth0 ] && fail "still bound"
        echo $device > /sys/bus/virtio/drivers/virtio_net/bind
        network
        works "bound again, round $round"
    done
    mark bound
    reboot -f
    sleep 60
fi
timeout 120 iperf3 -c $HOST -f m -t 20 > /tmp/load 2>&1 &
load=$!
sleep 2
await loaded
wait $load || { cat /tmp/load; fail "the connection was lost"; }
grep receiver /tmp/load | tail -n 1 | sed "s/^/FLOW load /"
works "the daemon started again"
await after
"#;

const TAP: &str = "tap0";
const LIMIT: Duration = Duration::from_secs(360);
const BOOT: Duration = Duration::from_secs(360);

fn run(scene: &Scene<'_>) -> Outcome {
    let namespace = Namespace::new()?;
    // It stays without the daemon, as a tap made by an administrator does.
    namespace.lasting_tap(TAP)?;
    let daemon =
        scene.serve_net(&namespace, &["--tap", TAP, "--must-exist", "--queue-pairs", "2"])?;
    let _far = Far::start(&namespace, scene.folder.path())?;
    let options = GuestOptions {
        net: Some(Net { socket: Path::new(""), pairs: 2 }),
        cpus: 2,
        programs: &["iperf3"],
        script: SCRIPT,
        can_reboot: true,
        ..Default::default()
    };
    let mut guest = scene.boot_net(Kind::Qemu, &daemon, options)?;
    guest.reach("boot", LIMIT)?;
    guest.answer("1")?;
    guest.reach("bound", LIMIT)?;
    guest.forget()?;
    guest.reach("boot", BOOT)?;
    guest.answer("2")?;
    guest.reach("loaded", LIMIT)?;
    let options = daemon.crash()?;
    let socket = options.socket();
    let daemon = Daemon::start(options, &socket)?;
    guest.proceed()?;
    guest.reach("after", LIMIT)?;
    let queues = daemon.queues()?;
    let sum = queues.iter().map(|queue| queue.value("packets")).sum::<Outcome<u64>>()?;
    check(sum > 1000, || format!("the daemon that was started again moved {sum} packets"))?;
    guest.proceed()?;
    let said = guest.finish(LIMIT)?;
    Flow::arrived(&said, "load")?;
    daemon.stop()?;
    namespace.holds_only(&[TAP])
}
