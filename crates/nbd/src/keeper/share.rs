//! `Share`: a thread that carries the commands of several queues on one connection, for a server
//! that takes fewer connections than the disk has queues.
//!
//! ```text
//! queue -- pair of sockets --> the thread marks each command -----> connection to the server
//! queue <- pair of sockets --- the thread finds whose it is <------ replies
//! ```
//! A queue knows nothing of this: its end of the pair is a connection like any other, so a queue
//! with a connection of its own pays nothing, and a queue that shares one moves between workers as
//! any other does. The connection ends or the server breaks the protocol: the thread closes all
//! pairs, and each queue asks for a connection and sends its requests again, as it always does. A
//! queue that leaves a silent server closes its end with commands in flight: then the connection
//! ends as well, because the server must end those commands before they are sent again.
//!
//! A server or a queue that does not read holds up the other side: nothing is read for it beyond
//! [`UNSENT_MAX`].

use super::Keeper;
use crate::channel::Channel;
use crate::session::Broken;
use manyring_backend::sys::uring::Stream;
use manyring_wire::nbd::{Export, Message, Relay};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::sync::{Arc, Mutex, PoisonError};

/// While this many bytes wait to be sent in one direction, no more are read for it.
const UNSENT_MAX: usize = 1 << 20;
/// Bytes that one receive takes.
const RECEIVE: usize = 64 << 10;

/// An order of the keeper to the thread.
#[derive(Debug)]
enum Order {
    Member(OwnedFd),
    Server(Box<Channel>),
    End,
}

/// A shared connection, as the keeper sees it. The keeper gives orders under its lock alone.
#[derive(Debug)]
pub(super) struct Share {
    /// The export, as the server has offered it on this connection.
    pub(super) export: Export,
    orders: Mutex<Vec<Order>>,
    wake: OwnedFd,
}

impl Share {
    /// Starts the thread, which waits for members and for [`Self::serve`].
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`, `ENOMEM` or `EAGAIN`: the host has no descriptor or thread for it.
    pub(super) fn start(keeper: &Arc<Keeper>, export: Export) -> Result<Arc<Self>, Errno> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let share = Arc::new(Self { export, orders: Mutex::default(), wake });
        let carrier = Carrier {
            share: share.clone(),
            server: None,
            members: Vec::new(),
            relay: Relay::default(),
            latest: 0,
        };
        let keeper = keeper.clone();
        let thread = std::thread::Builder::new().name("disk-nbd-share".to_owned());
        let spawned = thread.spawn(move || carrier.run(&keeper));
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

    /// Ends the thread: the queues lose their connections, and ask for others.
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

/// A queue that shares the connection: the thread's end of its pair.
struct Member {
    number: u16,
    stream: Stream,
    has_ended: bool,
}

/// The state of the thread.
struct Carrier {
    share: Arc<Share>,
    server: Option<Channel>,
    members: Vec<Member>,
    relay: Relay,
    /// The number of the latest member.
    latest: u16,
}

impl Carrier {
    fn run(mut self, keeper: &Keeper) {
        let end = loop {
            if let Err(reason) = self.turn() {
                break reason;
            }
            if self.members.is_empty() && keeper.end_share(&self.share) {
                self.server.iter_mut().for_each(Channel::leave);
                return;
            }
        };
        // The connection ends before its queues hear of it, and send their requests again.
        drop(self.server.take());
        keeper.lost_share(&self.share, &end);
    }

    /// Waits for something to do, and does it.
    ///
    /// # Errors
    /// Why the connection is over.
    fn turn(&mut self) -> Result<(), String> {
        let came = self.wait().map_err(|errno| errno.to_string())?;
        for order in self.share.take() {
            match order {
                Order::Member(socket) => self.admit(socket),
                Order::Server(server) => self.server = Some(*server),
                Order::End => return Err("the connection of a queue, to be shared, is lost".into()),
            }
        }
        let Some(server) = &mut self.server else { return Ok(()) };
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
            return Err("a queue has waited for too long for its answer".into());
        }
        members.retain(|member| !member.has_ended);
        Ok(())
    }

    fn admit(&mut self, socket: OwnedFd) {
        // Numbers from 1 on, of which a disk has fewer queues.
        self.latest = self.latest % (u16::MAX - 1) + 1;
        while self.members.iter().any(|member| member.number == self.latest) {
            self.latest = self.latest % (u16::MAX - 1) + 1;
        }
        let stream = Stream::new(socket);
        self.members.push(Member { number: self.latest, stream, has_ended: false });
    }

    /// Waits. Returns the numbers of the members from which bytes have come, and [`SERVER`].
    fn wait(&self) -> Result<Vec<u16>, Errno> {
        let mut fds = vec![PollFd::new(&self.share.wake, PollFlags::IN)];
        let mut numbers = vec![WAKE];
        if let Some(server) = &self.server {
            let has_room = |member: &Member| member.stream.unsent() < UNSENT_MAX;
            let is_read = self.members.iter().all(has_room);
            let members = self
                .members
                .iter()
                .map(|member| (member.number, &member.stream, server.stream.unsent() < UNSENT_MAX));
            for (number, stream, is_read) in members.chain([(SERVER, &server.stream, is_read)]) {
                let mut events = PollFlags::empty();
                events.set(PollFlags::IN, is_read);
                events.set(PollFlags::OUT, stream.unsent() > 0);
                if !events.is_empty() {
                    fds.push(PollFd::from_borrowed_fd(stream.socket(), events));
                    numbers.push(number);
                }
            }
        }
        match poll(&mut fds, None) {
            Err(Errno::INTR) => return Ok(Vec::new()),
            found => found?,
        };
        let _ = rustix::io::read(&self.share.wake, &mut [0; 8]);
        let came = |fd: &PollFd<'_>| {
            let wanted = PollFlags::IN | PollFlags::HUP | PollFlags::ERR;
            fd.revents().intersects(wanted)
        };
        let ready = fds.iter().zip(numbers).filter(|(fd, _)| came(fd));
        Ok(ready.map(|(_, number)| number).collect())
    }
}

/// In the place of a member's number: the connection to the server, and the thread's eventfd.
const SERVER: u16 = 0;
const WAKE: u16 = u16::MAX;

/// Sends what the members have written, and gives each the replies that have come for it.
fn carry(
    server: &mut Channel,
    members: &mut [Member],
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
