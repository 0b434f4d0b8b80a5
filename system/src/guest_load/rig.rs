//! A guest whose network one daemon serves, and a server at the host's end of the tap: asked for
//! one load after the other.

use crate::command::on_cpu;
use crate::daemon::{Counters, Daemon, DaemonOptions};
use crate::guest::{Guest, GuestOptions, Kernel, Net};
use crate::net::{Namespace, Service, WORDS};
use crate::{Context, Outcome};
use serde_json::Value;
use std::path::Path;
use std::time::Duration;

/// What to set up.
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
    /// What the daemon is given as `--polling`.
    pub(crate) polling: &'a str,
    /// The CPU of the guest and of the server; any unless said.
    pub(crate) guest_cpu: Option<usize>,
    /// The CPU of the daemon's worker; any unless said.
    pub(crate) daemon_cpu: Option<usize>,
}

/// Reads lines of a number of connections and seconds, and drives that load; an empty line ends it.
const SCRIPT: &str = r#"
network
await ready
while read -r connections seconds && [ -n "$connections" ]; do
    manyring-bench load rr --server $HOST:7777 --connections $connections --seconds $seconds \
        > /tmp/rr 2>&1 || fail "$(cat /tmp/rr)"
    echo "RR $(cat /tmp/rr)"
    mark answered
done
"#;
/// Where the server listens, as the script has it.
const LISTEN: &str = "192.0.2.1:7777";
/// The server ends by itself after so many seconds.
const SERVER_SECONDS: &str = "--seconds=3600";
/// A step takes no longer than this beside what was asked for.
const LIMIT: Duration = Duration::from_secs(60);
/// The guest's last acknowledgements come some time after its load.
const SETTLE: Duration = Duration::from_secs(1);

/// What a load came to.
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
    /// Kicks of the guest, of both queues.
    pub(crate) kicks: u64,
    /// Calls to the guest, of both queues.
    pub(crate) calls: u64,
    /// What the worker ran, as the kernel counts it.
    pub(crate) ran: Duration,
    /// Times that the worker slept.
    pub(crate) sleeps: u64,
    /// What the worker learned about polling: gauges as they are after the load, and how far
    /// counters went meanwhile.
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
    ran_ns: u64,
    sleeps: u64,
    polling: Polling,
}

/// The parts; dropped, all of them are gone.
pub(crate) struct Rig {
    // In this order they end: the namespace last.
    guest: Guest,
    daemon: Daemon,
    server: Service,
    namespace: Namespace,
}

impl Rig {
    /// Starts the daemon and the server, and boots the guest.
    ///
    /// # Errors
    /// One of them does not come up.
    pub(crate) fn start(kernel: &Kernel, setup: &Setup<'_>) -> Outcome<Self> {
        let namespace = Namespace::new()?;
        let log = |name: &str| setup.logs.join(format!("{name}-{}.log", setup.polling));
        let mut more: Vec<String> = ["--tap", "tap0", "--workers", "1", "--polling"]
            .map(str::to_owned)
            .into_iter()
            .chain([setup.polling.to_owned()])
            .collect();
        if let Some(cpu) = setup.daemon_cpu {
            more.extend(["--worker-cpus".to_owned(), cpu.to_string()]);
        }
        let more: Vec<&str> = more.iter().map(String::as_str).collect();
        let options =
            DaemonOptions::net(setup.daemon, setup.folder, &log("manyring"), &namespace, &more);
        let socket = options.socket();
        let daemon = Daemon::start(options, &socket)?;
        namespace.address("tap0")?;
        let server = serve(&namespace, setup, &log("server"))?;
        let bench = setup.bench.to_str().ok_or("the path of manyring-bench is no text")?;
        let options = GuestOptions {
            net: Some(Net { socket: &socket, pairs: 1 }),
            host_cpu: setup.guest_cpu,
            programs: &[bench],
            script: &format!("{WORDS}{SCRIPT}"),
            ..Default::default()
        };
        let mut guest = Guest::boot(kernel, &options, &log("guest"))?;
        guest.reach("ready", LIMIT)?;
        guest.proceed()?;
        Ok(Self { guest, daemon, server, namespace })
    }

