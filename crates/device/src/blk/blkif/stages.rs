//! `Stages`: requests of a Xen ring that the disk serves in several steps.
//!
//! * An *ordered write* (a write barrier, or a flush with data) begins when all writes before it
//!   are durable. The queue waits until every earlier request is answered; then the disk flushes;
//!   then it writes the data. Until it is done, no later request is popped: it is a *gate*. A
//!   barrier without data is a gate too, and ends with its flush.
//! * A long discard is given to the disk in pieces, so that other requests have their turn between
//!   two pieces. A virtio-blk driver has to cut discards by itself.

use crate::blk::config::RANGE_BYTES_MAX;
use manyring_backend::blk::{Completion, Op};
use manyring_memory::GrantPage;
use rustix::io::Errno;

/// The event that an ordered write waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WriteWait {
    /// The answers to all earlier requests.
    Others,
    /// The flush of the earlier writes.
    Flush,
    /// The write of its own data.
    Write,
}

/// An ordered write. With `len` 0 it is a barrier without data, and ends with its flush.
#[derive(Clone, Copy, Debug)]
pub(super) struct OrderedWrite {
    pub(super) token: u32,
    pub(super) durable: bool,
    pub(super) offset: u64,
    pub(super) len: u64,
}

/// The part of a discard that was not submitted to the disk yet.
#[derive(Clone, Copy, Debug)]
struct RemainingDiscard {
    token: u32,
    op: Op,
    offset: u64,
    len: u64,
}

/// The next step of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Submit this operation on this range (offset, length).
    Submit(Op, u64, u64),
    /// Submit this write to this range, with the pages in [`Stages::pieces`] as its data.
    Write(Op, u64, u64),
}

/// The requests that have further steps.
#[derive(Debug, Default)]
pub(super) struct Stages {
    gate: Option<(OrderedWrite, WriteWait)>,
    /// The pages that the ordered write writes, each with the range (offset, length) of its bytes.
    pub(super) pieces: Vec<(GrantPage, (u32, u32))>,
    discards: Vec<RemainingDiscard>,
}

impl Stages {
    /// True while a gate is closed: no request may be popped.
    #[inline]
    pub(super) fn is_gated(&self) -> bool {
        self.gate.is_some()
    }

    /// True if a completion may belong to a request with a further step.
    #[inline]
    pub(super) fn is_busy(&self) -> bool {
        self.gate.is_some() || !self.discards.is_empty()
    }

    /// Begins an ordered write, whose data pages the caller has put into [`Self::pieces`].
    pub(super) fn close_gate(&mut self, gate: OrderedWrite) {
        debug_assert!(self.gate.is_none(), "two gates");
        self.gate = Some((gate, WriteWait::Others));
    }

    /// Call when all requests before the gate are answered. Returns the token of the gate, whose
    /// flush the caller must submit; `None`: there is no gate, or its flush was submitted before.
    pub(super) fn others_are_done(&mut self) -> Option<u32> {
        match &mut self.gate {
            Some((gate, wait)) if *wait == WriteWait::Others => {
                *wait = WriteWait::Flush;
                Some(gate.token)
            }
            _ => None,
        }
    }

    /// Begins a discard. Returns the length of its first piece, which the caller must submit now.
    pub(super) fn cut_discard(&mut self, token: u32, op: Op, offset: u64, len: u64) -> u64 {
        let first = len.min(RANGE_BYTES_MAX);
        if first < len {
            self.discards.push(RemainingDiscard {
                token,
                op,
                offset: offset + first,
                len: len - first,
            });
        }
        first
    }

    /// Returns the next step of the request to which a completion belongs; `None`: the request is
    /// done.
    pub(super) fn next(&mut self, Completion { token, result }: Completion) -> Option<Step> {
        if let Some((gate, wait)) = &mut self.gate
            && gate.token == token
        {
            let (OrderedWrite { durable, offset, len, .. }, step) = (*gate, *wait);
            if step == WriteWait::Flush && result.is_ok() && len > 0 {
                *wait = WriteWait::Write;
                return Some(Step::Write(Op::Write { durable }, offset, len));
            }
            self.open_gate();
            return None;
        }
        let at = self.discards.iter().position(|rest| rest.token == token)?;
        if result.is_err() {
            self.discards.swap_remove(at);
            return None;
        }
        let rest = &mut self.discards[at];
        let RemainingDiscard { op, offset, len, .. } = *rest;
        let piece = len.min(RANGE_BYTES_MAX);
        (rest.offset, rest.len) = (offset + piece, len - piece);
        if rest.len == 0 {
            self.discards.swap_remove(at);
        }
        Some(Step::Submit(op, offset, piece))
    }

    fn open_gate(&mut self) {
        self.gate = None;
        self.pieces.clear();
    }

    /// Removes the completions of requests with a next step from `done`. Returns these steps, each
    /// with its request's token.
    pub(super) fn take_steps(&mut self, done: &mut Vec<Completion>) -> Vec<(u32, Step)> {
        let mut steps = Vec::new();
        done.retain(|completion| match self.next(*completion) {
            Some(step) => {
                steps.push((completion.token, step));
                false
            }
            None => true,
        });
        steps
    }
}

/// The error with which a request fails if one of its pages cannot be mapped.
pub(super) const UNMAPPED: Errno = Errno::IO;
