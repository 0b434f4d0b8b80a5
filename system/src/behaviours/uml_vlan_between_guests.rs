//! Two guests on one bridge: tagged frames arrive whole, and tags nobody asked for do not.

use super::{Behaviour, Scene};
use crate::command::wait_for;
use crate::daemon::Daemon;
use crate::guest::{Guest, GuestOptions, Kind, Net};
use crate::net::{Capture, Flow, Namespace, WORDS};
use crate::{Outcome, check};
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "uml_vlan_between_guests", run };

/// Of both: VLAN 5 with its own addresses.
const VLAN: &str = r#"
vlan() {
    must ip link add link eth0 name eth0.5 type vlan id 5
    echo 0 > /proc/sys/net/ipv6/conf/eth0.5/accept_dad
    must ip link set eth0.5 up
    must ip addr add 198.51.100.$1/24 dev eth0.5
    must ip addr add 2001:db8:5::$1/64 dev eth0.5
}
"#;

const SERVER: &str = r#"
network 3
vlan 3
head -c 1048576 /dev/urandom > /tmp/file
iperf3 -s -D
nc -ll -p 7001 -e sha256sum &
nc -ll -p 7002 -e cat /tmp/file &
nc -ll -p 7003 -e sha256sum /tmp/file &
must ip link add link eth0 name eth0.6 type vlan id 6
must ip link set eth0.6 up
must ip addr add 203.0.113.3/24 dev eth0.6
# A hundred frames for everybody in VLAN 6; nobody answers.
to_all() { ping -c 100 -i 0.02 -W 1 203.0.113.255 > /dev/null; }
await serving
to_all
await asked
to_all
await asked-again
"#;

const CLIENT: &str = r#"
network 2
vlan 2
pings 198.51.100.3
pings 198.51.100.3 -s 1472
pings 2001:db8:5::3
agrees 192.0.2.3 1024 "untagged"
agrees 198.51.100.3 1024 "IPv4 in VLAN 5"
agrees 2001:db8:5::3 1024 "IPv6 in VLAN 5"
flow to-server 198.51.100.3 -t 1
flow to-client 198.51.100.3 -t 1 -R
must ethtool -K eth0 tx off sg off tso off gso off > /dev/null
agrees 198.51.100.3 512 "IPv4 in VLAN 5, no offload"
agrees 2001:db8:5::3 512 "IPv6 in VLAN 5, no offload"
before=$(received)
await filtered
[ $(($(received) - before)) -lt 100 ] || fail "VLAN 6 came, though nobody asked for it"
must ip link add link eth0 name eth0.6 type vlan id 6
must ip link set eth0.6 up
before=$(received)
await wanted
came 100 || fail "VLAN 6 did not come: $(($(received) - before)) frames"
must ip link del eth0.6
must ip link del eth0.5
pings 192.0.2.3
"#;

const LIMIT: Duration = Duration::from_secs(240);

fn run(scene: &Scene<'_>) -> Outcome {
    let namespace = Namespace::new()?;
    namespace.bridge(1500)?;
    let (server, client) = (End::new(scene, &namespace, 1)?, End::new(scene, &namespace, 0)?);
    let file = scene.log("vlan.pcap");
    let capture = Capture::start(&namespace, "tap0", "inbound", &file)?;
    let mut serving = server.boot(scene, &format!("{WORDS}{VLAN}{SERVER}"))?;
    serving.reach("serving", LIMIT)?;
    let mut asking = client.boot(scene, &format!("{WORDS}{VLAN}{CLIENT}"))?;
    asking.reach("filtered", LIMIT)?;
    serving.proceed()?;
    serving.reach("asked", LIMIT)?;
    wait_for("a hundred filtered frames", LIMIT, || {
        let dropped = client.daemon.queues()?[0].value("dropped_filtered")?;
        Ok((dropped >= 100).then_some(()))
    })?;
    asking.proceed()?;
    asking.reach("wanted", LIMIT)?;
    serving.proceed()?;
    serving.reach("asked-again", LIMIT)?;
    asking.proceed()?;
    let said = asking.finish(LIMIT)?;
    Flow::arrived(&said, "to-server")?;
    Flow::arrived(&said, "to-client")?;
    serving.proceed()?;
    serving.finish(LIMIT)?;
    let tagged = capture.stop(50)?.count("vlan.id == 5 && tcp")?;
    check(tagged > 50, || format!("the tap saw {tagged} tagged TCP frames"))?;
    server.daemon.stop()?;
    client.daemon.stop()?;
    namespace.holds_only(&["br0", "port0", "far0"])
}

/// A guest's side: its daemon on a tap in the bridge.
struct End {
    daemon: Daemon,
    number: u32,
}

impl End {
    fn new(scene: &Scene<'_>, namespace: &Namespace, number: u32) -> Outcome<Self> {
        let (tap, mac) = (format!("tap{number}"), format!("52:54:00:00:00:0{number}"));
        let arguments = ["--tap", &tap, "--bridge", "br0", "--mac", &mac];
        let daemon = scene.serve_net_of(number, namespace, &arguments)?;
        namespace.run(&format!("ip link set {tap} up"))?;
        Ok(Self { daemon, number })
    }

    fn boot(&self, scene: &Scene<'_>, script: &str) -> Outcome<Guest> {
        let socket = self.daemon.socket();
        let net = Some(Net { socket: &socket, pairs: 1 });
        let programs = ["iperf3", "ethtool"].as_slice();
        let options = GuestOptions { net, programs, script, ..Default::default() };
        let console = scene.log(&format!("guest{}.log", self.number));
        Guest::boot(scene.kernel(Kind::Uml)?, &options, &console)
    }
}
