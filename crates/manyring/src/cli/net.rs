//! The options of `manyring net`, and the configuration that they stand for.

use super::DaemonArgs;
use clap::Args;
use manyring_config::tables::{RawConfig, RawLimit, RawLimitOption, RawNet, RawRoom, RawSocket};
use std::path::PathBuf;

/// `manyring net`
#[derive(Args, Debug)]
pub(crate) struct NetArgs {
    /// Print the features of this back-end as JSON (for tools that look for one), and end.
    #[arg(long)]
    pub(crate) print_capabilities: bool,
    /// Name of the device in logs, counters and the control API.
    #[arg(long, default_value = "net0")]
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) socket: RawSocket,
    /// Serve this tap: an existing one, or one that is made and goes away with this process.
    #[arg(long, value_name = "NAME")]
    pub(crate) tap: Option<String>,
    /// The tap must exist: do not make it.
    #[arg(long)]
    pub(crate) must_exist: bool,
    /// Serve the tap or macvtap whose queues are these open file descriptors, one for each queue
    /// pair, like 7,8.
    #[arg(long = "tap-fd", value_name = "N", value_delimiter = ',')]
    pub(crate) tap_fds: Vec<i32>,
    /// Serve this macvtap, which must exist.
    #[arg(long, value_name = "NAME")]
    pub(crate) macvtap: Option<String>,
    /// Serve this interface by AF_XDP: its frames are the guest's, and not the host's.
    #[arg(long, value_name = "NAME")]
    pub(crate) xdp: Option<String>,
    /// Have the device of --xdp read long frames in the guest's memory, all of which is pinned.
    #[arg(long)]
    pub(crate) zero_copy: bool,
    /// Serve a network that drops every packet of the guest, for measuring.
    #[arg(long)]
    pub(crate) null: bool,
    /// With --null, also send the guest packets of this size, as fast as it takes them.
    #[arg(long, value_name = "BYTES")]
    pub(crate) generate: Option<usize>,
    /// Queue pairs that the guest may use, 1 to 127 [default: 1, or the number of --tap-fd].
    #[arg(long, value_name = "N")]
    pub(crate) queue_pairs: Option<usize>,
    /// Bind queue pairs to workers, by number: 1,2 keeps pair 0 on worker 1, and pair 1 on worker 2
    /// [default: pairs move to workers on idle CPUs].
    #[arg(long, value_name = "N", value_delimiter = ',')]
    pub(crate) queue_workers: Option<Vec<usize>>,
    /// Send fewer interrupts to the guest: off, or like 32/100us, which sends one when 32 answers
    /// are there or 100 us have passed [default: off].
    #[arg(long, value_name = "MODE")]
    pub(crate) moderation: Option<String>,
    /// When the guest gets the buffers of sent packets back: at once (off), or in groups, up to 25
    /// us later, while that makes it send longer packets (auto) [default: off].
    #[arg(long, value_name = "MODE")]
    pub(crate) reclaim: Option<String>,
    /// Work that guest and host may leave to each other: checksums and segmentation (all),
    /// checksums (csum), nothing (none), as some userspace switches need it [default: all].
    #[arg(long, value_name = "WHAT")]
    pub(crate) offload: Option<String>,
    /// MAC address of the guest [default: that of the macvtap or of --xdp, else one that is derived
    /// from the device's name and socket, and stays the same].
    #[arg(long, value_name = "MAC")]
    pub(crate) mac: Option<String>,
    /// Set the interface to this MTU, and tell it to the guest [default: leave both alone].
    #[arg(long, value_name = "BYTES")]
    pub(crate) mtu: Option<u32>,
    /// The speed that the guest sees, in Mbit/s; it limits nothing.
    #[arg(long, value_name = "MBITS")]
    pub(crate) speed: Option<u32>,
    /// Join the interface to this bridge.
    #[arg(long, value_name = "NAME")]
    pub(crate) bridge: Option<String>,
    /// Set the interface up (true) or down (false) [default: up if made here, else as it is].
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub(crate) up: Option<bool>,
    /// Bytes of each queue that may be on their way through the host [default: the host's limit].
    #[arg(long, value_name = "BYTES")]
    pub(crate) sndbuf: Option<u32>,
    /// Packets that may wait in the tap for the guest, in all of its queues together: a number;
    /// auto: 1000, where the daemon may set that; host: as the host has it, for each queue
    /// [default: auto].
    #[arg(long, value_name = "FRAMES")]
    pub(crate) txqueuelen: Option<RawRoom>,
    /// Join consecutive packets of one flow into one GSO packet before it is written to the tap
    /// [default: true].
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub(crate) merge: Option<bool>,
    /// Deliver a flow to the queue pair on which the guest sends it, with a BPF program of the
    /// daemon. false: the kernel's tap driver learns flows, about 20 % more time for each short
    /// packet [default: true].
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub(crate) steer: Option<bool>,
    /// Offer the guest to report the hash of each packet that it receives, which costs it time for
    /// each packet [default: false].
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub(crate) hash_report: Option<bool>,
    /// Capture all packets in this file (pcap), both ways; its former content is lost.
    #[arg(long, value_name = "FILE")]
    pub(crate) pcap: Option<PathBuf>,
    /// Limits for each second, tx being what the guest sends: tx_pps, rx_pps, tx_bps, rx_bps
    /// (bytes), and burst_ms; several with commas, like tx_bps=12M [default: none].
    #[arg(long, value_name = "KEY=VALUE", value_delimiter = ',')]
    pub(crate) limit: Vec<RawLimitOption>,
    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
}

impl From<NetArgs> for RawConfig {
    fn from(args: NetArgs) -> Self {
        let net = RawNet {
            tap: args.tap,
            must_exist: args.must_exist,
            tap_fds: (!args.tap_fds.is_empty()).then_some(args.tap_fds),
            macvtap: args.macvtap,
            xdp: args.xdp,
            zero_copy: args.zero_copy,
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
            hash_report: args.hash_report,
            pcap: args.pcap,
            limit: RawLimit::of_options(args.limit),
            ..RawNet::new(args.name, args.socket)
        };
        Self { daemon: args.daemon.into(), net: vec![net], ..Self::default() }
    }
}
