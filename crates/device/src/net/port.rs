//! The port of a network device: the settings of guest and operator for it, and those that the host
//! was last told. A device whose queues run in this process has one ([`super::NetDevice`]), and so
//! has the supervisor for a port whose queues run in a device process ([`super::OwnedPort`]).

use super::pace::ChangePace;
use manyring_backend::net::Port;
use manyring_engine::aside;
use manyring_wire::net::rss::Rss;
use manyring_wire::net::{Offloads, is_mtu};
use rustix::io::Errno;
use std::sync::Arc;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep_until};

/// Settings of guest and operator for a port, and the settings that the host was last told.
#[derive(Debug)]
pub(super) struct PortState {
    /// False if the operator has switched the guest's link off.
    pub(super) link_up: bool,
    /// The state of the link that guest and operator see: up only once the queues pass frames.
    pub(super) is_link_shown: bool,
    /// True while the host's interface is deleted: the guest's link is down until another one is
    /// opened.
    pub(super) is_gone: bool,
    /// True while guest and operator see that the interface is lost: until its queues are served
    /// again.
    pub(super) is_loss_shown: bool,
    /// How often an interface was opened in place of a deleted one.
    pub(super) joins: u64,
    /// The MTU that the next driver will be told.
    pub(super) mtu: Option<u16>,
    /// The offloads that the guest accepts.
    pub(super) given: Offloads,
    /// The guest's hash, which chooses the pair of each frame; `None`: the guest has set none.
    pub(super) rss: Option<Arc<Rss>>,
    /// The settings that the host was last told: pairs in use, offloads, and hash.
    pub(super) attached: Vec<bool>,
    /// The pairs that the host uses, in the order of its queues: it adds a queue at the end, and
    /// moves the last one to the place of a queue that it stops using.
    pub(super) order: Vec<usize>,
    pub(super) host_given: Option<Offloads>,
    pub(super) host_rss: Option<Arc<Rss>>,
    refusals: Refusals,
}

/// A setting that the host may refuse.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Setting {
    Pair { pair: usize, is_attached: bool },
    Offloads,
    Rss,
}

/// The settings that the host refuses, which are tried again and again, with the errors that the
/// log has: each is logged once, and again after the host has followed.
#[derive(Debug, Default)]
struct Refusals(Vec<(Setting, Errno)>);

impl Refusals {
    /// True if the log does not have this refusal yet. There is one for each setting.
    fn is_new(&mut self, setting: Setting, errno: Errno) -> bool {
        if self.0.contains(&(setting, errno)) {
            return false;
        }
        self.end(setting);
        self.0.push((setting, errno));
        true
    }

    /// The host follows.
    fn end(&mut self, setting: Setting) {
        self.0.retain(|(of, _)| *of != setting);
    }
}

impl PortState {
    /// Makes the state of a port of which the host uses no pair.
    pub(super) fn new(queue_pairs: usize, mtu: Option<u16>) -> Self {
        Self {
            link_up: true,
            is_link_shown: true,
            is_gone: false,
            is_loss_shown: false,
            joins: 0,
            mtu,
            given: Offloads::default(),
            rss: None,
            attached: vec![false; queue_pairs],
            order: Vec::new(),
            host_given: None,
            host_rss: None,
            refusals: Refusals::default(),
        }
    }

    /// The log has no refusal of the interface that was joined.
    pub(super) fn forget_refusals(&mut self) {
        self.refusals = Refusals::default();
    }

    /// Notes whether the host follows. Returns its error if that must be logged.
    fn note(&mut self, setting: Setting, done: Result<(), Errno>) -> Option<Errno> {
        match done {
            Ok(()) => {
                self.refusals.end(setting);
                None
            }
            Err(errno) => self.refusals.is_new(setting, errno).then_some(errno),
        }
    }

    pub(super) fn is_link_up(&self) -> bool {
        self.is_link_shown && !self.is_loss_shown
    }

    /// Notes that the host uses a pair from now on, or does so no more.
    fn note_attached(&mut self, pair: usize, attached: bool) {
        self.attached[pair] = attached;
        match self.order.iter().position(|other| *other == pair) {
            Some(place) if !attached => drop(self.order.swap_remove(place)),
            None if attached => self.order.push(pair),
            _ => {}
        }
    }

    /// Returns the number of pairs that the host uses.
    pub(super) fn attached_pairs(&self) -> usize {
        self.attached.iter().filter(|attached| **attached).count()
    }

