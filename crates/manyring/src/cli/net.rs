//! The options of `manyring net`, and the configuration that they stand for.

use super::DaemonArgs;
use clap::Args;
use manyring_config::tables::{
    RawConfig, RawLimit, RawLimitOption, RawNet, RawQueueLength, RawReceivePairs, RawSocket,
};
use std::path::PathBuf;

/// `manyring net`
#[derive(Args, Debug)]
pub(crate) struct NetArgs {
    /// Print the features of this back-end as JSON, for management tools, and exit.
    #[arg(long)]
    pub(crate) print_capabilities: bool,
    /// Name of the device in logs, counters and the control API.
    #[arg(long, default_value = "net0")]
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) socket: RawSocket,
    /// Connect the guest to this tap interface. If it does not exist, it is created, and deleted
    /// when this process exits.
    #[arg(long, value_name = "NAME")]
    pub(crate) tap: Option<String>,
    /// Fail if the interface of --tap does not exist, instead of creating it.
    #[arg(long)]
    pub(crate) must_exist: bool,
    /// Connect the guest to the tap or macvtap whose queues are these inherited file descriptors,
    /// one for each queue pair, like 7,8.
    #[arg(long = "tap-fd", value_name = "N", value_delimiter = ',')]
    pub(crate) tap_fds: Vec<i32>,
    /// Connect the guest to this macvtap interface, which must exist.
    #[arg(long, value_name = "NAME")]
    pub(crate) macvtap: Option<String>,
    /// Connect the guest to this interface through AF_XDP: the guest receives all its packets, and
    /// the host's network stack none of them.
    #[arg(long, value_name = "NAME")]
    pub(crate) xdp: Option<String>,
    /// With --xdp, the network card reads large packets directly from guest memory, without a copy.
    /// This needs support by the card's driver, allows one queue pair, and pins all guest memory.
    #[arg(long)]
    pub(crate) zero_copy: bool,
    /// Connect the guest to no interface: drop all its packets, for measuring.
    #[arg(long)]
    pub(crate) null: bool,
    /// With --null, send the guest packets of this size, 60 to 65553 bytes, as fast as it receives
    /// them.
    #[arg(long, value_name = "BYTES")]
    pub(crate) generate: Option<usize>,
    /// The most queue pairs that the guest may use, 1 to 127 [default: 1, or the number of
    /// --tap-fd].
    #[arg(long, value_name = "N")]
    pub(crate) queue_pairs: Option<usize>,
    /// Pin queue pairs to worker threads: 1,2 keeps pair 0 on worker 1, and pair 1 on worker 2
    /// [default: pairs move to workers on idle CPUs].
    #[arg(long, value_name = "N", value_delimiter = ',')]
    pub(crate) queue_workers: Option<Vec<usize>>,
    /// Send fewer interrupts to the guest: off, or COUNT/TIMEus. 32/100us delays an interrupt until
    /// 32 packets are done, but by at most 100 microseconds [default: off].
    #[arg(long, value_name = "MODE")]
    pub(crate) moderation: Option<String>,
    /// When the guest gets back the buffers of packets that were sent. off: at once; auto: several
    /// together, up to 25 microseconds later, while the guest then sends larger packets [default:
    /// off].
    #[arg(long, value_name = "MODE")]
    pub(crate) reclaim: Option<String>,
    /// Offloads between guest and host. all: checksums and segmentation; csum: checksums; none:
    /// neither, for switches that do not support offloads [default: all].
    #[arg(long, value_name = "WHAT")]
    pub(crate) offload: Option<String>,
    /// MAC address of the guest [default: the address of the interface for --macvtap and --xdp,
    /// else one that is derived from the device's name and socket, the same at each start].
    #[arg(long, value_name = "MAC")]
    pub(crate) mac: Option<String>,
    /// Set the interface to this MTU, and report it to the guest [default: do neither].
    #[arg(long, value_name = "BYTES")]
    pub(crate) mtu: Option<u32>,
    /// The link speed that the guest sees, in Mbit/s. It limits nothing.
    #[arg(long, value_name = "MBITS")]
    pub(crate) speed: Option<u32>,
    /// Add the interface to this bridge.
    #[arg(long, value_name = "NAME")]
    pub(crate) bridge: Option<String>,
    /// Set the interface up (true) or down (false) [default: up if it is created here, else
    /// unchanged].
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub(crate) up: Option<bool>,
    /// The most bytes of sent packets that the host holds, for each queue of the tap [default: the
    /// host's limit].
    #[arg(long, value_name = "BYTES")]
    pub(crate) sndbuf: Option<u32>,
    /// Packets that may wait in the tap for the guest, in all of its queues together: a number;
    /// auto: 1000, where the daemon may set that; host: as the host has it, for each queue
    /// [default: host].
    #[arg(long, value_name = "FRAMES")]
    pub(crate) txqueuelen: Option<RawQueueLength>,
    /// Join consecutive packets of one flow into one GSO packet before it is written to the tap
    /// [default: true].
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub(crate) merge: Option<bool>,
    /// Deliver the packets of a flow to the queue pair on which the guest sends that flow, with a
    /// BPF program. false: the tap driver does this, with about 20 % more time for each short
    /// packet [default: true].
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub(crate) steer: Option<bool>,
    /// To how many of the guest's queue pairs the host delivers packets: all; auto: as many as are
    /// worth it; a number: so many, the first ones [default: all].
    #[arg(long, value_name = "PAIRS")]
    pub(crate) receive_pairs: Option<RawReceivePairs>,
    /// Offer the guest the hash of each packet that it receives (VIRTIO_NET_F_HASH_REPORT). Each
    /// packet then takes more time [default: false].
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub(crate) hash_report: Option<bool>,
    /// Capture the packets of both directions in this file (pcap). The file is overwritten.
    #[arg(long, value_name = "FILE")]
    pub(crate) pcap: Option<PathBuf>,
    /// Limits per second: tx_pps and rx_pps (packets that the guest sends and receives), tx_bps and
    /// rx_bps (bytes), burst_ms; separate several with commas, like tx_bps=12M [default: none].
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
            receive_pairs: args.receive_pairs,
            hash_report: args.hash_report,
            pcap: args.pcap,
            limit: RawLimit::of_options(args.limit),
            ..RawNet::new(args.name, args.socket)
        };
        Self { daemon: args.daemon.into(), net: vec![net], ..Self::default() }
    }
}
