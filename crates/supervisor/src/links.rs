//! Watches the host's interfaces. When one changes, the network device that has it checks its port.

use crate::model::Registry;
use manyring_backend::sys::link::LinkEvents;
use manyring_config::Plan;
use manyring_serve::interface_watch::with_interface;
use rustix::io::Errno;
use std::io;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// A subscription to the kernel's reports of interfaces; `None`: no device has an interface, or
/// subscribing failed.
#[derive(Debug, Default)]
pub(crate) struct HostLinks(Option<AsyncFd<LinkEvents>>);

#[allow(
    deprecated,
    reason = "its replacement is unsafe; `LinkEvents` owns its fd and never changes it"
)]
fn watched() -> io::Result<AsyncFd<LinkEvents>> {
    AsyncFd::with_interest(LinkEvents::open()?, Interest::READABLE)
}

impl HostLinks {
    /// Subscribes to the kernel's reports of interfaces, if a device of `plan` has one.
    pub(crate) fn open(plan: &Plan) -> Self {
        if plan.net.iter().all(|net| !net.port.kind().is_interface) {
            return Self::default();
        }
        let events = watched();
        if let Err(error) = &events {
            tracing::warn!(%error, "watching interfaces failed; deleted ones will not be noticed");
        }
        Self(events.ok())
    }

    /// True if there is a subscription.
    pub(crate) fn is_open(&self) -> bool {
        self.0.is_some()
    }

    /// Has a network device check its port whenever a report concerns its interface. Returns only
    /// if reading the reports fails.
    pub(crate) async fn follow(self, devices: Registry) {
        let Some(events) = self.0 else { return };
        loop {
            let Ok(mut ready) = events.readable().await else { return };
            let changes = match ready.get_inner().read() {
                Ok(changes) => Some(changes),
                Err(Errno::AGAIN) => {
                    ready.clear_ready();
                    continue;
                }
                // The kernel dropped reports: every port must be checked.
                Err(Errno::NOBUFS) => None,
                Err(errno) => {
                    tracing::warn!(
                        %errno,
                        "watching interfaces failed; changes are no longer noticed"
                    );
                    return;
                }
            };
            for served in devices.served() {
                let Some(device) = with_interface(&served.view) else { continue };
                let mut heard = changes.iter().flatten();
                if changes.is_none() || heard.any(|change| device.port().heeds(change)) {
                    device.port_may_have_changed();
                }
            }
        }
    }
}
