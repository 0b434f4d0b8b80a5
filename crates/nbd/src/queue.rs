//! `NbdQueue`: a queue of the disk, and its connection.
//!
//! ```text
//! Down      no connection: requests wait, and the reconnector was asked for a connection
//!           news: Joined -> Up, and every request that waits is sent, in order
//!                 GaveUp -> requests fail until there is a connection again
//! Up        the commands of a turn are sent by one send; one receive is submitted while replies
//!           are pending
//!           news: Joined -> no more commands are sent; after the last reply the queue switches to
//!                 the new connection, and hands the old one to `reconnector.rs`, for sharing
//!           the server closes it, breaks the protocol, or is silent for too long -> Closing
//! Closing   the socket is shut down, and the submitted send and receive complete -> Down
//! ```
//! With an io_uring, send and receive are entries of the ring, and each completion is an event of
//! the queue. Without one, the queue calls both itself, without blocking, and an epoll of its own
//! wakes its worker (`WatchedSocket`).
//!
//! **No send or receive is submitted while no request is in flight**, so that an idle queue can
//! move to another worker: a receive is submitted only while replies are pending, and the last
//! completion is held back until the send has completed, since a server may answer a command before
//! it has read all of it.

use super::channel::Channel;
use super::join::JoinedConnection;
use super::queue_connection::{ConnectionCounts, News, QueueConnection, QueueInbox};
use super::reconnector::{Reconnector, TICKS};
use super::session::NbdSession;
use super::watched_socket::WatchedSocket;
use manyring_backend::blk::{Burst, Completion, DiskQueue};
use manyring_backend::sys::uring::Ring;
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Tokens of the ring's events that belong to the connection and to no request.
const NEWS: u32 = u32::MAX;
const SEND: u32 = u32::MAX - 1;
const RECEIVE: u32 = u32::MAX - 2;

/// The most bytes that a turn copies for a send, and takes from a receive. A queue whose worker
/// serves other guests too gets the smaller bound.
const ROOM: usize = 256 << 10;
const ROOM_SHARED: usize = 64 << 10;

/// The state of the queue's connection; the module's documentation shows the transitions.
#[derive(Debug)]
enum QueueLink {
    Down,
    Up(Channel),
    Closing(Channel, String),
}

/// A queue of an NBD disk, and its connection to the server.
#[derive(Debug)]
pub(super) struct NbdQueue {
    reconnector: Arc<Reconnector>,
    line: Arc<QueueConnection>,
    session: NbdSession,
    link: QueueLink,
    /// The connection to which the queue switches once every command is answered.
    next: Option<JoinedConnection>,
    /// True if the server has answered at least once on this connection.
    has_answered: bool,
    /// True if new requests fail at once, because the server was unreachable longer than
    /// `reconnect`.
    fails: bool,
    /// For how many ticks in a row a send has not completed, although no request waits for a reply.
    stalled: u32,
    /// Completions that [`DiskQueue::reap`] has not returned yet.
    ready: Vec<Completion>,
    tag: u64,
    /// The epoll that a worker without an io_uring watches instead of the socket.
    watched: Option<WatchedSocket>,
}

impl NbdQueue {
    /// A new queue. It has asked the reconnector for a connection.
    pub(super) fn new(reconnector: Arc<Reconnector>, has_ring: bool) -> Result<Self, Errno> {
        let watched = if has_ring { None } else { Some(WatchedSocket::new()?) };
        let seat =
            |watched: &WatchedSocket| QueueInbox { inbox: watched.inbox().clone(), user_data: 0 };
        let line = reconnector.add(watched.as_ref().map(seat));
        Ok(Self {
            session: NbdSession::new(&reconnector.told()),
            reconnector,
            line,
            link: QueueLink::Down,
            next: None,
            has_answered: false,
            fails: false,
            stalled: 0,
            ready: Vec::new(),
            tag: 0,
            watched,
        })
    }

