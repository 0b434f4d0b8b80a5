//! When a change of a device takes effect, by the class of the keys that differ. Live keys change
//! at once, also while a front-end is connected. Reconnect keys are deferred until the session of
//! the front-end has ended.

use super::DeviceManager;
use super::change_in_progress::{Outcome, Rest};
use crate::model::{Change, Entry, Refused};
use manyring_config::diff::{Step, What};
use manyring_config::plan::{Class, LimitPlan, Plan, Wanted};
use manyring_serve::times::LIMIT_SEEN;
use rustix::io::Errno;
use std::collections::HashSet;

/// The devices that a change touches, by what it does to each.
#[derive(Debug, Default)]
pub(super) struct Work {
    pub(super) leaving: Vec<Wanted>,
    pub(super) coming: Vec<Wanted>,
    /// Devices whose live keys change: the running and the new plan of each.
    pub(super) live: Vec<(Wanted, Wanted)>,
    /// Devices that are replaced when their sessions have ended, with the keys that differ.
    pub(super) deferred: Vec<(Wanted, Vec<String>)>,
}

impl DeviceManager {
    pub(super) fn work(&self, steps: &[Step]) -> Work {
        let mut work = Work::default();
        for step in steps {
            let Some(former) = self.find(&step.name) else {
                if let What::Add(device) = &step.what {
                    work.coming.push(device.clone());
                }
                continue;
            };
            match &step.what {
                What::Remove => work.leaving.push(former),
                What::Change(device, Class::Live, _) => work.live.push((former, device.clone())),
                What::Change(device, Class::Reconnect, keys) if self.is_connected(&step.name) => {
                    work.deferred.push((device.clone(), keys.clone()));
                }
                What::Change(device, ..) => {
                    work.leaving.push(former);
                    work.coming.push(device.clone());
                }
                What::Add(_)
                | What::AddSwitch(_)
                | What::ChangeSwitch(..)
                | What::RemoveSwitch
                | What::Limits(_)
                | What::NeedsRestart(_) => {}
            }
        }
        work
    }

    pub(super) fn is_connected(&self, name: &str) -> bool {
        match self.shared.devices.find(name) {
            Some(Entry::Served(served)) => *served.view.connected.borrow(),
            _ => false,
        }
    }

    /// Changes the live keys of devices. If one device fails, the devices before it are set back.
    pub(super) async fn live(&self, changes: &[(Wanted, Wanted)]) -> Result<(), Refused> {
        for (index, (old, new)) in changes.iter().enumerate() {
            let Err(error) = self.set(Some(old), new).await else { continue };
            for (old, new) in &changes[..index] {
                // The caller reports the first error. An error of the rollback has no further
                // remedy.
                let _ = self.set(Some(new), old).await;
            }
            return Err(error);
        }
        Ok(())
    }

    /// Sets the live keys of a served device that differ from those of `former`; without `former`,
    /// sets only its MTU.
    pub(super) async fn set(
        &self,
        former: Option<&Wanted>,
        device: &Wanted,
    ) -> Result<(), Refused> {
        let name = &device.plan().name;
        let Some(Entry::Served(served)) = self.shared.devices.find(name) else { return Ok(()) };
        let mtu = mtu_of(device).filter(|mtu| former.and_then(mtu_of) != Some(*mtu));
        if let (Some(running), Some(mtu)) = (served.view.side.as_net(), mtu) {
            running.set_mtu(mtu).await.map_err(|errno| {
                tracing::warn!(device = name, mtu, %errno, "changing the MTU failed");
                refuse_mtu(mtu, errno)
            })?;
        }
        let limit = &device.plan().limit;
        if former.is_some_and(|former| former.plan().limit != *limit) {
            self.shared.processes.limit(name, limit);
            if let Some(own) = &served.view.side.limit {
                self.shared.groups.limit(own, limit);
            }
            self.shared.pool.refresh(|of| of == name, LIMIT_SEEN).await;
        }
        Ok(())
    }

    /// Restarts the wait of devices that are not served yet, with the new values of their live
    /// keys.
    pub(super) async fn wait_anew(&mut self, live: Vec<(Wanted, Wanted)>) {
        for (_, device) in live {
            let name = device.plan().name.clone();
            if let Some(Entry::Waiting(_)) = self.shared.devices.find(&name) {
                self.retire(std::slice::from_ref(&device), [name].into()).await;
                self.restore(vec![device]).await;
            }
        }
    }

    /// Sets the rates of all groups of limits to those of this plan.
    pub(super) async fn follow_limits(&self, plan: &Plan) {
        self.shared.processes.follow_groups(&plan.limit);
        let changed = self.shared.groups.follow(&plan.limit);
        if changed.is_empty() {
            return;
        }
        let is_in = |limit: &LimitPlan| limit.group.as_ref().is_some_and(|g| changed.contains(g));
        let names: HashSet<_> = plan
            .wanted()
            .filter(|device| is_in(&device.plan().limit))
            .map(|device| device.plan().name.clone())
            .collect();
        // The plan does not list the disks of Xen guests by name: refresh the limits of all
        // devices.
        let all = plan.xen_blk.iter().any(|xen| is_in(&xen.limit));
        self.shared.pool.refresh(|of| all || names.contains(of), LIMIT_SEEN).await;
    }

    /// Defers the replacement of a device until the session of the running one has ended.
    pub(super) fn defer(&mut self, device: Wanted, keys: Vec<String>) {
        let name = device.plan().name.clone();
        let Some(Entry::Served(served)) = self.shared.devices.find(&name) else { return };
        served.put_off(keys);
        while self.followers.try_join_next().is_some() {}
        if self.pending.insert(name.clone(), device).is_some() {
            // A task that an earlier call spawned waits for the end of this session already.
            return;
        }
        let (mut connected, changes) = (served.view.connected.subscribe(), self.changes.clone());
        drop(served);
        self.followers.spawn(async move {
            if connected.wait_for(|connected| !*connected).await.is_ok() {
                changes.follow(Change::Settle { name }).await;
            }
        });
    }

    /// Begins to replace a device by its deferred plan, because its session has ended. `None`:
    /// nothing is replaced now; if another front-end has connected meanwhile, the replacement is
    /// deferred again.
    pub(super) fn settle(&mut self, name: &str) -> Option<Outcome> {
        let device = self.pending.remove(name)?;
        // Live keys can have changed since the replacement was deferred.
        let device = self.find(name).unwrap_or(device);
        let Some(Entry::Served(served)) = self.shared.devices.find(name) else { return None };
        let keys = served.pending_keys();
        drop(served);
        if self.is_connected(name) {
            self.defer(device, keys);
            return None;
        }
        let (leaving, replaced) = (vec![device.clone()], [name.to_owned()].into());
        Some(Outcome::Waits { leaving, replaced, rest: Rest::Settle { device, keys } })
    }
}

/// Makes the answer to a client whose MTU the host has refused. `EINVAL` means a wrong request: the
/// interface does not support this MTU.
fn refuse_mtu(mtu: u16, errno: Errno) -> Refused {
    match errno {
        Errno::INVAL => Refused::Wrong(format!("mtu: {mtu} is not supported by this interface")),
        Errno::PERM => {
            Refused::Host("setting the MTU failed: no permission (needs CAP_NET_ADMIN)".to_owned())
        }
        errno => Refused::Host(format!("setting the MTU failed: {errno}")),
    }
}

fn mtu_of(device: &Wanted) -> Option<u16> {
    if let Wanted::Net(net) = device { net.options.mtu } else { None }
}
