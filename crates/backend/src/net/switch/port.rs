//! `SwitchPort`: the [`Port`] of a device or uplink on a switch.

use super::copy_queue::CopyInbox;
use super::receiver::SwitchRx;
use super::sender::SwitchTx;
use super::{CopyPath, OFFLOADS, PortCounters, Shared, Switch, Vlans};
use crate::net::{HostFilter, Port, PortRx, PortTx};
use manyring_wire::net::rss::Rss;
use manyring_wire::net::{HEADER_SIZE, Offloads};
use rustix::io::Errno;
use std::sync::{Arc, PoisonError};

/// A port of a switch. Dropping it removes it from the switch.
#[derive(Debug)]
pub struct SwitchPort {
    switch: Arc<Switch>,
    shared: Arc<Shared>,
}

impl SwitchPort {
    pub(super) fn new(switch: Arc<Switch>, shared: Arc<Shared>) -> Self {
        Self { switch, shared }
    }

    /// Makes a copy path that sends copies of frames as this port, outside of its queues.
    #[must_use]
    pub fn copy_path(&self) -> CopyPath {
        CopyPath::new(self.switch.clone(), self.shared.clone(), 0)
    }

    /// Returns the counters of the port, to which all of its queues add.
    #[must_use]
    pub fn counters(&self) -> &PortCounters {
        &self.shared.counters
    }

    /// Returns the inbox of the port's first receiveq.
    #[cfg(test)]
    pub(super) fn inbox(&self) -> Arc<CopyInbox> {
        let slot = self.shared.inboxes[0].lock().unwrap_or_else(PoisonError::into_inner);
        slot.clone().unwrap()
    }

    /// Makes a new map with the present state of the port.
    fn redraw(&self) {
        self.switch.redraw(&mut self.switch.map(), &self.shared, true);
    }
}

impl Drop for SwitchPort {
    fn drop(&mut self) {
        self.switch.remove(&self.shared);
    }
}

impl Port for SwitchPort {
    fn kind(&self) -> &'static str {
        "switch"
    }

    fn interface(&self) -> Option<&str> {
        Some(self.switch.name())
    }

    fn queue_pairs(&self) -> usize {
        self.shared.options.queue_pairs
    }

    fn taken(&self) -> Offloads {
        OFFLOADS
    }

    fn given(&self) -> Offloads {
        OFFLOADS
    }

    fn mtu(&self) -> Option<u16> {
        None
    }

    fn open_tx(&self, index: usize) -> Result<Box<dyn PortTx>, Errno> {
        if index >= self.queue_pairs() {
            return Err(Errno::INVAL);
        }
        Ok(Box::new(SwitchTx::new(self.switch.clone(), self.shared.clone(), index)?))
    }

    fn open_rx(&self, index: usize) -> Result<Box<dyn PortRx>, Errno> {
        let slot = self.shared.inboxes.get(index).ok_or(Errno::INVAL)?;
        let inbox = CopyInbox::new()?;
        let rx = SwitchRx::new(inbox.clone())?;
        *slot.lock().unwrap_or_else(PoisonError::into_inner) = Some(inbox);
        self.redraw();
        Ok(Box::new(rx))
    }

    fn set_offloads(&self, offloads: Offloads) -> Result<(), Errno> {
        self.shared.set_takes(offloads);
        self.redraw();
        Ok(())
    }

    fn set_attached(&self, index: usize, attached: bool) -> Result<(), Errno> {
        self.shared.attach(index, attached).ok_or(Errno::INVAL)?;
        self.redraw();
        Ok(())
    }

    fn can_hash(&self) -> bool {
        true
    }

    fn set_rss(&self, rss: Option<Arc<Rss>>) -> Result<(), Errno> {
        *self.shared.rss.lock().unwrap_or_else(PoisonError::into_inner) = rss;
        self.redraw();
        Ok(())
    }

    fn host_filter(&self) -> HostFilter {
        HostFilter { only_from: self.shared.options.only, ..HostFilter::default() }
    }

    fn carries_vlan(&self, id: u16) -> bool {
        match &self.shared.options.vlans {
            Vlans::All => true,
            Vlans::Access(_) => false,
            Vlans::Trunk(vlans) => vlans.contains(&id),
        }
    }

    fn set_mtu(&self, _mtu: u16) -> Result<(), Errno> {
        Err(Errno::OPNOTSUPP)
    }

    fn set_link(&self, _up: bool) {}

    fn transmit(&self, frame: &[u8]) -> Result<(), Errno> {
        let frame_copy = [&[0; HEADER_SIZE][..], frame].concat();
        self.copy_path().send(&frame_copy);
        Ok(())
    }

    fn counted(&self) -> Option<&PortCounters> {
        Some(&self.shared.counters)
    }
}
