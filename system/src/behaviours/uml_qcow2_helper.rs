//! A qcow2 image that the daemon serves through a child of its own, qemu-storage-daemon: the child
//! is killed again and again under a guest that compares what it reads, which has no error and no
//! wrong byte. Another guest sees the image grow, by the child's monitor. The child and its socket
//! go with their device; the child goes with the daemon as well, however that ends.

use super::{Behaviour, Scene};
use crate::command::{command, output, wait_for};
use crate::daemon::{Daemon, DaemonOptions};
use crate::guest::{Guest, GuestOptions, Kind, is_memory_on_disk};
use crate::nbd::{IMAGE_MIB, Store, Trial};
use crate::{Context, Outcome, check, cleanup, packages};
use rustix::process::{Signal, kill_process};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "uml_qcow2_helper", run };

/// The only device that is left when the devices with helpers are removed.
const OTHER: &str = "[[blk]]\nname = 'other'\nnull = '1M'\nsocket_path = 'SOCKET'\n";
const LIMIT: Duration = Duration::from_secs(180);
/// The size to which the image grows under a guest.
const GROWN_MIB: u64 = IMAGE_MIB + 32;
/// `GROWN` stands for that size in bytes. The guest writes and reads the last blocks of the image,
/// and keeps the disk busy while it grows.
const SCRIPT: &str = r#"
yes before | head -c 65536 > /tmp/before
yes grown | head -c 65536 > /tmp/grown
must dd if=/tmp/before of=$DISK bs=64k oflag=direct 2>/dev/null
await small
tries=0
while [ "$(blockdev --getsize64 $DISK)" != GROWN ]; do
    [ $tries -lt 600 ] || fail "still $(blockdev --getsize64 $DISK) bytes"
    tries=$((tries + 1))
    must dd if=$DISK of=/tmp/read bs=64k count=1 iflag=direct 2>/dev/null
    cmp -s /tmp/read /tmp/before || fail "wrong bytes while the disk grows"
    sleep 0.1
done
last=$((GROWN / 65536 - 1))
must dd if=/tmp/grown of=$DISK bs=64k seek=$last oflag=direct conv=fsync 2>/dev/null
must dd if=$DISK of=/tmp/read bs=64k skip=$last iflag=direct 2>/dev/null
cmp -s /tmp/read /tmp/grown || fail "the new part has not kept what was written"
"#;

/// A configuration file with the device `vm1`, and with one whose file is not a qcow2 image.
struct Helper {
    config: PathBuf,
    folder: PathBuf,
}

impl Helper {
    fn new(folder: &Path) -> Outcome<Self> {
        packages::need("the test of a helper", &["qemu-utils", "qemu-system-common"])?;
        let at = |name: &str| folder.join(name).display().to_string();
        let size = format!("{IMAGE_MIB}M");
        output(command("qemu-img").args(["create", "-q", "-f", "qcow2", &at("vm1.qcow2"), &size]))?;
        std::fs::write(at("bad.img"), [1; 4096]).context("bad.img")?;
        let allowed = if is_memory_on_disk() { "memory_on_disk = true\n" } else { "" };
        let device = |name: &str, socket: &str, image: &str| {
            let (socket, image) = (at(socket), at(image));
            format!(
                "[[blk]]\nname = '{name}'\nsocket_path = '{socket}'\nfile = '{image}'\n\
                 format = 'qcow2'\n{allowed}"
            )
        };
        // `Daemon` looks for these sockets.
        let (control, state) = (at("run-control.sock"), at("state"));
        let daemon = format!("[daemon]\ncontrol = '{control}'\nstate_dir = '{state}'\n");
        let devices =
            device("vm1", "run0.sock", "vm1.qcow2") + &device("bad", "bad.sock", "bad.img");
        let config = folder.join("manyring.toml");
        std::fs::write(&config, daemon + &devices).context(config.display())?;
        Ok(Self { config, folder: folder.to_owned() })
    }

    fn options_of(&self, binary: &Path, log: PathBuf) -> DaemonOptions {
        let arguments = ["run", "--config", &self.config.display().to_string()];
        DaemonOptions {
            binary: binary.to_owned(),
            folder: self.folder.clone(),
            log,
            arguments: arguments.map(str::to_owned).to_vec(),
            is_controlled: false,
            wrapper: Vec::new(),
        }
    }
}

impl Store for Helper {
    fn options(&self, trial: &Trial<'_>) -> DaemonOptions {
        self.options_of(trial.binary, trial.logs.join("manyring.log"))
    }

    fn kill(&mut self, kill: u32, daemon: &Daemon) -> Outcome {
        let pid = child_of(daemon)?;
        kill_process(cleanup::pid(pid).ok_or("the child has no pid")?, Signal::KILL)
            .context("the child")?;
        wait_for("the guest's next request", LIMIT, || {
            Ok((daemon.losses()? >= kill.into()).then_some(()))
        })
    }

