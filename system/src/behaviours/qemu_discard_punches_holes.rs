//! Discard and write-zeroes give the host its blocks back, and the range reads as zeroes.

use super::{Behaviour, Scene};
use crate::guest::{GuestOptions, Kind};
use crate::{Context, Outcome, check};
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "qemu_discard_punches_holes", run };

/// 64 MiB of data; 0-24 discarded, 24-48 zeroed with unmap, 48-56 zeroed without.
const SCRIPT: &str = r#"
yes manyring | head -c 4194304 > /tmp/data
n=0
while [ $n -lt 16 ]; do
    must dd if=/tmp/data of=$DISK bs=1M seek=$((n * 4)) conv=notrunc 2>/dev/null
    n=$((n + 1))
done
sync
await filled
must blkdiscard -o 0 -l $((24 << 20)) $DISK
await discarded
must fallocate -p -o $((24 << 20)) -l $((24 << 20)) $DISK
await punched
must blkdiscard -z -o $((48 << 20)) -l $((8 << 20)) $DISK
sync
"#;

const LIMIT: Duration = Duration::from_secs(180);

fn run(scene: &Scene<'_>) -> Outcome {
    blocks_come_back(scene, &["--num-queues", "1"])
}

/// Also with other arguments of the daemon.
pub(super) fn blocks_come_back(scene: &Scene<'_>, arguments: &[&str]) -> Outcome {
    let image = scene.image(96)?;
    let daemon = scene.serve(&image, arguments)?;
    let options = GuestOptions { script: SCRIPT, ..GuestOptions::default() };
    let mut guest = scene.boot(Kind::Qemu, &daemon, options)?;
    guest.reach("filled", LIMIT)?;
    let filled = allocated_mib(&image)?;
    check(filled >= 63, || format!("the image holds only {filled} MiB after 64 were written"))?;
    guest.proceed()?;
    guest.reach("discarded", LIMIT)?;
    let discarded = allocated_mib(&image)?;
    check(discarded + 23 <= filled, || format!("discard: {filled} MiB, then {discarded}"))?;
    guest.proceed()?;
    guest.reach("punched", LIMIT)?;
    let punched = allocated_mib(&image)?;
    check(punched + 23 <= discarded, || format!("zeroes: {discarded} MiB, then {punched}"))?;
    guest.proceed()?;
    guest.finish(LIMIT)?;
    daemon.stop()?;
    let mut content = vec![1; 64 << 20];
    let file = File::open(&image).context(image.display())?;
    file.read_exact_at(&mut content, 0).context(image.display())?;
    let (zeroes, data) = content.split_at(56 << 20);
    check(zeroes.iter().all(|&byte| byte == 0), || "a discarded range does not read 0".into())?;
    let kept = "manyring\n".bytes().cycle().take(4 << 20);
    let kept = kept.clone().chain(kept).eq(data.iter().copied());
    check(kept, || "data beyond the discarded ranges was lost".into())
}

fn allocated_mib(image: &Path) -> Outcome<u64> {
    Ok(image.metadata().context(image.display())?.blocks() * 512 / (1 << 20))
}
