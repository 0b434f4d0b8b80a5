//! The task that owns a connection to xenstore: it sends requests, and hands out replies and
//! events.

use super::watch::WatchState;
use super::{StoreEndpoint, StoreError};
use manyring_wire::xen::store::{Answer, ErrorName, Message, StoreOp, split};
use rustix::fd::OwnedFd;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::{Notify, OwnedSemaphorePermit, mpsc, oneshot};

/// The most requests that wait for their replies; until a reply comes, no further request is sent.
const AWAITED_MAX: usize = 1024;
/// Bytes that are read at a time.
const READ_SIZE: usize = 8192;

/// A request to be sent.
#[derive(Debug)]
pub(super) struct Order {
    /// The whole message.
    pub(super) message: Vec<u8>,
    /// The id of the request, which its reply carries too.
    pub(super) req_id: u32,
    /// The operation.
    pub(super) op: StoreOp,
    /// The sender to the task that waits for the reply; `None`: nobody needs the reply.
    pub(super) reply: Option<oneshot::Sender<Result<Vec<u8>, ErrorName>>>,
    /// The permit of a request that waits to be sent, which sending releases.
    pub(super) permit: Option<OwnedSemaphorePermit>,
}

/// The state that the handles of a connection share with its task.
#[derive(Debug, Default)]
pub(super) struct Table {
    last_id: AtomicU32,
    last_token: AtomicU32,
    watches: Mutex<BTreeMap<u32, Arc<WatchState>>>,
    /// The reason for which the connection is over; not set while it is open.
    end: OnceLock<String>,
    ended: Notify,
}

impl Table {
    /// Returns an id for the next request; never 0.
    pub(super) fn next_id(&self) -> u32 {
        self.last_id.fetch_add(1, Ordering::Relaxed) % (u32::MAX - 1) + 1
    }

    /// Adds a watch whose events are collected in `state`; returns the token of the watch.
    pub(super) fn add_watch(&self, state: Arc<WatchState>) -> u32 {
        let token = self.last_token.fetch_add(1, Ordering::Relaxed);
        self.watches().insert(token, state);
        token
    }

    pub(super) fn remove_watch(&self, token: u32) {
        self.watches().remove(&token);
    }

    fn watches(&self) -> std::sync::MutexGuard<'_, BTreeMap<u32, Arc<WatchState>>> {
        self.watches.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the reason for which the connection is over, if it is.
    pub(super) fn end(&self) -> Option<String> {
        self.end.get().cloned()
    }

    /// Returns the error for a caller that finds the connection over.
    pub(super) fn lost(&self) -> StoreError {
        StoreError::Lost(self.end().unwrap_or_else(|| "the connection was closed".to_owned()))
    }

    pub(super) async fn wait_end(&self) -> String {
        loop {
            let ended = self.ended.notified();
            tokio::pin!(ended);
            ended.as_mut().enable();
            if let Some(reason) = self.end() {
                return reason;
            }
            ended.await;
        }
    }

    fn set_end(&self, reason: String) {
        let _ = self.end.set(reason);
        self.ended.notify_waiters();
        for watch in self.watches().values() {
            watch.fired.notify_one();
        }
    }
}

/// Opens the endpoint without blocking.
#[allow(deprecated, reason = "its replacement is unsafe; an `OwnedFd` never changes its fd")]
pub(super) fn open(endpoint: &StoreEndpoint) -> Result<AsyncFd<OwnedFd>, std::io::Error> {
    let fd = match endpoint {
        StoreEndpoint::Socket(path) => {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
            let socket = rustix::net::socket_with(family, kind, flags, None)?;
            rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
            socket
        }
        StoreEndpoint::Device(path) => {
            let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
            rustix::fs::open(path, flags, Mode::empty())?
        }
    };
    AsyncFd::with_interest(fd, Interest::READABLE | Interest::WRITABLE)
}

