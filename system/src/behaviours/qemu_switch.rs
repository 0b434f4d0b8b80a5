//! Two QEMU guests on access ports of one switch, and a third guest, of another kind, on a trunk
//! port that comes and goes over the API while the two talk; who lies about its addresses is
//! counted.

use super::{Behaviour, Scene};
use crate::daemon::{Daemon, DaemonOptions};
use crate::guest::{Guest, GuestOptions, Kind, Net};
use crate::net::{Flow, Namespace, WORDS, flood};
use crate::{Context, Outcome, check};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::io::{Read, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "qemu_switch", run };

const SERVER: &str = r#"
network 3
iperf3 -s -D
nc -ll -p 7001 -e sha256sum &
head -c 262144 /dev/urandom > /tmp/file
nc -ll -p 7002 -e cat /tmp/file &
nc -ll -p 7003 -e sha256sum /tmp/file &
await serving
"#;

const CLIENT: &str = r#"
network 2
pings 192.0.2.3
pings 2001:db8::3
floods 192.0.2.3
agrees 192.0.2.3 256 "data"
flow to-server 192.0.2.3 -n 16M
flow to-client 192.0.2.3 -n 16M -R
await talked
# Meanwhile a port leaves that a guest uses.
timeout 60 iperf3 -c 192.0.2.3 -f m -t 3 > /tmp/beside 2>&1 &
load=$!
sleep 1
await beside
wait $load || { cat /tmp/beside; fail "a connection was lost when another port left"; }
grep receiver /tmp/beside | tail -n 1 | sed "s/^/FLOW beside /"
pings 192.0.2.3
"#;

/// It has the trunk port: the two others are in VLAN 7 by their ports.
const THIRD: &str = r#"
must ip link set eth0 up
must ip link add link eth0 name eth0.7 type vlan id 7
echo 0 > /proc/sys/net/ipv6/conf/eth0.7/accept_dad
must ip link set eth0.7 up
must ip addr add 192.0.2.4/24 dev eth0.7
must ip addr add 2001:db8::4/64 dev eth0.7
pings 192.0.2.3
pings 192.0.2.2 -s 1400
pings 2001:db8::3
agrees 192.0.2.3 256 "by a trunk"
# Without its tag nobody hears it, and it hears nobody.
must ip addr add 192.0.2.5/24 dev eth0
ping -c 1 -W 1 -I eth0 192.0.2.3 > /dev/null && fail "an untagged frame came through a trunk"
must ip addr del 192.0.2.5/24 dev eth0
await tagged
# Frames, ARP and neighbour discovery that name another address than the device's.
must ip link set eth0.7 down
must ip link set eth0 down
ip link set eth0 address 02:00:00:00:00:77 2> /dev/null && fail "another address was taken"
must ip link set eth0 up
must ip link set eth0.7 address 02:00:00:00:00:77
must ip link set eth0.7 up
arping -c 3 -w 3 -I eth0.7 192.0.2.3 > /dev/null && fail "a false address was answered"
ping -c 1 -W 1 2001:db8::3 > /dev/null && fail "a false neighbour was answered"
await lied
"#;

const LIMIT: Duration = Duration::from_secs(180);
const NAMES: [&str; 3] = ["server", "client", "third"];
const VLAN: u16 = 7;

