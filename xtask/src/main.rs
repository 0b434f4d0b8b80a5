//! The project's own commands: `cargo xtask demo | test | xen | ci | tidy` and the parts of `ci`.
#![forbid(unsafe_code)]
#![allow(clippy::disallowed_methods, reason = "steps are timed by the real clock")]

mod arm64;
mod beside;
mod cargo;
mod dead_server;
mod demo;
mod forms;
mod gate;
mod guest_load;
mod limits;
mod package;
mod programs;
mod readme;
mod schemathesis;
mod soak;
mod test;
mod tidy;
mod watched;
mod xen;

use clap::{Parser, Subcommand, ValueEnum};
use manyring_system::guest::Kind;
use manyring_system::{Outcome, check, cleanup};
use std::process::ExitCode;

/// The project's own commands. Missing Debian packages are installed, and a line says so.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Boot a real Linux guest on a Manyring disk and network, use both, show the counters.
    Demo {
        /// The program that runs the guest.
        #[arg(long, value_enum, default_value_t = GuestKind::Uml)]
        guest: GuestKind,
    },
    /// Run every test: the workspace's, then the system tests with real guests.
    Test {
        /// Only system tests whose name holds this.
        #[arg(long, value_name = "NAME")]
        only: Option<String>,
        /// Keep N threads busy beside the tests: no test may depend on a quiet machine.
        #[arg(long, value_name = "N", default_value_t = 0)]
        beside: usize,
        /// Run the tests again, up to N times, until they fail.
        #[arg(long, value_name = "N", default_value_t = 1)]
        times: usize,
    },
    /// Run the whole gate.
    Ci,
    /// Check the house rules.
    Tidy {
        /// First write what documents say of the code: ARCHITECTURE.md's tree, the sizes of crates.
        #[arg(long)]
        write: bool,
    },
    /// Fuzz every target for a short while, two at a time.
    FuzzSmoke {
        /// Seconds for all targets together.
        #[arg(long, default_value_t = gate::fuzz::SMOKE_SECONDS)]
        seconds: u64,
    },
    /// Set four hostile guests beside four well-behaved ones on one daemon; report what these saw.
    Soak {
        /// How long.
        #[arg(long, default_value_t = 10.0)]
        minutes: f64,
        /// Repeats a run: the tricks, their order and the kills come from it [default: the clock].
        #[arg(long, value_name = "N")]
        seed: Option<u64>,
        /// Only these tricks of the hostile guests.
        #[arg(long, value_name = "NAME,..")]
        tricks: Option<String>,
        /// Instead of hostile guests: kill the daemon this often under a QEMU guest with fio.
        #[arg(long, value_name = "N", conflicts_with_all = ["minutes", "tricks"])]
        kill: Option<u32>,
        /// The format of the guest's rings then.
        #[arg(long, value_enum, default_value = "split")]
        ring: soak::Ring,
        /// With --kill: the disk is an NBD server's, and what serves it is killed.
        #[arg(
            long,
            value_enum,
            requires = "kill",
            num_args = 0..=1,
            default_missing_value = "nbd"
        )]
        server: Option<soak::Server>,
        /// Instead: guests in device processes, of which something ends this often, and how long
        /// they wait.
        #[command(flatten)]
        processes: soak::Processes,
        /// With --processes, --supervisor and --takeovers: the release build, whose pauses count.
        /// The debug build also checks itself.
        #[arg(long, conflicts_with_all = ["minutes", "tricks", "kill"])]
        release: bool,
        /// With --supervisor: the daemon is the packaged service, under systemd in a container;
        /// before that device processes die and daemons take over, under a guest of User Mode
        /// Linux, too.
        #[arg(long, requires = "supervisor")]
        systemd: bool,
        /// With --processes, --supervisor, --takeovers and --migrations: this many threads read
        /// all of /proc beside it, which delays the reaping of processes.
        #[arg(long, value_name = "N", default_value_t = 0)]
        scanners: u32,
    },
    /// Time TCP requests and responses of real guests, with each way of polling.
    GuestRr(guest_load::GuestRr),
    /// Time small TCP writes of real guests, with and without `reclaim`.
    GuestReclaim(guest_load::GuestReclaim),
    /// Measure what the limit of a disk lets pass, by operations and bytes; 1 % is allowed.
    Limits(limits::Limits),
    /// Time seven guests of one worker while the server of an eighth one's disk is dead.
    DeadServer(dead_server::DeadServer),
    /// Serve the disks of real Xen guests, under emulation, and try all that they do with them.
    Xen(xen::Xen),
    /// One guest of the soak: a process that the soak starts, and may kill.
    #[command(hide = true)]
    SoakGuest {
        /// The words of its orders.
        words: Vec<String>,
    },
    /// Fuzz every target for a long while, two at a time, or one target.
    Fuzz {
        /// Only this target of fuzz/.
        #[arg(value_name = "TARGET")]
        target: Option<String>,
        /// Seconds for each target.
        #[arg(long, default_value_t = gate::fuzz::LONG_SECONDS)]
        seconds: u64,
    },
    /// Run the ring's race tests under every interleaving.
    Loom,
    /// Run every bench once, and compare instruction counts with their baselines.
    BenchSmoke {
        /// Only count, and write what was counted as the baselines.
        #[arg(long)]
        renew: bool,
    },
    /// Write README's table of promises, from the figures of a run.
    Readme {
        /// The JSON of `manyring-bench run all` [default: the figures of docs/promises.json].
        #[arg(value_name = "RUN.json")]
        run: Option<String>,
    },
    /// Make the Debian package, in target/package.
    Package(package::Package),
    /// Run the tests of formats, memory and rings for arm64, under emulation.
    Arm64,
    /// Compare the OpenAPI document of a daemon with what it answers: a minute or two.
    Schemathesis(schemathesis::Schemathesis),
    /// Check licences, bans and sources of the dependencies.
    Deny,
    /// Break the code in one place at a time, and count what the tests notice: minutes to hours.
    Mutants(gate::mutants::Which),
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum GuestKind {
    /// User Mode Linux: one CPU, one queue, quick.
    Uml,
    /// QEMU: four CPUs, four queues.
    Qemu,
}

