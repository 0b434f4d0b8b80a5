//! The operator's limits per second for devices in device processes. A device process applies the
//! limits of its devices itself. It also applies the limit of a group if it has all devices of the
//! group; otherwise each process with devices of the group has a lease (`lease_holders.rs`).

use super::Processes;
use manyring_config::plan::{GroupPlan, LimitPlan};
use manyring_engine::limit::Rates;
use manyring_protocol::message::{Command, GroupRates, LimitRates};
use std::collections::HashMap;
use std::sync::Arc;
use tokio::sync::watch;

/// The limits of all devices, and the rates of all groups.
#[derive(Clone, Debug, Default)]
pub(super) struct Limits {
    devices: HashMap<String, LimitPlan>,
    groups: Vec<GroupPlan>,
}

impl Limits {
    /// Sets the limit of a device. True if it changed.
    pub(super) fn set(&mut self, device: &str, limit: &LimitPlan) -> bool {
        self.devices.insert(device.to_owned(), limit.clone()).as_ref() != Some(limit)
    }

    /// Sets the groups. True if they changed.
    pub(super) fn follow(&mut self, groups: &[GroupPlan]) -> bool {
        let is_new = self.groups != groups;
        self.groups = groups.to_vec();
        is_new
    }

    /// Returns the command that sets the limit of `device`.
    pub(super) fn of(&self, device: &str) -> Command {
        let limit = self.devices.get(device).cloned().unwrap_or_default();
        let rates = said(limit.rates());
        let group = limit.group.map(|name| {
            let plan = self.groups.iter().find(|plan| plan.name == name);
            let rates = said(plan.map(|plan| plan.limit.rates()).unwrap_or_default());
            GroupRates { name, rates }
        });
        Command::Limit { device: device.to_owned(), rates, group }
    }
}

impl Processes {
    /// Sets the limit of a device.
    pub(crate) fn limit(&self, device: &str, limit: &LimitPlan) {
        self.limits.send_if_modified(|limits| Arc::make_mut(limits).set(device, limit));
    }

    /// Sets the rates of the groups of limits.
    pub(crate) fn follow_groups(&self, groups: &[GroupPlan]) {
        self.leases.follow(groups);
        self.limits.send_if_modified(|limits| Arc::make_mut(limits).follow(groups));
    }

    pub(super) fn limits(&self) -> watch::Receiver<Arc<Limits>> {
        self.limits.subscribe()
    }
}

/// Converts rates for a command.
fn said(Rates { ops, bytes, burst_ms }: Rates) -> LimitRates {
    LimitRates { ops, bytes, burst_ms }
}
