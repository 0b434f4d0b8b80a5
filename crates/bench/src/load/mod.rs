//! Load generators: clients that keep a number of requests in flight and count what comes back.

pub(crate) mod blkio;
pub(crate) mod crowd;
pub(crate) mod driver;
pub(crate) mod frame;
pub(crate) mod guest;
pub(crate) mod join;
mod lane;
pub(crate) mod net;
pub(crate) mod pages;
pub(crate) mod rr;
pub(crate) mod stream;
pub(crate) mod tap;
pub(crate) mod vm;
pub(crate) mod xenblk;

use crate::measure::{Latencies, waited_seconds};
use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Duration;

/// Reads or writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Rw {
    /// Reads.
    Read,
    /// Writes.
    Write,
}

/// `manyring-bench load ..`
#[derive(Args, Debug)]
pub(crate) struct LoadArgs {
    /// The back-end's socket; for a Xen disk that of the simulated Xen.
    #[arg(long, value_name = "PATH")]
    socket: PathBuf,
    /// Queues to drive.
    #[arg(long, default_value_t = 1)]
    queues: usize,
    /// Requests in flight on each queue.
    #[arg(long, default_value_t = 32)]
    depth: usize,
    /// How long, in seconds; fractions are fine.
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// Look for completions all the time instead of sleeping.
    #[arg(long)]
    poll: bool,
    /// Sleep after each look until the device calls, as the interrupt of a kernel does, instead of
    /// looking once more before (`load driver`).
    #[arg(long, conflicts_with = "poll")]
    each_call: bool,
    /// Threads, which share the queues [default: one for each queue].
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Bytes of a request.
    #[arg(long, default_value_t = 4096)]
    size: usize,
    /// The kind of request.
    #[arg(long, value_enum, default_value_t = Rw::Read)]
    rw: Rw,
    /// Run on this CPU only.
    #[arg(long, value_name = "N")]
    cpu: Option<usize>,
    /// Seed of the random offsets.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

impl LoadArgs {
    /// The arguments of `load` that give these options again.
    pub(crate) fn of(options: &LoadOptions) -> Vec<std::ffi::OsString> {
        let mut arguments = vec!["--json".into(), "--socket".into(), (&options.socket).into()];
        let mut add = |text: String| arguments.push(text.into());
        add(format!("--queues={}", options.queues));
        add(format!("--depth={}", options.depth));
        add(format!("--seconds={}", options.duration.as_secs_f64()));
        add(format!("--size={}", options.size));
        add(format!("--rw={}", if options.rw == Rw::Read { "read" } else { "write" }));
        add(format!("--seed={}", options.seed));
        let flags = [("--poll", options.poll), ("--each-call", options.each_call)];
        flags.iter().filter(|(_, is_set)| *is_set).for_each(|(flag, _)| add((*flag).to_owned()));
        options.threads.iter().for_each(|threads| add(format!("--threads={threads}")));
        arguments
    }

    /// The options that a generator takes.
    pub(crate) fn options(&self) -> LoadOptions {
        LoadOptions {
            socket: self.socket.clone(),
            queues: self.queues,
            depth: self.depth,
            duration: Duration::try_from_secs_f64(self.seconds).unwrap_or_default(),
            poll: self.poll,
            each_call: self.each_call,
            threads: self.threads,
            size: self.size,
            rw: self.rw,
            cpu: self.cpu,
            seed: self.seed,
        }
    }
}

/// The options of a load generator.
#[derive(Clone, Debug)]
pub(crate) struct LoadOptions {
    pub(crate) socket: PathBuf,
    pub(crate) queues: usize,
    pub(crate) depth: usize,
    pub(crate) duration: Duration,
    pub(crate) poll: bool,
    /// A sleeping client waits for the device's call for every answer.
    pub(crate) each_call: bool,
    /// Number of client threads; `None`: one for each queue.
    pub(crate) threads: Option<usize>,
    pub(crate) size: usize,
    pub(crate) rw: Rw,
    pub(crate) cpu: Option<usize>,
    pub(crate) seed: u64,
}

impl LoadOptions {
    fn check(&self) -> Result<(), LoadError> {
        if self.queues == 0 || self.depth == 0 || self.threads == Some(0) {
            return Err(LoadError::Options("queues, depth and threads must not be 0"));
        }
        if self.size == 0 || !self.size.is_multiple_of(512) {
            return Err(LoadError::Options("size must be whole sectors of 512 bytes"));
        }
        Ok(())
    }

    /// Waits for the socket: the daemon may have been started a moment ago, by the line above in a
    /// script. The name appears when the socket listens. Whoever connects gets the error if it
    /// does not appear.
    fn await_socket(&self) {
        let mut pauses = SOCKET_TIMEOUT.as_millis() / SOCKET_PAUSE.as_millis();
        while pauses > 0 && !self.socket.exists() {
            std::thread::sleep(SOCKET_PAUSE);
            pauses -= 1;
        }
    }

