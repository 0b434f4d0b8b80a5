//! `NbdSession`: the requests of a queue as commands of NBD, and the replies to them. Pure: bytes
//! in, bytes out; no socket, no clock.
//!
//! ```text
//! begin(request)        stores a request, behind those before it
//! emit(out, room)       writes the commands of the next requests, each write with its data; a
//!                       long request takes several commands, of PIECE bytes at most
//! take(bytes, done)     parses replies: copies data into the guest's slices, and appends the
//!                       completions of requests to `done`
//! start_again(export)   after a lost connection: all requests that are not complete will be
//!                       written again from their beginning, in the old order
//! ```
//! A server may send anything. A reply must name a command that was sent on this connection and not
//! answered, by a cookie that no other command ever had; data must lie inside the command's range
//! and be no more than it asked for; a read ends with all of its bytes. Any other reply is an error
//! that ends the connection. The ring's size and [`COMMANDS_MAX`] bound the memory of a session.

use super::incoming::{NextReply, ReplyReader, Sent};
use super::split_request::{Asked, Part};
use super::tls::TlsError;
use manyring_backend::blk::{Completion, Op, Request};
use manyring_memory::{GuestSlice, Pieces};
use manyring_wire::nbd::{
    Blocks, COMMAND_SIZE, Command, CommandKind, Export, FLAG_FUA, FLAG_NO_HOLE, NbdError,
    ReplyError, SEND_FLUSH, SEND_FUA, SEND_TRIM, SEND_WRITE_ZEROES,
};
use rustix::io::Errno;
use std::collections::VecDeque;

/// The most bytes of data of one command: so many are copied at once.
pub(super) const PIECE: u64 = 256 << 10;
/// The most bytes that a command without data covers, such as a trim.
const RANGE_PIECE: u64 = 64 << 20;
/// The most commands that wait for a reply.
const COMMANDS_MAX: usize = 1024;

/// An entry in the table of commands. One command at a time uses it.
#[derive(Clone, Copy, Debug, Default)]
struct Place {
    /// How often the entry was used. It is a part of the cookie, so that the cookie of an earlier
    /// command is not taken for that of the present one.
    uses: u32,
    sent: Option<Sent>,
}

/// The requests of a queue.
#[derive(Debug)]
pub(super) struct NbdSession {
    flags: u16,
    blocks: Blocks,
    /// The requests, indexed by their token.
    asked: Vec<Asked>,
    /// Tokens of the requests whose commands are not all written, in the order of the requests.
    unwritten: VecDeque<u32>,
    places: Vec<Place>,
    free: Vec<u32>,
    incoming: ReplyReader,
    in_flight: usize,
    /// Requests that have begun so far.
    begun: u64,
    /// The latest count of ticks that the queue has seen.
    tick: u32,
}

