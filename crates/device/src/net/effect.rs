//! Whether a command of the guest can have its effect on this port (virtio 1.3 §5.1.6.5). If the
//! host prevents a part of the effect, the command is answered with `VIRTIO_NET_ERR`: a driver must
//! not believe that a command succeeded which did not.
//!
//! ```text
//! PROMISC, ALLUNI on                 lacks frames to other addresses: a macvtap, a card by AF_XDP
//! ALLMULTI on, a table with groups   lacks groups: the daemon may not have the interface join all
//! a table with another address,      lacks frames to that address, or frames from it are dropped:
//!   MAC_ADDR_SET                       a port of a switch with anti_spoof
//! VLAN_ADD                           lacks its frames: a port of a switch that is not in it
//! ```
//! A tap, a null port and the port of a switch filter nothing else: the device filters the frames
//! as the driver asks. This process alone can carry out every other command, and every command that
//! turns something off or removes it; or it makes a call of the port, which reports a failure.

use super::refusal::CtrlRefusal;
use manyring_backend::net::Port;
use manyring_wire::net::{Command, MacAddress, RxMode};

/// Why the host prevents a part of the effect of `command`, for a guest with the address `mac`;
/// `None`: the command can have its whole effect. Does not block.
pub(super) fn lacking(port: &dyn Port, mac: MacAddress, command: &Command) -> Option<CtrlRefusal> {
    let host = port.host_filter();
    // The host does not deliver frames to another address, or drops frames from that address.
    let other = |wanted: MacAddress| {
        let is_other = |only: Option<MacAddress>| only.is_some_and(|only| only != wanted);
        if is_other(host.only_to) {
            return Some(CtrlRefusal::OnlyTo);
        }
        is_other(host.only_from).then_some(CtrlRefusal::OnlyFrom)
    };
    let groups = host.lacks_groups.then_some(CtrlRefusal::Groups);
    match command {
        Command::Rx(RxMode::Promisc, true) => host.only_to.map(|_| CtrlRefusal::OnlyTo).or(groups),
        Command::Rx(RxMode::AllUni, true) => host.only_to.map(|_| CtrlRefusal::OnlyTo),
        Command::Rx(RxMode::AllMulti, true) => groups,
        Command::MacTable(table) => {
            let addresses = table.unicast.iter().filter(|wanted| **wanted != mac);
            let lacks = addresses.copied().find_map(other);
            lacks.or(groups.filter(|_| !table.multicast.is_empty()))
        }
        Command::MacAddr(wanted) if *wanted != mac => other(*wanted),
        // A driver adds VLAN 0 for frames that have only a priority.
        Command::VlanAdd(id) if *id != 0 && !port.carries_vlan(*id) => Some(CtrlRefusal::Vlan),
        _ => None,
    }
}
