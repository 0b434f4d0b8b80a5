//! The same guests where the daemon is `manyring.service`, under systemd as PID 1 of a container:
//! single device processes die, the next daemon takes over, and the daemon is killed with all of
//! its device processes.

use super::ground::LIMIT;
use super::ground::{Ground, Tenant};
use super::{LONG_LIFE_MS, Worst, note_pauses};
use crate::command::wait_for;
use crate::guest::Kind;
use crate::soak::Kills;
use crate::soak::random::Random;
use crate::systemd::{Booted, Root};
use crate::{Context, Outcome, check, cleanup::Folder, packages};
use serde_json::Value;
use std::collections::BTreeSet;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Where the container has the sockets and the images.
const INSIDE: [&str; 2] = ["/supervisor", "/images"];
/// A supervisor that hangs for so long would be ended. A busy host gives it no turn for three
/// seconds at times; a device process that is stopped for longer than ten is killed.
const WATCHDOG: Duration = Duration::from_secs(7);
const UNIT: &str = "manyring";
/// Words of the journal that nothing of this may cause.
const FAULTS: [&str; 4] = ["ERROR ", "panicked", "queue stopped: ", "sandbox incomplete"];
/// The numbers of users that belong to no account.
const NOBODY: std::ops::RangeInclusive<u32> = 0x7000_0000..=0x7fff_ffff;
/// The sockets of two guests and the control socket.
const SOCKETS: usize = 5;

/// The service in its container.
struct Unit {
    booted: Booted,
    /// The control socket.
    control: PathBuf,
    _folder: Folder,
}

impl Unit {
    fn start(ground: &Ground, kills: &Kills) -> Outcome<Self> {
        let folder = Folder::new()?;
        let root = Root::new(folder.path())?;
        root.install(&kills.binary, "manyring")?;
        let [sockets, images] = INSIDE;
        root.install_units(&format!(
            "[Service]\nReadWritePaths={sockets} {images}\nWatchdogSec={}\n",
            WATCHDOG.as_secs()
        ))?;
        let ([at_sockets, at_images], config) = ground.elsewhere(INSIDE)?;
        root.write("etc/manyring/manyring.toml", &config)?;
        let folders = [(at_sockets, sockets), (at_images, images)];
        let booted = root.boot(ground.namespace(), &folders, &kills.logs.join("systemd.log"))?;
        let unit = Self { booted, control: ground.control(), _folder: folder };
        unit.booted.run(&["systemctl", "start", UNIT])?;
        Ok(unit)
    }

    fn show(&self, property: &str) -> Outcome<String> {
        let said = self.booted.run(&["systemctl", "show", UNIT, "-p", property, "--value"])?;
        Ok(said.trim().to_owned())
    }

    /// Its log so far.
    fn journal(&self) -> Outcome<String> {
        self.booted.run(&["journalctl", "-q", "-b", "-u", UNIT, "-o", "cat"])
    }

    /// Sends a signal, unless the process has ended: its number was asked for before.
    fn signal(&self, signal: &str, process: &str) -> Outcome {
        let sent = self.booted.run(&["kill", "-s", signal, process]).map(drop);
        let is_there = || self.booted.run(&["test", "-e", &format!("/proc/{process}")]).is_ok();
        sent.or_else(|error| {
            check(!is_there(), || error)?;
            println!("soak: {process} had ended before it got SIG{signal}");
            Ok(())
        })
    }

    /// The process of a guest's device process, as the daemon says, once it serves and is not
    /// `before`.
    fn device_process(&self, name: &str, before: &str) -> Outcome<String> {
        wait_for(&format!("the device process of {name}"), LIMIT, || {
            let pid = self
                .device_processes()
                .and_then(|device_processes| device_process_of(&device_processes, name));
            Ok(pid.filter(|pid| pid != before))
        })
    }

    /// What the daemon says of its device processes; nothing if it is killed meanwhile.
    fn device_processes(&self) -> Option<Value> {
        let mut stream = UnixStream::connect(&self.control).ok()?;
        stream.set_read_timeout(Some(LIMIT)).ok()?;
        let asks = b"GET /v1/processes HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
        stream.write_all(asks).ok()?;
        let mut said = String::new();
        stream.read_to_string(&mut said).ok()?;
        serde_json::from_str(said.split_once("\r\n\r\n")?.1).ok()
    }

