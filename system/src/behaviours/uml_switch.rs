//! Two guests on one switch of one daemon: echoes, iperf3 both ways, data unchanged, the host
//! behind an uplink that is deleted and made again, and an address that moves from one port to
//! another.

use super::{Behaviour, Scene};
use crate::command::wait_for;
use crate::daemon::{Daemon, DaemonOptions};
use crate::guest::{Guest, GuestOptions, Kind, Net};
use crate::net::{Flow, Namespace, WORDS, flood};
use crate::{Context, Outcome, check};
use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "uml_switch", run };

const SERVER: &str = r#"
network 3
head -c 1048576 /dev/urandom > /tmp/file
iperf3 -s -D
nc -ll -p 7001 -e sha256sum &
nc -ll -p 7002 -e cat /tmp/file &
nc -ll -p 7003 -e sha256sum /tmp/file &
pings $HOST
await serving
"#;

const CLIENT: &str = r#"
network 2
pings 192.0.2.3
pings 192.0.2.3 -s 1472
pings 192.0.2.3 -s 20000
pings 2001:db8::3
pings $HOST
floods 192.0.2.3
agrees 192.0.2.3 1024 "IPv4"
agrees 2001:db8::3 1024 "IPv6"
flow to-server 192.0.2.3 -n 16M
flow to-client 192.0.2.3 -n 16M -R
await gone
# The interface is there again, and is joined within some seconds.
tries=0
until ping -c 1 -W 1 $HOST > /dev/null; do
    [ $tries -lt 30 ] || fail "the uplink is not joined again"
    tries=$((tries + 1))
done
pings $HOST
must ethtool -K eth0 rx-gro-hw off > /dev/null
agrees 192.0.2.3 256 "segments are cut"
must ethtool -K eth0 rx-gro-hw on > /dev/null
# The address moves to the other port: what was on its way there goes to the new place.
mac=$(cat /sys/class/net/eth0/address)
must ip addr flush dev eth0
must ip link set eth0 down
must ip link set eth1 address $mac
ETH=eth1
network 2
pings 192.0.2.3
agrees 192.0.2.3 256 "moved"
await done
"#;

const LIMIT: Duration = Duration::from_secs(180);
const NAMES: [&str; 3] = ["server", "left", "right"];
const TAP: &str = "tap0";

fn run(scene: &Scene<'_>) -> Outcome {
    let namespace = Namespace::new()?;
    namespace.lasting_tap(TAP)?;
    let (daemon, sockets) = serve(scene, &namespace)?;
    let net = |index: usize| Some(Net { socket: &sockets[index], pairs: 1 });
    let programs = ["iperf3", "ethtool", "ping"].as_slice();
    let script = format!("{WORDS}{SERVER}");
    let options = GuestOptions { net: net(0), programs, script: &script, ..Default::default() };
    let kernel = scene.kernel(Kind::Uml)?;
    let mut serving = Guest::boot(kernel, &options, &scene.log("server.log"))?;
    serving.reach("serving", LIMIT)?;
    let script = format!("{WORDS}{CLIENT}");
    let options = GuestOptions {
        net: net(1),
        second_net: net(2),
        programs,
        script: &script,
        ..Default::default()
    };
    let mut asking = Guest::boot(kernel, &options, &scene.log("client.log"))?;
    flood(&daemon, &mut asking, [NAMES[1], NAMES[0]], LIMIT)?;
    asking.reach("gone", LIMIT)?;
    namespace.run(&format!("ip link delete {TAP}"))?;
    wait_for("the loss of the uplink", LIMIT, || {
        Ok(daemon.log()?.contains("the uplink's interface is gone").then_some(()))
    })?;
    namespace.lasting_tap(TAP)?;
    asking.proceed()?;
    asking.reach("done", LIMIT)?;
    check(daemon.log()?.contains("rejoined"), || "the daemon says nothing of that".into())?;
    let stats = daemon.stats_text()?;
    check(stats.contains("flooded") && stats.contains("moves"), || stats.clone())?;
    asking.proceed()?;
    let said = asking.finish(LIMIT)?;
    for flow in ["to-server", "to-client"] {
        Flow::arrived(&said, flow)?;
    }
    serving.proceed()?;
    serving.finish(LIMIT)?;
    for (index, queue) in daemon.queues()?.iter().enumerate() {
        let faults = queue.value("faults")?;
        check(faults == 0, || format!("queue {index} of the server: {faults} faults"))?;
    }
    daemon.stop()?;
    namespace.run(&format!("ip link delete {TAP}"))?;
    namespace.holds_only(&[])
}

/// A daemon with a switch, and the sockets of its devices.
fn serve(scene: &Scene<'_>, namespace: &Namespace) -> Outcome<(Daemon, Vec<PathBuf>)> {
    let sockets: Vec<_> = NAMES.iter().map(|name| scene.file(&format!("{name}.sock"))).collect();
    let config = scene.file("manyring.toml");
    let control = scene.file("run-control.sock");
    let mut text = format!("[daemon]\ncontrol = '{}'\n", control.display());
    let _ = write!(text, "[[switch]]\nname = 's0'\nuplink = '{TAP}'\n");
    for (name, socket) in NAMES.iter().zip(&sockets) {
        let socket = socket.display();
        let _ = write!(text, "[[net]]\nname = '{name}'\nsocket_path = '{socket}'\nswitch = 's0'\n");
        if crate::guest::is_memory_on_disk() {
            text += "memory_on_disk = true\n";
        }
    }
    std::fs::write(&config, text).context(config.display())?;
    let options = DaemonOptions {
        arguments: ["run".into(), "--config".into(), config.display().to_string()].into(),
        is_controlled: false,
        ..scene.net_options(namespace, &[])
    };
    Ok((Daemon::start(options, &control)?, sockets))
}
