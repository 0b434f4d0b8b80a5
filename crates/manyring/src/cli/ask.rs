//! Options of the commands that talk to a running daemon.

use super::{BlkArgs, NetArgs};
use clap::{Args, Subcommand, ValueEnum};
use std::path::PathBuf;

/// The default of `--control`: the control socket of the packaged service.
pub(crate) const CONTROL: &str = "/run/manyring/control.sock";

/// `manyring stats`
#[derive(Args, Debug)]
pub(crate) struct StatsArgs {
    /// The control socket of the running daemon.
    #[arg(long, value_name = "PATH", default_value = CONTROL)]
    pub(crate) control: PathBuf,
    /// Print JSON; with --watch, one line for each interval.
    #[arg(long)]
    pub(crate) json: bool,
    /// Repeat every SECONDS seconds, showing the changes since the last output [default: 1].
    #[arg(
        long,
        value_name = "SECONDS",
        num_args = 0..=1,
        default_missing_value = "1",
        value_parser = clap::value_parser!(u64).range(1..=86400)
    )]
    pub(crate) watch: Option<u64>,
    /// Show only this device.
    pub(crate) device: Option<String>,
}

/// `manyring top`
#[derive(Args, Debug)]
pub(crate) struct TopArgs {
    /// The control socket of the running daemon.
    #[arg(long, value_name = "PATH", default_value = CONTROL)]
    pub(crate) control: PathBuf,
    /// Seconds between two updates, 1 to 60.
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
    /// The control socket of the running daemon.
    #[arg(long, value_name = "PATH", default_value = CONTROL)]
    pub(crate) control: PathBuf,
    /// The name of the device.
    pub(crate) device: String,
    /// Keys with their new values, like mtu=9000.
    #[arg(required = true, value_name = "KEY=VALUE")]
    pub(crate) keys: Vec<String>,
}

/// `manyring remove`
#[derive(Args, Debug)]
pub(crate) struct RemoveArgs {
    /// The control socket of the running daemon.
    #[arg(long, value_name = "PATH", default_value = CONTROL)]
    pub(crate) control: PathBuf,
    /// The name of the device.
    pub(crate) device: String,
    /// Remove the device even if a VMM uses it. The guest's requests are then never answered.
    #[arg(long)]
    pub(crate) force: bool,
}

/// `manyring reload`
#[derive(Args, Debug)]
pub(crate) struct ReloadArgs {
    /// The control socket of the running daemon.
    #[arg(long, value_name = "PATH", default_value = CONTROL)]
    pub(crate) control: PathBuf,
    /// Print the steps that a reload would take, and change nothing.
    #[arg(long)]
    pub(crate) dry_run: bool,
}

/// `manyring resize`
#[derive(Args, Debug)]
pub(crate) struct ResizeArgs {
    /// The control socket of the running daemon.
    #[arg(long, value_name = "PATH", default_value = CONTROL)]
    pub(crate) control: PathBuf,
    /// The name of the device.
    pub(crate) device: String,
    /// The new size, like 20G. Without it, the guest is told the size that the file or block device
    /// has now.
    pub(crate) size: Option<String>,
    /// Allow a smaller size: the data beyond it is lost.
    #[arg(long)]
    pub(crate) shrink: bool,
}

/// `manyring link`
#[derive(Args, Debug)]
pub(crate) struct LinkArgs {
    /// The control socket of the running daemon.
    #[arg(long, value_name = "PATH", default_value = CONTROL)]
    pub(crate) control: PathBuf,
    /// The name of the device.
    pub(crate) device: String,
    /// The new state of the link.
    #[arg(value_enum)]
    pub(crate) state: LinkState,
}

/// Whether a link is up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LinkState {
    /// The guest sees a link, and packets pass.
    Up,
    /// The guest sees no link, and no packet passes.
    Down,
}

/// `manyring mtu`
#[derive(Args, Debug)]
pub(crate) struct MtuArgs {
    /// The control socket of the running daemon.
    #[arg(long, value_name = "PATH", default_value = CONTROL)]
    pub(crate) control: PathBuf,
    /// The name of the device.
    pub(crate) device: String,
    /// The new MTU in bytes, 68 to 65535.
    pub(crate) mtu: u64,
}

/// `manyring announce`: the guest, or the daemon for it, announces its MAC address to the network.
#[derive(Args, Debug)]
pub(crate) struct AnnounceArgs {
    /// The control socket of the running daemon.
    #[arg(long, value_name = "PATH", default_value = CONTROL)]
    pub(crate) control: PathBuf,
    /// The name of the device.
    pub(crate) device: String,
}
