//! The xenstore client: requests and replies, watches and transactions, for any number of tasks.
//!
//! A task owns the connection (`store/connection.rs`). It sends requests, gives each reply to the
//! task that waits for it, and collects the events of each watch. A watch keeps a bounded set of
//! the paths that changed; if there were more, it reports [`Changed::Many`], and its owner must
//! read everything. So a guest that changes its nodes without end cannot use up memory here.

mod connection;
mod transaction;
mod watch;

pub use transaction::{Transaction, Tries};
pub use watch::{Changed, Watch};

use connection::{Order, Table};
use manyring_wire::xen::path::{Path, PathError, Watched};
use manyring_wire::xen::store::{self as wire, ErrorName, Request, StoreMessageError, StoreOp};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};

/// The socket of xenstored.
pub const SOCKET: &str = "/run/xenstored/socket";
/// The kernel's device file for xenstore.
pub const DEVICE: &str = "/dev/xen/xenbus";

/// Largest message, its header included: the device takes no larger one.
const MESSAGE_SIZE_MAX: usize = 4096;
/// Longest wait for a reply.
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);
/// The most attempts of a transaction while other clients write the nodes that it reads.
const TRIES_MAX: u32 = 16;
/// First pause between two attempts. It doubles each time, up to 32 times this.
const TRY_DELAY: Duration = Duration::from_millis(1);
/// The most bytes of the names of one node's children.
const CHILDREN_SIZE_MAX: usize = 1 << 20;
/// The most requests that wait to be sent, not counting those whose replies nobody needs.
const ORDERS_MAX: usize = 256;
/// The most transactions that are open at a time. An unprivileged domain may have ten
/// (`quota-transactions`), which all programs of the domain share.
const TRANSACTIONS_MAX: usize = 5;

/// The socket or device file by which xenstore is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoreEndpoint {
    /// A unix socket: xenstored's, or a simulated Xen's.
    Socket(PathBuf),
    /// The kernel's device file.
    Device(PathBuf),
}

impl std::fmt::Display for StoreEndpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (Self::Socket(path) | Self::Device(path)) = self;
        path.display().fmt(f)
    }
}

/// Returns the endpoint of this machine: the socket, or else the device. `None`: no Xen is here.
#[must_use]
pub fn default_endpoint() -> Option<StoreEndpoint> {
    let exists = |path: &str| std::path::Path::new(path).exists();
    if exists(SOCKET) {
        Some(StoreEndpoint::Socket(SOCKET.into()))
    } else {
        exists(DEVICE).then(|| StoreEndpoint::Device(DEVICE.into()))
    }
}

