//! Framing and fd passing: receives and sends whole messages with their file descriptors.

mod peek;

use super::meter::Meter;
use super::saved_session::{Client, SavedSession, SessionJournal};
use super::socket_error::SocketError;
use manyring_engine::{FdReservation, ForeignFd, Janitor, MESSAGE_FDS_MAX, Origin, SessionSocket};
use manyring_wire::vhost_user::{HEADER_SIZE, Header, ParseError, TABLE_REGIONS_MAX, row_of};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::time::Instant;

/// The longest time from the first byte of a message to its last, and the longest time for which a
/// front-end may not read a reply.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(5);
/// The most bytes that one call of recvmsg reads. A front-end can send each byte separately; then
/// the call walks all waiters that the front-end has put on its end of the socket, once per byte.
const PIECE: usize = 16;
const _: () = assert!(HEADER_SIZE <= PIECE);

/// A received message.
#[derive(Debug)]
pub(super) struct Message {
    /// The header, checked.
    pub(super) header: Header,
    /// The payload, of the size that the header says.
    pub(super) payload: Vec<u8>,
    /// The descriptors that came with the message. The janitor closes those that are dropped.
    pub(super) fds: Vec<ForeignFd>,
    /// True if the message is still in the socket, and must be consumed after it was handled.
    pub(super) is_peeked: bool,
}

impl Message {
    /// Parses a message from the bytes of a journal entry. `None`: they are no complete message.
    pub(super) fn of_bytes(bytes: &[u8], fds: Vec<ForeignFd>) -> Option<Self> {
        let (header, payload) = bytes.split_first_chunk()?;
        let header = Header::parse(header).ok().filter(|h| h.size as usize == payload.len())?;
        Some(Self { header, payload: payload.to_vec(), fds, is_peeked: false })
    }
}

/// A connected socket. The janitor closes it, because closing it also closes the file descriptors
/// of unread messages, which may block.
#[derive(Debug)]
pub(super) struct ForeignStream {
    /// `None` only while `drop` runs.
    stream: Option<UnixStream>,
    janitor: Arc<Janitor>,
    /// Registers both ends of the socket, so that neither is accepted as a doorbell.
    _known: SessionSocket,
    /// The journal of the session, if it has one.
    journal: Option<Arc<dyn SessionJournal>>,
    /// The contents of the journal that a former process has written, until they are taken.
    saved_session: Mutex<Option<SavedSession>>,
    /// True if the session has ended by itself: no other process resumes it.
    is_over: AtomicBool,
}

impl ForeignStream {
    pub(super) fn new(client: Client, janitor: Arc<Janitor>) -> Self {
        let Client { stream, kept } = client;
        let known = SessionSocket::new(&stream);
        let (journal, saved_session) = kept.unzip();
        let saved_session = Mutex::new(saved_session);
        let is_over = AtomicBool::new(false);
        Self { stream: Some(stream), janitor, _known: known, journal, saved_session, is_over }
    }

    pub(super) fn journal(&self) -> Option<&Arc<dyn SessionJournal>> {
        self.journal.as_ref()
    }

    /// Takes the contents of the journal that a former process has written. `None`: there are none,
    /// or they were taken before.
    pub(super) fn take_saved_session(&self) -> Option<SavedSession> {
        self.saved_session.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Marks the session as ended by itself: no other process resumes it.
    pub(super) fn end(&self) {
        self.is_over.store(true, Ordering::Relaxed);
    }
}

/// A connection that the janitor closes. If the session has a journal, the supervisor has the
/// socket open too, so it is shut down for the front-end to see the end. If another process resumes
/// the session, `journal` is `None`, and the socket is only closed here.
struct Closing {
    stream: std::os::unix::net::UnixStream,
    journal: Option<Arc<dyn SessionJournal>>,
    /// The contents of the journal, if no session has taken them: their descriptors are closed too.
    _saved_session: Option<SavedSession>,
}

impl Drop for Closing {
    fn drop(&mut self) {
        if let Some(journal) = self.journal.take() {
            let _ = self.stream.shutdown(std::net::Shutdown::Both);
            journal.forget();
        }
    }
}

impl Deref for ForeignStream {
    type Target = UnixStream;

