//! libvirt starts the guest, with the disk and the interface that `manyring snippet` prints for it
//! and as a user who may open their sockets. A second disk is plugged in and unplugged; the daemon
//! of the first one is killed under load and started again; that disk grows.

use super::uml_net_ping_and_iperf3::lost_nothing;
use super::{Behaviour, Scene};
use crate::command::{text, wait_for};
use crate::daemon::Daemon;
use crate::guest::{Guest, GuestOptions, Kind, Net, libvirt};
use crate::net::{Far, Namespace, WORDS};
use crate::{Context, Outcome, check};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "qemu_under_libvirt", run };

const SCRIPT: &str = r#"
is "the disk's queues" "$(ls /sys/block/vda/mq | wc -l)" 2
head -c 8388608 /dev/urandom > /tmp/data
must dd if=/tmp/data of=$DISK bs=65536 conv=fsync 2>/dev/null
echo 3 > /proc/sys/vm/drop_caches
dd if=$DISK of=/tmp/back bs=65536 count=128 2>/dev/null
is "the disk" "$(sha256sum < /tmp/back)" "$(sha256sum < /tmp/data)"
network
is "the address" "$(cat /sys/class/net/eth0/address)" 52:54:00:6c:76:01
pings $HOST
agrees $HOST 512 "under libvirt"
agrees $HOST6 512 "under libvirt"
mark plug
tries=0
until [ -b /dev/vdb ]; do
    [ $tries -lt 600 ] || fail "nothing was plugged in within 60 s"
    tries=$((tries + 1))
    sleep 0.1
done
must dd if=/tmp/data of=/dev/vdb bs=65536 count=16 conv=fsync 2>/dev/null
must cmp -n 1048576 /tmp/data /dev/vdb
mark kill
turn=0
until [ "$(blockdev --getsize64 $DISK)" = $((96 << 20)) ]; do
    at=$((turn % 64 * 4))
    head -c 262144 /dev/urandom > /tmp/written
    must dd if=/tmp/written of=$DISK bs=65536 seek=$at conv=fsync,notrunc 2>/dev/null
    echo 3 > /proc/sys/vm/drop_caches
    dd if=$DISK of=/tmp/read bs=65536 skip=$at count=4 2>/dev/null || fail "read of turn $turn"
    must cmp /tmp/written /tmp/read
    turn=$((turn + 1))
done
yes grown | head -c 65536 > /tmp/data
must dd if=/tmp/data of=$DISK bs=65536 seek=$((80 * 16)) conv=fsync,notrunc 2>/dev/null
mark unplug
tries=0
while [ -b /dev/vdb ]; do
    [ $tries -lt 600 ] || fail "still plugged in after 60 s"
    tries=$((tries + 1))
    sleep 0.1
done
# libvirt has more to say to QEMU: the machine stays until the host tells, by the disk's size.
until [ "$(blockdev --getsize64 $DISK)" = $((112 << 20)) ]; do sleep 0.1; done
"#;

/// The name of the disk that is plugged in.
const PLUGGED: &str = "plugged";
const LIMIT: Duration = Duration::from_secs(180);

