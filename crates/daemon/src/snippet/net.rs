//! What a VMM is told of a network device.

use super::{Wanted, id};
use crate::cli::Vmm;
use crate::config::plan::mac_text;
use manyring_device::net::MacAddress;

/// The text for the VMM. Where the VMM owns the config space, it must be told address and MTU too.
pub(super) fn text(
    vmm: Vmm,
    wanted: &Wanted,
    mac: Option<MacAddress>,
    mtu: Option<u16>,
) -> Result<String, String> {
    let can_listen = matches!(vmm, Vmm::Qemu | Vmm::Libvirt | Vmm::CloudHypervisor);
    let name = &wanted.name;
    match vmm {
        Vmm::Firecracker => {
            Err(format!("{name}: Firecracker has no vhost-user network device: take another VMM"))
        }
        _ if wanted.client && !can_listen => {
            Err(format!("{name}: client: this VMM cannot listen for its back-end"))
        }
        Vmm::Qemu => Ok(qemu(wanted, mac, mtu)),
        Vmm::Libvirt => Ok(libvirt(wanted, mac, mtu)),
        Vmm::CloudHypervisor => Ok(cloud_hypervisor(wanted, mac, mtu)),
        Vmm::Crosvm => Ok(crosvm(wanted)),
        Vmm::Uml => Ok(uml(wanted)),
    }
}

/// `before`, the value and `after`, if there is a value.
fn part<T: std::fmt::Display>(before: &str, value: Option<T>, after: &str) -> String {
    value.map(|value| format!("{before}{value}{after}")).unwrap_or_default()
}

fn qemu(wanted: &Wanted, mac: Option<MacAddress>, mtu: Option<u16>) -> String {
    let (id, socket, pairs) = (id("net", &wanted.name), wanted.socket.display(), wanted.queues);
    let how = if wanted.client { "server=on" } else { "reconnect=1" };
    let (mac, mtu) = (part(",mac=", mac.map(mac_text), ""), part(",host_mtu=", mtu, ""));
    // An interrupt for each queue, and two for the control queue and changes of the configuration.
    let multi = match pairs {
        1 => String::new(),
        _ => format!(",mq=on,vectors={}", 2 * pairs + 2),
    };
    format!(
        "qemu-system-x86_64 -machine q35,memory-backend=mem0 \\\n  \
         -m 1G -object memory-backend-memfd,id=mem0,size=1G,share=on \\\n  \
         -smp {pairs} \\\n  \
         -chardev socket,id={id},path={socket},{how} \\\n  \
         -netdev vhost-user,id=netdev_{id},chardev={id},queues={pairs} \\\n  \
         -device virtio-net-pci,netdev=netdev_{id}{mac}{mtu}{multi}\n"
    )
}

fn libvirt(wanted: &Wanted, mac: Option<MacAddress>, mtu: Option<u16>) -> String {
    let (socket, pairs) = (wanted.socket.display(), wanted.queues);
    let mac = part("  <mac address='", mac.map(mac_text), "'/>\n");
    let mtu = part("  <mtu size='", mtu, "'/>\n");
    let source = if wanted.client {
        format!("  <source type='unix' path='{socket}' mode='server'/>\n")
    } else {
        format!(
            "  <source type='unix' path='{socket}' mode='client'>\n    \
               <reconnect enabled='yes' timeout='1'/>\n  \
             </source>\n"
        )
    };
    format!(
        "<!-- in <domain> -->\n\
         <memoryBacking>\n  \
           <source type='memfd'/>\n  \
           <access mode='shared'/>\n\
         </memoryBacking>\n\
         <!-- in <devices> -->\n\
         <interface type='vhostuser'>\n\
         {mac}{source}  <model type='virtio'/>\n  \
           <driver queues='{pairs}'/>\n\
         {mtu}</interface>\n"
    )
}

fn cloud_hypervisor(wanted: &Wanted, mac: Option<MacAddress>, mtu: Option<u16>) -> String {
    let (socket, pairs) = (wanted.socket.display(), wanted.queues);
    let how = if wanted.client { ",vhost_mode=server" } else { "" };
    let (mac, mtu) = (part(",mac=", mac.map(mac_text), ""), part(",mtu=", mtu, ""));
    format!(
        "cloud-hypervisor --cpus boot={pairs} --memory size=1G,shared=on \\\n  \
         --net vhost_user=true,socket={socket}{how},num_queues={}{mac}{mtu}\n",
        2 * pairs
    )
}

fn crosvm(wanted: &Wanted) -> String {
    let (socket, pairs) = (wanted.socket.display(), wanted.queues);
    // It reads address, MTU and queue pairs out of the device's config space.
    format!("crosvm run --cpus {pairs} --mem 1024 \\\n  --vhost-user net,socket={socket}\n")
}

fn uml(wanted: &Wanted) -> String {
    // 1 is VIRTIO_ID_NET. The memory of UML is a file that it shares with its back-ends.
    format!("linux mem=512M virtio_uml.device={}:1\n", wanted.socket.display())
}
