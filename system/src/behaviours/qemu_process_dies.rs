//! The device process of a guest's disk and network is killed under load, again and again: the
//! guest goes on, and no byte is lost.

use super::{Behaviour, Scene};
use crate::cleanup;
use crate::command::wait_for;
use crate::daemon::{Daemon, DaemonOptions};
use crate::guest::{Guest, GuestOptions, Kind, Net};
use crate::net::{Far, Namespace, WORDS};
use crate::{Context, Outcome, check};
use rustix::process::{Signal, kill_process};
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "qemu_process_dies", run };

const SCRIPT: &str = r#"
network
pings $HOST
must dd if=/dev/urandom of=/tmp/data bs=64k count=64 2>/dev/null
round=0
while [ $round -lt 3 ]; do
    (while [ ! -e /tmp/stop ]; do
        dd if=/tmp/data of=$DISK bs=64k conv=fsync,notrunc oflag=direct 2>/dev/null ||
            touch /tmp/bad
    done) &
    load=$!
    await loaded$round
    # QEMU connects again once a second.
    tries=0
    until ping -c 1 -W 1 $HOST > /dev/null 2>&1; do
        tries=$((tries + 1))
        [ $tries -gt 30 ] && fail "nobody answers in round $round"
    done
    pings $HOST
    agrees $HOST 256 "round $round"
    touch /tmp/stop
    wait $load
    rm /tmp/stop
    [ -e /tmp/bad ] && fail "a write failed"
    dd if=$DISK of=/tmp/again bs=64k count=64 iflag=direct 2>/dev/null || fail "cannot read"
    must cmp /tmp/data /tmp/again
    round=$((round + 1))
done
"#;

const TAP: &str = "tap0";
const ROUNDS: usize = 3;
const LIMIT: Duration = Duration::from_secs(240);

fn run(scene: &Scene<'_>) -> Outcome {
    let namespace = Namespace::new()?;
    let image = scene.image(64)?;
    let socket = |name: &str| scene.file(&format!("{name}.sock"));
    let (disk, lan) = (socket("disk"), socket("lan"));
    let config = format!(
        "[[blk]]\nname = 'disk'\nsocket_path = '{}'\nfile = '{}'\nnum_queues = 2\ndomain = 'vm'\n\
         [[net]]\nname = 'lan'\nsocket_path = '{}'\ntap = '{TAP}'\nqueue_pairs = 2\n\
         domain = 'vm'\n",
        disk.display(),
        image.display(),
        lan.display()
    );
    let path = scene.file("manyring.toml");
    std::fs::write(&path, config).context(path.display())?;
    let options = DaemonOptions {
        arguments: vec!["run".into(), "--config".into(), path.display().to_string()],
        is_controlled: false,
        ..scene.net_options(&namespace, &[])
    };
    let daemon = Daemon::start(options, &lan)?;
    wait_for("the disk's socket", LIMIT, || Ok(disk.exists().then_some(())))?;
    namespace.address(TAP)?;
    let _far = Far::start(&namespace, scene.folder.path())?;
    let options = GuestOptions {
        socket: Some(&disk),
        net: Some(Net { socket: &lan, pairs: 2 }),
        queues: 2,
        cpus: 2,
        script: &format!("{WORDS}{SCRIPT}"),
        ..Default::default()
    };
    let mut guest = Guest::boot(scene.kernel(Kind::Qemu)?, &options, &scene.log("guest.log"))?;
    for round in 0..ROUNDS {
        guest.reach(&format!("loaded{round}"), LIMIT)?;
        let processes = processes(&daemon)?;
        check(processes.len() == round + 1, || {
            format!("device processes {processes:?} in round {round}")
        })?;
        let pid =
            processes.last().and_then(|pid| cleanup::pid(*pid)).ok_or("no device process runs")?;
        kill_process(pid, Signal::KILL).context("the device process")?;
        guest.proceed()?;
    }
    guest.finish(LIMIT)?;
    let log = daemon.log()?;
    check(!log.contains(" ERROR ") && !log.contains("panicked"), || log.clone())?;
    daemon.stop()?;
    namespace.holds_only(&[])
}

/// The processes of all device processes that the daemon has started, in that order.
fn processes(daemon: &Daemon) -> Outcome<Vec<u32>> {
    let log = daemon.log()?;
    let starts = log.lines().filter(|line| line.contains("device process started"));
    Ok(starts.filter_map(|line| line.rsplit_once("pid=")?.1.trim().parse().ok()).collect())
}