    /// Deals the queues to the threads in turn.
    fn deal<L>(&self, lanes: impl Iterator<Item = L>) -> Vec<Vec<L>> {
        let threads = self.threads.unwrap_or(self.queues).min(self.queues).max(1);
        let mut parties: Vec<Vec<L>> = (0..threads).map(|_| Vec::new()).collect();
        for (index, lane) in lanes.enumerate() {
            parties[index % threads].push(lane);
        }
        parties
    }
}

/// Longest wait for a socket that does not exist yet; pause between two attempts.
const SOCKET_TIMEOUT: Duration = Duration::from_secs(5);
const SOCKET_PAUSE: Duration = Duration::from_millis(10);

/// A request without an answer after this time counts as lost.
const STUCK: Duration = Duration::from_secs(10);

/// The latencies of all threads of a client, and how long the threads waited for a CPU.
pub(crate) struct Outcome {
    latencies: Latencies,
    waited_seconds: f64,
}

/// Runs each party on a thread of its own, and collects the results.
fn run_parties<P: Send>(
    parties: Vec<P>,
    run: impl Fn(P) -> Result<Latencies, LoadError> + Sync,
) -> Result<Outcome, LoadError> {
    let run = &|party| Ok((run(party)?, waited_seconds("thread-self")));
    let done: Vec<Result<_, LoadError>> = std::thread::scope(|scope| {
        let threads: Vec<_> =
            parties.into_iter().map(|party| scope.spawn(move || run(party))).collect();
        let gone = || LoadError::Options("a thread of the client panicked");
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err(gone()))).collect()
    });
    let mut outcome = Outcome { latencies: Latencies::new(), waited_seconds: 0.0 };
    for one in done {
        let (latencies, waited) = one?;
        outcome.latencies.add(&latencies);
        outcome.waited_seconds += waited;
    }
    Ok(outcome)
}

/// Why a load could not be driven.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the Display text says what each field is")]
pub(crate) enum LoadError {
    #[error("{step}: {problem}")]
    Client { step: &'static str, problem: String },
    #[error("{0}")]
    Options(&'static str),
    #[error("{failed} requests failed, the first with {errno}")]
    Requests { failed: u64, errno: rustix::io::Errno },
    #[error("{in_flight} requests did not come back within {seconds} s")]
    Stuck { in_flight: usize, seconds: u64 },
    #[error("cannot run on CPU {cpu}: {errno}")]
    Cpu { cpu: usize, errno: rustix::io::Errno },
}

/// The results of a client: rate, latencies and CPU time.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(crate) struct LoadResult {
    /// Requests that completed within the time.
    pub(crate) requests: u64,
    /// Seconds that were measured.
    pub(crate) seconds: f64,
    /// Requests per second.
    pub(crate) iops: f64,
    /// Median latency in microseconds.
    pub(crate) p50_us: f64,
    /// 99th percentile of the latencies in microseconds.
    pub(crate) p99_us: f64,
    /// Histogram of the latencies: a latency in microseconds, and the number of requests.
    pub(crate) latency_us: Vec<(f64, u64)>,
    /// CPU seconds that this process used.
    pub(crate) client_cpu_seconds: f64,
    /// Seconds that its threads were ready to run while other programs ran.
    pub(crate) waited_seconds: f64,
    /// Seed of the random offsets.
    pub(crate) seed: u64,
}

impl LoadResult {
    pub(crate) fn new(outcome: &Outcome, seconds: f64, cpu: f64, seed: u64) -> Self {
        let latencies = &outcome.latencies;
        let requests = latencies.count();
        Self {
            requests,
            seconds,
            iops: measure_rate(requests, seconds),
            p50_us: latencies.quantile_us(0.5),
            p99_us: latencies.quantile_us(0.99),
            latency_us: latencies.histogram_us(),
            client_cpu_seconds: cpu,
            waited_seconds: outcome.waited_seconds,
            seed,
        }
    }

    /// Prints one line.
    pub(crate) fn print(&self, json: bool) -> Result<(), String> {
        if json {
            print_json(self)?;
        } else {
            println!(
                "{:.0} IOPS, p50 {:.2} us, p99 {:.2} us ({} requests in {:.3} s, \
                 client CPU {:.3} s, seed {})",
                self.iops,
                self.p50_us,
                self.p99_us,
                self.requests,
                self.seconds,
                self.client_cpu_seconds,
                self.seed
            );
        }
        Ok(())
    }
}

/// Prints what a load has found as one line of JSON.
pub(crate) fn print_json(found: &impl Serialize) -> Result<(), String> {
    println!("{}", serde_json::to_string(found).map_err(|e| e.to_string())?);
    Ok(())
}

#[allow(clippy::cast_precision_loss, reason = "a rate needs no more than 52 bits")]
fn measure_rate(requests: u64, seconds: f64) -> f64 {
    if seconds > 0.0 { requests as f64 / seconds } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_are_dealt_to_threads_in_turn_and_no_thread_is_without() {
        let dealt = |queues, threads| {
            let socket = PathBuf::new();
            let (depth, duration, poll) = (1, Duration::ZERO, false);
            let (size, rw, cpu, seed, each_call) = (512, Rw::Read, None, 1, false);
            let options = LoadOptions {
                socket,
                queues,
                depth,
                duration,
                poll,
                each_call,
                threads,
                size,
                rw,
                cpu,
                seed,
            };
            options.deal(0..queues)
        };
        assert_eq!(dealt(5, Some(2)), [vec![0, 2, 4], vec![1, 3]]);
        assert_eq!(dealt(3, None), [[0], [1], [2]]);
        assert_eq!(dealt(3, Some(1)), [[0, 1, 2]]);
        assert_eq!(dealt(2, Some(9)), [[0], [1]]);
    }
}