/// Why a connection ends.
#[derive(Debug, thiserror::Error)]
enum ConnectionEnd {
    #[error("the server has closed the connection")]
    Closed,
    #[error("{0}")]
    Io(#[from] std::io::Error),
    #[error("{0}")]
    Message(#[from] manyring_wire::xen::store::StoreMessageError),
    #[error("the server sent an answer without a request ({name})")]
    Unasked { name: &'static str },
    #[error("the server answered {asked} with {answered}")]
    Other { asked: &'static str, answered: &'static str },
}

/// A request whose reply is awaited.
struct AwaitedReply {
    op: StoreOp,
    reply: Option<oneshot::Sender<Result<Vec<u8>, ErrorName>>>,
}

struct Connection {
    fd: AsyncFd<OwnedFd>,
    table: Arc<Table>,
    /// Messages to send, each by its own call of write: the device file takes one per call.
    output: VecDeque<Vec<u8>>,
    /// How many bytes of the first message in `output` were sent.
    sent: usize,
    /// Received bytes that are not a complete message yet.
    input: Vec<u8>,
    awaited: BTreeMap<u32, AwaitedReply>,
}

/// Serves the connection until it is over, or the last handle is dropped.
pub(super) async fn run(
    fd: AsyncFd<OwnedFd>,
    mut orders: mpsc::UnboundedReceiver<Order>,
    table: Arc<Table>,
) {
    let mut connection = Connection {
        fd,
        table: table.clone(),
        output: VecDeque::new(),
        sent: 0,
        input: Vec::new(),
        awaited: BTreeMap::new(),
    };
    let reason = match connection.serve(&mut orders).await {
        Ok(()) => "connection unused".to_owned(),
        Err(end) => end.to_string(),
    };
    // Set the reason before the replies are dropped: a caller whose reply is dropped reports it.
    table.set_end(reason);
}

impl Connection {
    async fn serve(
        &mut self,
        orders: &mut mpsc::UnboundedReceiver<Order>,
    ) -> Result<(), ConnectionEnd> {
        loop {
            let is_open = self.awaited.len() < AWAITED_MAX;
            let interest = match self.output.is_empty() {
                true => Interest::READABLE,
                false => Interest::READABLE | Interest::WRITABLE,
            };
            tokio::select! {
                order = orders.recv(), if is_open => match order {
                    Some(order) => self.take(order)?,
                    None => return Ok(()),
                },
                ready = self.fd.ready(interest) => {
                    let mut guard = ready?;
                    let ready = guard.ready();
                    // Clear only the readiness whose call failed with EAGAIN, so that `ready` waits
                    // for it.
                    let mut read = Vec::new();
                    if ready.is_readable() {
                        match read_some(self.fd.get_ref()) {
                            Ok(bytes) if bytes.is_empty() => return Err(ConnectionEnd::Closed),
                            Ok(bytes) => read = bytes,
                            Err(Errno::AGAIN) => {
                                guard.clear_ready_matching(tokio::io::Ready::READABLE);
                            }
                            Err(errno) => return Err(ConnectionEnd::Io(errno.into())),
                        }
                    }
                    if ready.is_writable() {
                        let sent = send_all(self.fd.get_ref(), &mut self.output, &mut self.sent);
                        match sent {
                            Err(Errno::AGAIN) => {
                                guard.clear_ready_matching(tokio::io::Ready::WRITABLE);
                            }
                            sent => sent.map_err(std::io::Error::from)?,
                        }
                    }
                    drop(guard);
                    self.input.extend_from_slice(&read);
                    self.receive()?;
                }
            }
        }
    }

    fn take(&mut self, order: Order) -> Result<(), ConnectionEnd> {
        let Order { message, req_id, op, reply, permit } = order;
        drop(permit);
        self.awaited.insert(req_id, AwaitedReply { op, reply });
        self.output.push_back(message);
        match send_all(self.fd.get_ref(), &mut self.output, &mut self.sent) {
            Ok(()) | Err(Errno::AGAIN) => Ok(()),
            Err(errno) => Err(ConnectionEnd::Io(errno.into())),
        }
    }

    /// Handles all complete messages of the input.
    fn receive(&mut self) -> Result<(), ConnectionEnd> {
        let mut input = std::mem::take(&mut self.input);
        let mut at = 0;
        while let Some(message) = split(&input[at..])? {
            self.hand_out(&message)?;
            at += message.size();
        }
        input.drain(..at);
        self.input = input;
        Ok(())
    }

    fn hand_out(&mut self, message: &Message<'_>) -> Result<(), ConnectionEnd> {
        let answer = Answer::parse(message)?;
        let (answered, result) = match answer {
            Answer::Event { watched, token } => {
                let token = std::str::from_utf8(token).ok().and_then(|token| token.parse().ok());
                // The watch of a late event may have been removed: ignore the event.
                let watch = token.and_then(|token: u32| self.table.watches().get(&token).cloned());
                if let Some(watch) = watch {
                    watch.note(watched.as_str());
                }
                return Ok(());
            }
            Answer::Done(op, payload) => (op, Ok(payload.to_vec())),
            Answer::Refused(error) => (StoreOp::Error, Err(error)),
        };
        let awaited = self.awaited.remove(&message.header.req_id);
        let Some(AwaitedReply { op, reply }) = awaited else {
            return Err(ConnectionEnd::Unasked { name: answered.name() });
        };
        if answered != op && answered != StoreOp::Error {
            return Err(ConnectionEnd::Other { asked: op.name(), answered: answered.name() });
        }
        if let Some(reply) = reply {
            let _ = reply.send(result);
        }
        Ok(())
    }
}

fn read_some(fd: &OwnedFd) -> Result<Vec<u8>, Errno> {
    let mut bytes = vec![0; READ_SIZE];
    let len = rustix::io::read(fd, &mut bytes)?;
    bytes.truncate(len);
    Ok(bytes)
}

/// Sends the messages that wait, one by one.
///
/// # Errors
/// `EAGAIN`: the rest must wait. `EPIPE`: the server has closed the connection. (The process
/// ignores `SIGPIPE`, as every Rust program does.)
fn send_all(fd: &OwnedFd, output: &mut VecDeque<Vec<u8>>, sent: &mut usize) -> Result<(), Errno> {
    while let Some(message) = output.front() {
        *sent += rustix::io::write(fd, &message[*sent..])?;
        if *sent >= message.len() {
            output.pop_front();
            *sent = 0;
        }
    }
    Ok(())
}
