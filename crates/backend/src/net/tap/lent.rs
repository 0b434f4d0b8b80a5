//! A tap whose owner is another process: the queues are lent, the interface is not.
//!
//! The owner has opened the interface and keeps every right to it. Whoever borrows its queues reads
//! and writes frames, and asks the owner for all that the guest may choose ([`Owner`]): the pairs
//! in use, the offloads, and the hash by which frames find their pair. It calls nothing on the
//! queues but `read`, `write` and `poll`.
//!
//! ```text
//! owner                                   borrower
//! TapPort::lend -> Lent ----------------> LentPort::new
//! does what is asked, at its own pace <-- Owner::set_attached, set_offloads, set_rss (these block)
//! looks whether the interface is gone <-- Owner::doubt
//! sees that the interface is gone ------> LentPort::lose
//! has joined it again: new queues ------> LentPort::renew, which `join_again` takes
//! ```

use super::flows::{FlowRecorder, Flows};
use super::queue::{TapRx, TapTx};
use super::queues::Queues;
use super::{TapError, TapPort};
use crate::net::merge::Merger;
use crate::net::{HostFilter, Port, PortRx, PortTx};
use manyring_wire::net::rss::{Rss, RssConfig};
use manyring_wire::net::{HEADER_SIZE, Offloads};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::io::{Errno, retry_on_intr};
use std::io::IoSlice;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Properties of a lent interface that its borrower needs and cannot ask the kernel for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// The interface's name.
    pub interface: String,
    /// It is a macvtap.
    pub is_macvtap: bool,
    /// The offloads that the kernel accepts in a guest's frames, and can use in frames to a guest.
    pub offloads: Offloads,
    /// The interface's MTU in bytes, if it has one.
    pub mtu: Option<u16>,
    /// The owner can let the kernel choose queues by the guest's RSS hash.
    pub can_hash: bool,
    /// The frames that the host keeps from the interface.
    pub host_filter: HostFilter,
    /// Bytes of a chunk of the sockets of AF_XDP, which are lent in the place of queues; `None`:
    /// the queues of a tap.
    pub chunk: Option<u32>,
}

/// The steering table of a lent interface: its memory, and the key of its hash.
#[derive(Debug)]
pub struct LentTable {
    /// The map that holds the words.
    pub map: OwnedFd,
    /// The key of the hash that makes the numbers of flows.
    pub key: u64,
}

/// The queues of an interface, for a process that reads and writes them.
#[derive(Debug)]
pub struct Lent {
    /// The properties of the interface.
    pub facts: Facts,
    /// A descriptor for each queue pair; of AF_XDP also the memory of all sockets.
    pub queues: Vec<OwnedFd>,
    /// The table in which the borrower notes the flows that the guest sends; `None`: there is none.
    pub table: Option<LentTable>,
}

/// The process that owns a lent interface, as the borrower reaches it. The calls that set something
/// block until the owner has answered.
pub trait Owner: Send + Sync + std::fmt::Debug {
    /// Attaches a pair to the host, or detaches it.
    ///
    /// # Errors
    /// The error of the host. `EIO`: the owner does not answer.
    fn set_attached(&self, index: usize, attached: bool) -> Result<(), Errno>;

    /// Lets the host deliver frames with these offloads only.
    ///
    /// # Errors
    /// As for [`Self::set_attached`].
    fn set_offloads(&self, offloads: Offloads) -> Result<(), Errno>;

    /// Lets the host deliver each frame by the pair that `rss` chooses; `None`: the host chooses.
    ///
    /// # Errors
    /// As for [`Self::set_attached`].
    fn set_rss(&self, rss: Option<&RssConfig>) -> Result<(), Errno>;

    /// Asks the owner to check if the interface is gone, as a queue failed. Does not block.
    fn suspect(&self);
}

impl TapPort {
    /// Copies of the queues for another process. They belong to the present interface: when the
    /// port has joined another one, new copies must be lent.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`: the host has no file descriptor.
    pub(super) fn lent(&self) -> Result<Lent, Errno> {
        // A process that had copies before could set the flags of the queues, which all copies
        // share: without this one the next process would wait in each read.
        self.queues.iter().try_for_each(|queue| fcntl_setfl(queue, OFlags::NONBLOCK))?;
        let copy = |fd: &OwnedFd| rustix::io::fcntl_dupfd_cloexec(fd, 3);
        let facts = Facts {
            interface: self.name.clone(),
            is_macvtap: self.kind == "macvtap",
            offloads: self.offloads,
            mtu: self.mtu(),
            can_hash: self.can_hash(),
            host_filter: self.host_filter(),
            chunk: None,
        };
        let queues = self.queues.iter().map(|queue| copy(queue)).collect::<Result<_, _>>()?;
        let table = self.flows.as_ref().map(|flows| {
            let map = copy(flows.map())?;
            Ok::<_, Errno>(LentTable { map, key: flows.key() })
        });
        Ok(Lent { facts, queues, table: table.transpose()? })
    }

