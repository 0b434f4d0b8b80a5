//! Changes that retire devices. Other changes run while such a change waits for its devices to
//! end.
//!
//! A device process has 10 s to stop a device (`PROCESS_ANSWER`), and the device's requests have
//! 10 s more to complete. Only changes that touch such a device wait for it.
//! ```text
//! begin     prepare, keep, stop the tasks of leaving devices           in the device manager
//! wait      until they have ended and their files are closed           in a task beside it
//! go on     prepare what needs their resources; commit; start; answer  in the device manager
//! ```
//! Until it is answered, such a change reserves every device that it removes, adds or alters.
//! Another change is put off if it names one of these devices or needs a resource of one. While a
//! change is put off, later changes of the device that it names are put off, too. The number of
//! put-off changes of a user is bounded, so that a user whose device does not stop delays nobody
//! else.

use super::DeviceManager;
use super::change_in_progress::{Outcome, Rest, in_words};
use super::pending_changes::PutOff;
use crate::model::{Change, Done, Entry, Order, Refused, Who, closed};
use crate::processes::{Awaited, Processes};
use manyring_config::diff::{Step, What};
use manyring_config::plan::{Plan, Wanted};
use manyring_device::{DiskSide, SideKind};
use manyring_serve::assemble::Tasks;
use manyring_serve::times::{DEVICE_CLOSE, DEVICE_CLOSE_LOOK};
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use tokio::sync::{OwnedRwLockReadGuard, mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

/// The client of a change, which waits for the answer. No takeover begins before the answer.
#[derive(Debug)]
struct Client {
    who: Who,
    answer: oneshot::Sender<Result<Done, Refused>>,
    _begun: OwnedRwLockReadGuard<()>,
}

/// A change that waits until its leaving devices have stopped.
#[derive(Debug)]
struct Held {
    leaving: Vec<Wanted>,
    rest: Rest,
    client: Client,
}

impl Held {
    fn steps(&self) -> &[Step] {
        match &self.rest {
            Rest::Change(carried) => &carried.steps,
            Rest::Settle { .. } => &[],
        }
    }

    /// True if the change is the plan of a whole file, which sets all groups of limits.
    fn is_whole(&self) -> bool {
        matches!(&self.rest, Rest::Change(carried) if carried.is_whole)
    }

    /// True if the change touches the device or switch of this name.
    fn names(&self, name: &str) -> bool {
        let leaves = self.leaving.iter().any(|device| device.plan().name == name);
        leaves || self.steps().iter().any(|step| step.name == name)
    }

    /// True if `device` needs a resource of a device that leaves or comes with this change, or
    /// uses a switch or group that the change alters.
    fn is_needed_by(&self, device: &Wanted) -> bool {
        let coming = self.steps().iter().filter_map(coming);
        self.leaving.iter().chain(coming).any(|other| device.needs_what_of(other))
            || self.steps().iter().any(|step| is_used(step, device))
    }
}

/// Returns the device as it is after a step; `None` if the step leaves no device.
fn coming(step: &Step) -> Option<&Wanted> {
    match &step.what {
        What::Add(device) | What::Change(device, ..) => Some(device),
        _ => None,
    }
}

/// True if the step changes the switch or the group of limits that the device uses.
fn is_used(step: &Step, device: &Wanted) -> bool {
    match &step.what {
        What::AddSwitch(_) | What::ChangeSwitch(..) | What::RemoveSwitch => {
            device.switch() == Some(&step.name)
        }
        What::Limits(groups) => {
            device.plan().limit.group.as_ref().is_some_and(|group| groups.contains(group))
        }
        _ => false,
    }
}

/// The next thing that the device manager has to do.
#[derive(Debug)]
pub(super) enum Next {
    /// The next change to handle, and the lock that keeps takeovers from beginning.
    Asked(Order, OwnedRwLockReadGuard<()>),
    /// The devices of the change with this number have ended.
    Ended(u64),
}

/// The changes that wait until devices have stopped (*held*), and the changes that wait for a held
/// change (*put off*).
#[derive(Debug, Default)]
pub(super) struct Retiring {
    ends: JoinSet<u64>,
    held: HashMap<u64, Held>,
    next: u64,
    put_off: PutOff,
    /// Changes that are handled before new ones, in this order.
    turn: VecDeque<Order>,
}

impl Retiring {
    /// Waits for the next change, or until the devices of a held change have stopped. `None`: no
    /// change can arrive, and none is held. While another daemon takes over, or waits to, no change
    /// begins: its client would be told that the change is done, but the next daemon would not know
    /// of it. A change that has begun continues.
    pub(super) async fn next(
        &mut self,
        orders: &mut mpsc::Receiver<Order>,
        processes: &Processes,
    ) -> Option<Next> {
        loop {
            let is_asked = !self.turn.is_empty();
            tokio::select! {
                Some(ended) = self.ended() => return Some(Next::Ended(ended)),
                begun = processes.change(), if is_asked => {
                    return Some(Next::Asked(self.turn.pop_front()?, begun));
                }
                Some(order) = orders.recv(), if !is_asked => self.turn.push_back(order),
                else => return None,
            }
        }
    }

    /// Waits for a held change whose devices have stopped, and returns its number; `None`: no
    /// change is held.
    async fn ended(&mut self) -> Option<u64> {
        loop {
            // A task that panicked does not return its number, so its change stays held.
            if let Ok(number) = self.ends.join_next().await? {
                return Some(number);
            }
        }
    }

    /// True if a change has to wait whatever its steps are. The plan of a whole file waits while
    /// any device of the file is ending: that device may be unchanged in the plan, so that no step
    /// names it. A change of a group waits for the plan of a whole file, which sets the rates of
    /// all groups.
    fn holds(&self, change: &Change) -> bool {
        let mut held = self.held.values();
        match change.device() {
            Some(name) => held.any(|held| held.names(name)) || self.put_off.names(name),
            None if matches!(change, Change::Limit { .. }) => held.any(Held::is_whole),
            None => held.any(|held| held.leaving.iter().any(|device| !device.is_of_api())),
        }
    }

    /// True if a step touches a device or switch of a held change, or needs a resource of one.
    pub(super) fn holds_up(&self, steps: &[Step]) -> bool {
        let touches = |step: &Step, held: &Held| {
            held.names(&step.name) || coming(step).is_some_and(|device| held.is_needed_by(device))
        };
        steps.iter().any(|step| self.held.values().any(|held| touches(step, held)))
    }

    /// Returns the names of the devices that must stop before held changes continue.
    fn awaited(&self) -> Awaited {
        let leaving = self.held.values().flat_map(|held| &held.leaving);
        let mut devices: Vec<_> = leaving.map(|device| device.plan().name.clone()).collect();
        devices.sort_unstable();
        let goes = |step: &&Step| matches!(step.what, What::RemoveSwitch | What::ChangeSwitch(..));
        let steps = self.held.values().flat_map(Held::steps).filter(goes);
        Awaited { devices, switches: steps.map(|step| step.name.clone()).collect() }
    }
}

impl DeviceManager {
    pub(super) async fn act(&mut self, next: Next) {
        match next {
            Next::Asked(order, begun) => self.handle(order, begun).await,
            Next::Ended(number) => self.go_on(number).await,
        }
    }

    /// Carries a change out and answers. If devices have to stop first, [`Self::go_on`] carries out
    /// the rest of the change; if another change has to complete first, the change is put off.
    async fn handle(&mut self, order: Order, begun: OwnedRwLockReadGuard<()>) {
        if self.retiring.holds(&order.change) {
            return self.retiring.put_off.add(order);
        }
        let Order { change, who, follows, answer } = order;
        let again = (!self.retiring.held.is_empty()).then(|| change.clone());
        let outcome = self.change(change, &who).await;
        let client = Client { who, answer, _begun: begun };
        match (outcome, again) {
            (Ok(Outcome::Done(done)), _) => self.answer(client, Ok(done)),
            (Ok(Outcome::Waits { leaving, replaced, rest }), _) => {
                let ended = self.begin_to_retire(&leaving, replaced);
                let number = self.retiring.next;
                self.retiring.next += 1;
                self.retiring.held.insert(number, Held { leaving, rest, client });
                self.processes().changes_wait_for(self.retiring.awaited());
                self.retiring.ends.spawn(async move {
                    ended.await;
                    number
                });
            }
            (Ok(Outcome::PutOff), Some(change)) => {
                let Client { who, answer, .. } = client;
                self.retiring.put_off.add(Order { change, who, follows, answer });
            }
            // Cannot happen: only a held change makes another one wait, and then `again` is set.
            (Ok(Outcome::PutOff), None) => self.answer(client, Err(Refused::Busy)),
            (Err(refused), _) => self.answer(client, Err(refused)),
        }
    }

    /// Continues a held change whose devices have stopped, and then queues the changes that waited
    /// for it.
    async fn go_on(&mut self, number: u64) {
        let Some(Held { rest, client, .. }) = self.retiring.held.remove(&number) else { return };
        let done = match rest {
            Rest::Change(carried) => self.carry_on(*carried).await,
            Rest::Settle { device, keys } => {
                let name = device.plan().name.clone();
                self.restore(vec![device]).await;
                let keys = keys.join(", ");
                tracing::info!(device = name, keys, "deferred change carried out");
                Ok(self.done(&[]))
            }
        };
        self.processes().changes_wait_for(self.retiring.awaited());
        self.answer(client, done);
        // Changes that were put off arrived first, so they go before those that wait for their
        // turn.
        let mut turn = self.retiring.put_off.take();
        turn.append(&mut self.retiring.turn);
        self.retiring.turn = turn;
    }

    fn answer(&self, client: Client, done: Result<Done, Refused>) {
        let (generation, Who { uid, pid, comm }) = (self.generation, &client.who);
        match &done {
            Ok(Done { steps, .. }) if !steps.is_empty() => {
                let steps = in_words(steps);
                tracing::info!(uid, pid, comm, generation, steps, "changed");
            }
            // The control API logs a refusal where the request arrived.
            Ok(_) | Err(_) => {}
        }
        let _ = client.answer.send(done);
    }

    /// Stops these devices, and waits until their files and sockets are closed, or for a timeout.
    pub(super) async fn retire(&mut self, devices: &[Wanted], replaced: HashSet<String>) {
        self.begin_to_retire(devices, replaced).await;
    }

    /// Stops these devices. The returned future completes when their files and sockets are closed,
    /// or after a timeout. A device in `replaced` is shown as being replaced until its successor
    /// has the name.
    fn begin_to_retire(
        &mut self,
        devices: &[Wanted],
        replaced: HashSet<String>,
    ) -> impl Future<Output = ()> + use<> {
        let names: Vec<_> = devices.iter().map(|device| device.plan().name.clone()).collect();
        let ending: Vec<_> = names.iter().filter_map(|name| self.tasks.stop(name)).collect();
        let mut left = Vec::new();
        for name in &names {
            if let Some(Entry::Served(served)) = self.shared.devices.find(name) {
                left.push((name.clone(), is_open(&served.view.side.kind)));
            }
            self.pending.remove(name);
        }
        let shared = self.shared.clone();
        async move {
            let all: Vec<_> = names.iter().map(String::as_str).collect();
            let have_ended = Tasks::await_ends(ending, &all).await;
            let mut closing = JoinSet::new();
            for name in &names {
                let shown = match replaced.contains(name) {
                    true => shared.devices.make_way(name),
                    false => shared.devices.remove(name),
                };
                shown.into_iter().for_each(|entry| drop(closing.spawn(closed(entry))));
            }
            let began = Instant::now();
            // An image that is not closed in time is closed later; do not wait for it.
            let _ = timeout(DEVICE_CLOSE, closing.join_all()).await;
            if !have_ended {
                // A task of a removed device has not ended. The log names the device already; its
                // file stays open until the task ends.
                return;
            }
            while let Some((device, _)) = left.iter().find(|(_, is_open)| is_open()) {
                if began.elapsed() > DEVICE_CLOSE {
                    tracing::warn!(device, "closing the device timed out; its file is still open");
                    return;
                }
                sleep(DEVICE_CLOSE_LOOK).await;
            }
        }
    }

    /// Returns the running plan with these steps applied, for a change that has waited: other
    /// changes may have altered the running plan since `desired` was made. `is_whole`: `desired`
    /// has all devices and groups of the file.
    pub(super) fn rebased(&self, desired: Plan, steps: &[Step], is_whole: bool) -> Plan {
        if !is_whole {
            return steps.iter().fold(self.plan.clone(), |plan, step| match &step.what {
                What::Add(device) | What::Change(device, ..) => plan.with(device),
                What::Remove => plan.without(|device| device.name == step.name),
                _ => plan,
            });
        }
        let names: HashSet<_> = steps.iter().map(|step| step.name.as_str()).collect();
        let is_other = |device: &Wanted| !names.contains(device.plan().name.as_str());
        let running = self.plan.wanted().filter(is_other);
        let plan = desired.without(|device| !names.contains(device.name.as_str()));
        running.fold(plan, |plan, device| plan.with(&device))
    }
}

/// Returns a function that tells whether a removed device is still open. The device's task has
/// ended, but a worker or a thread of the disk may use the device until a system call returns.
fn is_open(kind: &SideKind) -> Box<dyn Fn() -> bool + Send + Sync> {
    match kind {
        // A disk of a Xen guest is not in the plan, so no change removes it.
        SideKind::Blk(DiskSide { is_xen: true, .. }) => Box::new(|| false),
        SideKind::Blk(DiskSide { host, resizes, .. }) => {
            let (disk, device) = (Arc::downgrade(host.disk()), Arc::downgrade(resizes));
            Box::new(move || disk.strong_count() + device.strong_count() > 0)
        }
        SideKind::Net(device) => {
            let (port, device) = (Arc::downgrade(device.port()), Arc::downgrade(device));
            Box::new(move || port.strong_count() + device.strong_count() > 0)
        }
    }
}
