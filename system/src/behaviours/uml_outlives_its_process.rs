//! The device process of a guest's disk and network is killed again and again under a VMM that
//! never connects anew: the guest's connections stay, fio finds what it wrote, and pings come back.

use super::{Behaviour, Scene};
use crate::cleanup;
use crate::command::wait_for;
use crate::daemon::{Daemon, DaemonOptions};
use crate::guest::{Guest, GuestOptions, Kind, Net};
use crate::net::{Far, Namespace, WORDS};
use crate::{Context, Outcome, check};
use rustix::process::{Signal, kill_process};
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "uml_outlives_its_process", run };

const SCRIPT: &str = r#"
network
pings $HOST
ping -i 0.1 $HOST > /tmp/pings 2>&1 &
pings=$!
(seed=0; while [ ! -e /tmp/stop ]; do
    seed=$((seed + 1))
    fio --name=v$seed --filename=$DISK --direct=1 --ioengine=libaio --rw=randrw --rwmixread=30 \
        --bs=4k --size=16M --io_size=2M --iodepth=8 --verify=crc32c --verify_fatal=1 \
        --do_verify=1 --randseed=$seed > /tmp/fio 2>&1 || { cp /tmp/fio /tmp/bad; break; }
    echo x >> /tmp/runs
done) &
load=$!
await loaded
round=0
while [ $round -lt 8 ]; do
    runs=$(wc -l < /tmp/runs)
    tries=0
    # Two more: one of them has begun since.
    until [ "$(wc -l < /tmp/runs)" -ge $((runs + 2)) ]; do
        [ -e /tmp/bad ] && { cat /tmp/bad; fail "fio in round $round"; }
        [ $tries -lt 600 ] || fail "fio does not go on in round $round"
        tries=$((tries + 1))
        sleep 0.1
    done
    pings $HOST
    agrees $HOST 256 "round $round"
    await round$round
    round=$((round + 1))
done
touch /tmp/stop
wait $load
[ -e /tmp/bad ] && { cat /tmp/bad; fail "fio"; }
kill -INT $pings
tail -n 3 /tmp/pings
dmesg | grep -i "i/o error" && fail "the kernel saw an error"
"#;

const TAP: &str = "tap0";
const ROUNDS: usize = 8;
const LIMIT: Duration = Duration::from_secs(240);

fn run(scene: &Scene<'_>) -> Outcome {
    let namespace = Namespace::new()?;
    let image = scene.image(64)?;
    let socket = |name: &str| scene.file(&format!("{name}.sock"));
    let (disk, lan) = (socket("disk"), socket("lan"));
    let config = format!(
        "[[blk]]\nname = 'disk'\nsocket_path = '{}'\nfile = '{}'\ndomain = 'vm'\n\
         [[net]]\nname = 'lan'\nsocket_path = '{}'\ntap = '{TAP}'\ndomain = 'vm'\n",
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
        net: Some(Net { socket: &lan, pairs: 1 }),
        programs: &["fio"],
        script: &format!("{WORDS}{SCRIPT}"),
        ..Default::default()
    };
    let mut guest = Guest::boot(scene.kernel(Kind::Uml)?, &options, &scene.log("guest.log"))?;
    guest.reach("loaded", LIMIT)?;
    for round in 0..ROUNDS {
        let processes = processes(&daemon)?;
        let pid =
            processes.last().and_then(|pid| cleanup::pid(*pid)).ok_or("no device process runs")?;
        kill_process(pid, Signal::KILL).context("the device process")?;
        wait_for("the next device process", LIMIT, || {
            Ok((self::processes(&daemon)?.len() == round + 2).then_some(()))
        })?;
        guest.proceed()?;
        guest.reach(&format!("round{round}"), LIMIT)?;
    }
    guest.proceed()?;
    guest.finish(LIMIT)?;
    let log = daemon.log()?;
    let connects = log.matches("front-end connected").count();
    // Each of its devices, in each of its device processes.
    check(connects == 2 * (ROUNDS + 1), || format!("{connects} sessions: {log}"))?;
    let faults = ["fault", " ERROR ", "panicked", "session closed"];
    check(!faults.iter().any(|fault| log.contains(fault)), || log.clone())?;
    daemon.stop()?;
    namespace.holds_only(&[])
}

/// The processes of all device processes that the daemon has started, in that order.
fn processes(daemon: &Daemon) -> Outcome<Vec<u32>> {
    let log = daemon.log()?;
    let starts = log.lines().filter(|line| line.contains("device process started"));
    Ok(starts.filter_map(|line| line.rsplit_once("pid=")?.1.trim().parse().ok()).collect())
}