    /// Sets the length and attaches the steering program again, because another process that had
    /// copies of the queues may have replaced them before it ended.
    pub(super) fn kept(&self) {
        let state = self.state();
        self.share_queue_length(&state, true);
        let Some(flows) = self.flows.as_ref().filter(|_| !state.is_left_alone) else { return };
        if let Err(errno) = self.attach_program(&state, flows) {
            tracing::warn!(name = self.name, %errno, "steer: failed; the host chooses the queues");
        }
    }
}

/// The queues of an interface that the owner has joined, until the borrower uses them. Those that
/// nobody needs any more are closed by `take`, since the close of a queue may block.
#[derive(Debug)]
pub(in crate::net) struct Renewed<T> {
    next: Option<T>,
    outdated: Vec<T>,
    /// Counts the interfaces that came and went.
    number: u64,
}

impl<T> Default for Renewed<T> {
    fn default() -> Self {
        Self { next: None, outdated: Vec::new(), number: 0 }
    }
}

impl<T> Renewed<T> {
    /// The interface of the queues that wait is gone.
    pub(in crate::net) fn lose(&mut self) {
        self.outdated.extend(self.next.take());
        self.number += 1;
    }

    /// The owner has joined an interface with these queues.
    pub(in crate::net) fn put(&mut self, queues: T) {
        self.lose();
        self.next = Some(queues);
    }

    /// The queues that wait with the number of their interface, and those that are to be closed.
    pub(in crate::net) fn take(&mut self) -> (Option<(u64, T)>, Vec<T>) {
        let next = self.next.take().map(|queues| (self.number, queues));
        (next, std::mem::take(&mut self.outdated))
    }

    /// Puts queues back that could not be used now.
    pub(in crate::net) fn put_back(&mut self, number: u64, queues: T) {
        match self.is_last(number) {
            true => self.next = Some(queues),
            false => self.outdated.push(queues),
        }
    }

    /// True if no interface came or went since these queues did.
    pub(in crate::net) fn is_last(&self, number: u64) -> bool {
        self.number == number
    }
}

#[derive(Debug)]
struct State {
    attached: Vec<bool>,
    host_filter: HostFilter,
    /// The owner has seen that the interface is gone.
    is_gone: bool,
    /// The queues of the interface that the owner has joined since.
    renewed: Renewed<Vec<OwnedFd>>,
}

/// The port of a process that borrows the queues of an interface.
#[derive(Debug)]
pub struct LentPort {
    facts: Facts,
    queues: Queues,
    merges: bool,
    flows: Option<Arc<Flows>>,
    owner: Arc<dyn Owner>,
    state: Mutex<State>,
    /// The host's MTU, 0 if it has none.
    mtu: AtomicU16,
}

