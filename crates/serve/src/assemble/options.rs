//! Spec -> options: how a device is made and served, in whichever process that is.

use manyring_device::blk::blkif::XenBlkOptions;
use manyring_device::blk::{BlkOptions, OnFull};
use manyring_device::net::{NetOptions, Offload, Reclaim};
use manyring_engine::Moderation;
use manyring_engine::policy::moderation::Limits;
use manyring_memory::{MemoryFiles, MemoryRules};
use manyring_protocol::spec::{
    BlkSettings, FrontEndSpec, ModerationSpec, NetSettings, OffloadSpec, OnFullSpec, ReclaimSpec,
    XenBlkSettings,
};
use manyring_transport::vhost_user::ServeOptions;
use std::time::Duration;

/// How a device's front-ends are served, one after the other.
pub(crate) fn of_front_end(spec: &FrontEndSpec) -> ServeOptions {
    let FrontEndSpec { handshake_timeout, memory_on_disk, memory_max } = *spec;
    let memory = MemoryRules::from(match memory_on_disk {
        true => MemoryFiles::LocalDisk,
        false => MemoryFiles::InMemory,
    });
    ServeOptions {
        handshake_timeout: Duration::from_secs(handshake_timeout),
        memory: MemoryRules { bytes_max: memory_max.unwrap_or(memory.bytes_max), ..memory },
        ..ServeOptions::default()
    }
}

/// How a disk looks to its guest.
pub(crate) fn of_blk(name: &str, settings: &BlkSettings) -> BlkOptions {
    let BlkSettings {
        num_queues,
        queue_size,
        serial,
        read_only,
        writeback,
        logical_block_size,
        on_full,
        moderation,
        // A wrapper of the disk makes the faults: `disk::decorated`.
        fault: _,
    } = settings;
    BlkOptions {
        name: name.to_owned(),
        num_queues: *num_queues,
        queue_size: *queue_size,
        serial: serial.clone(),
        read_only: *read_only,
        writeback: *writeback,
        logical_block_size: *logical_block_size,
        on_full: of_on_full(*on_full),
        moderation: of_moderation(*moderation),
    }
}

/// How a network device looks to its guest.
pub(crate) fn of_net(name: &str, settings: &NetSettings) -> NetOptions {
    let NetSettings {
        queue_pairs,
        mac,
        mtu,
        speed,
        moderation,
        reclaim,
        offload,
        hash_report,
        // A wrapper of the port makes the faults: `port::faulty`.
        fault: _,
    } = settings;
    NetOptions {
        name: name.to_owned(),
        queue_pairs: *queue_pairs,
        mac: *mac,
        mtu: *mtu,
        speed: *speed,
        moderation: of_moderation(*moderation),
        reclaim: match reclaim {
            ReclaimSpec::Off => Reclaim::Off,
            ReclaimSpec::Auto => Reclaim::Auto,
        },
        offload: match offload {
            OffloadSpec::All => Offload::All,
            OffloadSpec::Csum => Offload::Csum,
            OffloadSpec::None => Offload::None,
        },
        hash_report: *hash_report,
    }
}

/// How the disk of a Xen guest looks to it.
pub fn of_xen(name: &str, settings: &XenBlkSettings) -> XenBlkOptions {
    let XenBlkSettings {
        num_queues,
        read_only,
        writeback,
        logical_block_size,
        on_full,
        discard,
        barrier,
        persistent,
        persistent_max,
        indirect_segments_max,
        ring_page_order_max,
        moderation,
        // A wrapper of the disk makes the faults: `disk::decorated`.
        fault: _,
    } = settings;
    XenBlkOptions {
        name: name.to_owned(),
        num_queues: *num_queues,
        read_only: *read_only,
        writeback: *writeback,
        logical_block_size: *logical_block_size,
        on_full: of_on_full(*on_full),
        discard: *discard,
        barrier: *barrier,
        persistent: *persistent,
        persistent_max: *persistent_max,
        indirect_segments_max: *indirect_segments_max,
        ring_page_order_max: *ring_page_order_max,
        moderation: of_moderation(*moderation),
    }
}

fn of_on_full(spec: OnFullSpec) -> OnFull {
    match spec {
        OnFullSpec::Wait => OnFull::Wait,
        OnFullSpec::Report => OnFull::Report,
    }
}

fn of_moderation(spec: ModerationSpec) -> Moderation {
    match spec {
        ModerationSpec::Off => Moderation::Off,
        ModerationSpec::Fixed { count_max, delay_us_max } => {
            Moderation::Fixed(Limits { count_max, delay_us_max })
        }
    }
}

#[cfg(test)]
mod tests;
