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

/// The text below the help of the program.
const BEGIN: &str = "Begin with a disk in memory, and ask what QEMU must be told to use it:
  manyring blk --socket-path disk.sock --memory 1G --control control.sock
  manyring snippet qemu --socket-path disk.sock
`manyring COMMAND --help` explains the options of a command; the guides are in docs/guide.";

/// Serve disks and network devices of virtual machines, over vhost-user (and Xen's blkif).
#[derive(Debug, Parser)]
#[command(name = "manyring", version, disable_help_subcommand = true, after_help = BEGIN)]
pub(crate) struct Cli {
    /// Log this and what is worse: error, warn, info, debug or trace.
    #[arg(long, global = true, default_value = "info", value_name = "LEVEL", display_order = 900)]
    pub(crate) log_level: String,
    /// The form of the log's lines.
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
    /// Show counters and latencies of a running daemon's queues, and its workers.
    Stats(StatsArgs),
    /// Watch devices, queues and workers of a running daemon on the whole terminal.
    Top(TopArgs),
    /// Add a device to a running daemon, or change one that was added.
    Add(AddArgs),
    /// Remove a device from a running daemon.
    Remove(RemoveArgs),
    /// Change limits or the MTU of a device at once, while its guest runs.
    Set(SetArgs),
    /// Let a running daemon read its configuration file again and carry out what has changed.
    Reload(ReloadArgs),
    /// Change the size of a disk while its guest runs, or tell the guest its file's new size.
    Resize(ResizeArgs),
    /// Unplug the cable of a guest's network device, or plug it in.
    Link(LinkArgs),
    /// Change the MTU of a network device: on the host now, in the guest at its next boot.
    Mtu(MtuArgs),
    /// Let a guest announce its address to its network, as after it has moved to another port.
    Announce(AnnounceArgs),
    /// Serve what the daemon hands over: it starts this itself.
    #[command(hide = true)]
    DeviceProcess(DeviceProcessArgs),
    /// Write manual pages and completions of shells into a folder: packages are made with this.
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
    /// Which rights the process gives up before it serves anybody: none; auto: all that this kernel
    /// can take from it; seccomp: all, and it ends if the kernel cannot take one of them.
    #[arg(long, value_enum, require_equals = true, default_value_t = Sandbox::Auto)]
    pub(crate) sandbox: Sandbox,
    /// The process keeps the requests by which the disks of Xen guests are served.
    #[arg(long)]
    pub(crate) xen: bool,
    /// The number of io_urings that the process makes, one for each worker [default: 16 at most].
    #[arg(long, value_name = "N", require_equals = true)]
    pub(crate) rings: Option<usize>,
    /// Try what it has given up, and end.
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
    /// The configuration file that has the device.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Instead of --config: the device's socket.
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
    /// For qemu: the version of the QEMU that is to run the line, as 7.2 or 11.1 [default: 9.2 or
    /// any newer one].
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
    /// No VMM: the NBD server of a disk that lies elsewhere; DEVICE is ceph, qcow2 or s3.
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
    /// Check the file and what it names on this host, print what would be served, and end.
    #[arg(long)]
    pub(crate) print_plan: bool,
    /// Take sockets, disks and guests over from the daemon that listens at this control socket,
    /// which ends then; each of its devices must be in a device process. If that fails, it goes on.
    #[arg(long, value_name = "CONTROL", conflicts_with = "print_plan")]
    pub(crate) takeover: Option<PathBuf>,
}

/// Options of the process, for the commands that have no configuration file.
#[derive(Args, Debug)]
pub(crate) struct DaemonArgs {
    /// Threads that serve queues, at most [default: as many as CPUs that this process may use].
    #[arg(long, value_name = "N")]
    pub(crate) workers: Option<usize>,
    /// The CPUs that a worker runs on, like 0-3,8; give it once for each worker [default: any].
    #[arg(long, value_name = "CPUS")]
    pub(crate) worker_cpus: Option<Vec<String>>,
    /// Whether a worker without requests polls for new ones before it sleeps. auto: where that has
    /// proved to be faster; always; never: least CPU time [default: auto].
    #[arg(long, value_name = "MODE")]
    pub(crate) polling: Option<String>,
    /// Microseconds that a worker polls before it sleeps, at most, 0 to 1000 [default: ten times
    /// what waking a thread costs on this host].
    #[arg(long, value_name = "US")]
    pub(crate) spin_us: Option<u32>,
    /// Read and write files by plain system calls, without io_uring.
    #[arg(long)]
    pub(crate) no_io_uring: bool,
    /// Listen for commands (stats, resize, ..) and HTTP requests at this socket; with add: ask the
    /// daemon that listens there.
    #[arg(long, value_name = "PATH")]
    pub(crate) control: Option<PathBuf>,
    /// Seconds that a start waits for a socket, image or interface that another process holds; 0:
    /// end at once [default: for ever].
    #[arg(long, value_name = "SECONDS")]
    pub(crate) wait: Option<u32>,

