//! Checks of switches: their names, their uplinks, and the ports that name them.

use super::{Plan, PlanError, PortKind, PortPlan};
use std::collections::HashSet;

/// Checks that each switch has a name of its own, that the switch of each port exists, and that no
/// two switches or devices use the same uplink.
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
        if let PortPlan::Switch(port) = &net.port
            && !names.contains(port.switch.as_str())
        {
            let problem = format!("no [[switch]] is named {:?}", port.switch);
            return place.error("switch", problem);
        }
        let PortKind { key, interface, .. } = net.port.kind();
        if interface.is_some_and(|name| uplinks.contains(name)) {
            return place.error(key, "is already used as the uplink of a [[switch]]");
        }
    }
    Ok(())
}
