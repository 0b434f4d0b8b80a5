//! A running guest sees a disk that grows, and uses the new part.

use super::{Behaviour, Scene};
use crate::guest::{GuestOptions, Kind};
use crate::{Context, Outcome, check};
use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "qemu_live_resize", run };

const SCRIPT: &str = r#"
[ "$(blockdev --getsize64 $DISK)" = $((64 << 20)) ] || fail "not 64 MiB at the start"
await small
tries=0
while [ "$(blockdev --getsize64 $DISK)" != $((160 << 20)) ]; do
    [ $tries -lt 300 ] || fail "still $(blockdev --getsize64 $DISK) bytes after 30 s"
    tries=$((tries + 1))
    sleep 0.1
done
yes grown | head -c 65536 > /tmp/data
must dd if=/tmp/data of=$DISK bs=64k seek=$((150 * 16)) conv=fsync,notrunc 2>/dev/null
"#;

const LIMIT: Duration = Duration::from_secs(180);

fn run(scene: &Scene<'_>) -> Outcome {
    let image = scene.image(64)?;
    let daemon = scene.serve(&image, &["--num-queues", "1"])?;
    let options = GuestOptions { script: SCRIPT, ..GuestOptions::default() };
    let mut guest = scene.boot(Kind::Qemu, &daemon, options)?;
    guest.reach("small", LIMIT)?;
    let file = OpenOptions::new().read(true).write(true).open(&image).context(image.display())?;
    file.set_len(160 << 20).context(image.display())?;
    daemon.resize("blk0")?;
    guest.proceed()?;
    guest.finish(LIMIT)?;
    daemon.stop()?;
    let mut found = vec![0; 65536];
    file.read_exact_at(&mut found, 150 << 20).context(image.display())?;
    let expected = "grown\n".bytes().cycle().take(found.len());
    check(expected.eq(found), || "the new part does not hold what the guest wrote".into())
}
