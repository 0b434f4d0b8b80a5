//! A small xenstore server for tests: a tree, watches, transactions, on a unix socket.

use manyring_wire::xen::path::Path;
use manyring_wire::xen::store::{self, ErrorName, Message, Request};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Longest wait for what must come.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(20);
const HOME: &str = "/local/domain/0/";
/// Bytes of names that a list of children may have; small, so that lists come in parts.
const LIST_SIZE_MAX: usize = 512;

type Tree = BTreeMap<String, Vec<u8>>;

#[derive(Debug)]
struct Client {
    stream: UnixStream,
    /// Path as it was set, and token.
    watches: Vec<(String, Vec<u8>)>,
}

#[derive(Debug, Default)]
struct Shared {
    tree: Tree,
    generation: u64,
    clients: BTreeMap<usize, Client>,
    /// After `spared` more transactions, this many are refused as if others had written.
    conflicts: u32,
    spared: u32,
    committed: u32,
    dropped: u32,
    /// Most transactions of a client that were open at a time.
    most_open: usize,
    /// After this many more transactions one is refused, as to a client with too many of them.
    full_after: Option<u32>,
    /// Below this, nothing may be read.
    denied: Option<String>,
}

/// The server. Its tree can be read and written as a tool stack or guest would.
#[derive(Clone, Debug)]
pub(crate) struct Server {
    shared: Arc<Mutex<Shared>>,
    pub(crate) socket: PathBuf,
    _folder: Arc<tempfile::TempDir>,
}

fn absolute(path: &str) -> String {
    if path.starts_with('/') { path.to_owned() } else { format!("{HOME}{path}") }
}

fn is_below(path: &str, above: &str) -> bool {
    path.strip_prefix(above).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

impl Server {
    pub(crate) fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("xenstore");
        let listener = UnixListener::bind(&socket).unwrap();
        let server = Self { shared: Arc::default(), socket, _folder: Arc::new(folder) };
        let shared = server.shared.clone();
        std::thread::spawn(move || {
            for (number, stream) in listener.incoming().enumerate() {
                let (stream, shared) = (stream.unwrap(), shared.clone());
                std::thread::spawn(move || serve(number, stream, &shared));
            }
        });
        server
    }

    fn shared(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap()
    }

    pub(crate) fn write(&self, path: &str, value: &str) {
        self.shared().change(&absolute(path), Some(value.as_bytes()));
    }

    /// Writes several nodes at once, as a transaction does.
    pub(crate) fn write_all(&self, folder: &str, nodes: &[(&str, &str)]) {
        let mut shared = self.shared();
        for (name, value) in nodes {
            shared.tree.insert(absolute(&format!("{folder}/{name}")), value.as_bytes().to_vec());
        }
        for (name, _) in nodes {
            shared.fire(&absolute(&format!("{folder}/{name}")));
        }
    }

    pub(crate) fn remove(&self, path: &str) {
        self.shared().change(&absolute(path), None);
    }

    pub(crate) fn read(&self, path: &str) -> Option<String> {
        let value = self.shared().tree.get(&absolute(path)).cloned();
        value.map(|bytes| String::from_utf8(bytes).unwrap())
    }

    /// The next transactions are refused as if others had written.
    pub(crate) fn refuse_transactions(&self, count: u32) {
        self.shared().conflicts = count;
    }

    /// Refuses `count` transactions after the next `spared`, as if others had written.
    pub(crate) fn refuse_transactions_after(&self, spared: u32, count: u32) {
        let mut shared = self.shared();
        (shared.spared, shared.conflicts) = (spared, count);
    }

    /// The transaction after the next `count` is refused for want of room.
    pub(crate) fn refuse_one_transaction(&self, count: u32) {
        self.shared().full_after = Some(count);
    }

    /// True once it was.
    pub(crate) fn has_refused(&self) -> bool {
        self.shared().full_after.is_none()
    }

    /// Nothing below this path may be read any more.
    pub(crate) fn deny(&self, path: &str) {
        self.shared().denied = Some(path.to_owned());
        self.shared().fire(path);
    }

    /// Transactions that were committed, and dropped.
    pub(crate) fn transactions(&self) -> (u32, u32) {
        let shared = self.shared();
        (shared.committed, shared.dropped)
    }

    /// Most transactions of a client that were open at a time.
    pub(crate) fn most_open(&self) -> usize {
        self.shared().most_open
    }

    pub(crate) fn watches(&self) -> usize {
        self.shared().clients.values().map(|client| client.watches.len()).sum()
    }

    /// Answers nothing while the guard is held.
    pub(crate) fn silence(&self) -> impl Sized + '_ {
        self.shared()
    }

    /// Closes all connections, as a server does that is killed.
    pub(crate) fn hang_up(&self) {
        for client in self.shared().clients.values() {
            client.stream.shutdown(std::net::Shutdown::Both).unwrap();
        }
    }

    /// Waits until a node has this value; says what it has if it does not come.
    pub(crate) async fn await_node(&self, path: &str, value: &str) {
        let what = format!("{path} = {value}");
        await_until(&what, || self.read(path).as_deref() == Some(value)).await;
    }
}