    fn waits_for_end(&self, process: &str) -> Outcome {
        let gone = || self.booted.run(&["test", "-e", &format!("/proc/{process}")]).is_err();
        wait_for(&format!("the end of {process}"), LIMIT, || Ok(gone().then_some(())))
    }

    /// Waits for a main process other than this one, which is up.
    fn next(&self, main: &str) -> Outcome {
        wait_for("the next daemon", LIMIT, || {
            let (state, now) = (self.show("ActiveState")?, self.show("MainPID")?);
            Ok((state == "active" && now != "0" && now != main).then_some(()))
        })
    }

    /// Checks of each device process that it has no right, a user of its own, and no memory of
    /// another one.
    fn looks_at_device_processes(&self, tenants: &[Tenant]) -> Outcome {
        let main = self.show("MainPID")?;
        let proc = |process: &str, file: &str| {
            self.booted.run(&["cat", &format!("/proc/{process}/{file}")])
        };
        let status = proc(&main, "status")?;
        check(field(&status, "CapEff") == "0000000000001000", || status.clone())?;
        let lists = |status: &str| field(status, "Seccomp_filters").parse::<u32>().unwrap_or(0);
        let of_supervisor = lists(&status);
        let (mut users, mut memory) = (vec![field(&status, "Uid")], shared(&proc(&main, "maps")?));
        for Tenant { name, .. } in tenants {
            let process = self.device_process(name, "")?;
            let status = proc(&process, "status")?;
            for (key, value) in [
                ("Seccomp", "2"),
                ("NoNewPrivs", "1"),
                ("CapEff", "0000000000000000"),
                ("CapPrm", "0000000000000000"),
                ("CapInh", "0000000000000000"),
                ("CapAmb", "0000000000000000"),
                ("Groups", ""),
            ] {
                check(field(&status, key) == value, || format!("{key}: {status}"))?;
            }
            // One list of calls more than its supervisor has of systemd and of its own.
            check(lists(&status) > of_supervisor, || status.clone())?;
            for key in ["Uid", "Gid"] {
                let numbers = field(&status, key);
                let mut real = numbers.split_whitespace().map(str::parse::<u32>);
                let is_own = real.next().is_some_and(|n| n.is_ok_and(|n| NOBODY.contains(&n)));
                check(is_own, || format!("{name}: {status}"))?;
            }
            users.push(field(&status, "Uid"));
            let mapped = shared(&proc(&process, "maps")?);
            check(!mapped.is_empty() && mapped.is_disjoint(&memory), || {
                format!("{name} shares memory of others: {mapped:?}")
            })?;
            memory.extend(mapped);
        }
        let all: BTreeSet<_> = users.iter().collect();
        check(all.len() == users.len(), || format!("users: {users:?}"))?;
        println!("soak: users of the daemon and its device processes: {users:?}");
        Ok(())
    }
}

fn device_process_of(device_processes: &Value, name: &str) -> Option<String> {
    let mut all = device_processes["processes"].as_array()?.iter();
    let device_process = all.find(|device_process| {
        device_process["process"] == name && device_process["state"] == "serving"
    })?;
    device_process["pid"].as_u64().map(|pid| pid.to_string())
}

/// A line of `/proc/PID/status`.
fn field(status: &str, key: &str) -> String {
    let line = status.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
    line.unwrap_or("none").trim().to_owned()
}

/// The files in memory that a process shares with others, by their inodes.
fn shared(maps: &str) -> BTreeSet<String> {
    let words = maps.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let shared = words.filter(|words| {
        words.get(1).is_some_and(|mode| mode.ends_with('s'))
            && words.get(5).is_none_or(|name| !name.starts_with("anon_inode:"))
    });
    shared.filter_map(|words| Some(format!("{} {}", words.get(3)?, words.get(4)?))).collect()
}

/// Who connects to the control socket again and again, and whether anybody was refused.
struct Asker {
    is_over: Arc<AtomicBool>,
    thread: JoinHandle<(u64, u64)>,
}

