//! `DeviceView`: the part of a device that the API shows. It is the same in the supervisor and in a
//! device process (docs/design/0029).

use manyring_device::HostSide;
use manyring_transport::vhost_user::Connected;

/// A served device, as the API shows it.
#[derive(Clone, Debug)]
pub struct DeviceView {
    /// The device's disk or port, and the counters of its queues.
    pub side: HostSide,
    /// Publishes whether a front-end is connected.
    pub connected: Connected,
    /// The path or descriptor of the device's socket, as a text for people.
    pub socket: String,
    /// The origin of the device, that is, who configured it: see
    /// [`manyring_config::plan::Place::origin`].
    pub origin: &'static str,
    /// The trust domain whose device process serves the device; `None`: this process does.
    pub process: Option<String>,
    /// True if a helper process of this supervisor reads the image.
    pub has_helper: bool,
}

impl DeviceView {
    /// Makes the view of a device that no front-end uses yet, with its endpoint and origin as texts
    /// for people.
    pub fn new(
        side: impl Into<HostSide>,
        (socket, origin): (String, &'static str),
        process: Option<String>,
    ) -> Self {
        let connected = Connected::new(false);
        Self { side: side.into(), connected, socket, origin, process, has_helper: false }
    }

    /// Returns the device's name in the configuration.
    pub fn name(&self) -> &str {
        &self.side.name
    }
}
