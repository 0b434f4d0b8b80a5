//! `DeviceSpec`: the description of a device for the process that serves it, each value resolved.
//!
//! Plan, spec and device use the same type for the options of a device, so no value can be lost
//! between them. Code that makes a spec, or takes one apart, names each field, without `..`: a
//! field that is forgotten does not compile. A spec contains nothing that only the supervisor uses:
//! no path, socket, address or name of an interface. Limits and the state of an interface are
//! messages of their own, since they change.

use super::nbd::NbdSpec;
use manyring_device::blk::BlkOptions;
use manyring_device::blk::blkif::XenBlkOptions;
use manyring_device::net::{MacAddress, NetOptions};
use serde::{Deserialize, Serialize};

/// The longest spec as JSON, in bytes. The only fields without a fixed size are the serial, the
/// names of an NBD target and the workers of queues: the plan bounds all of them.
pub const SPEC_SIZE_MAX: usize = 7168;

/// The description of a vhost-user device.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceSpec {
    /// The bounds of the device's front-ends.
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
    /// Seconds from connecting within which a front-end must send its first message.
    pub handshake_timeout: u64,
    /// True if guest memory may lie in files on a local disk.
    pub memory_on_disk: bool,
    /// The most bytes of guest memory; `None`: the bound that holds for every session.
    #[serde(skip_serializing_if = "Option::is_none")]
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
    /// The backend that holds the disk's blocks.
    pub disk: DiskSpec,
    /// The options of the device.
    pub options: BlkOptions,
    /// The faults that the device makes on purpose, to test guests.
    pub fault: Option<DiskFaultSpec>,
}

/// The backend of a disk, which keeps its blocks.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum DiskSpec {
    /// A file or block device, which the supervisor has opened and locked.
    File {
        /// True if the host's page cache is not used (`O_DIRECT`).
        direct: bool,
        /// True if the device process asks the supervisor to lock the file when the first ring
        /// starts, and to unlock it when the last one has stopped.
        lock_with_rings: bool,
    },
    /// The null disk: writes are dropped, reads give zeros.
    Null {
        /// The size of the disk in bytes.
        size: u64,
    },
    /// Memory that the supervisor has allocated, so it outlives the device process.
    Memory {
        /// The size of the disk in bytes.
        size: u64,
    },
    /// An export of an NBD server, to which the supervisor connects.
    Nbd(NbdSpec),
}

/// A network device.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct NetSpec {
    /// The port to which the device's frames go.
    pub port: PortSpec,
    /// True if the device's frames are captured. Then the last descriptor of the message is a pipe
    /// to the supervisor, which writes the capture file.
    pub captures: bool,
    /// The present MAC address of the guest.
    pub mac: MacAddress,
    /// The options of the device, with the present MTU.
    pub options: NetOptions,
    /// The faults that the device makes on purpose, to test guests.
    pub fault: Option<NetFaultSpec>,
}

/// The port of a network device.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum PortSpec {
    /// A port that drops every frame of the guest.
    Null {
        /// The length in bytes of the frames that the port delivers to the guest, as fast as the
        /// guest takes them; 0: it delivers none.
        generate: usize,
    },
    /// An interface of the host, which the supervisor has opened.
    Interface {
        /// True if consecutive packets of a flow are joined before they are written.
        merge: bool,
    },
    /// The port with the device's name on the switch that the process serves.
    Switch,
    /// AF_XDP sockets of an interface of the host, which the supervisor has created.
    Xdp,
}

/// The description of a Xen guest's disk.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct XenBlkSpec {
    /// The backend that holds the disk's blocks.
    pub disk: DiskSpec,
    /// The options of the device.
    pub options: XenBlkOptions,
    /// The faults that the device makes on purpose, to test guests.
    pub fault: Option<DiskFaultSpec>,
}

/// The faults that a disk makes on purpose, to test guests. `*_every` with the value 0: never.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct DiskFaultSpec {
    /// Every n-th request, if it is a read, fails.
    pub read_error_every: u64,
    /// Every n-th request, if it is a write, fails.
    pub write_error_every: u64,
    /// True: every flush fails.
    pub flush_errors: bool,
    /// Every n-th request never completes.
    pub hold_every: u64,
    /// True: secure erase is offered, and writes zeroes.
    pub secure_erase: bool,
}

/// The faults that a network port makes on purpose, to test guests. `*_every` n: at every n-th
/// frame or call; 0: never.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct NetFaultSpec {
    /// A frame that the guest sends is lost.
    pub drop_tx_every: u64,
    /// A frame that the guest should receive is lost.
    pub drop_rx_every: u64,
    /// A frame reaches the guest with one wrong byte.
    pub corrupt_rx_every: u64,
    /// Before the n-th frame, the port refuses frames of the guest once, as if it were full.
    pub block_tx_every: u64,
    /// Before the n-th frame, the host is out of memory once.
    pub no_memory_every: u64,
    /// A call that receives frames for the guest fails.
    pub recv_error_every: u64,
    /// The port completes a frame of the guest only after it was polled 0 to this many times (this
    /// is not an "every n-th").
    pub late_tx: u32,
}

#[cfg(test)]
pub(crate) mod tests;
