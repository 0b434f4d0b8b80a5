//! A guest with a network or two, each served by a daemon of its own, and servers at the host's
//! end of each tap: asked for one load after the other.

use crate::command::on_cpu;
use crate::daemon::{Counters, Daemon, DaemonOptions};
use crate::guest::{Guest, GuestOptions, Kernel, Net};
use crate::net::{Namespace, Service, WORDS};
use crate::{Context, Outcome, check};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The parts of a rig: programs, folders, and the parties that are compared.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setup<'a> {
    /// The daemon.
    pub(crate) daemon: &'a Path,
    /// `manyring-bench`.
    pub(crate) bench: &'a Path,
    /// Where sockets lie.
    pub(crate) folder: &'a Path,
    /// Where logs lie.
    pub(crate) logs: &'a Path,
    /// One or two ways to start the daemon: the guest has a network by each of them.
    pub(crate) parties: &'a [Party<'a>],
    /// The CPU of the guest; any unless said.
    pub(crate) guest_cpu: Option<usize>,
    /// The CPU of the servers at the host's end of the taps; any unless said.
    pub(crate) server_cpu: Option<usize>,
    /// The CPU of each daemon's worker; any unless said.
    pub(crate) daemon_cpu: Option<usize>,
}

/// A way to start the daemon, which is to be compared with others.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Party<'a> {
    /// Tells its logs and its row of the table from those of others.
    pub(crate) name: &'a str,
    /// Arguments of the daemon.
    pub(crate) arguments: &'a [&'a str],
}

/// TCP streams from the guest to the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stream {
    /// Bytes of each write.
    pub(crate) size: usize,
    /// Whether the guest turns Nagle's algorithm off.
    pub(crate) nodelay: bool,
    /// Connections, each with a thread of its own on either side.
    pub(crate) connections: usize,
}

/// Behind the networks: runs loads, and says what each came to.
const SCRIPT: &str = r#"
await ready
# Each line is what follows `manyring-bench load`; an empty line is the end.
while read -r words && [ -n "$words" ]; do
    manyring-bench load $words > /tmp/load 2>&1 || fail "$(cat /tmp/load)"
    echo "LOAD $(cat /tmp/load)"
    mark loaded
done
"#;
/// The second network of a guest.
const SECOND: &str = "
must ip link set eth1 up
must ip addr add 198.51.100.2/24 dev eth1
";
/// The host's address in the network of each party.
const HOSTS: [&str; 2] = ["192.0.2.1", "198.51.100.1"];
/// Where the server of requests listens: in all networks.
const PORT: u16 = 7777;
/// A step takes no longer than this beside what was asked for.
const LIMIT: Duration = Duration::from_secs(60);
/// The guest's last acknowledgements come some time after its load.
const SETTLE: Duration = Duration::from_secs(1);

/// The result of a load of requests and responses.
#[derive(Clone, Debug)]
pub(crate) struct Load {
    /// Transactions, each with the right answer.
    pub(crate) transactions: u64,
    /// Transactions in a second.
    pub(crate) rate: f64,
    /// Microseconds: half of the transactions were at least as fast.
    pub(crate) p50_us: f64,
    /// Microseconds: 99 of 100 were at least as fast.
    pub(crate) p99_us: f64,
    /// The counters of the daemon during the load.
    pub(crate) moved: Moved,
}

/// The result of a load of streams.
#[derive(Clone, Debug)]
pub(crate) struct StreamLoad {
    /// Bytes that the host's programs have read.
    pub(crate) bytes: u64,
    /// These bytes in a second.
    pub(crate) rate: f64,
    /// The counters of the daemon during the load.
    pub(crate) moved: Moved,
}

/// How far a daemon's counters went during a load.
#[derive(Clone, Debug, Default)]
pub(crate) struct Moved {
    /// Kicks of the guest, of both queues.
    pub(crate) kicks: u64,
    /// Calls to the guest, of both queues.
    pub(crate) calls: u64,
    /// Frames that the guest has sent, and their bytes.
    pub(crate) frames_sent: u64,
    pub(crate) bytes_sent: u64,
    /// Sent frames whose buffers the daemon kept for a moment.
    pub(crate) buffers_kept: u64,
    /// CPU time of the worker, as the kernel counts it.
    pub(crate) ran: Duration,
    /// Times that the worker slept.
    pub(crate) sleeps: u64,
    /// The worker's values of polling: gauges as they are after the load, and how far counters went
    /// during it.
    pub(crate) polling: Polling,
}