    fn deref(&self) -> &UnixStream {
        match &self.stream {
            Some(stream) => stream,
            None => unreachable!("only the drop takes it"),
        }
    }
}

impl Drop for ForeignStream {
    fn drop(&mut self) {
        // `into_std` only removes the stream from the runtime's poll, and closes nothing.
        if let Some(Ok(stream)) = self.stream.take().map(UnixStream::into_std) {
            let is_over = self.is_over.load(Ordering::Relaxed);
            let journal = self.journal.take().filter(|journal| is_over || !journal.quiesces());
            let saved_session = self.take_saved_session();
            self.janitor.dispose(Closing { stream, journal, _saved_session: saved_session });
        }
    }
}

/// A connected front-end. [`Connection::receive`] may be cancelled and called again.
#[derive(Debug)]
pub(super) struct Connection {
    stream: Arc<ForeignStream>,
    origin: Arc<Origin>,
    /// Bytes of the current message so far: header, then payload.
    bytes: Vec<u8>,
    fds: Vec<ForeignFd>,
    header: Option<Header>,
    /// Set while a message cannot be received because there is no room for its descriptors. If a
    /// timeout expires while this is set, the front-end was not silent.
    awaits_room: bool,
}

impl Connection {
    /// Makes a connection that has received nothing yet.
    #[must_use]
    pub(super) fn new(stream: Arc<ForeignStream>, origin: Arc<Origin>) -> Self {
        Self {
            stream,
            origin,
            bytes: Vec::new(),
            fds: Vec::new(),
            header: None,
            awaits_room: false,
        }
    }

    /// Returns the journal of the session, if it has one.
    pub(super) fn journal(&self) -> Option<&Arc<dyn SessionJournal>> {
        self.stream.journal()
    }

    /// True if another process will resume the session. It cannot if a part of a message was
    /// received here.
    pub(super) fn quiesces(&self) -> bool {
        self.bytes.is_empty() && self.journal().is_some_and(|journal| journal.quiesces())
    }

    /// Takes the contents of the journal that a former process has written. `None`: there are none,
    /// or they were taken before.
    pub(super) fn take_saved_session(&self) -> Option<SavedSession> {
        self.stream.take_saved_session()
    }

    pub(super) fn origin(&self) -> &Arc<Origin> {
        &self.origin
    }

    /// Receives the next message. Waits at most `silence` for its first byte; `None`: for ever.
    /// Each further piece is read only when the meter allows it.
    ///
    /// # Errors
    /// [`SocketError`]: why the connection must be closed.
    pub(super) async fn receive(
        &mut self,
        silence: Option<Duration>,
        meter: &Meter,
    ) -> Result<Message, SocketError> {
        if self.bytes.is_empty() {
            let first = self.receive_some(meter);
            match silence {
                None => first.await?,
                Some(after) => match tokio::time::timeout(after, first).await {
                    Ok(result) => result?,
                    Err(_) if self.awaits_room => return Err(SocketError::NoRoom),
                    Err(_) => return Err(SocketError::Silent { after }),
                },
            }
        }
        let mut left = MESSAGE_TIMEOUT;
        while !self.is_complete()? {
            // Before `began`: the time for which the meter delays a front-end does not count as its
            // silence.
            meter.paid().await;
            let began = Instant::now();
            match tokio::time::timeout(left, self.receive_some(meter)).await {
                Ok(result) => result?,
                Err(_) if self.awaits_room => return Err(SocketError::NoRoom),
                Err(_) => return Err(SocketError::Stalled),
            }
            left = left.saturating_sub(began.elapsed());
        }
        let header = self.header.take().ok_or(SocketError::ClosedInMessage)?;
        let payload = self.bytes.split_off(HEADER_SIZE);
        self.bytes.clear();
        Ok(Message { header, payload, fds: std::mem::take(&mut self.fds), is_peeked: false })
    }

    /// Parses the header once it is complete. Returns true if the payload is complete too.
    fn is_complete(&mut self) -> Result<bool, SocketError> {
        if self.header.is_none()
            && let Some(bytes) = self.bytes.first_chunk::<HEADER_SIZE>()
        {
            let header = Header::parse(bytes)?;
            let request = header.request;
            // An unknown request is an error here, unless it asks for an acknowledgement: the
            // session then answers with a failure.
            if row_of(request).is_none() && !header.needs_reply() {
                return Err(ParseError::Unknown { request }.into());
            }
            self.header = Some(header);
        }
        Ok(self.header.is_some_and(|h| self.bytes.len() == HEADER_SIZE + h.size as usize))
    }

