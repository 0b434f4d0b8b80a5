//! The command line: options, help and what they mean as a configuration.

mod ask;
mod net;

pub(crate) use ask::{
    AddArgs, AddedDevice, AnnounceArgs, CONTROL, LinkArgs, LinkState, MtuArgs, ReloadArgs,
    RemoveArgs, ResizeArgs, SetArgs, StatsArgs, TopArgs,
};
pub(crate) use net::NetArgs;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Args, Parser, Subcommand, ValueEnum};
use manyring_config::numbers;
use manyring_config::plan::Sandbox;
use manyring_config::tables::{
    RawBlk, RawConfig, RawDaemon, RawLimit, RawLimitOption, RawSize, RawSocket, RawXenBlk,
};
use manyring_serve::log::LogFormat;
use std::path::PathBuf;

/// The text that `--help` prints below the options.
const BEGIN: &str = "Begin with a disk in memory, and ask what QEMU must be told to use it:
  manyring blk --socket-path disk.sock --memory 1G --control control.sock
  manyring snippet qemu --socket-path disk.sock
`manyring COMMAND --help` explains the options of a command; the guides are in docs/guide.";

/// Serve disks and network devices of virtual machines, over vhost-user (and Xen's blkif).
#[derive(Debug, Parser)]
#[command(name = "manyring", version, disable_help_subcommand = true, after_help = BEGIN)]
pub(crate) struct Cli {
    /// Log messages of this level and of the more severe ones: error, warn, info, debug or trace.
    #[arg(long, global = true, default_value = "info", value_name = "LEVEL", display_order = 900)]
    pub(crate) log_level: String,
    /// The format of the log lines.
    #[arg(long, global = true, value_enum, default_value_t = LogFormat::Text, display_order = 900)]
    pub(crate) log_format: LogFormat,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Serve one block device over vhost-user.
    Blk(Box<BlkArgs>),
    /// Serve one network device over vhost-user.
    Net(Box<NetArgs>),
    /// Serve the disks of Xen guests that appear in xenstore.
    XenBlk(Box<XenBlkArgs>),
    /// Serve all devices of a configuration file.
    Run(RunArgs),
    /// Show counters and latencies of the queues of a running daemon, and the state of its workers.
    Stats(StatsArgs),
    /// Watch devices, queues and workers of a running daemon on the whole terminal.
    Top(TopArgs),
    /// Add a device to a running daemon, or change a device that was added so.
    Add(AddArgs),
    /// Remove a device from a running daemon.
    Remove(RemoveArgs),
    /// Change limits or the MTU of a device at once, while its guest runs.
    Set(SetArgs),
    /// Let a running daemon read its configuration file again and apply the differences.
    Reload(ReloadArgs),
    /// Change the size of a disk while its guest runs, or tell the guest its file's new size.
    Resize(ResizeArgs),
    /// Set the link of a guest's network device down or up, like unplugging its cable.
    Link(LinkArgs),
    /// Change the MTU of a network device: on the host now, in the guest at its next boot.
    Mtu(MtuArgs),
    /// Ask a guest to announce its MAC address to the network, as after a migration.
    Announce(AnnounceArgs),
    /// Serve the devices that the daemon hands over. Only the daemon itself starts this command.
    #[command(hide = true)]
    DeviceProcess(DeviceProcessArgs),
    /// Write manual pages and shell completions into a folder, to build a package.
    #[command(hide = true)]
    Pages {
        /// The folder.
        folder: PathBuf,
    },
    /// Print the options or XML that a VMM needs to use a device.
    Snippet(SnippetArgs),
}

/// `manyring device-process`
#[derive(Args, Debug)]
pub(crate) struct DeviceProcessArgs {
    /// Which rights the process gives up before it serves a guest. none: it keeps all; auto: all
    /// that this kernel can take away; seccomp: all, and it exits if the kernel cannot take one of
    /// them away.
    #[arg(long, value_enum, require_equals = true, default_value_t = Sandbox::Auto)]
    pub(crate) sandbox: Sandbox,
    /// Permit the ioctls of Xen's grant and event devices, for disks of Xen guests.
    #[arg(long)]
    pub(crate) xen: bool,
    /// The number of io_urings that the process creates, one for each worker [default: at most 16].
    #[arg(long, value_name = "N", require_equals = true)]
    pub(crate) rings: Option<usize>,
    /// Print which actions the sandbox permits to this process and which it denies, then exit.
    #[arg(long)]
    pub(crate) show: bool,
    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
}