/// Why a request to xenstore failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the Display text says what each field is")]
pub enum StoreError {
    #[error("cannot open xenstore at {endpoint}: {text}")]
    Open { endpoint: String, text: String },
    /// The connection is over, and with it every watch and every transaction.
    #[error("connection to xenstore lost: {0}")]
    Lost(String),
    #[error("xenstore request {name} timed out after {} seconds", REPLY_TIMEOUT.as_secs())]
    Silent { name: &'static str },
    #[error("xenstore request {name} of {path} failed: {error}")]
    Refused { name: &'static str, path: String, error: ErrorName },
    #[error("xenstore path \"{path}\": {error}")]
    Path { path: String, error: PathError },
    #[error("xenstore {name} of {path} does not fit into a message")]
    TooLong { name: &'static str, path: String },
    #[error("xenstore request: {0}")]
    Message(#[from] StoreMessageError),
    #[error("xenstore's answer to {name} is malformed")]
    Answer { name: &'static str },
    #[error("reading xenstore failed: it changed during each of {TRIES_MAX} tries")]
    Contended,
}

impl StoreError {
    /// True if the node does not exist.
    #[must_use]
    pub fn is_missing(&self) -> bool {
        matches!(self, Self::Refused { error: ErrorName::Enoent, .. })
    }

    /// True if the connection is over: no further request can succeed.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        matches!(self, Self::Lost(_))
    }

    /// True if the same request can succeed later: the server is slow, has no room, or others write
    /// the same nodes.
    #[must_use]
    pub fn is_passing(&self) -> bool {
        match self {
            Self::Silent { .. } | Self::Contended => true,
            Self::Refused { error, .. } => is_shortage(*error),
            _ => false,
        }
    }

    fn is_conflict(&self) -> bool {
        matches!(self, Self::Refused { error: ErrorName::Eagain, .. })
    }
}

/// A connection to xenstore. Clones share it.
#[derive(Clone, Debug)]
pub struct Store {
    /// `/local/domain/N`, to which all other paths are relative. The client makes them absolute,
    /// because the server does not know the domain of a client on its unix socket.
    home: Arc<str>,
    orders: mpsc::UnboundedSender<Order>,
    /// Limits the requests for whose reply a task waits. Other requests need no limit: each ends a
    /// watch or a transaction, and their number is limited.
    room: Arc<Semaphore>,
    transactions: Arc<Semaphore>,
    table: Arc<Table>,
}

/// True if the server has no room now.
fn is_shortage(error: ErrorName) -> bool {
    use ErrorName::{Ebusy, Enomem, Enospc, Equota};
    matches!(error, Ebusy | Enomem | Enospc | Equota)
}

impl Store {
    /// Connects, for the back-end of `domain`: the domain in which this process runs, most often 0.
    /// Needs a tokio runtime.
    ///
    /// # Errors
    /// [`StoreError::Open`]: the socket or device file cannot be opened.
    pub fn open(endpoint: &StoreEndpoint, domain: u16) -> Result<Self, StoreError> {
        let fd = connection::open(endpoint).map_err(|error| StoreError::Open {
            endpoint: endpoint.to_string(),
            text: error.to_string(),
        })?;
        let (orders, received) = mpsc::unbounded_channel();
        let table = Arc::new(Table::default());
        // The task ends when the last handle is dropped, or the connection is over.
        tokio::spawn(connection::run(fd, received, table.clone()));
        let home = format!("/local/domain/{domain}").into();
        let semaphore = |permits| Arc::new(Semaphore::new(permits));
        let (room, transactions) = (semaphore(ORDERS_MAX), semaphore(TRANSACTIONS_MAX));
        Ok(Self { home, orders, room, transactions, table })
    }

    /// Waits until the connection is over, and returns the reason.
    pub async fn lost(&self) -> StoreError {
        StoreError::Lost(self.table.wait_end().await)
    }

    /// Reads a node; `None`: there is no such node.
    ///
    /// # Errors
    /// [`StoreError`]: the path is wrong; or xenstore refuses, does not answer, or is lost.
    pub async fn read(&self, path: &str) -> Result<Option<Vec<u8>>, StoreError> {
        self.read_in(path, 0).await
    }

    /// Returns the names of a node's children, in order; `None`: there is no such node.
    ///
    /// # Errors
    /// As for [`Self::read`]. [`StoreError::Contended`]: a long list changed again and again while
    /// it was read.
    pub async fn children(&self, path: &str) -> Result<Option<Vec<String>>, StoreError> {
        let path = &self.absolute(path);
        match self.ask(&Request::Directory(parse(path)?), 0).await {
            Ok(payload) => Ok(Some(names(&payload))),
            Err(error) if error.is_missing() => Ok(None),
            Err(StoreError::Refused { error: ErrorName::E2big, .. }) => {
                self.many_children(path).await
            }
            Err(error) => Err(error),
        }
    }

    /// Reads a list of children that does not fit into one message, part by part. Each part begins
    /// with the generation of the node, so that a change between two parts is seen: then the list
    /// is read again from its start. The last part ends with an empty name.
    async fn many_children(&self, path: &str) -> Result<Option<Vec<String>>, StoreError> {
        let name = StoreOp::DirectoryPart.name();
        let (mut list, mut generation) = (Vec::new(), None);
        for _ in 0..CHILDREN_SIZE_MAX / wire::PAYLOAD_SIZE_MAX * TRIES_MAX as usize {
            let offset = u32::try_from(list.len()).map_err(|_| StoreError::Answer { name })?;
            let request = Request::DirectoryPart { path: parse(path)?, offset };
            let payload = match self.ask(&request, 0).await {
                Err(error) if error.is_missing() => return Ok(None),
                payload => payload?,
            };
            let end = payload.iter().position(|byte| *byte == 0);
            let (now, part) = payload.split_at(end.ok_or(StoreError::Answer { name })? + 1);
            if generation.as_deref().is_some_and(|before| before != now) {
                (list, generation) = (Vec::new(), None);
                continue;
            }
            generation = Some(now.to_vec());
            list.extend_from_slice(part);
            if list.len() > CHILDREN_SIZE_MAX || part.is_empty() {
                return Err(StoreError::Answer { name });
            }
            if list.ends_with(b"\0\0") || list == b"\0" {
                list.pop();
                return Ok(Some(names(&list)));
            }
        }
        Err(StoreError::Contended)
    }

    fn absolute(&self, path: &str) -> String {
        let is_whole = path.starts_with('/') || path.starts_with('@');
        if is_whole { path.to_owned() } else { format!("{}/{path}", self.home) }
    }

    /// Makes an empty set of watches, whose events come together.
    #[must_use]
    pub fn watch(&self) -> Watch {
        Watch::new(self.clone())
    }

    fn unwatch(&self, token: u32, path: &str) {
        self.table.remove_watch(token);
        let token = token.to_string();
        if let Ok(watched) = Watched::parse(path.as_bytes()) {
            self.forget(&Request::Unwatch { watched, token: token.as_bytes() }, 0);
        }
    }

    /// Begins a transaction, which the caller must end by [`Tries::end`]. Waits while the maximum
    /// of transactions is open, and retries if the server has no room for one.
    ///
    /// # Errors
    /// [`StoreError::Contended`]: the server had no room in 16 tries. Any other: xenstore refuses,
    /// does not answer, or is lost.
    pub async fn begin(&self) -> Result<Transaction, StoreError> {
        let silent = StoreError::Silent { name: StoreOp::TransactionStart.name() };
        let mut tries = Tries::default();
        while tries.left > 0 {
            let permit = self.transactions.clone().acquire_owned();
            let permit = tokio::time::timeout(REPLY_TIMEOUT, permit).await;
            let Ok(Ok(permit)) = permit else { return Err(silent) };
            // If the caller is cancelled, this task continues, and ends the transaction that the
            // server may still begin.
            let begun = tokio::spawn(self.clone().begun(permit));
            match tokio::time::timeout(REPLY_TIMEOUT, begun).await {
                Ok(Ok(Err(StoreError::Refused { error, .. }))) if is_shortage(error) => {
                    tries.pause().await;
                }
                Ok(Ok(begun)) => return begun,
                Ok(Err(_)) => return Err(self.table.lost()),
                Err(_) => return Err(silent),
            }
        }
        Err(StoreError::Contended)
    }

    async fn begun(self, permit: OwnedSemaphorePermit) -> Result<Transaction, StoreError> {
        let request = Request::TransactionStart;
        let name = request.op().name();
        let reply = self.send(&request, 0).await?;
        let payload = self.result_of(&request, reply.await)?;
        let id = wire::transaction_id(&payload).ok_or(StoreError::Answer { name })?;
        Ok(Transaction { store: self, id, is_open: true, _permit: permit })
    }

    async fn read_in(&self, path: &str, tx_id: u32) -> Result<Option<Vec<u8>>, StoreError> {
        let path = self.absolute(path);
        match self.ask(&Request::Read(parse(&path)?), tx_id).await {
            Ok(value) => Ok(Some(value)),
            Err(error) if error.is_missing() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Sends a request and waits for the payload of its reply.
    async fn ask(&self, request: &Request<'_>, tx_id: u32) -> Result<Vec<u8>, StoreError> {
        let reply = self.send(request, tx_id).await?;
        self.wait(request, reply).await
    }

    /// Sends a request, and returns the receiver of its reply. The server answers the requests of a
    /// connection in the order in which they were sent.
    async fn send(&self, request: &Request<'_>, tx_id: u32) -> Result<Reply, StoreError> {
        let (sender, reply) = oneshot::channel();
        let order = self.order(request, tx_id, Some(sender))?;
        let silent = StoreError::Silent { name: request.op().name() };
        let permit = tokio::time::timeout(REPLY_TIMEOUT, self.room.clone().acquire_owned()).await;
        let Ok(Ok(permit)) = permit else { return Err(silent) };
        let order = Order { permit: Some(permit), ..order };
        self.orders.send(order).map_err(|_| self.table.lost())?;
        Ok(reply)
    }

    async fn wait(&self, request: &Request<'_>, reply: Reply) -> Result<Vec<u8>, StoreError> {
        match tokio::time::timeout(REPLY_TIMEOUT, reply).await {
            Ok(result) => self.result_of(request, result),
            Err(_) => Err(StoreError::Silent { name: request.op().name() }),
        }
    }

    fn result_of(
        &self,
        request: &Request<'_>,
        reply: Result<Result<Vec<u8>, ErrorName>, oneshot::error::RecvError>,
    ) -> Result<Vec<u8>, StoreError> {
        let name = request.op().name();
        let refused = |error| StoreError::Refused { name, path: path_of(request).into(), error };
        reply.map_err(|_| self.table.lost())?.map_err(refused)
    }

    /// Sends a request whose reply nobody needs, after all requests that were sent before.
    fn forget(&self, request: &Request<'_>, tx_id: u32) {
        if let Ok(order) = self.order(request, tx_id, None) {
            let _ = self.orders.send(order);
        }
    }

    fn order(
        &self,
        request: &Request<'_>,
        tx_id: u32,
        reply: Option<oneshot::Sender<Result<Vec<u8>, ErrorName>>>,
    ) -> Result<Order, StoreError> {
        let req_id = self.table.next_id();
        let mut message = Vec::new();
        let is_too_long = match request.emit(req_id, tx_id, &mut message) {
            Ok(()) => message.len() > MESSAGE_SIZE_MAX,
            Err(StoreMessageError::TooLong { .. }) => true,
            Err(error) => return Err(error.into()),
        };
        if is_too_long {
            let path = path_of(request).to_owned();
            return Err(StoreError::TooLong { name: request.op().name(), path });
        }
        Ok(Order { message, req_id, op: request.op(), reply, permit: None })
    }
}

type Reply = oneshot::Receiver<Result<Vec<u8>, ErrorName>>;

fn parse(path: &str) -> Result<Path<'_>, StoreError> {
    let wrong = |error| StoreError::Path { path: path.to_owned(), error };
    Path::parse(path.as_bytes()).map_err(wrong)
}

/// Returns the names in a list. Names that are not UTF-8 are ignored: this program uses no such
/// nodes.
fn names(payload: &[u8]) -> Vec<String> {
    let names = wire::strings(payload).filter(|name| !name.is_empty());
    names.filter_map(|name| std::str::from_utf8(name).ok()).map(str::to_owned).collect()
}

/// Returns the path that a request is about, for messages.
fn path_of<'a>(request: &Request<'a>) -> &'a str {
    match request {
        Request::Directory(path)
        | Request::DirectoryPart { path, .. }
        | Request::Read(path)
        | Request::Write { path, .. }
        | Request::Rm(path) => path.as_str(),
        Request::Watch { watched, .. } | Request::Unwatch { watched, .. } => watched.as_str(),
        _ => "the transaction",
    }
}
