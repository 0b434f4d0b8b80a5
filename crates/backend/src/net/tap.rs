//! `tap`: a host's interface, one file descriptor per queue pair.
//!
//! A tap is joined or created by name, or handed in as file descriptors. A tap that the port has
//! created goes away with the port; a tap that it has joined stays, with its offloads switched off.
//! The code in this folder also serves the queues of a macvtap (see [`macvtap`]).

mod error;
mod find;
mod flows;
pub mod lent;
pub mod macvtap;
mod offloads;
mod open;
mod overflow;
mod program;
mod queue;
mod queue_length;
mod queues;
mod rejoin;
mod rss;
mod settings;

pub use error::{TAP_QUEUE_PAIRS_MAX, TapError};

use super::merge::Merger;
use super::reception::Reception;
use super::{HostFilter, Port, PortRx, PortTx, QueueLengthInfo};
use crate::sys::link::{Change, InterfaceInfo, LinkEvent, Links};
use crate::sys::tuntap as sys;
pub(super) use find::{find, open_links};
use flows::FlowRecorder;
pub use flows::Flows;
use lent::{Lent, transmit};
use manyring_wire::net::Offloads;
use manyring_wire::net::rss::Rss;
use offloads::{offload_bits, probe_offloads};
use open::{by_fds, by_name, left};
pub(super) use open::{check_mtu, check_queue_pairs};
pub use open::{check_name, look};
use overflow::Overflow;
use queue::{TapRx, TapTx};
use queue_length::LengthState;
pub use queue_length::{QUEUE_LENGTH, QUEUE_LENGTH_SHARERS_MAX, QueueLength};
use queues::Queues;
use rejoin::{Wanted, prepare};
use rss::Hashed;
use rustix::fd::{AsFd, AsRawFd, OwnedFd};
use rustix::io::Errno;
use settings::{Settings, apply};
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The flags with which every queue of a tap is opened.
const QUEUE_FLAGS: u16 = sys::IFF_TAP | sys::IFF_NO_PI | sys::IFF_VNET_HDR;

/// Where a tap comes from.
#[derive(Debug)]
pub enum TapSource {
    /// An interface of this name: joined if it exists, created otherwise.
    Name {
        /// 1 to 15 bytes; the host replaces a `%d` by the first number that is free.
        name: String,
        /// Fail if there is no such interface, instead of creating it.
        must_exist: bool,
    },
    /// The queues of a tap that another process has opened.
    Fds(Vec<OwnedFd>),
    /// The queues of the tap of this name, received from the former process of this daemon, which
    /// is being replaced. From now on the tap is this process's own, as if it had opened it.
    Left {
        /// As in [`TapSource::Name`].
        name: String,
        /// As in [`TapSource::Name`], if the configuration names another interface by now.
        must_exist: bool,
        /// One for each queue pair, in the order of the pairs.
        fds: Vec<OwnedFd>,
    },
}

/// The tap to open, and the settings to apply.
#[derive(Debug)]
pub struct TapOptions {
    /// Where the tap comes from.
    pub source: TapSource,
    /// Queue pairs, 1 to 256.
    pub queue_pairs: usize,
    /// At most how many sent bytes the host may hold that it has not passed on; `None`: the host's
    /// default.
    pub sndbuf: Option<u32>,
    /// How many frames may wait for the guest, in all queues that the host uses together.
    pub txqueuelen: QueueLength,
    /// Join frames of a flow that come together: the host cuts them again where it must.
    pub merge: bool,
    /// Choose the queue of each frame to the guest by a table that this port fills, if the host
    /// allows it; the tap driver's own table costs more.
    pub steer: bool,
    /// The MTU in bytes; `None`: unchanged.
    pub mtu: Option<u16>,
    /// The bridge to join; `None`: unchanged.
    pub bridge: Option<String>,
    /// Set the interface up or down; `None`: up if it is created here, else unchanged.
    pub up: Option<bool>,
}

/// The queues as they were opened or handed in.
struct Opened {
    kind: &'static str,
    name: String,
    fds: Vec<OwnedFd>,
    is_multi_queue: bool,
    /// Which queues the host uses now: all, if this process has opened them.
    attached: Vec<bool>,
    /// The fds were handed in, so other processes may have copies of them.
    is_handed_in: bool,
    /// The queues come from the former process of this daemon.
    is_left: bool,
    /// This process has created the interface.
    is_created: bool,
    links: Links,
    /// The interface, if it is in this network namespace.
    link: Option<InterfaceInfo>,
}

