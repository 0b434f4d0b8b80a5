//! `Reception`: what an interface that filters frames by their address passes to its port.
//!
//! A macvtap and a network card pass frames to their own address and to the groups that the host
//! itself has joined there. A guest joins groups of its own: those of IPv6 neighbour discovery, or
//! nothing on the cable finds its address. So the interface passes the frames to all groups, and
//! the guest's filter chooses among them (`rules.rs` of the device). The guest has no part in this,
//! so it cannot take the host's network lock by joining groups.
//!
//! A packet socket holds the setting. The kernel counts such sockets for each interface, and
//! forgets one that is closed, also with its process: two processes of a takeover do not disturb
//! each other, nor the operator's own setting, and nothing has to be restored.

use super::HostFilter;
use crate::sys::link::InterfaceInfo;
use crate::sys::tuntap as sys;
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The reception of one interface. Its lock is not held during calls of the host.
#[derive(Debug, Default)]
pub(super) struct Reception(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    filter: HostFilter,
    /// Holds the reception of all groups. It receives nothing itself.
    _socket: Option<OwnedFd>,
}

impl Reception {
    /// Has the interface that the port was opened on, or has joined, pass the frames to all groups.
    /// If the host does not allow it, the log says what the operator can do. May block.
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
    // Without a protocol, the socket gets no frame.
    let socket = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
    sys::join_all_groups(socket.as_fd(), index)?;
    Ok(socket)
}
