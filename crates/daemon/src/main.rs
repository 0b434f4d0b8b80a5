//! The program `manyring`: config, control API, metrics, placement. Touches no packet.
#![deny(unsafe_code)]

mod assemble;
mod cli;
mod config;
mod fds;
mod log;

use clap::Parser;
use cli::{Cli, Command};
use config::plan::Plan;
use config::raw::RawConfig;
use std::process::ExitCode;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

fn main() -> ExitCode {
    match run(Cli::parse_from(arguments())) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("manyring: {message}");
            ExitCode::FAILURE
        }
    }
}

/// The arguments; installed as `vhost-user-blk` we are `manyring blk`.
fn arguments() -> Vec<std::ffi::OsString> {
    let mut arguments: Vec<_> = std::env::args_os().collect();
    let name = arguments.first().map(std::path::Path::new).and_then(std::path::Path::file_name);
    if name.is_some_and(|n| n == "vhost-user-blk") {
        arguments.insert(1, "blk".into());
    }
    arguments
}

fn run(cli: Cli) -> Result<(), String> {
    log::start(&cli.log_level, cli.log_format)?;
    match cli.command {
        Command::Blk(args) if args.print_capabilities => {
            println!("{}", cli::BLK_CAPABILITIES);
            Ok(())
        }
        Command::Blk(args) => serve(&plan((*args).into())?),
        Command::Run(args) => {
            let path = args.config.display();
            let text = std::fs::read_to_string(&args.config)
                .map_err(|error| format!("--config: cannot read {path}: {error}"))?;
            let raw = toml::from_str(&text).map_err(|error| format!("{path}: {error}"))?;
            let plan = plan(raw).map_err(|error| format!("{path}: {error}"))?;
            if args.print_plan {
                let text = serde_json::to_string_pretty(&plan).map_err(|e| e.to_string())?;
                println!("{text}");
                return Ok(());
            }
            serve(&plan)
        }
    }
}

fn plan(raw: RawConfig) -> Result<Plan, String> {
    Plan::new(raw).map_err(|error| error.to_string())
}

/// Puts the parts together and serves until a signal comes.
fn serve(plan: &Plan) -> Result<(), String> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| format!("cannot start: {error}"))?;
    runtime.block_on(async {
        let mut house = assemble::House::new(plan).map_err(|error| error.to_string())?;
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
        let served = tokio::select! {
            served = house.serve(&stop) => served,
            () = signals => Ok(()),
        };
        house.pool.quit();
        served.map_err(|error| error.to_string())
    })
}
