//! Carries out a change: prepare, commit, retire. A change that fails before its end is rolled
//! back.
//!
//! ```text
//! diff      the running plan and the desired one -> steps; a device in use is not touched
//! prepare   open the new devices, bind each socket in a folder of its own
//! keep      save the request of the control API (fsync)
//! commit    rename the sockets: from here on clients connect
//! retire    stop the tasks of leaving devices, wait until their files are closed (retiring.rs)
//! ```
//! A new device can need a resource that a leaving device still holds: a file, a socket's name, an
//! interface. Then the leaving device is retired first, and is opened again if the change fails.

use super::DeviceManager;
use super::change_in_progress::{Carried, Outcome, Rest, Stage};
use super::defer::Work;
use super::front::{self, Front};
use super::held_elsewhere::{Later, Wait, failed};
use super::prepare::{Prepared, Ready, refused};
use super::saved_devices::{Former, Keep};
use crate::model::{Change, Done, Entry, Keys, Refused, Who};
use manyring_config::diff::{Step, What, diff, diff_of, limits};
use manyring_config::plan::{DevicePlan, Found, Plan, Wanted};
use manyring_engine::{AsideRow, aside};
use manyring_serve::assemble::{AssembleError, served};
use manyring_serve::times::DEVICE_CLOSE;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::oneshot;

impl DeviceManager {
    pub(super) async fn change(&mut self, change: Change, who: &Who) -> Result<Outcome, Refused> {
        match change {
            Change::Settle { name } => {
                Ok(self.settle(&name).unwrap_or_else(|| Outcome::Done(self.done(&[]))))
            }
            Change::Patch { name, keys } => self.patch(&name, &keys).await,
            Change::Mtu { name, mtu } => {
                let keys = Keys::from_iter([("mtu".to_owned(), mtu.into())]);
                let outcome = self.patch(&name, &keys).await?;
                if let Outcome::Done(Done { steps, .. }) = &outcome
                    && let (true, Some(device)) = (steps.is_empty(), self.find(&name))
                {
                    self.set(None, &device).await?;
                }
                Ok(outcome)
            }
            Change::Put { device, text } => self.put(device, text, who).await,
            Change::Limit { group, keys } => self.limit(&group, &keys).await,
            Change::Delete { name, force } => self.delete(&name, force).await,
            Change::All { plan, dry_run, if_match } => {
                if let Some(expected) = if_match.filter(|g| *g != self.generation) {
                    tracing::debug!(expected, "the generation has changed");
                    return Err(Refused::Moved(self.generation));
                }
                let mut desired = *plan;
                for device in self.plan.wanted().filter(Wanted::is_of_api) {
                    let name = &device.plan().name;
                    if desired.device(name).is_some() {
                        let problem = format!("{name} is already used by the control API");
                        return Err(Refused::Conflict(problem));
                    }
                    desired = desired.with(&device);
                }
                let steps = self.all_steps(&desired).await?;
                if dry_run {
                    return Ok(Outcome::Done(self.done(&steps)));
                }
                let carried = Carried { is_whole: true, ..Carried::new(desired, steps) };
                self.carry_out(carried, false, None).await
            }
        }
    }

    async fn put(&mut self, device: Wanted, text: String, who: &Who) -> Result<Outcome, Refused> {
        let name = &device.plan().name;
        self.is_of_api(name, "change")?;
        self.may_have_more(&device)?;
        let desired = self.plan.clone().with(&device);
        let steps = diff_of(name, &self.plan, &desired);
        self.check(&steps, &desired, false).await?;
        let keep = Keep { name: name.clone(), text: Some((text, who.uid)) };
        self.carry_out(Carried::new(desired, steps), false, Some(keep)).await
    }

    /// Refuses to change a device of the configuration file: the next reload would undo the
    /// change.
    fn is_of_api(&self, name: &str, what: &str) -> Result<(), Refused> {
        if self.find(name).is_none_or(|device| device.is_of_api()) {
            return Ok(());
        }
        let problem = format!("{name} is a device of the configuration file: {what} it there");
        Err(Refused::Conflict(problem))
    }

    /// Refuses a device whose user already has as many devices as the operator allows: each device
    /// costs memory and descriptors that the guests of all users share.
    fn may_have_more(&self, device: &Wanted) -> Result<(), Refused> {
        let DevicePlan { name, owner: Some(uid), .. } = device.plan() else { return Ok(()) };
        let max = self.plan.daemon.user_devices_max;
        let of_user = |other: &&DevicePlan| other.owner == Some(*uid) && other.name != *name;
        if (self.plan.devices().filter(of_user).count() as u64) < max {
            return Ok(());
        }
        let problem = format!("user_devices_max: user {uid} has {max} devices, the maximum");
        Err(Refused::Conflict(problem))
    }

