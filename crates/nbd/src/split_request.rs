//! `Asked`: a request of the guest, and for which of its bytes the session has written commands.

use manyring_backend::blk::{Op, Request};
use manyring_memory::{Pieces, SliceList};
use manyring_wire::nbd::CommandKind;
use rustix::io::Errno;

/// Slices for which a request's list keeps its memory after the request has completed.
const SLICES_KEPT: usize = 256;

/// The part of a request that the next command is for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub(super) kind: CommandKind,
    pub(super) flags: u16,
    /// Offset of the first byte on the disk.
    pub(super) offset: u64,
    /// How many bytes of the request precede this part.
    pub(super) skip: u64,
    /// The length of the part in bytes.
    pub(super) len: u32,
}

/// A request of the guest, from `begin` to its completion.
#[derive(Debug)]
pub(super) struct Asked {
    pub(super) op: Op,
    offset: u64,
    len: u64,
    /// All slices of the request, kept until it is done: after a lost connection it is sent again.
    pub(super) slices: SliceList,
    /// The position of the request among all of the queue, by which requests are sent again in
    /// order.
    pub(super) number: u64,
    /// How many bytes of the request have commands that were written.
    written: u64,
    /// True if a command was written for every byte of the request.
    pub(super) is_written: bool,
    /// How many commands of this request wait for their reply.
    open: u32,
    /// True if the server has all data of a durable write, and their flush is pending.
    is_flush: bool,
    result: Result<(), Errno>,
    pub(super) is_open: bool,
    /// True if the queue stops, and has asked for this request back.
    pub(super) is_recalled: bool,
    is_retired: bool,
    /// The tick at which the last command of this request was answered, or the request began.
    pub(super) since: u32,
}

impl Default for Asked {
    fn default() -> Self {
        Self {
            op: Op::Flush,
            offset: 0,
            len: 0,
            slices: SliceList::new(),
            number: 0,
            written: 0,
            is_written: false,
            open: 0,
            is_flush: false,
            result: Ok(()),
            is_open: false,
            is_recalled: false,
            is_retired: false,
            since: 0,
        }
    }
}

impl Asked {
    /// Stores a request, which is the `number`th of the queue and begins at `tick`.
    pub(super) fn open(
        &mut self,
        request: &Request,
        pieces: Pieces<'_>,
        (number, tick): (u64, u32),
    ) {
        assert!(!self.is_open, "a token came twice");
        (self.op, self.offset, self.len) = (request.op, request.offset, request.len);
        (self.number, self.is_open) = (number, true);
        self.slices.clear();
        self.slices.shrink_to(SLICES_KEPT.max(pieces.len()));
        self.slices.extend(pieces);
        self.start_again(tick);
    }

    /// Call when the connection was lost: no byte of the request counts as sent or answered any
    /// more.
    pub(super) fn start_again(&mut self, tick: u32) {
        (self.written, self.open, self.since) = (0, 0, tick);
        (self.is_written, self.is_flush, self.result) = (false, false, Ok(()));
    }

    /// True if no command was written for this request on the present connection.
    pub(super) fn is_untouched(&self) -> bool {
        self.written == 0 && self.open == 0 && !self.is_written && !self.is_flush
    }

    /// Returns the part for the next command: the bytes without a command, `piece` of them at most.
    pub(super) fn rest(&self, piece: u64) -> Part {
        let kind = match self.op {
            _ if self.is_flush => CommandKind::Flush,
            Op::Read => CommandKind::Read,
            Op::Write { .. } => CommandKind::Write,
            Op::Flush => CommandKind::Flush,
            Op::Discard | Op::SecureErase => CommandKind::Trim,
            Op::WriteZeroes { .. } => CommandKind::WriteZeroes,
        };
        let (skip, flags) = (self.written, 0);
        if kind == CommandKind::Flush {
            return Part { kind, flags, offset: 0, skip: 0, len: 0 };
        }
        let len = u32::try_from((self.len - skip).min(piece)).unwrap_or(u32::MAX);
        Part { kind, flags, offset: self.offset + skip, skip, len }
    }

    /// Records that a command of `len` bytes was written.
    pub(super) fn wrote(&mut self, len: u32) {
        self.open += 1;
        self.written += u64::from(len);
        self.is_written = self.is_flush || self.op == Op::Flush || self.written >= self.len;
    }

    /// Handles the answer to a command. Returns true if all commands of the request are written and
    /// answered.
    pub(super) fn answered(&mut self, error: Option<Errno>, tick: u32) -> bool {
        self.open -= 1;
        self.since = tick;
        if let Some(errno) = error {
            self.result = self.result.and(Err(errno));
            // No more commands are written for a request that has failed.
            self.is_written = true;
        }
        self.is_written && self.open == 0
    }

    /// True for a durable write whose data are answered and not yet flushed.
    pub(super) fn needs_flush(&self) -> bool {
        let durable =
            matches!(self.op, Op::Write { durable: true } | Op::WriteZeroes { durable: true, .. });
        durable && !self.is_flush && self.result.is_ok()
    }

    /// Begins the flush that makes the answered data of a durable write durable.
    pub(super) fn begin_flush(&mut self) {
        (self.is_flush, self.is_written) = (true, false);
    }

    /// Ends the request, and returns its result.
    pub(super) fn close(&mut self) -> Result<(), Errno> {
        (self.is_open, self.is_recalled) = (false, false);
        if std::mem::take(&mut self.is_retired) {
            self.slices.release();
        }
        self.result
    }

    /// Releases the snapshot of the former guest memory: at once, or when an open request ends.
    pub(super) fn retire(&mut self) {
        if self.is_open {
            self.is_retired = true;
        } else {
            self.slices.release();
        }
    }
}
