//! The program `manyring`: config, control API, metrics, placement. Touches no packet.
//!
//! A configuration is read ([`config`]), put together (`assemble`) and served until a signal comes;
//! `control` and `metrics` show what it does, `log` says it. [`run`] is the whole program.
#![deny(unsafe_code)]

mod ask;
mod assemble;
mod cli;
pub mod config;
mod control;
mod fds;
mod log;
mod metrics;
mod snippet;
mod stats;

use clap::Parser;
use cli::{Cli, Command};
use config::Plan;
use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;
use tokio::runtime::Runtime;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

/// Longest wait for the workers at the end; a host call that hangs must not keep the process.
const QUIT_TIMEOUT: Duration = Duration::from_millis(300);

/// Runs the program with its arguments, the first of which is its own name.
#[must_use]
pub fn run(arguments: Vec<OsString>) -> ExitCode {
    match obey(Cli::parse_from(only_capabilities(with_command(arguments)))) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("manyring: {message}");
            ExitCode::FAILURE
        }
    }
}

/// Installed as `vhost-user-blk` we are `manyring blk`, as `vhost-user-net` `manyring net`.
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

/// Asked for its capabilities, a vhost-user back-end ignores every other option and argument, also
/// those that it does not know (QEMU, "Backend program conventions").
fn only_capabilities(arguments: Vec<OsString>) -> Vec<OsString> {
    const ASKED: &str = "--print-capabilities";
    let is_asked = arguments.iter().skip(1).any(|argument| argument == ASKED);
    let command = arguments.iter().skip(1).find(|a| *a == "blk" || *a == "net");
    match (is_asked, arguments.first(), command) {
        (true, Some(name), Some(command)) => vec![name.clone(), command.clone(), ASKED.into()],
        _ => arguments,
    }
}

fn obey(cli: Cli) -> Result<(), String> {
    log::start(&cli.log_level, cli.log_format)?;
    match cli.command {
        Command::Blk(args) if args.print_capabilities => {
            println!("{}", cli::BLK_CAPABILITIES);
            Ok(())
        }
        Command::Blk(args) => serve(&Plan::new((*args).into()).map_err(|e| e.to_string())?),
        Command::Net(args) if args.print_capabilities => {
            println!("{}", cli::NET_CAPABILITIES);
            Ok(())
        }
        Command::Net(args) => serve(&Plan::new((*args).into()).map_err(|e| e.to_string())?),
        Command::Run(args) => {
            let plan = config::read(&args.config)?;
            if args.print_plan {
                let text = serde_json::to_string_pretty(&plan).map_err(|e| e.to_string())?;
                println!("{text}");
                return Ok(());
            }
            serve(&plan)
        }
        Command::Stats(args) => runtime()?.block_on(stats::show(&args)),
        Command::Resize(args) => runtime()?.block_on(ask::resize(&args)),
        Command::Link(args) => runtime()?.block_on(ask::link(&args)),
        Command::Mtu(args) => runtime()?.block_on(ask::mtu(&args)),
        Command::Announce(args) => runtime()?.block_on(ask::announce(&args)),
        Command::Snippet(args) => {
            print!("{}", snippet::text(&args)?);
            Ok(())
        }
    }
}

fn runtime() -> Result<Runtime, String> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| format!("cannot start: {error}"))
}

/// Puts the parts together and serves until a signal comes.
fn serve(plan: &Plan) -> Result<(), String> {
    let runtime = runtime()?;
    let served = runtime.block_on(async {
        let mut house = assemble::House::new(plan).map_err(|error| error.to_string())?;
        let control = plan.daemon.control.as_deref().map(control::bind).transpose()?;
        let (stop_sender, stop) = watch::channel(false);
        let mut terminate = signal(SignalKind::terminate()).map_err(|e| e.to_string())?;
        let mut interrupt = signal(SignalKind::interrupt()).map_err(|e| e.to_string())?;
        let signals = async {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            tracing::info!("stopping");
            stop_sender.send_replace(true);
            std::future::pending::<()>().await;
        };
        let state = control::State::new(&house);
        let served = tokio::select! {
            served = house.serve(&stop) => served,
            () = control::serve(control, state) => Ok(()),
            () = signals => Ok(()),
        };
        let pool = house.pool.clone();
        let quit = tokio::task::spawn_blocking(move || pool.quit());
        if tokio::time::timeout(QUIT_TIMEOUT, quit).await.is_err() {
            tracing::warn!("a worker hangs in a host call: the process ends without it");
        }
        served.map_err(|error| error.to_string())
    });
    // A host call that hangs in the blocking pool must not keep us either.
    runtime.shutdown_background();
    served
}
