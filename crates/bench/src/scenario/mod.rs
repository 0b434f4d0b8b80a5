//! Scenarios: one file for each table. A cell runs every party in turn, round by round (A B C A B
//! C), so that what the machine does beside it meets all of them alike.

pub(crate) mod blk_queues;
mod counts;
mod crowd;
pub(crate) mod file_blk;
pub(crate) mod guest_blk;
pub(crate) mod hundred;
pub(crate) mod idle;
pub(crate) mod multiqueue;
pub(crate) mod nbd_blk;
pub(crate) mod neighbours;
pub(crate) mod net;
pub(crate) mod null_blk;
pub(crate) mod null_net;
pub(crate) mod registry;
mod rounds;
mod streams;
pub(crate) mod tap_small;
pub(crate) mod tap_stream;
pub(crate) mod tcp_crr;
pub(crate) mod tcp_ladder;
pub(crate) mod tcp_rr;
pub(crate) mod vm_to_vm;
pub(crate) mod xen_blk_queues;
pub(crate) mod zero_copy;

use crate::calibrate::Costs;
use crate::load::xenblk::XenBlkLoadArgs;
use crate::load::{LoadArgs, LoadOptions, LoadResult, Rw};
use crate::measure::{Affinity, Calibration, machine};
use crate::peer::spdk::{Spdk, SpdkDisk};
use crate::peer::{self, Peer, Server};
use crate::plan::ROUNDS;
use crate::progress;
use crate::report::ScenarioReport;
use crate::report::blk::{BlkCell, BlkSample};
use clap::{Args, ValueEnum};
use manyring_driver::SimXen;
use rounds::RunOf;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Client {
    /// libblkio, a client that is not ours.
    Blkio,
    /// Our own driver half; leaves out the cells in which one thread sleeps on several queues.
    Driver,
    /// Our own driver half, which sleeps after each look at the ring until the device calls it, as
    /// a guest's kernel waits for its interrupt.
    EachCall,
}

/// Options of every scenario.
#[derive(Args, Clone, Debug)]
pub(crate) struct ScenarioArgs {
    /// The daemon [default: the `manyring` beside this program].
    #[arg(long, value_name = "PATH")]
    manyring: Option<PathBuf>,
    /// Another daemon that takes the same arguments, measured beside ours: an older build, or a
    /// program that starts another back-end (network scenarios).
    #[arg(long, value_name = "PATH")]
    beside: Option<PathBuf>,
    /// Compare with these peers only [default: all that a scenario has].
    #[arg(long, value_name = "PEER", num_args = 1.., value_delimiter = ',')]
    against: Vec<Peer>,
    /// SPDK's program `vhost`: compare with it as well (null-blk, file-blk).
    #[arg(long, value_name = "PATH")]
    spdk: Option<PathBuf>,
    /// Measure ours alone.
    #[arg(long, conflicts_with = "against")]
    without_peers: bool,
    /// Rounds of each cell [default: 5; `run`: up to 5, within half an hour].
    #[arg(long, value_name = "N")]
    rounds: Option<usize>,
    /// Seconds of one run, at most 1.
    #[arg(long, default_value_t = SECONDS)]
    seconds: f64,
    /// Run everything once, for a fraction of a second: shows that it works, not how fast.
    #[arg(long)]
    pub(crate) smoke: bool,
    /// Only the cells whose name contains this.
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// CPU of the client.
    #[arg(long, default_value_t = 0)]
    client_cpu: usize,
    /// CPU of the server.
    #[arg(long, default_value_t = 1)]
    server_cpu: usize,
    /// More arguments for our daemon, to try them out.
    #[arg(long, value_name = "ARGUMENT", allow_hyphen_values = true)]
    extra: Vec<OsString>,
    /// Measure ours three times in each round: with `--polling` auto, always and never.
    #[arg(long)]
    polling_modes: bool,
    /// Disks: measure ours beside itself with two values of `--moderation`.
    #[arg(long)]
    moderation_modes: bool,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

impl ScenarioArgs {
    fn rounds(&self) -> usize {
        if self.smoke { 1 } else { self.rounds.unwrap_or(ROUNDS).max(1) }
    }

    /// The results of a scenario, with the machine and what its basic steps cost now.
    fn report<C>(&self, scenario: &'static str, cells: Vec<C>) -> ScenarioReport<C> {
        let calibration = Calibration::measure(self.client_cpu, self.server_cpu);
        let (rounds, seconds) = (self.rounds(), self.seconds());
        ScenarioReport { scenario, machine: machine(), calibration, rounds, seconds, cells }
    }

