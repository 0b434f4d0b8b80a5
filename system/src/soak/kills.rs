//! The soak of kills: a guest whose fio compares all that it reads, and daemons that are killed.
//!
//! Each daemon holds some requests for ever, so that those behind them are answered and completions
//! are out of order. Its successor must answer the held ones. A client of another VMM's kind uses a
//! second disk of the daemons (`beside.rs`).

use super::beside::{Beside, DISK_MIB};
use super::random::Random;
use crate::ceph::Cluster;
use crate::cleanup::Folder;
use crate::command::{find, wait_for};
use crate::daemon::{Daemon, DaemonOptions};
use crate::guest::{Guest, GuestOptions, Kernel, Kind, fio};
use crate::nbd::{self, Engine, Trial, Turns};
use crate::{Context, Outcome, check, packages};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How to kill.
#[derive(Clone, Debug)]
pub struct Kills {
    /// The daemon.
    pub binary: PathBuf,
    /// How often it is killed.
    pub count: u32,
    /// The seed of the times of the kills, and of the requests that are held.
    pub seed: u64,
    /// The disk's rings are packed.
    pub is_packed: bool,
    /// Where logs and the image go; the folder is there.
    pub logs: PathBuf,
}

const IMAGE_MIB: u64 = 64;

/// The rings of the guest have the format that was asked for.
const FORMAT: &str = r#"
[ "$(cut -c35 /sys/block/vda/device/features)" = $is_packed ] || fail "rings of the other format"
"#;

/// Two jobs at depth 16, each on its own part of the disk: blocks of random sizes are written in
/// random order, read again and compared, until the host says that it is enough.
pub(crate) const COMPARE: &str = r#"
load() {
    while [ ! -e /tmp/stop ]; do
        fio --name=load --filename=$DISK --direct=1 --ioengine=libaio --iodepth=16 \
            --rw=randwrite --bsrange=4k-64k --offset=$1 --size=4m --randrepeat=0 \
            --verify=crc32c --verify_fatal=1 --do_verify=1 > /tmp/fio$1 2>&1 || {
            cat /tmp/fio$1
            echo "fio at $1" > /tmp/bad
            break
        }
        echo x >> /tmp/runs
    done
}
load 0 &
load 32m &
await load
touch /tmp/stop
wait
[ -e /tmp/bad ] && fail "wrong: $(cat /tmp/bad)"
mark runs $(wc -l < /tmp/runs)
"#;

/// Kills daemons under a guest of QEMU, and prints what the guest saw.
///
/// # Errors
/// The guest read something that it had not written, or waits for an answer for ever; or a daemon
/// found a fault in the guest's ring.
pub fn run(kills: &Kills) -> Outcome {
    packages::need("the soak of kills", &["fio", "gcc", "binutils"])?;
    let format = if kills.is_packed { "packed" } else { "split" };
    println!("soak: {} kills, {format} rings, seed {}", kills.count, kills.seed);
    let ground = Ground::prepare(kills)?;
    let mut random = Random::new(kills.seed);
    ground.configure(Some(random.below(400) + 40))?;
    let mut daemon = Daemon::start(ground.daemon(kills), ground.socket())?;
    let mut guest = ground.boot(kills)?;
    let beside = Beside::start(ground.disks[1].socket.clone(), kills.seed);
    let mut longest = Duration::ZERO;
    let mut life = Life::first();
    for kill in 1..=kills.count {
        let had_session = life.await_kill(&daemon, &mut random)?;
        let killed = Instant::now();
        let options = daemon.crash()?;
        let log_before = std::fs::read(&options.log).context(options.log.display())?.len();
        life = Life { killed, had_session, log_before };
        let is_last = kill == kills.count;
        ground.configure((!is_last).then(|| random.below(400) + 40))?;
        let began = Instant::now();
        daemon = Daemon::start(options, ground.socket())?;
        longest = longest.max(began.elapsed());
        beside.next_daemon(killed);
        if kill % 10 == 0 {
            println!("soak: {kill} kills");
        }
    }
    guest.proceed()?;
    let said = guest.finish(Duration::from_secs(300))?;
    let runs = said.lines().find_map(|line| line.strip_prefix("GUEST_MARK runs ")).unwrap_or("0");
    let faults = daemon.log()?.lines().filter(|line| line.contains("queue stopped: ")).count();
    println!(
        "soak: {} kills, {} runs of fio compared all that they read, {faults} faults; a daemon \
         listened at most {} ms after its start",
        kills.count,
        runs.trim(),
        longest.as_millis()
    );
    println!("soak: {}", beside.finish()?);
    check(faults == 0, || "a daemon found a fault in the guest's ring".into())?;
    daemon.stop()
}