/// Why a connection must be closed.
#[derive(Debug, thiserror::Error)]
pub(super) enum Broken {
    /// The server has broken the protocol.
    #[error("{0}")]
    Nbd(#[from] NbdError),
    /// The server has announced that it shuts down (`NBD_ESHUTDOWN`).
    #[error("is shutting down")]
    Shutdown,
    /// The TLS session on the connection cannot go on.
    #[error(transparent)]
    Tls(#[from] TlsError),
}

impl NbdSession {
    pub(super) fn new(export: &Export) -> Self {
        Self {
            flags: export.flags,
            blocks: export.blocks,
            asked: Vec::new(),
            unwritten: VecDeque::new(),
            places: Vec::new(),
            free: Vec::new(),
            incoming: ReplyReader::default(),
            in_flight: 0,
            begun: 0,
            tick: 0,
        }
    }

    /// The number of requests that are not complete.
    pub(super) fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// True if there are commands to be written.
    pub(super) fn has_unwritten(&self) -> bool {
        !self.unwritten.is_empty()
    }

    /// True if a command waits for its reply.
    pub(super) fn awaits_reply(&self) -> bool {
        self.free.len() < self.places.len()
    }

    /// Begins a request. Returns its completion if no command need be sent for it.
    pub(super) fn begin(&mut self, request: &Request, pieces: Pieces<'_>) -> Option<Completion> {
        let done = |result| Some(Completion { token: request.token, result });
        if let Some(result) = self.without_server(request) {
            return done(result);
        }
        let at = request.token as usize;
        self.asked.resize_with(self.asked.len().max(at + 1), Asked::default);
        self.asked[at].open(request, pieces, (self.begun, self.tick));
        self.begun += 1;
        self.in_flight += 1;
        self.unwritten.push_back(request.token);
        None
    }

    /// The result of a request that completes without the server: the server offers no command for
    /// it, or it is empty or misaligned. `None`: the request must be sent.
    fn without_server(&self, request: &Request) -> Option<Result<(), Errno>> {
        let has = |flag| self.flags & flag != 0;
        match request.op {
            // A server without NBD_FLAG_SEND_FLUSH has no volatile cache.
            Op::Flush => (!has(SEND_FLUSH)).then_some(Ok(())),
            Op::Discard if !has(SEND_TRIM) => Some(Err(Errno::OPNOTSUPP)),
            Op::WriteZeroes { .. } if !has(SEND_WRITE_ZEROES) => Some(Err(Errno::OPNOTSUPP)),
            Op::SecureErase => Some(Err(Errno::OPNOTSUPP)),
            _ if request.len == 0 => Some(Ok(())),
            op => {
                let min = u64::from(self.blocks.min);
                let is_whole =
                    request.offset.is_multiple_of(min) && request.len.is_multiple_of(min);
                match op {
                    _ if is_whole => None,
                    // A discard is a hint, and may be ignored.
                    Op::Discard => Some(Ok(())),
                    _ => Some(Err(Errno::INVAL)),
                }
            }
        }
    }

    /// Writes commands to `out` until it has about `room` bytes, in the order of the requests.
    /// Returns how many were written.
    pub(super) fn emit(&mut self, out: &mut Vec<u8>, room: usize) -> usize {
        let mut count = 0;
        while let Some(&token) = self.unwritten.front() {
            let Some(part) = self.next_part(token) else {
                self.unwritten.pop_front();
                continue;
            };
            let data = if part.kind == CommandKind::Write { part.len as usize } else { 0 };
            if !out.is_empty() && out.len() + COMMAND_SIZE + data > room {
                break;
            }
            let Some(place) = self.place() else { break };
            self.write(place, token, part, out);
            count += 1;
        }
        count
    }

    /// The next command of a request; `None`: all commands of the request are written.
    fn next_part(&self, token: u32) -> Option<Part> {
        let asked = &self.asked[token as usize];
        let has_fua = self.flags & SEND_FUA != 0;
        if !asked.is_open || asked.is_written {
            return None;
        }
        let mut part = asked.rest(self.piece(asked.op));
        part.flags = match asked.op {
            Op::Write { durable: true } if has_fua => FLAG_FUA,
            Op::WriteZeroes { unmap, durable } => {
                let fua = if durable && has_fua { FLAG_FUA } else { 0 };
                fua | if unmap { 0 } else { FLAG_NO_HOLE }
            }
            _ => 0,
        };
        Some(part)
    }

    /// The most bytes of one command for this operation, a multiple of the server's block size.
    fn piece(&self, op: Op) -> u64 {
        let min = u64::from(self.blocks.min);
        let most = match op {
            Op::Read | Op::Write { .. } => PIECE.min(self.blocks.max.into()),
            _ => RANGE_PIECE,
        };
        (most / min * min).max(min)
    }

    /// Takes a free entry of the table of commands; `None`: [`COMMANDS_MAX`] commands are open.
    fn place(&mut self) -> Option<u32> {
        if let Some(place) = self.free.pop() {
            return Some(place);
        }
        let place = u32::try_from(self.places.len()).ok()?;
        if self.places.len() == COMMANDS_MAX {
            return None;
        }
        self.places.push(Place::default());
        Some(place)
    }

    fn write(&mut self, place: u32, token: u32, part: Part, out: &mut Vec<u8>) {
        let Part { kind, flags, offset, skip, len } = part;
        let entry = &mut self.places[place as usize];
        entry.uses = entry.uses.wrapping_add(1);
        let cookie = u64::from(entry.uses) << 32 | u64::from(place);
        let sent = Sent { token, kind, offset, skip, len, got: 0, error: None, errors: 0 };
        entry.sent = Some(sent);
        out.extend(Command { kind, flags, cookie, offset, len }.emit());
        let asked = &mut self.asked[token as usize];
        if kind == CommandKind::Write {
            append(asked.slices.as_slices(), skip, len, out);
        }
        asked.wrote(len);
    }

    /// Parses the replies at the beginning of `bytes`. Returns how many bytes were consumed; the
    /// caller must pass the others again, with the bytes that follow.
    ///
    /// # Errors
    /// [`Broken`]: the connection must be closed.
    pub(super) fn take(
        &mut self,
        bytes: &[u8],
        done: &mut Vec<Completion>,
    ) -> Result<usize, Broken> {
        let mut at = 0;
        loop {
            let Self { incoming, places, asked, .. } = &mut *self;
            let slices = |token: u32| asked[token as usize].slices.as_slices();
            let next = incoming.next(&bytes[at..], |c| sent_as(places, c), slices)?;
            at += next.consumed;
            match next.reply {
                NextReply::Needs => return Ok(at),
                NextReply::GoesOn => {}
                NextReply::Ends(cookie) => self.ended(cookie, done)?,
            }
        }
    }

    /// Handles the end of the reply to a command. If it was the last command of the request,
    /// appends the request's completion to `done`, or begins the flush of a durable write.
    fn ended(&mut self, cookie: u64, done: &mut Vec<Completion>) -> Result<(), Broken> {
        let index = u32::try_from(cookie & 0xffff_ffff).unwrap_or(u32::MAX);
        let sent = self.places.get_mut(index as usize).and_then(|place| place.sent.take());
        let Some(sent) = sent else { return Ok(()) };
        // The entry is free even if the reply is an error: `uses` keeps its old cookie invalid.
        self.free.push(index);
        let errno = match sent.error {
            Some(ReplyError::Shutdown) => return Err(Broken::Shutdown),
            Some(error) => Some(errno_of(error)),
            None if sent.kind == CommandKind::Read && sent.got < sent.len => {
                return Err(NbdError::Reply("a read that lacks bytes").into());
            }
            None => None,
        };
        let asked = &mut self.asked[sent.token as usize];
        if !asked.answered(errno, self.tick) {
            return Ok(());
        }
        // All commands of the request are answered. With FUA the data are durable already; without
        // FUA, a durable write needs a flush behind them.
        let is_flushed = self.flags & SEND_FUA != 0 || self.flags & SEND_FLUSH == 0;
        if asked.needs_flush() && !is_flushed {
            asked.begin_flush();
            self.unwritten.push_back(sent.token);
            return Ok(());
        }
        let result = asked.close();
        self.in_flight -= 1;
        done.push(Completion { token: sent.token, result });
        Ok(())
    }

    /// Begins a new connection, which serves `export`: all requests that are not complete will be
    /// written again.
    pub(super) fn start_again(&mut self, export: &Export) {
        (self.flags, self.blocks) = (export.flags, export.blocks);
        self.forget_commands();
        for at in 0..self.unwritten.len() {
            let token = self.unwritten[at] as usize;
            self.asked[token].start_again(self.tick);
        }
    }

    /// Forgets all commands of a lost connection. Requests that are not complete will be written
    /// again from their beginning, in the order in which they came.
    pub(super) fn forget_commands(&mut self) {
        self.incoming = ReplyReader::default();
        self.free.clear();
        for (place, at) in self.places.iter_mut().zip(0..) {
            place.sent = None;
            self.free.push(at);
        }
        // All open requests, also those whose commands were all written: their replies are lost.
        let open = (0..).zip(&self.asked).filter(|(_, asked)| asked.is_open);
        let mut tokens: Vec<u32> = open.map(|(token, _)| token).collect();
        tokens.sort_unstable_by_key(|token| self.asked[*token as usize].number);
        for token in &tokens {
            self.asked[*token as usize].start_again(self.tick);
        }
        self.unwritten = tokens.into();
    }

    /// Completes every request for which `is_meant` returns true with `errno`. The caller has made
    /// sure that no command waits for a reply.
    pub(super) fn end_all(
        &mut self,
        errno: Errno,
        done: &mut Vec<Completion>,
        is_meant: impl Fn(&Asked) -> bool,
    ) {
        let asked = &mut self.asked;
        self.unwritten.retain(|token| {
            let asked = &mut asked[*token as usize];
            let ends = asked.is_open && is_meant(asked);
            if ends {
                let _ = asked.close();
                self.in_flight -= 1;
                done.push(Completion { token: *token, result: Err(errno) });
            }
            !ends
        });
    }

    /// Takes a request back, if no command was written for it and it need not stay (`must_stay`).
    /// Returns false if the request stays: its completion comes, at the latest when the connection
    /// is lost.
    pub(super) fn recall(&mut self, token: u32, must_stay: bool) -> bool {
        let Some(asked) = self.asked.get_mut(token as usize) else { return false };
        let is_untouched = asked.is_open && asked.is_untouched() && !must_stay;
        if is_untouched {
            let _ = asked.close();
            self.in_flight -= 1;
            self.unwritten.retain(|other| *other != token);
        } else {
            asked.is_recalled = true;
        }
        is_untouched
    }

    /// Releases the snapshots of guest memory, which is about to change.
    pub(super) fn release_memory(&mut self) {
        self.asked.iter_mut().for_each(Asked::retire);
    }

    /// Stores the time `tick`. Returns true if a request has had no answer for more than `ticks`
    /// ticks, so that the connection must be closed. For a request that a stopping queue has
    /// recalled, one tick is enough.
    pub(super) fn is_overdue(&mut self, tick: u32, ticks: u32) -> bool {
        self.tick = tick;
        let open = self.asked.iter().filter(|asked| asked.is_open);
        let is_late = |asked: &Asked| {
            let most = if asked.is_recalled { 1 } else { ticks };
            tick.wrapping_sub(asked.since) > most
        };
        { open }.any(is_late)
    }
}

/// The command with this cookie, if it waits for a reply.
#[inline]
fn sent_as(places: &mut [Place], cookie: u64) -> Option<&mut Sent> {
    let place = places.get_mut(usize::try_from(cookie & 0xffff_ffff).ok()?)?;
    if u64::from(place.uses) == cookie >> 32 { place.sent.as_mut() } else { None }
}

/// Appends `len` bytes of `slices`, from offset `skip` on, to `out`. Memory that its front-end has
/// truncated reads as zeroes.
fn append(slices: &[GuestSlice<'_>], skip: u64, len: u32, out: &mut Vec<u8>) {
    let (mut skip, mut left) = (usize::try_from(skip).unwrap_or(usize::MAX), len as usize);
    for slice in slices {
        let (before, rest) = slice.split_at(skip);
        skip -= before.len();
        let part = rest.split_at(left).0;
        let at = out.len();
        out.resize(at + part.len(), 0);
        part.read_into(&mut out[at..]);
        left -= part.len();
        if left == 0 {
            return;
        }
    }
    // The slices cannot be shorter than the request: the device has checked their length.
    out.resize(out.len() + left, 0);
}

/// The errno for an error of the protocol.
fn errno_of(error: ReplyError) -> Errno {
    match error {
        ReplyError::Perm => Errno::PERM,
        ReplyError::NoSpace => Errno::NOSPC,
        ReplyError::NotSupported => Errno::OPNOTSUPP,
        ReplyError::Inval => Errno::INVAL,
        ReplyError::NoMem => Errno::NOMEM,
        ReplyError::Io | ReplyError::Overflow | ReplyError::Shutdown => Errno::IO,
    }
}
