//! The queue length of an interface (`txqueuelen`): how many frames may wait for the guest in each
//! of its queues, and how one length is divided among several queues.
//!
//! Linux gives each queue of a tap or macvtap the whole length of the interface. So the queues of a
//! guest with four pairs hold four times the frames of one, and TCP senders fill whatever there is:
//! their frames wait longer, and more of them are lost at once when the reader is late. Therefore
//! one length is divided among the queues in use (docs/design/0032).

use super::{State, TapPort};
use crate::net::{QueueLengthInfo, QueueLengthSource};
use crate::sys::link::{Change, InterfaceInfo};
use crate::sys::tuntap as sys;
use rustix::fd::AsFd;
use rustix::io::Errno;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// Who chooses the queue length of an interface.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum QueueLength {
    /// This daemon, where it may: [`QUEUE_LENGTH`] frames, together or each (`overflow.rs`).
    Auto,
    /// The host: the interface keeps its length, which each queue has for itself.
    #[default]
    Host,
    /// The operator: so many frames.
    Frames(u32),
}

/// The frames of [`QueueLength::Auto`]: those of one queue of a tap: with one pair nothing changes.
pub const QUEUE_LENGTH: u32 = 1000;
/// The queues among which [`QUEUE_LENGTH`] is divided at most: one stream alone needs an eighth.
pub const QUEUE_LENGTH_SHARERS_MAX: u32 = 8;

/// The queue length of one interface. Its numbers lie outside the port's lock, so that reading them
/// waits for no call of the host.
#[derive(Debug, Default)]
pub(super) struct LengthState {
    wanted: QueueLength,
    /// The queues that this process has opened.
    queues: u32,
    /// The length of the interface when it was opened: what it gets back. 0: unknown.
    former: AtomicU32,
    /// The present length of the interface, which each queue has; 0: unknown.
    each: AtomicU32,
    /// The queues among which the length was divided last.
    sharers: AtomicU32,
    /// How often the length was changed.
    changes: AtomicU64,
    /// All queues were detached after the interface was opened: from now on those that are attached
    /// share one length.
    is_begun: AtomicBool,
    /// This process has no right to change the length: the interface keeps its own.
    is_refused: AtomicBool,
    /// The log has that the host refuses a change, which is tried again.
    is_told: AtomicBool,
}

impl LengthState {
    /// The length of an interface of `queues` queues that is being opened. `is_left`: a former
    /// process of this daemon has changed its length already.
    pub(super) fn new(
        (wanted, queues): (QueueLength, usize),
        link: Option<&InterfaceInfo>,
        is_left: bool,
    ) -> Self {
        // One queue shares nothing: it keeps the length that the host has given the interface.
        let is_alone = wanted == QueueLength::Auto && queues < 2;
        let wanted = if is_alone { QueueLength::Host } else { wanted };
        let queues = u32::try_from(queues).unwrap_or(u32::MAX);
        let state = Self { wanted, queues, ..Self::default() };
        state.begin(link, is_left);
        state
    }

    /// Notes the length of an interface that was opened.
    pub(super) fn begin(&self, link: Option<&InterfaceInfo>, is_left: bool) {
        let each = link.map_or(0, |link| link.txqueuelen);
        self.each.store(each, Ordering::Relaxed);
        self.is_begun.store(false, Ordering::Relaxed);
        self.is_refused.store(false, Ordering::Relaxed);
        let former = match link {
            _ if is_left => self.share(1).unwrap_or(each),
            Some(link) if self.is_divided(each) => host_default(link),
            _ => each,
        };
        self.former.store(former, Ordering::Relaxed);
    }

    /// The frames that each of so many queues shall hold; `None`: the length stays as it is.
    fn share(&self, sharers: u32) -> Option<u32> {
        match self.wanted {
            _ if self.is_refused.load(Ordering::Relaxed) => None,
            QueueLength::Auto => Some(QUEUE_LENGTH / sharers.min(QUEUE_LENGTH_SHARERS_MAX)),
            QueueLength::Frames(frames) => Some((frames / sharers).max(1)),
            QueueLength::Host => None,
        }
    }

    /// True if a queue has this length while several queues share one. Then a process of this
    /// daemon that was killed has most probably set it, and could not restore the former one.
    fn is_divided(&self, each: u32) -> bool {
        (2..=self.queues).any(|sharers| self.share(sharers) == Some(each))
    }

    /// The queue length as stats and metrics show it.
    pub(super) fn info(&self) -> QueueLengthInfo {
        let [each, sharers] =
            [&self.each, &self.sharers].map(|number| number.load(Ordering::Relaxed));
        let source = match (self.share(1), self.wanted) {
            (Some(_), QueueLength::Auto) => QueueLengthSource::Auto,
            (Some(_), _) => QueueLengthSource::Operator,
            (None, _) => QueueLengthSource::Host,
        };
        let changes = self.changes.load(Ordering::Relaxed);
        QueueLengthInfo { frames: each.saturating_mul(sharers), source, changes }
    }
}

/// The length that Linux gives a new interface of this kind.
fn host_default(link: &InterfaceInfo) -> u32 {
    const TAP: u32 = 1000;
    const MACVTAP: u32 = 500;
    if link.tap.is_some() { TAP } else { MACVTAP }
}

