//! Two hosts, which are namespaces, and a network over both: a guest on a tap of the one, a guest
//! on a switch's port of the other, whose uplink is a tap. Over Linux's VXLAN and bridges they
//! leave checksums and segmentation to the hosts; Open vSwitch in userspace takes finished frames
//! only.

use super::{Behaviour, Scene};
use crate::daemon::{Daemon, DaemonOptions};
use crate::guest::{Guest, GuestOptions, Kind, Net, is_memory_on_disk};
use crate::net::{Flow, Namespace, Ovs, WORDS};
use crate::{Context, Outcome, check};
use std::path::{Path, PathBuf};
use std::time::Duration;

pub(super) const VXLAN: Behaviour = Behaviour { name: "uml_overlay_vxlan", run: vxlan };
pub(super) const OVS: Behaviour = Behaviour { name: "uml_overlay_ovs", run: ovs };

const SERVER: &str = r#"
network 3
head -c 1048576 /dev/urandom > /tmp/file
iperf3 -s -D
nc -ll -p 7001 -e sha256sum &
nc -ll -p 7002 -e cat /tmp/file &
nc -ll -p 7003 -e sha256sum /tmp/file &
await serving
"#;

const CLIENT: &str = r#"
network 2
# The overlay learns where the other guest is from the first frames, and a busy host may drop some.
reaches() {
    tries=0
    until ping -c 1 -W 1 "$@" > /dev/null 2>&1; do
        [ $tries -lt 60 ] || fail "ping $* is not answered"
        tries=$((tries + 1))
    done
}
reaches 192.0.2.3
reaches 192.0.2.3 -s 1472
reaches 192.0.2.3 -s 20000
agrees 192.0.2.3 1024 "IPv4"
agrees 2001:db8::3 1024 "IPv6"
flow to-server 192.0.2.3 -n 16M
flow to-client 192.0.2.3 -n 16M -R
await done
"#;

const LIMIT: Duration = Duration::from_secs(300);
/// Of the cable between the hosts: a guest's frame of 1500 bytes fits with VXLAN's headers.
const MTU: u32 = 1600;
const UNDERLAY: [&str; 2] = ["198.51.100.1", "198.51.100.2"];
const CABLE: [&str; 2] = ["cable0", "cable1"];

/// Two namespaces with a cable between them.
fn hosts() -> Outcome<[Namespace; 2]> {
    let here = Namespace::new()?;
    let there = here.beside()?;
    here.cable_to(&there, CABLE, MTU)?;
    let hosts = [here, there];
    for ((host, cable), address) in hosts.iter().zip(CABLE).zip(UNDERLAY) {
        host.run(&format!("ip address add {address}/24 dev {cable}"))?;
    }
    Ok(hosts)
}

fn vxlan(scene: &Scene<'_>) -> Outcome {
    let hosts = hosts()?;
    for (index, host) in hosts.iter().enumerate() {
        let (own, peer, cable) = (UNDERLAY[index], UNDERLAY[1 - index], CABLE[index]);
        let ends = format!("local {own} remote {peer} dev {cable}");
        for words in [
            "ip link add br0 type bridge mcast_snooping 0".to_owned(),
            "ip link set br0 addrgenmode none up".to_owned(),
            format!("ip link add vx42 type vxlan id 42 dstport 4789 {ends}"),
            "ip link set vx42 master br0 addrgenmode none up".to_owned(),
        ] {
            host.run(&words)?;
        }
    }
    let bridged = scene.serve_net(&hosts[0], &["--tap", "vm1", "--bridge", "br0"])?;
    let (switched, socket) = serve_switch(scene, &hosts[1], "all")?;
    hosts[1].run("ip link set up0 master br0 up")?;
    guests(scene, [&bridged.socket(), &socket])?;
    let long = long_frames([&bridged, &switched])?;
    check(long > 0, || "no frame of several segments passed".into())?;
    bridged.stop()?;
    switched.stop()
}