    /// Handles the news of the reconnector, if there are any.
    fn hear(&mut self) {
        // News for another state of the link are stale, and are dropped: the connection in them is
        // closed, and `close` asks for another one.
        match (self.line.take(), &self.link) {
            (Some(News::Joined(joined)), QueueLink::Down) => self.go_up(joined),
            (Some(News::Joined(joined)), QueueLink::Up(_)) => self.next = Some(joined),
            (Some(News::GaveUp), QueueLink::Down) => {
                self.fails = true;
                self.session.end_all(Errno::IO, &mut self.ready, |_| true);
            }
            _ => {}
        }
    }

    /// Starts to use a new connection: all requests are sent again on it.
    fn go_up(&mut self, joined: JoinedConnection) {
        // The export first: its flags and block sizes decide how the requests are written again.
        self.session.start_again(&joined.export);
        let JoinedConnection { channel, is_shared, .. } = joined;
        if let Some(watched) = &self.watched
            && let Err(errno) = watched.watch(channel.stream.socket())
        {
            self.reconnector.ask(&self.line, false, &format!("cannot watch it: {errno}"));
            return;
        }
        self.link = QueueLink::Up(channel);
        (self.has_answered, self.fails) = (false, false);
        self.line.counts.shared.store(is_shared, Ordering::Relaxed);
        self.line.counts.connected.store(true, Ordering::Relaxed);
    }

    /// Switches to the next connection, if there is one and nothing is in flight on the present
    /// one. Returns true if it has switched.
    fn go_over(&mut self) -> bool {
        let QueueLink::Up(channel) = &self.link else { return false };
        if self.session.awaits_reply() || channel.stream.is_busy() || channel.stream.unsent() > 0 {
            return false;
        }
        let Some(next) = self.next.take() else { return false };
        if let Some(watched) = &self.watched {
            watched.unwatch(channel.stream.socket());
        }
        if let QueueLink::Up(channel) = std::mem::replace(&mut self.link, QueueLink::Down) {
            self.reconnector.release(&self.line, channel);
        }
        let has_answered = self.has_answered;
        self.go_up(next);
        // The next connection is to the same server, which has just answered on the old one.
        self.has_answered = has_answered;
        true
    }

    /// At a tick, ends a connection on which a request has waited for its answer for too long.
    fn look_at_the_time(&mut self) {
        let is_overdue = self.session.is_overdue(self.line.now(), TICKS);
        let QueueLink::Up(Channel { stream, .. }) = &self.link else { return };
        let is_stalled = stream.is_sending() && self.session.in_flight() == 0;
        self.stalled = if is_stalled { self.stalled + 1 } else { 0 };
        if is_overdue || self.stalled > TICKS {
            let seconds = self.reconnector.options.request_timeout.as_secs();
            self.lose(format!("no answer to a request for {seconds} s"));
        }
    }

    /// Ends the connection: shuts the socket, and keeps the reason for the log.
    fn lose(&mut self, reason: String) {
        self.link = match std::mem::replace(&mut self.link, QueueLink::Down) {
            QueueLink::Up(channel) => {
                channel.stream.shut();
                self.line.counts.connected.store(false, Ordering::Relaxed);
                QueueLink::Closing(channel, reason)
            }
            // Keep the first reason: it is the one that the log names.
            link => link,
        };
    }

    /// Drops a lost connection once its send and receive have completed, and asks the reconnector
    /// for another one.
    fn close(&mut self) {
        let QueueLink::Closing(Channel { stream, .. }, _) = &self.link else { return };
        if stream.is_busy() {
            return;
        }
        if let Some(watched) = &self.watched {
            watched.unwatch(stream.socket());
        }
        let QueueLink::Closing(_, reason) = std::mem::replace(&mut self.link, QueueLink::Down)
        else {
            return;
        };
        self.stalled = 0;
        // A second connection that was meant for the switch is dropped too: the reconnector counts
        // one connection for each queue, and is asked for a new one below.
        self.next = None;
        self.session.forget_commands();
        // The device waits for these requests to come back, to return them to the guest's ring.
        // They must not be sent again on the next connection.
        self.session.end_all(Errno::CANCELED, &mut self.ready, |asked| asked.is_recalled);
        ConnectionCounts::add(&self.line.counts.losses, 1);
        self.reconnector.ask(&self.line, self.has_answered, &reason);
    }

