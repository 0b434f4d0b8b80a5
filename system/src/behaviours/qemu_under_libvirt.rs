//! libvirt starts the guest, with the disk and the interface that `manyring snippet` prints for it
//! and as a user who may open their sockets.

use super::uml_net_ping_and_iperf3::lost_nothing;
use super::{Behaviour, Scene};
use crate::command::text;
use crate::guest::{Guest, GuestOptions, Kind, Net, libvirt};
use crate::net::{Far, Namespace, WORDS};
use crate::{Context, Outcome, check};
use std::os::unix::fs::PermissionsExt;
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
"#;

const LIMIT: Duration = Duration::from_secs(60);

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
    let guest = Guest::boot_by_libvirt(kernel, &options, &devices, &scene.log("guest.log"))?;
    guest.finish(LIMIT)?;
    lost_nothing(&network.queues()?)?;
    let written = disk.queues()?.iter().map(|q| q.value("bytes_written")).sum::<Outcome<u64>>()?;
    check(written >= 8 << 20, || format!("{written} bytes were written to the disk"))?;
    network.stop()?;
    disk.stop()?;
    namespace.holds_only(&[])
}

/// What `manyring snippet libvirt` says belongs among the devices of a domain.
fn devices(scene: &Scene<'_>, socket: &Path, more: &[&str]) -> Outcome<String> {
    let mut snippet = Command::new(&scene.stage.binary);
    let said = text(snippet.args(["snippet", "libvirt", "--socket-path"]).arg(socket).args(more))?;
    let devices = said.split_once("<!-- in <devices> -->\n").map(|(_, devices)| devices.to_owned());
    devices.ok_or(format!("manyring snippet libvirt names no devices: {said}"))
}
