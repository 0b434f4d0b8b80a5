//! `XenDisk`: what a tool stack does with a disk of a domain: announces, detaches and removes it.

use super::client::XenStore;
use crate::DriverError;
use manyring_wire::xen::keys;
use manyring_wire::xen::state::XenbusState;

/// A disk of a domain, as its tool stack knows it.
#[derive(Clone, Debug)]
pub struct XenDisk {
    /// The kind of the back-end that is to serve it.
    pub kind: String,
    /// The domain.
    pub domain: u16,
    /// The device's number in the guest, like 51712 (xvda).
    pub device: u32,
    /// The image to serve.
    pub params: String,
    /// May the guest write?
    pub writable: bool,
}

impl XenDisk {
    /// A disk that the guest may write.
    #[must_use]
    pub fn new(kind: &str, domain: u16, device: u32, params: &str) -> Self {
        let (kind, params) = (kind.to_owned(), params.to_owned());
        Self { kind, domain, device, params, writable: true }
    }

    /// The folder of the front-end, as its own domain names it.
    #[must_use]
    pub fn folder(&self) -> String {
        format!("device/vbd/{}", self.device)
    }

    /// The folder of the front-end.
    #[must_use]
    pub fn front(&self) -> String {
        format!("/local/domain/{}/{}", self.domain, self.folder())
    }

    /// The folder of the back-end, in domain 0.
    #[must_use]
    pub fn back(&self) -> String {
        let Self { kind, domain, device, .. } = self;
        format!("/local/domain/0/backend/{kind}/{domain}/{device}")
    }

    /// Writes the nodes that make the disk known to both ends; `store` speaks for domain 0.
    ///
    /// # Errors
    /// [`DriverError::Store`].
    pub fn announce(&self, store: &mut XenStore) -> Result<(), DriverError> {
        let (front, back, domain) = (self.front(), self.back(), self.domain);
        for (folder, permissions) in
            [(&front, format!("n{domain} r0")), (&back, format!("n0 r{domain}"))]
        {
            store.write(folder, "")?;
            store.permit(folder, &permissions)?;
        }
        let mode = if self.writable { "w" } else { "r" };
        let number = domain.to_string();
        for (key, value) in [
            (keys::FRONTEND, front.as_str()),
            (keys::FRONTEND_ID, &number),
            (keys::ONLINE, "1"),
            (keys::REMOVABLE, "0"),
            (keys::MODE, mode),
            (keys::PARAMS, &self.params),
        ] {
            store.write(&format!("{back}/{}", key.name), value)?;
        }
        let state = XenbusState::Initialising.emit();
        for (key, value) in [(keys::BACKEND, back.as_str()), (keys::BACKEND_ID, "0")] {
            store.write(&format!("{front}/{}", key.name), value)?;
        }
        store.write(&format!("{front}/{}", keys::FRONT_STATE.name), &state)?;
        store.write(&format!("{back}/{}", keys::BACK_STATE.name), &state)
    }

    /// Asks the front-end to let go of the disk.
    ///
    /// # Errors
    /// [`DriverError::Store`].
    pub fn detach(&self, store: &mut XenStore) -> Result<(), DriverError> {
        let back = self.back();
        store.write(&format!("{back}/{}", keys::ONLINE.name), "0")?;
        store.write(&format!("{back}/{}", keys::BACK_STATE.name), XenbusState::Closing.emit())
    }

    /// Removes both folders, whatever their ends do.
    ///
    /// # Errors
    /// [`DriverError::Store`].
    pub fn remove(&self, store: &mut XenStore) -> Result<(), DriverError> {
        store.remove(&self.back())?;
        store.remove(&self.front())
    }
}
