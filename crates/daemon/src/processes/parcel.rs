//! `Parcel`: a file descriptor that goes to a device process with an order.

use super::message::Told;
use manyring_engine::ForeignFd;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// An order to a device process, and the descriptors that go with it.
pub(super) type Order = (Told, Vec<Parcel>);

/// A file descriptor that goes with an order.
#[derive(Debug)]
pub(super) enum Parcel {
    Own(OwnedFd),
    /// A front-end's, which the supervisor keeps.
    Foreign(Arc<ForeignFd>),
}

impl From<OwnedFd> for Parcel {
    fn from(fd: OwnedFd) -> Self {
        Self::Own(fd)
    }
}

impl AsFd for Parcel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Own(fd) => fd.as_fd(),
            Self::Foreign(fd) => fd.as_fd(),
        }
    }
}
