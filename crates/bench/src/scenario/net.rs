//! The common parts of network scenarios: rounds, back-ends, and namespaces joined by taps.

use super::ScenarioArgs;
use super::rounds::{self, RunOf};
use crate::load::join::JoinResult;
use crate::measure::{Affinity, busy_seconds, now};
use crate::netns::{Netns, address};
use crate::own_load::own_load;
use crate::peer::{self, Server};
use crate::progress;
use crate::report::ScenarioReport;
use crate::report::net::{Compare, NetCell, NetSample};
use serde::de::DeserializeOwned;
use std::cell::Cell;
use std::ffi::OsString;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// One run of a party.
pub(super) type PartyRun<'a> = Box<dyn Fn() -> Result<NetSample, String> + 'a>;

/// A network scenario while it runs.
pub(super) struct NetBench<'a> {
    pub(super) args: &'a ScenarioArgs,
    folder: tempfile::TempDir,
    /// Files that were named so far.
    files: Cell<u32>,
    pub(super) client: Affinity,
    pub(super) server: Affinity,
    pub(super) everywhere: Affinity,
}

impl<'a> NetBench<'a> {
    pub(super) fn new(args: &'a ScenarioArgs) -> Result<Self, String> {
        Ok(Self {
            args,
            folder: tempfile::tempdir().map_err(|e| format!("temporary folder: {e}"))?,
            files: Cell::new(0),
            client: Affinity::one(args.client_cpu),
            server: Affinity::one(args.server_cpu),
            everywhere: Affinity::current(),
        })
    }

    /// Where a back-end takes control requests, if it is told to.
    pub(super) fn control(&self) -> PathBuf {
        self.folder.path().join("control")
    }

    /// Where back-ends listen.
    pub(super) fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    /// A file that nobody else of this scenario has.
    pub(super) fn own_file(&self, name: &str) -> PathBuf {
        self.files.set(self.files.get() + 1);
        self.folder.path().join(format!("{name}-{}", self.files.get()))
    }

    /// True for a cell that was asked for.
    pub(super) fn wants(&self, cell: &str) -> bool {
        self.args.only.as_ref().is_none_or(|text| cell.contains(text))
    }

