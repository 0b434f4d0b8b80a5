//! Errors that a device makes on purpose, to test its guest: the key `fault`.

use crate::tables::{RawFault, RawNetFault};
use manyring_protocol::spec::{DiskFaultSpec, NetFaultSpec};

impl From<RawFault> for DiskFaultSpec {
    fn from(raw: RawFault) -> Self {
        let RawFault {
            read_error_every,
            write_error_every,
            flush_errors,
            hold_every,
            secure_erase,
        } = raw;
        Self { read_error_every, write_error_every, flush_errors, hold_every, secure_erase }
    }
}

impl From<RawNetFault> for NetFaultSpec {
    fn from(raw: RawNetFault) -> Self {
        let RawNetFault {
            drop_tx_every,
            drop_rx_every,
            corrupt_rx_every,
            block_tx_every,
            no_memory_every,
            recv_error_every,
            late_tx,
        } = raw;
        Self {
            drop_tx_every,
            drop_rx_every,
            corrupt_rx_every,
            block_tx_every,
            no_memory_every,
            recv_error_every,
            late_tx,
        }
    }
}
