//! `Share`: a thread that carries the commands of several queues on one connection, for a server
//! that takes fewer connections than the disk has queues.
//!
//! ```text
//! queue -- socketpair --> the thread puts the queue's number   --> connection to the server
//!                         into the cookie of each command
//! queue <- socketpair --- the thread finds the queue of each   <-- replies
//!                         reply by its cookie
//! ```
//! A queue does not know that it shares: its end of the socketpair is used like a connection. So
//! sharing costs nothing for queues with connections of their own, and a queue that shares one can
//! move between workers like any other. When the connection ends, or the server breaks the
//! protocol, the thread closes all socketpairs; each queue then asks for a connection and sends its
//! requests again, as after any loss. A queue that gives up on a silent server closes its end with
//! commands in flight: then the thread closes the connection too, because the server must drop
//! those commands before they are sent again. The thread notices the closed end even while the
//! server reads nothing.
//!
//! While [`UNSENT_MAX`] bytes wait for the server to read them, the thread reads no commands from
//! the queues. While as many bytes wait for one queue to read them, the thread reads no replies
//! from the server.

use super::Reconnector;
use crate::channel::Channel;
use crate::session::Broken;
use manyring_backend::sys::starter::{self, ThreadRole};
use manyring_backend::sys::uring::Stream;
use manyring_wire::nbd::{Command, CommandKind, Export, Message, Relay};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::sync::{Arc, Mutex, PoisonError};

/// If so many bytes wait to be sent in one direction, no more bytes are read for it.
const UNSENT_MAX: usize = 1 << 20;
/// The most bytes of one receive.
const RECEIVE: usize = 64 << 10;

/// An order of the reconnector to the thread.
#[derive(Debug)]
enum Order {
    Member(OwnedFd),
    Server(Box<Channel>),
    End,
}

/// The reconnector's handle of a shared connection and its thread. The reconnector gives orders
/// only under its own lock.
#[derive(Debug)]
pub(super) struct Share {
    /// The export that the server has offered on this connection.
    pub(super) export: Export,
    orders: Mutex<Vec<Order>>,
    wake: OwnedFd,
}

impl Share {
    /// Starts the thread, which waits for members and for [`Self::serve`].
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`, `ENOMEM` or `EAGAIN`: the host has no descriptor or thread for it.
    pub(super) fn start(
        reconnector: &Arc<Reconnector>,
        export: Export,
    ) -> Result<Arc<Self>, Errno> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let share = Arc::new(Self { export, orders: Mutex::default(), wake });
        let carrier = ShareThread {
            share: share.clone(),
            server: None,
            members: Vec::new(),
            relay: Relay::default(),
            latest: 0,
        };
        let reconnector = reconnector.clone();
        let thread = std::thread::Builder::new().name("disk-nbd-share".to_owned());
        let spawned = starter::spawn(ThreadRole::Server, thread, move || carrier.run(&reconnector));
        spawned.map(|_| share).map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::AGAIN))
    }

    /// Adds a queue. Returns the queue's end of the pair.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE` or `ENOMEM`: the host has no descriptor for it.
    pub(super) fn add(&self) -> Result<OwnedFd, Errno> {
        let (kind, flags) = (SocketType::STREAM, SocketFlags::CLOEXEC);
        let (ours, of_queue) = socketpair(AddressFamily::UNIX, kind, flags, None)?;
        self.order(Order::Member(ours));
        Ok(of_queue)
    }

    /// Gives the thread its connection to the server.
    pub(super) fn serve(&self, server: Channel) {
        self.order(Order::Server(Box::new(server)));
    }

    /// Ends the thread: its queues lose their connection, and ask the reconnector for another.
    pub(super) fn end(&self) {
        self.order(Order::End);
    }