    /// Returns how many bytes of the current message are missing, as far as is known.
    fn missing(&self) -> usize {
        let whole = self.header.map_or(HEADER_SIZE, |h| HEADER_SIZE + h.size as usize);
        whole - self.bytes.len()
    }

    /// Receives some bytes of the current message, and the fds that come with them.
    async fn receive_some(&mut self, meter: &Meter) -> Result<(), SocketError> {
        let missing = self.missing().min(PIECE);
        let (bytes, fds, is_truncated) = loop {
            // The flag may still be set by an earlier call that was cancelled.
            self.awaits_room = false;
            self.stream.readable().await?;
            // Receive fds only if the janitor can close them soon and there are numbers for them.
            self.awaits_room = true;
            self.origin.janitor().room().await;
            let found = self.room_for(missing).await?;
            self.awaits_room = false;
            let Some((mut room, len)) = found else { continue };
            let stream = &self.stream;
            let receive = || receive_once(stream.as_fd(), len);
            match meter.measure(|| stream.try_io(Interest::READABLE, receive)) {
                Ok(Received { bytes, fds, is_truncated }) => {
                    let adopt = |fd| self.origin.adopt(fd, &mut room);
                    break (bytes, fds.into_iter().map(adopt).collect::<Vec<_>>(), is_truncated);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.into()),
            }
        };
        self.fds.extend(fds);
        meter.check()?;
        if is_truncated {
            return Err(SocketError::TooManyFds);
        }
        if bytes.is_empty() {
            let between = self.bytes.is_empty() && self.header.is_none();
            return Err(if between { SocketError::Closed } else { SocketError::ClosedInMessage });
        }
        if self.fds.len() > TABLE_REGIONS_MAX {
            return Err(SocketError::TooManyFds);
        }
        self.bytes.extend_from_slice(&bytes);
        Ok(())
    }

    /// Reserves room for the descriptors of the next bytes. Returns the reservation, and how many
    /// bytes may be received with it. `None`: there are no bytes.
    ///
    /// If other sessions have taken all room, bytes without descriptors are received nevertheless,
    /// so that the session can continue, stop its queues and end, which frees its own descriptors.
    /// Bytes with descriptors wait for room; if there is none in time, the session ends.
    async fn room_for(
        &self,
        missing: usize,
    ) -> Result<Option<(FdReservation, usize)>, SocketError> {
        if let Some(room) = FdReservation::at_once() {
            return Ok(Some((room, missing)));
        }
        let stream = &self.stream;
        match stream.try_io(Interest::READABLE, || peek_plain(stream.as_fd(), missing)) {
            Ok(Some(len)) => return Ok(Some((FdReservation::none(), len))),
            Ok(None) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            Err(error) => return Err(error.into()),
        }
        match tokio::time::timeout(MESSAGE_TIMEOUT, FdReservation::for_message()).await {
            Ok(room) => Ok(Some((room, missing))),
            Err(_) => Err(SocketError::NoRoom),
        }
    }

    /// Sends a whole message, and a file descriptor with its first bytes.
    ///
    /// # Errors
    /// [`SocketError::Stalled`]: the front-end has not read the message in time.
    /// [`SocketError::Io`]: the front-end has disconnected. The connection must be closed.
    pub(super) async fn send(
        &self,
        mut message: &[u8],
        mut fd: Option<OwnedFd>,
    ) -> Result<(), SocketError> {
        let sending = async {
            while !message.is_empty() {
                let stream: &UnixStream = &self.stream;
                let send = || send_once(stream.as_fd(), message, fd.as_ref());
                let n = stream.async_io(Interest::WRITABLE, send).await?;
                message = &message[n..];
                fd = None;
            }
            Ok::<(), SocketError>(())
        };
        match tokio::time::timeout(MESSAGE_TIMEOUT, sending).await {
            Ok(result) => result,
            Err(_) => Err(SocketError::Stalled),
        }
    }
}

/// Makes one call of `sendmsg`, without waiting. The fd goes with the first byte.
fn send_once(stream: impl AsFd, bytes: &[u8], fd: Option<&OwnedFd>) -> io::Result<usize> {
    let fds: Vec<_> = fd.map(AsFd::as_fd).into_iter().collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&fds));
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    Ok(rustix::net::sendmsg(stream, &[IoSlice::new(bytes)], &mut control, flags)?)
}

