//! Receive-side scaling as `ethtool` sets it, on a tap, on one whose queues a device process
//! serves, and on a port of a switch: the counters of the queues show that each frame comes by the
//! queue that the guest's table says.

use super::{Behaviour, Scene};
use crate::daemon::{Daemon, DaemonOptions};
use crate::guest::{Guest, GuestOptions, Kind, Net};
use crate::net::{Far, Namespace, WORDS};
use crate::{Context, Outcome, check};
use std::path::PathBuf;
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "uml_rss", run };

/// For each device: tables, then hashes with and without ports.
const SCRIPT: &str = r#"
scale() {
    must ethtool -L $1 combined 4
    must ethtool -X $1 equal 2
    ethtool -x $1 > /tmp/table
    grep -q 'with 4 RX ring' /tmp/table || fail "the table is $(cat /tmp/table)"
    grep -qE '^ +0: +0 +1 +0 +1' /tmp/table || fail "the table is $(cat /tmp/table)"
    await $1-equal
    must ethtool -X $1 weight 0 0 1 0
    await $1-third
    must ethtool -X $1 equal 4
    must ethtool -K $1 rxhash on > /dev/null
    must ethtool -N $1 rx-flow-hash udp4 sd
    ethtool -n $1 rx-flow-hash udp4 > /tmp/hash
    grep -q 'IP SA' /tmp/hash || fail "the hash is $(cat /tmp/hash)"
    grep -q 'L4' /tmp/hash && fail "the hash has ports: $(cat /tmp/hash)"
    await $1-addresses
    must ethtool -N $1 rx-flow-hash udp4 sdfn
    await $1-ports
}
network
must ip link set eth1 up
must ip addr add 198.51.100.2/24 dev eth1
ping -c 1 -W 3 198.51.100.1 > /dev/null || fail "no way to the host through the switch"
scale eth0
pings $HOST
agrees $HOST 512 "by hash"
agrees $HOST6 512 "by hash"
scale eth1
# Pairs that are set anew are chosen by the host as before; ethtool wants the table gone first.
must ethtool -X eth0 default
must ethtool -L eth0 combined 2
pings $HOST
agrees $HOST 128 "by the host"
"#;

const LIMIT: Duration = Duration::from_secs(180);
const NAMES: [&str; 2] = ["tapped", "switched"];
const TAPS: [&str; 2] = ["tap0", "tap1"];
/// Datagrams that the host sends, each from another port.
const DATAGRAMS: u64 = 200;
/// Datagrams are sent again where too few have come after this time.
const RESENT: Duration = Duration::from_secs(10);
/// Fewer of them than this come by none of the queues that share them: a quarter would be 50.
const LEAST: u64 = 15;

fn run(scene: &Scene<'_>) -> Outcome {
    for domain in ["", "domain = 'guest'\n"] {
        scales(scene, domain).context(format!("a tap with {domain:?}"))?;
    }
    Ok(())
}