    fn order(&self, order: Order) {
        self.orders.lock().unwrap_or_else(PoisonError::into_inner).push(order);
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    fn take(&self) -> Vec<Order> {
        std::mem::take(&mut *self.orders.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// True if the thread has taken every order.
    pub(super) fn is_obeyed(&self) -> bool {
        self.orders.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }
}

/// A queue that shares the connection, with the thread's end of the queue's socketpair.
struct SharingQueue {
    number: u16,
    stream: Stream,
    has_ended: bool,
}

/// The logged reason when a queue has closed its socketpair with commands in flight.
const OVERDUE: &str = "a queue has waited for too long for its answer";

impl SharingQueue {
    /// True if a command of the queue, which has closed its end, is not answered. The command may
    /// still be unread in the socketpair, because the thread reads none while the server is slow.
    fn has_unanswered(&mut self, relay: &Relay) -> bool {
        if self.stream.bytes().is_empty() {
            // An error means that no bytes are left to read.
            let _ = self.stream.receive_now(RECEIVE);
        }
        let unread = self.stream.bytes().first_chunk().and_then(Command::parse);
        relay.is_waiting(self.number)
            || unread.is_some_and(|command| command.kind != CommandKind::Disconnect)
    }
}

/// The state of the thread.
struct ShareThread {
    share: Arc<Share>,
    server: Option<Channel>,
    members: Vec<SharingQueue>,
    relay: Relay,
    /// The number that the latest member got.
    latest: u16,
}

impl ShareThread {
    fn run(mut self, reconnector: &Reconnector) {
        let end = loop {
            if let Err(reason) = self.turn() {
                break reason;
            }
            if self.members.is_empty() && reconnector.end_share(&self.share) {
                self.server.iter_mut().for_each(Channel::leave);
                return;
            }
        };
        // Close the connection to the server before the queues' ends are closed (when `self` is
        // dropped): the queues then send their requests again, and the server must have dropped the
        // old commands.
        drop(self.server.take());
        reconnector.lost_share(&self.share, &end);
    }

    /// Waits for an order or for bytes, and handles them.
    ///
    /// # Errors
    /// Why the connection must be closed, for the log.
    fn turn(&mut self) -> Result<(), String> {
        let (came, ended) = self.wait().map_err(|errno| errno.to_string())?;
        for order in self.share.take() {
            match order {
                Order::Member(socket) => self.admit(socket),
                Order::Server(server) => self.server = Some(*server),
                Order::End => return Err("the connection of a queue, to be shared, is lost".into()),
            }
        }
        let (mut gone, members) = std::mem::take(&mut self.members)
            .into_iter()
            .partition::<Vec<_>, _>(|member| ended.contains(&member.number));
        self.members = members;
        // Before there is a server, a member that leaves has sent nothing on: it is just dropped.
        let Some(server) = &mut self.server else { return Ok(()) };
        if gone.iter_mut().any(|member| member.has_unanswered(&self.relay)) {
            return Err(OVERDUE.to_owned());
        }
        for member in &mut self.members {
            let (number, mut has_come) = (member.number, came.contains(&member.number));
            while server.stream.unsent() < UNSENT_MAX && !member.has_ended {
                match self.relay.command(number, member.stream.bytes(), server.plain_out()) {
                    Message::Command(len) => member.stream.consume(len),
                    Message::Ends => member.has_ended = true,
                    Message::Needs if !std::mem::take(&mut has_come) => break,
                    Message::Needs => {
                        member.has_ended = member.stream.receive_now(RECEIVE).is_err();
                    }
                }
            }
        }
        let (members, relay) = (&mut self.members, &mut self.relay);
        carry(server, members, relay, came.contains(&SERVER))?;
        for member in members.iter_mut().filter(|member| member.stream.unsent() > 0) {
            member.has_ended |= member.stream.send_now().is_err();
        }
        if members.iter().any(|member| member.has_ended && relay.is_waiting(member.number)) {
            return Err(OVERDUE.to_owned());
        }
        members.retain(|member| !member.has_ended);
        Ok(())
    }

    fn admit(&mut self, socket: OwnedFd) {
        // Numbers are 1 to 65534: 0 is `SERVER`, and `u16::MAX` is `WAKE`. A disk has fewer queues,
        // so a free number is found.
        self.latest = self.latest % (u16::MAX - 1) + 1;
        while self.members.iter().any(|member| member.number == self.latest) {
            self.latest = self.latest % (u16::MAX - 1) + 1;
        }
        let stream = Stream::new(socket);
        self.members.push(SharingQueue { number: self.latest, stream, has_ended: false });
    }

    /// Polls the eventfd, the members and the server. Returns the numbers of those that are
    /// readable ([`SERVER`] for the server), and the numbers of those that have closed their ends.
    fn wait(&self) -> Result<(Vec<u16>, Vec<u16>), Errno> {
        let mut fds = vec![PollFd::new(&self.share.wake, PollFlags::IN)];
        let mut numbers = vec![WAKE];
        let has_room = |stream: &Stream| stream.unsent() < UNSENT_MAX;
        let is_sent = self.server.as_ref().is_some_and(|server| has_room(&server.stream));
        // Members are always polled, even with no events: poll(2) reports POLLHUP in any case.
        for SharingQueue { number, stream, .. } in &self.members {
            fds.push(watch(stream, is_sent));
            numbers.push(*number);
        }
        if let Some(server) = &self.server {
            let is_read = self.members.iter().all(|member| has_room(&member.stream));
            if is_read || server.stream.unsent() > 0 {
                fds.push(watch(&server.stream, is_read));
                numbers.push(SERVER);
            }
        }
        match poll(&mut fds, None) {
            Err(Errno::INTR) => return Ok(<_>::default()),
            found => found?,
        };
        let _ = rustix::io::read(&self.share.wake, &mut [0; 8]);
        let those = |wanted: PollFlags| -> Vec<u16> {
            let found = fds.iter().zip(&numbers).filter(|(fd, _)| fd.revents().intersects(wanted));
            found.map(|(_, number)| *number).collect()
        };
        let ended = PollFlags::HUP | PollFlags::ERR;
        Ok((those(PollFlags::IN | ended), those(ended)))
    }
}

/// An entry for `poll`: POLLIN if `is_read`, POLLOUT if bytes wait to be sent.
fn watch(stream: &Stream, is_read: bool) -> PollFd<'_> {
    let mut events = PollFlags::empty();
    events.set(PollFlags::IN, is_read);
    events.set(PollFlags::OUT, stream.unsent() > 0);
    PollFd::from_borrowed_fd(stream.socket(), events)
}

/// Numbers that stand for no member: the connection to the server, and the thread's eventfd.
const SERVER: u16 = 0;
const WAKE: u16 = u16::MAX;

/// Sends the members' commands to the server, and appends each reply to the output of its member.
fn carry(
    server: &mut Channel,
    members: &mut [SharingQueue],
    relay: &mut Relay,
    has_come: bool,
) -> Result<(), String> {
    let ended = |errno: Errno| format!("it has ended the connection ({errno})");
    let broken = |broken: Broken| format!("it {broken}");
    server.seal().map_err(broken)?;
    server.stream.send_now().map_err(ended)?;
    if !has_come || !server.stream.receive_now(RECEIVE).map_err(ended)? {
        return Ok(());
    }
    let opened = server.open().map_err(broken);
    loop {
        let taken = relay.reply(server.plain(), |client| {
            let member = members.iter_mut().find(|member| member.number == client);
            member.map(|member| member.stream.out())
        });
        let taken = taken.map_err(|fault| broken(fault.into()))?;
        if taken == 0 {
            return opened;
        }
        server.consume(taken);
    }
}