fn run(scene: &Scene<'_>) -> Outcome {
    let namespace = Namespace::new()?;
    let (daemon, control, sockets) = serve(scene, &namespace)?;
    let third = json!({
        "kind": "net", "socket_path": sockets[2], "switch": "s0", "trunk": [VLAN],
        "anti_spoof": true, "memory_on_disk": crate::guest::is_memory_on_disk(),
    });
    let path = format!("/v1/devices/{}", NAMES[2]);
    let (status, answer) = ask(&control, ("PUT", &path), &third.to_string())?;
    check(status == 201, || format!("the third port is refused: {answer}"))?;
    let mut server = boot(scene, &sockets, Kind::Qemu, SERVER, 0)?;
    server.reach("serving", LIMIT)?;
    let mut client = boot(scene, &sockets, Kind::Qemu, CLIENT, 1)?;
    flood(&daemon, &mut client, [NAMES[1], NAMES[0]], LIMIT)?;
    client.reach("talked", LIMIT)?;
    let mut third = boot(scene, &sockets, Kind::Uml, THIRD, 2)?;
    third.reach("tagged", LIMIT)?;
    let spoofed = || counter(&daemon, NAMES[2], "dropped_spoofed");
    let before = (spoofed()?, counter(&daemon, NAMES[2], "dropped_vlan")?);
    check(before.1 > 0, || "no frame without a tag was counted".into())?;
    third.proceed()?;
    third.reach("lied", LIMIT)?;
    let lies = spoofed()? - before.0;
    check(lies >= 4, || {
        format!("of three ARP requests and neighbour discovery {lies} were counted")
    })?;
    client.proceed()?;
    client.reach("beside", LIMIT)?;
    let (status, answer) = ask(&control, ("DELETE", &format!("{path}?force=true")), "")?;
    check(status == 204, || format!("the third port does not leave: {answer}"))?;
    drop(third);
    client.proceed()?;
    let said = client.finish(LIMIT)?;
    for flow in ["to-server", "to-client", "beside"] {
        Flow::arrived(&said, flow)?;
    }
    server.proceed()?;
    server.finish(LIMIT)?;
    for name in &NAMES[..2] {
        for queue in daemon.queues_of(name)? {
            check(queue.value("faults")? == 0, || format!("a queue of {name} has broken"))?;
        }
    }
    daemon.stop()?;
    namespace.holds_only(&[])
}

/// Boots a guest of a kind with this script, whose network is the device of this number.
fn boot(
    scene: &Scene<'_>,
    sockets: &[PathBuf],
    kind: Kind,
    script: &str,
    index: usize,
) -> Outcome<Guest> {
    let mac = format!(",mac=52:54:00:00:00:0{index}");
    let script = format!("{WORDS}{script}");
    let options = GuestOptions {
        net: Some(Net { socket: &sockets[index], pairs: 1 }),
        net_properties: &mac,
        programs: &["iperf3", "ping"],
        script: &script,
        ..Default::default()
    };
    Guest::boot(scene.kernel(kind)?, &options, &scene.log(&format!("{}.log", NAMES[index])))
}

/// The value of a counter of a port of the switch.
fn counter(daemon: &Daemon, device: &str, counter: &str) -> Outcome<u64> {
    let json = daemon.stats()?;
    let devices = json.pointer("/devices").and_then(Value::as_array);
    let device = devices.and_then(|all| all.iter().find(|found| found["name"] == device));
    let value = device.and_then(|device| device["switch"][counter].as_u64());
    value.ok_or_else(|| format!("no counter {counter} in {json}"))
}

/// Asks the daemon by HTTP: the status of the answer, and its text.
fn ask(control: &Path, request: (&str, &str), body: &str) -> Outcome<(u16, String)> {
    let (method, path) = request;
    let mut stream = UnixStream::connect(control).context(control.display())?;
    let len = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\
         Content-Type: application/json\r\nContent-Length: {len}\r\n\r\n{body}"
    )
    .context(path)?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).context(path)?;
    let status = answer.split_whitespace().nth(1).and_then(|status| status.parse().ok());
    Ok((status.ok_or_else(|| format!("no answer: {answer:?}"))?, answer))
}

/// A daemon with a switch and the ports of two of them; the sockets of all three.
fn serve(scene: &Scene<'_>, namespace: &Namespace) -> Outcome<(Daemon, PathBuf, Vec<PathBuf>)> {
    let sockets: Vec<_> = NAMES.iter().map(|name| scene.file(&format!("{name}.sock"))).collect();
    let config = scene.file("manyring.toml");
    let control = scene.file("run-control.sock");
    let mut text = format!("[daemon]\ncontrol = '{}'\n", control.display());
    text += "[[switch]]\nname = 's0'\n";
    for (index, name) in NAMES.iter().enumerate().take(2) {
        let socket = sockets[index].display();
        let _ = write!(
            text,
            "[[net]]\nname = '{name}'\nsocket_path = '{socket}'\nswitch = 's0'\nvlan = {VLAN}\n\
             mac = '52:54:00:00:00:0{index}'\nanti_spoof = true\n"
        );
    }
    std::fs::write(&config, text).context(config.display())?;
    let options = DaemonOptions {
        arguments: ["run".into(), "--config".into(), config.display().to_string()].into(),
        is_controlled: false,
        ..scene.net_options(namespace, &[])
    };
    Ok((Daemon::start(options, &control)?, control, sockets))
}
