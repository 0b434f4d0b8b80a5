//! The daemon is killed again and again while requests of a guest that compares what it reads are
//! held: no request is lost, and none is served after its answer.

use super::{Behaviour, Scene};
use crate::daemon::Daemon;
use crate::guest::{GuestOptions, Kind};
use crate::{Context, Outcome, check};
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour =
    Behaviour { name: "qemu_survives_sigkills_under_load", run };

const KILLS: usize = 8;

/// Feature 34 of virtio, the 35th of the driver's word.
pub(super) const HAS_PACKED: &str = r#"
[ "$(cut -c35 /sys/block/vda/device/features)" = 1 ] || fail "the rings are not packed"
"#;

const SCRIPT: &str = r#"
compare() {
    while [ ! -e /tmp/stop ]; do
        dd if=/dev/urandom of=/tmp/w$1 bs=4k count=32 2>/dev/null
        dd if=/tmp/w$1 of=$DISK bs=4k seek=$(($1 * 256)) oflag=direct conv=notrunc 2>/dev/null ||
            echo "write of $1" > /tmp/bad
        dd if=$DISK of=/tmp/r$1 bs=4k count=32 skip=$(($1 * 256)) iflag=direct 2>/dev/null ||
            echo "read of $1" > /tmp/bad
        cmp /tmp/w$1 /tmp/r$1 || echo "bytes of $1" > /tmp/bad
        echo x >> /tmp/done
    done
}
for n in 1 2 3 4 5 6 7 8 9 10 11 12; do compare $n & done
await load
touch /tmp/stop
wait
[ -e /tmp/bad ] && fail "wrong: $(cat /tmp/bad)"
[ -s /tmp/done ] || fail "nothing was compared"
"#;

/// A process never answers one request in forty, while it answers those behind it. (The guest needs
/// fewer to begin.)
const HELD: &str = "fault = { hold_every = 40 }";

fn run(scene: &Scene<'_>) -> Outcome {
    survive(scene, false)
}

/// The guest's rings are split, or packed.
pub(super) fn survive(scene: &Scene<'_>, is_packed: bool) -> Outcome {
    let image = scene.image(64)?;
    let config = scene.file("config.toml");
    let mut options = scene.options(&image, &[]);
    options.is_controlled = false;
    options.arguments = ["run", "--config", &config.display().to_string()].map(String::from).into();
    let socket = options.socket();
    let configure = |fault: &str| {
        let (socket, image) = (socket.display(), image.display());
        let text = format!(
            "[[blk]]\nname = \"d\"\nsocket_path = \"{socket}\"\nfile = \"{image}\"\n\
             format = \"raw\"\nnum_queues = 2\n{fault}\n"
        );
        std::fs::write(&config, text).context(config.display())
    };
    configure(HELD)?;
    let mut daemon = Daemon::start(options, &socket)?;
    let script = format!("{}{SCRIPT}", if is_packed { HAS_PACKED } else { "" });
    let (queues, cpus, script) = (2, 2, script.as_str());
    let options = GuestOptions { queues, cpus, is_packed, script, ..GuestOptions::default() };
    let mut guest = scene.boot(Kind::Qemu, &daemon, options)?;
    guest.reach("load", Duration::from_secs(180))?;
    for kill in 1..=KILLS {
        // QEMU connects again after a second. Then the guest works until its requests are held.
        std::thread::sleep(Duration::from_millis(1700));
        let options = daemon.crash()?;
        configure(if kill < KILLS { HELD } else { "" })?;
        daemon = Daemon::start(options, &socket)?;
    }
    guest.proceed()?;
    guest.finish(Duration::from_secs(180))?;
    let log = daemon.log()?;
    check(!log.contains("queue stopped: "), || format!("a queue has a fault: {log}"))?;
    daemon.stop()
}
