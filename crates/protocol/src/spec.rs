//! `DeviceSpec`: a device as the process that serves it needs it, each value resolved.
//!
//! The supervisor makes a spec of its plan (`config/plan`), and the device process makes options of
//! the spec (`assemble/options.rs`). Both name each field of the structs that they take apart,
//! without `..`: a field that one of them forgets does not compile. A spec has nothing that only
//! the supervisor uses: no path, no socket, no address, no name of an interface. Limits and the
//! state of an interface are messages of their own, since they change.

use super::nbd::NbdSpec;
use serde::{Deserialize, Serialize};

/// Longest spec as JSON, in bytes. Nothing in a spec is of any length but a serial, which is short,
/// the names of an NBD server's disk and a worker for each queue, which the plan bounds.
pub const SPEC_SIZE_MAX: usize = 7168;

/// A vhost-user device.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceSpec {
    /// The bounds of its front-ends.
    pub front_end: FrontEndSpec,
    /// The worker of each of its queues, or queue pairs, as far as the operator has chosen them.
    pub queue_workers: Vec<u16>,
    /// The device itself.
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
    /// Bytes of guest memory at most; `None`: as many as any session may have.
    pub memory_max: Option<u64>,
}

/// A vhost-user device as what it is.
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
    /// Where its blocks are.
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
        /// The page cache of the host is passed by (`O_DIRECT`).
        direct: bool,
        /// The supervisor is asked for the lock of the file as long as rings run.
        lock_with_rings: bool,
    },
    /// It keeps nothing.
    Null {
        /// In bytes.
        size: u64,
    },
    /// Memory that the supervisor keeps.
    Memory {
        /// In bytes.
        size: u64,
    },
    /// An NBD server has it, to which the supervisor connects.
    Nbd(NbdSpec),
}

/// How a block device is served, and what its guest is told.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct BlkSettings {
    /// Request queues.
    pub num_queues: usize,
    /// Entries of a ring that the limits of a request are made for.
    pub queue_size: u16,
    /// The device id string.
    pub serial: String,
    /// The guest may not write.
    pub read_only: bool,
    /// Writes are durable when the guest flushes, not when they are answered.
    pub writeback: bool,
    /// Bytes of a sector of the guest; `None`: as the disk has them.
    pub logical_block_size: Option<u32>,
    /// What becomes of writes for which the host has no space.
    pub on_full: OnFullSpec,
    /// How interrupts are held back.
    pub moderation: ModerationSpec,
    /// What goes wrong, to test guests.
    pub fault: Option<DiskFaultSpec>,
}

/// A network device.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct NetSpec {
    /// Where its frames go.
    pub port: PortSpec,
    /// Its frames are captured: the last descriptor is a pipe, to the supervisor that writes the
    /// file.
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
        /// Bytes of the frames that it delivers as fast as they are taken; 0: it delivers none.
        generate: usize,
    },
    /// An interface of the host, which the supervisor has opened.
    Interface {
        /// Consecutive packets of a flow are joined before they are written.
        merge: bool,
    },
    /// The port of its name on the switch of the process.
    Switch,
    /// Queues of an interface of the host by AF_XDP, whose sockets the supervisor has made.
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
    /// What either side may leave unfinished for the other.
    pub offload: OffloadSpec,
    /// The guest is offered to be told the hash of each frame.
    pub hash_report: bool,
    /// What goes wrong, to test guests.
    pub fault: Option<NetFaultSpec>,
}

/// The disk of a Xen guest.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct XenBlkSpec {
    /// Where its blocks are.
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
    /// What becomes of writes for which the host has no space.
    pub on_full: OnFullSpec,
    /// Discards are offered, if the disk supports them: operator and tool stack allow it.
    pub discard: bool,
    /// Write barriers are offered.
    pub barrier: bool,
    /// Grants stay mapped for front-ends that use the same grants again.
    pub persistent: bool,
    /// Grants of a queue that stay mapped, at most.
    pub persistent_max: u32,
    /// Segments of an indirect request at most; 0: such requests are not offered.
    pub indirect_segments_max: u16,
    /// The largest ring, as log2 of its number of pages.
    pub ring_page_order_max: u32,
    /// How notifications are held back.
    pub moderation: ModerationSpec,
    /// What goes wrong, to test guests.
    pub fault: Option<DiskFaultSpec>,
}

/// What becomes of writes for which the host has no space.
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
    /// They are not.
    Off,
    /// Until one of these is reached.
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

/// What either side of a network device may leave unfinished for the other.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum OffloadSpec {
    /// Checksums and segments.
    All,
    /// Checksums alone.
    Csum,
    /// Nothing.
    None,
}

/// What goes wrong with a disk, to test guests; 0: never.
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

/// What goes wrong with a network port, to test guests: every n-th time; 0: never.
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
    /// Not every n-th: the port is done with a frame of the guest after up to this many looks.
    pub late_tx: u32,
}

#[cfg(test)]
pub(crate) mod tests;
