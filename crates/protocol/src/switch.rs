//! A switch and its ports, as the device process of the switch needs them.
//!
//! The process gets the switch first, then every port that the plan has, and then devices. So the
//! addresses, VLANs and guards of all ports hold before the first frame of a guest passes, also in
//! a process that follows one that died.

use crate::digits;
use serde::{Deserialize, Serialize};

/// VLANs that a frame can have, as bits: one for each number of 12 bits.
const VLAN_BYTES: usize = 512;

/// A switch.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct SwitchSpec {
    /// Its name in the configuration.
    pub name: String,
    /// Seconds after which an address is forgotten that sends nothing.
    pub age: u32,
    /// The groups of bridges whose frames are passed on: bit n is 01:80:c2:00:00:0n.
    pub group_fwd_mask: u16,
}

/// A port of a switch.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct SwitchPortSpec {
    /// Queue pairs of its device.
    pub queue_pairs: usize,
    /// The VLANs that it is in.
    pub vlans: VlansSpec,
    /// The port exchanges no frames with other isolated ports.
    pub isolated: bool,
    /// The address that is configured for its guest: no other port learns it.
    pub mac: Option<[u8; 6]>,
    /// The only address that its guest may send as.
    pub only: Option<[u8; 6]>,
    /// Addresses that may be known behind it.
    pub macs_max: u32,
    /// Frames that it may flood in a second.
    pub floods_max: u32,
}

/// The VLANs of a port.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum VlansSpec {
    /// Every one; its guest sends and gets frames with the tags that they have.
    All,
    /// This one; its guest knows no tags.
    Access(u16),
    /// These; its guest sends and gets their frames with tags.
    Trunk(VlanSet),
}

/// Any set of VLANs, in a message of bounded length.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct VlanSet(#[serde(with = "digits")] Vec<u8>);

impl VlanSet {
    /// The set of these.
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

    /// The VLANs in it, in order.
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
