//! A hundred idle devices of one daemon, each with a front-end that is connected and does nothing:
//! no CPU time and less than 1 MiB each, over all processes of the daemon.

use super::{Behaviour, Scene};
use crate::command::wait_for;
use crate::daemon::{Daemon, DaemonOptions, ticks};
use crate::{Context, Outcome, check};
use manyring_driver::{BlkDriver, BlkDriverOptions};
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
    let guests = (0..DEVICES).map(|index| {
        let options = BlkDriverOptions { queues: 1, ..BlkDriverOptions::default() };
        BlkDriver::connect(&socket(index), &options).context(index)
    });
    let guests = guests.collect::<Outcome<Vec<_>>>()?;
    // The device process of all these guests, and the process that waits to be the next one.
    let all = || Ok((processes(&daemon)?.len() == 3).then_some(()));
    wait_for("the device process and the spare process", Duration::from_secs(30), all)?;
    rests(&daemon)?;
    let private_kib = sum(&processes(&daemon)?, private_kib)?;
    let each = private_kib / DEVICES as u64;
    check(each < 1024, || format!("{each} KiB of private memory for each device"))?;
    drop(guests);
    daemon.stop()
}

/// The daemon, its device processes, and the process that waits to be one.
fn processes(daemon: &Daemon) -> Outcome<Vec<u32>> {
    let tasks = format!("/proc/{}/task", daemon.pid());
    let mut all = vec![daemon.pid()];
    for task in std::fs::read_dir(&tasks).context(tasks)?.flatten() {
        // A thread may end while it is looked at.
        let children = std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
        all.extend(children.split_whitespace().filter_map(|pid| pid.parse::<u32>().ok()));
    }
    Ok(all)
}

fn sum(processes: &[u32], of: impl Fn(u32) -> Outcome<u64>) -> Outcome<u64> {
    processes.iter().map(|process| of(*process)).sum()
}

/// Of a few spells there is one without a tick of CPU time. A daemon that looks for work, or has a
/// timer, takes some in each.
fn rests(daemon: &Daemon) -> Outcome {
    let processes = processes(daemon)?;
    let mut spells = Vec::new();
    while spells.len() < SPELLS {
        let before = sum(&processes, ticks)?;
        std::thread::sleep(SPELL);
        spells.push(sum(&processes, ticks)? - before);
        if spells.ends_with(&[0]) {
            return Ok(());
        }
    }
    Err(format!("{spells:?} ticks of CPU time in spells of {} idle seconds", SPELL.as_secs()))
}

fn private_kib(process: u32) -> Outcome<u64> {
    let path = format!("/proc/{process}/status");
    let status = std::fs::read_to_string(&path).context(path)?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let number = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
    number.ok_or("/proc/PID/status has no RssAnon".into())
}
