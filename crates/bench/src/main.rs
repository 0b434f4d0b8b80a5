//! The program `manyring-bench`: load generators, and scenarios that compare us with others.
//!
//! `load` drives any vhost-user back-end once; a scenario starts the back-ends it compares,
//! drives each in turn, round by round, and reports the ratios. The ring alone is measured by
//! `cargo bench -p manyring-queue`. How to read the figures: `docs/guide/bench.md`.

mod load;
mod measure;
mod netns;
mod peer;
mod report;
mod scenario;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// What Manyring is worth: load generators and comparisons.
#[derive(Debug, Parser)]
#[command(name = "manyring-bench", version, about, disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
enum Command {
    /// Drive a vhost-user back-end, once.
    #[command(subcommand)]
    Load(Load),
    /// A disk that keeps nothing: us, qemu-storage-daemon; one queue, four queues.
    NullBlk(scenario::null_blk::NullBlkArgs),
    /// A file: us, qemu-storage-daemon, fio without a guest.
    FileBlk(scenario::file_blk::FileBlkArgs),
    /// 64-byte frames to and from a port that ends nowhere: us, testpmd.
    NullNet(scenario::ScenarioArgs),
    /// TCP through a tap with segments left whole: us, a bare loop; sessions by queue pairs.
    TapStream(scenario::ScenarioArgs),
    /// 64-byte frames that cannot be merged, to a tap: us, a bare loop.
    TapSmall(scenario::ScenarioArgs),
    /// Requests and responses over TCP through a tap: us, a bare loop.
    TcpRr(scenario::ScenarioArgs),
    /// Eight guests on one worker, two of which abuse it: what the other six have of their shares.
    Neighbours(scenario::ScenarioArgs),
}

/// Which client.
#[derive(Debug, Subcommand)]
enum Load {
    /// libblkio, a client that is not ours.
    Blkio(load::LoadArgs),
    /// Our own driver half.
    Driver(load::LoadArgs),
    /// Frames through a vhost-user-net back-end, by our own driver half.
    Net(load::net::NetLoadArgs),
    /// One of several guests of a back-end, until it is told to end.
    Guest(load::guest::GuestArgs),
    /// Join a tap to a vhost-user-net back-end, until the standard input ends.
    Join(load::join::JoinArgs),
    /// Join two taps with nothing between them, until the standard input ends.
    Relay(load::join::RelayArgs),
    /// Write small frames to a tap.
    TapWrite(load::tap::TapWriteArgs),
    /// Requests and responses over TCP.
    Rr(load::rr::RrArgs),
    /// Answers them.
    RrServer(load::rr::RrServerArgs),
}

fn main() -> ExitCode {
    match run(Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("manyring-bench: {message}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> Result<(), String> {
    match cli.command {
        Command::Load(load) => run_load(load),
        Command::NullBlk(args) => scenario::null_blk::run(&args)?.print(args.scenario.json),
        Command::FileBlk(args) => scenario::file_blk::run(&args)?.print(args.scenario.json),
        Command::NullNet(args) => scenario::null_net::run(&args)?.print(args.json),
        Command::TapStream(args) => scenario::tap_stream::run(&args)?.print(args.json),
        Command::TapSmall(args) => scenario::tap_small::run(&args)?.print(args.json),
        Command::TcpRr(args) => scenario::tcp_rr::run(&args)?.print(args.json),
        Command::Neighbours(args) => {
            let (report, verdict) = scenario::neighbours::run(&args)?;
            report.print(args.json)?;
            verdict.print(args.json)
        }
    }
}

fn run_load(load: Load) -> Result<(), String> {
    let failed = |error: load::LoadError| error.to_string();
    match load {
        Load::Blkio(args) => load::blkio::run(&args.options()).map_err(failed)?.print(args.json),
        Load::Driver(args) => load::driver::run(&args.options()).map_err(failed)?.print(args.json),
        Load::Net(args) => load::net::run(&args).map_err(failed)?.print(args.json),
        Load::Guest(args) => load::guest::run(&args).map_err(failed)?.print(),
        Load::Join(args) => load::join::join(&args).map_err(failed)?.print(),
        Load::Relay(args) => load::join::relay(&args).map_err(failed)?.print(),
        Load::TapWrite(args) => load::tap::run(&args).map_err(failed)?.print(true),
        Load::Rr(args) => load::rr::client(&args).map_err(failed)?.print(),
        Load::RrServer(args) => load::rr::server(&args).map_err(failed),
    }
}
