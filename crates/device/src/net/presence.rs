//! Watches the host's interface, and opens it again after it was deleted and created again.
//!
//! ```text
//! present:  after a hint (a change of the interface, a queue that cannot read): check the port;
//!           if the interface is gone: take the guest's link down, serve no queue, use no pair
//! gone:     once a second, or after a hint: try to open an interface of the same name;
//!           if that succeeds: set offloads, pairs and link as at a start; the guest's link is up
//! ```
//! 1. Queues are disabled while the port is gone, as if their pairs were out of use. Frames that
//!    the guest sends are dropped and counted, no worker polls a dead file, and a session that
//!    starts in this time starts as always.
//! 2. The port is checked only after a hint, so a device whose interface stays costs nothing. An
//!    interface in another network namespace causes no hints: it is checked every five seconds.

use super::State;
use super::lending::in_turn;
use super::port::HasPort;
use manyring_backend::net::tap::TapError;
use manyring_backend::net::{Port, QueueLengthSource};
use manyring_engine::{Rate, aside};
use manyring_wire::net::VIRTIO_NET_F_GUEST_ANNOUNCE;
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};

/// Delay between two attempts to open a deleted interface without a hint.
const RETRY: Duration = Duration::from_secs(1);
/// Delay between two checks of an interface for which the kernel sends no events.
const LOOK: Duration = Duration::from_secs(5);
/// Hints within this time count as one.
const RETRY_DELAY: Duration = Duration::from_millis(50);
/// Delay before the next look at the frames that the queues of a port have lost.
const TEND: Duration = Duration::from_secs(1);
/// The same for a port whose queues each have the whole length and lose nothing.
const TEND_SETTLED: Duration = Duration::from_secs(8);
/// Held during a look: see [`Presence::adapt_queue_length`].
static LOOKS: Semaphore = Semaphore::const_new(1);
/// The least time between two losses of the interface that are logged.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// What was logged: when the next loss may be logged, the number of losses since the last logged
/// one, and why opening fails.
#[derive(Debug)]
pub(super) struct Told {
    losses: Rate,
    unlogged: u32,
    why: Option<TapError>,
}

impl Told {
    fn new() -> Self {
        Self { losses: Rate::of(1, LOG_INTERVAL, Instant::now()), unlogged: 0, why: None }
    }

    /// Counts a loss. Returns the number of losses since the last logged one, if one must be logged
    /// now.
    fn lose(&mut self) -> Option<u32> {
        let now = Instant::now();
        self.unlogged += 1;
        let is_due = self.losses.due() <= now;
        is_due.then(|| {
            self.losses.charge(LOG_INTERVAL, now);
            std::mem::take(&mut self.unlogged)
        })
    }
}

impl State {
    /// True if the driver can be asked to announce itself (§5.1.6.5.4).
    pub(super) fn can_announce(&self) -> bool {
        self.has_control && self.features & VIRTIO_NET_F_GUEST_ANNOUNCE != 0
    }
}

impl<T: HasPort> Presence for T {}

/// Watches the port of a device.
pub(super) trait Presence: HasPort {
    /// See [`NetSide::look_after_port`](super::NetSide::look_after_port).
    async fn look_after(&self) {
        tokio::select! {
            () = self.watch() => {}
            () = self.adapt_queue_length() => {}
        }
    }

    /// Has the port divide its queue length anew once a second, while the host uses several.
    async fn adapt_queue_length(&self) {
        let port = &self.host().port;
        if port.queue_pairs() < 2 {
            return std::future::pending().await;
        }
        let mut wait = TEND;
        loop {
            while !self.with(|state| state.attached_pairs() > 1) {
                self.host().attached.notified().await;
            }
            tokio::time::sleep(wait).await;
            // The host may use fewer pairs by now, or another process may have the interface.
            if !self.with(|state| state.attached_pairs() > 1) {
                continue;
            }
            wait = TEND_SETTLED;
            if port.queue_length().is_some_and(|length| length.source == QueueLengthSource::Auto) {
                // One look of all devices at a time: where the host's network lock is held for
                // long, one thread waits for it, and not one for each device.
                let _turn = LOOKS.acquire().await;
                let port = port.clone();
                if aside(move || port.adapt_queue_length()).await == Some(false) {
                    wait = TEND;
                }
            }
        }
    }

