//! Every combination of offloads, MTUs from 68 to 65,521, IPv4 and IPv6: data unchanged, and every
//! checksum right on a cable behind the tap.

use super::uml_net_ping_and_iperf3::lost_nothing;
use super::{Behaviour, Scene};
use crate::daemon::Daemon;
use crate::guest::{Guest, GuestOptions, Kind};
use crate::net::{Capture, Far, Namespace};
use crate::{Outcome, check};
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "uml_offload_matrix", run };

const MTU_MAX: u32 = 65_521;
/// Downwards: Linux remembers the smallest that a path had.
const MTUS: [u32; 6] = [MTU_MAX, 9000, 1500, 1280, 576, 68];
/// Below this, TCP's smallest segment (`tcp_min_snd_mss`: 48 octets with its options) and its
/// headers do not fit a frame: IP cuts it in fragments.
const MTU_OF_ANY_SEGMENT: u32 = 88;

/// The guest's way out: checksum, scatter-gather, segmentation; and its way in.
const SCRIPT: &str = r#"
switch() { must ethtool -K eth0 "$@" > /dev/null; }
# udp ADDRESS: datagrams as long as a frame there, much longer ones back.
udp() {
    size=$(($mtu - 48))
    flow udp $1 -u -l $(($size < 16 ? 16 : $size)) -n 256K -b 50M > /dev/null
    flow udp-back $1 -u -l 8000 -n 256K -b 50M -R > /dev/null
}
network
read -r mtu which
while [ $mtu != end ]; do
    must ip link set eth0 mtu $mtu
    kib=256
    [ $mtu -ge 576 ] || kib=32
    for out in "tx on sg on tso on" "tx on sg on tso off" "tx on sg off tso off" \
        "tx off sg off tso off"; do
        for in in on off; do
            [ $which = all ] || [ "$out $in" = "tx on sg on tso on on" ] ||
                [ "$out $in" = "tx off sg off tso off off" ] || continue
            switch $out
            switch rx-gro-hw $in
            what="MTU $mtu, $out, rx-gro-hw $in"
            agrees $HOST $kib "$what"
            [ $mtu -ge 1280 ] && agrees $HOST6 $kib "$what"
        done
    done
    switch tx on sg on tso on
    udp $HOST
    [ $mtu -ge 1280 ] && udp $HOST6
    mark mtu-$mtu
    read -r mtu which
done
grep -E '^(Tcp|Udp|Ip):' /proc/net/snmp | sed 's/^/SNMP /'
"#;

const LIMIT: Duration = Duration::from_secs(300);
/// How often the guest sends once more where nothing was merged.
const TRIES: usize = 5;

fn run(scene: &Scene<'_>) -> Outcome {
    let namespace = Namespace::new()?;
    namespace.bridge(MTU_MAX)?;
    let mtu = MTU_MAX.to_string();
    let daemon =
        scene.serve_net(&namespace, &["--tap", "tap0", "--bridge", "br0", "--mtu", &mtu])?;
    namespace.run("ip link set tap0 up")?;
    let _far = Far::start(&namespace, scene.folder.path())?;
    let programs = ["ethtool", "iperf3"].as_slice();
    let options = GuestOptions { programs, script: SCRIPT, ..Default::default() };
    let mut guest = scene.boot_net(Kind::Uml, &daemon, options)?;
    for mtu in MTUS {
        one_mtu(scene, &namespace, &mut guest, mtu, if mtu == 1500 { "all" } else { "ends" })?;
        if mtu == 1500 {
            // Repeat it without the tap's own offloads towards the guest.
            namespace.run("ethtool -K tap0 tso off tx off")?;
            one_mtu(scene, &namespace, &mut guest, mtu, "ends")?;
            namespace.run("ethtool -K tap0 tx on tso on")?;
            // Where the daemon takes each segment as soon as it is sent, none gathers to be merged.
            for _ in 0..TRIES {
                if merged(&daemon)? > 0 {
                    break;
                }
                one_mtu(scene, &namespace, &mut guest, mtu, "all")?;
            }
        }
    }
    guest.answer("end")?;
    let said = guest.finish(LIMIT)?;
    no_checksum_was_wrong(&said)?;
    let queues = daemon.queues()?;
    lost_nothing(&queues)?;
    // Without TSO the guest cuts by itself, and what it sends together leaves as one.
    let merged = merged(&daemon)?;
    check(merged > 0, || "no segment was merged".into())?;
    daemon.stop()?;
    namespace.holds_only(&["br0", "port0", "far0"])
}

/// Segments of the guest that left as part of a longer one.
fn merged(daemon: &Daemon) -> Outcome<u64> {
    daemon.queues()?.get(1).ok_or("no tx queue")?.value("merged_packets")
}

/// All that the guest sends with this MTU, as it comes out of the cable.
fn one_mtu(
    scene: &Scene<'_>,
    namespace: &Namespace,
    guest: &mut Guest,
    mtu: u32,
    combinations: &str,
) -> Outcome {
    for link in ["far0", "port0"] {
        namespace.run(&format!("ip link set {link} mtu {mtu}"))?;
    }
    if mtu < MTU_OF_ANY_SEGMENT {
        // The host's TCP hands IP up to a thousand segments in one piece here, each becomes two
        // fragments, and when the cable's backlog overflows amid them, TCP counts the whole piece
        // as never sent: it refuses every acknowledgement of what did arrive, and the connection
        // stands still. That is so between any two namespaces. A piece of one segment is whole.
        namespace.run("ip link set far0 gso_max_segs 1")?;
    }
    let file = scene.log(&format!("{mtu}.pcap"));
    let capture = Capture::start(namespace, "far0", "inbound", &file)?;
    guest.forget()?;
    guest.answer(&format!("{mtu} {combinations}"))?;
    guest.reach(&format!("mtu-{mtu}"), LIMIT)?;
    let enough = if mtu > 9000 { 5 } else { 20 };
    let frames = capture.stop(2 * enough)?;
    let name = format!("MTU {mtu}");
    frames.are_right(&name, "tcp.checksum.status == 1 && tcp.len > 0 && ip", enough)?;
    frames.are_right(&name, "udp.checksum.status == 1 && ip", enough)?;
    if mtu >= 1280 {
        frames.are_right(&name, "tcp.checksum.status == 1 && tcp.len > 0 && ipv6", enough)?;
        frames.are_right(&name, "udp.checksum.status == 1 && ipv6", enough)?;
    }
    let full = frames.count(&format!("frame.len == {}", mtu + 14))?;
    let long = frames.count(&format!("frame.len > {}", mtu + 14))?;
    check(long == 0, || format!("{name}: {long} frames are longer"))?;
    check(full > 0, || format!("{name}: no frame is as long as it may be"))?;
    std::fs::remove_file(&file).map_err(|error| format!("{}: {error}", file.display()))
}

/// The guest's own counters: `InCsumErrors` is named in the first line of each kind.
fn no_checksum_was_wrong(said: &str) -> Outcome {
    let mut lines = said.lines().filter_map(|line| line.strip_prefix("SNMP "));
    let mut found = 0;
    while let (Some(names), Some(values)) = (lines.next(), lines.next()) {
        let pairs = names.split_whitespace().zip(values.split_whitespace());
        for (name, value) in pairs.filter(|(name, _)| *name == "InCsumErrors") {
            check(value == "0", || format!("{name}: {value} in the guest: {values}"))?;
            found += 1;
        }
    }
    check(found >= 2, || format!("the guest counts no checksums: {said}"))
}
