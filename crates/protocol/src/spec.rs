//! `DeviceSpec`: the description of a device for the process that serves it, each value resolved.
//!
//! The supervisor makes a spec from its plan (`config/plan`), and the device process makes options
//! from the spec (`assemble/options.rs`). Both destructure these structs without `..`: if one of
//! them forgets a new field, it does not compile. A spec has no value that only the supervisor
//! uses: no path, no socket, no address, no name of an interface. Limits and the state of an
//! interface change while a device is served, so they have messages of their own.

use super::nbd::NbdSpec;
use serde::{Deserialize, Serialize};

/// The longest spec as JSON, in bytes. The only fields without a fixed size are the serial, the
/// names of an NBD target and the workers of queues: the plan bounds all of them.
pub const SPEC_SIZE_MAX: usize = 7168;

/// A vhost-user device.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceSpec {
    /// The bounds of its front-ends.
    pub front_end: FrontEndSpec,
    /// The worker of each queue or queue pair, by its index. Queues without an entry go to the
    /// worker that the balancer chooses.
    pub queue_workers: Vec<u16>,
    /// The settings of a disk, or of a network device.
    pub kind: KindSpec,
}

/// The bounds of the front-ends of a vhost-user device.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct FrontEndSpec {
    /// Seconds from connecting to the first message.
    pub handshake_timeout: u64,
    /// Guest memory may lie in files on a local disk.
    pub memory_on_disk: bool,
    /// The most bytes of guest memory; `None`: the bound that holds for every session.
    pub memory_max: Option<u64>,
}

/// A vhost-user device of either kind.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum KindSpec {
    /// A block device.
    Blk(BlkSpec),
    /// A network device.
    Net(NetSpec),
}

/// A block device.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct BlkSpec {
    /// The backend that holds its blocks.
    pub disk: DiskSpec,
    /// How it is served.
    pub settings: BlkSettings,
}

/// The backend of a disk.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum DiskSpec {
    /// A file or block device, which the supervisor has opened and locked.
    File {
        /// The host's page cache is not used (`O_DIRECT`).
        direct: bool,
        /// The device process asks the supervisor to lock the file when the first ring starts, and
        /// to unlock it when the last one has stopped.
        lock_with_rings: bool,
    },
    /// The null disk: writes are dropped, reads give zeros.
    Null {
        /// In bytes.
        size: u64,
    },
    /// Memory that the supervisor has allocated, so it outlives the device process.
    Memory {
        /// In bytes.
        size: u64,
    },
    /// An export of an NBD server, to which the supervisor connects.
    Nbd(NbdSpec),
}

/// How a block device is served, and what its guest is told.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct BlkSettings {
    /// Request queues.
    pub num_queues: usize,
    /// The number of ring entries from which the limit of segments per request is derived.
    pub queue_size: u16,
    /// The device id string.
    pub serial: String,
    /// The guest may not write.
    pub read_only: bool,
    /// Writes are durable when the guest flushes, not when they are answered.
    pub writeback: bool,
    /// Bytes of a sector of the guest; `None`: as the disk has them.
    pub logical_block_size: Option<u32>,
    /// Whether writes wait or fail while the host has no space for them.
    pub on_full: OnFullSpec,
    /// How interrupts are held back.
    pub moderation: ModerationSpec,
    /// The faults that the device makes on purpose, to test guests.
    pub fault: Option<DiskFaultSpec>,
}

/// A network device.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct NetSpec {
    /// The port to which its frames go.
    pub port: PortSpec,
    /// Its frames are captured. The last descriptor of the message is then a pipe to the
    /// supervisor, which writes the file.
    pub captures: bool,
    /// How it is served.
    pub settings: NetSettings,
}

/// The port of a network device.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum PortSpec {
    /// It takes every frame and keeps none.
    Null {
        /// The length in bytes of the frames that it delivers as fast as the guest takes them; 0:
        /// it delivers none.
        generate: usize,
    },
    /// An interface of the host, which the supervisor has opened.
    Interface {
        /// Consecutive packets of a flow are joined before they are written.
        merge: bool,
    },
    /// The port with the device's name on the switch that the process serves.
    Switch,
    /// AF_XDP sockets of an interface of the host, which the supervisor has created.
    Xdp,
}

