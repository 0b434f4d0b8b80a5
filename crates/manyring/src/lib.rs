//! The program `manyring`: its command line, and the commands that talk to a running daemon.
//!
//! ```text
//! daemon.rs         blk, net, xen-blk, run: a plan -> supervisor and control; begin here
//! cli.rs, cli/      the options, one definition for the parser, the help and the manual pages
//! ask.rs            add, set, remove, resize, ..: one request to the daemon
//! stats.rs, top.rs  what the daemon shows, as tables
//! snippet.rs        the lines that a VMM needs for a device
//! pages.rs          manual pages, completions, the OpenAPI document
//! ```
//! Devices are served by `manyring_serve`, in the daemon (`daemon.rs`) or in a device process
//! (`manyring device-process`).
#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod ask;
mod cli;
mod daemon;
#[doc(hidden)]
pub mod documented;
mod pages;
mod snippet;
mod stats;
mod top;

use clap::Parser;
use cli::{Cli, Command};
use daemon::{RunFrom, look, runtime, serve};
use manyring_config as config;
use manyring_serve::output::{self, Failure, print};
use manyring_serve::{device_process, log};
use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;

/// Runs the program with its arguments, the first of which is its own name.
#[must_use]
pub fn run(arguments: Vec<OsString>) -> ExitCode {
    // Both calls must come before the first thread: the allocator's settings must hold for all
    // threads, and the sandbox restricts only the calling thread and threads that it starts later.
    manyring_backend::sys::heap::bound();
    let sandboxed = device_process::sandbox::enter(&arguments);
    if log::open().is_err() {
        // Nothing can be printed without the log's thread: the exit status is the only report.
        return ExitCode::FAILURE;
    }
    let status = match Cli::try_parse_from(only_capabilities(with_command(arguments))) {
        Ok(cli) => output::end(sandboxed.map_err(Failure::Refused).and_then(|()| handle(cli))),
        Err(error) => output::explain(&error, cli::bad_number(&error)),
    };
    log::end();
    status
}

/// Inserts the command that the program's file name implies: a program that is installed as
/// `vhost-user-blk` runs `manyring blk`, and one installed as `vhost-user-net` runs `manyring net`.
fn with_command(mut arguments: Vec<OsString>) -> Vec<OsString> {
    let name = arguments.first().map(Path::new).and_then(Path::file_name);
    let command = match name.and_then(|n| n.to_str()) {
        Some("vhost-user-blk") => "blk",
        Some("vhost-user-net") => "net",
        _ => return arguments,
    };
    arguments.insert(1, command.into());
    arguments
}

/// If `--print-capabilities` is among the arguments, drops all others: a vhost-user back-end must
/// then ignore every other option, also an unknown one (QEMU, "Backend program conventions").
fn only_capabilities(arguments: Vec<OsString>) -> Vec<OsString> {
    const ASKED: &str = "--print-capabilities";
    let is_asked = arguments.iter().skip(1).any(|argument| argument == ASKED);
    let command = arguments.iter().skip(1).find(|a| *a == "blk" || *a == "net");
    match (is_asked, arguments.first(), command) {
        (true, Some(name), Some(command)) => vec![name.clone(), command.clone(), ASKED.into()],
        _ => arguments,
    }
}

fn handle(cli: Cli) -> Result<(), Failure> {
    log::start(&cli.log_level, cli.log_format).map_err(Failure::Wrong)?;
    match cli.command {
        Command::Blk(args) if args.print_capabilities => print(cli::BLK_CAPABILITIES),
        Command::Blk(args) => serve(&config::planned((*args).into())?, None),
        Command::Net(args) if args.print_capabilities => print(cli::NET_CAPABILITIES),
        Command::Net(args) => serve(&config::planned((*args).into())?, None),
        Command::XenBlk(args) => serve(&config::planned((*args).into())?, None),
        Command::Run(args) => {
            let plan = config::read(&args.config)?;
            if args.print_plan {
                look(&plan)?;
                let text = serde_json::to_string_pretty(&plan).map_err(|e| e.to_string())?;
                return print(&(text + "\n"));
            }
            serve(&plan, Some(RunFrom { config: args.config, takeover: args.takeover }))
        }
        Command::Stats(args) => runtime()?.block_on(stats::show(&args)),
        Command::Top(args) => runtime()?.block_on(top::show(&args)),
        Command::Resize(args) => runtime()?.block_on(ask::resize(&args)),
        Command::Link(args) => runtime()?.block_on(ask::link(&args)),
        Command::Mtu(args) => runtime()?.block_on(ask::mtu(&args)),
        Command::Add(args) => runtime()?.block_on(ask::add(args.device)),
        Command::Set(args) => runtime()?.block_on(ask::set(&args)),
        Command::Remove(args) => runtime()?.block_on(ask::remove(&args)),
        Command::Reload(args) => runtime()?.block_on(ask::reload(&args)),
        Command::Announce(args) => runtime()?.block_on(ask::announce(&args)),
        Command::DeviceProcess(args) if args.show => print(&device_process::sandbox::tried()),
        Command::DeviceProcess(args) => {
            let plan = config::of_daemon(args.daemon.into())?;
            log::now_serves();
            let (runtime, process) = (runtime()?, device_process::run(&plan));
            let ended = runtime.block_on(process);
            runtime.shutdown_background();
            ended.map_err(Failure::Refused)
        }
        Command::Pages { folder } => {
            let failed = |error| Failure::Refused(format!("{}: {error}", folder.display()));
            pages::write(&folder).map_err(failed)
        }
        Command::Snippet(args) => print(&snippet::text(&args).map_err(Failure::Wrong)?),
    }
}
