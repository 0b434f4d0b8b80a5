//! The snippets with which VMMs use a block device.

use super::{
    LIBVIRT_MEMORY, Wanted, cannot_listen, cloud_hypervisor_machine, crosvm, id, libvirt_socket,
    uml,
};
use crate::cli::Vmm;

/// The device ID of a block device (virtio 1.3 §5).
const VIRTIO_ID_BLOCK: u32 = 2;

/// Returns the snippet for this VMM.
pub(super) fn text(vmm: Vmm, wanted: &Wanted, queue_size: u16) -> Result<String, String> {
    if wanted.client && vmm != Vmm::Qemu {
        return Err(cannot_listen(&wanted.name));
    }
    Ok(match vmm {
        Vmm::Qemu => qemu(wanted),
        Vmm::Libvirt => libvirt(wanted),
        Vmm::CloudHypervisor => cloud_hypervisor(wanted, queue_size),
        Vmm::Crosvm => crosvm(wanted, "block", queue_size),
        Vmm::Firecracker => firecracker(wanted),
        Vmm::Uml => uml(wanted, VIRTIO_ID_BLOCK),
        Vmm::Helper => return super::storage_daemon::text(Some(&wanted.name)),
    })
}

fn qemu(wanted: &Wanted) -> String {
    let id = id("blk", &wanted.name);
    super::qemu::machine(wanted, &id, "server=on,wait=off")
        + &format!("  -device vhost-user-blk-pci,chardev={id},num-queues={}\n", wanted.queues)
}

fn libvirt(wanted: &Wanted) -> String {
    let (socket, queues) = (wanted.socket.display(), wanted.queues);
    let socket_comments = libvirt_socket(wanted);
    format!(
        "{LIBVIRT_MEMORY}{socket_comments}\
         <!-- in <devices> -->\n\
         <disk type='vhostuser' device='disk'>\n    \
           <driver name='qemu' type='raw' queues='{queues}'/>\n    \
           <source type='unix' path='{socket}'>\n      \
             <reconnect enabled='yes' timeout='1'/>\n    \
           </source>\n    \
           <target dev='vda' bus='virtio'/>\n\
         </disk>\n"
    )
}

fn cloud_hypervisor(wanted: &Wanted, queue_size: u16) -> String {
    let (socket, queues) = (wanted.socket.display(), wanted.queues);
    let disk = format!("vhost_user=true,socket={socket},num_queues={queues}");
    cloud_hypervisor_machine(wanted) + &format!("  --disk {disk},queue_size={queue_size}\n")
}

fn firecracker(wanted: &Wanted) -> String {
    let drive = serde_json::json!({
        "drives": [{
            "drive_id": id("blk", &wanted.name),
            "is_root_device": false,
            "socket": wanted.socket,
        }]
    });
    // Firecracker shares the guest's memory without an option if a drive has a socket, and uses one
    // queue.
    format!("{drive:#}\n")
}