    /// Has the guest ask on so many connections for so long.
    ///
    /// # Errors
    /// An answer was wrong or did not come.
    pub(crate) fn load(&mut self, connections: usize, time: Duration) -> Outcome<Load> {
        let before = self.moment()?;
        self.guest.forget()?;
        self.guest.answer(&format!("{connections} {}", time.as_secs_f64()))?;
        // Nothing is to be seen meanwhile, and looking would disturb the guest.
        std::thread::sleep(time);
        self.guest.reach("answered", LIMIT)?;
        let after = self.moment()?;
        let result = result(&self.guest.said()?)?;
        let number = |name: &str| {
            let number = result.get(name).and_then(Value::as_f64);
            number.ok_or_else(|| format!("manyring-bench says nothing of {name}: {result}"))
        };
        let transactions = result.get("transactions").and_then(Value::as_u64);
        Ok(Load {
            transactions: transactions.ok_or("manyring-bench says nothing of transactions")?,
            rate: number("rate")?,
            p50_us: number("p50_us")?,
            p99_us: number("p99_us")?,
            kicks: after.kicks - before.kicks,
            calls: after.calls - before.calls,
            ran: Duration::from_nanos(after.ran_ns - before.ran_ns),
            sleeps: after.sleeps - before.sleeps,
            polling: after.polling.since(before.polling),
        })
    }

    /// The ticks of CPU time that the daemon takes in `time` while the guest is up and idles.
    ///
    /// # Errors
    /// The daemon has ended.
    pub(crate) fn idle_ticks(&self, time: Duration) -> Outcome<u64> {
        std::thread::sleep(SETTLE);
        let before = self.daemon.ticks()?;
        std::thread::sleep(time);
        Ok(self.daemon.ticks()? - before)
    }

    /// The counters of the queues: rx, then tx.
    ///
    /// # Errors
    /// The daemon does not answer.
    pub(crate) fn queues(&self) -> Outcome<Vec<Counters>> {
        self.daemon.queues()
    }

    /// The guest powers off, the daemon ends when it is asked to, and the tap goes with it.
    ///
    /// # Errors
    /// It is not so.
    pub(crate) fn stop(mut self) -> Outcome {
        self.guest.answer("")?;
        self.guest.finish(LIMIT)?;
        self.daemon.stop()?;
        drop(self.server);
        self.namespace.holds_only(&[])
    }

    fn moment(&self) -> Outcome<Moment> {
        let queues = self.daemon.queues()?;
        let sum = |name: &str| queues.iter().map(|queue| queue.value(name)).sum::<Outcome<u64>>();
        let (worker, polling) = self.daemon.first_worker()?;
        Ok(Moment {
            kicks: sum("kicks")?,
            calls: sum("calls")?,
            ran_ns: worker.value("ran_ns")?,
            sleeps: worker.value("sleeps")?,
            polling: Polling::of(&polling)?,
        })
    }
}

/// Starts the server at the host's end of the tap.
fn serve(namespace: &Namespace, setup: &Setup<'_>, log: &Path) -> Outcome<Service> {
    let bench = setup.bench.to_str().ok_or("the path of manyring-bench is no text")?;
    let mut words = on_cpu(setup.guest_cpu);
    let load = [bench, "load", "rr-server", "--listen", LISTEN, SERVER_SECONDS];
    words.extend(load.map(str::to_owned));
    let mut command = namespace.child(&words[0]);
    command.args(&words[1..]);
    Service::silent(command, log)
}

/// What the last load of a guest said.
fn result(said: &str) -> Outcome<Value> {
    let line = said.lines().rev().find_map(|line| line.strip_prefix("RR "));
    let line = line.ok_or("the guest says nothing of its load")?;
    serde_json::from_str(line).context(format!("manyring-bench in the guest said {line:?}"))
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
        let said = "GUEST_UP\nRR {\"transactions\":1}\nGUEST_MARK answered\n\
            RR {\"transactions\":2}\nGUEST_MARK answered\n";
        assert_eq!(result(said).unwrap()["transactions"], 2);
        assert!(result("GUEST_UP\n").unwrap_err().contains("nothing"));
        assert!(result("RR connect: refused\n").unwrap_err().contains("refused"));
    }
}
