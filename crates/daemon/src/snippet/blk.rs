//! What a VMM is told of a block device.

use super::{Wanted, id};
use crate::cli::Vmm;

/// The text for the VMM.
pub(super) fn text(vmm: Vmm, wanted: &Wanted, queue_size: u16) -> Result<String, String> {
    if wanted.client && vmm != Vmm::Qemu {
        return Err(format!("{}: client: this VMM cannot listen for its back-end", wanted.name));
    }
    Ok(match vmm {
        Vmm::Qemu => qemu(wanted),
        Vmm::Libvirt => libvirt(wanted),
        Vmm::CloudHypervisor => cloud_hypervisor(wanted, queue_size),
        Vmm::Crosvm => crosvm(wanted),
        Vmm::Firecracker => firecracker(wanted),
        Vmm::Uml => uml(wanted),
    })
}

fn qemu(wanted: &Wanted) -> String {
    let (id, socket, queues) = (id("blk", &wanted.name), wanted.socket.display(), wanted.queues);
    let how = if wanted.client { "server=on,wait=off" } else { "reconnect=1" };
    format!(
        "qemu-system-x86_64 -machine q35,memory-backend=mem0 \\\n  \
         -m 1G -object memory-backend-memfd,id=mem0,size=1G,share=on \\\n  \
         -smp {queues} \\\n  \
         -chardev socket,id={id},path={socket},{how} \\\n  \
         -device vhost-user-blk-pci,chardev={id},num-queues={queues}\n"
    )
}

fn libvirt(wanted: &Wanted) -> String {
    let (socket, queues) = (wanted.socket.display(), wanted.queues);
    format!(
        "<!-- in <domain> -->\n\
         <memoryBacking>\n  \
           <source type='memfd'/>\n  \
           <access mode='shared'/>\n\
         </memoryBacking>\n\
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
    format!(
        "cloud-hypervisor --cpus boot={queues} --memory size=1G,shared=on \\\n  \
         --disk vhost_user=true,socket={socket},num_queues={queues},queue_size={queue_size}\n"
    )
}

fn crosvm(wanted: &Wanted) -> String {
    let (socket, queues) = (wanted.socket.display(), wanted.queues);
    format!("crosvm run --cpus {queues} --mem 1024 \\\n  --vhost-user block,socket={socket}\n")
}

fn firecracker(wanted: &Wanted) -> String {
    let drive = serde_json::json!({
        "drives": [{
            "drive_id": id("blk", &wanted.name),
            "is_root_device": false,
            "socket": wanted.socket,
        }]
    });
    // Firecracker shares the memory itself once a drive has a socket; it uses one queue.
    format!("{drive:#}\n")
}

fn uml(wanted: &Wanted) -> String {
    // 2 is VIRTIO_ID_BLOCK. The memory of UML is a file that it shares with its back-ends.
    format!("linux mem=512M virtio_uml.device={}:2\n", wanted.socket.display())
}