    async fn patch(&mut self, name: &str, keys: &Keys) -> Result<Outcome, Refused> {
        let missing = || Refused::Missing(format!("no device is named {name:?}"));
        let device = self.find(name).ok_or_else(missing)?;
        let patched = device.patched(keys).map_err(Refused::Wrong)?;
        let keep = match device.is_of_api() {
            true => {
                let (kept, name, keys) = (self.kept.clone(), name.to_owned(), keys.clone());
                aside(move || kept.merged(&name, &keys)).await.flatten()
            }
            false => None,
        };
        let desired = self.plan.clone().with(&patched);
        let steps = diff_of(name, &self.plan, &desired);
        self.check(&steps, &desired, false).await?;
        self.carry_out(Carried::new(desired, steps), false, keep).await
    }

    async fn limit(&mut self, group: &str, keys: &Keys) -> Result<Outcome, Refused> {
        let missing = || Refused::Missing(format!("no [[limit]] is named {group:?}"));
        let mut desired = self.plan.clone();
        let found = desired.limit.iter_mut().find(|plan| plan.name == group).ok_or_else(missing)?;
        *found = found.changed(keys).map_err(Refused::Wrong)?;
        let steps: Vec<_> = limits(&self.plan, &desired).into_iter().collect();
        self.check(&steps, &desired, false).await?;
        self.carry_out(Carried::new(desired, steps), false, None).await
    }

    async fn delete(&mut self, name: &str, force: bool) -> Result<Outcome, Refused> {
        self.is_of_api(name, "remove")?;
        let desired = self.plan.clone().without(|device| device.name == name);
        let steps = diff_of(name, &self.plan, &desired);
        let keep = Keep { name: name.to_owned(), text: None };
        self.carry_out(Carried::new(desired, steps), force, Some(keep)).await
    }

    /// Computes the steps from the running plan to `desired`, on another thread: a plan may have
    /// thousands of devices.
    async fn all_steps(&self, desired: &Plan) -> Result<Vec<Step>, Refused> {
        let (running, then) = (self.plan.clone(), desired.clone());
        let steps = aside(move || diff(&running, &then)).await;
        let steps = steps.ok_or_else(|| Refused::Host("internal error".to_owned()))?;
        self.check(&steps, desired, true).await?;
        Ok(steps)
    }

    /// Checks that no two devices of a plan name the same file, comparing paths as they are
    /// written. With `looks`, or if a device has a capture (whose file is locked only when the
    /// change is carried out), this also compares the files that the host finds under the paths.
    async fn check(&self, steps: &[Step], desired: &Plan, looks: bool) -> Result<(), Refused> {
        if steps.is_empty() {
            return Ok(());
        }
        let found = if looks || desired.has_captures() {
            let plan = desired.clone();
            let looked = aside(move || plan.check_again(true));
            let looked = tokio::time::timeout(DEVICE_CLOSE, looked).await.ok().flatten();
            looked.ok_or_else(|| Refused::Host("timed out; a host call is blocked".to_owned()))?
        } else {
            desired.check_again(false)
        };
        match found {
            Found::Good => Ok(()),
            Found::Shared(error) => Err(Refused::Conflict(error.to_string())),
            Found::Wrong(error) => Err(Refused::Wrong(error.to_string())),
        }
    }

    pub(super) fn done(&self, steps: &[Step]) -> Done {
        Done { generation: self.generation, steps: steps.iter().map(Step::info).collect() }
    }

    /// Carries out the steps of a change. Adds switches before their ports, and removes them after
    /// their ports.
    async fn carry_out(
        &mut self,
        carried: Carried,
        force: bool,
        keep: Option<Keep>,
    ) -> Result<Outcome, Refused> {
        if self.retiring.holds_up(&carried.steps) {
            return Ok(Outcome::PutOff);
        }
        let steps = carried.steps.clone();
        self.add_switches(&steps).await?;
        let carried = match self.begin(carried, force, keep).await {
            Ok(carried) => carried,
            Err(error) => {
                self.remove_switches(&steps, false).await;
                return Err(error);
            }
        };
        if carried.leaving.is_empty() {
            return self.carry_on(carried).await.map(Outcome::Done);
        }
        let (leaving, replaced) = (carried.leaving.clone(), carried.replaced.clone());
        Ok(Outcome::Waits { leaving, replaced, rest: Rest::Change(Box::new(carried)) })
    }