/// The bytes and file descriptors of one recvmsg.
struct Received {
    bytes: Vec<u8>,
    /// The caller makes `ForeignFd`s of these before it does anything else, so that none is closed
    /// on this thread.
    fds: Vec<OwnedFd>,
    /// True if the kernel has dropped descriptors: too many came, or `RLIMIT_NOFILE` was reached.
    is_truncated: bool,
}

/// Returns how many of the next bytes have no file descriptors, at most `missing`; `None`: they
/// have some.
///
/// Peeks without space for control messages: the kernel then reports by `MSG_CTRUNC` that there are
/// descriptors.
fn peek_plain(stream: impl AsFd, missing: usize) -> io::Result<Option<usize>> {
    let mut bytes = vec![0; missing];
    let mut control = RecvAncillaryBuffer::default();
    let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
    let mut slices = [IoSliceMut::new(&mut bytes)];
    match rustix::net::recvmsg(stream, &mut slices, &mut control, flags) {
        Err(Errno::CONNRESET) => Ok(Some(0)),
        received => {
            let received = received?;
            let has_fds = received.flags.contains(ReturnFlags::CTRUNC);
            Ok((!has_fds).then_some(received.bytes))
        }
    }
}

/// Makes one call of `recvmsg` for at most `missing` bytes, without waiting.
fn receive_once(stream: impl AsFd, missing: usize) -> io::Result<Received> {
    let mut bytes = vec![0; missing];
    // The buffer holds as many descriptors as the kernel allows in a message. The kernel would
    // close all others on this thread, and such a close may block.
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MESSAGE_FDS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let mut slices = [IoSliceMut::new(&mut bytes)];
    let received = rustix::net::recvmsg(stream, &mut slices, &mut control, flags);
    let (len, is_truncated) = match received {
        Err(Errno::CONNRESET) => (0, false),
        other => other.map(|r| (r.bytes, r.flags.contains(ReturnFlags::CTRUNC)))?,
    };
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    bytes.truncate(len);
    Ok(Received { bytes, fds, is_truncated })
}

/// True if the front-end has closed its end. The session may not have noticed this yet, because it
/// still handles an earlier message.
pub(super) fn has_left(stream: &UnixStream) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut fds = [PollFd::new(stream, PollFlags::RDHUP)];
    let polled = poll(&mut fds, Some(&Timespec::default()));
    polled.is_ok() && fds[0].revents().intersects(PollFlags::RDHUP | PollFlags::HUP)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vhost_user::pace::{CREDIT, SHARE};
    use manyring_wire::vhost_user::FLAG_VERSION;
    use std::cell::Cell;
    use std::io::Write;

    /// Each step takes as much CPU time as a front-end may take at once, and the clock is read
    /// twice for it.
    fn dear() -> Duration {
        thread_local!(static READ: Cell<u32> = const { Cell::new(0) });
        READ.set(READ.get() + 1);
        CREDIT * READ.get()
    }

    #[test]
    fn each_piece_of_a_message_waits_until_those_before_it_are_paid_for() {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        runtime.enable_all().start_paused(true).build().unwrap().block_on(async {
            let (mut theirs, ours) = std::os::unix::net::UnixStream::pair().unwrap();
            ours.set_nonblocking(true).unwrap();
            let janitor = Arc::new(Janitor::of("test"));
            let stream =
                ForeignStream::new(UnixStream::from_std(ours).unwrap().into(), janitor.clone());
            let mut connection = Connection::new(Arc::new(stream), Origin::new(janitor.clone()));
            let meter = Meter::new("test", dear, janitor);
            let payload = [7; 2 * PIECE + 1];
            let size = u32::try_from(payload.len()).unwrap();
            let header = Header { request: 25, flags: FLAG_VERSION, size }.emit();
            theirs.write_all(&[&header[..], &payload].concat()).unwrap();
            let began = Instant::now();
            let message = connection.receive(None, &meter).await.unwrap();
            assert_eq!(message.payload, payload);
            // The header is read on credit. Three pieces follow, and only the last is not paid for.
            let paid = began.elapsed() / SHARE;
            assert!(paid >= 2 * CREDIT && paid < 3 * CREDIT, "{paid:?}");
        });
    }
}
