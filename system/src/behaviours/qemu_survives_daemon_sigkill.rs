//! The daemon is killed under an idle guest and started again: the guest goes on.

use super::{Behaviour, Scene};
use crate::daemon::Daemon;
use crate::guest::{GuestOptions, Kind};
use crate::{Context, Outcome, check};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "qemu_survives_daemon_sigkill", run };

const SCRIPT: &str = r#"
must dd if=/dev/urandom of=/tmp/before bs=64k count=32 2>/dev/null
must dd if=/tmp/before of=$DISK bs=64k conv=fsync,notrunc 2>/dev/null
await idle
echo 3 > /proc/sys/vm/drop_caches
dd if=$DISK of=/tmp/again bs=64k count=32 2>/dev/null || fail "cannot read after the restart"
must cmp /tmp/before /tmp/again
yes "after the restart" | head -c 1048576 > /tmp/after
must dd if=/tmp/after of=$DISK bs=64k seek=64 conv=fsync,notrunc 2>/dev/null
"#;

fn run(scene: &Scene<'_>) -> Outcome {
    let image = scene.image(64)?;
    let daemon = scene.serve(&image, &["--num-queues", "2"])?;
    let options = GuestOptions { queues: 2, cpus: 2, script: SCRIPT, ..GuestOptions::default() };
    let mut guest = scene.boot(Kind::Qemu, &daemon, options)?;
    guest.reach("idle", Duration::from_secs(180))?;
    let options = daemon.crash()?;
    let socket = options.socket();
    let daemon = Daemon::start(options, &socket)?;
    guest.proceed()?;
    guest.finish(Duration::from_secs(180))?;
    daemon.stop()?;
    let mut found = vec![0; 1 << 20];
    let file = File::open(&image).context(image.display())?;
    file.read_exact_at(&mut found, 4 << 20).context(image.display())?;
    let expected = "after the restart\n".bytes().cycle().take(found.len());
    check(expected.eq(found), || "the host file lacks what was written after the restart".into())
}
