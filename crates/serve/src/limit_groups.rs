//! The groups of devices that share a limit, in this process.

use manyring_config::plan::{GroupPlan, LimitPlan};
use manyring_engine::clock_now_ns;
use manyring_engine::limit::{Group, Limit, Rates};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// The groups of limits, by name. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Groups(Arc<Mutex<BTreeMap<String, Arc<Group>>>>);

impl Groups {
    /// Sets the rates of all groups at once; a group that no plan names gets no limit. Returns the
    /// names of the groups whose rates changed: the caller has the queues of their devices read the
    /// limits again.
    pub fn follow(&self, plans: &[GroupPlan]) -> Vec<String> {
        let mut groups = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for plan in plans {
            groups.entry(plan.name.clone()).or_insert_with(none);
        }
        let mut changed = Vec::new();
        for (name, group) in &*groups {
            let plan = plans.iter().find(|plan| plan.name == *name);
            let rates = plan.map(|plan| plan.limit.rates()).unwrap_or_default();
            if group.rates() != rates {
                group.set(rates, clock_now_ns());
                changed.push(name.clone());
            }
        }
        changed
    }

    /// Sets the limit of a device. The caller has the device's queues read the limit again.
    pub fn limit(&self, limit: &Limit, plan: &LimitPlan) {
        let group = plan.group.as_ref().map(|name| {
            let mut groups = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            groups.entry(name.clone()).or_insert_with(none).clone()
        });
        limit.set(plan.rates(), group.as_ref(), clock_now_ns());
    }
}

/// Makes a group without a limit; its rates are set later.
fn none() -> Arc<Group> {
    Group::new(Rates::default(), clock_now_ns())
}
