//! The program `manyring-bench`: load generators, and scenarios that compare us with others.
//!
//! `load` drives any vhost-user-blk back-end once; a scenario starts the back-ends it compares,
//! drives each in turn, round by round, and reports the ratios. The ring alone is measured by
//! `cargo bench -p manyring-queue`. How to read the figures: `docs/guide/bench.md`.

mod load;
mod measure;
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
    /// Drive a vhost-user-blk back-end, once.
    #[command(subcommand)]
    Load(Load),
    /// A disk that keeps nothing: us, qemu-storage-daemon; one queue, four queues.
    NullBlk(scenario::ScenarioArgs),
    /// A file: us, qemu-storage-daemon, fio without a guest.
    FileBlk(scenario::file_blk::FileBlkArgs),
}

/// Which client.
#[derive(Debug, Subcommand)]
enum Load {
    /// libblkio, a client that is not ours.
    Blkio(load::LoadArgs),
    /// Our own driver half.
    Driver(load::LoadArgs),
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
        Command::Load(Load::Blkio(args)) => {
            let result = load::blkio::run(&args.options()).map_err(|e| e.to_string())?;
            result.print(args.json)
        }
        Command::Load(Load::Driver(args)) => {
            let result = load::driver::run(&args.options()).map_err(|e| e.to_string())?;
            result.print(args.json)
        }
        Command::NullBlk(args) => scenario::null_blk::run(&args)?.print(args.json),
        Command::FileBlk(args) => scenario::file_blk::run(&args)?.print(args.scenario.json),
    }
}
