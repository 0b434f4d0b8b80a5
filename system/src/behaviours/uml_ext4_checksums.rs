//! User Mode Linux makes ext4 on our disk; what it wrote is there after a remount, and for us.

use super::{Behaviour, Scene};
use crate::command::{command, output, text, wait_for};
use crate::daemon::Daemon;
use crate::guest::{GuestOptions, Kind};
use crate::{Outcome, check};
use std::path::Path;
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "uml_ext4_checksums", run };

/// Makes a file system and eight files of odd sizes, and says their checksums.
pub(super) const SCRIPT: &str = r#"
must mkfs.ext4 -q $DISK
must mount -t ext4 $DISK /mnt
for n in 1 2 3 4 5 6 7 8; do
    must dd if=/dev/urandom of=/mnt/file$n bs=$((n * 4099)) count=$((n * 13)) 2>/dev/null
done
cd /mnt && sha256sum file* > /tmp/sums && cd /
must umount /mnt
echo 3 > /proc/sys/vm/drop_caches
must mount -t ext4 $DISK /mnt
cd /mnt && must sha256sum -c /tmp/sums && cd /
must umount /mnt
must e2fsck -fn $DISK
sed 's/^/SUM /' /tmp/sums
"#;

fn run(scene: &Scene<'_>) -> Outcome {
    guest_and_host_agree(scene, &[])
}

/// Also with other arguments of the daemon.
pub(super) fn guest_and_host_agree(scene: &Scene<'_>, arguments: &[&str]) -> Outcome {
    let image = scene.image(256)?;
    let daemon = scene.serve(&image, arguments)?;
    agree_on(scene, &image, daemon)
}

/// On an image that `daemon` serves already.
pub(super) fn agree_on(scene: &Scene<'_>, image: &Path, daemon: Daemon) -> Outcome {
    let options = GuestOptions { script: SCRIPT, ..GuestOptions::default() };
    let guest = scene.boot(Kind::Uml, &daemon, options)?;
    let said = guest.finish(Duration::from_secs(180))?;
    daemon.stop()?;
    output(command("e2fsck").arg("-fn").arg(image))?;
    let sums: Vec<_> = said.lines().filter_map(|line| line.strip_prefix("SUM ")).collect();
    check(sums.len() == 8, || format!("8 checksums expected, got {sums:?}"))?;
    for sum in sums {
        let (expected, name) = sum.split_once("  ").ok_or("a checksum without a name")?;
        let found = host_sum(scene, image, name.trim())?;
        check(found == expected, || format!("{name} differs on the host: {found}, {expected}"))?;
    }
    Ok(())
}

/// The checksum of a file inside the image, read by the host's own tool.
fn host_sum(scene: &Scene<'_>, image: &Path, name: &str) -> Outcome<String> {
    let copy = scene.file("copy");
    let request = format!("dump {name} {}", copy.display());
    output(command("debugfs").args(["-R", &request]).arg(image))?;
    wait_for("the copy", Duration::from_secs(30), || Ok(copy.exists().then_some(())))?;
    let sum = text(command("sha256sum").arg(&copy))?;
    Ok(sum.split(' ').next().unwrap_or_default().to_owned())
}
