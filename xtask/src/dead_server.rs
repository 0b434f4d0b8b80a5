//! `cargo xtask dead-server`: what seven guests of one worker lose while the server of an eighth
//! guest's disk is dead and that guest's requests wait for it.

use crate::cargo::{build_bench, build_daemon};
use clap::Args;
use manyring_system::cleanup::Folder;
use manyring_system::command::{command, text, wait_for};
use manyring_system::daemon::ticks;
use manyring_system::{Context, Outcome, check, packages};
use serde_json::Value;
use std::fmt::Write as _;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Guests that are measured.
const GUESTS: usize = 7;
/// The part that they must keep of their request rate beside an idle guest.
const PROMISE: f64 = 0.97;
const LIMIT: Duration = Duration::from_secs(60);

/// How long, and how often.
#[derive(Args, Debug)]
pub(crate) struct DeadServer {
    /// Rounds, each with the server alive and then dead.
    #[arg(long, default_value_t = 7)]
    rounds: usize,
    /// Seconds of each load; fractions are fine.
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// The profile of cargo with which the programs are built.
    #[arg(long, default_value = "release")]
    profile: String,
}

/// A process that is killed when it is dropped.
struct Running(Child);

impl Running {
    fn start(command: &mut Command, what: &str) -> Outcome<Self> {
        command.stdin(Stdio::null()).stderr(Stdio::null()).spawn().context(what).map(Self)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// One measurement of the seven guests, which run at once.
struct Sample {
    /// Requests a second, of each.
    rates: Vec<f64>,
    /// Clock ticks of the daemon for each request.
    cost: f64,
}

impl Sample {
    fn total(&self) -> f64 {
        self.rates.iter().sum()
    }
}

/// The programs, and where the sockets lie.
struct Ground {
    daemon: PathBuf,
    bench: PathBuf,
    folder: Folder,
    seconds: f64,
}

/// Measures in turn, prints the ratios, and fails if they are below the promise.
pub(crate) fn run(args: &DeadServer) -> Outcome {
    packages::need("the dead server", &["nbdkit"])?;
    let ground = Ground {
        daemon: build_daemon(&args.profile)?,
        bench: build_bench(&args.profile)?,
        folder: Folder::new()?,
        seconds: args.seconds,
    };
    let mut server = Some(ground.server()?);
    let daemon = ground.daemon()?;
    let (mut totals, mut costs, mut guests) = (Vec::new(), Vec::new(), vec![Vec::new(); GUESTS]);
    for round in 1..=args.rounds.max(1) {
        let alive = ground.sample(&daemon)?;
        let mut eighth = ground.load(GUESTS, 3600.0)?;
        ground.until_waiting(&mut server)?;
        let dead = ground.sample(&daemon)?;
        let ended = eighth.0.try_wait().context("the eighth guest")?;
        check(ended.is_none(), || "the eighth guest has not waited".into())?;
        drop(eighth);
        server = Some(ground.server()?);
        let (total, cost) = (dead.total() / alive.total(), dead.cost / alive.cost);
        println!("round {round}: {total:.3} of the requests, {cost:.3} of the CPU for each");
        totals.push(total);
        costs.push(cost);
        for ((found, dead), alive) in guests.iter_mut().zip(dead.rates).zip(alive.rates) {
            found.push(dead / alive);
        }
    }
    let each: Vec<_> = guests.into_iter().map(|found| format!("{:.2}", median(found))).collect();
    let (total, cost) = (median(totals), median(costs));
    println!(
        "medians: {total:.3} of the requests of {GUESTS} guests (each: {}), {cost:.3} of the \
         daemon's CPU for each",
        each.join(" ")
    );
    check(total >= PROMISE, || format!("{total:.3} is less than {PROMISE}"))
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values[values.len() / 2]
}

impl Ground {
    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// An NBD server of memory.
    fn server(&self) -> Outcome<Running> {
        let socket = self.at("nbd");
        let _ = std::fs::remove_file(&socket);
        let mut nbdkit = command("nbdkit");
        nbdkit.args(["-f", "-t", "16", "-U"]).arg(&socket).args(["memory", "1G"]);
        let server = Running::start(&mut nbdkit, "nbdkit")?;
        wait_for("nbdkit's socket", LIMIT, || {
            Ok(UnixStream::connect(&socket).is_ok().then_some(()))
        })?;
        Ok(server)
    }

    /// A daemon with one worker and eight disks, the last one the server's.
    fn daemon(&self) -> Outcome<Running> {
        let place = self.folder.path().display();
        let mut text = "[daemon]\ndomains = 'one'\nworkers = 1\n".to_owned();
        let _ = writeln!(text, "control = '{place}/control'");
        for index in 0..=GUESTS {
            let disk = match index {
                GUESTS => format!("nbd = 'nbd+unix:///?socket={place}/nbd'"),
                _ => "null = '1G'".to_owned(),
            };
            let _ = write!(
                text,
                "[[blk]]\nname = 'd{index}'\nsocket_path = '{place}/d{index}'\n{disk}\n"
            );
        }
        let config = self.at("manyring.toml");
        std::fs::write(&config, text).context(config.display())?;
        let mut daemon = command(&self.daemon.to_string_lossy());
        daemon.args(["run", "--config"]).arg(config);
        let daemon = Running::start(&mut daemon, "manyring")?;
        let last = self.at(&format!("d{GUESTS}"));
        wait_for("the daemon's sockets", LIMIT, || Ok(last.exists().then_some(())))?;
        Ok(daemon)
    }

    /// A guest that reads from its disk.
    fn load(&self, guest: usize, seconds: f64) -> Outcome<Running> {
        let mut load = command(&self.bench.to_string_lossy());
        load.args(["load", "driver", "--json", "--depth", "8"]);
        load.arg("--socket").arg(self.at(&format!("d{guest}")));
        load.args(["--seconds", &seconds.to_string()]).stdout(Stdio::piped());
        Running::start(&mut load, "manyring-bench")
    }

    /// Kills the server when the eighth guest has been answered, and waits until that guest waits.
    fn until_waiting(&self, server: &mut Option<Running>) -> Outcome {
        wait_for("the eighth guest's answers", LIMIT, || {
            Ok((self.eighth("counters/requests")? > 0).then_some(()))
        })?;
        *server = None;
        wait_for("the eighth guest's wait", LIMIT, || {
            Ok((self.eighth("counters/in_flight")? > 0).then_some(()))
        })
    }

    /// A number of the queue of the eighth guest.
    fn eighth(&self, place: &str) -> Outcome<u64> {
        let mut stats = command(&self.daemon.to_string_lossy());
        stats.args(["stats", "--json", "--control"]).arg(self.at("control"));
        let said = text(&mut stats)?;
        let said: Value = serde_json::from_str(&said).context("manyring stats")?;
        let devices = said["devices"].as_array().into_iter().flatten();
        let name = format!("d{GUESTS}");
        let device = { devices }.find(|device| device["name"] == name.as_str());
        let value = device.and_then(|device| device.pointer(&format!("/queues/0/{place}")));
        Ok(value.and_then(Value::as_u64).unwrap_or(0))
    }

    /// Lets the seven guests run at once.
    fn sample(&self, daemon: &Running) -> Outcome<Sample> {
        let before = ticks(daemon.0.id())?;
        let loads: Vec<_> =
            (0..GUESTS).map(|guest| self.load(guest, self.seconds)).collect::<Outcome<_>>()?;
        let rate = |mut load: Running| {
            let said = load.0.stdout.take().map(std::io::read_to_string).transpose();
            let said = said.context("manyring-bench")?.unwrap_or_default();
            let said: Value = serde_json::from_str(&said).context("manyring-bench")?;
            said["iops"].as_f64().ok_or_else(|| format!("no iops in {said}"))
        };
        let rates: Vec<_> = loads.into_iter().map(rate).collect::<Outcome<_>>()?;
        let ticks = f64::from(u32::try_from(ticks(daemon.0.id())? - before).context("ticks")?);
        let cost = ticks / (rates.iter().sum::<f64>() * self.seconds);
        Ok(Sample { rates, cost })
    }
}