impl From<GuestKind> for Kind {
    fn from(kind: GuestKind) -> Self {
        match kind {
            GuestKind::Uml => Self::Uml,
            GuestKind::Qemu => Self::Qemu,
        }
    }
}

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(sentence) => {
            eprintln!("xtask: {sentence}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Outcome {
    std::env::set_current_dir(cargo::ROOT).map_err(|error| format!("{}: {error}", cargo::ROOT))?;
    // A guest of the soak is ended by it, not by a signal of the terminal.
    if !matches!(command, Command::SoakGuest { .. }) {
        cleanup::on_signals()?;
    }
    match command {
        Command::Demo { guest } => demo::run(guest.into()),
        Command::Test { only, beside, times } => test::run(only.as_deref(), beside, times),
        Command::Ci => gate::run(),
        Command::Tidy { write } => tidy::run(write),
        Command::FuzzSmoke { seconds } => gate::fuzz::smoke(seconds),
        Command::Soak { kill: Some(count), server: Some(server), seed, .. } => {
            soak::kill_servers(server, count, seed)
        }
        Command::Soak { processes, systemd, ring, seed, release, scanners, .. }
            if processes.is_asked() =>
        {
            let profile = if release { "release" } else { "dev" };
            let _beside = manyring_system::soak::Scanners::start(scanners);
            soak::processes(&processes, systemd, ring, seed, profile)
        }
        Command::Soak { kill: Some(count), ring, seed, .. } => soak::kill(count, ring, seed),
        Command::Soak { minutes, seed, tricks, .. } => soak::run(minutes, seed, tricks),
        Command::GuestRr(args) => guest_load::rr(&args),
        Command::GuestReclaim(args) => guest_load::reclaim(&args),
        Command::Limits(limits) => limits::run(&limits),
        Command::DeadServer(args) => dead_server::run(&args),
        Command::Xen(args) => xen::run(args),
        Command::SoakGuest { words } => manyring_system::soak::run_guest(&words),
        Command::Fuzz { target, seconds } => gate::fuzz::long(target.as_deref(), seconds),
        Command::Loom => {
            let totals = gate::loom()?;
            println!("\n{}", totals.report());
            check(totals.failed == 0, || "not every race test passed".into())
        }
        Command::BenchSmoke { renew: false } => gate::bench::smoke(),
        Command::BenchSmoke { renew: true } => gate::bench::renew(),
        Command::Readme { run } => readme::run(run.as_deref()),
        Command::Package(package) => package::run(&package),
        Command::Arm64 => arm64::run(),
        Command::Schemathesis(how) => schemathesis::run(&how),
        Command::Deny => gate::deny::run(),
        Command::Mutants(which) => gate::mutants::run(&which),
    }
}
