//! A network device in its device process, and the supervisor's commands about the interface of its
//! port.

use crate::assemble::port::{LentInterface, host_filter};
use crate::interface_watch;
use crate::view::DeviceView;
use manyring_device::Device;
use manyring_device::net::{Guest, NetDevice, NetSide};
use manyring_protocol::message::{PortFilter, Report};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use std::sync::Arc;
use tokio::sync::watch;
use tokio::task::JoinSet;

/// The operator's settings of a network device: link, MTU and announcements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Wanted {
    pub(super) link_up: bool,
    pub(super) mtu: Option<u16>,
    pub(super) announcements: u64,
}

/// A network device that the device process serves.
#[derive(Debug)]
pub(super) struct ProcessNet {
    device: Arc<NetDevice>,
    /// The interface of its port, if the port has one.
    lent: Option<LentInterface>,
    wanted: watch::Sender<Wanted>,
    shown: Guest,
    /// Tasks that follow the interface and the operator's settings.
    _tasks: JoinSet<()>,
}

impl ProcessNet {
    /// Makes the object for the network device of `view`. `lent`: the interface of its port, if the
    /// port has one.
    pub(super) fn new(
        device: Arc<NetDevice>,
        view: &DeviceView,
        lent: Option<LentInterface>,
    ) -> Self {
        let mut tasks = interface_watch::look_after(view, false);
        let wanted = Wanted { link_up: true, mtu: device.mtu(), announcements: 0 };
        let (wanted, wants) = watch::channel(wanted);
        tasks.spawn(follow(device.clone(), wants));
        if lent.as_ref().is_some_and(LentInterface::waits) {
            device.port_may_have_changed();
        }
        let shown = Guest::default();
        Self { device, lent, wanted, shown, _tasks: tasks }
    }

    /// Applies the state of the interface (`is_gone`: it was deleted) and the operator's settings.
    pub(super) fn handle(&self, is_gone: bool, wanted: Wanted) {
        if is_gone {
            self.lent.iter().for_each(LentInterface::lose);
            self.device.port_may_have_changed();
        }
        self.wanted.send_if_modified(|known| std::mem::replace(known, wanted) != wanted);
    }

    /// Replaces the queues of a deleted interface by queues of the one that the supervisor joined
    /// in its place.
    ///
    /// # Errors
    /// `EINVAL`: the device has no interface, or the number of queues differs.
    pub(super) fn renew(
        &self,
        queues: Vec<OwnedFd>,
        (filter, chunk): (PortFilter, Option<u32>),
    ) -> Result<(), Errno> {
        let lent = self.lent.as_ref().ok_or(Errno::INVAL)?;
        lent.renew(queues, chunk, host_filter(filter))?;
        self.device.port_may_have_changed();
        Ok(())
    }

    /// Returns a report of the guest's settings; `None` if they are as in the last report.
    pub(super) fn news(&mut self, name: &str) -> Option<Report> {
        // The supervisor itself attaches the queue pairs of an interface. For other ports it must
        // be told which pairs are attached.
        let pairs = self.lent.is_none().then(|| self.device.attached_pairs());
        let guest = Guest { pairs, ..self.device.guest() };
        if std::mem::replace(&mut self.shown, guest) == guest {
            return None;
        }
        let Guest { mac, announces, control, .. } = guest;
        let number = |of: Option<usize>| of.and_then(|number| u16::try_from(number).ok());
        let (device, control, pairs) = (name.to_owned(), number(control), number(pairs));
        Some(Report::Guest { device, mac, announces, control, pairs })
    }
}

/// Applies the operator's settings to the device at each change.
async fn follow(device: Arc<NetDevice>, mut wants: watch::Receiver<Wanted>) {
    let mut announcements = 0;
    while wants.changed().await.is_ok() {
        let wanted = *wants.borrow_and_update();
        device.set_link(wanted.link_up).await;
        if let Some(mtu) = wanted.mtu.filter(|mtu| device.mtu() != Some(*mtu))
            && let Err(errno) = device.set_mtu(mtu).await
        {
            let device = device.name();
            tracing::warn!(device, mtu, %errno, "changing the guest's MTU failed");
        }
        if wanted.announcements > announcements {
            let _ = device.announce();
        }
        announcements = wanted.announcements;
    }
}
