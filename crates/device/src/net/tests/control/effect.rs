//! Every command at every kind of port: what the host keeps from having its effect is refused.

use super::*;
use manyring_backend::net::HostFilter;

const OTHER: MacAddress = [2, 0, 0, 0, 0, 8];
const GROUP: MacAddress = [0x33, 0x33, 0, 0, 0, 7];

/// What there may be in front of a guest: the host's filter, and the VLANs that do not reach it.
#[derive(Clone, Copy, Debug)]
struct Host {
    filter: HostFilter,
    carries_vlans: bool,
}

/// A tap, a null port, a port of a switch, a macvtap in mode `passthru`.
const OPEN: Host = Host {
    filter: HostFilter { only_to: None, only_from: None, lacks_groups: false },
    carries_vlans: true,
};

fn host(filter: HostFilter) -> Host {
    Host { filter, carries_vlans: true }
}

/// A guest behind `host`, whose own filter is no longer promiscuous.
fn guest_behind(host: Host) -> Guest {
    let mut guest = Guest::new(EVERYTHING);
    guest.port.script().host = (host.filter, host.carries_vlans);
    assert_eq!(guest.command(class::RX, class::RX_PROMISC, &[0]), OK, "less is always done");
    guest
}

fn table(unicast: &[MacAddress], multicast: &[MacAddress]) -> Vec<u8> {
    let list =
        |macs: &[MacAddress]| [&len32(macs.len()).to_le_bytes(), macs.as_flattened()].concat();
    [list(unicast), list(multicast)].concat()
}

/// The names of the commands that are refused.
fn refused(guest: &mut Guest) -> Vec<&'static str> {
    let own = guest.device.mac();
    let (rx, mac, vlan) = (class::RX, class::MAC, class::VLAN);
    let of_filters = [
        ("promisc", rx, class::RX_PROMISC, vec![1]),
        ("no promisc", rx, class::RX_PROMISC, vec![0]),
        ("allmulti", rx, class::RX_ALLMULTI, vec![1]),
        ("no allmulti", rx, class::RX_ALLMULTI, vec![0]),
        ("alluni", rx, class::RX_ALLUNI, vec![1]),
        ("no alluni", rx, class::RX_ALLUNI, vec![0]),
        ("nomulti", rx, class::RX_NOMULTI, vec![1]),
        ("nouni", rx, class::RX_NOUNI, vec![1]),
        ("nobcast", rx, class::RX_NOBCAST, vec![1]),
        ("no table", mac, class::MAC_TABLE_SET, table(&[], &[])),
        ("own in table", mac, class::MAC_TABLE_SET, table(&[own], &[])),
        ("groups in table", mac, class::MAC_TABLE_SET, table(&[], &[GROUP])),
        ("other in table", mac, class::MAC_TABLE_SET, table(&[own, OTHER], &[])),
        ("own address", mac, class::MAC_ADDR_SET, own.to_vec()),
        ("vlan", vlan, class::VLAN_ADD, vec![5, 0]),
        ("vlan 0", vlan, class::VLAN_ADD, vec![0, 0]),
        ("no vlan", vlan, class::VLAN_DEL, vec![5, 0]),
        ("address", mac, class::MAC_ADDR_SET, OTHER.to_vec()),
    ];
    let mut refused = Vec::new();
    for (name, kind, command, data) in of_filters {
        if guest.command(kind, command, &data) == ERR {
            refused.push(name);
        }
    }
    // Nothing of all others is the host filter's.
    for (kind, command, data, _) in commands() {
        if ![rx, mac, vlan].contains(&kind) {
            assert_eq!(guest.command(kind, command, &data), OK, "{kind} {command}");
        }
    }
    refused
}

#[test]
fn a_command_is_refused_exactly_where_the_host_keeps_it_from_having_its_effect() {
    let own = [2, 0, 0, 0, 0, 9];
    let of =
        |only_to, only_from, lacks_groups| host(HostFilter { only_to, only_from, lacks_groups });
    let no_vlans = Host { carries_vlans: false, ..OPEN };
    let addresses = ["promisc", "alluni", "other in table", "address"];
    let groups = ["promisc", "allmulti", "groups in table"];
    for (host, expected) in [
        (OPEN, &[][..]),
        // A macvtap, or a network card by AF_XDP.
        (of(Some(own), None, false), &addresses),
        // The daemon has no right to join all groups.
        (of(None, None, true), &groups),
        // A port of a switch with `anti_spoof`.
        (of(None, Some(own), false), &["other in table", "address"]),
        (no_vlans, &["vlan"]),
    ] {
        assert_eq!(refused(&mut guest_behind(host)), expected, "{host:?}");
    }
    let mut all = guest_behind(of(Some(own), Some(own), true));
    let both = ["promisc", "allmulti", "alluni", "groups in table", "other in table", "address"];
    assert_eq!(refused(&mut all), both);
}

#[test]
fn an_address_that_the_interface_has_may_be_set_and_no_other() {
    let only_to = HostFilter { only_to: Some(OTHER), ..HostFilter::default() };
    let mut guest = guest_behind(host(only_to));
    let set =
        |guest: &mut Guest, mac: MacAddress| guest.command(class::MAC, class::MAC_ADDR_SET, &mac);
    assert_eq!(set(&mut guest, [2, 0, 0, 0, 0, 7]), ERR);
    assert_eq!(guest.device.mac(), [2, 0, 0, 0, 0, 9], "refused, and not set");
    assert_eq!(set(&mut guest, OTHER), OK);
    assert_eq!(guest.device.mac(), OTHER);
}

#[test]
fn what_the_host_passes_reaches_a_guest_whose_wish_is_not_fulfilled() {
    let own = [2, 0, 0, 0, 0, 9];
    let filter = HostFilter { only_to: Some(own), only_from: None, lacks_groups: true };
    let mut guest = guest_behind(host(filter));
    let passes = |guest: &Guest, to: MacAddress| {
        let frame = [&to[..], &[2; 6], &[0x86, 0xdd], &[0; 4]].concat();
        guest.device.0.rules().filter.is_none_or(|filter| filter.passes(&frame))
    };
    assert!(!passes(&guest, GROUP));
    // The guest's kernel goes on as if its list were complete, and never sends it again.
    let list = table(&[OTHER], &[GROUP]);
    assert_eq!(guest.command(class::MAC, class::MAC_TABLE_SET, &list), ERR);
    assert!(passes(&guest, GROUP) && passes(&guest, OTHER) && !passes(&guest, [2; 6]));
    assert_eq!(guest.command(class::RX, class::RX_PROMISC, &[1]), ERR);
    assert!(passes(&guest, [2; 6]));
    assert_eq!(guest.command(class::RX, class::RX_PROMISC, &[0]), OK);
    assert!(!passes(&guest, [2; 6]));
}
