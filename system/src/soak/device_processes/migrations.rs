//! A guest of Debian's newest QEMU migrates to and fro between two daemons, with a disk and a
//! network of four pairs whose processes are killed: one in each move, of the source while memory
//! is copied or right after the end, or of the destination.
//!
//! Its fio compares all that it reads, and the host pings it at an address for each pair.

use super::pings::Pings;
use super::{FAULTS, LIMIT, LONG_LIFE_MS, Worst, device_processes};
use crate::cleanup::{self, Folder};
use crate::command::{find, wait_for};
use crate::daemon::{Counters, Daemon, DaemonOptions};
use crate::guest::{Emulator, Guest, GuestOptions, Kernel, Kind, Monitor, Net, fio};
use crate::net::{Namespace, WORDS};
use crate::soak::Kills;
use crate::soak::random::Random;
use crate::{Context, Outcome, check, packages};
use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};
use std::fs::File;
use std::path::PathBuf;
use std::time::{Duration, Instant};

const IMAGE_MIB: u64 = 64;
/// Request queues of the disk, pairs of the network, and CPUs of the guest.
const QUEUES: u32 = 4;
/// The guest's addresses end in these; the first is that of [`WORDS`].
const ADDRESSES: std::ops::Range<u32> = 2..6;
/// The guest may be silent for so long.
const PROMISE: Duration = Duration::from_secs(1);
/// A machine that makes the host's pings of itself wait for longer is held up by other programs.
const HELD_UP: Duration = Duration::from_millis(50);
/// No machine excuses a longer silence.
const NO_EXCUSE: Duration = Duration::from_secs(3);
/// Bytes in a second while a process is killed: the copy of memory lasts until it is let go.
const SLOW: u64 = 20_000_000;
/// Bytes in a second after that.
const FAST: u64 = 2_000_000_000;
/// Milliseconds that the guest may stand still, QEMU's own default.
const DOWNTIME_MS: u64 = 300;

/// fio writes blocks of random sizes in random order, reads them and compares, until the host says
/// that it is enough.
const SCRIPT: &str = r#"
network
for last in 3 4 5; do must ip addr add 192.0.2.$last/24 dev $ETH; done
load() {
    fio --name=load --filename=$DISK --direct=1 --ioengine=libaio --iodepth=8 --rw=randwrite \
        --bsrange=4k-64k --size=8m --randrepeat=0 --verify=crc32c --verify_fatal=1 --do_verify=1 \
        > /tmp/fio 2>&1 || {
        cat /tmp/fio
        echo "fio" > /tmp/bad
        return 1
    }
    echo x >> /tmp/runs
}
(while [ ! -e /tmp/stop ]; do load || break; done) &
while [ ! -s /tmp/runs ] && [ ! -e /tmp/bad ]; do sleep 0.1; done
await load
touch /tmp/stop
wait
[ -e /tmp/bad ] && fail "wrong: $(cat /tmp/bad)"
dmesg | grep -i "i/o error" && fail "the kernel saw an error"
pings $HOST
mark runs $(wc -l < /tmp/runs)
"#;

/// When a process is killed in a move, and whose it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum When {
    /// The source's, while memory is copied: shortly before the end.
    Before,
    /// The source's, as soon as the guest runs at the destination.
    After,
    /// The destination's, while memory is copied.
    During,
}

/// Which device's process is killed in a move, and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Move {
    when: When,
    device: &'static str,
}

/// The moves, source and destination in turn. The network's process dies most often before the end
/// at the source: the next one must tell where rings stand that it has not served.
const MOVES: [(When, &str); 12] = [
    (When::Before, "lan"),
    (When::During, "disk"),
    (When::Before, "lan"),
    (When::During, "lan"),
    (When::After, "disk"),
    (When::During, "lan"),
    (When::Before, "lan"),
    (When::During, "disk"),
    (When::Before, "disk"),
    (When::During, "lan"),
    (When::After, "lan"),
    (When::During, "disk"),
];

impl Move {
    fn of(number: u32) -> Self {
        let (when, device) = MOVES[number.wrapping_sub(1) as usize % MOVES.len()];
        Self { when, device }
    }
}

/// A daemon, and where its sockets lie.
#[derive(Debug)]
struct Host {
    name: &'static str,
    folder: PathBuf,
    daemon: Daemon,
}