    /// Carries out the rest of a change whose leaving devices have ended.
    pub(super) async fn carry_on(&mut self, carried: Carried) -> Result<Done, Refused> {
        let steps = carried.steps.clone();
        let done = self.finish(carried).await;
        self.remove_switches(&steps, done.is_ok()).await;
        done
    }

    /// Carries out the part of a change for which no device has to end.
    async fn begin(
        &mut self,
        mut carried: Carried,
        force: bool,
        keep: Option<Keep>,
    ) -> Result<Carried, Refused> {
        let Work { leaving, coming, live, deferred } = self.work(&carried.steps);
        carried.replaced = coming.iter().map(|device| device.plan().name.clone()).collect();
        let removes = keep.as_ref().is_some_and(|keep| keep.text.is_none());
        let unused = |manager: &Self| match force {
            true => Ok(()),
            false => leaving.iter().try_for_each(|device| manager.unused(device, removes)),
        };
        // Refuse before anything is changed or opened.
        unused(self)?;
        // A new device that needs a resource of a leaving one is opened only after that device has
        // stopped.
        let (late, early): (Vec<_>, Vec<_>) = coming
            .into_iter()
            .partition(|device| leaving.iter().any(|other| device.needs_what_of(other)));
        self.live(&live).await?;
        self.follow_links(&carried.desired);
        // A front-end can have connected during the calls above: check again.
        let prepared = self.prepare(early).await;
        let prepared = match prepared.and_then(|all| unused(self).map(|()| all)) {
            Ok(prepared) => prepared,
            Err(error) => return Err(self.undo(&live, Vec::new(), error).await),
        };
        carried.stage = if late.is_empty() {
            match self.commit(prepared, keep).await {
                Ok(ready) => Stage::Ready(ready),
                Err(error) => return Err(self.undo(&live, Vec::new(), error).await),
            }
        } else {
            Stage::Late { late, prepared, keep }
        };
        carried.generation = self.generation;
        (carried.leaving, carried.live, carried.deferred) = (leaving, live, deferred);
        Ok(carried)
    }

    async fn finish(&mut self, carried: Carried) -> Result<Done, Refused> {
        let Carried { desired, steps, is_whole, leaving, live, deferred, stage, .. } = carried;
        let ready = match stage {
            Stage::Ready(ready) => ready,
            Stage::Late { late, mut prepared, keep } => {
                match self.prepare(late).await {
                    Ok(more) => prepared.extend(more),
                    Err(error) => {
                        drop(prepared);
                        return Err(self.undo(&live, leaving, error).await);
                    }
                }
                match self.commit(prepared, keep).await {
                    Ok(ready) => ready,
                    Err(error) => return Err(self.undo(&live, leaving, error).await),
                }
            }
        };
        // Other changes may have been carried out during the wait: apply the steps to the plan that
        // runs now.
        let desired = match self.generation == carried.generation {
            true => desired,
            false => self.rebased(desired, &steps, is_whole),
        };
        for ready in ready {
            let front = ready.shown(&self.shared);
            self.start(front);
        }
        deferred.into_iter().for_each(|(device, keys)| self.defer(device, keys));
        self.follow_limits(&desired).await;
        self.shared.pool.set_queue_workers(desired.pins().queue_workers);
        let is_done = |step: &Step| !matches!(step.what, What::NeedsRestart(_));
        if steps.iter().any(is_done) {
            self.generation += 1;
        }
        let done = self.done(&steps);
        // Keys that need a restart keep their former values, so that the next diff reports them
        // again.
        let daemon = std::mem::replace(&mut self.plan, desired);
        self.plan.keep_switches(&daemon);
        self.plan.daemon = daemon.daemon;
        self.plan.xen_blk = daemon.xen_blk;
        self.shown.send_replace((self.generation, Arc::new(self.plan.clone())));
        self.wait_anew(live).await;
        Ok(done)
    }

    /// Rolls back a change that has failed.
    async fn undo(
        &mut self,
        live: &[(Wanted, Wanted)],
        retired: Vec<Wanted>,
        error: Refused,
    ) -> Refused {
        self.restore(retired).await;
        let back: Vec<_> = live.iter().map(|(old, new)| (new.clone(), old.clone())).collect();
        if let Err(error) = self.live(&back).await {
            let names: Vec<_> = live.iter().map(|(old, _)| old.plan().name.as_str()).collect();
            let devices = names.join(", ");
            tracing::error!(devices, %error, "rolling back a change failed");
        }
        error
    }

