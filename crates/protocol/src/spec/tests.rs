//! The largest specs, and what is no spec.

use super::*;
use crate::nbd::{ExportSpec, NAMES_MAX, NbdTarget};
use manyring_device::blk::OnFull;
use manyring_device::net::{Offload, Reclaim};
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::fmt::Debug;

const FIXED: &str = "32768/10000us";
const DISK_FAULT: DiskFaultSpec = DiskFaultSpec {
    read_error_every: u64::MAX,
    write_error_every: u64::MAX,
    flush_errors: false,
    hold_every: u64::MAX,
    secure_erase: false,
};
const FILE: DiskSpec = DiskSpec::File { direct: false, lock_with_rings: false };

fn with_any_memory(kind: KindSpec) -> DeviceSpec {
    let front_end = FrontEndSpec {
        handshake_timeout: u64::MAX,
        memory_on_disk: false,
        memory_max: Some(u64::MAX),
    };
    DeviceSpec { front_end, queue_workers: vec![15; 256], kind }
}

/// A disk whose numbers are as long as numbers get, with a serial of characters that JSON escapes.
pub(crate) fn largest_blk() -> DeviceSpec {
    let options = BlkOptions {
        serial: "\u{1}".repeat(20),
        logical_block_size: Some(u32::MAX),
        on_full: OnFull::Report,
        moderation: FIXED.parse().unwrap(),
        num_queues: usize::MAX,
        queue_size: u16::MAX,
        name: String::new(),
        ..BlkOptions::default()
    };
    with_any_memory(KindSpec::Blk(BlkSpec { disk: FILE, options, fault: Some(DISK_FAULT) }))
}

/// As [`largest_blk`], with the longest names of a server's disk.
pub(crate) fn largest_nbd() -> DeviceSpec {
    let spec = largest_blk();
    let KindSpec::Blk(blk) = spec.kind else { unreachable!() };
    let told = ExportSpec {
        size: u64::MAX,
        flags: u16::MAX,
        block_min: u32::MAX,
        block_preferred: u32::MAX,
        block_max: u32::MAX,
        structured: false,
    };
    // As JSON, with its quotation marks.
    let export = "a".repeat(NAMES_MAX.0 - 2);
    let target = NbdTarget { export, tls: Some("a".repeat(NAMES_MAX.1)) };
    let disk = DiskSpec::Nbd(NbdSpec { target, reconnect: Some(u64::MAX), told });
    DeviceSpec { kind: KindSpec::Blk(BlkSpec { disk, ..blk }), ..spec }
}

/// As [`largest_blk`], a network.
pub(crate) fn largest_net() -> DeviceSpec {
    let fault = NetFaultSpec {
        drop_tx_every: u64::MAX,
        drop_rx_every: u64::MAX,
        corrupt_rx_every: u64::MAX,
        block_tx_every: u64::MAX,
        no_memory_every: u64::MAX,
        recv_error_every: u64::MAX,
        late_tx: u32::MAX,
    };
    let options = NetOptions {
        queue_pairs: usize::MAX,
        mtu: Some(u16::MAX),
        speed: Some(u32::MAX),
        moderation: FIXED.parse().unwrap(),
        reclaim: Reclaim::Auto,
        offload: Offload::Csum,
        name: String::new(),
        ..NetOptions::default()
    };
    let port = PortSpec::Null { generate: usize::MAX };
    with_any_memory(KindSpec::Net(NetSpec {
        port,
        captures: false,
        mac: [u8::MAX; 6],
        options,
        fault: Some(fault),
    }))
}

/// As [`largest_blk`], the disk of a Xen guest.
pub(crate) fn largest_xen() -> XenBlkSpec {
    let options = XenBlkOptions {
        logical_block_size: Some(u32::MAX),
        on_full: OnFull::Report,
        persistent_max: u32::MAX,
        indirect_segments_max: u16::MAX,
        ring_page_order_max: u32::MAX,
        moderation: FIXED.parse().unwrap(),
        ..XenBlkOptions::new("", usize::MAX)
    };
    XenBlkSpec { disk: FILE, options, fault: Some(DISK_FAULT) }
}

/// Each JSON that differs from `spec` by one key of one object: a key too many, or one too few.
fn spoiled(spec: &Value) -> Vec<Value> {
    let Value::Object(keys) = spec else { return Vec::new() };
    let mut all = Vec::new();
    let mut more = keys.clone();
    more.insert("no_such_key".to_owned(), 1.into());
    all.push(more.into());
    for (key, value) in keys {
        let mut fewer = keys.clone();
        fewer.remove(key);
        all.push(fewer.into());
        for value in spoiled(value) {
            let mut other = keys.clone();
            other.insert(key.clone(), value);
            all.push(other.into());
        }
    }
    all
}

fn check<T: Serialize + DeserializeOwned + Debug + PartialEq>(spec: &T) {
    let json = serde_json::to_value(spec).unwrap();
    let text = json.to_string();
    assert!(text.len() <= SPEC_SIZE_MAX, "{} bytes: {text}", text.len());
    assert_eq!(serde_json::from_str::<T>(&text).unwrap(), *spec);
    let spoiled = spoiled(&json);
    assert!(spoiled.len() > 20, "{}", spoiled.len());
    for json in spoiled {
        // Without a key whose value may be none, the value is none: another spec. All else is none.
        if let Ok(read) = serde_json::from_value::<T>(json.clone()) {
            assert!(read != *spec && json.to_string().len() < text.len(), "{json}");
        }
    }
}

#[test]
fn the_largest_specs_keep_the_bound_and_are_read_as_they_were_written() {
    check(&largest_blk());
    check(&largest_nbd());
    check(&largest_net());
    check(&largest_xen());
}
