//! The command line: options, help and what they mean as a configuration.

mod ask;

pub(crate) use ask::{
    AddArgs, AddedDevice, AnnounceArgs, LinkArgs, LinkState, MtuArgs, ReloadArgs, RemoveArgs,
    ResizeArgs, SetArgs, StatsArgs, TopArgs,
};

use crate::config::numbers;
use crate::config::raw::{
    RawBlk, RawConfig, RawDaemon, RawLimit, RawLimitOption, RawNet, RawSize, RawSocket, RawXenBlk,
};
use crate::rooms::sandbox::Sandbox;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::path::PathBuf;

/// Multi-queue I/O back-end for virtual machines.
#[derive(Debug, Parser)]
#[command(name = "manyring", version, about, disable_help_subcommand = true)]
pub(crate) struct Cli {
    /// What to log: error, warn, info, debug, trace.
    #[arg(long, global = true, default_value = "info", value_name = "LEVEL")]
    pub(crate) log_level: String,
    /// How to log.
    #[arg(long, global = true, value_enum, default_value_t = LogFormat::Text)]
    pub(crate) log_format: LogFormat,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// How to log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    /// A line of text.
    Text,
    /// A line of JSON.
    Json,
}

impl LogFormat {
    /// Its name as an option.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::Json => "json",
        }
    }
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Serve one block device over vhost-user.
    Blk(Box<BlkArgs>),
    /// Serve one network device over vhost-user.
    Net(Box<NetArgs>),
    /// Serve the disks of Xen guests, as the tool stack announces them.
    XenBlk(Box<XenBlkArgs>),
    /// Serve all devices of a configuration file.
    Run(RunArgs),
    /// Show what the queues of a running daemon do.
    Stats(StatsArgs),
    /// Watch devices, queues and workers of a running daemon on the whole terminal.
    Top(TopArgs),
    /// Add a device to a running daemon, or change one that was added.
    Add(AddArgs),
    /// Remove a device from a running daemon.
    Remove(RemoveArgs),
    /// Change keys of a device while its guest runs.
    Set(SetArgs),
    /// Have a running daemon read its configuration file again.
    Reload(ReloadArgs),
    /// Change the size of a disk that is served, or take the host's size anew.
    Resize(ResizeArgs),
    /// Pull the cable of a guest, or plug it in.
    Link(LinkArgs),
    /// Change the MTU of a network device: the interface's at once, the guest's when it starts it.
    Mtu(MtuArgs),
    /// Have a guest announce itself to its network.
    Announce(AnnounceArgs),
    /// Serve what the daemon hands over: it starts this itself.
    #[command(hide = true)]
    Room(RoomArgs),
    /// Write manual pages and completions of shells into a folder: packages are made with this.
    #[command(hide = true)]
    Pages {
        /// The folder.
        folder: PathBuf,
    },
    /// Print what a VMM must be told to use a device.
    Snippet(SnippetArgs),
}

/// `manyring room`
#[derive(Args, Debug)]
pub(crate) struct RoomArgs {
    /// Which rights the process gives up before it serves anybody: none; auto: all that this kernel
    /// can take from it; seccomp: all, and it ends if the kernel cannot take one of them.
    #[arg(long, value_enum, require_equals = true, default_value_t = Sandbox::Auto)]
    pub(crate) sandbox: Sandbox,
    /// Try what it has given up, and end.
    #[arg(long)]
    pub(crate) show: bool,
    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
}

/// `manyring snippet`
#[derive(Args, Debug)]
pub(crate) struct SnippetArgs {
    /// The VMM.
    #[arg(value_enum)]
    pub(crate) vmm: Vmm,
    /// Take the device from this configuration file.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Instead of --config: the device's socket.
    #[arg(long, value_name = "PATH", conflicts_with = "config")]
    pub(crate) socket_path: Option<PathBuf>,
    /// With --socket-path: it is a network device's.
    #[arg(long, conflicts_with = "config")]
    pub(crate) net: bool,
    /// Queues the guest shall have, 1 to 256 [default: all of the device's; with --socket-path: 1].
    #[arg(long, value_name = "N", value_parser = parse_queues)]
    pub(crate) num_queues: Option<usize>,
    /// Queue pairs the guest shall have, 1 to 127 [default: as above].
    #[arg(long, value_name = "N", value_parser = parse_queue_pairs)]
    pub(crate) queue_pairs: Option<usize>,
    /// The device.
    pub(crate) device: Option<String>,
}

/// Who will use the device.
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
}

/// One line for a value that an option of numbers does not take, with those that it takes.
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
    /// Print what would be done, and end.
    #[arg(long)]
    pub(crate) print_plan: bool,
}

