//! Tells whether a command of the guest can have its effect on this port (virtio 1.3 §5.1.6.5). If
//! the host prevents a part of the effect, the command is answered with `VIRTIO_NET_ERR`: a driver
//! must not believe that such a command succeeded.
//!
//! ```text
//! PROMISC, ALLUNI on                 lacks frames to other addresses: a macvtap, a card by AF_XDP
//! ALLMULTI on, a table with groups   lacks groups: the daemon may not have the interface join all
//! a table with another address,      lacks frames to that address, or frames from it are dropped:
//! MAC_ADDR_SET                       a port of a switch with anti_spoof
//! VLAN_ADD                           lacks its frames: a port of a switch that is not in it
//! ```
//! A tap, a null port and the port of a switch filter nothing else: the device itself filters the
//! frames as the driver asks. Every other command is carried out by this process alone, or by a
//! call of the port that reports a failure; so is each command that turns something off or removes
//! it.

use super::refusal::CtrlRefusal;
use manyring_backend::net::Port;
use manyring_wire::net::{Command, MacAddress, RxMode};

/// Returns the reason why the host prevents a part of the effect of `command`, for a guest with the
/// MAC address `mac`; `None`: it prevents nothing. Does not block.
pub(super) fn lacking(port: &dyn Port, mac: MacAddress, command: &Command) -> Option<CtrlRefusal> {
    let host = port.host_filter();
    // Checks a MAC address that the driver wants: the host may deliver frames only to the address
    // in `only_to`, and drop frames that do not come from the one in `only_from`.
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
        // VLAN 0 is always allowed: a driver adds it for frames that have a priority but no VLAN.
        Command::VlanAdd(id) if *id != 0 && !port.carries_vlan(*id) => Some(CtrlRefusal::Vlan),
        _ => None,
    }
}
