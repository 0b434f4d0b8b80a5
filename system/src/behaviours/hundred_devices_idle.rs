//! A hundred idle devices in one daemon: no CPU time, less than 1 MiB each.

use super::{Behaviour, Scene};
use crate::command::wait_for;
use crate::daemon::{Daemon, DaemonOptions};
use crate::{Context, Outcome, check};
use std::fmt::Write;
use std::fs::File;
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "hundred_devices_idle", run };

const DEVICES: usize = 100;
/// How long the daemon is watched at a time, and how many times at most: its start may still go on
/// during the first spells.
const SPELL: Duration = Duration::from_secs(3);
const SPELLS: usize = 10;

fn run(scene: &Scene<'_>) -> Outcome {
    let mut config = String::new();
    let socket = |index: usize| scene.file(&format!("{index}.sock"));
    for index in 0..DEVICES {
        let image = scene.file(&format!("{index}.img"));
        let file = File::create(&image).context(image.display())?;
        file.set_len(64 << 20).context(image.display())?;
        let (socket, image) = (socket(index), image.display());
        let socket = socket.display();
        let _ = writeln!(config, "[[blk]]\nsocket_path = '{socket}'\nfile = '{image}'\n");
    }
    let path = scene.file("manyring.toml");
    std::fs::write(&path, config).context(path.display())?;
    let arguments = ["run", "--config"].map(str::to_owned).into_iter();
    let arguments = arguments.chain([path.display().to_string()]).collect();
    let options = DaemonOptions {
        binary: scene.stage.binary.clone(),
        folder: scene.folder.path().to_owned(),
        log: scene.log("manyring.log"),
        arguments,
        is_controlled: false,
        wrapper: Vec::new(),
    };
    let daemon = Daemon::start(options, &socket(0))?;
    wait_for("all sockets", Duration::from_secs(30), || {
        Ok((0..DEVICES).all(|index| socket(index).exists()).then_some(()))
    })?;
    rests(&daemon)?;
    let resident_kib = resident_kib(&daemon)?;
    let each = resident_kib / DEVICES as u64;
    check(each < 1024, || format!("{each} KiB resident for each device"))?;
    daemon.stop()
}

/// Of a few spells there is one without a tick of CPU time. A daemon that looks for work, or has a
/// timer, takes some in each.
fn rests(daemon: &Daemon) -> Outcome {
    let mut spells = Vec::new();
    while spells.len() < SPELLS {
        let before = daemon.ticks()?;
        std::thread::sleep(SPELL);
        spells.push(daemon.ticks()? - before);
        if spells.ends_with(&[0]) {
            return Ok(());
        }
    }
    Err(format!("{spells:?} ticks of CPU time in spells of {} idle seconds", SPELL.as_secs()))
}

fn resident_kib(daemon: &Daemon) -> Outcome<u64> {
    let path = format!("/proc/{}/status", daemon.pid());
    let status = std::fs::read_to_string(&path).context(path)?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let number = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
    number.ok_or("/proc/PID/status has no VmRSS".into())
}
