//! How a session starts: features, memory, rings.

use super::FrontEnd;
use crate::{Arena, DriverError, Vring};
use manyring_wire::vhost_user::VringAddr;

impl FrontEnd {
    /// The start of every session: takes `features` and `protocol` as far as they are offered.
    /// Returns the virtio features that were agreed on, `required` among them.
    ///
    /// # Errors
    /// [`DriverError::Features`] if one of `required` is not offered.
    pub fn negotiate(
        &mut self,
        features: u64,
        required: u64,
        protocol: u64,
    ) -> Result<u64, DriverError> {
        let offered = self.features()?;
        let missing = required & !offered;
        if missing != 0 {
            return Err(DriverError::Features { missing });
        }
        let protocol = self.protocol_features()? & protocol;
        self.set_protocol_features(protocol)?;
        self.set_owner()?;
        let agreed = offered & (features | required);
        self.set_features(agreed)?;
        Ok(agreed)
    }

    /// Gives the back-end all regions of `arena`, by one table.
    ///
    /// # Errors
    /// See [`Self::features`].
    pub fn set_memory(&mut self, arena: &Arena) -> Result<(), DriverError> {
        self.set_mem_table(&arena.table())
    }

    /// Sets a ring up, from `base` on, and enables it.
    ///
    /// # Errors
    /// See [`Self::features`].
    pub fn start_vring(&mut self, vring: &Vring, base: u16) -> Result<(), DriverError> {
        let index = vring.index();
        let at = vring.addresses();
        self.set_vring_num(index, vring.size().into())?;
        self.set_vring_base(index, base)?;
        self.set_vring_addr(&VringAddr {
            index,
            flags: 0,
            descriptor: at.descriptor,
            used: at.used,
            available: at.available,
            log: 0,
        })?;
        self.set_vring_call(index, Some(vring.call_fd()))?;
        self.set_vring_err(index, Some(vring.err_fd()))?;
        self.set_vring_kick(index, Some(vring.kick_fd()))?;
        self.set_vring_enable(index, true)
    }
}
