//! What one more idle device of a device process takes, in both processes: memory of their own, and
//! pages of the files in memory by which a session outlives its process.

use crate::domain::{pid, process};
use crate::support::process::{Daemon, copies_of, wait_until};
use crate::support::program::{manyring, shown};
use manyring_driver::{BlkDriver, BlkDriverOptions, NetDriver, NetDriverOptions};
use rustix::fs::fstat;
use std::collections::BTreeMap;
use std::path::Path;

/// Devices beside the first one.
const OTHERS: usize = 20;
/// The files of a session.
const FILES: [&str; 3] = ["counters", "inflight", "journal"];

/// KiB of a daemon and its device process.
#[derive(Debug)]
struct Memory {
    /// Anonymous memory of both.
    own: u64,
    /// Pages of each kind of file.
    files: BTreeMap<&'static str, u64>,
}

fn serve(devices: usize, table: &str, keys: &str) -> Daemon {
    let names: Vec<_> = (0..devices).map(|n| format!("d{n}")).collect();
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().display();
    let device = |name: &String| {
        format!("[[{table}]]\nname = '{name}'\nsocket_path = '{at}/{name}'\n{keys}")
    };
    let devices: String = names.iter().map(device).collect();
    let file = folder.path().join("manyring.toml");
    let head = format!("[daemon]\ncontrol = '{at}/control'\nworkers = 1\ndomains = 'user'\n");
    std::fs::write(&file, head + &devices).unwrap();
    let mut command = manyring();
    command.arg("run").arg("--config").arg(file);
    let sockets = names.iter().map(String::as_str).chain(["control"]);
    let sockets: Vec<_> = sockets.map(|name| folder.path().join(name)).collect();
    Daemon::start(command, folder, &sockets)
}

/// The memory of the daemon and of the device process of this user, once the counters of all
/// devices were asked for.
fn memory(daemon: &Daemon) -> Memory {
    shown(&daemon.socket_of("control"), "/v1/devices");
    let own = format!("user:{}", rustix::process::getuid().as_raw());
    assert!(wait_until(|| process(daemon, &own)["state"] == "serving"), "{}", daemon.log());
    let device_process = pid(daemon, &own).as_raw_nonzero().get();
    let anonymous = |id: i64| {
        let status = std::fs::read_to_string(format!("/proc/{id}/status")).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
        line.split_whitespace().next().unwrap().parse::<u64>().unwrap()
    };
    let pages = |name: &'static str| {
        let all = copies_of(device_process, Path::new(&format!("/memfd:{name} (deleted)")));
        let blocks: BTreeMap<_, _> =
            all.iter().map(|fd| fstat(fd).unwrap()).map(|of| (of.st_ino, of.st_blocks)).collect();
        (name, u64::try_from(blocks.values().sum::<i64>()).unwrap() / 2)
    };
    let supervisor = i64::from(daemon.pid());
    let own = anonymous(supervisor) + anonymous(i64::from(device_process));
    Memory { own, files: FILES.map(pages).into() }
}

/// Compares a daemon with one device of a kind and one with more, each with a front-end that
/// `connect` connects. `own`, `files`: most KiB for a device, of both processes' own memory in the
/// debug build and of each kind of file.
fn each_takes_at_most<F>(
    kind: (&str, &str),
    connect: impl Fn(&Path) -> F,
    (own, files): (u64, [u64; 3]),
) {
    let [one, all] = [1, 1 + OTHERS].map(|devices| {
        let daemon = serve(devices, kind.0, kind.1);
        let names = (0..devices).map(|n| format!("d{n}"));
        let front_ends: Vec<_> = names.map(|name| connect(&daemon.socket_of(&name))).collect();
        let memory = memory(&daemon);
        drop(front_ends);
        assert!(daemon.terminate().success());
        memory
    });
    let found = format!("one device {one:?}, {} {all:?}", 1 + OTHERS);
    let others = OTHERS as u64;
    for (name, most) in FILES.into_iter().zip(files) {
        assert!(all.files[name] - one.files[name] <= most * others, "{name}: {found}");
    }
    assert!(all.own.saturating_sub(one.own) <= own * others, "{found}");
}

#[test]
fn one_more_idle_disk_of_eight_queues_takes_a_page_for_each_ring_and_little_else() {
    let connect = |socket: &Path| {
        let options = BlkDriverOptions { queues: 8, queue_size: 64, ..BlkDriverOptions::default() };
        let mut guest = BlkDriver::connect(socket, &options).unwrap();
        for queue in &mut guest.queues {
            queue.read(0, &mut [0; 4096]).unwrap();
        }
        guest
    };
    // Each queue has served a request, and has histograms of 8 KiB in both processes and the file.
    let most = (400, [128, 32, 24]);
    each_takes_at_most(("blk", "null = '64G'\nnum_queues = 8\n"), connect, most);
}

#[test]
fn one_more_idle_network_of_one_pair_takes_a_page_for_each_ring_and_little_else() {
    let options = NetDriverOptions {
        queue_size: 64,
        features: NetDriverOptions::PLAIN,
        ..NetDriverOptions::default()
    };
    let connect = |socket: &Path| NetDriver::connect(socket, &options).unwrap();
    each_takes_at_most(("net", "null = true\n"), connect, (160, [8, 12, 16]));
}