/// The tap's device has these further lines.
fn scales(scene: &Scene<'_>, more: &str) -> Outcome {
    let namespace = Namespace::new()?;
    let (daemon, sockets) = serve(scene, &namespace, more)?;
    namespace.address(TAPS[0])?;
    namespace.run(&format!("ip link set {} up", TAPS[1]))?;
    namespace.run(&format!("ip address add 198.51.100.1/24 dev {}", TAPS[1]))?;
    let _far = Far::start(&namespace, scene.folder.path())?;
    let net = |index: usize| Some(Net { socket: &sockets[index], pairs: 1 });
    let script = format!("{WORDS}{SCRIPT}");
    let options = GuestOptions {
        net: net(0),
        second_net: net(1),
        programs: &["ethtool"],
        script: &script,
        ..Default::default()
    };
    let kernel = scene.kernel(Kind::Uml)?;
    let mut guest = Guest::boot(kernel, &options, &scene.log("guest.log"))?;
    for (interface, name, address) in
        [("eth0", NAMES[0], "192.0.2.2"), ("eth1", NAMES[1], "198.51.100.2")]
    {
        let mut told = |mark: &str, is_enough: fn(&[u64]) -> bool| {
            guest.reach(&format!("{interface}-{mark}"), LIMIT)?;
            let came = send(&daemon, &namespace, name, address, is_enough)?;
            guest.proceed()?;
            Outcome::Ok(came)
        };
        let what = |wanted: &str, came: &[u64]| format!("{name}: {wanted}, but came {came:?}");
        let all = |came: &[u64]| came.iter().sum::<u64>() >= DATAGRAMS;
        let came = told("equal", all)?;
        let is_so = came[0] >= LEAST && came[1] >= LEAST && came[2..] == [0, 0];
        check(is_so, || what("two queues", &came))?;
        // Frames that are not IP go to the first queue, so its count is not checked; and not all
        // datagrams have come when this many frames have.
        let came = told("third", |came| came[2] >= DATAGRAMS)?;
        let is_so = came[2] >= DATAGRAMS && came[1] == 0 && came[3] == 0;
        check(is_so, || what("the third queue", &came))?;
        let came = told("addresses", |came| came.iter().any(|came| *came >= DATAGRAMS))?;
        let used = came.iter().filter(|came| **came >= DATAGRAMS).count();
        check(used == 1 && came.iter().filter(|n| **n >= LEAST).count() == 1, || {
            what("one queue for both addresses", &came)
        })?;
        let came = told("ports", all)?;
        check(came.iter().all(|came| *came >= LEAST), || what("all queues", &came))?;
    }
    guest.finish(LIMIT)?;
    for queue in daemon.queues()? {
        check(queue.value("faults")? == 0, || "a queue has broken".into())?;
    }
    daemon.stop()
}

/// Sends datagrams, each from its own port. Returns how many frames each receiveq got by the time
/// that this is enough. Datagrams may be lost, so more are sent where too few come.
fn send(
    daemon: &Daemon,
    namespace: &Namespace,
    name: &str,
    address: &str,
    is_enough: fn(&[u64]) -> bool,
) -> Outcome<Vec<u64>> {
    let before = received(daemon, name)?;
    let line = format!("for n in {{1..{DATAGRAMS}}}; do echo > /dev/udp/{address}/9; done");
    let mut came = Vec::new();
    for _ in 0..LIMIT.as_secs() / RESENT.as_secs() {
        let sent = namespace.command("bash").args(["-c", &line]).status().context("bash")?;
        check(sent.success(), || "the host cannot send".into())?;
        let waited = crate::command::wait_for("the datagrams", RESENT, || {
            let now = received(daemon, name)?;
            came = now.iter().zip(&before).map(|(now, then)| now - then).collect();
            Ok(is_enough(&came).then_some(()))
        });
        if waited.is_ok() {
            return Ok(came);
        }
    }
    Err(format!("of many times {DATAGRAMS} datagrams too few came: {came:?}"))
}

/// The number of packets that each receiveq of the device has passed.
fn received(daemon: &Daemon, name: &str) -> Outcome<Vec<u64>> {
    let queues = daemon.queues_of(name)?;
    queues.iter().step_by(2).take(4).map(|queue| queue.value("packets")).collect()
}

/// A daemon with a device on a tap, which has these further lines, and one on a switch with an
/// uplink; both with four pairs.
fn serve(scene: &Scene<'_>, namespace: &Namespace, more: &str) -> Outcome<(Daemon, Vec<PathBuf>)> {
    let sockets: Vec<_> = NAMES.iter().map(|name| scene.file(&format!("{name}.sock"))).collect();
    let config = scene.file("manyring.toml");
    let control = scene.file("run-control.sock");
    let mut text = format!("[daemon]\ncontrol = '{}'\n", control.display());
    text += &format!("[[switch]]\nname = 's0'\nuplink = '{}'\n", TAPS[1]);
    let ports = [format!("tap = '{}'\n{more}", TAPS[0]), "switch = 's0'\n".to_owned()];
    for ((name, socket), port) in NAMES.iter().zip(&sockets).zip(ports) {
        let socket = socket.display();
        text += &format!(
            "[[net]]\nname = '{name}'\nsocket_path = '{socket}'\n{port}queue_pairs = 4\n\
             hash_report = true\n"
        );
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