impl Host {
    fn start(ground: &Ground<'_>, name: &'static str) -> Outcome<Self> {
        let folder = ground.folder.path().join(name);
        std::fs::create_dir(&folder).context(folder.display())?;
        let path = |name: &str| folder.join(name).display().to_string();
        let config = path("manyring.toml");
        let text = format!(
            "[daemon]\ncontrol = \"{}\"\n\
             [[blk]]\nname = \"disk\"\nsocket_path = \"{}\"\nfile = \"{}\"\nformat = \"raw\"\n\
             direct = true\nnum_queues = {QUEUES}\nlock_with_rings = true\ndomain = \"disk\"\n\
             [[net]]\nname = \"lan\"\nsocket_path = \"{}\"\ntap = \"tap-{name}\"\n\
             bridge = \"br0\"\nqueue_pairs = {QUEUES}\ndomain = \"lan\"\n",
            path("run-control.sock"),
            path("disk.sock"),
            ground.image.display(),
            path("lan.sock"),
        );
        std::fs::write(&config, text).context(&config)?;
        let options = DaemonOptions {
            binary: ground.kills.binary.clone(),
            folder: folder.clone(),
            log: ground.kills.logs.join(format!("manyring-{name}.log")),
            arguments: ["run", "--config", &config].map(str::to_owned).into(),
            is_controlled: false,
            wrapper: ground.namespace.wrapper(),
        };
        let daemon = Daemon::start(options, &folder.join("lan.sock"))?;
        let host = Self { name, folder, daemon };
        wait_for("the daemon's sockets", LIMIT, || {
            let sockets = ["disk.sock", "run-control.sock"].map(|name| host.folder.join(name));
            Ok(sockets.iter().all(|socket| socket.exists()).then_some(()))
        })?;
        Ok(host)
    }

    fn migration_socket(&self) -> PathBuf {
        self.folder.join("migration.sock")
    }

    /// Connections of VMMs so far.
    fn connections(&self) -> Outcome<usize> {
        Ok(self.daemon.log()?.matches("front-end connected").count())
    }

    /// A machine at this daemon, whose devices it serves: the first one boots the guest, others
    /// wait for it to come in.
    fn machine(&self, ground: &Ground<'_>, number: u32) -> Outcome<Machine> {
        let (disk, lan) = (self.folder.join("disk.sock"), self.folder.join("lan.sock"));
        let (monitor, migration_socket) =
            (self.folder.join(format!("qmp{number}")), self.migration_socket());
        let script = format!("{WORDS}{SCRIPT}");
        let options = GuestOptions {
            socket: Some(&disk),
            queues: QUEUES,
            is_packed: ground.kills.is_packed,
            net: Some(Net { socket: &lan, pairs: QUEUES }),
            emulator: Some(&ground.emulator),
            cpus: QUEUES,
            programs: &["fio"],
            root: Some(&ground.root),
            script: &script,
            monitor: Some(&monitor),
            incoming: (number > 0).then_some(&migration_socket),
            ..GuestOptions::default()
        };
        let log = ground.kills.logs.join(format!("guest{number}.log"));
        let before = self.connections()?;
        let guest = match number {
            0 => Guest::boot(&ground.kernel, &options, &log)?,
            _ => Guest::await_migration(&ground.kernel, &options, &log)?,
        };
        let machine = Machine { guest, monitor: Monitor::connect(&monitor)? };
        wait_for("QEMU's connections", LIMIT, || {
            Ok((self.connections()? >= before + 2).then_some(()))
        })?;
        Ok(machine)
    }

    /// Kills the process of a device.
    fn kill(&self, device: &str) -> Outcome {
        let last =
            device_processes(&self.daemon, device)?.last().and_then(|pid| cleanup::pid(*pid));
        kill_process(last.ok_or("no process serves it")?, Signal::KILL).context(device)
    }

    /// Waits for the next process of a device, of which there were `count`.
    fn has_next(&self, device: &str, count: usize) -> Outcome {
        wait_for("the next process of a device", LIMIT, || {
            Ok((device_processes(&self.daemon, device)?.len() > count).then_some(()))
        })
    }

    /// Lines of its log that nothing of this may cause.
    fn faults(&self) -> Outcome<Vec<String>> {
        let log = self.daemon.log()?;
        let is_fault = |line: &&str| FAULTS.iter().any(|fault| line.contains(fault));
        let name = self.name;
        Ok(log.lines().filter(is_fault).map(|line| format!("manyring-{name}: {line}")).collect())
    }

    /// Requests of the disk that it has served.
    fn requests(&self) -> Outcome<u64> {
        self.daemon.queues_of("disk")?.iter().map(|queue| queue.value("requests")).sum()
    }

    /// Says what the queues of its devices have served.
    fn say_counters(&self) -> Outcome {
        for (device, counter) in [("disk", "requests"), ("lan", "packets")] {
            let queues = self.daemon.queues_of(device)?;
            let all = |name| queues.iter().map(move |queue: &Counters| queue.value(name));
            let served = all(counter).collect::<Outcome<Vec<_>>>()?;
            let faults = all("faults").sum::<Outcome<u64>>()?;
            println!("soak: {}'s {device}: {counter} {served:?}, {faults} faults", self.name);
        }
        Ok(())
    }
}