impl Asker {
    fn start(socket: PathBuf) -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        let ends = is_over.clone();
        let ask = move || {
            let (mut asked, refused) = (0, AtomicU64::new(0));
            while !ends.load(Ordering::Relaxed) {
                asked += 1;
                if let Err(error) = UnixStream::connect(&socket) {
                    let kinds = [ErrorKind::ConnectionRefused, ErrorKind::NotFound];
                    let is_refused = kinds.contains(&error.kind());
                    refused.fetch_add(u64::from(is_refused), Ordering::Relaxed);
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            (asked, refused.into_inner())
        };
        Self { is_over, thread: std::thread::spawn(ask) }
    }

    fn finish(self) -> Outcome {
        self.is_over.store(true, Ordering::Relaxed);
        let (asked, refused) = self.thread.join().map_err(|_| "a client has panicked")?;
        println!("soak: {asked} connections to the control socket, {refused} of them refused");
        check(refused == 0 && asked > 0, || "a client was refused".to_owned())
    }
}

/// Ends device processes under a guest of User Mode Linux and one of QEMU, has daemons take over,
/// and, under the one of QEMU, which connects again, kills the daemon with its device processes.
///
/// # Errors
/// A guest read what it had not written, lost a session or has no answer; a client was refused; a
/// device process has a right; or the journal has a fault.
pub fn run(kills: &Kills) -> Outcome {
    packages::need("the soak of device processes", &["fio", "gcc", "binutils", "iperf3"])?;
    println!(
        "soak: {} kills of the service and its device processes, seed {}",
        kills.count, kills.seed
    );
    let mut ground = Ground::prepare(kills, &[Kind::Uml, Kind::Qemu])?;
    let unit = Unit::start(&ground, kills)?;
    let asker = Asker::start(ground.control());
    ground.boot()?;
    let said = tried(&mut ground, &unit, kills);
    let journal = unit.journal()?;
    let path = kills.logs.join("journal");
    std::fs::write(&path, &journal).context(path.display())?;
    said?;
    asker.finish()?;
    unit.booted.run(&["systemctl", "stop", UNIT])?;
    check(unit.show("Result")? == "success", || "the service has not stopped well".to_owned())?;
    let is_fault = |line: &&str| FAULTS.iter().any(|fault| line.contains(fault));
    let faults: Vec<_> = journal.lines().filter(is_fault).collect();
    check(faults.is_empty(), || format!("the journal has faults, the first: {}", faults[0]))
}

fn tried(ground: &mut Ground, unit: &Unit, kills: &Kills) -> Outcome {
    unit.looks_at_device_processes(&ground.tenants)?;
    let mut random = Random::new(kills.seed);
    kill_device_processes(ground, unit, kills.count.div_ceil(5))?;
    stop_device_process(ground, unit)?;
    take_over(ground, unit, kills.count.div_ceil(5))?;
    // A guest of User Mode Linux never connects again.
    report(&mut ground.tenants[0])?;
    kill_supervisor(ground, unit, (kills.count, &mut random))?;
    restart(ground, unit)?;
    unit.looks_at_device_processes(&ground.tenants[1..])?;
    report(&mut ground.tenants[1])
}

fn report(tenant: &mut Tenant) -> Outcome {
    let report = tenant.finish()?;
    println!(
        "soak: {}: {} runs of fio compared all that they read, 0 wrong, 0 errors; the slowest \
         request took {} ms, {} ms before anything was killed",
        tenant.name, report.runs, report.worst, report.calm
    );
    Ok(())
}

fn kill_device_processes(ground: &Ground, unit: &Unit, count: u32) -> Outcome {
    let (mut worst, main) = (Worst::default(), unit.show("MainPID")?);
    for kill in 0..count {
        let tenant = &ground.tenants[kill as usize % ground.tenants.len()];
        std::thread::sleep(Duration::from_millis(LONG_LIFE_MS));
        let (device_process, killed) = (unit.device_process(tenant.name, "")?, Instant::now());
        unit.signal("KILL", &device_process)?;
        unit.device_process(tenant.name, &device_process)?;
        tenant.pings()?.wait_beyond(Instant::now())?;
        worst.note(tenant.pings()?.worst_since(killed));
    }
    worst.say("no ping was answered after the end of a device process");
    check(unit.show("MainPID")? == main, || "a device process has ended its supervisor".to_owned())
}

/// A device process that does nothing for longer than the watchdog waits harms nobody else.
fn stop_device_process(ground: &Ground, unit: &Unit) -> Outcome {
    let (main, device_process) =
        (unit.show("MainPID")?, unit.device_process(ground.tenants[0].name, "")?);
    let (began, other) = (Instant::now(), ground.tenants[1].pings()?);
    unit.signal("STOP", &device_process)?;
    std::thread::sleep(WATCHDOG + WATCHDOG / 4);
    unit.signal("CONT", &device_process)?;
    let pause = other.worst_since(began).as_millis();
    ground.tenants[0].pings()?.wait_beyond(Instant::now())?;
    println!(
        "soak: beside a process that was stopped, no ping was answered for {pause} ms at most"
    );
    check(unit.show("MainPID")? == main, || "the watchdog has ended the supervisor".to_owned())
}

/// The next daemon takes over; the service manager has the new process, and restarts none.
fn take_over(ground: &Ground, unit: &Unit, count: u32) -> Outcome {
    let (mut worst, restarts) = (Worst::default(), unit.show("NRestarts")?);
    for _ in 0..count {
        std::thread::sleep(Duration::from_millis(LONG_LIFE_MS));
        let (main, began) = (unit.show("MainPID")?, Instant::now());
        unit.booted.run(&["systemctl", "kill", "--kill-who=main", "--signal=USR2", UNIT])?;
        unit.next(&main)?;
        unit.waits_for_end(&main)?;
        note_pauses(ground, began, &mut worst)?;
    }
    worst.say("no ping was answered while the next daemon took over");
    check(unit.show("NRestarts")? == restarts, || "systemd has restarted it".to_owned())?;
    check(unit.show("ActiveState")? == "active", || "it is not active".to_owned())?;
    unit.looks_at_device_processes(&ground.tenants)
}

fn kill_supervisor(ground: &Ground, unit: &Unit, (count, random): (u32, &mut Random)) -> Outcome {
    let tenant = &ground.tenants[1];
    let (mut worst, mut sockets) = (Worst::default(), adopted(&unit.journal()?));
    for kill in 1..=count {
        // QEMU before 8.2 never uses a socket again that it loses while it connects; and a guest's
        // transfers give up where they have no network for half of the time.
        std::thread::sleep(Duration::from_millis(LONG_LIFE_MS + random.below(1000)));
        let (main, device_process) = (unit.show("MainPID")?, unit.device_process(tenant.name, "")?);
        let killed = Instant::now();
        unit.signal("KILL", &main)?;
        unit.next(&main)?;
        unit.waits_for_end(&device_process)?;
        // QEMU connects again.
        unit.device_process(tenant.name, &device_process)?;
        tenant.pings()?.wait_beyond(Instant::now())?;
        worst.note(tenant.pings()?.worst_since(killed));
        sockets += SOCKETS;
        let now = adopted(&unit.journal()?);
        check(now == sockets, || format!("{now} sockets of {sockets} were kept"))?;
        if kill % 10 == 0 {
            println!("soak: {kill} kills");
        }
    }
    worst.say("no ping was answered after the end of the daemon");
    Ok(())
}

/// Sockets that daemons have taken over.
fn adopted(journal: &str) -> usize {
    let count = |rest: &str| rest.split(' ').next()?.parse::<usize>().ok();
    journal.split("took over ").skip(1).filter_map(count).sum()
}

fn restart(ground: &Ground, unit: &Unit) -> Outcome {
    let (tenant, mut worst) = (&ground.tenants[1], Worst::default());
    std::thread::sleep(Duration::from_millis(1500));
    let began = Instant::now();
    unit.booted.run(&["systemctl", "restart", UNIT])?;
    tenant.pings()?.wait_beyond(Instant::now())?;
    worst.note(tenant.pings()?.worst_since(began));
    worst.say("no ping was answered while systemctl restarted the daemon");
    Ok(())
}
