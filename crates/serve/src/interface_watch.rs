//! Watches the host's interface of a network device, in the process that serves the device.

use crate::view::DeviceView;
use manyring_device::net::NetSide;
use std::sync::Arc;
use tokio::task::JoinSet;

/// Returns the network device of `view`, if its port is an interface.
pub fn with_interface(view: &DeviceView) -> Option<&Arc<dyn NetSide>> {
    view.side.as_net().filter(|device| device.port().interface().is_some())
}

/// Starts the task that watches the interface of the device; it ends when the result is dropped.
/// `is_late`: the device may have missed reports since its port was opened, so the interface is
/// checked at once.
pub fn look_after(view: &DeviceView, is_late: bool) -> JoinSet<()> {
    let mut tasks = JoinSet::new();
    if let Some(device) = with_interface(view).cloned() {
        if is_late {
            device.port_may_have_changed();
        }
        tasks.spawn(async move { device.look_after_port().await });
    }
    tasks
}
