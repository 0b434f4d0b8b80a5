//! `Decorated`: a port around another one. Its [`Decorator`] wraps the two halves of each queue
//! pair; all other calls go to the inner port.

use super::switch::PortCounters;
use super::tap::lent::Lent;
use super::tap::{Flows, TapError};
use super::{HostFilter, Port, PortRx, PortTx, QueueLengthInfo};
use crate::sys::link::LinkEvent;
use manyring_wire::net::Offloads;
use manyring_wire::net::rss::Rss;
use rustix::io::Errno;
use std::sync::Arc;

/// The part of a decorated port that differs from its inner port: the halves and the kind.
pub trait Decorator: Send + Sync + std::fmt::Debug {
    /// Returns the kind of the decorated port, if the inner port has kind `inner`.
    fn kind(&self, inner: &'static str) -> &'static str {
        inner
    }

    /// Wraps a sending half.
    ///
    /// # Errors
    /// The error of a system call that the half needs, such as `eventfd`.
    fn around_tx(&self, inner: Box<dyn PortTx>) -> Result<Box<dyn PortTx>, Errno>;

    /// Wraps a receiving half.
    ///
    /// # Errors
    /// The error of a system call that the half needs.
    fn around_rx(&self, inner: Box<dyn PortRx>) -> Result<Box<dyn PortRx>, Errno>;

    /// Called after the inner port has sent a frame by [`Port::transmit`].
    fn transmitted(&self, frame: &[u8]) {
        let _ = frame;
    }
}

/// A port whose halves are those of `decorator`, around those of an inner port.
#[derive(Debug)]
pub struct Decorated<D> {
    /// The decorator, with what it counts.
    pub decorator: D,
    inner: Arc<dyn Port>,
}

impl<D: Decorator> Decorated<D> {
    /// Makes the port.
    pub fn around(inner: Arc<dyn Port>, decorator: D) -> Self {
        Self { decorator, inner }
    }
}

impl<D: Decorator> Port for Decorated<D> {
    fn kind(&self) -> &'static str {
        self.decorator.kind(self.inner.kind())
    }

    fn interface(&self) -> Option<&str> {
        self.inner.interface()
    }

    fn queue_pairs(&self) -> usize {
        self.inner.queue_pairs()
    }

    fn taken(&self) -> Offloads {
        self.inner.taken()
    }

    fn given(&self) -> Offloads {
        self.inner.given()
    }

    fn mtu(&self) -> Option<u16> {
        self.inner.mtu()
    }

    fn queue_length(&self) -> Option<QueueLengthInfo> {
        self.inner.queue_length()
    }

    fn adapt_queue_length(&self) -> bool {
        self.inner.adapt_queue_length()
    }

    fn open_tx(&self, index: usize) -> Result<Box<dyn PortTx>, Errno> {
        self.decorator.around_tx(self.inner.open_tx(index)?)
    }

    fn open_rx(&self, index: usize) -> Result<Box<dyn PortRx>, Errno> {
        self.decorator.around_rx(self.inner.open_rx(index)?)
    }

    fn set_offloads(&self, offloads: Offloads) -> Result<(), Errno> {
        self.inner.set_offloads(offloads)
    }

    fn set_attached(&self, index: usize, attached: bool) -> Result<(), Errno> {
        self.inner.set_attached(index, attached)
    }

    fn can_hash(&self) -> bool {
        self.inner.can_hash()
    }

    fn set_rss(&self, rss: Option<Arc<Rss>>) -> Result<(), Errno> {
        self.inner.set_rss(rss)
    }

    fn flows(&self) -> Option<&Flows> {
        self.inner.flows()
    }

    fn host_filter(&self) -> HostFilter {
        self.inner.host_filter()
    }

    fn carries_vlan(&self, id: u16) -> bool {
        self.inner.carries_vlan(id)
    }

    fn set_mtu(&self, mtu: u16) -> Result<(), Errno> {
        self.inner.set_mtu(mtu)
    }

    fn set_link(&self, up: bool) {
        self.inner.set_link(up);
    }

    fn heeds(&self, event: &LinkEvent) -> bool {
        self.inner.heeds(event)
    }

    fn is_reported(&self) -> bool {
        self.inner.is_reported()
    }

    fn is_own(&self) -> bool {
        self.inner.is_own()
    }

    fn is_gone(&self) -> bool {
        self.inner.is_gone()
    }

    fn join_again(&self) -> Result<(), TapError> {
        self.inner.join_again()
    }

    fn lend(&self, is_wanted: &dyn Fn() -> bool) -> Option<Result<Lent, Errno>> {
        self.inner.lend(is_wanted)
    }

    fn is_let_go(&self) -> Result<bool, Errno> {
        self.inner.is_let_go()
    }

    fn keep(&self) {
        self.inner.keep();
    }

    fn counted(&self) -> Option<&PortCounters> {
        self.inner.counted()
    }

    fn transmit(&self, frame: &[u8]) -> Result<(), Errno> {
        self.inner.transmit(frame)?;
        self.decorator.transmitted(frame);
        Ok(())
    }
}
