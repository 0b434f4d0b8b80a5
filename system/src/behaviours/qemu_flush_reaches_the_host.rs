//! An fsync in the guest is an fdatasync on the host before it returns.

use super::{Behaviour, Scene};
use crate::daemon::Daemon;
use crate::guest::{GuestOptions, Kind};
use crate::{Context, Outcome, check, packages};
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "qemu_flush_reaches_the_host", run };

const SCRIPT: &str = r#"
await ready
for n in 1 2 3 4 5; do
    must dd if=/dev/urandom of=$DISK bs=4k seek=$n count=1 conv=fsync,notrunc 2>/dev/null
done
await flushed
"#;

const FLUSHES: usize = 5;
const LIMIT: Duration = Duration::from_secs(180);

/// Without io_uring, where strace sees each call by its name.
fn run(scene: &Scene<'_>) -> Outcome {
    packages::need("the flush test", &["strace"])?;
    let image = scene.image(64)?;
    let trace = scene.log("strace.log");
    let mut options = scene.options(&image, &["--no-io-uring", "--num-queues", "1"]);
    let strace = ["strace", "-D", "-f", "-qq", "-e", "trace=fdatasync,fsync", "-o"];
    let trace_path = trace.display().to_string();
    options.wrapper = strace.iter().map(|&a| a.to_owned()).chain([trace_path]).collect();
    let socket = options.socket();
    let daemon = Daemon::start(options, &socket)?;
    let guest = GuestOptions { script: SCRIPT, ..GuestOptions::default() };
    let mut guest = scene.boot(Kind::Qemu, &daemon, guest)?;
    let state = || -> Outcome<(u64, usize)> {
        let trace = std::fs::read_to_string(&trace).context(trace.display())?;
        let synced = trace.lines().filter(|line| line.contains("sync(")).count();
        let queues = daemon.queues()?;
        let flushes = queues.first().ok_or("no queue")?.value("flushes")?;
        Ok((flushes, synced))
    };
    guest.reach("ready", LIMIT)?;
    let before = state()?;
    guest.proceed()?;
    guest.reach("flushed", LIMIT)?;
    let after = state()?;
    guest.proceed()?;
    guest.finish(LIMIT)?;
    let (flushes, synced) = (after.0 - before.0, after.1 - before.1);
    check(flushes >= FLUSHES as u64, || format!("{flushes} flushes counted, {FLUSHES} made"))?;
    check(synced >= FLUSHES, || format!("strace saw {synced} syncs, {FLUSHES} made"))?;
    daemon.stop()
}
