//! `NetSide`: the interface of a network device for the host's events and the operator, whether its
//! queues run in this process or in another one.

use super::Receives;
use crate::PendingResult;
use manyring_backend::net::Port;
use manyring_wire::net::MacAddress;
use rustix::io::Errno;
use std::fmt::Debug;
use std::sync::Arc;

/// A network device, as the host's events and the operator use it.
pub trait NetSide: Debug + Send + Sync {
    /// Returns the port behind the device.
    fn port(&self) -> &Arc<dyn Port>;

    /// Returns the present MAC address, which the driver may have changed.
    fn mac(&self) -> MacAddress;

    /// Returns the MTU that the guest is told when it starts its device.
    fn mtu(&self) -> Option<u16>;

    /// Returns the number of queue pairs.
    fn queue_pairs(&self) -> usize;

    /// Returns the number of queue pairs that the host may use now. Does not wait for a change that
    /// is under way.
    fn attached_pairs(&self) -> usize;

    /// Returns to how many pairs the host delivers frames, of those that it may use.
    fn receives(&self) -> Receives;

    /// True if virtqueue `index` is the control queue that the back-end serves, or was at its last
    /// start. Its index depends on the features (§5.1.2): with neither `VIRTIO_NET_F_MQ` nor
    /// `VIRTIO_NET_F_RSS` it is the third queue.
    fn is_control_queue(&self, index: usize) -> bool;

    /// True if the guest's link is up.
    fn is_link_up(&self) -> bool;

    /// Switches the guest's link on or off. While it is off, no frame passes. A driver sends as
    /// soon as it sees its link up; so the guest is shown "up" only after its queues pass frames,
    /// and "down" before its queues drop frames.
    fn set_link(&self, up: bool) -> PendingResult<'_, ()>;

    /// Sets the host's MTU, and the MTU that the guest is told when it next starts its device: a
    /// running driver keeps its MTU (§5.1.4.2). A port without an MTU is no error.
    ///
    /// # Errors
    /// `EINVAL`: `mtu` is below 68. Any other: the error of the host.
    fn set_mtu(&self, mtu: u16) -> PendingResult<'_, Result<(), Errno>>;

    /// Asks the guest to announce itself (§5.1.6.5.4). Returns false if its driver cannot.
    #[must_use]
    fn announce(&self) -> bool;

    /// Call when the host's interface may have changed.
    fn port_may_have_changed(&self);

    /// Watches the port for ever: takes the guest's link down while the host's interface is
    /// deleted, and opens the interface again.
    fn look_after_port(&self) -> PendingResult<'_, ()>;
}
