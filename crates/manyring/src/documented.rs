//! Entry points for tests of the documents: each command line and each request body in README and
//! the guides is parsed and planned as by the program, and not carried out.

use crate::cli::{AddedDevice, Cli, Command};
use clap::Parser;
use manyring_config::plan::Source;
use manyring_config::tables::RawConfig;
use manyring_config::{self, Plan};
use manyring_supervisor::model::Keys;
use std::ffi::OsString;

/// Checks a command line, with the program's name as the first word: parses the options, and plans
/// the configuration that they stand for.
///
/// # Errors
/// The message that the program would print.
pub fn command_line(words: Vec<OsString>) -> Result<(), String> {
    let cli = Cli::try_parse_from(crate::only_capabilities(crate::with_command(words)));
    let raw: RawConfig = match cli.map_err(|error| error.to_string())?.command {
        Command::Blk(args) if args.print_capabilities => return Ok(()),
        Command::Net(args) if args.print_capabilities => return Ok(()),
        Command::Blk(args) => (*args).into(),
        Command::Net(args) => (*args).into(),
        Command::XenBlk(args) => (*args).into(),
        Command::Add(args) => match args.device {
            AddedDevice::Blk(args) => (*args).into(),
            AddedDevice::Net(args) => (*args).into(),
        },
        Command::Snippet(args) if args.config.is_none() => {
            return crate::snippet::text(&args).map(drop);
        }
        _ => return Ok(()),
    };
    Plan::new(raw, Source::CommandLine).map(drop).map_err(|error| error.to_string())
}

/// Checks the body of `PUT /v1/devices/{name}`.
///
/// # Errors
/// The message that the answer would have.
pub fn device(name: &str, body: &str) -> Result<(), String> {
    manyring_config::device(name, body).map(drop)
}

/// Checks the body of `PATCH /v1/devices/{name}`: an object of keys.
///
/// # Errors
/// The message that the answer would have.
pub fn keys(body: &str) -> Result<(), String> {
    serde_json::from_str::<Keys>(body).map(drop).map_err(|error| error.to_string())
}