/// `manyring snippet`
#[derive(Args, Debug)]
pub(crate) struct SnippetArgs {
    /// The program that runs the virtual machine.
    #[arg(value_enum)]
    pub(crate) vmm: Vmm,
    /// The configuration file that contains the device.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Without --config: the path of the device's socket.
    #[arg(long, value_name = "PATH", conflicts_with = "config")]
    pub(crate) socket_path: Option<PathBuf>,
    /// With --socket-path: the device is a network device, not a disk.
    #[arg(long, conflicts_with = "config")]
    pub(crate) net: bool,
    /// Queues of the disk that the guest uses, 1 to 256 [default: all that the device has; with
    /// --socket-path: 8].
    #[arg(long, value_name = "N", value_parser = parse_queues)]
    pub(crate) num_queues: Option<usize>,
    /// Queue pairs that the guest uses, 1 to 127 [default: all; with --socket-path: 1].
    #[arg(long, value_name = "N", value_parser = parse_queue_pairs)]
    pub(crate) queue_pairs: Option<usize>,
    /// For qemu: the version of QEMU for which to print the options, like 7.2 or 11.1 [default: 9.2
    /// or newer].
    #[arg(long, value_name = "VERSION")]
    pub(crate) qemu_version: Option<String>,
    /// The name of the device in the configuration file.
    pub(crate) device: Option<String>,
}

/// The program that will use the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Vmm {
    /// A command line of QEMU.
    Qemu,
    /// XML for a libvirt domain.
    Libvirt,
    /// A command line of Cloud Hypervisor.
    CloudHypervisor,
    /// A command line of crosvm.
    Crosvm,
    /// JSON for Firecracker's configuration file.
    Firecracker,
    /// A command line of User Mode Linux.
    Uml,
    /// Not a VMM: the command that starts an NBD server for other storage; DEVICE is ceph, qcow2 or
    /// s3.
    Helper,
}

/// Returns the one-line error for a wrong value of an option that takes a number, with the allowed
/// values; `None` for any other error.
pub(crate) fn bad_number(error: &clap::Error) -> Option<String> {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    if error.kind() != ErrorKind::ValueValidation {
        return None;
    }
    let option = text(ContextKind::InvalidArg)?.split([' ', '[']).next()?;
    let key = option.strip_prefix("--")?.replace('-', "_");
    let key = if key == "tap_fd" { "tap_fds" } else { &key };
    let words = numbers::words(key)?;
    Some(format!("{option}: {:?} is not {words}", text(ContextKind::InvalidValue)?))
}

fn parse_queues(text: &str) -> Result<usize, String> {
    parse_count(text, 256)
}

fn parse_queue_pairs(text: &str) -> Result<usize, String> {
    parse_count(text, 127)
}

fn parse_count(text: &str, max: usize) -> Result<usize, String> {
    match text.parse() {
        Ok(n) if (1..=max).contains(&n) => Ok(n),
        _ => Err(format!("not between 1 and {max}")),
    }
}

/// `manyring run`
#[derive(Args, Debug)]
pub(crate) struct RunArgs {
    /// The configuration file.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: PathBuf,
    /// Check the file, and the files and interfaces that it names; print what would be served;
    /// exit.
    #[arg(long)]
    pub(crate) print_plan: bool,
    /// Take over sockets, disks and guests from the running daemon with this control socket, which
    /// then exits. Device processes must serve all its devices. If the takeover fails, it
    /// continues.
    #[arg(long, value_name = "CONTROL", conflicts_with = "print_plan")]
    pub(crate) takeover: Option<PathBuf>,
}