fn run(scene: &Scene<'_>) -> Outcome {
    let namespace = Namespace::new()?;
    let image = scene.image(64)?;
    // The user of libvirt's QEMU must come to the sockets and own them.
    let folder = scene.folder.path();
    std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o755))
        .context(folder.display())?;
    let owner = libvirt::user().map(|user| user.to_string());
    let owner = owner.iter().flat_map(|user| ["--socket-owner", user]).collect::<Vec<_>>();
    let disk = scene.serve(&image, &[&["--num-queues", "2"], &owner[..]].concat())?;
    let pairs = ["--tap", "tap0", "--queue-pairs", "2"];
    let network = scene.serve_net(&namespace, &[&pairs, &owner[..]].concat())?;
    namespace.address("tap0")?;
    let _far = Far::start(&namespace, folder)?;
    let (disk_socket, socket) = (disk.socket(), network.socket());
    let devices = devices(scene, &disk_socket, &["--num-queues", "2"])?
        + &devices(scene, &socket, &["--net", "--queue-pairs", "2"])?;
    let named = "<alias name='ua-net'/>\n<mac address='52:54:00:6c:76:01'/>\n</interface>";
    let options = GuestOptions {
        socket: Some(&disk_socket),
        net: Some(Net { socket: &socket, pairs: 2 }),
        cpus: 2,
        script: &format!("{WORDS}{SCRIPT}"),
        ..Default::default()
    };
    let devices = devices.replace("</interface>", named);
    let kernel = scene.kernel(Kind::Qemu)?;
    let mut guest = Guest::boot_by_libvirt(kernel, &options, &devices, &scene.log("guest.log"))?;
    guest.reach("plug", LIMIT)?;
    lost_nothing(&network.queues()?)?;
    let written = sum(&disk, "bytes_written")?;
    check(written >= 8 << 20, || format!("{written} bytes were written to the disk"))?;
    let plugged = plugged(scene, &network, &owner)?;
    guest.change_by_libvirt("attach-device", &plugged)?;
    guest.reach("kill", LIMIT)?;
    let disk = killed_and_grown(disk, &image)?;
    guest.reach("unplug", LIMIT)?;
    guest.change_by_libvirt("detach-device", &plugged)?;
    grow(&disk, &image, 112)?;
    guest.finish(LIMIT)?;
    network.remove(PLUGGED)?;
    let mut found = vec![0; 65536];
    let file = File::open(&image).context(image.display())?;
    file.read_exact_at(&mut found, 80 << 20).context(image.display())?;
    let expected = "grown\n".bytes().cycle().take(found.len());
    check(expected.eq(found), || "the new part does not hold what the guest wrote".into())?;
    network.stop()?;
    disk.stop()?;
    namespace.holds_only(&[])
}

/// Serves a second disk beside the interface; its element of a domain.
fn plugged(scene: &Scene<'_>, daemon: &Daemon, owner: &[&str]) -> Outcome<String> {
    let socket = scene.file("plugged.sock");
    let path = socket.display().to_string();
    let options = ["--socket-path", &path, "--memory", "16M", "--num-queues", "1"];
    daemon.add("blk", PLUGGED, &[&options, owner].concat())?;
    let device = devices(scene, &socket, &["--num-queues", "1"])?;
    Ok(device.replace("'vda'", "'vdb'"))
}

/// Kills the daemon of the disk while its guest writes, starts it again, and makes the disk larger
/// once the guest has been served anew.
fn killed_and_grown(disk: Daemon, image: &Path) -> Outcome<Daemon> {
    let before = sum(&disk, "bytes_written")?;
    let writes = || Ok((sum(&disk, "bytes_written")? > before).then_some(()));
    wait_for("the guest's writes", LIMIT, writes)?;
    let options = disk.crash()?;
    let socket = options.socket();
    let disk = Daemon::start(options, &socket)?;
    wait_for("the guest's requests", LIMIT, || Ok((sum(&disk, "requests")? > 0).then_some(())))?;
    grow(&disk, image, 96)?;
    Ok(disk)
}

/// Makes the disk larger, and tells its guest.
fn grow(disk: &Daemon, image: &Path, mib: u64) -> Outcome {
    let file = OpenOptions::new().write(true).open(image).context(image.display())?;
    file.set_len(mib << 20).context(image.display())?;
    disk.resize("blk0")
}

/// A counter of all queues together.
fn sum(daemon: &Daemon, counter: &str) -> Outcome<u64> {
    daemon.queues()?.iter().map(|queue| queue.value(counter)).sum()
}

/// The elements that `manyring snippet libvirt` prints for the devices of a domain.
fn devices(scene: &Scene<'_>, socket: &Path, more: &[&str]) -> Outcome<String> {
    let mut snippet = Command::new(&scene.stage.binary);
    let said = text(snippet.args(["snippet", "libvirt", "--socket-path"]).arg(socket).args(more))?;
    let devices = said.split_once("<!-- in <devices> -->\n").map(|(_, devices)| devices.to_owned());
    devices.ok_or(format!("manyring snippet libvirt names no devices: {said}"))
}
