//! Each helper of the guide is opened as its fragment says, and a guest uses the disk behind it:
//! qcow2, LUKS and iSCSI by qemu-storage-daemon, an image on a web server and a compressed one by
//! nbdkit.

use super::{Behaviour, Scene};
use crate::command::{child, command, output, wait_for};
use crate::daemon::{Daemon, DaemonOptions};
use crate::guest::{GuestOptions, Kind};
use crate::net::Service;
use crate::{Context, Outcome, check, packages};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "uml_helpers", run };

/// How often the image under LUKS is tried again.
const LUKS_TRIES: usize = 20;
const GUIDE: &str = include_str!("../../../docs/guide/remote.md");
const PACKAGES: [&str; 6] =
    ["nbdkit", "qemu-utils", "qemu-system-common", "qemu-block-extra", "tgt", "xz-utils"];
const MIB: usize = 64;
const PORTAL: &str = "127.0.0.1:13260";
const WEB: &str = "127.0.0.1:18080";
const LIMIT: Duration = Duration::from_secs(300);

/// The guest writes 4 MiB, drops its page cache and reads the same bytes back from the server. A
/// disk that is only read must have the checksum of its image.
const WRITES: &str = r#"
head -c 4194304 /dev/urandom > /tmp/w
must dd if=/tmp/w of=$DISK bs=64k seek=100 conv=notrunc,fsync 2>/dev/null
echo 3 > /proc/sys/vm/drop_caches
must dd if=$DISK of=/tmp/r bs=64k count=64 skip=100 2>/dev/null
must cmp /tmp/w /tmp/r
"#;
const READS: &str = r#"
echo "GUEST_MARK sum $(sha256sum < $DISK)"
"#;

/// The commands of the fragments under "Helpers" that start a server, each as one line.
fn helpers() -> Vec<String> {
    let (_, helpers) = GUIDE.split_once("\n## Helpers\n").unwrap_or_default();
    let fragments = helpers.split("```").skip(1).step_by(2);
    let lines = fragments.flat_map(|text| {
        let text = text.trim_start_matches("sh\n").replace("\\\n", " ");
        text.lines().map(str::to_owned).collect::<Vec<_>>()
    });
    lines.filter(|line| line.starts_with("qemu-") || line.starts_with("nbdkit ")).collect()
}

fn run(scene: &Scene<'_>) -> Outcome {
    packages::need("the test of helpers", &PACKAGES)?;
    let folder = scene.folder.path();
    let sum = images(folder)?;
    let _target = target(scene, folder)?;
    let mut web = child("busybox");
    web.args(["httpd", "-f", "-p", WEB, "-h"]).arg(folder.join("www"));
    let _web = Service::silent(web, &scene.log("web.log"))?;
    let mut tried = 0;
    for line in helpers() {
        // There is no server of ssh here.
        if line.contains(" ssh ") {
            continue;
        }
        open(scene, &line, &sum).context(&line)?;
        tried += 1;
    }
    check(tried == 5, || format!("the guide has {tried} helpers that can be tried"))
}

