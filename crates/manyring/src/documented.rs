//! Entry points for what documents show: read and planned as the program would, and not carried
//! out. Tests take each fragment of README and of the guides through them.

use crate::cli::{AddedDevice, Cli, Command};
use clap::Parser;
use manyring_config::plan::Source;
use manyring_config::raw::RawConfig;
use manyring_config::{self, Plan};
use manyring_supervisor::model::Keys;
use std::ffi::OsString;

/// Checks a command line, the program's name first: its options, and what they mean together.
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
