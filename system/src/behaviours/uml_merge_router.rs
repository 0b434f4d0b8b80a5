//! A guest that is a router between two taps: what it forwards leaves merged, and on the far cable
//! every byte, checksum and hop count is right, in order.

use super::uml_merge_transfers::merging;
use super::uml_net_ping_and_iperf3::lost_nothing;
use super::{Behaviour, Scene};
use crate::command::text;
use crate::guest::{GuestOptions, Kind, Net};
use crate::net::{Capture, Far, Flow, Frames, Namespace};
use crate::{Outcome, check, packages};
use std::path::Path;
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "uml_merge_router", run };

/// `eth0` is the way to the far end, `eth1` that to the host that asks.
///
/// The `ping` keeps a timer in the guest that ends every 20 ms. User Mode Linux 6.1 may fall asleep
/// just after an interrupt that has left it frames to forward, and forwards them only after its
/// next interrupt or timer. Without the `ping` this guest slept for up to 0.4 s so, while its
/// daemon waited for receive buffers, and one flow in six lost datagrams; with it none of sixty
/// did.
const SCRIPT: &str = r#"
network
ping -q -i 0.02 127.0.0.1 > /dev/null 2>&1 &
echo 0 > /proc/sys/net/ipv6/conf/eth1/accept_dad
must ip link set eth1 up
must ip addr add 198.51.100.2/24 dev eth1
must ip addr add 2001:db8:5::2/64 dev eth1
echo 1 > /proc/sys/net/ipv4/ip_forward
echo 1 > /proc/sys/net/ipv6/conf/all/forwarding
must ethtool -K eth0 tso off > /dev/null
must ethtool -K eth1 rx-gro-hw on gro on > /dev/null
await uncut
must ethtool -K eth1 rx-gro-hw off > /dev/null
await joined
must ethtool -K eth1 gro off > /dev/null
await one-by-one
"#;

/// The ways of a frame to the guest and onwards: as long as the host has it; cut by the host and
/// joined by the guest's GRO; cut, and forwarded one by one.
const WAYS: [&str; 3] = ["uncut", "joined", "one-by-one"];
/// Lengths of the datagrams that iperf3 sends here: its first one, and the others.
const DATAGRAMS: [u32; 3] = [8 + 4, 8 + 200, 8 + 500];
const MTU: u32 = 1500;
/// Of a packet that one router has forwarded.
const HOPS: u32 = 63;
const LIMIT: Duration = Duration::from_secs(60);

