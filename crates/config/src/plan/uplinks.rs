//! Ports of switches that there are, and uplinks that nobody else has.

use super::{Plan, PlanError, PortPlan};
use std::collections::HashSet;

/// Checks that each port is of a switch that there is, and that nobody else has an uplink.
pub(super) fn check(plan: &Plan) -> Result<(), PlanError> {
    let (mut names, mut uplinks) = (HashSet::new(), HashSet::new());
    for switch in &plan.switch {
        if !names.insert(switch.name.as_str()) {
            return switch.place.error("name", "is already used by another [[switch]]");
        }
        if let Some(uplink) = &switch.uplink
            && !uplinks.insert(uplink.as_str())
        {
            return switch.place.error("uplink", "is already used by another [[switch]]");
        }
    }
    for net in &plan.net {
        let place = &net.device.place;
        match &net.port {
            PortPlan::Switch(port) if !names.contains(port.switch.as_str()) => {
                let problem = format!("no [[switch]] is named {:?}", port.switch);
                return place.error("switch", problem);
            }
            PortPlan::Tap { name, .. } if uplinks.contains(name.as_str()) => {
                return place.error("tap", "is already used as the uplink of a [[switch]]");
            }
            PortPlan::Macvtap { name } if uplinks.contains(name.as_str()) => {
                return place.error("macvtap", "is already used as the uplink of a [[switch]]");
            }
            PortPlan::Xdp { name, .. } if uplinks.contains(name.as_str()) => {
                return place.error("xdp", "is already used as the uplink of a [[switch]]");
            }
            _ => {}
        }
    }
    Ok(())
}
