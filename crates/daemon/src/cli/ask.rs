//! Options of the commands that ask a running daemon.

use super::{BlkArgs, NetArgs};
use clap::{Args, Subcommand, ValueEnum};
use std::path::PathBuf;

/// `manyring stats`
#[derive(Args, Debug)]
pub(crate) struct StatsArgs {
    /// The daemon's control socket.
    #[arg(long, value_name = "PATH")]
    pub(crate) control: PathBuf,
    /// Print JSON, one line each time with --watch.
    #[arg(long)]
    pub(crate) json: bool,
    /// Show every SECONDS seconds what has happened since the last time [default: 1].
    #[arg(
        long,
        value_name = "SECONDS",
        num_args = 0..=1,
        default_missing_value = "1",
        value_parser = clap::value_parser!(u64).range(1..=86400)
    )]
    pub(crate) watch: Option<u64>,
    /// Only this device.
    pub(crate) device: Option<String>,
}

/// `manyring top`
#[derive(Args, Debug)]
pub(crate) struct TopArgs {
    /// The daemon's control socket.
    #[arg(long, value_name = "PATH")]
    pub(crate) control: PathBuf,
    /// Seconds between two looks, 1 to 60.
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 1,
        value_parser = clap::value_parser!(u64).range(1..=60)
    )]
    pub(crate) interval: u64,
}

/// `manyring add`
#[derive(Args, Debug)]
pub(crate) struct AddArgs {
    #[command(subcommand)]
    pub(crate) device: AddedDevice,
}

/// What is added, with the options of the command that would serve it alone.
#[derive(Debug, Subcommand)]
pub(crate) enum AddedDevice {
    /// A block device.
    Blk(Box<BlkArgs>),
    /// A network device.
    Net(Box<NetArgs>),
}

/// `manyring set`
#[derive(Args, Debug)]
pub(crate) struct SetArgs {
    /// The daemon's control socket.
    #[arg(long, value_name = "PATH")]
    pub(crate) control: PathBuf,
    /// The device.
    pub(crate) device: String,
    /// Keys with their new values, like mtu=9000.
    #[arg(required = true, value_name = "KEY=VALUE")]
    pub(crate) keys: Vec<String>,
}

/// `manyring remove`
#[derive(Args, Debug)]
pub(crate) struct RemoveArgs {
    /// The daemon's control socket.
    #[arg(long, value_name = "PATH")]
    pub(crate) control: PathBuf,
    /// The device.
    pub(crate) device: String,
    /// Also if a front-end uses it, whose requests then find nobody.
    #[arg(long)]
    pub(crate) force: bool,
}

/// `manyring reload`
#[derive(Args, Debug)]
pub(crate) struct ReloadArgs {
    /// The daemon's control socket.
    #[arg(long, value_name = "PATH")]
    pub(crate) control: PathBuf,
    /// Only print what would change.
    #[arg(long)]
    pub(crate) dry_run: bool,
}

/// `manyring resize`
#[derive(Args, Debug)]
pub(crate) struct ResizeArgs {
    /// The daemon's control socket.
    #[arg(long, value_name = "PATH")]
    pub(crate) control: PathBuf,
    /// The device.
    pub(crate) device: String,
    /// The new size; without it the host's file or device is measured again.
    pub(crate) size: Option<String>,
    /// Allow a smaller size, and lose what is behind it.
    #[arg(long, requires = "size")]
    pub(crate) shrink: bool,
}

/// `manyring link`
#[derive(Args, Debug)]
pub(crate) struct LinkArgs {
    /// The daemon's control socket.
    #[arg(long, value_name = "PATH")]
    pub(crate) control: PathBuf,
    /// The device.
    pub(crate) device: String,
    /// What the link shall be.
    #[arg(value_enum)]
    pub(crate) state: LinkState,
}

/// Whether a link is up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LinkState {
    /// Packets pass.
    Up,
    /// No packet passes, and the guest sees it.
    Down,
}

/// `manyring mtu`
#[derive(Args, Debug)]
pub(crate) struct MtuArgs {
    /// The daemon's control socket.
    #[arg(long, value_name = "PATH")]
    pub(crate) control: PathBuf,
    /// The device.
    pub(crate) device: String,
    /// Bytes of payload of one frame, 68 to 65535.
    pub(crate) mtu: u64,
}

/// `manyring announce`
#[derive(Args, Debug)]
pub(crate) struct AnnounceArgs {
    /// The daemon's control socket.
    #[arg(long, value_name = "PATH")]
    pub(crate) control: PathBuf,
    /// The device.
    pub(crate) device: String,
}
