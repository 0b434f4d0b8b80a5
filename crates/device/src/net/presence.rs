//! Watches the host's interface, and joins it again when it was deleted and made anew.
//!
//! ```text
//! there:  a hint comes (a change of the interface, a queue that cannot read)? ask the port
//!         it is gone? the guest's link is down, no queue is served, no pair is in use
//! gone:   once a second, or when a hint comes: have the port join an interface of its name
//!         it has? as a start does: offloads, pairs, link; then the guest's link is up again
//! ```
//! 1. Queues are disabled while the port is gone, as if their pairs were out of use. Frames that
//!    the guest sends are dropped and counted, no worker waits for a file that is dead, and a
//!    session that starts in this time starts as always.
//! 2. The port is asked only after a hint, so that a device whose interface stays costs nothing. An
//!    interface in another network namespace causes no hints: it is asked every five seconds.

use super::{Inner, NetDevice, State};
use manyring_backend::net::tap::TapError;
use manyring_engine::aside;
use manyring_wire::net::VIRTIO_NET_F_GUEST_ANNOUNCE;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use tokio::time::{Instant, timeout};

/// How often an interface that is gone is looked for without a hint.
const RETRY: Duration = Duration::from_secs(1);
/// How often an interface is asked whose changes the host does not report.
const LOOK: Duration = Duration::from_secs(5);
/// Hints that come within this time count as one.
const RETRY_DELAY: Duration = Duration::from_millis(50);
/// The shortest time between two losses of the interface that are logged.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// The state of the log: the last loss, further ones, and why joining fails.
#[derive(Debug, Default)]
struct Told {
    lost_at: Option<Instant>,
    losses: AtomicU32,
    why: Option<TapError>,
}

impl Told {
    /// True if this loss must be logged.
    fn lose(&mut self) -> bool {
        let now = Instant::now();
        self.losses.fetch_add(1, Ordering::Relaxed);
        let is_due = self.lost_at.is_none_or(|at| now - at >= LOG_INTERVAL);
        if is_due {
            self.lost_at = Some(now);
        }
        is_due
    }
}

impl State {
    /// True if the driver can be asked to announce itself (§5.1.6.5.4).
    pub(super) fn can_announce(&self) -> bool {
        self.has_control && self.features & VIRTIO_NET_F_GUEST_ANNOUNCE != 0
    }

    pub(super) fn is_link_up(&self) -> bool {
        self.is_link_shown && !self.is_loss_shown
    }
}

impl NetDevice {
    /// True if the guest's link is up.
    #[must_use]
    pub fn is_link_up(&self) -> bool {
        self.0.state().is_link_up()
    }

    /// Switches the guest's link on or off. While it is off, no frame passes. A driver sends as
    /// soon as it sees its link up, so the guest sees the link up only when its queues already pass
    /// frames, and sees it down before its queues drop frames.
    pub async fn set_link(&self, up: bool) {
        let changed = {
            let mut state = self.0.state();
            state.is_link_shown &= up;
            std::mem::replace(&mut state.link_up, up) != up
        };
        if !changed {
            return;
        }
        if !up {
            self.0.changes.send_modify(|n| *n += 1);
        }
        self.0.push_rules().await;
        let port = self.0.port.clone();
        let _ = aside(move || port.set_link(up)).await;
        if up {
            {
                let mut state = self.0.state();
                // The operator may have switched the link off again while the rules and the port
                // were set.
                state.is_link_shown = state.link_up;
            }
            self.0.changes.send_modify(|n| *n += 1);
        }
    }

    /// Asks the guest to announce itself (§5.1.6.5.4). False if its driver cannot.
    #[must_use]
    pub fn announce(&self) -> bool {
        let mut state = self.0.state();
        let can = state.can_announce();
        state.announces |= can;
        let told = can || state.announce_elsewhere();
        if told {
            self.0.changes.send_modify(|n| *n += 1);
        }
        told
    }

    /// Reports that the host's interface may have changed.
    pub fn port_may_have_changed(&self) {
        self.0.port_hint.notify_one();
    }

    /// Watches the port for ever: takes the guest's link down while the host's interface is gone,
    /// and joins the interface again.
    pub async fn look_after_port(&self) {
        let (inner, mut told) = (&self.0, Told::default());
        loop {
            let hint = inner.port_hint.notified();
            if inner.port.is_reported() {
                hint.await;
            } else {
                let _ = timeout(LOOK, hint).await;
            }
            if inner.port.is_own() {
                tokio::time::sleep(RETRY_DELAY).await;
            }
            if inner.is_gone().await {
                inner.lose_port(&mut told).await;
                inner.wait_for_port(&mut told).await;
            }
        }
    }
}

impl Inner {
    async fn is_gone(&self) -> bool {
        let port = self.port.clone();
        aside(move || port.is_gone()).await.unwrap_or(false)
    }

    async fn lose_port(&self, told: &mut Told) {
        {
            let mut state = self.state();
            (state.is_port_gone, state.is_loss_shown) = (true, true);
        }
        if self.port.is_own() && told.lose() {
            let (device, losses) = (&self.options.name, told.losses.swap(0, Ordering::Relaxed));
            let interface = self.port.interface().unwrap_or_default();
            tracing::warn!(
                device,
                interface,
                losses,
                "the host's interface is gone: the guest's link is down until an interface of \
                 this name is there again"
            );
        }
        self.changes.send_modify(|n| *n += 1);
        self.push_rules().await;
        self.apply_pairs().await;
    }

    /// Tries to join the interface again, and returns when that has succeeded.
    async fn wait_for_port(&self, told: &mut Told) {
        let device = &self.options.name;
        told.why = None;
        loop {
            let port = self.port.clone();
            match aside(move || port.join_again()).await {
                Some(Ok(())) => return self.regain_port().await,
                Some(Err(error @ TapError::HandedIn(_))) => {
                    tracing::warn!(device, %error, "the guest stays without a network");
                    return std::future::pending().await;
                }
                Some(Err(error)) => {
                    // The log said when the interface went that it is missing.
                    let is_new = told.why.as_ref() != Some(&error);
                    if is_new && !matches!(error, TapError::Missing(_)) {
                        tracing::warn!(device, %error, "the interface cannot be joined again yet");
                    }
                    told.why = Some(error);
                }
                None => {}
            }
            let _ = timeout(RETRY, self.port_hint.notified()).await;
            tokio::time::sleep(RETRY_DELAY).await;
        }
    }

    async fn regain_port(&self) {
        let is_up = {
            let _calls = self.host.lock().await;
            let mut state = self.state();
            // The host uses no pair of the new interface, and delivers no offloads.
            state.attached.fill(false);
            state.host_given = None;
            state.link_up
        };
        self.apply_offloads().await;
        self.count_join();
        self.state().is_port_gone = false;
        let port = self.port.clone();
        let _ = aside(move || port.set_link(is_up)).await;
        self.push_rules().await;
        self.apply_pairs().await;
        self.state().is_loss_shown = false;
        self.changes.send_modify(|n| *n += 1);
        let (device, interface) = (&self.options.name, self.port.interface().unwrap_or_default());
        if self.port.is_own() {
            tracing::info!(device, interface, "the host's interface is back, and joined again");
        }
        // The interface may have been deleted again before it was joined.
        self.port_hint.notify_one();
    }
}
