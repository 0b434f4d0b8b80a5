//! A macvtap with two queues on a veth: the same traffic as on a tap; the guest is found by IPv6,
//! and hears a group that it joins. What the macvtap cannot give to a guest is refused.

use super::{Behaviour, Scene};
use crate::guest::{GuestOptions, Kind};
use crate::net::{Far, Flow, Namespace};
use crate::{Outcome, check};
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "macvtap_over_veth", run };

const SCRIPT: &str = r#"
network
echo 0 > /proc/sys/net/ipv4/icmp_echo_ignore_broadcasts
# Nothing was sent from here: whoever looks for this guest solicits it at a group.
await found
# Debian's own program: busybox joins no group.
must /bin/ip addr add 224.0.0.251/32 dev eth0 autojoin
await joined
before=$(dmesg | grep -c "enable promisc mode")
must ip link set eth0 promisc on
[ $(dmesg | grep -c "enable promisc mode") -gt $before ] || fail "promiscuous, says the device"
must ip link set eth0 promisc off
! ip link set eth0 address 02:00:00:00:00:77 2>/dev/null || fail "another address is set"
must ethtool -L eth0 combined 2
pings $HOST
pings $HOST6
agrees $HOST 512 "IPv4"
agrees $HOST6 512 "IPv6"
flow to-host $HOST -P 8 -t 2
flow to-guest $HOST -P 8 -t 2 -R
agrees $HOST 512 "after the load"
await done
"#;

const LIMIT: Duration = Duration::from_secs(180);
const MAC: &str = "52:54:00:12:34:57";

fn run(scene: &Scene<'_>) -> Outcome {
    let namespace = Namespace::new()?;
    for words in [
        "ip link add under0 type veth peer name far0".to_owned(),
        "ip link set under0 addrgenmode none up".into(),
        format!(
            "ip link add link under0 name macvtap0 address {MAC} numtxqueues 2 numrxqueues 2 \
             type macvtap mode bridge"
        ),
        "ip link set macvtap0 addrgenmode none up".into(),
    ] {
        namespace.run(&words)?;
    }
    namespace.address("far0")?;
    let arguments = ["--macvtap", "macvtap0", "--queue-pairs", "2", "--mac", MAC];
    let daemon = scene.serve_net(&namespace, &arguments)?;
    let _far = Far::start(&namespace, scene.folder.path())?;
    let programs = ["iperf3", "ethtool", "ip"].as_slice();
    let options = GuestOptions { programs, script: SCRIPT, ..Default::default() };
    let mut guest = scene.boot_net(Kind::Uml, &daemon, options)?;
    for (mark, address) in [("found", "2001:db8::2"), ("joined", "224.0.0.251")] {
        guest.reach(mark, LIMIT)?;
        let said = namespace.run(&format!("ping -c 3 -W 5 -I far0 {address}"))?;
        check(said.contains(" 0% packet loss"), || said)?;
        guest.proceed()?;
    }
    guest.reach("done", LIMIT)?;
    for (index, queue) in daemon.queues()?.iter().take(4).enumerate() {
        let packets = queue.value("packets")?;
        check(packets > 20, || format!("queue {index} moved {packets} packets"))?;
    }
    guest.proceed()?;
    let said = guest.finish(LIMIT)?;
    Flow::arrived(&said, "to-host")?;
    Flow::arrived(&said, "to-guest")?;
    daemon.stop()?;
    namespace.holds_only(&["under0", "far0", "macvtap0"])
}
