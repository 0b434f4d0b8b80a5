//! A guest migrates to and fro between two daemons for its disk and two for its network, while it
//! compares all that it reads and hears from the network; a daemon is killed in between.

use super::{Behaviour, Scene};
use crate::command::wait_for;
use crate::daemon::{Daemon, DaemonOptions};
use crate::guest::{Guest, GuestOptions, Kind, Monitor, Net};
use crate::net::{Far, Namespace, WORDS};
use crate::{Context, Outcome, check};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "qemu_migrates_between_daemons", run };

/// Two writers that go through the page cache, and empty it before they read; one whose data stays
/// in memory; and one on each CPU that talks to the host by the pair of that CPU.
const SCRIPT: &str = r#"
[ "$(cut -c35 /sys/block/vda/device/features)" = 1 ] || fail "the disk's rings are not packed"
network
must ethtool -L eth0 combined 4
wrong() { echo "$1" >> /tmp/bad; }
disk() {
    while [ ! -e /tmp/stop ]; do
        head -c 1048576 /dev/urandom > /tmp/w$1
        dd if=/tmp/w$1 of=$DISK bs=64k seek=$(($1 * 64)) conv=notrunc,fsync 2>/dev/null ||
            wrong "write of $1"
        echo 1 > /proc/sys/vm/drop_caches
        dd if=$DISK of=/tmp/r$1 bs=64k count=16 skip=$(($1 * 64)) 2>/dev/null || wrong "read of $1"
        cmp -s /tmp/w$1 /tmp/r$1 || wrong "bytes of $1"
        echo x >> /tmp/disk
    done
}
cached() {
    dd if=/dev/urandom of=$DISK bs=1M count=24 seek=16 conv=notrunc,fsync 2>/dev/null
    sum=$(dd if=$DISK bs=1M count=24 skip=16 2>/dev/null | sha256sum)
    while [ ! -e /tmp/stop ]; do
        [ "$(dd if=$DISK bs=1M count=24 skip=16 2>/dev/null | sha256sum)" = "$sum" ] ||
            wrong "cached bytes"
        echo x >> /tmp/cached
    done
}
heard() {
    while [ ! -e /tmp/stop ]; do
        taskset $((1 << $1)) ping -c 1 -W 1 $HOST > /dev/null 2>&1 && echo x >> /tmp/heard$1
    done
}
all="disk cached heard0 heard1 heard2 heard3"
disk 0 & disk 1 & cached & heard 0 & heard 1 & heard 2 & heard 3 &
for what in $all; do
    while [ ! -s /tmp/$what ]; do sleep 0.2; done
done
mark loaded
round=0
while [ $round -lt 4 ]; do
    read -r word
    [ "$word" = look ] || continue
    round=$((round + 1))
    for what in $all; do
        before=$(wc -l < /tmp/$what)
        tries=0
        while [ "$(wc -l < /tmp/$what)" -lt $((before + 2)) ]; do
            [ $tries -lt 2000 ] || fail "round $round: $what stands still"
            tries=$((tries + 1))
            sleep 0.1
        done
    done
    [ -e /tmp/bad ] && fail "round $round: $(cat /tmp/bad)"
    mark "round$round"
done
touch /tmp/stop
wait
[ -e /tmp/bad ] && fail "wrong: $(cat /tmp/bad)"
dmesg | grep -q "I/O error" && fail "an I/O error"
"#;

/// Queue pairs of the guest's network, one for each of its CPUs.
const PAIRS: u32 = 4;
const LIMIT: Duration = Duration::from_secs(600);
/// How long a migration may take: the guest is slow, and makes much of its memory dirty.
const MIGRATION: Duration = Duration::from_secs(360);

/// One of the two places at which the guest can be.
struct Host {
    blk: Option<Daemon>,
    net: Daemon,
    folder: PathBuf,
}

impl Host {
    fn new(scene: &Scene<'_>, namespace: &Namespace, image: &str, name: &str) -> Outcome<Self> {
        let folder = scene.file(name);
        std::fs::create_dir_all(&folder).context(folder.display())?;
        let log = scene.log(&format!("manyring-{name}.log"));
        let binary = &scene.stage.binary;
        let more = ["--num-queues", "2", "--format", "raw", "--lock-with-rings"];
        let options = DaemonOptions::blk(binary, &folder, &log, image.as_ref(), &more);
        let blk = start(options)?;
        let more = ["--tap", name, "--bridge", "br0", "--queue-pairs", "4"];
        let log = scene.log(&format!("manyring-net-{name}.log"));
        let net = start(DaemonOptions::net(binary, &folder, &log, namespace, &more))?;
        Ok(Self { blk: Some(blk), net, folder })
    }

    /// A machine there; `incoming`: it waits for the guest.
    fn guest(&self, scene: &Scene<'_>, log: &str, incoming: bool) -> Outcome<(Guest, Monitor)> {
        let (blk, net) = (self.folder.join("blk0.sock"), self.net.socket());
        let (monitor, migration_socket) =
            (self.folder.join(format!("{log}.qmp")), self.migration_socket());
        let script = format!("{WORDS}{SCRIPT}");
        let options = GuestOptions {
            socket: Some(&blk),
            queues: 2,
            // And the network's are split.
            is_packed: true,
            cpus: PAIRS,
            net: Some(Net { socket: &net, pairs: PAIRS }),
            programs: &["ethtool"],
            script: &script,
            monitor: Some(&monitor),
            incoming: incoming.then_some(&migration_socket),
            ..GuestOptions::default()
        };
        let (kernel, log) = (scene.kernel(Kind::Qemu)?, scene.log(&format!("{log}.log")));
        let guest = match incoming {
            true => Guest::await_migration(kernel, &options, &log)?,
            false => Guest::boot(kernel, &options, &log)?,
        };
        Ok((guest, Monitor::connect(&monitor)?))
    }

