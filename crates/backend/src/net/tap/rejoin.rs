//! Joins an interface that takes the place of a tap of the same name that was deleted.

use super::find::find;
use super::open::by_name;
use super::overflow::Overflow;
use super::settings::{Settings, apply, join_bridge};
use super::{Opened, TapError, TapPort, macvtap};
use crate::sys::link::LinkEvent;
use crate::sys::tuntap as sys;
use manyring_wire::net::HEADER_SIZE;
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use std::sync::atomic::{AtomicBool, Ordering};

/// The settings that an interface gets when it takes the place of one that was deleted.
#[derive(Debug)]
pub(super) struct Wanted {
    pub(super) sndbuf: Option<u32>,
    pub(super) bridge: Option<String>,
    /// The bridge was deleted: the interface joins it when it is back.
    pub(super) lacks_bridge: AtomicBool,
    pub(super) up: Option<bool>,
}

/// Sets the options of each queue of an interface: header size, and `sndbuf`.
pub(super) fn prepare(fds: &[OwnedFd], sndbuf: Option<u32>) -> Result<(), (&'static str, Errno)> {
    for fd in fds {
        sys::set_header(fd.as_fd(), HEADER_SIZE)
            .map_err(|errno| ("set the size of the virtio-net header", errno))?;
        if let Some(bytes) = sndbuf {
            sys::set_send_buffer(fd.as_fd(), bytes)
                .map_err(|errno| ("limit its send buffer", errno))?;
        }
    }
    Ok(())
}

impl TapPort {
    /// True if the interface was deleted: now, or before an earlier call.
    pub(super) fn find_gone(&self) -> bool {
        let is_gone = match sys::interface(self.queues[0].as_fd()) {
            // The kernel answers EBADFD for a tap's queue, ENOLINK for a macvtap's.
            Err(Errno::BADFD | Errno::NOLINK) => true,
            Ok((name, _)) => {
                self.find_index(&name);
                false
            }
            Err(_) => self.state().is_gone,
        };
        self.state().is_gone = is_gone;
        if is_gone {
            self.index.store(0, Ordering::Relaxed);
        } else if self.wanted.lacks_bridge.load(Ordering::Relaxed) {
            self.regain_bridge();
        }
        is_gone
    }

    /// Looks up the number of the interface, which now has this name, unless the number is known
    /// already.
    fn find_index(&self, name: &str) {
        if self.index().is_some() {
            return;
        }
        // An interface of this namespace may have the name of one in another.
        let address = sys::hardware_address(self.queues[0].as_fd()).ok();
        let link = find(&self.links, name).ok().flatten().filter(|link| link.address == address);
        self.index.store(link.as_ref().map_or(0, |link| link.index), Ordering::Relaxed);
        if link.is_some() {
            self.may_divide();
        }
        if let (Some(link), true) = (link, self.guest_mac.is_some()) {
            self.reception.begin(name, &link);
        }
    }

    pub(super) fn heeds_event(&self, event: &LinkEvent) -> bool {
        let Wanted { bridge, lacks_bridge, .. } = &self.wanted;
        if bridge.as_ref() == Some(&event.name) {
            if event.is_gone && !lacks_bridge.swap(true, Ordering::Relaxed) {
                tracing::warn!(name = self.name, bridge, "the bridge of the interface is gone");
            }
            return !event.is_gone && lacks_bridge.load(Ordering::Relaxed);
        }
        match self.index() {
            Some(index) if event.is_gone && event.index == index => {
                // The interface was deleted, or moved to another namespace: its number is free, or
                // belongs to another interface.
                self.index.store(0, Ordering::Relaxed);
                true
            }
            Some(_) => false,
            None => !event.is_gone && event.name == self.name,
        }
    }

    /// Joins the configured bridge again, if it exists.
    fn regain_bridge(&self) {
        let name = &self.name;
        let Some(bridge) = &self.wanted.bridge else { return };
        // Another interface may have this name by now.
        let link = find(&self.links, name).ok().flatten();
        let Some(link) = link.filter(|link| Some(link.index) == self.index()) else { return };
        match join_bridge(&self.links, (name, &link), bridge) {
            Ok(()) => {
                self.wanted.lacks_bridge.store(false, Ordering::Relaxed);
                tracing::info!(name, bridge, "the interface rejoined its bridge");
            }
            // The log said when the bridge was deleted that it is missing.
            Err(TapError::BridgeMissing(_)) => {}
            Err(error) => tracing::warn!(name, %error, "joining the bridge failed; retrying"),
        }
    }

    pub(super) fn join_by_name(&self) -> Result<(), TapError> {
        if self.is_handed_in {
            return Err(TapError::HandedIn(self.name.clone()));
        }
        let opened = match self.kind {
            "macvtap" => macvtap::open_by_name(&self.name, self.queues.len())?,
            _ => by_name(&self.name, true, self.queues.len())?,
        };
        prepare(&opened.fds, self.wanted.sndbuf)
            .map_err(|(action, errno)| TapError::system(&self.name, action, errno))?;
        let settings =
            Settings { mtu: self.state().mtu, up: self.wanted.up, ..Settings::default() };
        let mtu = apply(&opened, &settings)?;
        self.queues
            .replace(&opened.fds)
            .map_err(|errno| TapError::system(&self.name, "replace its queues", errno))?;
        self.mtu.store(mtu.unwrap_or(0), Ordering::Relaxed);
        self.begin_again(&opened);
        Ok(())
    }

    /// Sets up new queues as at a start. A failure is only logged, since the interface is joined.
    fn begin_again(&self, opened: &Opened) {
        let name = &self.name;
        let link = opened.link.as_ref();
        self.index.store(link.map_or(0, |link| link.index), Ordering::Relaxed);
        let address = link.and_then(|link| link.address);
        if self.guest_mac.is_some() && self.guest_mac != address {
            tracing::warn!(
                name,
                "the interface has a new MAC address; unless it is in mode passthru, it drops \
                 frames to the guest's address"
            );
        }
        if let (Some(link), true) = (link, self.guest_mac.is_some()) {
            self.reception.begin(name, link);
        }
        {
            let mut state = self.state();
            state.is_gone = false;
            state.is_multi_queue = opened.is_multi_queue;
            state.attached.clone_from(&opened.attached);
            // The kernel uses new queues in the order in which they were opened.
            state.order = (0..opened.attached.len()).collect();
            (state.is_left_alone, state.overflow) = (false, Overflow::default());
            self.queue_length.begin(link, false);
            self.show_carrier(state.link_up);
        }
        if self.wanted.bridge.is_some() {
            self.wanted.lacks_bridge.store(true, Ordering::Relaxed);
            self.regain_bridge();
        }
        if let Err(error) = self.detach_all() {
            tracing::warn!(name, %error, "detaching failed; frames may go to unserved queues");
        }
        if let Err(errno) = self.begin_queue_length() {
            tracing::warn!(name, %errno, "txqueuelen: failed; the queues keep theirs");
        }
        if let Some(flows) = &self.flows
            && let Err(errno) = self.attach_program(&self.state(), flows)
        {
            tracing::warn!(name, %errno, "steer: failed; the host chooses the queues");
            self.state().is_left_alone = true;
            flows.rest();
        }
    }
}