/// Images of each kind, and the checksum of the one that is read.
fn images(folder: &Path) -> Outcome<String> {
    let at = |name: &str| folder.join(name);
    std::fs::write(at("vm1.key"), "secret").context("the key")?;
    let size = format!("{MIB}M");
    let create = |words: &str, name: &str| {
        let words = words.replace("KEY", &at("vm1.key").display().to_string());
        let mut command = command("qemu-img");
        command.args(["create", "-q"]).args(words.split(' ')).arg(at(name)).arg(&size);
        output(&mut command).map(drop)
    };
    create("-f qcow2", "vm1.qcow2")?;
    // To choose its rounds of hashing, qemu-img reads its own CPU time, and it gives up if the host
    // has not counted any of that yet: then it is tried again.
    let luks = "--object secret,id=k,file=KEY -f luks -o key-secret=k,iter-time=10";
    let mut made = create(luks, "vm1.luks");
    for _ in 0..LUKS_TRIES {
        if made.is_ok() {
            break;
        }
        made = create(luks, "vm1.luks");
    }
    made?;
    create("-f raw", "lun.img")?;
    let bytes: Vec<u8> = (0..MIB << 20).map(|at| (at / 512 % 251).to_le_bytes()[0]).collect();
    std::fs::create_dir_all(at("www")).context("www")?;
    std::fs::write(at("www/vm1.img"), bytes).context("the image")?;
    let image = at("www/vm1.img");
    let compressed = output(command("xz").args(["-0", "--block-size=8MiB", "-c"]).arg(&image))?;
    std::fs::write(at("vm1.img.xz"), compressed).context("the compressed image")?;
    let sum = output(command("sha256sum").arg(&image))?;
    Ok(String::from_utf8_lossy(&sum).split(' ').next().unwrap_or_default().to_owned())
}

/// An iSCSI target with one unit.
fn target(scene: &Scene<'_>, folder: &Path) -> Outcome<Service> {
    const CONTROL: [&str; 2] = ["-C", "77"];
    let mut daemon = child("tgtd");
    daemon.args(["-f", "--iscsi", &format!("portal={PORTAL}")]).args(CONTROL);
    let service = Service::silent(daemon, &scene.log("tgtd.log"))?;
    let tell = |words: &str| {
        let mut command = command("tgtadm");
        let arguments = words
            .split(' ')
            .map(|word| word.replace("IMAGE", &folder.join("lun.img").display().to_string()));
        output(command.args(CONTROL).args(["--lld", "iscsi"]).args(arguments))
    };
    let first = "--op new --mode target --tid 1 -T iqn.2026-11.example:vm1";
    wait_for("the iSCSI target", Duration::from_secs(30), || Ok(tell(first).ok()))?;
    tell("--op new --mode logicalunit --tid 1 --lun 1 -b IMAGE")?;
    tell("--op bind --mode target --tid 1 -I ALL")?;
    Ok(service)
}

/// Starts the server of a line of the guide, and a guest on its disk.
fn open(scene: &Scene<'_>, line: &str, sum: &str) -> Outcome {
    let folder = scene.folder.path().display().to_string();
    let socket = scene.file("vm1.nbd");
    let _ = std::fs::remove_file(&socket);
    let here = line
        .replace("/run/manyring", &folder)
        .replace("/srv/images", &folder)
        .replace("/etc/manyring", &folder)
        .replace("storage.example:3260", PORTAL)
        .replace("https://bucket.example", &format!("http://{WEB}"));
    let mut words = here.split_whitespace();
    let mut server: Command = child(words.next().unwrap_or_default());
    server.args(words);
    let server = Service::silent(server, &scene.log("helper.log"))?;
    wait_for("the helper", Duration::from_secs(30), || {
        Ok(UnixStream::connect(&socket).is_ok().then_some(()))
    })?;
    let is_read_only = line.contains(" -r ");
    let uri = format!("nbd+unix:///vm1?socket={}", socket.display());
    let more: &[&str] = if is_read_only { &["--read-only"] } else { &[] };
    let more = [&["--nbd", &uri], more].concat();
    let log = scene.log("manyring.log");
    let options = DaemonOptions::blk_of(&scene.stage.binary, scene.folder.path(), &log, &more);
    let of_guest = options.socket();
    let daemon = Daemon::start(options, &of_guest)?;
    let script = if is_read_only { READS } else { WRITES };
    let guest = scene.boot(Kind::Uml, &daemon, GuestOptions { script, ..Default::default() })?;
    let said = guest.finish(LIMIT)?;
    if is_read_only {
        check(said.contains(sum), || format!("the guest has read other bytes: {said}"))?;
    }
    daemon.stop()?;
    drop(server);
    Ok(())
}
