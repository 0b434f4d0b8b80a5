//! `Reception`: has an interface that filters frames by their destination pass multicast frames to
//! its port.
//!
//! A macvtap and a network card pass frames to their own address, and to the groups that the host
//! itself has joined on them. A guest joins groups of its own; without those of IPv6 neighbour
//! discovery no host in the network finds its address. So the interface is set to pass the frames
//! of all groups, and the guest's filter chooses among them (`rules.rs` of the device). The guest
//! does not cause this setting, so it cannot take the host's network lock by joining groups.
//!
//! A packet socket holds the setting. The kernel counts such sockets for each interface, and drops
//! the setting when the socket is closed, also by the end of its process. So two processes of a
//! takeover do not disturb each other, nor the operator's own setting, and nothing has to be
//! restored.

use super::HostFilter;
use crate::sys::link::InterfaceInfo;
use crate::sys::tuntap as sys;
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The multicast setting of one interface. The mutex is not held during calls of the host.
#[derive(Debug, Default)]
pub(super) struct Reception(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    filter: HostFilter,
    /// Holds the setting that passes all groups. The socket itself receives nothing.
    _socket: Option<OwnedFd>,
}

impl Reception {
    /// Has the interface that the port has opened pass the frames of all groups. If the host does
    /// not allow it, logs what the operator can do. May block.
    pub(super) fn begin(&self, name: &str, link: &InterfaceInfo) {
        let socket = join_all(link.index);
        if let (Err(errno), false) = (&socket, link.takes_any_group) {
            tracing::warn!(
                name,
                %errno,
                "the guest receives no multicast frames of groups that the host has not joined, \
                 and IPv6 needs them; give the daemon CAP_NET_RAW, or run \"ip link set {name} \
                 allmulticast on\""
            );
        }
        let filter = HostFilter {
            only_to: link.address.filter(|_| !link.takes_any_address),
            lacks_groups: socket.is_err() && !link.takes_any_group,
            ..HostFilter::default()
        };
        let old = std::mem::replace(&mut *self.state(), State { filter, _socket: socket.ok() });
        drop(old);
    }

    pub(super) fn filter(&self) -> HostFilter {
        self.state().filter
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn join_all(index: u32) -> Result<OwnedFd, Errno> {
    let (family, kind) = (AddressFamily::PACKET, SocketType::RAW);
    // Without a protocol, the socket receives no frame.
    let socket = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
    sys::join_all_groups(socket.as_fd(), index)?;
    Ok(socket)
}