/// State of the port that changes while it runs. Its lock is held during system calls.
#[derive(Debug)]
struct State {
    is_multi_queue: bool,
    /// The interface was deleted, and is not joined again yet.
    is_gone: bool,
    /// The MTU that the operator has set last; `None`: as the interface has it.
    mtu: Option<u16>,
    attached: Vec<bool>,
    /// The pairs that the host uses, in the order of its queues: the host adds a new queue at the
    /// end, and moves the last one to the place of a queue that it stops using.
    order: Vec<usize>,
    /// Other processes have queues of the tap too, so the kernel chooses among all of them.
    is_left_alone: bool,
    overflow: Overflow,
    link_up: bool,
    /// The guest's RSS program, if it has configured one; otherwise the steering table applies.
    hashed: Option<Hashed>,
}

/// A port on the queues of a tap or macvtap.
#[derive(Debug)]
pub struct TapPort {
    kind: &'static str,
    name: String,
    queues: Queues,
    wanted: Wanted,
    is_handed_in: bool,
    offloads: Offloads,
    merges: bool,
    /// The steering table; `None`: the kernel chooses the queue of a frame.
    flows: Option<Arc<Flows>>,
    links: Links,
    /// The number of the interface; 0 if it is gone, or in another network namespace.
    index: AtomicU32,
    guest_mac: Option<[u8; 6]>,
    /// Which frames the interface passes to the guest, if the interface is a macvtap.
    reception: Reception,
    /// How many frames may wait in the attached queues together.
    queue_length: LengthState,
    state: Mutex<State>,
    /// The host's MTU, 0 if it has none. It lies outside the lock, so that reading it waits for no
    /// call of the host.
    mtu: AtomicU16,
}

impl TapPort {
    /// Opens a tap. If it has several queues, the host uses none of them yet: see
    /// [`Port::set_attached`]. May block; half a second if the tap is busy.
    ///
    /// # Errors
    /// [`TapError`], in words for an operator.
    pub fn open(options: TapOptions) -> Result<Self, TapError> {
        check_queue_pairs(options.queue_pairs)?;
        let settings = Settings {
            sndbuf: options.sndbuf,
            txqueuelen: options.txqueuelen,
            merge: options.merge,
            steer: options.steer,
            mtu: options.mtu,
            bridge: options.bridge.as_deref(),
            up: options.up,
        };
        check_mtu(settings.mtu)?;
        let opened = match options.source {
            TapSource::Name { name, must_exist } => {
                check_name(&name)?;
                by_name(&name, must_exist, options.queue_pairs)?
            }
            TapSource::Fds(fds) => by_fds(fds, options.queue_pairs)?,
            TapSource::Left { name, must_exist, fds } => {
                left(&name, must_exist, fds, options.queue_pairs)?
            }
        };
        Self::assemble(opened, &settings)
    }

    /// Makes a port of opened queues, and applies the settings to their interface.
    fn assemble(opened: Opened, settings: &Settings<'_>) -> Result<Self, TapError> {
        let name = opened.name.as_str();
        let system = |action, errno| TapError::system(name, action, errno);
        prepare(&opened.fds, settings.sndbuf).map_err(|(action, errno)| system(action, errno))?;
        let offloads = probe_offloads(&opened.fds[0]).map_err(|e| system("set its offloads", e))?;
        let mtu = apply(&opened, settings)?;
        let is_stacked = opened.link.as_ref().filter(|link| link.tap.is_none());
        let count = opened.fds.len();
        let mut port = Self {
            kind: opened.kind,
            queues: Queues::new(opened.fds),
            wanted: Wanted {
                sndbuf: settings.sndbuf,
                bridge: settings.bridge.map(str::to_owned),
                lacks_bridge: AtomicBool::new(false),
                up: settings.up.or(opened.is_created.then_some(true)),
            },
            is_handed_in: opened.is_handed_in,
            offloads,
            merges: settings.merge,
            flows: None,
            index: AtomicU32::new(opened.link.as_ref().map_or(0, |link| link.index)),
            guest_mac: is_stacked.and_then(|link| link.address),
            reception: Reception::default(),
            links: opened.links,
            queue_length: LengthState::new(
                (settings.txqueuelen, count),
                opened.link.as_ref(),
                opened.is_left,
            ),
            state: Mutex::new(State {
                is_multi_queue: opened.is_multi_queue,
                is_gone: false,
                mtu: settings.mtu,
                attached: opened.attached,
                order: Vec::new(),
                is_left_alone: false,
                overflow: Overflow::default(),
                link_up: true,
                hashed: None,
            }),
            mtu: AtomicU16::new(mtu.unwrap_or(0)),
            name: opened.name,
        };
        // The former user of an interface that was handed in may have switched its carrier off.
        port.show_carrier(true);
        port.detach_all()?;
        // Here an error fails the start. When pairs are attached later, an error is only logged.
        port.begin_queue_length()
            .map_err(|errno| TapError::system(&port.name, "set its txqueuelen", errno))?;
        if let Some(link) = is_stacked {
            port.reception.begin(&port.name, link);
        }
        if opened.is_multi_queue && port.kind == "tap" {
            // A daemon that served this tap before, and was killed, has left its program attached.
            let _ = sys::set_steering(port.queues[0].as_fd(), None);
            if settings.steer && port.queues.len() > 1 {
                port.flows = flows::steer(&port.name, port.queues[0].as_fd());
            }
        }
        Ok(port)
    }