    /// Returns the next pair that must be attached (true) or detached (false). Pairs that are
    /// `is_refused` are skipped.
    pub(super) fn next_pair(
        &self,
        is_refused: &[bool],
        wanted: impl Fn(usize) -> bool,
    ) -> Option<(usize, bool)> {
        let differs = |pair: &usize| self.attached[*pair] != wanted(*pair) && !is_refused[*pair];
        let pair = (0..self.attached.len()).find(differs)?;
        Some((pair, wanted(pair)))
    }
}

/// A port, with the locks and channels for changes of it.
#[derive(Debug)]
pub(super) struct HostPort {
    pub(super) port: Arc<dyn Port>,
    /// Held during a call of the host, which may take long, so that calls are made one after
    /// another. Each call reads the state only when it has the lock, so the last call always sets
    /// the newest state.
    pub(super) calls: tokio::sync::Mutex<ChangePace>,
    /// Held by each call that lends the port's queues, takes them back, or joins another interface
    /// (`lending.rs`).
    pub(super) lending: Arc<tokio::sync::Mutex<()>>,
    pub(super) changes: watch::Sender<u64>,
    /// Notified when the host's interface may have been deleted, or may be back.
    pub(super) hint: Notify,
    /// Notified when the host has begun or ceased to use a pair.
    pub(super) attached: Notify,
    /// The same, for the choice of the pairs to deliver to (`receive.rs`); also after a hash was
    /// set or removed.
    pub(super) receivers: Notify,
}

impl HostPort {
    pub(super) fn new(port: Arc<dyn Port>, queue_pairs: usize) -> Self {
        Self {
            port,
            calls: tokio::sync::Mutex::new(ChangePace::new(queue_pairs, Instant::now())),
            lending: Arc::default(),
            changes: watch::Sender::new(0),
            hint: Notify::new(),
            attached: Notify::new(),
            receivers: Notify::new(),
        }
    }

    /// Notifies the subscribers to changes of the device.
    pub(super) fn change(&self) {
        self.changes.send_modify(|n| *n += 1);
    }
}

/// A device with a port: makes the calls of the host for settings of guest and operator.
pub(super) trait HasPort {
    /// Returns the device's name.
    fn name(&self) -> &str;

    fn host(&self) -> &HostPort;

    /// Calls `act` with the state. `act` must not block.
    fn with<T>(&self, act: impl FnOnce(&mut PortState) -> T) -> T;

    /// Returns the next pair to attach or detach: see [`PortState::next_pair`].
    fn next_pair(&self, is_refused: &[bool]) -> Option<(usize, bool)>;

    /// Has running queues adopt the state; returns when they have.
    async fn push_rules(&self);

    /// Has workers serve the queues of the pairs in use and no others. Returns false if the port
    /// refuses a change.
    async fn apply_pairs(&self) -> bool;

    /// Sets the MTU that the next driver will be told.
    fn note_mtu(&self, mtu: u16);

    /// Attaches the pairs that are served to the host, and detaches the others. Returns false if
    /// the host refused a change. `pace` is the content of the locked `calls`.
    async fn attach(&self, pace: &mut ChangePace) -> bool {
        let mut is_refused = vec![false; self.with(|state| state.attached.len())];
        while self.next_pair(&is_refused).is_some() {
            sleep_until(pace.next()).await;
            // Ask again: the wanted pairs may have changed during the sleep.
            let Some((pair, wanted)) = self.next_pair(&is_refused) else { break };
            let (port, began) = (self.host().port.clone(), Instant::now());
            let done = aside(move || port.set_attached(pair, wanted)).await;
            pace.changed(began, Instant::now());
            let done = done.unwrap_or(Err(Errno::INTR));
            is_refused[pair] = done.is_err();
            self.host().attached.notify_one();
            self.host().receivers.notify_one();
            let told = self.with(|state| {
                if done.is_ok() {
                    state.note_attached(pair, wanted);
                }
                state.note(Setting::Pair { pair, is_attached: wanted }, done)
            });
            if let Some(errno) = told.filter(|_| self.host().port.is_own()) {
                let device = self.name();
                let problem = "attaching or detaching a queue pair of the interface failed";
                tracing::warn!(device, pair, wanted, %errno, "{problem}");
            }
        }
        !is_refused.contains(&true)
    }

