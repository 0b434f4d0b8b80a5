//! The snippets with which VMMs use a network device.

use super::{
    LIBVIRT_MEMORY, Wanted, cannot_listen, cloud_hypervisor_machine, crosvm, id, libvirt_socket,
    uml,
};
use crate::cli::Vmm;
use manyring_config::plan::mac_text;
use manyring_device::net::MacAddress;

/// The device ID of a network device (virtio 1.3 §5).
const VIRTIO_ID_NET: u32 = 1;
/// The ring size for crosvm: QEMU's default. The guest posts a buffer for each entry.
const CROSVM_QUEUE_SIZE: u16 = 256;

/// Hides `VIRTIO_NET_F_CTRL_GUEST_OFFLOADS` from the driver. QEMU accepts a change of the offloads
/// itself and does not forward it to the back-end, which would continue to send segmented frames to
/// a driver that has just turned them off for an XDP program.
const OFFLOADS_KEPT: &str = ",ctrl_guest_offloads=off";

/// Returns the snippet for this VMM. MAC address and MTU are in it if the VMM provides the config
/// space itself.
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
        _ if wanted.client && !can_listen => Err(cannot_listen(name)),
        Vmm::Qemu => Ok(qemu(wanted, mac, mtu)),
        Vmm::Libvirt => Ok(libvirt(wanted, mac, mtu)),
        Vmm::CloudHypervisor => Ok(cloud_hypervisor(wanted, mac, mtu)),
        // crosvm reads address, MTU and queue pairs from the back-end's configuration space.
        Vmm::Crosvm => Ok(crosvm(wanted, "net", CROSVM_QUEUE_SIZE)),
        Vmm::Uml => Ok(uml(wanted, VIRTIO_ID_NET)),
        Vmm::Helper => super::storage_daemon::text(Some(&wanted.name)),
    }
}

/// Returns `before`, the value and `after` as one text; an empty text without a value.
fn part<T: std::fmt::Display>(before: &str, value: Option<T>, after: &str) -> String {
    value.map(|value| format!("{before}{value}{after}")).unwrap_or_default()
}

fn qemu(wanted: &Wanted, mac: Option<MacAddress>, mtu: Option<u16>) -> String {
    let (id, pairs) = (id("net", &wanted.name), wanted.queues);
    let (mac, mtu) = (part(",mac=", mac.map(mac_text), ""), part(",host_mtu=", mtu, ""));
    // An MSI-X vector for each queue, one for the control queue, and one for changes of the
    // configuration.
    let multi = match pairs {
        1 => String::new(),
        _ => format!(",mq=on,vectors={}", 2 * pairs + 2),
    };
    super::qemu::machine(wanted, &id, "server=on")
        + &format!(
            "  -netdev vhost-user,id=netdev_{id},chardev={id},queues={pairs} \\\n  \
             -device virtio-net-pci,netdev=netdev_{id}{mac}{mtu}{multi}{OFFLOADS_KEPT}\n"
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
    let socket_comments = libvirt_socket(wanted);
    format!(
        "{LIBVIRT_MEMORY}{socket_comments}\
         <!-- in <devices> -->\n\
         <interface type='vhostuser'>\n\
         {mac}{source}  <model type='virtio'/>\n  \
           <driver queues='{pairs}'/>\n\
         {mtu}</interface>\n"
    )
}

fn cloud_hypervisor(wanted: &Wanted, mac: Option<MacAddress>, mtu: Option<u16>) -> String {
    let (socket, queues) = (wanted.socket.display(), 2 * wanted.queues);
    let how = if wanted.client { ",vhost_mode=server" } else { "" };
    let (mac, mtu) = (part(",mac=", mac.map(mac_text), ""), part(",mtu=", mtu, ""));
    let net = format!("vhost_user=true,socket={socket}{how},num_queues={queues}");
    cloud_hypervisor_machine(wanted) + &format!("  --net {net}{mac}{mtu}\n")
}
