//! `nbd-blk`: a disk of an NBD server: what the client costs, and what it reaches.
//!
//! 4 KiB random reads from nbdkit's memory, which costs little: by one connection against
//! qemu-storage-daemon's client and fio's (libnbd), then by two and by four. The server runs where
//! the system puts it: its share of the CPUs is the same for all.

use super::file_blk::fio_by;
use super::{
    BLOCK, Bench, Client, Contender, ScenarioArgs, Work, driven, ours_and_modes,
    qemu_storage_daemon,
};
use crate::measure::now;
use crate::peer;
use crate::report::ScenarioReport;
use crate::report::blk::BlkCell;
use clap::Args;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::Duration;

/// The server: the program and its Debian package.
pub(super) const NBDKIT: (&str, &str) = ("nbdkit", "nbdkit");
/// Longest time it has to listen.
const START: Duration = Duration::from_secs(10);

/// Options of `nbd-blk`.
#[derive(Args, Clone, Debug)]
pub(crate) struct NbdBlkArgs {
    #[command(flatten)]
    pub(crate) scenario: ScenarioArgs,
    /// Which client drives the back-ends.
    #[arg(long, value_enum, default_value_t = Client::Blkio)]
    client: Client,
}

/// Runs the scenario.
pub(crate) fn run(args: &NbdBlkArgs) -> Result<ScenarioReport<BlkCell>, String> {
    let scenario = &args.scenario;
    let mut bench = Bench::new(scenario, args.client)?;
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    let server = Server::start(folder.path())?;
    let client = "sleeps";
    for (queues, depth) in [(1, 1), (1, 64), (2, 64), (4, 64)] {
        let name = format!("{queues} queues, QD{depth}, client {client}");
        let contenders = contenders(scenario, &server.socket, (queues, depth))?;
        let work = Work { queues, depth, size: BLOCK, poll: false, threads: None, pinned: true };
        bench.cell(&name, &[work], &driven(contenders, client, args.client))?;
    }
    Ok(bench.report("nbd-blk"))
}

fn contenders(
    args: &ScenarioArgs,
    socket: &Path,
    (queues, depth): (usize, usize),
) -> Result<Vec<Contender>, String> {
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    let (count, nbd) = (format!("--num-queues={queues}"), format!("--nbd={uri}"));
    let mut contenders = ours_and_modes(args, &[&count, &"--workers=1", &nbd])?;
    if !args.without_peers {
        let server = format!("server.type=unix,server.path={}", socket.display());
        let disk = format!("driver=nbd,node-name=disk,{server}");
        contenders.push(qemu_storage_daemon(&[disk], queues)?);
        let engine = vec!["--ioengine=nbd".into(), format!("--uri={uri}").into()];
        contenders.push(fio_by("fio nbd, no vhost", engine, depth * queues));
    }
    Ok(contenders)
}

/// nbdkit, with a disk in memory.
struct Server {
    child: Child,
    socket: PathBuf,
}

impl Server {
    fn start(folder: &Path) -> Result<Self, String> {
        let socket = folder.join("nbd.sock");
        let program = peer::find(NBDKIT).map_err(|error| error.to_string())?;
        let mut command = peer::apart(&program);
        command.args(["-f", "-t", "16", "-U"]).arg(&socket).args(["memory", "1G"]);
        let child = command.spawn().map_err(|error| format!("nbdkit: {error}"))?;
        let server = Self { child, socket };
        let start = now();
        while UnixStream::connect(&server.socket).is_err() {
            if start.elapsed() > START {
                return Err("nbdkit does not listen".to_owned());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
