//! Limits per second of devices in device processes, as the operator set them. A device process
//! counts the work of its devices, and of a group that no other process has devices of. If others
//! have some, it has a lease (`leases.rs`).

use super::Processes;
use super::lease_file::ProcessLease;
use super::supervisor_client::Outgoing;
use manyring_config::plan::{GroupPlan, LimitPlan};
use manyring_engine::clock_now_ns;
use manyring_engine::limit::{Group, Limit, Rates};
use manyring_protocol::message::{Command, GroupRates, LimitRates};
use rustix::fd::OwnedFd;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use tokio::sync::{mpsc, watch};

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

    /// The command that sets the limit of `device`.
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

    /// Sets the groups of limits.
    pub(crate) fn follow_groups(&self, groups: &[GroupPlan]) {
        self.leases.follow(groups);
        self.limits.send_if_modified(|limits| Arc::make_mut(limits).follow(groups));
    }

    pub(super) fn limits(&self) -> watch::Receiver<Arc<Limits>> {
        self.limits.subscribe()
    }
}

/// Rates for a command.
fn said(Rates { ops, bytes, burst_ms }: Rates) -> LimitRates {
    LimitRates { ops, bytes, burst_ms }
}

/// Rates of a command.
fn rates_of(LimitRates { ops, bytes, burst_ms }: LimitRates) -> Rates {
    Rates { ops, bytes, burst_ms }
}

/// The groups of a device process, by name.
#[derive(Debug, Default)]
pub(super) struct ProcessGroups(BTreeMap<String, Arc<Group>>);

impl ProcessGroups {
    /// Sets the limit of a device, and the rates of its group. Queues must read them again.
    pub(super) fn limit(&mut self, limit: &Limit, rates: LimitRates, group: Option<GroupRates>) {
        let now_ns = clock_now_ns();
        let group = group.map(|GroupRates { name, rates }| {
            let group = self.0.entry(name).or_insert_with(|| Group::new(Rates::default(), now_ns));
            if group.rates() != rates_of(rates) {
                group.set(rates_of(rates), now_ns);
            }
            group.clone()
        });
        limit.set(rates_of(rates), group.as_ref(), now_ns);
    }

    /// From here on the supervisor divides a group among this process and others.
    pub(super) fn lease(
        &mut self,
        name: String,
        fds: Vec<OwnedFd>,
        outgoing: &mpsc::Sender<Outgoing>,
    ) -> Result<(), String> {
        let lease = ProcessLease::new(fds, outgoing.clone())
            .ok_or("supervisor: a lease without its files")?;
        let now_ns = clock_now_ns();
        let group = self.0.entry(name).or_insert_with(|| Group::new(Rates::default(), now_ns));
        group.lease(Arc::new(lease), now_ns);
        Ok(())
    }
}