/// Numbers of a worker's law of polling; `docs/guide/blk.md`, "Workers", says what each means.
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs, reason = "the names of the control API")]
pub(crate) struct Polling {
    pub(crate) wake_ns: u64,
    pub(crate) spins: u64,
    pub(crate) gain_permille: u64,
    pub(crate) gap_ns: u64,
    pub(crate) trials: u64,
    pub(crate) flips: u64,
    pub(crate) stolen_looks: u64,
    pub(crate) spins_hit: u64,
    pub(crate) spins_missed: u64,
}

/// The counters that a load moves, at one moment.
struct Moment {
    kicks: u64,
    calls: u64,
    frames_sent: u64,
    bytes_sent: u64,
    buffers_kept: u64,
    ran_ns: u64,
    sleeps: u64,
    polling: Polling,
}

/// The parts; dropped, all of them are gone.
pub(crate) struct Rig {
    // In this order they end: the namespace last.
    guest: Guest,
    daemons: Vec<Daemon>,
    server: Service,
    host: Host,
}

/// Where the servers run.
struct Host {
    namespace: Namespace,
    bench: PathBuf,
    cpu: Option<usize>,
    logs: PathBuf,
}

impl Rig {
    /// Starts the daemons and the server of requests, and boots the guest.
    ///
    /// # Errors
    /// One of them does not come up.
    pub(crate) fn start(kernel: &Kernel, setup: &Setup<'_>) -> Outcome<Self> {
        check((1..=HOSTS.len()).contains(&setup.parties.len()), || "one or two parties".into())?;
        let host = Host {
            namespace: Namespace::new()?,
            bench: setup.bench.to_owned(),
            cpu: setup.server_cpu,
            logs: setup.logs.to_owned(),
        };
        let networks = setup.parties.iter().enumerate();
        let daemons = networks.map(|(index, party)| serve(index, party, setup, &host.namespace));
        let daemons = daemons.collect::<Outcome<Vec<Daemon>>>()?;
        let name = setup.parties.iter().map(|party| party.name).collect::<Vec<_>>().join("-");
        let listen = format!("0.0.0.0:{PORT}");
        // It ends with the rig; without that, after an hour.
        let words = ["rr-server", "--listen", &listen, "--seconds", "3600"];
        let server = host.load(&words, &format!("server-{name}"))?;
        let bench = setup.bench.to_str().ok_or("the path of manyring-bench is no text")?;
        let sockets: Vec<PathBuf> = daemons.iter().map(Daemon::socket).collect();
        let mut nets = sockets.iter().map(|socket| Net { socket, pairs: 1 });
        let second = if sockets.len() > 1 { SECOND } else { "" };
        let options = GuestOptions {
            net: nets.next(),
            second_net: nets.next(),
            host_cpu: setup.guest_cpu,
            programs: &[bench],
            script: &format!("{WORDS}network\n{second}{SCRIPT}"),
            ..Default::default()
        };
        let console = setup.logs.join(format!("guest-{name}.log"));
        let mut guest = Guest::boot(kernel, &options, &console)?;
        guest.reach("ready", LIMIT)?;
        guest.proceed()?;
        Ok(Self { guest, daemons, server, host })
    }

    /// Makes the guest ask on `connections` connections for `time`, in the network of a party.
    ///
    /// # Errors
    /// An answer was wrong or did not come.
    pub(crate) fn rr(&mut self, party: usize, connections: usize, time: Duration) -> Outcome<Load> {
        let words = format!("rr --server {}:{PORT} --connections {connections}", HOSTS[party]);
        let (said, moved) = self.load(party, &words, time)?;
        Ok(Load {
            transactions: said.count("transactions")?,
            rate: said.number("rate")?,
            p50_us: said.number("p50_us")?,
            p99_us: said.number("p99_us")?,
            moved,
        })
    }