/// Waits until something is so.
pub(crate) async fn await_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + TIMEOUT;
    while !is_so() {
        assert!(Instant::now() < end, "in vain: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

impl Shared {
    fn change(&mut self, path: &str, value: Option<&[u8]>) {
        change(&mut self.tree, path, value);
        self.generation += 1;
        self.fire(path);
    }

    /// Tells all watches at or above the path, and below a removed one.
    fn fire(&mut self, path: &str) {
        for client in self.clients.values_mut() {
            for (watched, token) in &client.watches {
                let above = absolute(watched);
                if is_below(path, &above) {
                    let name = if watched.starts_with('/') { path } else { &path[HOME.len()..] };
                    tell(&mut client.stream, name, token);
                } else if is_below(&above, path) {
                    tell(&mut client.stream, watched, token);
                }
            }
        }
    }
}

fn change(tree: &mut Tree, path: &str, value: Option<&[u8]>) {
    match value {
        None => tree.retain(|node, _| !is_below(node, path)),
        Some(value) => {
            for (at, _) in path.match_indices('/').skip(1) {
                tree.entry(path[..at].to_owned()).or_default();
            }
            tree.insert(path.to_owned(), value.to_vec());
        }
    }
}

fn tell(stream: &mut UnixStream, path: &str, token: &[u8]) {
    let mut out = Vec::new();
    let watched = manyring_wire::xen::path::Watched::parse(path.as_bytes()).unwrap();
    store::event(&mut out, watched, token).unwrap();
    let _ = stream.write_all(&out);
}

/// A transaction: the tree as it was, changed; what was changed; when it began.
struct Open {
    tree: Tree,
    changes: Vec<(String, Option<Vec<u8>>)>,
    generation: u64,
}

fn serve(number: usize, mut stream: UnixStream, shared: &Mutex<Shared>) {
    let client = Client { stream: stream.try_clone().unwrap(), watches: Vec::new() };
    shared.lock().unwrap().clients.insert(number, client);
    let (mut input, mut bytes) = (Vec::new(), [0; 4096]);
    let mut open = BTreeMap::new();
    while let Ok(len @ 1..) = stream.read(&mut bytes) {
        input.extend_from_slice(&bytes[..len]);
        while let Some(message) = store::split(&input).unwrap() {
            let mut shared = shared.lock().unwrap();
            let mut out = Vec::new();
            match answer(number, &message, &mut shared, &mut open) {
                Ok(payload) => store::reply(&mut out, &message.header, &payload).unwrap(),
                Err(error) => store::refuse(&mut out, &message.header, error),
            }
            let _ = stream.write_all(&out);
            if let Ok(Request::Watch { watched, token, .. }) = Request::parse(&message) {
                tell(&mut stream, watched.as_str(), token);
            }
            let size = message.size();
            drop(shared);
            input.drain(..size);
        }
    }
    shared.lock().unwrap().clients.remove(&number);
}

/// A client of the socket has no home that a relative path could begin in.
fn is_relative(request: &Request<'_>) -> bool {
    match request {
        Request::Read(path) | Request::Write { path, .. } | Request::Directory(path) => {
            !path.is_absolute()
        }
        Request::Watch { watched, .. } => !watched.as_str().starts_with('/'),
        _ => false,
    }
}

fn answer(
    number: usize,
    message: &Message<'_>,
    shared: &mut Shared,
    open: &mut BTreeMap<u32, Open>,
) -> Result<Vec<u8>, ErrorName> {
    let ok = || Ok(b"OK\0".to_vec());
    let request = Request::parse(message)?;
    if is_relative(&request) {
        return Err(ErrorName::Einval);
    }
    let id = message.header.tx_id;
    let tree = match open.get(&id) {
        Some(transaction) => &transaction.tree,
        None if id != 0 => return Err(ErrorName::Enoent),
        None => &shared.tree,
    };
    match request {
        Request::Read(path)
            if shared.denied.as_ref().is_some_and(|above| is_below(path.as_str(), above)) =>
        {
            Err(ErrorName::Eacces)
        }
        Request::Read(path) => tree.get(&absolute(path.as_str())).cloned().ok_or(ErrorName::Enoent),
        Request::Directory(path) => {
            let list = children(tree, path)?;
            if list.len() > LIST_SIZE_MAX { Err(ErrorName::E2big) } else { Ok(list) }
        }
        Request::DirectoryPart { path, offset } => {
            let list = [children(tree, path)?, b"\0".to_vec()].concat();
            let start = (offset as usize).min(list.len());
            let end = (start + LIST_SIZE_MAX).min(list.len());
            Ok([format!("{}\0", shared.generation).as_bytes(), &list[start..end]].concat())
        }
        Request::Write { path, value } => {
            write(shared, open, id, path, Some(value));
            ok()
        }
        Request::Rm(path) => {
            if !tree.contains_key(&absolute(path.as_str())) {
                return Err(ErrorName::Enoent);
            }
            write(shared, open, id, path, None);
            ok()
        }
        Request::Watch { watched, token, .. } => {
            let watches = &mut shared.clients.get_mut(&number).unwrap().watches;
            watches.push((watched.as_str().to_owned(), token.to_vec()));
            ok()
        }
        Request::Unwatch { watched, token } => {
            let watches = &mut shared.clients.get_mut(&number).unwrap().watches;
            watches.retain(|watch| *watch != (watched.as_str().to_owned(), token.to_vec()));
            ok()
        }
        Request::TransactionStart if shared.full_after == Some(0) => {
            shared.full_after = None;
            Err(ErrorName::Enospc)
        }
        Request::TransactionStart => Ok(begin(message.header.req_id, shared, open)),
        Request::TransactionEnd { commit } => {
            let transaction = open.remove(&id).ok_or(ErrorName::Enoent)?;
            commit_or_drop(shared, transaction, commit)?;
            ok()
        }
        _ => Err(ErrorName::Enosys),
    }
}

fn begin(id: u32, shared: &mut Shared, open: &mut BTreeMap<u32, Open>) -> Vec<u8> {
    shared.full_after = shared.full_after.map(|count| count - 1);
    let (tree, generation) = (shared.tree.clone(), shared.generation);
    open.insert(id, Open { tree, changes: Vec::new(), generation });
    shared.most_open = shared.most_open.max(open.len());
    format!("{id}\0").into_bytes()
}

fn write(
    shared: &mut Shared,
    open: &mut BTreeMap<u32, Open>,
    id: u32,
    path: Path<'_>,
    value: Option<&[u8]>,
) {
    let path = absolute(path.as_str());
    match open.get_mut(&id) {
        None => shared.change(&path, value),
        Some(transaction) => {
            change(&mut transaction.tree, &path, value);
            transaction.changes.push((path, value.map(<[u8]>::to_vec)));
        }
    }
}

fn commit_or_drop(shared: &mut Shared, open: Open, commit: bool) -> Result<(), ErrorName> {
    if !commit {
        shared.dropped += 1;
        return Ok(());
    }
    let is_spared = shared.spared > 0;
    shared.spared = shared.spared.saturating_sub(1);
    if (shared.conflicts > 0 && !is_spared) || shared.generation != open.generation {
        shared.conflicts = shared.conflicts.saturating_sub(1);
        return Err(ErrorName::Eagain);
    }
    shared.committed += 1;
    for (path, value) in open.changes {
        shared.change(&path, value.as_deref());
    }
    Ok(())
}

fn children(tree: &Tree, path: Path<'_>) -> Result<Vec<u8>, ErrorName> {
    let folder = absolute(path.as_str());
    if !tree.contains_key(&folder) {
        return Err(ErrorName::Enoent);
    }
    let below = tree.keys().filter_map(|node| node.strip_prefix(&folder)?.strip_prefix('/'));
    let names = below.filter(|rest| !rest.contains('/'));
    Ok(names.flat_map(|name| [name.as_bytes(), b"\0"].concat()).collect())
}