/// How a network device is served, and what its guest is told.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct NetSettings {
    /// Queue pairs.
    pub queue_pairs: usize,
    /// MAC address of the guest, as it is now.
    pub mac: [u8; 6],
    /// MTU that the guest is told, as it is now.
    pub mtu: Option<u16>,
    /// Speed that the guest is told, in Mbit/s.
    pub speed: Option<u32>,
    /// How interrupts are held back.
    pub moderation: ModerationSpec,
    /// When the buffers of sent frames go back.
    pub reclaim: ReclaimSpec,
    /// The offloads that guest and host may use.
    pub offload: OffloadSpec,
    /// The guest is offered to get the hash of each frame (`VIRTIO_NET_F_HASH_REPORT`).
    pub hash_report: bool,
    /// The faults that the device makes on purpose, to test guests.
    pub fault: Option<NetFaultSpec>,
}

/// The disk of a Xen guest.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct XenBlkSpec {
    /// The backend that holds its blocks.
    pub disk: DiskSpec,
    /// How it is served.
    pub settings: XenBlkSettings,
}

/// How the disk of a Xen guest is served, and what the guest is offered.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct XenBlkSettings {
    /// Queues that a front-end may have at most.
    pub num_queues: usize,
    /// The tool stack lets the guest only read.
    pub read_only: bool,
    /// Writes are durable when the guest flushes, not when they are answered.
    pub writeback: bool,
    /// Bytes of a sector of the guest; `None`: as the disk has them.
    pub logical_block_size: Option<u32>,
    /// Whether writes wait or fail while the host has no space for them.
    pub on_full: OnFullSpec,
    /// Operator and tool stack allow discards: they are offered if the disk supports them.
    pub discard: bool,
    /// Write barriers are offered.
    pub barrier: bool,
    /// Persistent grants are offered: a grant stays mapped after its request.
    pub persistent: bool,
    /// Grants of a queue that stay mapped, at most.
    pub persistent_max: u32,
    /// Segments of an indirect request at most; 0: such requests are not offered.
    pub indirect_segments_max: u16,
    /// The largest ring, as log2 of its number of pages.
    pub ring_page_order_max: u32,
    /// How notifications are held back.
    pub moderation: ModerationSpec,
    /// The faults that the device makes on purpose, to test guests.
    pub fault: Option<DiskFaultSpec>,
}

/// Whether writes wait or fail while the host has no space for them.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum OnFullSpec {
    /// They wait until there is space.
    Wait,
    /// The guest gets an I/O error.
    Report,
}

/// How the notifications to a guest are held back.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum ModerationSpec {
    /// Each completion notifies the guest, unless the driver suppresses it.
    Off,
    /// A notification is held back until `count_max` completions are there, or `delay_us_max` has
    /// passed since the first of them.
    Fixed {
        /// Requests or frames.
        count_max: u32,
        /// Microseconds.
        delay_us_max: u32,
    },
}

/// When the buffers of sent frames go back to the guest.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum ReclaimSpec {
    /// At once.
    Off,
    /// In groups, where the guest then sends longer frames.
    Auto,
}

/// The offloads that guest and host may use: the work that one side leaves to the other.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum OffloadSpec {
    /// Checksums and segmentation.
    All,
    /// Checksums alone.
    Csum,
    /// No offloads.
    None,
}

/// The faults that a disk makes on purpose, to test guests; 0: never.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct DiskFaultSpec {
    /// Every n-th request, if it is a read, fails.
    pub read_error_every: u64,
    /// Every n-th request, if it is a write, fails.
    pub write_error_every: u64,
    /// Flushes fail.
    pub flush_errors: bool,
    /// Every n-th request never completes.
    pub hold_every: u64,
    /// Secure erase is offered, and writes zeroes.
    pub secure_erase: bool,
}

/// The faults that a network port makes on purpose, to test guests: every n-th time; 0: never.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct NetFaultSpec {
    /// A frame of the guest is lost.
    pub drop_tx_every: u64,
    /// A frame for the guest is lost.
    pub drop_rx_every: u64,
    /// A frame for the guest has a wrong byte.
    pub corrupt_rx_every: u64,
    /// The port is full for a moment.
    pub block_tx_every: u64,
    /// The host is out of memory for a moment.
    pub no_memory_every: u64,
    /// Receiving fails.
    pub recv_error_every: u64,
    /// The port completes a frame of the guest only after it was polled 0 to this many times (this
    /// is not an "every n-th").
    pub late_tx: u32,
}

#[cfg(test)]
pub(crate) mod tests;
