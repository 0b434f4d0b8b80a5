//! The plan of a switch, and of a port of one.

use super::{Place, PlanError, Source, device_place};
use crate::numbers;
use crate::tables::{RawNet, RawSwitch};
use manyring_backend::net::switch::{AGE, FLOODS_MAX, MACS_MAX};
use manyring_backend::net::tap::check_name;
use manyring_device::net::MacAddress;
use manyring_protocol::switch::{SwitchPortSpec, SwitchSpec, VlanSet, VlansSpec};
use serde::Serialize;

/// The bit of the group 01:80:c2:00:00:01, to which PAUSE frames are sent (802.3 annex 31B).
const PAUSE: u32 = 1 << 1;

/// A switch between network devices, which the daemon or a device process serves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SwitchPlan {
    /// The place of the switch's keys, for errors.
    #[serde(skip)]
    pub place: Place,
    /// Name of the switch, unique.
    pub name: String,
    /// Seconds without a frame from an address after which the switch forgets the address.
    pub age: u32,
    /// The reserved groups whose frames are forwarded: bit n is 01:80:c2:00:00:0n.
    pub group_fwd_mask: u16,
    /// The interface that connects the switch to the host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uplink: Option<String>,
    /// The kind of interface that the uplink opens: a tap, a macvtap or an AF_XDP socket.
    pub uplink_kind: UplinkKind,
}

/// The kind of interface that an uplink is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum UplinkKind {
    /// A tap, which is created if it does not exist.
    #[default]
    Tap,
    /// A macvtap that exists.
    Macvtap,
    /// Any interface, by AF_XDP.
    Xdp,
}

/// A port of a switch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SwitchPortPlan {
    /// Name of the switch.
    pub switch: String,
    /// The VLAN of the port: its guest sends and receives untagged frames.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vlan: Option<u16>,
    /// The VLANs of the port: the guest sends and receives frames of these VLANs with tags.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub trunk: Vec<u16>,
    /// True if the port exchanges no frames with other isolated ports.
    pub isolated: bool,
    /// True if frames whose source is not the guest's own address are dropped.
    pub anti_spoof: bool,
    /// The most source addresses that the switch learns from the port.
    pub macs_max: u32,
    /// The most frames per second that the port may send to all other ports.
    pub floods_max: u32,
}

impl SwitchPlan {
    /// Makes the description of the switch for its device process.
    #[must_use]
    pub fn spec(&self) -> SwitchSpec {
        let Self {
            name,
            age,
            group_fwd_mask,
            // Only errors to the operator name the place of a key.
            place: _,
            // The supervisor opens the interface, and hands over its queue and properties.
            uplink: _,
            uplink_kind: _,
        } = self;
        SwitchSpec { name: name.clone(), age: *age, group_fwd_mask: *group_fwd_mask }
    }

    pub(super) fn new(raw: RawSwitch, index: usize, source: Source) -> Result<Self, PlanError> {
        let name = raw.name.unwrap_or_else(|| format!("switch{index}"));
        let place = device_place(&name, "[[switch]]", source)?;
        let age = raw.age.unwrap_or(AGE);
        numbers::check("age", age, &place)?;
        let mask = raw.group_fwd_mask.unwrap_or(0);
        numbers::check("group_fwd_mask", mask, &place)?;
        if mask & PAUSE != 0 {
            let problem = format!("{mask:#x} has bit 1: PAUSE frames end at every port (802.3)");
            return place.error("group_fwd_mask", problem);
        }
        let group_fwd_mask = u16::try_from(mask).unwrap_or(0);
        if let Some(Err(error)) = raw.uplink.as_deref().map(check_name) {
            return place.error("uplink", error.to_string());
        }
        let uplink_kind = match raw.uplink_kind.as_deref() {
            Some(_) if raw.uplink.is_none() => {
                return place.error("uplink_kind", format!("needs {}", place.key("uplink")));
            }
            None | Some("tap") => UplinkKind::Tap,
            Some("macvtap") => UplinkKind::Macvtap,
            Some("xdp") => UplinkKind::Xdp,
            Some(text) => {
                let problem = format!("{text:?} is not one of \"tap\", \"macvtap\" and \"xdp\"");
                return place.error("uplink_kind", problem);
            }
        };
        Ok(Self { place, name, age, group_fwd_mask, uplink: raw.uplink, uplink_kind })
    }
}