fn run(scene: &Scene<'_>) -> Outcome {
    packages::need("a file to be sent", &["openssl"])?;
    let (near, far) = (Namespace::new()?, Namespace::new()?);
    far.bridge(MTU)?;
    let out = scene.serve_net_of(0, &far, &["--tap", "tap0", "--bridge", "br0"])?;
    let back = scene.serve_net_of(1, &near, &["--tap", "tap1"])?;
    for words in [
        "ip link set tap1 addrgenmode none up",
        "ip address add 198.51.100.1/24 dev tap1",
        "ip address add 2001:db8:5::1/64 dev tap1 nodad",
        "ip route add 192.0.2.0/24 via 198.51.100.2",
        "ip route add 2001:db8::/64 via 2001:db8:5::2",
    ] {
        near.run(words)?;
    }
    for words in [
        "ip link set tap0 up",
        "ip route add 198.51.100.0/24 via 192.0.2.2",
        "ip route add 2001:db8:5::/64 via 2001:db8::2",
    ] {
        far.run(words)?;
    }
    let _far = Far::start(&far, scene.folder.path())?;
    let sent = scene.file("sent");
    text(near.command("openssl").args(["rand", "-out"]).arg(&sent).arg("16777216"))?;
    let socket = back.socket();
    let options = GuestOptions {
        second_net: Some(Net { socket: &socket, pairs: 1 }),
        programs: &["ethtool"],
        script: SCRIPT,
        ..Default::default()
    };
    let mut guest = scene.boot_net(Kind::Uml, &out, options)?;
    guest.reach(WAYS[0], LIMIT)?;
    let filter = "inbound and (src net 198.51.100.0/24 or src net 2001:db8:5::/64)";
    let capture = Capture::start(&far, "far0", filter, &scene.log("far.pcap"))?;
    for address in ["192.0.2.1", "2001:db8::1"] {
        let ping = format!("busybox ping -c 1 -W 5 {address}");
        capture.until_it_sees(|| near.run(&ping).map(|_| ()))?;
    }
    for way in WAYS {
        guest.reach(way, LIMIT)?;
        for words in ["192.0.2.1 -n 6M", "192.0.2.1 -n 1M -l 200 -N", "2001:db8::1 -n 6M"] {
            merging(&out, &format!("{way}, TCP {words}"), || arrives(&near, words))?;
        }
        for words in ["192.0.2.1 -l 200", "2001:db8::1 -l 500"] {
            let words = format!("{words} -u -b 10M -t 1");
            merging(&out, &format!("{way}, UDP {words}"), || arrives(&near, &words))?;
        }
        merging(&out, way, || agrees(&near, &sent))?;
        arrives(&near, "192.0.2.1 -n 6M -R")?;
        guest.proceed()?;
    }
    guest.finish(LIMIT)?;
    is_right(&capture.stop(10_000)?)?;
    for daemon in [out, back] {
        lost_nothing(&daemon.queues()?)?;
        daemon.stop()?;
    }
    near.holds_only(&[])?;
    far.holds_only(&["br0", "port0", "far0"])
}

/// A flow of iperf3 between the namespaces.
fn arrives(near: &Namespace, words: &str) -> Outcome {
    Flow::run(near, words)?.has_arrived(words)
}

/// A file arrives unchanged, and another comes back so.
fn agrees(near: &Namespace, sent: &Path) -> Outcome {
    let script = format!(
        "sha256sum < {sent}; busybox nc 192.0.2.1 7001 < {sent}
         busybox nc 192.0.2.1 7003 < /dev/null; busybox nc 192.0.2.1 7002 < /dev/null | sha256sum",
        sent = sent.display()
    );
    let said = text(near.command("timeout").args(["60", "sh", "-c", &script]))?;
    let sums: Vec<_> = said.lines().filter_map(|line| line.split_whitespace().next()).collect();
    let agree = sums.len() == 4 && sums[0] == sums[1] && sums[2] == sums[3] && sums[0] != sums[2];
    check(agree, || format!("sent, arrived, sent back, arrived: {sums:?}"))
}

/// All that came out of the far cable.
fn is_right(frames: &Frames) -> Outcome {
    frames.are_right("far cable", "tcp.checksum.status == 1 && tcp.len > 0", 10_000)?;
    let fields = ["frame.len", "ip.ttl", "ipv6.hlim", "tcp.len", "udp.length"];
    let mut kinds = [[0; 2]; 2];
    for line in frames.fields("tcp || udp", &fields)? {
        let number = |at| line.split('\t').nth(at).and_then(|word| word.parse::<u32>().ok());
        let (hops, hops6, segment) = (number(1), number(2), number(3));
        check(hops.or(hops6) == Some(HOPS), || format!("a wrong hop count: {line}"))?;
        let fits = number(0).is_some_and(|len| len <= MTU + 14);
        check(fits, || format!("longer than the link's frames: {line}"))?;
        let datagram = number(4);
        let is_whole = datagram.is_none_or(|len| DATAGRAMS.contains(&len));
        check(is_whole, || format!("a datagram that nobody sent: {line}"))?;
        kinds[usize::from(hops6.is_some())][usize::from(segment.is_some())] += 1;
    }
    let all_came = kinds.as_flattened().iter().all(|count| *count > 500);
    check(all_came, || format!("of IPv4 and IPv6, UDP and TCP: {kinds:?}"))
}
