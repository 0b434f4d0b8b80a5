//! `ProcessGroups`: the groups of limits to which devices of this device process belong.

use crate::lease_file::ProcessLease;
use crate::supervisor_client::Outgoing;
use manyring_engine::clock_now_ns;
use manyring_engine::limit::{Group, Limit, Rates};
use manyring_protocol::message::{GroupRates, LimitRates};
use rustix::fd::OwnedFd;
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::mpsc;

/// Converts the rates in a command.
fn rates_of(LimitRates { ops, bytes, burst_ms }: LimitRates) -> Rates {
    Rates { ops, bytes, burst_ms }
}

/// The groups of a device process, by name.
#[derive(Debug, Default)]
pub(super) struct ProcessGroups(BTreeMap<String, Arc<Group>>);

impl ProcessGroups {
    /// Sets the limit of a device and the rates of its group. The caller then has the queues read
    /// both again.
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

    /// Adds a lease to a group: from here on the supervisor divides the group's rate among the
    /// processes that have such devices. `fds`: the two files of the lease.
    ///
    /// # Errors
    /// A text of one line: these are not the files of a lease.
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
