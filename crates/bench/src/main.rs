//! The program `manyring-bench`: load generators, and scenarios that compare us with others.
//!
//! `run` runs scenarios of the table in `scenario/registry.rs`, each of which is a command of its
//! own as well. A scenario starts the back-ends it compares, drives each in turn, round by round,
//! and reports the ratios. `compare` puts two runs side by side; `load` drives any vhost-user
//! back-end once. The ring alone is measured by `cargo bench -p manyring-queue`. How to read the
//! figures: `docs/guide/bench.md`. Begin with `scenario/registry.rs`.

mod calibrate;
mod direction;
mod load;
mod measure;
mod netns;
mod own_load;
mod peer;
mod plan;
mod progress;
mod readme;
mod report;
mod run;
mod scenario;

use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use report::document::RunDocument;
use report::files;
use scenario::registry;
use std::path::PathBuf;
use std::process::ExitCode;

/// Measure Manyring: load generators and comparisons.
#[derive(Debug, Parser)]
#[command(name = "manyring-bench", version, disable_help_subcommand = true)]
struct BenchCli {
    #[command(subcommand)]
    command: Command,
}

/// The subcommand.
#[derive(Debug, Subcommand)]
enum Command {
    /// Drive a back-end, once.
    #[command(subcommand)]
    Load(Load),
    /// Name the scenarios, what each needs, and about how long it takes.
    List,
    /// Run scenarios one after the other, within half an hour.
    Run(run::BenchArgs),
    /// Make the page of a run again, from its JSON.
    Page(PageArgs),
    /// Take the figures that README promises out of a run.
    Readme {
        /// The output of `run --json`, or `run.json` of a report.
        run: PathBuf,
    },
    /// Put two runs side by side, and say what differs by more than noise.
    Compare(CompareArgs),
}

/// `manyring-bench compare ..`
#[derive(Debug, Args)]
struct CompareArgs {
    /// The run before: the output of `run --json`, or `run.json` of a report.
    before: PathBuf,
    /// The run after.
    after: PathBuf,
    /// Write the comparison as a page into this folder.
    #[arg(long, value_name = "DIR")]
    report: Option<PathBuf>,
}

/// `manyring-bench page ..`
#[derive(Debug, Args)]
struct PageArgs {
    /// The output of `run --json`, or `run.json` of a report.
    run: PathBuf,
    /// Where the page, the CSV and the JSON go.
    #[arg(long, value_name = "DIR")]
    report: PathBuf,
}

/// Which client.
#[derive(Debug, Subcommand)]
enum Load {
    /// libblkio, a client that is not ours.
    Blkio(load::LoadArgs),
    /// Our own driver half.
    Driver(load::LoadArgs),
    /// A Xen disk, by our own front-end in a domain of a simulated Xen.
    Xenblk(load::xenblk::XenBlkLoadArgs),
    /// That Xen, until the standard input ends.
    Xen(load::xenblk::XenArgs),
    /// Frames through a vhost-user-net back-end, by our own driver half.
    Net(load::net::NetLoadArgs),
    /// Who reads the bytes of a frame that leaves by AF_XDP, and when.
    Pages(load::pages::PagesArgs),
    /// Frames from one guest to another.
    Vm(load::vm::VmLoadArgs),
    /// One of several guests of a back-end, until it is told to end.
    Guest(load::guest::GuestArgs),
    /// Guests that are connected and idle, until the standard input ends.
    Crowd(load::crowd::CrowdArgs),
    /// Join a tap to a vhost-user-net back-end, until the standard input ends.
    Join(load::join::JoinArgs),
    /// Join two taps with nothing between them, until the standard input ends.
    Relay(load::join::RelayArgs),
    /// Write small frames to a tap.
    TapWrite(load::tap::TapWriteArgs),
    /// Time small frames through the two taps of a bridge.
    TapCosts,
    /// Requests and responses over TCP.
    Rr(load::rr::RrArgs),
    /// Requests and responses over TCP, each on a connection of its own.
    Crr(load::rr::RrArgs),
    /// Answers them.
    RrServer(load::rr::RrServerArgs),
    /// One side of TCP streams, which run and rest as they are told.
    Stream(load::stream::StreamArgs),
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("manyring-bench: {message}");
            ExitCode::FAILURE
        }
    }
}