    /// Submits a send of the written commands, and a receive while replies are pending.
    fn go_on(&mut self, ring: &mut Ring) {
        // In this order: a closed connection must not be sent on, and a switch needs an idle one.
        self.close();
        if self.next.is_some() {
            self.go_over();
        }
        if self.fails {
            self.session.end_all(Errno::IO, &mut self.ready, |_| true);
        }
        let QueueLink::Up(channel) = &mut self.link else { return };
        let room = if ring.is_shared() { ROOM_SHARED } else { ROOM };
        if !channel.stream.is_sending() {
            // Before a switch, only the replies of the written commands are awaited.
            let leaves = self.next.is_some();
            let emitted = if leaves { Ok(0) } else { channel.emit(&mut self.session, room) };
            if let Err(broken) = emitted {
                self.lose(format!("it {broken}"));
                return self.close();
            }
            let stream = &mut channel.stream;
            let bytes = stream.out().len();
            // The copy into `out` and the kernel's copy are charged to the guest whose turn it is.
            let _ = ring.take_inline(bytes as u64);
            stream.start_send(ring, self.tag | u64::from(SEND));
        }
        if self.session.awaits_reply() {
            channel.stream.start_receive(ring, room, self.tag | u64::from(RECEIVE));
        }
    }

    /// Handles the completion of a send.
    fn sent(&mut self, result: i32) {
        let (QueueLink::Up(channel) | QueueLink::Closing(channel, _)) = &mut self.link else {
            return;
        };
        let ended = channel.stream.sent(result);
        if let Ok(n) = usize::try_from(result) {
            ConnectionCounts::add(&self.line.counts.sent, n);
        }
        if let Err(errno) = ended {
            self.lose(format!("it has ended the connection ({errno})"));
        }
    }

    /// Handles the completion of a receive.
    fn received(&mut self, result: i32) {
        let (QueueLink::Up(channel) | QueueLink::Closing(channel, _)) = &mut self.link else {
            return;
        };
        match channel.stream.received(result) {
            Err(errno) => self.lose(format!("it has ended the connection ({errno})")),
            Ok(()) => {
                ConnectionCounts::add(
                    &self.line.counts.received,
                    usize::try_from(result).unwrap_or(0),
                );
                self.take();
            }
        }
    }

    /// Handles the received replies.
    fn take(&mut self) {
        let QueueLink::Up(channel) = &mut self.link else { return };
        let before = self.ready.len();
        match channel.take(&mut self.session, &mut self.ready) {
            Ok(()) if self.has_answered || self.ready.len() == before => {}
            Ok(()) => {
                self.has_answered = true;
                self.reconnector.answered();
            }
            Err(broken) => self.lose(format!("it {broken}")),
        }
    }

    /// True while a send or receive of the connection is submitted and has not completed.
    fn is_busy(&self) -> bool {
        match &self.link {
            QueueLink::Down => false,
            QueueLink::Up(channel) | QueueLink::Closing(channel, _) => channel.stream.is_busy(),
        }
    }

    /// Moves completions to `done`. While a send or receive is submitted and no other request is in
    /// flight, they are held back: see the module's documentation.
    fn hand_out(&mut self, done: &mut Vec<Completion>) {
        let is_busy = self.is_busy();
        let in_flight = self.session.in_flight();
        let counts = &self.line.counts;
        counts.in_flight.store(in_flight as u64, Ordering::Relaxed);
        self.line.is_busy.store(in_flight > 0 || is_busy, Ordering::Relaxed);
        if in_flight > 0 || !is_busy {
            done.append(&mut self.ready);
        }
    }

