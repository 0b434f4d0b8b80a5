//! A read-only disk: the guest knows, cannot mount it for writing, and the file stays as it was.

use super::{Behaviour, Scene};
use crate::command::{command, output, text};
use crate::guest::{GuestOptions, Kind};
use crate::{Context, Outcome, check};
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "read_only_disk", run };

const SCRIPT: &str = r#"
[ "$(blockdev --getro $DISK)" = 1 ] || fail "the disk does not say that it is read-only"
dd if=/dev/zero of=$DISK bs=4k count=1 conv=notrunc 2>/dev/null && fail "it could be written"
must mount -t ext4 -o ro $DISK /mnt
[ "$(cat /mnt/hello)" = "from the host" ] || fail "the file's content is wrong"
mount -o remount,rw /mnt 2>/dev/null && fail "it could be mounted for writing"
touch /mnt/new 2>/dev/null && fail "a file could be made"
must umount /mnt
"#;

fn run(scene: &Scene<'_>) -> Outcome {
    let image = scene.image(64)?;
    let content = scene.file("content");
    std::fs::create_dir(&content).context(content.display())?;
    std::fs::write(content.join("hello"), "from the host\n").context(content.display())?;
    output(command("mkfs.ext4").arg("-q").arg("-d").args([&content, &image]))?;
    let before = text(command("sha256sum").arg(&image))?;
    let daemon = scene.serve(&image, &["--read-only", "--num-queues", "1"])?;
    let options = GuestOptions { script: SCRIPT, ..GuestOptions::default() };
    let guest = scene.boot(Kind::Qemu, &daemon, options)?;
    guest.finish(Duration::from_secs(180))?;
    daemon.stop()?;
    let after = text(command("sha256sum").arg(&image))?;
    check(before == after, || "the file has changed".into())
}