impl LentPort {
    /// A port on lent queues. `merges`: join the frames of a flow that come together.
    ///
    /// # Errors
    /// `EINVAL`: there is no queue. Any other: the table cannot be mapped.
    pub fn new(lent: Lent, merges: bool, owner: Arc<dyn Owner>) -> Result<Self, Errno> {
        let Lent { facts, queues, table } = lent;
        if queues.is_empty() {
            return Err(Errno::INVAL);
        }
        let flows = table.map(|LentTable { map, key }| Flows::lent(map, key)).transpose()?;
        let (attached, renewed) = (vec![false; queues.len()], Renewed::default());
        let host_filter = facts.host_filter;
        Ok(Self {
            mtu: AtomicU16::new(facts.mtu.unwrap_or(0)),
            facts,
            queues: Queues::new(queues),
            merges,
            flows: flows.map(Arc::new),
            owner,
            state: Mutex::new(State { attached, host_filter, is_gone: false, renewed }),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Called when the interface is gone. The device must check the port afterwards.
    pub fn lose(&self) {
        let mut state = self.state();
        state.is_gone = true;
        state.renewed.lose();
    }

    /// Called when the owner has joined an interface in the place of the deleted one: `queues` are
    /// its queues, all of them detached, and `host_filter` what the host keeps from it. The device
    /// must check the port then.
    ///
    /// # Errors
    /// `EINVAL`: the number of queues differs from that of the pairs.
    pub fn renew(&self, queues: Vec<OwnedFd>, host_filter: HostFilter) -> Result<(), Errno> {
        if queues.len() != self.queues.len() {
            return Err(Errno::INVAL);
        }
        let mut state = self.state();
        state.is_gone = true;
        state.renewed.put(queues);
        state.host_filter = host_filter;
        Ok(())
    }

    fn share_flows(&self, state: &State) {
        if let Some(flows) = &self.flows {
            flows.share(state.attached.iter().filter(|attached| **attached).count() > 1);
        }
    }
}

impl Port for LentPort {
    fn kind(&self) -> &'static str {
        if self.facts.is_macvtap { "macvtap" } else { "tap" }
    }

    fn interface(&self) -> Option<&str> {
        Some(&self.facts.interface)
    }

    fn queue_pairs(&self) -> usize {
        self.queues.len()
    }

    fn taken(&self) -> Offloads {
        self.facts.offloads
    }

    fn given(&self) -> Offloads {
        self.facts.offloads
    }

    fn mtu(&self) -> Option<u16> {
        Some(self.mtu.load(Ordering::Relaxed)).filter(|mtu| *mtu > 0)
    }

    fn open_tx(&self, index: usize) -> Result<Box<dyn PortTx>, Errno> {
        let own = self.queues.duplicate(index)?;
        let merger = self.merges.then(|| Merger::new(self.facts.offloads.uso4));
        let steering = self.flows.clone().and_then(|flows| FlowRecorder::new(flows, index));
        Ok(Box::new(TapTx::new(own, merger, steering)))
    }

    fn open_rx(&self, index: usize) -> Result<Box<dyn PortRx>, Errno> {
        Ok(Box::new(TapRx::new(self.queues.of(index)?.clone())))
    }

    fn set_offloads(&self, offloads: Offloads) -> Result<(), Errno> {
        self.owner.set_offloads(offloads)
    }

    fn can_hash(&self) -> bool {
        self.facts.can_hash
    }

    fn flows(&self) -> Option<&Flows> {
        self.flows.as_deref()
    }

    fn set_rss(&self, rss: Option<Arc<Rss>>) -> Result<(), Errno> {
        self.owner.set_rss(rss.as_deref().map(Rss::config))
    }

    fn host_filter(&self) -> HostFilter {
        self.state().host_filter
    }

    fn set_attached(&self, index: usize, attached: bool) -> Result<(), Errno> {
        self.queues.of(index)?;
        self.owner.set_attached(index, attached)?;
        let mut state = self.state();
        state.attached[index] = attached;
        self.share_flows(&state);
        Ok(())
    }

    /// Notes the MTU, which the owner has already set on the interface.
    fn set_mtu(&self, mtu: u16) -> Result<(), Errno> {
        self.mtu.store(mtu, Ordering::Relaxed);
        Ok(())
    }

    /// Does nothing: the owner shows the link's state to the host.
    fn set_link(&self, _up: bool) {}

    fn is_own(&self) -> bool {
        false
    }

    fn is_gone(&self) -> bool {
        let is_gone = self.state().is_gone;
        if !is_gone {
            self.owner.suspect();
        }
        is_gone
    }

    fn join_again(&self) -> Result<(), TapError> {
        let name = &self.facts.interface;
        let (renewed, _outdated) = self.state().renewed.take();
        let (number, queues) = renewed.ok_or_else(|| TapError::Missing(name.clone()))?;
        if let Err(errno) = self.queues.replace(&queues) {
            // The owner sends them once: they are needed for the next try.
            self.state().renewed.put_back(number, queues);
            return Err(TapError::system(name, "replace its queues", errno));
        }
        let mut state = self.state();
        if !state.renewed.is_last(number) {
            return Err(TapError::Missing(name.clone()));
        }
        state.is_gone = false;
        state.attached.fill(false);
        self.share_flows(&state);
        Ok(())
    }

    fn transmit(&self, frame: &[u8]) -> Result<(), Errno> {
        transmit(&self.queues, frame)
    }
}

/// Sends a frame by the first queue, which works even if that queue is detached.
pub(super) fn transmit(queues: &Queues, frame: &[u8]) -> Result<(), Errno> {
    let header = [0; HEADER_SIZE];
    let slices = [IoSlice::new(&header), IoSlice::new(frame)];
    retry_on_intr(|| rustix::io::writev(queues.of(0)?.as_fd(), &slices)).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use manyring_wire::net::rss::HashConfig;
    use std::os::unix::net::UnixDatagram;

    /// An owner that records each call.
    #[derive(Debug, Default)]
    struct Notes(Mutex<Vec<String>>);

    impl Notes {
        fn note(&self, what: String) -> Result<(), Errno> {
            self.0.lock().unwrap().push(what);
            Ok(())
        }
    }

    impl Owner for Notes {
        fn set_attached(&self, index: usize, attached: bool) -> Result<(), Errno> {
            self.note(format!("{index} {attached}"))
        }

        fn set_offloads(&self, offloads: Offloads) -> Result<(), Errno> {
            self.note(format!("csum {}", offloads.csum))
        }

        fn set_rss(&self, rss: Option<&RssConfig>) -> Result<(), Errno> {
            self.note(format!("rss {:?}", rss.map(|rss| &rss.table)))
        }

        fn suspect(&self) {
            let _ = self.note("doubt".to_owned());
        }
    }

    fn lent(queues: Vec<OwnedFd>) -> Lent {
        let interface = "lan0".to_owned();
        let offloads = Offloads { csum: true, ..Offloads::default() };
        let facts = Facts {
            interface,
            is_macvtap: false,
            offloads,
            mtu: Some(1400),
            can_hash: true,
            host_filter: HostFilter { lacks_groups: true, ..HostFilter::default() },
            chunk: None,
        };
        Lent { facts, queues, table: None }
    }

    #[test]
    fn what_the_guest_may_choose_is_asked_of_the_owner() {
        let (tap, _host) = UnixDatagram::pair().unwrap();
        let notes = Arc::new(Notes::default());
        let port = LentPort::new(lent(vec![tap.into()]), true, notes.clone()).unwrap();
        assert_eq!((port.kind(), port.mtu(), port.queue_pairs()), ("tap", Some(1400), 1));
        port.set_attached(0, true).unwrap();
        assert_eq!(port.set_attached(1, true), Err(Errno::INVAL));
        port.set_offloads(Offloads::default()).unwrap();
        let hash = HashConfig { types: 0, key: Vec::new() };
        let config = RssConfig { hash, unclassified: 0, table: vec![1], transmitqs: 2 };
        port.set_rss(Some(Arc::new(Rss::new(config)))).unwrap();
        port.set_rss(None).unwrap();
        assert!(port.can_hash());
        port.set_link(false);
        port.set_mtu(1300).unwrap();
        assert_eq!(port.mtu(), Some(1300));
        assert!(!port.is_gone());
        assert_eq!(
            *notes.0.lock().unwrap(),
            ["0 true", "csum false", "rss Some([1])", "rss None", "doubt"]
        );
    }

    #[test]
    fn queues_of_another_interface_take_the_place_of_those_that_lead_nowhere() {
        let (tap, _) = UnixDatagram::pair().unwrap();
        let port =
            LentPort::new(lent(vec![tap.into()]), false, Arc::new(Notes::default())).unwrap();
        let mut half = port.open_rx(0).unwrap();
        port.lose();
        assert!(port.is_gone());
        assert!(matches!(port.join_again(), Err(TapError::Missing(_))));
        let (tap, host) = UnixDatagram::pair().unwrap();
        let next = HostFilter { only_to: Some([2; 6]), ..HostFilter::default() };
        assert_eq!(port.renew(Vec::new(), next), Err(Errno::INVAL));
        assert!(port.host_filter().lacks_groups, "that of the interface before");
        port.renew(vec![tap.into()], next).unwrap();
        assert_eq!(port.host_filter(), next);
        assert!(port.is_gone(), "until it is joined");
        port.join_again().unwrap();
        assert!(!port.is_gone());
        port.transmit(b"out").unwrap();
        let mut bytes = [1; 64];
        assert_eq!(host.recv(&mut bytes).unwrap(), HEADER_SIZE + 3);
        host.send(b"in").unwrap();
        let memory = manyring_memory::Mapping::anonymous(4096).unwrap();
        assert_eq!(half.recv(&[memory.slice(0, 64).unwrap()]), Ok(2));
    }
}
