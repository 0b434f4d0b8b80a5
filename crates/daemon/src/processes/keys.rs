//! The keys of a device as the control API takes them: a device process reads what it is given by
//! the same helper. The socket of the device, and what it opens, are the supervisor's.

use crate::config::plan::{BlkPlan, DevicePlan, DiskPlan, NetPlan, PortPlan, XenBlkPlan, mac_text};
use manyring_device::net::{MacAddress, NetDevice};
use serde_json::{Value, json};

fn of_device(kind: &str, device: &DevicePlan) -> Value {
    json!({
        "kind": kind,
        "socket_path": "handed",
        "handshake_timeout": device.handshake_timeout,
        "memory_on_disk": device.memory_on_disk,
        "moderation": device.moderation,
        "memory_max": device.memory_max.map(|bytes| bytes.to_string()),
    })
}

/// Those of a disk.
pub(super) fn of_blk(blk: &BlkPlan) -> String {
    let mut keys = of_device("blk", &blk.device);
    keys["read_only"] = blk.read_only.into();
    keys["logical_block_size"] = blk.logical_block_size.into();
    keys["num_queues"] = blk.num_queues.into();
    keys["queue_size"] = blk.queue_size.into();
    keys["serial"] = blk.serial.clone().into();
    keys["cache"] = if blk.writeback { "writeback" } else { "writethrough" }.into();
    keys["on_full"] = json!(blk.on_full);
    keys["fault"] = json!(blk.fault);
    match &blk.disk {
        DiskPlan::File { direct, lock_with_rings, .. } => {
            keys["file"] = "handed".into();
            keys["direct"] = (*direct).into();
            keys["lock_with_rings"] = (*lock_with_rings).into();
        }
        DiskPlan::Null { size } => keys["null"] = size.to_string().into(),
        DiskPlan::Memory { size } => keys["memory"] = size.to_string().into(),
        // The plan has no domain for it.
        DiskPlan::Nbd(_) | DiskPlan::Helper(_) => {}
    }
    keys.to_string()
}

/// Those of the disks of a Xen's guests; and what a disk is, as in its node `params`: the name of a
/// file is not told.
pub(crate) fn of_xen(plan: &XenBlkPlan) -> String {
    let keys = json!({
        "simulated": "/handed",
        "direct": plan.direct,
        "logical_block_size": plan.logical_block_size,
        "num_queues": plan.num_queues,
        "cache": if plan.writeback { "writeback" } else { "writethrough" },
        "on_full": plan.on_full,
        "discard": plan.discard,
        "barrier": plan.barrier,
        "persistent": plan.persistent,
        "persistent_max": plan.persistent_max,
        "indirect_segments_max": plan.indirect_segments_max,
        "ring_page_order_max": plan.ring_page_order_max,
        "moderation": plan.moderation,
        "fault": plan.fault,
    });
    keys.to_string()
}

/// Those of a network device, with its address and its MTU as they are now.
pub(super) fn of_net(net: &NetPlan, device: &NetDevice) -> String {
    let mut keys = of_device("net", &net.device);
    keys["queue_pairs"] = net.queue_pairs.into();
    keys["reclaim"] = json!(net.reclaim);
    keys["offload"] = json!(net.offload);
    keys["hash_report"] = net.hash_report.into();
    let mac: MacAddress = device.mac();
    keys["mac"] = mac_text(mac).into();
    keys["mtu"] = device.mtu().into();
    keys["speed"] = net.speed.into();
    keys["fault"] = json!(net.fault);
    match &net.port {
        PortPlan::Null { generate } => {
            keys["null"] = true.into();
            keys["generate"] = Some(*generate).filter(|bytes| *bytes > 0).into();
        }
        // The device process is told the interface's own name, and opens nothing.
        PortPlan::Tap { .. } | PortPlan::TapFds(_) => keys["tap"] = "handed".into(),
        PortPlan::Macvtap { .. } => keys["macvtap"] = "handed".into(),
        // The plan refuses a device process for it.
        PortPlan::Switch(_) | PortPlan::Xdp { .. } => {}
    }
    if !matches!(net.port, PortPlan::Null { .. }) {
        keys["merge"] = net.merge.into();
    }
    keys.to_string()
}