    /// The interface's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The only MAC address with which the guest receives frames (that of a macvtap's interface);
    /// `None`: any will do.
    #[must_use]
    pub fn guest_mac(&self) -> Option<[u8; 6]> {
        self.guest_mac
    }

    /// Detaches all queues: no worker reads them yet, so the kernel must not put frames into them.
    fn detach_all(&self) -> Result<(), TapError> {
        for (index, queue) in self.queues.iter().enumerate() {
            self.set_attached(index, false).map_err(|errno| match errno {
                Errno::INVAL => TapError::FdTwice(queue.as_raw_fd()),
                errno => TapError::system(&self.name, "detach a queue", errno),
            })?;
        }
        Ok(())
    }

    /// Shows the host whether the interface has a carrier. An interface without an attached queue
    /// cannot have one, so this is called again when the first queue is attached.
    fn show_carrier(&self, up: bool) {
        if let Err(errno) = sys::set_carrier(self.queues[0].as_fd(), up) {
            tracing::debug!(name = self.name, %errno, up, "setting the carrier failed");
        }
    }

    /// Updates the steering table for the attached queues. If other processes have queues of the
    /// tap too, the order of the queues is unknown: from then on the kernel chooses the queue.
    fn follow(&self, state: &mut State) {
        let Some(flows) = self.flows.as_ref().filter(|_| !state.is_left_alone) else { return };
        let named = self.links.find(&self.name).ok().flatten();
        // Another interface may have this name by now.
        let tap = named.filter(|link| Some(link.index) == self.index()).and_then(|link| link.tap);
        let ours = u32::try_from(state.order.len()).unwrap_or(u32::MAX);
        if tap.is_some_and(|tap| tap.attached != ours) {
            tracing::warn!(name = self.name, "steer: off; another process has queues of this tap");
            state.is_left_alone = true;
            flows.rest();
            let _ = sys::set_steering(self.queues[0].as_fd(), None);
            return;
        }
        flows.set_queues(&state.order);
    }

