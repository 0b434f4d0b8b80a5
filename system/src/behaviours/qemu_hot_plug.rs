//! A disk and an interface are added to a running daemon, plugged into a running guest, used,
//! unplugged and removed.

use super::{Behaviour, Scene};
use crate::daemon::{Daemon, DaemonOptions};
use crate::guest::{Guest, GuestOptions, Kind, Monitor};
use crate::{Context, Outcome, check};
use serde_json::json;
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "qemu_hot_plug", run };

const SCRIPT: &str = r#"
await empty
tries=0
until [ -b /dev/vda ] && [ -d /sys/class/net/eth0 ]; do
    [ $tries -lt 600 ] || fail "nothing was plugged in within 60 s"
    tries=$((tries + 1))
    sleep 0.1
done
yes plugged | head -c 65536 > /tmp/data
must dd if=/tmp/data of=/dev/vda bs=64k conv=fsync,notrunc 2>/dev/null
must ip link set eth0 up
must [ "$(cat /sys/class/net/eth0/address)" = 52:54:00:00:00:07 ]
await used
tries=0
while [ -b /dev/vda ] || [ -d /sys/class/net/eth0 ]; do
    [ $tries -lt 600 ] || fail "something is still plugged in after 60 s"
    tries=$((tries + 1))
    sleep 0.1
done
await gone
"#;

const LIMIT: Duration = Duration::from_secs(240);

fn run(scene: &Scene<'_>) -> Outcome {
    let image = scene.image(16)?;
    let config = scene.file("manyring.toml");
    let control = scene.file("run-control.sock");
    let text = format!("[daemon]\ncontrol = '{}'\n", control.display());
    std::fs::write(&config, text).context(config.display())?;
    let options = DaemonOptions {
        arguments: ["run".into(), "--config".into(), config.display().to_string()].into(),
        is_controlled: false,
        ..scene.options(&image, &[])
    };
    let daemon = Daemon::start(options, &control)?;
    let path = scene.file("monitor");
    let options = GuestOptions { script: SCRIPT, monitor: Some(&path), ..GuestOptions::default() };
    let mut guest = Guest::boot(scene.kernel(Kind::Qemu)?, &options, &scene.log("guest.log"))?;
    guest.reach("empty", LIMIT)?;
    let disk = scene.file("disk.sock").display().to_string();
    let net = scene.file("net.sock").display().to_string();
    let image = image.display().to_string();
    let options = ["--socket-path", &disk, "--blk-file", &image, "--num-queues", "1"];
    daemon.add("blk", "disk", &options)?;
    daemon.add("net", "lan", &["--socket-path", &net, "--null", "--mac", "52:54:00:00:00:07"])?;
    let mut monitor = Monitor::connect(&path)?;
    for (id, socket) in [("cd", &disk), ("cn", &net)] {
        let address = json!({ "type": "unix", "data": { "path": socket } });
        let backend = json!({ "type": "socket", "data": { "addr": address, "server": false } });
        monitor.execute("chardev-add", &json!({ "id": id, "backend": backend }))?;
    }
    monitor.execute("netdev_add", &json!({ "type": "vhost-user", "id": "nn", "chardev": "cn" }))?;
    let device = json!({ "driver": "vhost-user-blk-pci", "id": "d", "bus": "port0",
        "chardev": "cd", "num-queues": 1 });
    monitor.execute("device_add", &device)?;
    // With MSI-X Debian 12's QEMU itself crashes under emulation: no vectors.
    let device = json!({ "driver": "virtio-net-pci", "id": "n", "bus": "port1", "netdev": "nn",
        "vectors": 0, "romfile": "", "mac": "52:54:00:00:00:07" });
    monitor.execute("device_add", &device)?;
    guest.proceed()?;
    guest.reach("used", LIMIT)?;
    let refused = daemon.remove("disk");
    let told = refused.err().unwrap_or_default();
    check(told.contains("is in use by a VMM"), || format!("removed in use: {told}"))?;
    guest.proceed()?;
    for id in ["d", "n"] {
        monitor.execute("device_del", &json!({ "id": id }))?;
        monitor.heard("DEVICE_DELETED", id)?;
    }
    monitor.execute("netdev_del", &json!({ "id": "nn" }))?;
    monitor.execute("chardev-remove", &json!({ "id": "cd" }))?;
    guest.reach("gone", LIMIT)?;
    guest.proceed()?;
    guest.finish(LIMIT)?;
    for device in ["disk", "lan"] {
        daemon.remove(device)?;
    }
    check(!scene.file("disk.sock").exists(), || "the removed disk's socket is there".into())?;
    let found = std::fs::read(&image).context(&image)?;
    let expected = "plugged\n".bytes().cycle().take(65536);
    check(expected.eq(found.into_iter().take(65536)), || "not what the guest wrote".into())?;
    daemon.stop()
}