/// The life of a daemon, as far as the time of its end depends on it.
struct Life {
    /// When the daemon before it was killed.
    killed: Instant,
    /// QEMU had a session with that daemon when it was killed.
    had_session: bool,
    /// Bytes of the log when that daemon was killed.
    log_before: usize,
}

impl Life {
    /// The life of the first daemon, which has a session with QEMU.
    fn first() -> Self {
        Self { killed: Instant::now(), had_session: false, log_before: 0 }
    }

    /// Waits until the daemon is to be killed. QEMU connects again a second after it has lost a
    /// session: some daemons die before that, most under load, and none while QEMU connects. QEMU
    /// before 8.2 never uses its socket again if it loses it then (its commit f02a4b8e6431). True
    /// if QEMU has a session with this daemon.
    fn await_kill(&self, daemon: &Daemon, random: &mut Random) -> Outcome<bool> {
        let before_it_connects = self.killed + Duration::from_millis(100 + random.below(500));
        let load = Duration::from_millis(500 + random.below(1500));
        // The second counts from the end of the session. After a daemon that had none, nobody knows
        // how much of it is left.
        if self.had_session && random.below(6) == 0 && Instant::now() < before_it_connects {
            std::thread::sleep(before_it_connects.duration_since(Instant::now()));
            return Ok(false);
        }
        wait_for("QEMU to connect again", Duration::from_secs(60), || {
            // The daemon before this one wrote the log up to there.
            let log = daemon.log()?;
            let life = log.get(self.log_before..).unwrap_or_default();
            Ok(life.contains("front-end connected device=\"disk\"").then_some(()))
        })?;
        std::thread::sleep(load);
        Ok(true)
    }
}

/// A disk of the daemons.
struct Disk {
    socket: PathBuf,
    image: PathBuf,
}

/// The files that the daemons and the guest use.
struct Ground {
    folder: Folder,
    config: PathBuf,
    /// The guest's, and that of the client beside it.
    disks: [Disk; 2],
    _files: Folder,
}

impl Ground {
    fn prepare(kills: &Kills) -> Outcome<Self> {
        let (folder, files) = (Folder::new()?, Folder::inside(&kills.logs)?);
        let disk = |name: &str, mib: u64| -> Outcome<Disk> {
            let image = files.path().join(format!("{name}.img"));
            let file = File::create(&image).context(image.display())?;
            file.set_len(mib << 20).context(image.display())?;
            Ok(Disk { socket: folder.path().join(format!("{name}.sock")), image })
        };
        let disks = [disk("disk", IMAGE_MIB)?, disk("beside", DISK_MIB)?];
        let config = folder.path().join("manyring.toml");
        Ok(Self { folder, config, disks, _files: files })
    }

    fn socket(&self) -> &Path {
        &self.disks[0].socket
    }

    fn daemon(&self, kills: &Kills) -> DaemonOptions {
        DaemonOptions {
            binary: kills.binary.clone(),
            folder: self.folder.path().to_owned(),
            log: kills.logs.join("manyring.log"),
            arguments: ["run".to_owned(), "--config".to_owned(), self.config.display().to_string()]
                .into(),
            is_controlled: false,
            wrapper: Vec::new(),
        }
    }

