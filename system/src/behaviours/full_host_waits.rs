//! A guest fills the host's file system, waits, goes on when there is room, and finds what it
//! wrote.

use super::{Behaviour, Scene};
use crate::command::{command, output, wait_for};
use crate::daemon::Daemon;
use crate::guest::{GuestOptions, Kind};
use crate::host_fs::HostFs;
use crate::{Context, Outcome, check};
use std::fs::File;
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "full_host_waits", run };

const LIMIT: Duration = Duration::from_secs(300);
/// Of the host's file system, of which the guest writes more than there is room for.
const HOST_MIB: u64 = 96;

const SCRIPT: &str = r#"
must mkfs.ext4 -q $DISK
must mount -t ext4 $DISK /mnt
await mounted
for n in 1 2 3 4 5 6; do
    must dd if=/dev/urandom of=/mnt/file$n bs=1M count=8 conv=fsync 2>/dev/null
done
cd /mnt && sha256sum file* > /tmp/sums && cd /
must umount /mnt
echo 3 > /proc/sys/vm/drop_caches
must mount -t ext4 $DISK /mnt
cd /mnt && must sha256sum -c /tmp/sums && cd /
must umount /mnt
must e2fsck -fn $DISK
"#;

fn run(scene: &Scene<'_>) -> Outcome {
    let host = HostFs::new(scene.folder.path(), "ext4", HOST_MIB, &["mkfs.ext4", "-q", "-F"])?;
    let image = host.folder().join("image");
    let file = File::create(&image).context(image.display())?;
    file.set_len(256 << 20).context(image.display())?;
    let daemon = scene.serve(&image, &["--num-queues", "1"])?;
    let options = GuestOptions { script: SCRIPT, ..GuestOptions::default() };
    let mut guest = scene.boot(Kind::Uml, &daemon, options)?;
    guest.reach("mounted", LIMIT)?;
    let filler = host.folder().join("filler");
    fill(&filler)?;
    guest.proceed()?;
    wait_for("writes that wait for space", LIMIT, || Ok((waiting(&daemon)? > 0).then_some(())))?;
    says(&daemon, "the host has no space left")?;
    // Nobody makes room: the guest waits, and nothing fails.
    std::thread::sleep(Duration::from_secs(3));
    check(waiting(&daemon)? > 0, || "nothing waits any more".into())?;
    std::fs::remove_file(&filler).context(filler.display())?;
    guest.finish(LIMIT)?;
    let queue = daemon.queues()?.into_iter().next().ok_or("no queue")?;
    check(queue.value("errors")? == 0, || "the guest has seen an error".into())?;
    check(queue.value("waiting_for_space")? == 0, || "something still waits".into())?;
    says(&daemon, "no write of the guest waits")?;
    daemon.stop()?;
    output(command("e2fsck").arg("-fn").arg(&image))?;
    Ok(())
}

/// Fills the file system but for some megabytes.
fn fill(filler: &std::path::Path) -> Outcome {
    let file = File::create(filler).context(filler.display())?;
    let process = rustix::fs::fstatvfs(&file).context("fstatvfs")?;
    let size = (process.f_bavail * process.f_frsize).saturating_sub(12 << 20);
    let mode = rustix::fs::FallocateFlags::empty();
    rustix::fs::fallocate(&file, mode, 0, size).context(filler.display())?;
    file.sync_all().context(filler.display())
}

/// Waits until the log has these words: a thread of its own writes it.
fn says(daemon: &Daemon, words: &str) -> Outcome {
    wait_for(&format!("{words:?} in the log"), LIMIT, || {
        Ok(daemon.log()?.contains(words).then_some(()))
    })
}

fn waiting(daemon: &Daemon) -> Outcome<u64> {
    daemon.queues()?.first().ok_or("no queue")?.value("waiting_for_space")
}
