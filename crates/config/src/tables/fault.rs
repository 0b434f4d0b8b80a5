//! The keys of the faults that a device makes on purpose.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// `[blk.fault]`, `[xen_blk.fault]`
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RawFault {
    /// Every n-th request, if it is a read, fails.
    pub read_error_every: u64,
    /// Every n-th request, if it is a write, fails.
    pub write_error_every: u64,
    /// Flushes fail.
    pub flush_errors: bool,
    /// Every n-th request never completes.
    pub hold_every: u64,
    /// Offer secure erase, which writes zeroes.
    pub secure_erase: bool,
}

/// `[net.fault]`: each fault happens every n-th time; 0: never.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RawNetFault {
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
    /// Not every n-th time: the port completes each frame of the guest only after it was polled 0
    /// to this many times, in any order; 0: at once.
    pub late_tx: u32,
}
