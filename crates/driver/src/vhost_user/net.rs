//! A front-end's messages to a network device beside its rings: the MTU, and "announce the guest".

use super::FrontEnd;
use crate::DriverError;
use manyring_wire::net::MacAddress;

impl FrontEnd {
    /// `SEND_RARP`: have the device announce `mac` to the network. Needs `PROTOCOL_F_RARP`.
    ///
    /// # Errors
    /// See [`Self::features`].
    pub fn send_rarp(&mut self, mac: MacAddress) -> Result<(), DriverError> {
        let mut payload = [0; 8];
        payload[..6].copy_from_slice(&mac);
        self.set(19, &payload, &[])
    }

    /// `NET_SET_MTU`, in bytes. Needs `PROTOCOL_F_MTU`.
    ///
    /// # Errors
    /// See [`Self::features`].
    pub fn net_set_mtu(&mut self, mtu: u16) -> Result<(), DriverError> {
        self.set_number(20, mtu.into())
    }
}