    /// Serve the guest from a process of its own, without rights, which this one starts (a device
    /// process).
    #[arg(long)]
    pub(crate) isolate: bool,
}

/// `manyring blk`
#[derive(Args, Debug)]
pub(crate) struct BlkArgs {
    /// Print the features of this back-end as JSON (for tools that look for one), and end.
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
    /// Serve a disk of this size in memory, like 1G; its content is lost at the end.
    #[arg(long, value_name = "SIZE")]
    pub(crate) memory: Option<RawSize>,
    /// Serve the disk of an NBD server: nbd[s]://HOST:PORT/NAME or nbd+unix:///NAME?socket=PATH.
    #[arg(long, value_name = "URI")]
    pub(crate) nbd: Option<String>,
    /// How long requests wait for that server when it is gone, like 60s, before they fail
    /// [default: forever].
    #[arg(long, value_name = "TIME")]
    pub(crate) reconnect: Option<String>,
    /// The guest may not write.
    #[arg(long)]
    pub(crate) read_only: bool,
    /// Read and write past the host's page cache (O_DIRECT).
    #[arg(long)]
    pub(crate) direct: bool,
    /// For live migration: hold the file's lock only while a guest uses the disk, so that another
    /// daemon can have the file open too.
    #[arg(long)]
    pub(crate) lock_with_rings: bool,
    /// raw: serve the file as it is, even if it looks like an image of another format (qcow2, ..).
    #[arg(long, value_name = "FORMAT")]
    pub(crate) format: Option<String>,
    /// The sector size that the guest sees, 512 or 4096 bytes [default: 512, but 4096 for a block
    /// device that has such sectors itself].
    #[arg(long, value_name = "BYTES")]
    pub(crate) logical_block_size: Option<u32>,
    /// Queues that the guest may use, 1 to 256: best one for each of its CPUs [default: 8].
    #[arg(long, value_name = "N")]
    pub(crate) num_queues: Option<usize>,
    /// Ring size for which the longest request is chosen, a power of two from 4 to 1024. The VMM
    /// chooses the real size [default: 128].
    #[arg(long, value_name = "N")]
    pub(crate) queue_size: Option<u16>,
    /// Bind queues to workers, by number: 1,2 keeps queue 0 on worker 1, and queue 1 on worker 2
    /// [default: queues move to workers on idle CPUs].
    #[arg(long, value_name = "N", value_delimiter = ',')]
    pub(crate) queue_workers: Option<Vec<usize>>,
    /// Send fewer interrupts to the guest: off, or like 32/100us, which sends one when 32 answers
    /// are there or 100 us have passed [default: off].
    #[arg(long, value_name = "MODE")]
    pub(crate) moderation: Option<String>,
    /// The serial number that the guest sees, at most 20 characters [default: the name].
    #[arg(long)]
    pub(crate) serial: Option<String>,
    /// When a write is durable: after the guest's flush (writeback), or when it is answered
    /// (writethrough) [default: writeback].
    #[arg(long, value_name = "MODE")]
    pub(crate) cache: Option<String>,
    /// When the host's disk is full: let the guest's writes wait until there is room (wait), or
    /// give it I/O errors (report) [default: wait].
    #[arg(long, value_name = "MODE")]
    pub(crate) on_full: Option<String>,
    /// Limits for each second: read_iops, write_iops, iops, read_bps, write_bps, bps (bytes), and
    /// burst_ms; several with commas, like iops=5000,bps=100M [default: none].
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