    /// Makes the guest send streams for `time`, in the network of a party, on new connections.
    ///
    /// # Errors
    /// A stream broke.
    pub(crate) fn stream(
        &mut self,
        party: usize,
        stream: Stream,
        time: Duration,
    ) -> Outcome<StreamLoad> {
        let streams = format!("--streams={}", stream.connections);
        let words = ["stream", "--listen", HOSTS[party], &streams];
        let receiver = self.host.load(&words, "receiver")?;
        let nodelay = if stream.nodelay { "--nodelay" } else { "" };
        let words =
            format!("stream --connect {} {streams} --send {} {nodelay}", HOSTS[party], stream.size);
        let (said, moved) = self.load(party, &words, time)?;
        receiver.finish()?;
        Ok(StreamLoad { bytes: said.count("bytes")?, rate: said.number("rate")?, moved })
    }

    /// Has the guest run `manyring-bench load` with these words: what it says, and what the
    /// party's daemon counted.
    fn load(&mut self, party: usize, words: &str, time: Duration) -> Outcome<(Said, Moved)> {
        let before = self.moment(party)?;
        self.guest.forget()?;
        self.guest.answer(&format!("{words} --seconds {}", time.as_secs_f64()))?;
        // Nothing can be seen during the load, and looking would disturb the guest.
        std::thread::sleep(time);
        self.guest.reach("loaded", LIMIT)?;
        let moved = self.moment(party)?.since(&before);
        Ok((Said::last(&self.guest.said()?)?, moved))
    }

    /// The ticks of CPU time that the daemons take in `time` while the guest is up and idles.
    ///
    /// # Errors
    /// A daemon has ended.
    pub(crate) fn idle_ticks(&self, time: Duration) -> Outcome<u64> {
        let ticks = || self.daemons.iter().map(Daemon::ticks).sum::<Outcome<u64>>();
        std::thread::sleep(SETTLE);
        let before = ticks()?;
        std::thread::sleep(time);
        Ok(ticks()? - before)
    }

    /// The counters of a party's queues: rx, then tx.
    ///
    /// # Errors
    /// The daemon does not answer.
    pub(crate) fn queues(&self, party: usize) -> Outcome<Vec<Counters>> {
        self.daemons[party].queues()
    }

    /// The guest powers off, the daemons end when they are asked to, and the taps go with them.
    ///
    /// # Errors
    /// It is not so.
    pub(crate) fn stop(mut self) -> Outcome {
        self.guest.answer("")?;
        self.guest.finish(LIMIT)?;
        self.daemons.into_iter().try_for_each(Daemon::stop)?;
        drop(self.server);
        self.host.namespace.holds_only(&[])
    }

    fn moment(&self, party: usize) -> Outcome<Moment> {
        let queues = self.queues(party)?;
        let sum = |name: &str| queues.iter().map(|queue| queue.value(name)).sum::<Outcome<u64>>();
        let transmitq = queues.get(1).ok_or("the daemon has no transmitq")?;
        let (worker, polling) = self.daemons[party].first_worker()?;
        Ok(Moment {
            kicks: sum("kicks")?,
            calls: sum("calls")?,
            frames_sent: transmitq.value("packets")?,
            bytes_sent: transmitq.value("bytes_passed")?,
            buffers_kept: transmitq.value("buffers_kept")?,
            ran_ns: worker.value("ran_ns")?,
            sleeps: worker.value("sleeps")?,
            polling: Polling::of(&polling)?,
        })
    }
}

/// Starts a daemon for the network of this index, whose tap gets the host's address there.
fn serve(
    index: usize,
    party: &Party<'_>,
    setup: &Setup<'_>,
    namespace: &Namespace,
) -> Outcome<Daemon> {
    let tap = format!("tap{index}");
    let folder = setup.folder.join(party.name);
    std::fs::create_dir_all(&folder).context(folder.display())?;
    let cpu = setup.daemon_cpu.map(|cpu| format!("--worker-cpus={cpu}"));
    let mut arguments = vec!["--tap", &tap, "--workers", "1"];
    arguments.extend(cpu.as_deref());
    arguments.extend(party.arguments);
    let log = setup.logs.join(format!("manyring-{}.log", party.name));
    let options = DaemonOptions::net(setup.daemon, &folder, &log, namespace, &arguments);
    let socket = options.socket();
    let daemon = Daemon::start(options, &socket)?;
    if index == 0 {
        namespace.address(&tap)?;
    } else {
        namespace.run(&format!("ip link set {tap} addrgenmode none up"))?;
        namespace.run(&format!("ip address add {}/24 dev {tap}", HOSTS[index]))?;
    }
    Ok(daemon)
}