/// The commands of [`BenchCli`], and one for each scenario of the table.
fn command() -> clap::Command {
    registry::ALL.iter().fold(BenchCli::command(), |all, one| all.subcommand(one.command()))
}

fn run() -> Result<(), String> {
    let matches = command().get_matches();
    if let Some((name, options)) = matches.subcommand()
        && let Some(scenario) = registry::find(name)
    {
        progress::on_signals()?;
        return registry::run_alone(scenario, options);
    }
    match BenchCli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit()).command {
        Command::Load(load) => run_load(load),
        Command::List => {
            print!("{}", registry::list());
            Ok(())
        }
        Command::Run(args) => {
            progress::on_signals()?;
            run::run(&args)
        }
        Command::Page(args) => files::write_run(&args.report, &RunDocument::read(&args.run)?),
        Command::Readme { run } => {
            let figures = readme::figures(&RunDocument::read(&run)?)?;
            println!("{}", serde_json::to_string_pretty(&figures).map_err(|e| e.to_string())?);
            Ok(())
        }
        Command::Compare(args) => compare(&args),
    }
}

fn compare(args: &CompareArgs) -> Result<(), String> {
    let (before, after) = (RunDocument::read(&args.before)?, RunDocument::read(&args.after)?);
    let comparison = report::compare::Comparison::new(&before, &after);
    print!("{}", comparison.text());
    args.report
        .as_ref()
        .map_or(Ok(()), |folder| files::write_comparison(folder, (&before, &after), &comparison))
}

fn run_load(load: Load) -> Result<(), String> {
    let failed = |error: load::LoadError| error.to_string();
    match load {
        Load::Blkio(args) => load::blkio::run(&args.options()).map_err(failed)?.print(args.json),
        Load::Driver(args) => load::driver::run(&args.options()).map_err(failed)?.print(args.json),
        Load::Xenblk(args) => load::xenblk::run(&args).map_err(failed)?.print(args.is_json()),
        Load::Xen(args) => load::xenblk::xen(&args).map_err(failed),
        Load::Net(args) => load::net::run(&args).map_err(failed)?.print(args.json),
        Load::Vm(args) => load::vm::run(&args).map_err(failed)?.print(args.json),
        Load::Pages(args) => load::print_json(&load::pages::run(&args).map_err(failed)?),
        Load::Guest(args) => load::print_json(&load::guest::run(&args).map_err(failed)?),
        Load::Crowd(args) => load::crowd::run(&args).map_err(failed),
        Load::Join(args) => load::print_json(&load::join::join(&args).map_err(failed)?),
        Load::Relay(args) => load::print_json(&load::join::relay(&args).map_err(failed)?),
        Load::TapWrite(args) => load::tap::run(&args).map_err(failed)?.print(true),
        Load::TapCosts => load::print_json(&load::tap::costs().map_err(failed)?),
        Load::Rr(args) => load::print_json(&load::rr::client(&args).map_err(failed)?),
        Load::Crr(args) => load::print_json(&load::rr::crr::client(&args).map_err(failed)?),
        Load::RrServer(args) => load::rr::server(&args).map_err(failed),
        Load::Stream(args) => load::stream::run(&args).map_err(failed),
    }
}

#[cfg(test)]
#[path = "../../manyring/tests/start/documents.rs"]
mod documents;

#[cfg(test)]
mod tests {
    use super::documents::{commands, fragments, program};

    #[test]
    fn the_commands_agree_with_each_other() {
        super::command().debug_assert();
    }

    #[test]
    fn every_command_line_of_the_guides_is_understood() {
        let mut count = 0;
        for fragment in fragments().iter().filter(|fragment| fragment.language == "sh") {
            let ours = commands(&fragment.text).into_iter();
            for words in ours.filter(|words| program(words) == "manyring-bench") {
                let parsed = super::command().try_get_matches_from(&words);
                parsed.unwrap_or_else(|error| panic!("{}: {words:?}: {error}", fragment.at));
                count += 1;
            }
        }
        assert!(count > 5, "{count} commands");
    }
}