    fn check(&self, kills: u32, losses: u64) -> Outcome {
        check(losses >= kills.into(), || format!("{losses} connections were lost of {kills}"))
    }
}

fn run(scene: &Scene<'_>) -> Outcome {
    let (binary, folder) = (&scene.stage.binary, scene.folder.path());
    let mut helper = Helper::new(folder)?;
    let trial = Trial {
        binary,
        folder,
        logs: &scene.logs,
        kernel: scene.kernel(Kind::Uml)?,
        queues: 1,
        kills: 4,
        pause: &mut || Duration::from_millis(500),
    };
    trial.run(&mut helper)?;
    let start = |log: &str| {
        let options = helper.options_of(binary, scene.log(log));
        let socket = options.socket();
        Daemon::start(options, &socket)
    };
    let daemon = start("killed.log")?;
    wait_for("the reason for which an image has no helper", LIMIT, || {
        let log = daemon.log()?;
        Ok((log.contains("format: qemu-storage-daemon exited: ")
            && log.contains("Image is not in qcow2 format"))
        .then_some(()))
    })?;
    let child = child_of(&daemon)?;
    daemon.crash()?;
    is_gone(child)?;
    let daemon = start("removed.log")?;
    // The one that was killed has left the name of its control socket.
    let control = scene.file("run-control.sock");
    wait_for("the daemon's control socket", LIMIT, || {
        Ok(UnixStream::connect(&control).ok().map(drop))
    })?;
    grow(scene, &daemon)?;
    let child = child_of(&daemon)?;
    let socket = scene.file("state/helpers/vm1.sock");
    check(socket.exists(), || format!("{} is not the helper's", socket.display()))?;
    let text = std::fs::read_to_string(&helper.config).context("the configuration")?;
    let other = scene.file("other.sock").display().to_string();
    let without = text.split("[[blk]]").next().unwrap_or_default();
    std::fs::write(&helper.config, without.to_owned() + &OTHER.replace("SOCKET", &other))
        .context("the configuration")?;
    daemon.reload()?;
    is_gone(child)?;
    check(!socket.exists(), || format!("{} has outlived its device", socket.display()))?;
    daemon.stop()
}

/// A guest sees its image become larger, and uses the new part; smaller it becomes only if told so.
fn grow(scene: &Scene<'_>, daemon: &Daemon) -> Outcome {
    let (child, socket) = (child_of(daemon)?, scene.file("run0.sock"));
    let status = std::fs::read_to_string(format!("/proc/{child}/status")).context("the child")?;
    for set in ["CapPrm:\t", "CapEff:\t", "CapBnd:\t"] {
        let has_none = status.contains(&format!("{set}0000000000000000"));
        check(has_none, || format!("the child has capabilities: {status}"))?;
    }
    // The daemon that was killed has left the name of this socket, too.
    wait_for("the device's socket", LIMIT, || Ok(UnixStream::connect(&socket).ok().map(drop)))?;
    let script = SCRIPT.replace("GROWN", &(GROWN_MIB << 20).to_string());
    let options =
        GuestOptions { socket: Some(&socket), script: &script, ..GuestOptions::default() };
    let mut guest = Guest::boot(scene.kernel(Kind::Uml)?, &options, &scene.log("grows.log"))?;
    guest.reach("small", LIMIT)?;
    daemon.resize_to("vm1", &format!("{GROWN_MIB}M"))?;
    guest.proceed()?;
    guest.finish(LIMIT)?;
    check(child_of(daemon)? == child, || "the child was started again to grow its image".into())?;
    let refused = daemon.resize_to("vm1", "1M").err().unwrap_or_default();
    check(refused.contains("--shrink"), || format!("an image shrinks: {refused}"))?;
    let image = scene.file("vm1.qcow2").display().to_string();
    let told = output(command("qemu-img").args(["info", "-U", "--output=json", &image]))?;
    let told = String::from_utf8_lossy(&told);
    let size = format!("\"virtual-size\": {}", GROWN_MIB << 20);
    check(told.contains(&size), || format!("the image has not {size}: {told}"))
}

/// The process that has the image of `vm1`.
fn child_of(daemon: &Daemon) -> Outcome<u32> {
    wait_for("the child of the helper", LIMIT, || {
        let tasks = format!("/proc/{}/task", daemon.pid());
        for task in std::fs::read_dir(&tasks).context(tasks)?.flatten() {
            let children = std::fs::read_to_string(task.path().join("children"));
            for pid in children.unwrap_or_default().split_whitespace() {
                let words = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
                let words = String::from_utf8_lossy(&words).into_owned();
                if words.starts_with("qemu-storage-daemon") && words.contains("vm1.qcow2") {
                    return Ok(pid.parse().ok());
                }
            }
        }
        Ok(None)
    })
}

fn is_gone(pid: u32) -> Outcome {
    wait_for("the end of the child", LIMIT, || {
        Ok((!Path::new(&format!("/proc/{pid}")).exists()).then_some(()))
    })
}
