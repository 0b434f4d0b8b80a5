//! A network device whose queues another process serves: its room (docs/design/0021).
//!
//! This one keeps the host's interface: it shows the device, does what the operator says, looks
//! whether the interface is there, and does for the room what a guest may choose. The room has a
//! [`NetDevice`] of its own, with the guest's session, on a port that asks this one.

use super::{Inner, NetDevice, State};
use manyring_wire::net::rss::{Rss, RssConfig};
use manyring_wire::net::{MacAddress, Offloads};
use rustix::io::Errno;
use std::sync::Arc;
use tokio::time::{Instant, sleep_until};

/// What another process serves of the device, and what that one has told.
#[derive(Clone, Debug, Default)]
pub(super) struct Elsewhere {
    /// The pairs that the host is to use.
    pub(super) pairs: Vec<bool>,
    guest: Guest,
    /// How often the guest was to be asked to announce itself.
    announcements: u64,
}

/// What a guest has chosen that concerns nobody but itself. Only shown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Guest {
    /// The address that its driver has set.
    pub mac: Option<MacAddress>,
    /// Its driver can announce itself, and has left the control queue to the back-end.
    pub announces: bool,
    /// The index of its control queue, once that was started.
    pub control: Option<usize>,
}

/// What a process that serves the queues has to know at each change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outside {
    /// The operator has not pulled the guest's cable.
    pub link_up: bool,
    /// The interface was deleted, and none of its name is there yet.
    pub is_gone: bool,
    /// How often another interface was joined: its queues are others each time.
    pub joins: u64,
    /// The MTU that the next driver will be told.
    pub mtu: Option<u16>,
    /// How often the operator has wanted the guest to announce itself.
    pub announcements: u64,
}

impl NetDevice {
    /// What whoever serves the queues in another process has to know.
    /// [`Device::config_changes`](crate::Device::config_changes) says when it is to be asked again.
    #[must_use]
    pub fn outside(&self) -> Outside {
        let state = self.0.state();
        Outside {
            link_up: state.link_up,
            is_gone: state.is_port_gone,
            joins: state.joins,
            mtu: state.mtu,
            announcements: state.elsewhere.announcements,
        }
    }

    /// What the guest has chosen, for whoever shows the device.
    #[must_use]
    pub fn guest(&self) -> Guest {
        let state = self.0.state();
        Guest {
            mac: Some(state.mac),
            announces: state.can_announce(),
            control: state.vqs.iter().position(|vq| vq.is_started && vq.is_control),
        }
    }

    /// Shows what a guest has chosen whose queues are served elsewhere.
    pub fn show_guest(&self, guest: Guest) {
        let mut state = self.0.state();
        state.mac = guest.mac.unwrap_or(self.0.options.mac);
        for (index, vq) in state.vqs.iter_mut().enumerate() {
            vq.is_control = guest.control.map_or(vq.is_control, |control| control == index);
        }
        state.elsewhere.guest = guest;
    }

    /// Has the host use a pair that another process serves, or not, as soon as the pace of such
    /// changes allows.
    ///
    /// # Errors
    /// `EINVAL`: there is no such pair. `EIO`: the host refuses; the log says why.
    pub async fn lend_pair(&self, pair: usize, attached: bool) -> Result<(), Errno> {
        if pair >= self.queue_pairs() {
            return Err(Errno::INVAL);
        }
        self.0.state().elsewhere.lend(pair, attached);
        self.0.apply_pairs().await;
        let state = self.0.state();
        // While the interface is gone the wish is kept, and the interface that is joined gets it.
        match state.is_port_gone || state.attached[pair] == attached {
            true => Ok(()),
            false => Err(Errno::IO),
        }
    }

    /// Has the host deliver to a guest whose queues another process serves what it takes, at the
    /// pace of [`Self::lend_pair`]: each change takes the host's network lock as well.
    ///
    /// # Errors
    /// `EINVAL`: the port delivers no such frames. `EIO`: the host refuses; the log says why.
    pub async fn lend_offloads(&self, offloads: Offloads) -> Result<(), Errno> {
        if offloads.guest_features() & !self.0.port.given().guest_features() != 0 {
            return Err(Errno::INVAL);
        }
        if std::mem::replace(&mut self.0.state().given, offloads) == offloads {
            return if self.0.apply_offloads().await { Ok(()) } else { Err(Errno::IO) };
        }
        let next = self.0.host.lock().await.next();
        sleep_until(next).await;
        let began = Instant::now();
        let follows = self.0.apply_offloads().await;
        self.0.host.lock().await.changed(began, Instant::now());
        if follows { Ok(()) } else { Err(Errno::IO) }
    }

    /// Has the host deliver frames by the pairs that the hash of a guest chooses whose queues
    /// another process serves, at the pace of [`Self::lend_pair`]: each change loads a program.
    /// `None`: as the host likes.
    ///
    /// # Errors
    /// `EINVAL`: the port cannot, or has too few pairs. `EIO`: the host refuses; the log says why.
    pub async fn lend_rss(&self, rss: Option<RssConfig>) -> Result<(), Errno> {
        let can = |rss: &RssConfig| self.0.port.can_hash() && rss.pairs() <= self.queue_pairs();
        if !rss.as_ref().is_none_or(can) {
            return Err(Errno::INVAL);
        }
        if rss.is_none() && self.0.state().host_rss.is_none() {
            return Ok(());
        }
        let next = self.0.host.lock().await.next();
        sleep_until(next).await;
        let began = Instant::now();
        self.0.state().rss = rss.map(|rss| Arc::new(Rss::new(rss)));
        let follows = self.0.apply_rss().await;
        self.0.host.lock().await.changed(began, Instant::now());
        if follows {
            return Ok(());
        }
        let mut state = self.0.state();
        state.rss = state.host_rss.clone();
        Err(Errno::IO)
    }

    /// The process that served the queues is gone: the host uses none of them any more.
    pub async fn take_back(&self) {
        let _ = self.lend_rss(None).await;
        self.0.state().elsewhere.pairs.clear();
        self.show_guest(Guest::default());
        self.0.apply_pairs().await;
        let _ = self.lend_offloads(Offloads::default()).await;
    }
}

impl Elsewhere {
    fn lend(&mut self, pair: usize, attached: bool) {
        if self.pairs.len() <= pair {
            self.pairs.resize(pair + 1, false);
        }
        self.pairs[pair] = attached;
    }

    /// True if another process serves the pair.
    pub(super) fn serves(&self, pair: usize) -> bool {
        self.pairs.get(pair) == Some(&true)
    }
}

impl State {
    /// Asks a guest that is served elsewhere to announce itself. False if its driver cannot.
    pub(super) fn announce_elsewhere(&mut self) -> bool {
        let can = self.elsewhere.guest.announces;
        self.elsewhere.announcements += u64::from(can);
        can
    }
}

impl Inner {
    /// Counts an interface that was joined in place of another one.
    pub(super) fn count_join(&self) {
        self.state().joins += 1;
    }
}