    /// Runs one cell, unless it was not asked for.
    pub(super) fn cell(
        &self,
        head: (String, usize, &'static str),
        parties: &[(String, PartyRun<'_>)],
        compare: Compare,
    ) -> Result<Option<NetCell>, String> {
        if !self.wants(&head.0) {
            return Ok(None);
        }
        progress::cell(&head.0);
        let wanted = |(name, _): &&(String, PartyRun<'_>)| self.args.takes_part(name);
        let run = |run: &'_ PartyRun<'_>| {
            let sample = run()?;
            if sample.throughput > 0.0 { Ok(sample) } else { Err("nothing came through".into()) }
        };
        let parties = parties.iter().filter(wanted);
        let parties: Vec<_> = parties.map(|(name, one)| (&**name, move || run(one))).collect();
        let parties: Vec<_> =
            parties.iter().map(|(name, run)| (*name, run as RunOf<'_, NetSample>)).collect();
        let found = rounds::run(self.args, &head.0, &parties)?;
        Ok(Some(NetCell::new(head, found, compare)))
    }

    pub(super) fn report(
        self,
        scenario: &'static str,
        cells: impl IntoIterator<Item = Option<NetCell>>,
    ) -> ScenarioReport<NetCell> {
        self.args.report(scenario, cells.into_iter().flatten().collect())
    }

    /// The daemons that take our arguments, with the names of their parties.
    pub(super) fn daemons(&self) -> Vec<(&'static str, Daemon)> {
        let beside = self.args.beside.is_some().then_some(("beside", Daemon::Beside));
        std::iter::once(("manyring", Daemon::Ours)).chain(beside).collect()
    }

    /// Starts this build's daemon on a configuration file, and waits for one of its sockets.
    pub(super) fn daemon_of(&self, config: &Path, socket: &Path) -> Result<Server, String> {
        let program = peer::manyring(self.args.manyring.as_deref()).map_err(|e| e.to_string())?;
        let mut all: Vec<OsString> =
            ["run", "--log-level=error", "--config"].map(Into::into).into();
        all.push(config.into());
        Server::start(&program, &all, socket, &self.server).map_err(|e| e.to_string())
    }

    /// Starts a daemon with one network device, in a namespace if there is one.
    pub(super) fn daemon(
        &self,
        daemon: Daemon,
        arguments: &[String],
        space: Option<&Netns>,
        affinity: &Affinity,
    ) -> Result<Server, String> {
        self.daemon_at(&self.socket(), daemon, arguments, space, affinity)
    }

    /// Starts it as [`Self::daemon`] does, with its device at this socket. A control socket gets
    /// its name after those of all devices, so that is the one to wait for where there is one.
    fn daemon_at(
        &self,
        socket: &Path,
        daemon: Daemon,
        arguments: &[String],
        space: Option<&Netns>,
        affinity: &Affinity,
    ) -> Result<Server, String> {
        let program = match daemon {
            Daemon::Ours => self.args.manyring.as_deref(),
            Daemon::Beside => self.args.beside.as_deref(),
        };
        let program = peer::manyring(program).map_err(|e| e.to_string())?;
        let mut all: Vec<OsString> = Vec::new();
        if let Some(space) = space {
            all.extend(["netns", "exec", space.name()].map(OsString::from));
            all.push(program.clone().into());
        }
        all.extend(["net", "--log-level=error", "--socket-path"].map(OsString::from));
        all.push(socket.into());
        all.extend(arguments.iter().map(OsString::from));
        all.extend(self.args.extra.iter().cloned());
        let program = if space.is_some() { Path::new("ip") } else { &program };
        let control = arguments.iter().find_map(|argument| argument.strip_prefix("--control="));
        let last = control.map_or(socket, Path::new);
        Server::start(program, &all, last, affinity).map_err(|e| e.to_string())
    }
}

/// A daemon that takes our arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Daemon {
    /// This build's.
    Ours,
    /// The one that `--beside` names.
    Beside,
}

/// A program that runs beside; it is ended on drop.
pub(super) struct Beside(Child);

impl Beside {
    pub(super) fn start(command: &mut Command, affinity: &Affinity) -> Result<Self, String> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        peer::spawn(command, affinity).map(Self).map_err(|error| error.to_string())
    }

    /// CPU seconds that it has used so far.
    pub(super) fn cpu_seconds(&self) -> f64 {
        peer::cpu_seconds(&self.0)
    }

    /// Writes to its standard input.
    pub(super) fn tell(&mut self, words: &[u8]) -> Result<(), String> {
        use std::io::Write;
        let Some(stdin) = &mut self.0.stdin else { return Ok(()) };
        stdin.write_all(words).map_err(|error| error.to_string())
    }

    /// Waits until it listens at this address and port.
    pub(super) fn await_listening(&self, (host, port): (String, u16)) -> Result<(), String> {
        let host: Ipv4Addr = host.parse().map_err(|_| format!("{host} is no address"))?;
        let table = format!("/proc/{}/net/tcp", self.0.id());
        let start = now();
        while start.elapsed() < START {
            // The table of the namespace that it is in by now.
            let sockets = std::fs::read_to_string(&table).unwrap_or_default();
            if is_listening(&sockets, host, port) {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Err(format!("nobody listens at {host}:{port}"))
    }

    /// Ends its standard input and reads its result.
    pub(super) fn finish<R: DeserializeOwned>(mut self) -> Result<R, String> {
        use std::io::Read;
        drop(self.0.stdin.take());
        let (mut text, mut words) = (String::new(), String::new());
        if let Some(stdout) = &mut self.0.stdout {
            stdout.read_to_string(&mut text).map_err(|e| e.to_string())?;
        }
        if let Some(stderr) = &mut self.0.stderr {
            stderr.read_to_string(&mut words).map_err(|e| e.to_string())?;
        }
        let status = self.0.wait().map_err(|e| e.to_string())?;
        serde_json::from_str(&text).map_err(|_| format!("{status}: {}", words.trim()))
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Longest time that a program takes to listen.
const START: Duration = Duration::from_secs(5);

/// True if a table as `/proc/PID/net/tcp` has a socket that listens there: local address, remote
/// address and state are the second to the fourth field, addresses as the machine has them.
fn is_listening(sockets: &str, host: Ipv4Addr, port: u16) -> bool {
    let place = format!("{:08X}:{port:04X}", u32::from_ne_bytes(host.octets()));
    sockets.lines().any(|line| {
        let mut fields = line.split_whitespace().skip(1);
        fields.next() == Some(&place) && fields.nth(1) == Some("0A")
    })
}

/// How the two namespaces are joined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NamespaceJoin {
    /// tap - our driver half - a daemon - tap.
    Ring(Ring),
    /// tap - a loop that reads and writes, into this many pages in turn - tap.
    Bare(usize),
    /// A pair of interfaces of the kernel's own, with no program between them.
    Veth,
}

/// The back-end and the driver half between the two taps of a way through a ring.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Ring {
    pub(super) daemon: Daemon,
    /// Queue pairs.
    pub(super) pairs: u16,
    /// More arguments of the daemon.
    pub(super) arguments: Vec<String>,
    /// More arguments of our driver half.
    pub(super) driver: Vec<String>,
}

impl Ring {
    /// A ring whose driver half does as Linux does.
    pub(super) fn new(daemon: Daemon, pairs: u16, arguments: &[&str]) -> Self {
        let arguments = arguments.iter().map(|argument| (*argument).to_owned()).collect();
        Self { daemon, pairs, arguments, driver: Vec::new() }
    }
}

/// Share of all CPUs that other programs may take while namespaces talk.
const OTHERS_MAX: f64 = 0.1;
/// Seconds of a run by tools that know whole seconds only.
pub(super) const WHOLE_SECONDS: u32 = 1;
/// Pages of a frame, which stay in the cache; pages of a receiveq.
pub(super) const FRAME_PAGES: usize = 17;
pub(super) const RING_PAGES: usize = 256;
/// Frames that all queues of the guest's tap hold together, as those of the host's tap do by the
/// daemon's default settings. Linux gives each queue this length: TCP, which fills every queue,
/// would show the length of queues and not their cost. The guest's tap stands for a guest whose
/// sockets hold TCP back, on however many queues it sends.
const TAP_FRAMES: u16 = 1000;
/// Host numbers of the guest's side and of the host's.
pub(super) const GUEST: u8 = 1;
pub(super) const HOST: u8 = 2;

/// Two namespaces, the guest's and the host's, with TCP/IP between them.
pub(super) struct Road {
    pub(super) guest: Netns,
    pub(super) host: Netns,
    joiner: Option<Beside>,
    server: Option<Server>,
    /// CPU seconds of the back-end when the measurement began.
    cpu: f64,
    /// CPU seconds of all programs but ours, and the time, then.
    others: f64,
    start: Instant,
}

impl Road {
    /// Makes the namespaces and joins them, for this many seconds at most.
    pub(super) fn new(
        bench: &NetBench<'_>,
        way: &NamespaceJoin,
        affinities: (&Affinity, &Affinity),
        seconds: u32,
    ) -> Result<Self, String> {
        let (guest, host) = (Netns::new()?, Netns::new()?);
        if *way == NamespaceJoin::Veth {
            guest.add_veth(("guest", GUEST), &host, ("host", HOST))?;
        } else {
            let pairs = if let NamespaceJoin::Ring(ring) = way { ring.pairs } else { 1 };
            guest.add_tap("guest", pairs, Some(GUEST))?;
            guest.set_length("guest", TAP_FRAMES / pairs)?;
            host.add_tap("host", pairs, Some(HOST))?;
        }
        let seconds = format!("--seconds={}", seconds + 20);
        let (joiner, server) = match way {
            NamespaceJoin::Ring(ring) => {
                let pairs = format!("--queue-pairs={}", ring.pairs);
                let mut arguments = vec!["--tap=host".to_owned(), pairs.clone()];
                arguments.extend(ring.arguments.iter().cloned());
                let socket = bench.own_file("socket");
                let space = Some(&host);
                let server =
                    bench.daemon_at(&socket, ring.daemon, &arguments, space, affinities.1)?;
                let socket = format!("--socket={}", socket.display());
                let arguments = ["join", "--tap=guest", &pairs, &socket, &seconds];
                let mut command = own_load(Some(&guest), &arguments)?;
                command.args(&ring.driver);
                (Some(Beside::start(&mut command, affinities.0)?), Some(server))
            }
            NamespaceJoin::Bare(pages) => {
                let other = format!("--other-netns={}", host.path().display());
                let pages = format!("--buffers={pages}");
                let arguments =
                    ["relay", "--tap=guest", "--other-tap=host", &other, &pages, &seconds];
                let mut command = own_load(Some(&guest), &arguments)?;
                (Some(Beside::start(&mut command, affinities.1)?), None)
            }
            NamespaceJoin::Veth => (None, None),
        };
        Ok(Self { guest, host, joiner, server, cpu: 0.0, others: 0.0, start: now() })
    }

    /// The address of the host's side, and a port.
    pub(super) fn host_port(port: u16) -> String {
        format!("{}:{port}", address(HOST))
    }

    /// Puts the first worker of the back-end on the `first` of these CPUs, round and round, its
    /// other workers on those behind it, and the driver half on the next one.
    pub(super) fn put_apart(&self, cpus: &Affinity, first: usize) {
        self.place(|worker| cpus.nth(first + worker), &cpus.nth(first + 1));
    }

    /// Leaves it to the system on which of these CPUs they run.
    pub(super) fn let_go(&self, cpus: &Affinity) {
        self.place(|_| cpus.clone(), cpus);
    }

    fn place(&self, server_on: impl Fn(usize) -> Affinity, joiner_on: &Affinity) {
        if let Some(server) = &self.server {
            peer::place(server.id(), server_on);
        }
        if let Some(joiner) = &self.joiner {
            peer::place(joiner.0.id(), |_| joiner_on.clone());
        }
    }

    /// Begins the measurement; the programs of `beside` run during it.
    pub(super) fn begin(&mut self, beside: &[Beside]) {
        self.cpu = self.server.as_ref().map_or(0.0, Server::cpu_seconds);
        self.others = self.others(beside);
        self.start = now();
    }

    /// CPU seconds of everybody but the road, what runs beside, and what has run and ended.
    fn others(&self, beside: &[Beside]) -> f64 {
        let beside: f64 = beside.iter().map(Beside::cpu_seconds).sum();
        busy_seconds() - self.cpu_seconds() - beside - peer::ended_cpu_seconds()
    }

    /// CPU seconds of back-end and joiner.
    pub(super) fn cpu_seconds(&self) -> f64 {
        self.server.as_ref().map_or(0.0, Server::cpu_seconds)
            + self.joiner.as_ref().map_or(0.0, Beside::cpu_seconds)
    }

    /// CPU seconds of back-end and joiner, exact to the nanosecond while both rest.
    pub(super) fn ran_seconds(&self) -> (f64, f64) {
        let server = self.server.as_ref().map(Server::id);
        let joiner = self.joiner.as_ref().map(|joiner| joiner.0.id());
        (server.map_or(0.0, peer::ran_seconds), joiner.map_or(0.0, peer::ran_seconds))
    }

    /// Ends a measurement that took `seconds`, and returns the costs of the way.
    pub(super) fn finish(self, seconds: f64, beside: &[Beside]) -> Result<NetSample, String> {
        let after = self.server.as_ref().map_or(0.0, Server::cpu_seconds);
        let others = self.others(beside) - self.others;
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let all = self.start.elapsed() * u32::try_from(cpus).unwrap_or(1);
        let result: JoinResult =
            self.joiner.map_or_else(|| Ok(JoinResult::default()), Beside::finish)?;
        let joiner_cpu = result.cpu_seconds / seconds * 100.0;
        let (cpu, backend_cpu) = match self.server {
            Some(_) => {
                let backend_cpu = (after - self.cpu) / seconds * 100.0;
                (backend_cpu + joiner_cpu, backend_cpu)
            }
            None => (joiner_cpu, joiner_cpu * result.other_share),
        };
        let (kicks_per_packet, calls_per_packet) = result.notifications();
        Ok(NetSample {
            cpu,
            backend_cpu,
            packets_sent: result.sent(),
            avg_pkt_size: result.average_size(),
            kicks_per_packet,
            calls_per_packet,
            disturbed: others > all.as_secs_f64() * OTHERS_MAX,
            ..NetSample::default()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_listens_once_its_address_and_port_have_a_socket_in_that_state() {
        let here = format!("{:08X}", u32::from_ne_bytes([10, 77, 0, 2]));
        let table = format!(
            "  sl  local_address rem_address   st tx_queue rx_queue\n\
             \x20  0: {here}:1451 00000000:0000 0A 00000000:00000000\n\
             \x20  1: {here}:1452 0100007F:0016 01 00000000:00000000\n"
        );
        let listens = |host: [u8; 4], port| is_listening(&table, host.into(), port);
        assert!(listens([10, 77, 0, 2], 5201));
        assert!(!listens([10, 77, 0, 2], 5202), "a connection");
        assert!(!listens([10, 77, 0, 1], 5201), "of another host");
        assert!(!listens([10, 77, 0, 2], 22));
        assert!(!is_listening("", [10, 77, 0, 2].into(), 5201));
    }
}