impl TapPort {
    /// Divides the length among the attached queues. The kernel keeps the frames that wait in a
    /// queue as far as they fit.
    fn divide(&self, state: &State, is_forced: bool) -> Result<(), Errno> {
        let attached = state.attached.iter().filter(|is_attached| **is_attached).count();
        let sharers = u32::try_from(attached).unwrap_or(u32::MAX).max(1);
        self.queue_length.sharers.store(sharers, Ordering::Relaxed);
        let each = self.queue_length.each.load(Ordering::Relaxed);
        self.flows.iter().for_each(|flows| flows.set_length(each));
        let is_whole = self.queue_length.wanted == QueueLength::Auto && state.overflow.is_whole();
        self.queue_length
            .share(if is_whole { 1 } else { sharers })
            .map_or(Ok(()), |each| self.set_length(each, is_forced))
    }

    /// Sets the length that each queue has. `is_forced`: asks the host even if nothing changes.
    fn set_length(&self, each: u32, is_forced: bool) -> Result<(), Errno> {
        let is_new = self.queue_length.each.load(Ordering::Relaxed) != each;
        if !is_new && !is_forced {
            return Ok(());
        }
        let index = self.index().ok_or(Errno::OPNOTSUPP)?;
        self.links.set(index, &Change { txqueuelen: Some(each), ..Change::default() })?;
        self.queue_length.is_told.store(false, Ordering::Relaxed);
        self.queue_length.each.store(each, Ordering::Relaxed);
        self.flows.iter().for_each(|flows| flows.set_length(each));
        self.queue_length.changes.fetch_add(u64::from(is_new), Ordering::Relaxed);
        Ok(())
    }

    /// Gives an interface that is being opened its length, when all queues are detached. With
    /// several queues the host is asked even if nothing changes yet, so that the log says at the
    /// start that this process may not change the length. Then the interface keeps its own.
    ///
    /// # Errors
    /// The host refuses the length that the operator has chosen.
    pub(super) fn begin_queue_length(&self) -> Result<(), Errno> {
        self.queue_length.is_begun.store(true, Ordering::Relaxed);
        let is_chosen = matches!(self.queue_length.wanted, QueueLength::Frames(_));
        let result = self.divide(&self.state(), is_chosen || self.queues.len() > 1);
        if let (Err(errno), false) = (result, is_chosen) {
            self.keep_length(errno);
            return Ok(());
        }
        result
    }

    /// Divides the length among the queues that are attached now. A failure is logged once.
    /// `is_forced`: another process may have changed the length.
    pub(super) fn share_queue_length(&self, state: &State, is_forced: bool) {
        if self.queue_length.is_begun.load(Ordering::Relaxed)
            && let Err(errno) = self.divide(state, is_forced)
        {
            self.keep_length(errno);
        }
    }

    /// Looks how many frames the interface has lost, and decides whether its queues share one
    /// length. Returns true if the next look can wait: see [`Overflow::is_settled`].
    ///
    /// [`Overflow::is_settled`]: super::overflow::Overflow::is_settled
    pub(super) fn adapt(&self) -> bool {
        if self.queue_length.info().source != QueueLengthSource::Auto {
            return true;
        }
        let mut state = self.state();
        let Some(link) = self.own_link() else { return true };
        // What a tap sends is for its reader; a macvtap receives for its reader.
        let lost = if link.tap.is_some() { link.tx_dropped } else { link.rx_dropped };
        if state.overflow.look(lost) {
            self.share_queue_length(&state, false);
        }
        state.overflow.is_settled()
    }

    /// Returns the interface, unless another one has its number by now: the number of an interface
    /// that was moved to another namespace is free here.
    fn own_link(&self) -> Option<InterfaceInfo> {
        let address = sys::hardware_address(self.queues[0].as_fd()).ok();
        let link = self.links.at(self.index()?).ok().flatten();
        link.filter(|link| link.address == address)
    }

    /// Leaves the length as it is: for ever if this process may not change it, else until the next
    /// division.
    fn keep_length(&self, errno: Errno) {
        let name = &self.name;
        let may_never = matches!(errno, Errno::PERM | Errno::ACCESS | Errno::OPNOTSUPP);
        if self.queue_length.wanted == QueueLength::Auto && may_never {
            self.queue_length.is_refused.store(true, Ordering::Relaxed);
            // The default setting, which needs a right that the daemon need not have.
            tracing::info!(name, %errno, "txqueuelen: unchanged; each queue has the host's length");
        } else if !self.queue_length.is_told.swap(true, Ordering::Relaxed) {
            tracing::warn!(name, %errno, "txqueuelen: failed; the queues keep theirs");
        }
    }

    /// The interface has a number in this namespace again, so its length can be changed again.
    pub(super) fn may_divide(&self) {
        self.queue_length.is_refused.store(false, Ordering::Relaxed);
    }

    /// Gives the interface the length that it had when it was opened.
    pub(super) fn restore_length(&self) {
        let former = self.queue_length.former.load(Ordering::Relaxed);
        if former > 0 && self.own_link().is_some() {
            let _ = self.set_length(former, false);
        }
    }
}