    /// The basic costs of this machine on the two CPUs.
    pub(crate) fn costs(&self) -> Costs {
        Costs::measure(self.client_cpu, self.server_cpu)
    }

    /// The rounds that the user asked for, if any.
    pub(crate) fn wanted_rounds(&self) -> Option<usize> {
        self.smoke.then_some(1).or(self.rounds)
    }

    /// True for one of our own programs, and for a peer that was asked for and is installed. A
    /// missing one is left out, which is printed at the end. SPDK is asked for by its name or by
    /// the path of its program.
    fn takes_part(&self, party: &str) -> bool {
        let Some(peer) = Peer::of_party(party) else { return true };
        let by_default = || self.against.is_empty() && (peer != Peer::Spdk || self.spdk.is_some());
        let is_wanted = !self.without_peers && (by_default() || self.against.contains(&peer));
        let missing = is_wanted.then(|| peer.find(self.spdk.as_deref()).err()).flatten();
        if let Some(missing) = &missing {
            progress::leave_out(missing.to_string());
        }
        is_wanted && missing.is_none()
    }

    /// The options that give these again, with this many rounds, for a scenario's own command.
    pub(crate) fn words(&self, rounds: usize) -> Vec<OsString> {
        let mut words: Vec<OsString> = vec![format!("--rounds={rounds}").into()];
        let mut option = |name: &str, value: &std::ffi::OsStr| {
            let mut word = OsString::from(format!("--{name}="));
            word.push(value);
            words.push(word);
        };
        for (name, path) in
            [("manyring", &self.manyring), ("beside", &self.beside), ("spdk", &self.spdk)]
        {
            path.iter().for_each(|path| option(name, path.as_os_str()));
        }
        self.only.iter().for_each(|text| option("only", text.as_ref()));
        self.extra.iter().for_each(|argument| option("extra", argument));
        self.against.iter().for_each(|peer| option("against", peer.word().as_ref()));
        for (name, value, default) in [
            ("seconds", self.seconds.to_string(), SECONDS.to_string()),
            ("client-cpu", self.client_cpu.to_string(), "0".to_owned()),
            ("server-cpu", self.server_cpu.to_string(), "1".to_owned()),
        ] {
            if value != default {
                option(name, value.as_ref());
            }
        }
        for (name, is_set) in [
            ("without-peers", self.without_peers),
            ("polling-modes", self.polling_modes),
            ("moderation-modes", self.moderation_modes),
            ("smoke", self.smoke),
        ] {
            words.extend(is_set.then(|| format!("--{name}").into()));
        }
        words
    }

    pub(crate) fn seconds(&self) -> f64 {
        if self.smoke { 0.05 } else { self.seconds.clamp(0.01, 1.0) }
    }
}

/// Seconds of one run, unless the user asks for others.
pub(crate) const SECONDS: f64 = 0.5;
/// Runs that are tried until one is not disturbed.
const TRIES: usize = 5;
/// Share of a run that client and server together may wait for their CPUs.
const WAITED_MAX: f64 = 0.1;

/// Something that serves or does the requests of a cell.
struct Contender {
    name: String,
    how: How,
    /// Another client than that of the scenario.
    client: Option<Client>,
}

impl Contender {
    fn new(name: &str, how: How) -> Self {
        Self { name: name.to_owned(), how, client: None }
    }

    /// This contender, driven by `client` instead of the scenario's client.
    fn driven_by(self, client: Client) -> Self {
        Self { client: Some(client), ..self }
    }
}

/// Arguments of a back-end, given its socket.
type Arguments = Box<dyn Fn(&Path) -> Vec<OsString>>;

/// Does the requests for this many seconds on these CPUs.
type Direct = Box<dyn Fn(f64, &Affinity) -> Result<BlkSample, String>>;

enum How {
    /// A vhost-user back-end.
    Server { program: PathBuf, arguments: Arguments },
    /// Our daemon, serving the disks of a simulated Xen, whose guest grants its buffers for good or
    /// for each request.
    Xen { program: PathBuf, arguments: Vec<OsString>, persistent: bool },
    /// SPDK, which is started once and rests while others run.
    Spdk(Spdk),
    /// A program that does the requests itself and reports: fio.
    Direct(Direct),
}

/// Bytes of a request, where a scenario says nothing else.
const BLOCK: usize = 4096;

/// The load of a cell.
#[derive(Clone, Copy, Debug)]
struct Work {
    queues: usize,
    depth: usize,
    /// Bytes of a request.
    size: usize,
    poll: bool,
    /// Threads of the client; none: one for each queue.
    threads: Option<usize>,
    /// Client and server each on its CPU; else both wherever they like.
    pinned: bool,
}

/// A scenario while it runs.
struct Bench<'a> {
    args: &'a ScenarioArgs,
    client: Client,
    folder: tempfile::TempDir,
    everywhere: Affinity,
    cells: Vec<BlkCell>,
}