/// A QEMU, and its monitor.
struct Machine {
    guest: Guest,
    monitor: Monitor,
}

/// The files and the network of all of it.
struct Ground<'a> {
    kills: &'a Kills,
    folder: Folder,
    _files: Folder,
    image: PathBuf,
    /// Libraries for the guest's fio.
    root: PathBuf,
    namespace: Namespace,
    kernel: Kernel,
    emulator: Emulator,
}

impl<'a> Ground<'a> {
    fn prepare(kills: &'a Kills) -> Outcome<Self> {
        packages::need("the soak of migrations", &["fio", "gcc", "binutils"])?;
        let (folder, files) = (Folder::new()?, Folder::inside(&kills.logs)?);
        let image = files.path().join("disk.img");
        let file = File::create(&image).context(image.display())?;
        file.set_len(IMAGE_MIB << 20).context(image.display())?;
        let root = folder.path().join("root");
        fio::stand_ins(&find("fio").ok_or("fio is not installed")?, &root)?;
        let namespace = Namespace::new()?;
        namespace.bridge(1500)?;
        let (kernel, emulator) = (Kernel::prepare(Kind::Qemu)?, Emulator::newest()?);
        Ok(Self { kills, folder, _files: files, image, root, namespace, kernel, emulator })
    }

    fn pings(&self) -> Outcome<Vec<Pings>> {
        let address = |last| format!("192.0.2.{last}");
        ADDRESSES.map(|last| Pings::start(&self.namespace, &address(last))).collect()
    }
}

/// Has the guest migrate `kills.count` times, and prints what it and the host saw.
///
/// # Errors
/// The guest read what it had not written, or was silent for more than a second in a move that
/// other programs did not hold up; a migration failed; or the log of a daemon or of the guest has
/// a fault.
pub fn run(kills: &Kills) -> Outcome {
    let format = if kills.is_packed { "packed" } else { "split" };
    println!("soak: {} migrations, {format} rings, seed {}", kills.count, kills.seed);
    let ground = Ground::prepare(kills)?;
    println!("soak: QEMU {}", ground.emulator.version());
    let hosts = [Host::start(&ground, "a")?, Host::start(&ground, "b")?];
    let mut gaps = Worst::default();
    let moved = travel(&ground, &hosts, &mut gaps);
    gaps.say("no ping of the guest was answered in a move");
    let mut faults = kernel_faults(kills);
    for host in &hosts {
        faults.extend(host.faults()?);
        host.say_counters()?;
    }
    println!("soak: {} faults in the logs of the daemons and of the guest", faults.len());
    faults.iter().take(5).for_each(|fault| println!("soak: {fault}"));
    moved?;
    check(faults.is_empty(), || format!("the logs have faults, the first: {}", faults[0]))?;
    let silence = gaps.longest;
    check(silence <= PROMISE, || format!("no ping was answered for {} ms", silence.as_millis()))?;
    hosts.into_iter().try_for_each(|host| host.daemon.stop())
}

/// Boots the guest, has it move, and lets it end. Notes the longest silence of each move.
fn travel(ground: &Ground<'_>, hosts: &[Host; 2], gaps: &mut Worst) -> Outcome {
    let kills = ground.kills;
    let mut random = Random::new(kills.seed);
    let mut here = hosts[0].machine(ground, 0)?;
    here.guest.reach("load", LIMIT)?;
    let pings = ground.pings()?;
    // The same of an address that no guest has: how long this machine itself made a ping wait.
    let own = [Pings::start(&ground.namespace, "192.0.2.1")?];
    let began = Instant::now();
    std::thread::sleep(Duration::from_millis(LONG_LIFE_MS));
    let (at_rest, of_host) = (longest(&pings, began)?, longest(&own, began)?);
    println!("soak: at rest no ping was answered for {at_rest:?}, of the host itself {of_host:?}");
    let mut number = 0;
    while gaps.count < kills.count {
        number += 1;
        check(number <= most_moves(kills), || "other programs hold this machine up".into())?;
        std::thread::sleep(Duration::from_millis(LONG_LIFE_MS + random.below(500)));
        let (from, to) = (&hosts[(number + 1) as usize % 2], &hosts[number as usize % 2]);
        let kill = Move::of(gaps.count + 1);
        let mut next = to.machine(ground, number)?;
        let began = Instant::now();
        let delay = Duration::from_millis(random.below(800));
        let told = migrate([&mut here.monitor, &mut next.monitor], [from, to], kill, delay)?;
        here = next;
        let (gap, of_host) = (longest(&pings, began)?, longest(&own, began)?);
        let is_held_up = gap > PROMISE && gap <= NO_EXCUSE && of_host > HELD_UP;
        if !is_held_up {
            gaps.note(gap);
        }
        println!(
            "soak: {number}, {} to {}, {}'s process killed {:?}: {told}; no ping was answered for \
             {gap:?}, of the host itself {of_host:?}{}",
            from.name,
            to.name,
            kill.device,
            kill.when,
            if is_held_up { ": does not count, other programs hold this machine up" } else { "" }
        );
        let before = to.requests()?;
        wait_for("requests at the destination", LIMIT, || {
            Ok((to.requests()? > before).then_some(()))
        })?;
    }
    drop(pings);
    here.guest.proceed()?;
    let said = here.guest.finish(Duration::from_secs(300))?;
    let runs = said.lines().find_map(|line| line.strip_prefix("GUEST_MARK runs ")).unwrap_or("0");
    println!("soak: {} runs of fio compared all that they read, 0 wrong, 0 errors", runs.trim());
    Ok(())
}