    fn index(&self) -> Option<u32> {
        Some(self.index.load(Ordering::Relaxed)).filter(|index| *index > 0)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for TapPort {
    fn drop(&mut self) {
        // The offloads and the steering program stay on a tap that outlives the process.
        let _ = sys::set_offloads(self.queues[0].as_fd(), 0);
        if self.flows.is_some() && !self.state().is_left_alone {
            let _ = sys::set_steering(self.queues[0].as_fd(), None);
        }
        self.restore_length();
        if self.is_handed_in {
            self.set_link(true);
            for index in 0..self.queues.len() {
                let _ = self.set_attached(index, true);
            }
        }
    }
}

impl Port for TapPort {
    fn kind(&self) -> &'static str {
        self.kind
    }

    fn interface(&self) -> Option<&str> {
        Some(&self.name)
    }

    fn queue_pairs(&self) -> usize {
        self.queues.len()
    }

    fn taken(&self) -> Offloads {
        self.offloads
    }

    fn given(&self) -> Offloads {
        self.offloads
    }

    fn mtu(&self) -> Option<u16> {
        Some(self.mtu.load(Ordering::Relaxed)).filter(|mtu| *mtu > 0)
    }

    fn queue_length(&self) -> Option<QueueLengthInfo> {
        Some(self.queue_length.info())
    }

    fn adapt_queue_length(&self) -> bool {
        self.adapt()
    }

    fn open_tx(&self, index: usize) -> Result<Box<dyn PortTx>, Errno> {
        let own = self.queues.duplicate(index)?;
        let merger = self.merges.then(|| Merger::new(self.offloads.uso4));
        let steering = self.flows.clone().and_then(|flows| FlowRecorder::new(flows, index));
        Ok(Box::new(TapTx::new(own, merger, steering)))
    }

    fn open_rx(&self, index: usize) -> Result<Box<dyn PortRx>, Errno> {
        Ok(Box::new(TapRx::new(self.queues.of(index)?.clone())))
    }

    fn set_offloads(&self, offloads: Offloads) -> Result<(), Errno> {
        if self.state().is_gone {
            return Ok(());
        }
        sys::set_offloads(self.queues[0].as_fd(), offload_bits(offloads))
    }

    fn set_attached(&self, index: usize, attached: bool) -> Result<(), Errno> {
        let queue = self.queues.of(index)?;
        let mut state = self.state();
        if state.is_gone {
            return Ok(());
        }
        if state.is_multi_queue && state.attached[index] != attached {
            sys::set_attached(queue.as_fd(), attached)?;
            let had_none = !state.attached.contains(&true);
            state.attached[index] = attached;
            if attached {
                state.order.push(index);
            } else if let Some(place) = state.order.iter().position(|pair| *pair == index) {
                state.order.swap_remove(place);
            }
            self.follow(&mut state);
            if had_none {
                self.show_carrier(state.link_up);
            }
            self.share_queue_length(&state, false);
        }
        Ok(())
    }

    fn can_hash(&self) -> bool {
        self.flows.is_some()
    }

    fn flows(&self) -> Option<&Flows> {
        self.flows.as_deref()
    }

    fn set_rss(&self, rss: Option<Arc<Rss>>) -> Result<(), Errno> {
        self.steer_by(rss.as_deref())
    }

    fn host_filter(&self) -> HostFilter {
        self.reception.filter()
    }

    fn set_mtu(&self, mtu: u16) -> Result<(), Errno> {
        let mut state = self.state();
        if !state.is_gone {
            let index = self.index().ok_or(Errno::OPNOTSUPP)?;
            self.links.set(index, &Change { mtu: Some(mtu.into()), ..Change::default() })?;
        }
        state.mtu = Some(mtu);
        self.mtu.store(mtu, Ordering::Relaxed);
        Ok(())
    }

    fn set_link(&self, up: bool) {
        let mut state = self.state();
        state.link_up = up;
        if !state.is_gone {
            self.show_carrier(up);
        }
    }

    fn heeds(&self, event: &LinkEvent) -> bool {
        self.heeds_event(event)
    }

    fn is_reported(&self) -> bool {
        self.index().is_some()
    }

    fn is_gone(&self) -> bool {
        self.find_gone()
    }

    fn join_again(&self) -> Result<(), TapError> {
        self.join_by_name()
    }

    fn transmit(&self, frame: &[u8]) -> Result<(), Errno> {
        transmit(&self.queues, frame)
    }

    fn lend(&self, _is_wanted: &dyn Fn() -> bool) -> Option<Result<Lent, Errno>> {
        Some(self.lent())
    }

    fn keep(&self) {
        self.kept();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;
    use std::time::Duration;

    #[test]
    fn the_mtu_is_told_while_the_host_takes_its_time() {
        let node = sys::open(Path::new("/dev/zero")).unwrap();
        let port = TapPort {
            kind: "tap",
            name: "none".to_owned(),
            queues: Queues::new(vec![node]),
            wanted: Wanted {
                sndbuf: None,
                bridge: None,
                lacks_bridge: AtomicBool::new(false),
                up: None,
            },
            is_handed_in: false,
            offloads: Offloads::default(),
            merges: false,
            flows: None,
            links: Links::open().unwrap(),
            index: AtomicU32::new(0),
            guest_mac: None,
            reception: Reception::default(),
            queue_length: LengthState::new((QueueLength::Host, 1), None, false),
            state: Mutex::new(State {
                is_multi_queue: true,
                is_gone: false,
                mtu: None,
                attached: vec![false],
                order: vec![],
                is_left_alone: false,
                overflow: Overflow::default(),
                link_up: true,
                hashed: None,
            }),
            mtu: AtomicU16::new(1400),
        };
        // Hold the lock, as a system call does that takes long.
        let call = port.state();
        let (tell, told) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| tell.send(port.mtu()));
            let mtu = told.recv_timeout(Duration::from_secs(5));
            drop(call);
            assert_eq!(mtu, Ok(Some(1400)));
        });
    }
}