    fn migration_socket(&self) -> PathBuf {
        self.folder.join("migration.sock")
    }

    /// Packets that each transmit queue of the network has passed on.
    fn sent(&self) -> Outcome<Vec<u64>> {
        let queues = self.net.queues()?;
        let transmits = queues.iter().take(2 * PAIRS as usize).skip(1).step_by(2);
        transmits.map(|queue| queue.value("packets")).collect()
    }

    fn requests(&self) -> Outcome<u64> {
        let blk = self.blk.as_ref().ok_or("the daemon is gone")?;
        blk.queues()?.iter().map(|queue| queue.value("requests")).sum()
    }
}

fn start(options: DaemonOptions) -> Outcome<Daemon> {
    let socket = options.socket();
    Daemon::start(options, &socket)
}

fn run(scene: &Scene<'_>) -> Outcome {
    let namespace = Namespace::new()?;
    namespace.bridge(1500)?;
    let _far = Far::start(&namespace, scene.folder.path())?;
    let image = scene.image(96)?.display().to_string();
    let hosts = ["hosta", "hostb"].map(|name| Host::new(scene, &namespace, &image, name));
    let [a, b] = hosts;
    let mut hosts = [a?, b?];
    let (mut guest, mut monitor) = hosts[0].guest(scene, "guest0", false)?;
    guest.reach("loaded", LIMIT)?;
    for round in 1..=4 {
        let (from, to) = ((round + 1) % 2, round % 2);
        if round < 4 {
            let log = format!("guest{round}");
            let (before, sent) = (hosts[to].requests()?, hosts[to].sent()?);
            let (next, mut next_monitor) = hosts[to].guest(scene, &log, true)?;
            let from_to = [&mut monitor, &mut next_monitor];
            let told = migrate(from_to, &hosts[to].migration_socket(), Meanwhile::Runs)?;
            println!("migration {round}, host {from} to {to}: {told}");
            drop(std::mem::replace(&mut guest, next));
            monitor = next_monitor;
            guest.answer("look")?;
            guest.reach(&format!("round{round}"), LIMIT)?;
            let served = hosts[to].requests()? - before;
            check(served > 100, || format!("the destination served {served} requests"))?;
            for (pair, (then, now)) in sent.iter().zip(hosts[to].sent()?).enumerate() {
                check(now > *then, || format!("the destination's pair {pair} has sent nothing"))?;
            }
        } else {
            // The daemon that serves it now is killed under load.
            let here = &mut hosts[from];
            let options = here.blk.take().ok_or("the daemon is gone")?.crash()?;
            here.blk = Some(start(options)?);
            guest.answer("look")?;
            guest.reach("round4", LIMIT)?;
        }
    }
    guest.finish(LIMIT)?;
    for host in hosts {
        let Host { blk, net, .. } = host;
        let log = blk.as_ref().map_or_else(|| Ok(String::new()), Daemon::log)?;
        check(!log.contains("queue stopped: "), || format!("a queue has a fault: {log}"))?;
        blk.map_or(Ok(()), Daemon::stop)?;
        net.stop()?;
    }
    Ok(())
}

/// Whether the guest runs or stands still while its memory is copied.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Meanwhile {
    Runs,
    Stands,
}

/// Migrates the guest to the machine that waits at `migration_socket`, and gives what QEMU says of
/// it. The guest runs there then. `monitors`: of the machine that it leaves, and of the other.
pub(super) fn migrate(
    monitors: [&mut Monitor; 2],
    migration_socket: &Path,
    meanwhile: Meanwhile,
) -> Outcome<String> {
    let [from, to] = monitors;
    if meanwhile == Meanwhile::Stands {
        from.execute("stop", &json!({}))?;
    }
    let limits = json!({ "max-bandwidth": 400_000_000, "downtime-limit": 1000 });
    from.execute("migrate-set-parameters", &limits)?;
    let uri = format!("unix:{}", migration_socket.display());
    from.execute("migrate", &json!({ "uri": uri }))?;
    let began = Instant::now();
    let said = loop {
        let said = from.ask("query-migrate", &json!({}))?;
        match said["status"].as_str() {
            Some("completed") => break said,
            Some("failed" | "cancelled") => return Err(format!("the migration failed: {said}")),
            _ => check(began.elapsed() < MIGRATION, || format!("it does not end: {said}"))?,
        }
        std::thread::sleep(Duration::from_millis(100));
    };
    // The source has sent everything, but the destination may not have loaded it yet. Input that
    // its console gets before then is lost.
    wait_for("the guest in the other machine", MIGRATION, || {
        let state = to.ask("query-status", &json!({}))?;
        match (state["status"].as_str(), meanwhile) {
            (Some("running"), _) => return Ok(Some(())),
            (Some("paused"), Meanwhile::Stands) => to.execute("cont", &json!({}))?,
            _ => {}
        }
        Ok(None)
    })?;
    Ok(figures(&said))
}

fn figures(said: &Value) -> String {
    format!(
        "downtime {} ms of {} ms, {} rounds, {} MB",
        said["downtime"],
        said["total-time"],
        said["ram"]["dirty-sync-count"],
        said["ram"]["transferred"].as_u64().unwrap_or(0) / 1_000_000
    )
}
