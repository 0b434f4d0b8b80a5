//! A network device whose queues another process serves: its device process (docs/design/0021).
//!
//! The device in this process keeps the host's interface: it is shown to the operator and obeys
//! him, watches the interface, and makes the calls of the host that the guest may choose. The
//! device process has a [`NetDevice`] of its own, with the guest's session, on a port that asks
//! this device.

use super::{Inner, NetDevice, State};
use manyring_wire::net::rss::{Rss, RssConfig};
use manyring_wire::net::{MacAddress, Offloads};
use rustix::io::Errno;
use std::sync::Arc;
use tokio::time::{Instant, sleep_until};

/// State of a device whose queues another process serves: its pairs, its guest, and announcements.
#[derive(Clone, Debug, Default)]
pub(super) struct Elsewhere {
    /// The pairs that the host must use for that process.
    pub(super) pairs: Vec<bool>,
    guest: Guest,
    /// How often the operator has asked the guest to announce itself.
    announcements: u64,
}

/// Choices of a guest that concern only itself, for the operator's display.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Guest {
    /// The MAC address that its driver has set.
    pub mac: Option<MacAddress>,
    /// Its driver can announce itself, and its control queue is served by the back-end.
    pub announces: bool,
    /// The index of its control queue, while the back-end serves that.
    pub control: Option<usize>,
    /// The pairs that its port uses, if the process that serves the queues has the port too.
    pub pairs: Option<usize>,
}

/// State of the interface that the process which serves the queues must learn at each change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outside {
    /// The operator has not switched the guest's link off.
    pub link_up: bool,
    /// The interface was deleted, and no other one of its name was joined yet.
    pub is_gone: bool,
    /// How often another interface was joined: each has new queues.
    pub joins: u64,
    /// The MTU that the next driver will be told, in bytes.
    pub mtu: Option<u16>,
    /// How often the operator has asked the guest to announce itself.
    pub announcements: u64,
}

impl NetDevice {
    /// The present state of the interface, for the process that serves the queues. It must be read
    /// again whenever [`Device::config_changes`](crate::Device::config_changes) changes.
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

    /// The guest's choices, for the operator's display.
    #[must_use]
    pub fn guest(&self) -> Guest {
        let state = self.0.state();
        Guest {
            mac: Some(state.mac),
            announces: state.can_announce(),
            control: self.0.control_index(state.features).filter(|_| state.has_control),
            pairs: None,
        }
    }

    /// Shows the choices of a guest whose queues another process serves.
    pub fn show_guest(&self, guest: Guest) {
        let mut state = self.0.state();
        state.mac = guest.mac.unwrap_or(self.0.options.mac);
        if let Some(control) = guest.control {
            // The last virtqueue can only be the control queue.
            let last = state.vqs.len() - 1;
            for (index, vq) in state.vqs.iter_mut().enumerate() {
                vq.is_control = index == control || index == last;
            }
        }
        state.elsewhere.guest = guest;
    }

    /// Attaches a pair that another process serves to the host, or detaches it, as soon as the pace
    /// of such changes allows (`pace.rs`).
    ///
    /// # Errors
    /// `EINVAL`: there is no such pair. `EIO`: the host refuses, and the log says why.
    pub async fn lend_pair(&self, pair: usize, attached: bool) -> Result<(), Errno> {
        if pair >= self.queue_pairs() {
            return Err(Errno::INVAL);
        }
        self.0.state().elsewhere.lend(pair, attached);
        self.0.apply_pairs().await;
        let state = self.0.state();
        // While the interface is gone the wish is stored, for the interface joined next.
        match state.is_port_gone || state.attached[pair] == attached {
            true => Ok(()),
            false => Err(Errno::IO),
        }
    }

    /// Sets the offloads of frames for a guest whose queues another process serves, at the pace of
    /// [`Self::lend_pair`]: each change takes the host's network lock as well.
    ///
    /// # Errors
    /// `EINVAL`: the port delivers no such frames. `EIO`: the host refuses, and the log says why.
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

    /// Makes the host deliver frames by the pairs that the hash of a guest chooses whose queues
    /// another process serves, at the pace of [`Self::lend_pair`]: each change loads a program.
    /// `None`: the host chooses.
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

    /// Detaches all pairs from the host, because the process that served the queues is gone.
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

    /// The pairs in use of a port that the other process has; `None`: this process has the port.
    pub(super) fn attached_pairs(&self) -> Option<usize> {
        self.guest.pairs
    }

    /// True if another process serves the pair.
    pub(super) fn serves(&self, pair: usize) -> bool {
        self.pairs.get(pair) == Some(&true)
    }
}

impl State {
    /// Asks a guest that another process serves to announce itself. False: its driver cannot.
    pub(super) fn announce_elsewhere(&mut self) -> bool {
        let can = self.elsewhere.guest.announces;
        self.elsewhere.announcements += u64::from(can);
        can
    }
}

impl Inner {
    /// Counts an interface that was joined in place of a deleted one.
    pub(super) fn count_join(&self) {
        self.state().joins += 1;
    }
}
