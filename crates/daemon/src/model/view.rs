//! `DeviceView`: what is shown of a device, in whichever process its queues run
//! (docs/design/0029).

use manyring_device::HostSide;
use manyring_transport::vhost_user::Connected;

/// A device that is served.
#[derive(Clone, Debug)]
pub(crate) struct DeviceView {
    pub(crate) side: HostSide,
    pub(crate) connected: Connected,
    /// How the device can be reached, for people.
    pub(crate) socket: String,
    /// Who has asked for it: see [`manyring_config::plan::Place::origin`].
    pub(crate) origin: &'static str,
    /// The trust domain whose device process serves it.
    pub(crate) process: Option<String>,
    /// A child of this supervisor reads its image.
    pub(crate) has_helper: bool,
}

impl DeviceView {
    /// A device that no front-end uses yet. People are shown how it can be reached, and who has
    /// asked for it.
    pub(crate) fn new(
        side: impl Into<HostSide>,
        (socket, origin): (String, &'static str),
        process: Option<String>,
    ) -> Self {
        let connected = Connected::new(false);
        Self { side: side.into(), connected, socket, origin, process, has_helper: false }
    }

    /// The device's name in the configuration.
    pub(crate) fn name(&self) -> &str {
        &self.side.name
    }
}