/// So often does the guest move at most, with the moves that do not count.
fn most_moves(kills: &Kills) -> u32 {
    3 * kills.count
}

/// What the guest's kernel said of its devices: it says nothing of those that work.
fn kernel_faults(kills: &Kills) -> Vec<String> {
    let mut faults = Vec::new();
    for number in 0..=most_moves(kills) {
        // There are no more consoles than moves.
        let console = kills.logs.join(format!("guest{number}.log"));
        let said = std::fs::read(&console).unwrap_or_default();
        let said = String::from_utf8_lossy(&said);
        let is_fault = |line: &&str| line.contains("] virtio") || line.contains("I/O error");
        faults.extend(said.lines().filter(is_fault).map(|line| format!("guest{number}: {line}")));
    }
    faults
}

/// The longest silence since `began`, in whole milliseconds, up to an answer at each address that
/// comes after now.
fn longest(pings: &[Pings], began: Instant) -> Outcome<Duration> {
    let now = Instant::now();
    pings.iter().try_for_each(|pings| pings.wait_beyond(now))?;
    let silence = pings.iter().map(|pings| pings.worst_since(began)).max().unwrap_or_default();
    Ok(Duration::from_millis(u64::try_from(silence.as_millis()).unwrap_or(u64::MAX)))
}

/// Migrates the guest, and kills a process: the copy is slow until `delay` after that. Returns when
/// the guest runs at the destination, with what QEMU says. `monitors` and `hosts` are those of the
/// source and of the destination.
fn migrate(
    [source, destination]: [&mut Monitor; 2],
    [from, to]: [&Host; 2],
    kill: Move,
    delay: Duration,
) -> Outcome<String> {
    let host = if kill.when == When::During { to } else { from };
    let processes = device_processes(&host.daemon, kill.device)?.len();
    set_speed(source, SLOW)?;
    let uri = format!("unix:{}", to.migration_socket().display());
    source.execute("migrate", &json!({ "uri": uri }))?;
    until(source, "active", "a migration's begin")?;
    if kill.when != When::After {
        host.kill(kill.device)?;
    }
    std::thread::sleep(delay);
    set_speed(source, FAST)?;
    let said = until(source, "completed", "a migration's end")?;
    if kill.when == When::After {
        host.kill(kill.device)?;
    }
    wait_for("the guest at the destination", LIMIT, || {
        let state = destination.ask("query-status", &json!({}))?;
        Ok((state["status"] == "running").then_some(()))
    })?;
    host.has_next(kill.device, processes)?;
    Ok(format!(
        "stood still for {} ms of {}, {} rounds, {} MB",
        said["downtime"],
        said["total-time"],
        said["ram"]["dirty-sync-count"],
        said["ram"]["transferred"].as_u64().unwrap_or(0) / 1_000_000
    ))
}

fn set_speed(source: &mut Monitor, bytes: u64) -> Outcome {
    let limits = json!({ "max-bandwidth": bytes, "downtime-limit": DOWNTIME_MS });
    source.execute("migrate-set-parameters", &limits)
}

/// Waits until a migration has come to this state.
fn until(source: &mut Monitor, state: &str, what: &str) -> Outcome<Value> {
    wait_for(what, LIMIT, || {
        let said = source.ask("query-migrate", &json!({}))?;
        match said["status"].as_str() {
            Some("failed" | "cancelled") => Err(format!("the migration failed: {said}")),
            Some("completed") => Ok(Some(said)),
            Some(now) if now == state => Ok(Some(said)),
            _ => Ok(None),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_devices_process_is_killed_in_each_way_and_the_ends_take_turns() {
        let moves: Vec<_> = (1..=12).map(Move::of).collect();
        for device in ["lan", "disk"] {
            for when in [When::Before, When::After, When::During] {
                assert!(moves.contains(&Move { when, device }), "{device} {when:?}");
            }
        }
        let mut turns = moves.iter().enumerate();
        assert!(turns.all(|(at, m)| (m.when == When::During) == (at % 2 == 1)));
        assert_eq!(Move::of(13), moves[0]);
    }
}