impl SwitchPortPlan {
    /// Plans the port of a device that has the key `switch`; `None` without the key.
    pub(super) fn new(raw: &RawNet, place: &Place) -> Result<Option<Self>, PlanError> {
        let Some(switch) = raw.switch.clone() else {
            for (key, is_set) in [
                ("vlan", raw.vlan.is_some()),
                ("trunk", raw.trunk.is_some()),
                ("isolated", raw.isolated),
                ("anti_spoof", raw.anti_spoof),
                ("macs_max", raw.macs_max.is_some()),
                ("floods_max", raw.floods_max.is_some()),
            ] {
                if is_set {
                    return place.error(key, format!("needs {}", place.key("switch")));
                }
            }
            return Ok(None);
        };
        let trunk = raw.trunk.clone().unwrap_or_default();
        if raw.trunk.as_ref().is_some_and(Vec::is_empty) {
            return place.error("trunk", "is empty");
        }
        if raw.vlan.is_some() && raw.trunk.is_some() {
            return place.error("vlan", format!("cannot be combined with {}", place.key("trunk")));
        }
        Ok(Some(Self {
            switch,
            vlan: raw.vlan,
            trunk,
            isolated: raw.isolated,
            anti_spoof: raw.anti_spoof,
            macs_max: raw.macs_max.unwrap_or(MACS_MAX),
            floods_max: raw.floods_max.unwrap_or(FLOODS_MAX),
        }))
    }

    /// Makes the description of the port for the process that serves the switch. `mac`: the
    /// configured address. `has`: the address that the guest has, which is `mac` or was derived.
    #[must_use]
    pub fn spec(
        &self,
        queue_pairs: usize,
        mac: Option<MacAddress>,
        has: MacAddress,
    ) -> SwitchPortSpec {
        let Self {
            vlan,
            trunk,
            isolated,
            anti_spoof,
            macs_max,
            floods_max,
            // The process has one switch.
            switch: _,
        } = self;
        let vlans = match vlan {
            Some(vlan) => VlansSpec::Access(*vlan),
            None if trunk.is_empty() => VlansSpec::All,
            None => VlansSpec::Trunk(VlanSet::of(trunk)),
        };
        SwitchPortSpec {
            queue_pairs,
            vlans,
            isolated: *isolated,
            mac,
            only: anti_spoof.then_some(has),
            macs_max: *macs_max,
            floods_max: *floods_max,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::plan;

    const SWITCH: &str = "[[switch]]\nname = 's0'\n";
    const NET: &str = "[[net]]\nname = 'a'\nsocket_path = '/s'\n";

    #[test]
    fn a_port_names_a_switch_that_there_is() {
        let good = plan(&format!("{SWITCH}age = 60\n{NET}switch = 's0'\nvlan = 5\n")).unwrap();
        assert_eq!((good.switch[0].age, good.net[0].options.queue_pairs), (60, 1));
        for (text, words) in [
            (format!("{NET}switch = 's0'"), "a: switch: no [[switch]] is named \"s0\""),
            (
                format!("{SWITCH}{SWITCH}{NET}switch = 's0'"),
                "s0: name: is already used by another [[switch]]",
            ),
            (format!("{SWITCH}age = 0\n{NET}switch = 's0'"), "s0: age"),
            (
                format!("{SWITCH}group_fwd_mask = 0x1_0000\n{NET}switch = 's0'"),
                "s0: group_fwd_mask",
            ),
            (format!("{SWITCH}group_fwd_mask = 0x4002\n{NET}switch = 's0'"), "has bit 1: PAUSE"),
            (format!("{SWITCH}uplink = 't/t'\n{NET}switch = 's0'"), "s0: uplink"),
            (
                format!("{SWITCH}uplink = 't'\n{NET}tap = 't'"),
                "a: tap: is already used as the uplink of a [[switch]]",
            ),
            (
                format!("{SWITCH}uplink = 't'\n{NET}xdp = 't'"),
                "a: xdp: is already used as the uplink of a [[switch]]",
            ),
            (format!("{SWITCH}uplink_kind = 'xdp'\n{NET}tap = 't'"), "uplink_kind: needs uplink"),
            (
                format!("{SWITCH}uplink = 't'\nuplink_kind = 'veth'\n{NET}tap = 't'"),
                "s0: uplink_kind: \"veth\" is not one of \"tap\", \"macvtap\" and \"xdp\"",
            ),
        ] {
            let error = plan(&text).expect_err(words);
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn the_keys_of_a_port_contradict_what_is_none() {
        for (keys, words) in [
            ("tap = 't'\nvlan = 5", "vlan: needs switch"),
            ("tap = 't'\nswitch = 's0'", "only one of"),
            ("switch = 's0'\nvlan = 4095", "vlan: 4095"),
            ("switch = 's0'\nvlan = 5\ntrunk = [6]", "vlan: cannot be combined with trunk"),
            ("switch = 's0'\ntrunk = []", "trunk: is empty"),
            ("switch = 's0'\ntrunk = [0]", "trunk: 0"),
            ("switch = 's0'\nmacs_max = 0", "macs_max"),
            ("switch = 's0'\nbridge = 'b'", "bridge: needs tap"),
            ("switch = 's0'\ndomain = 'd'", "domain: cannot be combined with switch"),
        ] {
            let error = plan(&format!("{SWITCH}{NET}{keys}\n")).expect_err(keys);
            assert!(error.contains(words), "{keys}: {error}");
        }
    }
}