/// Options of the process, for the commands that have no configuration file.
#[derive(Args, Debug)]
pub(crate) struct DaemonArgs {
    /// Workers at most [default: the CPUs this process may use].
    #[arg(long, value_name = "N")]
    pub(crate) workers: Option<usize>,
    /// The CPUs of a worker, like 0-3,8; once for each worker [default: all].
    #[arg(long, value_name = "CPUS")]
    pub(crate) worker_cpus: Option<Vec<String>>,
    /// Look for work before sleeping: where that is faster (auto), always or never [default: auto].
    #[arg(long, value_name = "MODE")]
    pub(crate) polling: Option<String>,
    /// Microseconds to look at most, 0 to 1000 [default: as waking a worker costs here].
    #[arg(long, value_name = "US")]
    pub(crate) spin_us: Option<u32>,
    /// Do without io_uring.
    #[arg(long)]
    pub(crate) no_io_uring: bool,
    /// Listen for control requests at this socket.
    #[arg(long, value_name = "PATH")]
    pub(crate) control: Option<PathBuf>,
    /// Seconds to wait for a socket, image or interface that another process holds; 0: end at once
    /// [default: for ever].
    #[arg(long, value_name = "SECONDS")]
    pub(crate) wait: Option<u32>,
}

/// `manyring blk`
#[derive(Args, Debug)]
pub(crate) struct BlkArgs {
    /// Print what this back-end can, as JSON, and end.
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
    /// Serve a disk that keeps nothing.
    #[arg(long, value_name = "SIZE")]
    pub(crate) null: Option<RawSize>,
    /// Serve a disk in memory.
    #[arg(long, value_name = "SIZE")]
    pub(crate) memory: Option<RawSize>,
    /// Serve the disk of an NBD server: nbd://HOST:PORT/NAME or nbd+unix:///NAME?socket=PATH.
    #[arg(long, value_name = "URI")]
    pub(crate) nbd: Option<String>,
    /// How long requests wait for that server when it is gone, like 60s, before they fail
    /// [default: forever].
    #[arg(long, value_name = "TIME")]
    pub(crate) reconnect: Option<String>,
    /// The guest may not write.
    #[arg(long)]
    pub(crate) read_only: bool,
    /// Pass the host's page cache by (O_DIRECT).
    #[arg(long)]
    pub(crate) direct: bool,
    /// Lock the file while a guest's rings run, not as long as it is open: for live migration.
    #[arg(long)]
    pub(crate) lock_with_rings: bool,
    /// raw: serve the file's bytes even if they look like a disk image of another format.
    #[arg(long, value_name = "FORMAT")]
    pub(crate) format: Option<String>,
    /// Bytes of a sector of the guest, 512 or 4096 [default: 512, but 4096 for a block device that
    /// has such sectors itself].
    #[arg(long, value_name = "BYTES")]
    pub(crate) logical_block_size: Option<u32>,
    /// Request queues, 1 to 256 [default: 8].
    #[arg(long, value_name = "N")]
    pub(crate) num_queues: Option<usize>,
    /// Entries of a ring that the limits of a request are made for [default: 128].
    #[arg(long, value_name = "N")]
    pub(crate) queue_size: Option<u16>,
    /// The worker of each queue, by its index [default: it goes where it is best served].
    #[arg(long, value_name = "N", value_delimiter = ',')]
    pub(crate) queue_workers: Option<Vec<usize>>,
    /// Hold interrupts back: off, or like 32/100us (until there are so many, or so long)
    /// [default: off].
    #[arg(long, value_name = "MODE")]
    pub(crate) moderation: Option<String>,
    /// The device id string, at most 20 characters [default: the name].
    #[arg(long)]
    pub(crate) serial: Option<String>,
    /// writeback or writethrough [default: writeback].
    #[arg(long, value_name = "MODE")]
    pub(crate) cache: Option<String>,
    /// What becomes of writes for which the host has no room: wait until there is room, or report
    /// an I/O error to the guest [default: wait].
    #[arg(long, value_name = "MODE")]
    pub(crate) on_full: Option<String>,
    /// What the disk may pass in a second: read_iops, write_iops, iops, read_bps, write_bps, bps,
    /// and burst_ms; several with commas [default: anything].
    #[arg(long, value_name = "KEY=VALUE", value_delimiter = ',')]
    pub(crate) limit: Vec<RawLimitOption>,
    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
}