    pub(super) fn find(&self, name: &str) -> Option<Wanted> {
        self.plan.device(name)
    }

    /// Refuses to stop a device while a front-end is connected. `removes`: the request removes the
    /// device, so that the refusal may suggest `--force`.
    fn unused(&self, device: &Wanted, removes: bool) -> Result<(), Refused> {
        let name = &device.plan().name;
        let or_force = if removes { ", or use --force" } else { "" };
        match self.shared.devices.find(name) {
            Some(Entry::Served(served)) if *served.view.connected.borrow() => {
                Err(Refused::Conflict(format!(
                    "{name} is in use by a VMM; unplug it there first{or_force}"
                )))
            }
            _ => Ok(()),
        }
    }

    pub(super) async fn prepare(&self, devices: Vec<Wanted>) -> Result<Vec<Prepared>, Refused> {
        Prepared::all(&self.shared, devices).await.map_err(|error| refused(&error))
    }

    /// Saves the request of the control API, and renames the sockets to their paths.
    async fn commit(
        &mut self,
        prepared: Vec<Prepared>,
        keep: Option<Keep>,
    ) -> Result<Vec<Ready>, Refused> {
        let mut finished = Vec::new();
        for prepared in prepared {
            finished.push(prepared.finished().await.map_err(|error| refused(&error))?);
        }
        // One thread makes these calls in order: sockets are renamed only after the request is
        // saved.
        let row = AsideRow::default();
        let is_kept = Arc::new(AtomicBool::new(keep.is_none()));
        let kept = keep.map(|keep| self.keep(keep, &row, is_kept.clone()));
        let coming: Vec<_> = finished.into_iter().map(|one| one.named(&row, &is_kept)).collect();
        row.go_on();
        let former = match kept {
            Some(kept) => Some(kept.await?),
            None => None,
        };
        let mut named = Vec::new();
        for coming in coming {
            match coming.published().await {
                Ok(ready) => named.push(ready),
                Err(error) => {
                    if let Some(former) = former {
                        aside(move || former.restore()).await;
                    }
                    return Err(refused(&error));
                }
            }
        }
        Ok(named)
    }

    /// Queues the call that saves the request of the control API; the call sets `is_kept` if it
    /// succeeds. The future completes when the call has returned, and has no timeout: the answer to
    /// the client promises that the request is on the disk.
    fn keep(
        &self,
        keep: Keep,
        row: &AsideRow,
        is_kept: Arc<AtomicBool>,
    ) -> impl Future<Output = Result<Former, Refused>> + use<> {
        let (tells, changed) = oneshot::channel();
        let (kept, name) = (self.kept.clone(), keep.name.clone());
        row.add(&name.clone(), move || {
            let changed = kept.change(&keep);
            is_kept.store(changed.is_ok(), Ordering::Release);
            let _ = tells.send(changed);
        });
        async move {
            let changed = changed.await.unwrap_or_else(|_| Err(io::Error::other("internal error")));
            changed.map_err(|error| Refused::Host(format!("{name}: saving it failed: {error}")))
        }
    }

    /// Opens retired devices again: after a failed change, or with a deferred one. A device that
    /// cannot be opened is shown as waiting, and retried.
    pub(super) async fn restore(&mut self, devices: Vec<Wanted>) {
        for device in devices {
            let front = match self.put_together(device.clone()).await {
                Ok(ready) => ready.shown(&self.shared),
                Err(error) => {
                    let served = match served(device.plan()) {
                        Err(AssembleError::Unfound { .. }) => None,
                        Ok(served) => Some(served),
                        Err(_) => continue,
                    };
                    let mut wait = Wait::new(self.shared.clone(), device.clone());
                    wait.note(&error);
                    let stage = front::Stage::Waits(Later::Held);
                    Front { wanted: device, wait, stage, served, begins: None }
                }
            };
            self.start(front);
        }
    }

    /// Opens a device and renames its socket to its path. This leaves the plan as it is.
    async fn put_together(&self, device: Wanted) -> Result<Ready, AssembleError> {
        let prepared = Prepared::all(&self.shared, vec![device.clone()]).await?;
        let prepared = prepared.into_iter().next().ok_or_else(|| failed(&device))?;
        let row = AsideRow::default();
        let named = prepared.finished().await?.named(&row, &Arc::new(AtomicBool::new(true)));
        row.go_on();
        named.published().await
    }
}