impl<'a> Bench<'a> {
    fn new(args: &'a ScenarioArgs, client: Client) -> Result<Self, String> {
        let folder = tempfile::tempdir().map_err(|e| format!("temporary folder: {e}"))?;
        Ok(Self { args, client, folder, everywhere: Affinity::current(), cells: Vec::new() })
    }

    /// Runs one cell, unless it was not asked for.
    fn cell(&mut self, name: &str, works: &[Work], contenders: &[Contender]) -> Result<(), String> {
        let cannot = self.client != Client::Blkio
            && works.iter().any(|work| work.threads.is_some() && !work.poll);
        if cannot || self.args.only.as_ref().is_some_and(|text| !name.contains(text)) {
            return Ok(());
        }
        progress::cell(name);
        let work = |index| works.get(index).or(works.first()).ok_or("a cell without work");
        let mut taking_part = Vec::new();
        for (index, contender) in contenders.iter().enumerate() {
            if self.args.takes_part(&contender.name) {
                let work = work(index)?;
                taking_part.push((&*contender.name, || self.run_once(contender, work)));
            }
        }
        let parties: Vec<_> =
            taking_part.iter().map(|(name, run)| (*name, run as RunOf<'_, BlkSample>)).collect();
        let parties = rounds::run(self.args, name, &parties)?;
        self.cells.push(BlkCell::new(name.to_owned(), parties));
        Ok(())
    }

    fn run_once(&self, contender: &Contender, work: &Work) -> Result<BlkSample, String> {
        let (client, server) = if work.pinned {
            (Affinity::one(self.args.client_cpu), Affinity::one(self.args.server_cpu))
        } else {
            (self.everywhere.clone(), self.everywhere.clone())
        };
        match &contender.how {
            How::Direct(run) => run(self.args.seconds(), &client),
            How::Server { program, arguments } => {
                let socket = self.folder.path().join("socket");
                let arguments = arguments(&socket);
                let server = Server::start(program, &arguments, &socket, &server)
                    .map_err(|e| e.to_string())?;
                self.drive(&server, &socket, work, &client, self.client_words(contender))
            }
            How::Spdk(spdk) => spdk.awake(self.args.server_cpu, |server, socket| {
                self.drive(server, socket, work, &client, self.client_words(contender))
            }),
            How::Xen { program, arguments, persistent } => {
                // On a thread of this process, which sleeps while the guest and its disk are busy.
                let xen = SimXen::start(&self.folder.path().join("xenstored"));
                let xen = xen.map_err(|e| format!("simulated Xen: {e}"))?;
                let control = self.folder.path().join("control");
                let mut all: Vec<OsString> = vec!["xen-blk".into(), "--log-level=error".into()];
                all.extend(["--simulated".into(), xen.socket().into()]);
                all.extend(["--control".into(), control.clone().into()]);
                // In memory, as the folder is that is the default.
                let state = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
                let state = state.map_err(|e| format!("folder for journals: {e}"))?;
                all.extend(["--state-dir".into(), state.path().into()]);
                all.extend(arguments.iter().cloned());
                let server =
                    Server::start(program, &all, &control, &server).map_err(|e| e.to_string())?;
                let words =
                    |options: &LoadOptions| ("xenblk", XenBlkLoadArgs::of(options, *persistent));
                self.drive(&server, xen.socket(), work, &client, words)
            }
        }
    }

    /// The load generator that drives a vhost-user back-end, and its arguments.
    fn client_words(
        &self,
        contender: &Contender,
    ) -> impl Fn(&LoadOptions) -> (&'static str, Vec<OsString>) + use<> {
        let client = contender.client.unwrap_or(self.client);
        move |options| {
            let each_call = client == Client::EachCall && !options.poll;
            let options = LoadOptions { each_call, ..options.clone() };
            let program = if client == Client::Blkio { "blkio" } else { "driver" };
            (program, LoadArgs::of(&options))
        }
    }

    fn drive(
        &self,
        server: &Server,
        socket: &Path,
        work: &Work,
        affinity: &Affinity,
        words: impl Fn(&LoadOptions) -> (&'static str, Vec<OsString>),
    ) -> Result<BlkSample, String> {
        let options = LoadOptions {
            socket: socket.to_path_buf(),
            queues: work.queues,
            depth: work.depth,
            duration: Duration::from_secs_f64(self.args.seconds()),
            poll: work.poll,
            each_call: false,
            threads: work.threads,
            size: work.size,
            rw: Rw::Read,
            cpu: None,
            seed: 1,
        };
        let program = std::env::current_exe().map_err(|e| e.to_string())?;
        let (client, arguments) = words(&options);
        let mut command = peer::apart(&program);
        command.args(["load", client]).args(arguments);
        let (cpu, waited) = (server.cpu_seconds(), server.waited_seconds());
        let text = peer::output(&mut command, affinity)?;
        let result: LoadResult = serde_json::from_str(&text).map_err(|e| e.to_string())?;
        let waited = server.waited_seconds() - waited + result.waited_seconds;
        Ok(BlkSample {
            iops: result.iops,
            p50_us: result.p50_us,
            p99_us: result.p99_us,
            cpu_per_million: per_million(server.cpu_seconds() - cpu, result.requests),
            client_cpu_per_million: per_million(result.client_cpu_seconds, result.requests),
            latency_us: result.latency_us,
            line_ns: None,
            disturbed: work.pinned && waited > result.seconds * WAITED_MAX,
        })
    }

    fn report(self, scenario: &'static str) -> ScenarioReport<BlkCell> {
        self.args.report(scenario, self.cells)
    }
}

#[allow(clippy::cast_precision_loss, reason = "a rate needs no more than 52 bits")]
fn per_million(cpu_seconds: f64, requests: u64) -> f64 {
    if requests == 0 { 0.0 } else { cpu_seconds * 1e6 / requests as f64 }
}

/// Our daemon with these arguments beside the socket's.
fn ours(
    args: &ScenarioArgs,
    name: &str,
    arguments: &[&dyn AsRef<std::ffi::OsStr>],
) -> Result<Contender, String> {
    let program = peer::manyring(args.manyring.as_deref()).map_err(|e| e.to_string())?;
    let mut rest: Vec<OsString> = arguments.iter().map(|a| a.as_ref().to_owned()).collect();
    rest.extend(args.extra.iter().cloned());
    let arguments = Box::new(move |socket: &Path| {
        let mut all: Vec<OsString> =
            vec!["blk".into(), "--log-level=error".into(), "--socket-path".into(), socket.into()];
        all.extend(rest.iter().cloned());
        all
    });
    Ok(Contender::new(name, How::Server { program, arguments }))
}

/// Ours with these arguments; beside it, if that was asked for, the same with each fixed arm of
/// polling, and with interrupts held back in several ways.
fn ours_and_modes(
    args: &ScenarioArgs,
    arguments: &[&dyn AsRef<std::ffi::OsStr>],
) -> Result<Vec<Contender>, String> {
    let mut contenders = vec![ours(args, "manyring", arguments)?];
    for (is_asked, option, modes) in [
        (args.polling_modes, "polling", &["always", "never"][..]),
        (args.moderation_modes, "moderation", &["8/50us", "32/100us"]),
    ] {
        for mode in modes.iter().filter(|_| is_asked) {
            let setting = format!("--{option}={mode}");
            let arguments: Vec<&dyn AsRef<std::ffi::OsStr>> =
                arguments.iter().copied().chain([&setting as _]).collect();
            contenders.push(ours(args, &format!("manyring, {option} {mode}"), &arguments)?);
        }
    }
    Ok(contenders)
}

/// The three clients of a cell: what reports call them, and whether they poll. The first looks at
/// the ring all the time. The second sleeps in its library, which looks at the ring once more
/// before it sleeps. The third sleeps until the device calls it.
const CLIENTS: [(&str, bool); 3] = [("polls", true), ("sleeps", false), (EACH_CALL, false)];
const EACH_CALL: &str = "waits for each call";

/// Gives each contender that a client drives the client that is named here; `usual` drives those
/// whose cell asks for no other one. libblkio cannot drive SPDK, which lacks a protocol feature
/// (CONFIGURE_MEM_SLOTS) that it needs: beside SPDK our own driver half drives every party instead.
fn driven(contenders: Vec<Contender>, client: &str, usual: Client) -> Vec<Contender> {
    let has_spdk = contenders.iter().any(|contender| matches!(contender.how, How::Spdk(_)));
    let other = match (client, usual) {
        (EACH_CALL, _) => Some(Client::EachCall),
        (_, Client::Blkio) if has_spdk => Some(Client::Driver),
        _ => None,
    };
    let by = |contender: Contender| match (&contender.how, other) {
        (How::Server { .. } | How::Spdk(_), Some(other)) => contender.driven_by(other),
        _ => contender,
    };
    contenders.into_iter().map(by).collect()
}

/// QEMU's daemon exporting the node `disk` that `nodes` define.
fn qemu_storage_daemon(nodes: &[String], num_queues: usize) -> Result<Contender, String> {
    let program = Peer::QemuStorageDaemon.path();
    let nodes = nodes.to_vec();
    let arguments = Box::new(move |socket: &Path| {
        let mut all: Vec<OsString> = Vec::new();
        for node in &nodes {
            all.extend(["--blockdev".into(), node.into()]);
        }
        let mut export: OsString = format!(
            "type=vhost-user-blk,id=e0,node-name=disk,writable=on,num-queues={num_queues},\
             addr.type=unix,addr.path="
        )
        .into();
        export.push(socket);
        all.extend(["--export".into(), export]);
        all
    });
    Ok(Contender::new("qemu-storage-daemon", How::Server { program, arguments }))
}

/// SPDK serving this disk on one reactor, if it takes part.
fn spdk(args: &ScenarioArgs, name: &str, disk: SpdkDisk) -> Option<Contender> {
    let program = args.takes_part(name).then_some(args.spdk.as_ref()).flatten()?;
    Some(Contender::new(name, How::Spdk(Spdk::new(program.clone(), disk))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Alone {
        #[command(flatten)]
        scenario: ScenarioArgs,
    }

    #[test]
    fn a_cell_whose_client_waits_for_each_call_has_it_drive_servers_and_nothing_else() {
        let server = || How::Server { program: PathBuf::new(), arguments: Box::new(|_| vec![]) };
        let direct = || How::Direct(Box::new(|_, _| Ok(BlkSample::default())));
        let clients = |word, usual, more: Option<How>| {
            let mut all = vec![Contender::new("a", server()), Contender::new("b", direct())];
            all.extend(more.map(|how| Contender::new("c", how)));
            driven(all, word, usual).iter().map(|c| c.client).collect::<Vec<_>>()
        };
        let (blkio, driver, each_call) = (Client::Blkio, Client::Driver, Client::EachCall);
        assert_eq!(clients(EACH_CALL, blkio, None), [Some(each_call), None]);
        assert_eq!(clients("sleeps", blkio, None), [None, None]);
        let spdk = || Some(How::Spdk(Spdk::new("vhost".into(), SpdkDisk::Null)));
        assert_eq!(clients("sleeps", blkio, spdk()), [Some(driver), None, Some(driver)]);
        assert_eq!(clients("sleeps", each_call, spdk()), [None, None, None]);
        assert_eq!(clients(EACH_CALL, blkio, spdk()), [Some(each_call), None, Some(each_call)]);
    }

    #[test]
    fn spdk_takes_part_where_its_program_is_named_and_is_missed_only_where_it_was_asked_for() {
        let here = std::env::current_exe().unwrap();
        let path = format!("--spdk={}", here.display());
        let missed =
            || progress::left_out().into_iter().filter(|s| s.contains("--spdk PATH")).count();
        for (words, takes_part, is_missed) in [
            (&[][..], false, 0),
            (&[&*path], true, 0),
            (&[&*path, "--without-peers"], false, 0),
            (&[&*path, "--against=qemu-storage-daemon"], false, 0),
            (&[&*path, "--against=spdk"], true, 0),
            (&["--against=spdk"], false, 1),
            (&["--spdk=/no/such/vhost"], false, 2),
        ] {
            let args = args(words);
            assert_eq!(
                spdk(&args, "spdk uring", SpdkDisk::Null).is_some(),
                takes_part,
                "{words:?}"
            );
            assert_eq!(missed(), is_missed, "{words:?}");
        }
        let again = args(&[&*path]).words(1);
        assert!(again.contains(&path.into()), "{again:?}");
    }

    fn args(words: &[&str]) -> ScenarioArgs {
        let words = std::iter::once(&"x").chain(words);
        Alone::try_parse_from(words).unwrap().scenario
    }

    #[test]
    fn a_peer_takes_part_if_it_was_asked_for_and_a_party_of_ours_always() {
        for words in [&["--without-peers"][..], &["--against=qemu-storage-daemon"]] {
            let args = args(words);
            assert!(args.takes_part("manyring, 4 queues") && args.takes_part("bare write loop"));
            assert!(!args.takes_part("fio io_uring, no vhost"), "{words:?}");
        }
        let is_installed = Peer::Fio.find(None).is_ok();
        assert_eq!(args(&[]).takes_part("fio io_uring, no vhost"), is_installed);
        let package = |sentence: &String| sentence.contains("apt-get install fio");
        assert_eq!(progress::left_out().iter().any(package), !is_installed);
    }
}