fn ovs(scene: &Scene<'_>) -> Outcome {
    let hosts = hosts()?;
    let mut switches = Vec::new();
    for (index, host) in hosts.iter().enumerate() {
        let ovs = Ovs::start(host, &scene.file(&format!("ovs{index}")))?;
        let (own, peer, cable) = (UNDERLAY[index], UNDERLAY[1 - index], CABLE[index]);
        // The cable's address moves to the bridge that the cable is a port of.
        ovs.set("add-br br-phy -- set bridge br-phy datapath_type=netdev")?;
        ovs.set(&format!("add-port br-phy {cable}"))?;
        host.run(&format!("ip address flush dev {cable}"))?;
        host.run(&format!("ip address add {own}/24 dev br-phy"))?;
        host.run("ip link set br-phy up")?;
        ovs.set("add-br br-int -- set bridge br-int datapath_type=netdev")?;
        ovs.set(&format!(
            "add-port br-int vx42 -- set interface vx42 type=vxlan options:key=42 \
             options:remote_ip={peer}"
        ))?;
        switches.push(ovs);
    }
    let bridged = scene.serve_net(&hosts[0], &["--tap", "vm1", "--offload", "none"])?;
    switches[0].set("add-port br-int vm1")?;
    let (switched, socket) = serve_switch(scene, &hosts[1], "none")?;
    hosts[1].run("ip link set up0 up")?;
    switches[1].set("add-port br-int up0")?;
    guests(scene, [&bridged.socket(), &socket])?;
    let long = long_frames([&bridged, &switched])?;
    check(long == 0, || format!("{long} frames were not finished"))?;
    drop(switches);
    bridged.stop()?;
    switched.stop()
}

/// Boots a guest at each socket, and lets the first talk to the second.
fn guests(scene: &Scene<'_>, sockets: [&Path; 2]) -> Outcome {
    let kernel = scene.kernel(Kind::Uml)?;
    let boot = |socket, words: &str, log: &str| {
        let script = format!("{WORDS}{words}");
        let net = Some(Net { socket, pairs: 1 });
        let programs = &["iperf3"];
        let options = GuestOptions { net, programs, script: &script, ..Default::default() };
        Guest::boot(kernel, &options, &scene.log(log))
    };
    let mut serving = boot(sockets[1], SERVER, "server.log")?;
    serving.reach("serving", LIMIT)?;
    let mut asking = boot(sockets[0], CLIENT, "client.log")?;
    asking.reach("done", LIMIT)?;
    asking.proceed()?;
    let said = asking.finish(LIMIT)?;
    for flow in ["to-server", "to-client"] {
        Flow::arrived(&said, flow)?;
    }
    serving.proceed()?;
    serving.finish(LIMIT).map(drop)
}

/// Frames of several segments that passed; no queue has a fault.
fn long_frames(daemons: [&Daemon; 2]) -> Outcome<u64> {
    let mut long = 0;
    for daemon in daemons {
        for queue in daemon.queues()? {
            let faults = queue.value("faults")?;
            check(faults == 0, || format!("a queue has {faults} faults"))?;
            long += queue.value("gso_packets")?;
        }
    }
    Ok(long)
}

/// A daemon with a switch that has an uplink and one port, and the port's socket.
fn serve_switch(scene: &Scene<'_>, host: &Namespace, offload: &str) -> Outcome<(Daemon, PathBuf)> {
    let (socket, config) = (scene.file("switched.sock"), scene.file("manyring.toml"));
    let control = scene.file("run-control.sock");
    let mut text = format!(
        "[daemon]\ncontrol = '{}'\n[[switch]]\nname = 's0'\nuplink = 'up0'\n[[net]]\n\
         name = 'switched'\nsocket_path = '{}'\nswitch = 's0'\noffload = '{offload}'\n",
        control.display(),
        socket.display()
    );
    if is_memory_on_disk() {
        text += "memory_on_disk = true\n";
    }
    std::fs::write(&config, text).context(config.display())?;
    let options = DaemonOptions {
        arguments: ["run".into(), "--config".into(), config.display().to_string()].into(),
        is_controlled: false,
        ..scene.net_options(host, &[])
    };
    Ok((Daemon::start(options, &control)?, socket))
}