    /// Without an io_uring: sends and receives as much as possible without blocking. Returns true
    /// if the queue should be called again at once.
    fn go_on_here(&mut self) -> bool {
        self.close();
        let is_new = self.next.is_some() && self.go_over();
        if self.fails {
            self.session.end_all(Errno::IO, &mut self.ready, |_| true);
        }
        let QueueLink::Up(channel) = &mut self.link else { return false };
        let mut wrote = 0;
        if channel.stream.out().is_empty() && self.next.is_none() {
            match channel.emit(&mut self.session, ROOM_SHARED) {
                Ok(count) => wrote = count,
                Err(broken) => {
                    self.lose(format!("it {broken}"));
                    self.close();
                    return false;
                }
            }
            let stream = &mut channel.stream;
            ConnectionCounts::add(&self.line.counts.sent, stream.out().len());
        }
        let stream = &mut channel.stream;
        let moved = stream.send_now().and_then(|is_full| {
            let came = self.session.in_flight() > 0 && stream.receive_now(ROOM_SHARED)?;
            Ok((is_full, came))
        });
        let before = stream.bytes().len();
        match moved {
            Err(errno) => {
                self.lose(format!("it has ended the connection ({errno})"));
                self.close();
                false
            }
            Ok((is_full, came)) => {
                if came {
                    ConnectionCounts::add(&self.line.counts.received, before);
                    self.take();
                }
                self.close();
                // If the socket's buffer or the table of commands is full, a later event continues.
                let has_more = wrote > 0 && self.session.has_unwritten() && !is_full;
                came || is_new || has_more && matches!(self.link, QueueLink::Up(_))
            }
        }
    }
}

impl DiskQueue for NbdQueue {
    fn attach(&mut self, ring: Option<&mut Ring>, tag: u64) {
        self.tag = tag;
        if let (Some(ring), None) = (ring, &self.watched) {
            let user_data = tag | u64::from(NEWS);
            self.line.sit(Some(QueueInbox { inbox: ring.inbox().clone(), user_data }));
        }
        self.hear();
        // News that came while the queue moved have woken nobody. Nothing is in flight, so the
        // queue can switch to a new connection at once.
        self.go_over();
    }

    fn detach(&mut self, _ring: Option<&mut Ring>) {
        if self.watched.is_none() {
            self.line.sit(None);
        }
    }

    fn submit(&mut self, burst: &Burst, ring: Option<&mut Ring>, done: &mut Vec<Completion>) {
        for (request, pieces) in burst.iter() {
            self.ready.extend(self.session.begin(request, pieces));
        }
        match ring {
            Some(ring) if self.watched.is_none() => self.go_on(ring),
            // Without an io_uring, the worker calls `reap` next, which sends.
            _ => {}
        }
        self.hand_out(done);
    }

    fn release_memory(&mut self) {
        self.session.release_memory();
    }

    fn on_event(
        &mut self,
        token: u32,
        result: i32,
        ring: Option<&mut Ring>,
        done: &mut Vec<Completion>,
    ) {
        let Some(ring) = ring else { return };
        match token {
            NEWS => {
                self.hear();
                self.look_at_the_time();
            }
            SEND => self.sent(result),
            RECEIVE => self.received(result),
            _ => return,
        }
        self.go_on(ring);
        self.hand_out(done);
    }

    fn recall(&mut self, token: u32, _ring: Option<&mut Ring>) -> bool {
        // The last request must stay in flight while a send or receive is submitted: see the
        // module's documentation.
        let is_last = self.session.in_flight() == 1 && self.ready.is_empty();
        self.session.recall(token, is_last && self.is_busy())
    }

    fn readiness(&self) -> Option<BorrowedFd<'_>> {
        self.watched.as_ref().map(WatchedSocket::readiness)
    }

    fn reap(&mut self, done: &mut Vec<Completion>) -> bool {
        let Some(watched) = &mut self.watched else { return false };
        if watched.take() {
            self.hear();
            self.look_at_the_time();
        }
        let has_more = self.go_on_here();
        self.hand_out(done);
        has_more
    }
}

impl Drop for NbdQueue {
    fn drop(&mut self) {
        self.line.sit(None);
        self.reconnector.remove(&self.line);
        if let QueueLink::Up(channel) = &mut self.link
            && !channel.stream.is_busy()
        {
            channel.leave();
        }
    }
}