    /// Tells the port which offloads the guest accepts. Returns false if the port refuses.
    async fn apply_offloads(&self) -> bool {
        let _calls = self.host().calls.lock().await;
        loop {
            let (given, told) = self.with(|state| (state.given, state.host_given));
            if told == Some(given) {
                return true;
            }
            let port = self.host().port.clone();
            let set = aside(move || port.set_offloads(given)).await;
            let set = set.unwrap_or(Err(Errno::INTR));
            if let Some(errno) = self.with(|state| state.note(Setting::Offloads, set)) {
                let device = self.name();
                let problem = "setting the offloads of the interface failed";
                tracing::warn!(device, %errno, ?given, "{problem}");
            }
            if set.is_err() {
                return false;
            }
            self.with(|state| state.host_given = Some(given));
        }
    }

    /// Has the port choose the pair of each frame by the guest's hash. Returns false if the port
    /// refuses.
    async fn apply_rss(&self) -> bool {
        // Usually there is no hash: do not wait for the lock, which a call of a slow host may hold.
        // A task that is setting another hash at this moment compares the states again afterwards.
        if self.with(|state| state.rss == state.host_rss) {
            return true;
        }
        let _calls = self.host().calls.lock().await;
        loop {
            let (rss, told) = self.with(|state| (state.rss.clone(), state.host_rss.clone()));
            if told == rss {
                return true;
            }
            let (port, wanted) = (self.host().port.clone(), rss.clone());
            let set = aside(move || port.set_rss(wanted)).await;
            let set = set.unwrap_or(Err(Errno::INTR));
            if let Some(errno) = self.with(|state| state.note(Setting::Rss, set)) {
                let device = self.name();
                let problem = "setting receive-side scaling of the interface failed";
                tracing::warn!(device, %errno, "{problem}");
            }
            if set.is_err() {
                return false;
            }
            self.with(|state| state.host_rss = rss);
            self.host().receivers.notify_one();
        }
    }

    /// Switches the guest's link on or off. While it is off, no frame passes. A driver sends as
    /// soon as it sees its link up; so the guest is shown "up" only after its queues pass frames,
    /// and "down" before its queues drop frames.
    async fn set_link(&self, up: bool) {
        let changed = self.with(|state| {
            state.is_link_shown &= up;
            std::mem::replace(&mut state.link_up, up) != up
        });
        if !changed {
            return;
        }
        if !up {
            self.host().change();
        }
        self.push_rules().await;
        let port = self.host().port.clone();
        let _ = aside(move || port.set_link(up)).await;
        if up {
            // Read the state again: the operator may have switched the link off while the rules and
            // the port were set.
            self.with(|state| state.is_link_shown = state.link_up);
            self.host().change();
        }
    }

    /// Sets the host's MTU, and the MTU that the next driver is told. A port without an MTU is no
    /// error.
    ///
    /// # Errors
    /// `EINVAL`: `mtu` is below 68. Any other: the error of the host.
    async fn set_mtu(&self, mtu: u16) -> Result<(), Errno> {
        if !is_mtu(mtu) {
            return Err(Errno::INVAL);
        }
        let port = self.host().port.clone();
        let set = aside(move || port.set_mtu(mtu)).await;
        match set.unwrap_or(Err(Errno::INTR)) {
            Ok(()) | Err(Errno::OPNOTSUPP) => {}
            Err(errno) => return Err(errno),
        }
        self.note_mtu(mtu);
        self.host().change();
        self.push_rules().await;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_of_the_host_is_logged_once_until_the_host_follows() {
        let mut state = PortState::new(1, None);
        let pair = |is_attached| Setting::Pair { pair: 0, is_attached };
        let refused = |errno| Err(errno);
        for _ in 0..2 {
            let told = [(); 3].map(|()| state.note(pair(true), refused(Errno::BUSY)));
            assert_eq!(told, [Some(Errno::BUSY), None, None]);
            // Others do not end it.
            assert_eq!(state.note(Setting::Offloads, refused(Errno::BUSY)), Some(Errno::BUSY));
            assert_eq!(state.note(pair(false), Ok(())), None);
            assert_eq!(state.note(pair(true), refused(Errno::BUSY)), None);
            assert_eq!(state.note(pair(true), refused(Errno::NODEV)), Some(Errno::NODEV));
            assert_eq!(state.note(pair(true), Ok(())), None);
            assert_eq!(state.note(Setting::Offloads, Ok(())), None);
        }
        assert_eq!(state.note(Setting::Rss, refused(Errno::PERM)), Some(Errno::PERM));
        state.forget_refusals();
        assert_eq!(state.note(Setting::Rss, refused(Errno::PERM)), Some(Errno::PERM));
    }
}
