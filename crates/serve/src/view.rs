//! `DeviceView`: the part of a device that the API shows, in whichever process the device's queues
//! run (docs/design/0029).

use manyring_device::HostSide;
use manyring_transport::vhost_user::Connected;

/// A device that is served.
#[derive(Clone, Debug)]
pub struct DeviceView {
    /// The disk or the port, with its counters.
    pub side: HostSide,
    /// Whether a front-end is connected.
    pub connected: Connected,
    /// How the device can be reached, for people.
    pub socket: String,
    /// Who has asked for it: see [`manyring_config::plan::Place::origin`].
    pub origin: &'static str,
    /// The trust domain whose device process serves it.
    pub process: Option<String>,
    /// True if a helper process of this supervisor reads its image.
    pub has_helper: bool,
}

impl DeviceView {
    /// A device that no front-end uses yet. People are shown how it can be reached, and who has
    /// asked for it.
    pub fn new(
        side: impl Into<HostSide>,
        (socket, origin): (String, &'static str),
        process: Option<String>,
    ) -> Self {
        let connected = Connected::new(false);
        Self { side: side.into(), connected, socket, origin, process, has_helper: false }
    }

    /// The device's name in the configuration.
    pub fn name(&self) -> &str {
        &self.side.name
    }
}