    /// Writes the configuration of a daemon, which holds back every `held`th request of the guest.
    fn configure(&self, held: Option<u64>) -> Outcome {
        let fault = held.map(|n| format!("fault = {{ hold_every = {n} }}\n")).unwrap_or_default();
        let table = |name: &str, disk: &Disk, more: &str| {
            let (socket, image) = (disk.socket.display(), disk.image.display());
            format!(
                "[[blk]]\nname = \"{name}\"\nsocket_path = \"{socket}\"\nfile = \"{image}\"\n\
                 format = \"raw\"\ndirect = true\nnum_queues = 2\n{more}"
            )
        };
        let text = table("disk", &self.disks[0], &fault) + &table("beside", &self.disks[1], "");
        std::fs::write(&self.config, text).context(self.config.display())
    }

    /// Boots the guest. Returns when its load runs.
    fn boot(&self, kills: &Kills) -> Outcome<Guest> {
        let root = self.folder.path().join("root");
        fio::stand_ins(&find("fio").ok_or("fio is not installed")?, &root)?;
        let options = GuestOptions {
            socket: Some(self.socket()),
            queues: 2,
            is_packed: kills.is_packed,
            cpus: 2,
            programs: &["fio"],
            root: Some(&root),
            script: &format!("is_packed={}\n{FORMAT}{COMPARE}", u8::from(kills.is_packed)),
            ..GuestOptions::default()
        };
        let kernel = Kernel::prepare(Kind::Qemu)?;
        let mut guest = Guest::boot(&kernel, &options, &kills.logs.join("guest.log"))?;
        guest.reach("load", Duration::from_secs(120))?;
        Ok(guest)
    }
}

/// The kind of store that serves a guest's disk and is killed.
#[derive(Clone, Copy, Debug)]
pub enum Store {
    /// nbdkit and qemu-nbd, in turn.
    Nbd,
    /// nbdkit.
    Nbdkit,
    /// qemu-nbd.
    QemuNbd,
    /// The OSD of a Ceph cluster, behind qemu-storage-daemon.
    Ceph,
}

/// Kills what serves the disk of a guest of QEMU, and prints what the guest saw.
///
/// # Errors
/// The guest read something that it had not written, or had an error.
pub fn run_stores(kills: &Kills, store: Store) -> Outcome {
    println!("soak: {} kills of {store:?}, seed {}", kills.count, kills.seed);
    let (folder, kernel) = (Folder::new()?, Kernel::prepare(Kind::Qemu)?);
    let mut random = Random::new(kills.seed);
    let (folder, logs) = (folder.path(), &kills.logs);
    let turns = |engines: &[Engine]| Turns::start(engines, folder, logs, false);
    let (mut cluster, mut servers);
    let killed: &mut dyn nbd::Store = match store {
        Store::Ceph => {
            cluster = Cluster::start(&kills.binary, folder, logs)?;
            &mut cluster
        }
        Store::Nbd => {
            servers = turns(&Engine::ALL)?;
            &mut servers
        }
        Store::Nbdkit => {
            servers = turns(&[Engine::Nbdkit])?;
            &mut servers
        }
        Store::QemuNbd => {
            servers = turns(&[Engine::QemuNbd])?;
            &mut servers
        }
    };
    let trial = Trial {
        binary: &kills.binary,
        folder,
        logs,
        kernel: &kernel,
        queues: 2,
        kills: kills.count,
        pause: &mut || Duration::from_millis(300 + random.below(1500)),
    };
    let survived = trial.run(killed)?;
    println!(
        "soak: {} kills of {store:?}, {} connections were lost, {} runs of fio compared all that \
         they read, no error",
        kills.count, survived.losses, survived.runs
    );
    Ok(())
}
