//! The description of a switch and its ports for the device process that serves them.
//!
//! The process gets the switch first, then all ports of the plan, and then devices. So the
//! addresses, VLANs and filters of all ports are in force before the first frame of a guest is
//! forwarded, also in a process that replaces one that died.

use crate::digits;
use serde::{Deserialize, Serialize};

/// Bytes of a bitmap with one bit for each of the 4096 VLAN numbers.
const VLAN_BYTES: usize = 512;

/// A switch between the devices of a process, without its ports.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct SwitchSpec {
    /// The name of the switch in the configuration.
    pub name: String,
    /// Seconds without a frame from an address after which the switch forgets the address.
    pub age: u32,
    /// The reserved groups whose frames are forwarded: bit n is 01:80:c2:00:00:0n.
    pub group_fwd_mask: u16,
}

/// A port of a switch.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct SwitchPortSpec {
    /// Number of queue pairs of the port's device.
    pub queue_pairs: usize,
    /// The VLANs of the port.
    pub vlans: VlansSpec,
    /// True if the port exchanges no frames with other isolated ports.
    pub isolated: bool,
    /// The address that is configured for the port's guest: the switch never learns it behind
    /// another port.
    pub mac: Option<[u8; 6]>,
    /// The only source address that the port's guest may use; `None`: any address.
    pub only: Option<[u8; 6]>,
    /// The most addresses that the switch learns behind the port.
    pub macs_max: u32,
    /// The most frames per second that the port may send to all other ports.
    pub floods_max: u32,
}

/// The VLANs of a port.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum VlansSpec {
    /// Every VLAN: frames keep their tags.
    All,
    /// This VLAN: the port's guest sends and receives untagged frames.
    Access(u16),
    /// These VLANs: the port's guest sends and receives frames of these VLANs with tags.
    Trunk(VlanSet),
}

/// A set of VLANs, as a bitmap: its message has the same length for any set.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct VlanSet(#[serde(with = "digits")] Vec<u8>);

impl VlanSet {
    /// Makes the set of these VLANs.
    #[must_use]
    pub fn of(vlans: &[u16]) -> Self {
        let mut bytes = vec![0; VLAN_BYTES];
        for vlan in vlans {
            if let Some(byte) = bytes.get_mut(usize::from(*vlan / 8)) {
                *byte |= 1 << (vlan % 8);
            }
        }
        Self(bytes)
    }

    /// Returns the VLANs in the set, in ascending order.
    #[must_use]
    pub fn all(&self) -> Vec<u16> {
        let has = |vlan: &u16| {
            let byte = self.0.get(usize::from(*vlan / 8)).copied().unwrap_or(0);
            byte & 1 << (vlan % 8) != 0
        };
        (0..4096).filter(has).collect()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A port whose numbers are as long as numbers get, in every VLAN that there is.
    pub(crate) fn largest_switch_port() -> SwitchPortSpec {
        let vlans: Vec<_> = (1..4095).collect();
        SwitchPortSpec {
            queue_pairs: usize::MAX,
            vlans: VlansSpec::Trunk(VlanSet::of(&vlans)),
            isolated: false,
            mac: Some([u8::MAX; 6]),
            only: Some([u8::MAX; 6]),
            macs_max: u32::MAX,
            floods_max: u32::MAX,
        }
    }

    #[test]
    fn a_set_of_vlans_is_read_as_it_was_written_and_has_no_others() {
        for vlans in [vec![], vec![1], vec![7, 8, 9, 4094], (1..4095).collect::<Vec<u16>>()] {
            let set = VlanSet::of(&vlans);
            let text = serde_json::to_string(&set).unwrap();
            assert_eq!(text.len(), 2 * VLAN_BYTES + 2);
            assert_eq!(serde_json::from_str::<VlanSet>(&text).unwrap().all(), vlans);
        }
        let short: VlanSet = serde_json::from_str("\"02\"").unwrap();
        assert_eq!(short.all(), [1]);
        assert!(serde_json::from_str::<VlanSet>("\"0\"").is_err());
    }
}