    /// Watches the host's interface.
    async fn watch(&self) {
        let (host, mut told) = (self.host(), Told::new());
        loop {
            let hint = host.hint.notified();
            if host.port.is_reported() {
                hint.await;
            } else {
                let _ = timeout(LOOK, hint).await;
            }
            if host.port.is_own() {
                tokio::time::sleep(RETRY_DELAY).await;
            }
            if self.is_gone().await {
                self.lose_port(&mut told).await;
                self.wait_for_port(&mut told).await;
            } else if self.with(|state| state.is_gone) {
                // The port joined an interface, and the task that waited for that had ended.
                self.with(|state| state.joins += 1);
                self.regain_port().await;
            }
        }
    }

    async fn is_gone(&self) -> bool {
        let port = self.host().port.clone();
        aside(move || port.is_gone()).await.unwrap_or(false)
    }

    async fn lose_port(&self, told: &mut Told) {
        self.with(|state| (state.is_gone, state.is_loss_shown) = (true, true));
        let losses = if self.host().port.is_own() { told.lose() } else { None };
        if let Some(losses) = losses {
            let device = self.name();
            let interface = self.host().port.interface().unwrap_or_default();
            tracing::warn!(
                device,
                interface,
                losses,
                "the host's interface is gone: the guest's link is down until an interface of \
                 this name is there again"
            );
        }
        self.host().change();
        self.push_rules().await;
        self.apply_pairs().await;
    }

    /// Tries to open the interface again, until that succeeds.
    async fn wait_for_port(&self, told: &mut Told) {
        let device = self.name();
        told.why = None;
        loop {
            let join = |port: &dyn Port, _: &dyn Fn() -> bool| port.join_again();
            let note = |joined: Result<(), TapError>| {
                self.with(|state| state.joins += u64::from(joined.is_ok()));
                joined
            };
            match in_turn(self.host(), join, note).await {
                Some(Ok(())) => return self.regain_port().await,
                Some(Err(error @ TapError::HandedIn(_))) => {
                    tracing::warn!(
                        device,
                        %error,
                        "the interface is gone and cannot be reopened; the guest's link stays down"
                    );
                    return std::future::pending().await;
                }
                Some(Err(error)) => {
                    // Do not log that it is missing: the loss was logged.
                    let is_new = told.why.as_ref() != Some(&error);
                    if is_new && !matches!(error, TapError::Missing(_)) {
                        tracing::warn!(device, %error, "the interface cannot be joined again yet");
                    }
                    told.why = Some(error);
                }
                None => {}
            }
            let _ = timeout(RETRY, self.host().hint.notified()).await;
            tokio::time::sleep(RETRY_DELAY).await;
        }
    }

    async fn regain_port(&self) {
        let is_up = {
            let _calls = self.host().calls.lock().await;
            // The host uses no pair and no offloads of the new interface yet.
            self.with(|state| {
                state.attached.fill(false);
                state.order.clear();
                state.host_given = None;
                state.forget_refusals();
                state.link_up
            })
        };
        self.apply_offloads().await;
        self.with(|state| state.is_gone = false);
        let port = self.host().port.clone();
        let _ = aside(move || port.set_link(is_up)).await;
        self.push_rules().await;
        self.apply_pairs().await;
        self.with(|state| state.is_loss_shown = false);
        self.host().change();
        let (device, interface) = (self.name(), self.host().port.interface().unwrap_or_default());
        if self.host().port.is_own() {
            tracing::info!(device, interface, "the host's interface is back, and joined again");
        }
        // Check once more: the new interface may have been deleted meanwhile.
        self.host().hint.notify_one();
    }
}