impl Host {
    /// Starts `manyring-bench load` with these words at the host's end of the taps.
    fn load(&self, words: &[&str], log: &str) -> Outcome<Service> {
        let bench = self.bench.to_str().ok_or("the path of manyring-bench is no text")?;
        let mut all = on_cpu(self.cpu);
        all.extend([bench, "load"].iter().chain(words).map(|word| (*word).to_owned()));
        let mut command = self.namespace.child(&all[0]);
        command.args(&all[1..]);
        Service::silent(command, &self.logs.join(format!("{log}.log")))
    }
}

/// The JSON that `manyring-bench` printed in the guest.
struct Said(Value);

impl Said {
    /// Of the last load of a guest.
    fn last(said: &str) -> Outcome<Self> {
        let line = said.lines().rev().find_map(|line| line.strip_prefix("LOAD "));
        let line = line.ok_or("the guest says nothing of its load")?;
        let value = serde_json::from_str(line);
        value.context(format!("manyring-bench in the guest said {line:?}")).map(Self)
    }

    fn count(&self, name: &str) -> Outcome<u64> {
        self.0.get(name).and_then(Value::as_u64).ok_or_else(|| self.lacks(name))
    }

    fn number(&self, name: &str) -> Outcome<f64> {
        self.0.get(name).and_then(Value::as_f64).ok_or_else(|| self.lacks(name))
    }

    fn lacks(&self, name: &str) -> String {
        format!("manyring-bench says nothing of {name}: {}", self.0)
    }
}

impl Moment {
    fn since(&self, before: &Self) -> Moved {
        Moved {
            kicks: self.kicks - before.kicks,
            calls: self.calls - before.calls,
            frames_sent: self.frames_sent - before.frames_sent,
            bytes_sent: self.bytes_sent - before.bytes_sent,
            buffers_kept: self.buffers_kept - before.buffers_kept,
            ran: Duration::from_nanos(self.ran_ns - before.ran_ns),
            sleeps: self.sleeps - before.sleeps,
            polling: self.polling.since(before.polling),
        }
    }
}

impl Polling {
    fn of(numbers: &Counters) -> Outcome<Self> {
        let number = |name| numbers.value(name);
        Ok(Self {
            wake_ns: number("wake_ns")?,
            spins: number("spins")?,
            gain_permille: number("gain_permille")?,
            gap_ns: number("gap_ns")?,
            trials: number("trials")?,
            flips: number("flips")?,
            stolen_looks: number("stolen_looks")?,
            spins_hit: number("spins_hit")?,
            spins_missed: number("spins_missed")?,
        })
    }

    fn since(self, before: Self) -> Self {
        Self {
            trials: self.trials - before.trials,
            flips: self.flips - before.flips,
            stolen_looks: self.stolen_looks - before.stolen_looks,
            spins_hit: self.spins_hit - before.spins_hit,
            spins_missed: self.spins_missed - before.spins_missed,
            ..self
        }
    }
}

impl std::fmt::Display for Polling {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let arm = if self.spins == 1 { "spins" } else { "sleeps" };
        write!(
            f,
            "{arm}, gain {} permille, gap {} ns, wake {} ns; {} trials, {} flips, {} stolen looks, \
             {} spins hit, {} missed",
            self.gain_permille,
            self.gap_ns,
            self.wake_ns,
            self.trials,
            self.flips,
            self.stolen_looks,
            self.spins_hit,
            self.spins_missed
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_load_of_a_guest_is_what_counts() {
        let said = "GUEST_UP\nLOAD {\"transactions\":1}\nGUEST_MARK loaded\n\
            LOAD {\"transactions\":2}\nGUEST_MARK loaded\n";
        let last = |said: &str| Said::last(said).and_then(|said| said.count("transactions"));
        assert_eq!(last(said), Ok(2));
        assert!(last("GUEST_UP\n").unwrap_err().contains("nothing"));
        assert!(last("LOAD connect: refused\n").unwrap_err().contains("refused"));
        assert!(last("LOAD {\"bytes\":1}\n").unwrap_err().contains("transactions"));
    }
}
