//! Our own control queue, as ethtool and ip use it: the tap follows, and traffic goes on.

use super::{Behaviour, Scene};
use crate::guest::{Guest, GuestOptions, Kind};
use crate::net::{Far, Namespace};
use crate::{Outcome, check};
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "uml_ethtool", run };

const SCRIPT: &str = r#"
pairs() { ethtool -l eth0 | awk '/^Combined/{print $2}' | sed -n "$1p"; }
network
is "the MTU" $(cat /sys/class/net/eth0/mtu) 1400
is "the most pairs" "$(pairs 1)" 4
is "pairs at the start" "$(pairs 2)" 1
await pairs-1a
for n in 2 3 4 1b 4b; do
    must ethtool -L eth0 combined ${n%b}
    is "pairs" "$(pairs 2)" ${n%b}
    pings $HOST
    agrees $HOST 128 "$n pairs"
    await pairs-$n
done
ethtool -L eth0 combined 5 2> /dev/null && fail "five of four pairs were granted"

must ethtool -C eth0 rx-usecs 50 rx-frames 16 tx-usecs 60 tx-frames 8
must ethtool -c eth0 > /tmp/coalesce
for word in "rx-usecs:.*50" "rx-frames:.*16" "tx-usecs:.*60" "tx-frames:.*8"; do
    grep -q "^$word" /tmp/coalesce || fail "ethtool -c does not say $word"
done
pings $HOST
agrees $HOST 256 "coalesced"
must ethtool -C eth0 rx-usecs 0 rx-frames 1 tx-usecs 0 tx-frames 1

for feature in tx-checksum-ip-generic tx-scatter-gather tx-tcp-segmentation \
    tx-tcp6-segmentation generic-segmentation-offload generic-receive-offload rx-gro-hw; do
    for state in off on; do
        must ethtool -K eth0 $feature $state > /dev/null
        ethtool -k eth0 | grep -q "^[[:space:]]*$feature: $state" ||
            fail "$feature is not $state: $(ethtool -k eth0 | grep "$feature:")"
        agrees $HOST 64 "$feature $state"
        agrees $HOST6 64 "$feature $state"
    done
    # Off took others with it: all on again.
    must ethtool -K eth0 tx on sg on tso on gso on > /dev/null
done
await gro-on
must ethtool -K eth0 rx-gro-hw off > /dev/null
await gro-off
must ethtool -K eth0 rx-gro-hw on > /dev/null
await gro-on-again
"#;

/// Addresses and filters, link and MTU.
const SCRIPT_2: &str = r#"
must ip link set eth0 address 52:54:00:aa:bb:cc
pings $HOST
await mac
before=$(received)
await strangers-1
strangers=$(($(received) - before))
must ip link set eth0 promisc on
before=$(received)
await strangers-2
came 100 || fail "promiscuous, but not all frames came: $(($(received) - before))"
must ip link set eth0 promisc off
[ $strangers -lt 100 ] || fail "$strangers frames for somebody else came"
must ifconfig eth0 allmulti
pings $HOST
must ifconfig eth0 -allmulti
pings $HOST

must ip link add link eth0 name eth0.5 type vlan id 5
must ip link set eth0.5 up
must ip addr add 198.51.100.2/24 dev eth0.5
arping -c 2 -w 2 -I eth0.5 198.51.100.1 > /dev/null
await tagged
must ip link del eth0.5
pings $HOST

await up
becomes /sys/class/net/eth0/carrier 0
await down
becomes /sys/class/net/eth0/carrier 1
pings $HOST

await mtu
device=$(basename $(readlink -f /sys/class/net/eth0/device))
echo $device > /sys/bus/virtio/drivers/virtio_net/unbind
echo $device > /sys/bus/virtio/drivers/virtio_net/bind
becomes /sys/class/net/eth0/mtu 1300
network
pings $HOST
agrees $HOST 256 "bound again"
must ethtool -L eth0 combined 4
agrees $HOST 256 "bound again, four pairs"
await bound-again
"#;

const LIMIT: Duration = Duration::from_secs(180);
const TAP: &str = "tap0";

fn run(scene: &Scene<'_>) -> Outcome {
    let namespace = Namespace::new()?;
    let arguments = ["--tap", TAP, "--queue-pairs", "4", "--mtu", "1400"];
    let daemon = scene.serve_net(&namespace, &arguments)?;
    namespace.address(TAP)?;
    let _far = Far::start(&namespace, scene.folder.path())?;
    let (programs, script) = (["ethtool"].as_slice(), format!("{SCRIPT}{SCRIPT_2}"));
    let options = GuestOptions { programs, script: &script, ..Default::default() };
    let mut guest = scene.boot_net(Kind::Uml, &daemon, options)?;
    for (mark, pairs) in [("1a", 1), ("2", 2), ("3", 3), ("4", 4), ("1b", 1), ("4b", 4)] {
        guest.reach(&format!("pairs-{mark}"), LIMIT)?;
        namespace.until_attached(TAP, pairs)?;
        guest.proceed()?;
    }
    for (mark, word) in [("gro-on", "on"), ("gro-off", "off"), ("gro-on-again", "on")] {
        guest.reach(mark, LIMIT)?;
        let features = namespace.run(&format!("ethtool -k {TAP}"))?;
        let line = format!("tx-tcp-segmentation: {word}");
        check(features.contains(&line), || format!("{mark}: the tap lacks {line}: {features}"))?;
        guest.proceed()?;
    }
    filters(&namespace, &mut guest)?;
    guest.reach("up", LIMIT)?;
    daemon.link("net0", false)?;
    guest.proceed()?;
    guest.reach("down", LIMIT)?;
    daemon.link("net0", true)?;
    guest.proceed()?;
    guest.reach("mtu", LIMIT)?;
    daemon.mtu("net0", 1300)?;
    let mtu = namespace.run(&format!("cat /sys/class/net/{TAP}/mtu"))?;
    check(mtu.trim() == "1300", || format!("the tap's MTU is {mtu}"))?;
    guest.proceed()?;
    guest.reach("bound-again", LIMIT)?;
    for (index, queue) in daemon.queues()?.iter().enumerate() {
        let faults = queue.value("faults")?;
        check(faults == 0, || format!("queue {index}: {faults} faults"))?;
    }
    guest.proceed()?;
    guest.finish(LIMIT)?;
    daemon.stop()?;
    namespace.holds_only(&[])
}

/// The guest's own address, frames for somebody else, a tag.
fn filters(namespace: &Namespace, guest: &mut Guest) -> Outcome {
    guest.reach("mac", LIMIT)?;
    let neighbours = namespace.run(&format!("ip neigh show dev {TAP}"))?;
    let is_new = neighbours.contains("52:54:00:aa:bb:cc");
    check(is_new, || format!("the guest's new address is not seen: {neighbours}"))?;
    guest.proceed()?;
    let stranger = "192.0.2.77";
    namespace.run(&format!("ip neigh add {stranger} lladdr 02:00:00:00:00:77 dev {TAP}"))?;
    for mark in ["strangers-1", "strangers-2"] {
        guest.reach(mark, LIMIT)?;
        // Nobody answers: ping says so with its status.
        let _ = namespace.run(&format!("busybox ping -c 100 -i 0.02 -W 1 {stranger}"));
        guest.proceed()?;
    }
    guest.reach("tagged", LIMIT)?;
    guest.proceed()
}