/// Options of the process, for the commands that have no configuration file.
#[derive(Args, Debug)]
pub(crate) struct DaemonArgs {
    /// The most threads that serve queues [default: the number of CPUs that this process may use].
    #[arg(long, value_name = "N")]
    pub(crate) workers: Option<usize>,
    /// The CPUs that a worker runs on, like 0-3,8; give it once for each worker [default: any].
    #[arg(long, value_name = "CPUS")]
    pub(crate) worker_cpus: Option<Vec<String>>,
    /// Whether an idle worker polls for new requests before it sleeps. auto: while measurements
    /// show that this is faster; always; never: uses the least CPU time [default: auto].
    #[arg(long, value_name = "MODE")]
    pub(crate) polling: Option<String>,
    /// The most microseconds that a worker polls before it sleeps, 0 to 1000 [default: ten times
    /// the time that waking a thread takes on this host].
    #[arg(long, value_name = "US")]
    pub(crate) spin_us: Option<u32>,
    /// Do not use io_uring: read and write files with plain system calls.
    #[arg(long)]
    pub(crate) no_io_uring: bool,
    /// Run workers on the NUMA node of their guests' memory: auto, where the host has several
    /// nodes; off [default: auto].
    #[arg(long, value_name = "MODE")]
    pub(crate) numa: Option<String>,
    /// Create this control socket, for commands (stats, resize, ..) and HTTP requests. With add:
    /// the control socket of the running daemon.
    #[arg(long, value_name = "PATH")]
    pub(crate) control: Option<PathBuf>,
    /// Seconds to wait at the start for a socket, image or interface that another process uses; 0:
    /// exit at once [default: wait without end].
    #[arg(long, value_name = "SECONDS")]
    pub(crate) wait: Option<u32>,

    /// Serve the guest in a sandboxed child process (a device process), instead of in this process.
    #[arg(long)]
    pub(crate) isolate: bool,
}

/// `manyring blk`
#[derive(Args, Debug)]
pub(crate) struct BlkArgs {
    /// Print the features of this back-end as JSON, for management tools, and exit.
    #[arg(long)]
    pub(crate) print_capabilities: bool,
    /// Name of the device in logs, counters and the control API.
    #[arg(long, default_value = "blk0")]
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) socket: RawSocket,
    /// Serve this file or block device.
    #[arg(long, value_name = "FILE")]
    pub(crate) blk_file: Option<PathBuf>,
    /// Serve a disk of this size that stores nothing, for measuring.
    #[arg(long, value_name = "SIZE")]
    pub(crate) null: Option<RawSize>,
    /// Serve a disk of this size in memory, like 1G; its contents are lost when the process exits.
    #[arg(long, value_name = "SIZE")]
    pub(crate) memory: Option<RawSize>,
    /// Serve the disk of an NBD server: nbd[s]://HOST:PORT/NAME or nbd+unix:///NAME?socket=PATH.
    #[arg(long, value_name = "URI")]
    pub(crate) nbd: Option<String>,
    /// With --nbd, how long requests wait while the server is unreachable, like 60s, before they
    /// fail [default: forever].
    #[arg(long, value_name = "TIME")]
    pub(crate) reconnect: Option<String>,
    /// Let the guest read the disk, and not write to it.
    #[arg(long)]
    pub(crate) read_only: bool,
    /// Bypass the host's page cache (O_DIRECT).
    #[arg(long)]
    pub(crate) direct: bool,
    /// For live migration: lock the file only while a guest uses the disk, so that the daemon at
    /// the destination can open the file, too.
    #[arg(long)]
    pub(crate) lock_with_rings: bool,
    /// raw: serve the file as it is, even if it looks like an image of another format (qcow2, ..).
    #[arg(long, value_name = "FORMAT")]
    pub(crate) format: Option<String>,
    /// The sector size that the guest sees, 512 or 4096 bytes [default: 512, but 4096 for a block
    /// device that has such sectors itself].
    #[arg(long, value_name = "BYTES")]
    pub(crate) logical_block_size: Option<u32>,
    /// The most queues that the guest may use, 1 to 256; best is one for each CPU of the guest
    /// [default: 8].
    #[arg(long, value_name = "N")]
    pub(crate) num_queues: Option<usize>,
    /// The ring size that you set in the VMM, a power of two from 4 to 1024: the longest request
    /// that the guest is offered fits such a ring [default: 128].
    #[arg(long, value_name = "N")]
    pub(crate) queue_size: Option<u16>,
    /// Pin queues to worker threads: 1,2 keeps queue 0 on worker 1, and queue 1 on worker 2
    /// [default: queues move to workers on idle CPUs].
    #[arg(long, value_name = "N", value_delimiter = ',')]
    pub(crate) queue_workers: Option<Vec<usize>>,
    /// Send fewer interrupts to the guest: off, or COUNT/TIMEus. 32/100us delays an interrupt until
    /// 32 requests are done, but by at most 100 microseconds [default: off].
    #[arg(long, value_name = "MODE")]
    pub(crate) moderation: Option<String>,
    /// The serial number that the guest sees, at most 20 characters [default: the name].
    #[arg(long)]
    pub(crate) serial: Option<String>,
    /// When a write is durable: after the guest's next flush (writeback), or as soon as the write
    /// completes (writethrough) [default: writeback].
    #[arg(long, value_name = "MODE")]
    pub(crate) cache: Option<String>,
    /// When the host's file system is full: let the guest's writes wait until there is space
    /// (wait), or fail them with I/O errors (report) [default: wait].
    #[arg(long, value_name = "MODE")]
    pub(crate) on_full: Option<String>,
    /// Limits per second: read_iops, write_iops and iops (requests), read_bps, write_bps and bps
    /// (bytes), burst_ms; separate several with commas, like iops=5000,bps=100M [default: none].
    #[arg(long, value_name = "KEY=VALUE", value_delimiter = ',')]
    pub(crate) limit: Vec<RawLimitOption>,
    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
}

