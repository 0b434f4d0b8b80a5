//! Two programs never write one image: QEMU's storage daemon and Manyring refuse each other.

use super::{Behaviour, Scene};
use crate::command::{child, command, wait_for};
use crate::daemon::Daemon;
use crate::{Context, Outcome, check, cleanup, packages};
use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "image_lock_refuses_others", run };

const LIMIT: Duration = Duration::from_secs(30);

fn run(scene: &Scene<'_>) -> Outcome {
    packages::need("the lock test", &["qemu-system-common"])?;
    let image = scene.image(64)?;
    theirs_is_refused(scene, &image)?;
    ours_is_refused(scene, &image)
}

fn theirs_is_refused(scene: &Scene<'_>, image: &Path) -> Outcome {
    let daemon = scene.serve(image, &[])?;
    let mut second = storage_daemon(command("qemu-storage-daemon"), scene, image);
    let mut second = second.stderr(Stdio::piped()).spawn().context("qemu-storage-daemon")?;
    let ended = wait_for("qemu-storage-daemon's refusal", LIMIT, || {
        second.try_wait().context("qemu-storage-daemon")
    });
    let _ = second.kill();
    let said = second.wait_with_output().context("qemu-storage-daemon")?;
    let said = String::from_utf8_lossy(&said.stderr).into_owned();
    let refused = !ended?.success() && said.contains("lock");
    check(refused, || format!("qemu-storage-daemon is not refused by a lock: {said}"))?;
    daemon.stop()
}

fn ours_is_refused(scene: &Scene<'_>, image: &Path) -> Outcome {
    let log = scene.log("qemu-storage-daemon.log");
    let mut first = storage_daemon(child("qemu-storage-daemon"), scene, image);
    let file = File::create(&log).context(log.display())?;
    let mut first = first.stderr(file).spawn().context("qemu-storage-daemon")?;
    cleanup::adopt(first.id());
    let socket = scene.file("other.sock");
    let refused = || -> Outcome {
        wait_for("qemu-storage-daemon's socket", LIMIT, || Ok(socket.exists().then_some(())))?;
        // A reader is refused, too: the image would change under its guest.
        for arguments in [&["--wait", "0"][..], &["--wait", "0", "--read-only"]] {
            let options = scene.options(image, arguments);
            let said = Daemon::refused(&options)?;
            check(said.contains("in use"), || format!("manyring does not say why: {said}"))?;
            check(!options.socket().exists(), || "a refused daemon made its socket".into())?;
        }
        Ok(())
    };
    let outcome = refused();
    let _ = first.kill();
    let _ = first.wait();
    cleanup::forget(first.id());
    outcome
}

fn storage_daemon(mut command: Command, scene: &Scene<'_>, image: &Path) -> Command {
    let file = format!("driver=file,node-name=f0,filename={}", image.display());
    let socket = scene.file("other.sock");
    let export = format!(
        "type=vhost-user-blk,id=e0,node-name=d0,writable=on,addr.type=unix,addr.path={}",
        socket.display()
    );
    command.args(["--blockdev", &file, "--blockdev", "driver=raw,node-name=d0,file=f0"]);
    command.args(["--export", &export]).stdin(Stdio::null()).stdout(Stdio::null());
    command
}