/// `manyring net`
#[derive(Args, Debug)]
pub(crate) struct NetArgs {
    /// Print what this back-end can, as JSON, and end.
    #[arg(long)]
    pub(crate) print_capabilities: bool,
    /// Name of the device in logs, counters and the control API.
    #[arg(long, default_value = "net0")]
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) socket: RawSocket,
    /// Serve this tap: joined if it exists, else created.
    #[arg(long, value_name = "NAME")]
    pub(crate) tap: Option<String>,
    /// Do not create the tap.
    #[arg(long)]
    pub(crate) must_exist: bool,
    /// Serve the tap whose queues were handed in; once for each queue pair.
    #[arg(long = "tap-fd", value_name = "N", value_delimiter = ',')]
    pub(crate) tap_fds: Vec<i32>,
    /// Serve this macvtap.
    #[arg(long, value_name = "NAME")]
    pub(crate) macvtap: Option<String>,
    /// Serve a port that takes everything and keeps nothing.
    #[arg(long)]
    pub(crate) null: bool,
    /// The null port also delivers frames of this size, as fast as they are taken.
    #[arg(long, value_name = "BYTES")]
    pub(crate) generate: Option<usize>,
    /// Queue pairs, 1 to 127 [default: 1, or the number of --tap-fd].
    #[arg(long, value_name = "N")]
    pub(crate) queue_pairs: Option<usize>,
    /// The worker of each queue pair, by its index [default: it goes where it is best served].
    #[arg(long, value_name = "N", value_delimiter = ',')]
    pub(crate) queue_workers: Option<Vec<usize>>,
    /// Hold interrupts back: off, or like 32/100us (until there are so many, or so long)
    /// [default: off].
    #[arg(long, value_name = "MODE")]
    pub(crate) moderation: Option<String>,
    /// Give buffers of sent frames back in groups: off, or auto (where the guest then sends longer
    /// frames) [default: off].
    #[arg(long, value_name = "MODE")]
    pub(crate) reclaim: Option<String>,
    /// What either side may leave unfinished for the other: all, csum (checksums alone), none
    /// [default: all].
    #[arg(long, value_name = "WHAT")]
    pub(crate) offload: Option<String>,
    /// MAC address of the guest [default: a macvtap's own, else made from name and socket].
    #[arg(long, value_name = "MAC")]
    pub(crate) mac: Option<String>,
    /// MTU that the interface is set to and the guest is told [default: neither].
    #[arg(long, value_name = "BYTES")]
    pub(crate) mtu: Option<u32>,
    /// Speed that the guest is told, in Mbit/s.
    #[arg(long, value_name = "MBITS")]
    pub(crate) speed: Option<u32>,
    /// The bridge that the interface joins.
    #[arg(long, value_name = "NAME")]
    pub(crate) bridge: Option<String>,
    /// Set the interface up (true) or down (false) [default: up if created here, else leave it].
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub(crate) up: Option<bool>,
    /// Bytes on their way through the host at most, for each queue of the tap.
    #[arg(long, value_name = "BYTES")]
    pub(crate) sndbuf: Option<u32>,
    /// Frames that wait in the tap for the guest at most, in all the queues together that it uses
    /// [default: as the host has it, for each queue].
    #[arg(long, value_name = "FRAMES")]
    pub(crate) txqueuelen: Option<u32>,
    /// Join consecutive packets of one flow into one GSO packet before it is written to the tap
    /// [default: true].
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub(crate) merge: Option<bool>,
    /// Deliver a flow to the queue pair on which the guest sends it, with a BPF program of the
    /// daemon. false: the kernel's tap driver learns flows, about 20 % more time for each short
    /// packet [default: true].
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub(crate) steer: Option<bool>,
    /// Write every frame to this file.
    #[arg(long, value_name = "FILE")]
    pub(crate) pcap: Option<PathBuf>,
    /// What the guest may send (tx) and receive (rx) in a second: tx_pps, rx_pps, tx_bps, rx_bps,
    /// and burst_ms; several with commas [default: anything].
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

impl From<NetArgs> for RawConfig {
    fn from(args: NetArgs) -> Self {
        let net = RawNet {
            tap: args.tap,
            must_exist: args.must_exist,
            tap_fds: (!args.tap_fds.is_empty()).then_some(args.tap_fds),
            macvtap: args.macvtap,
            null: args.null,
            generate: args.generate,
            queue_pairs: args.queue_pairs,
            queue_workers: args.queue_workers,
            moderation: args.moderation,
            reclaim: args.reclaim,
            offload: args.offload,
            mac: args.mac,
            mtu: args.mtu,
            speed: args.speed,
            bridge: args.bridge,
            up: args.up,
            sndbuf: args.sndbuf,
            txqueuelen: args.txqueuelen,
            merge: args.merge,
            steer: args.steer,
            pcap: args.pcap,
            limit: RawLimit::of_options(args.limit),
            ..RawNet::new(args.name, args.socket)
        };
        Self { daemon: args.daemon.into(), net: vec![net], ..Self::default() }
    }
}

impl From<XenBlkArgs> for RawConfig {
    fn from(args: XenBlkArgs) -> Self {
        Self { daemon: args.daemon.into(), xen_blk: vec![args.xen_blk], ..Self::default() }
    }
}

/// What `--print-capabilities` says of the block back-end.
pub(crate) const BLK_CAPABILITIES: &str =
    "{\"type\":\"block\",\"features\":[\"read-only\",\"blk-file\"]}\n";

/// What `--print-capabilities` says of the network back-end; the convention has no features of it.
pub(crate) const NET_CAPABILITIES: &str = "{\"type\":\"net\"}\n";