/// `manyring xen-blk`
#[derive(Args, Debug)]
pub(crate) struct XenBlkArgs {
    #[command(flatten)]
    pub(crate) xen_blk: RawXenBlk,
    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
}

impl From<DaemonArgs> for RawDaemon {
    fn from(args: DaemonArgs) -> Self {
        Self {
            workers: args.workers,
            worker_cpus: args.worker_cpus,
            polling: args.polling,
            spin_us: args.spin_us,
            io_uring: args.no_io_uring.then_some(false),
            numa: args.numa,
            control: args.control,
            wait: args.wait,
            domains: args.isolate.then(|| "device".to_owned()),
            ..Self::default()
        }
    }
}

impl From<BlkArgs> for RawConfig {
    fn from(args: BlkArgs) -> Self {
        let blk = RawBlk {
            file: args.blk_file,
            null: args.null,
            memory: args.memory,
            nbd: args.nbd,
            reconnect: args.reconnect,
            read_only: args.read_only,
            direct: args.direct,
            lock_with_rings: args.lock_with_rings,
            format: args.format,
            logical_block_size: args.logical_block_size,
            num_queues: args.num_queues,
            queue_workers: args.queue_workers,
            moderation: args.moderation,
            queue_size: args.queue_size,
            serial: args.serial,
            cache: args.cache,
            on_full: args.on_full,
            limit: RawLimit::of_options(args.limit),
            ..RawBlk::new(args.name, args.socket)
        };
        Self { daemon: args.daemon.into(), blk: vec![blk], ..Self::default() }
    }
}

impl From<XenBlkArgs> for RawConfig {
    fn from(args: XenBlkArgs) -> Self {
        Self { daemon: args.daemon.into(), xen_blk: vec![args.xen_blk], ..Self::default() }
    }
}

/// The output of `manyring blk --print-capabilities`.
pub(crate) const BLK_CAPABILITIES: &str =
    "{\"type\":\"block\",\"features\":[\"read-only\",\"blk-file\"]}\n";

/// The output of `manyring net --print-capabilities`. QEMU's convention for back-end programs
/// defines no features of network back-ends.
pub(crate) const NET_CAPABILITIES: &str = "{\"type\":\"net\"}\n";
