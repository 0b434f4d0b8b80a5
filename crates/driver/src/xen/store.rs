//! `SimulatedStore`: the simulated xenstore: its clients, their requests, watches and transactions.
//! No I/O.
//!
//! Bytes of a client go in by [`SimulatedStore::receive`], bytes for it come out of
//! [`SimulatedStore::output`]: the answers to its requests, in their order, and the events of its
//! watches. Events of a change stand before the answer to the request that made it, as xenstored
//! sends them; the first event of a new watch stands behind the answer.
//!
//! **A client costs itself only.** A malformed request is refused. Everything that a client can
//! make grow has a bound: nodes and their values, permissions (see the tree), watches,
//! transactions, bytes that wait for it to read them. Who exceeds the last, or the largest message,
//! is disconnected.

use super::transaction::Transaction;
use super::tree::{Change, ChangedNode, DOM0, Node, Tree};
use manyring_wire::xen::path::{ABS_PATH_MAX, Path, Watched};
use manyring_wire::xen::store::{
    Access, Answer, ErrorName, PAYLOAD_SIZE_MAX, Permission, Request, StoreHeader, event, refuse,
    reply, split,
};
use std::collections::{BTreeMap, BTreeSet};

/// Watches of a client, as xenstored's own default.
const WATCHES_MAX: usize = 128;
/// Watches of a client of domain 0: some for each device of many domains.
const DOM0_WATCHES_MAX: usize = 10_000;
/// Transactions of a client at a time, as xenstored's own default.
const TRANSACTIONS_MAX: usize = 10;
/// Bytes that may wait for a client: more than the answers to all its requests that are read at a
/// time. It is filled by events that the client does not read.
const OUTPUT_SIZE_MAX: usize = 1 << 20;
/// With this many bytes waiting for it, a client's further requests wait too.
pub(super) const OUTPUT_SIZE_FULL: usize = 1 << 16;

#[derive(Debug)]
struct Watch {
    /// As the client wrote it: relative paths are answered by relative ones.
    watched: String,
    /// The path that it begins with, if it is relative.
    base: Option<String>,
    token: Vec<u8>,
    depth: Option<u32>,
}

impl Watch {
    /// The path to report to the client if a change of `path` concerns this watch; `None`: it does
    /// not.
    fn sees<'a>(&'a self, path: Path<'a>, removed: Option<&Node>) -> Option<&'a str> {
        let own = self.absolute();
        let own = Path::parse(own.as_bytes()).ok().filter(|own| own.is_absolute())?;
        if let Some(depth) = path.depth_below(own) {
            let is_near = self.depth.is_none_or(|max| depth <= max as usize);
            let whole = path.as_str();
            let skip = self.base.as_ref().map_or(0, |base| base.len() + 1);
            return whole.get(skip..).filter(|_| is_near);
        }
        // A node above the watched one was removed, and the watched one with it.
        let below = own.depth_below(path).zip(removed).and_then(|(depth, removed)| {
            let skip = own.components().count() - depth;
            removed.below(own.components().skip(skip))
        });
        below.map(|_| self.watched.as_str())
    }

    fn absolute(&self) -> String {
        match &self.base {
            Some(base) => format!("{base}/{}", self.watched),
            None => self.watched.clone(),
        }
    }
}

#[derive(Debug)]
struct Client {
    domain: u16,
    /// The path at which the client's relative paths begin; `None` for a client of the socket.
    base: Option<String>,
    watches: Vec<Watch>,
    transactions: BTreeMap<u32, Transaction>,
    outbox: Outbox,
}

/// The bytes that wait for a client.
#[derive(Debug, Default)]
struct Outbox {
    bytes: Vec<u8>,
    /// True if the client must be disconnected.
    is_over: bool,
}

impl Outbox {
    fn tell(&mut self, watched: Watched<'_>, token: &[u8]) {
        // An event whose path is too long for a message cannot be of a path that the client
        // watches.
        let _ = event(&mut self.bytes, watched, token);
        self.is_over |= self.bytes.len() > OUTPUT_SIZE_MAX;
    }
}

impl Client {
    fn absolute(&self, path: Path<'_>) -> Result<String, ErrorName> {
        if path.is_absolute() {
            return Ok(path.as_str().to_owned());
        }
        let base = self.base.as_ref().ok_or(ErrorName::Einval)?;
        Some(format!("{base}/{path}")).filter(|p| p.len() <= ABS_PATH_MAX).ok_or(ErrorName::Einval)
    }
}

/// The simulated xenstore.
#[derive(Debug)]
pub(super) struct SimulatedStore {
    tree: Tree,
    clients: BTreeMap<u64, Client>,
    introduced: BTreeSet<u16>,
    last_client: u64,
    last_transaction: u32,
}

/// The answer to a request.
type Served = Result<Vec<u8>, ErrorName>;

impl SimulatedStore {
    pub(super) fn new() -> Self {
        let introduced = BTreeSet::from([DOM0]);
        let (tree, clients) = (Tree::new(), BTreeMap::new());
        Self { tree, clients, introduced, last_client: 0, last_transaction: 0 }
    }

    /// A client of domain 0, over the socket, or of the domain that it runs in.
    pub(super) fn connect(&mut self, domain: Option<u16>) -> u64 {
        self.last_client += 1;
        let client = Client {
            domain: domain.unwrap_or(DOM0),
            base: domain.map(home),
            watches: Vec::new(),
            transactions: BTreeMap::new(),
            outbox: Outbox::default(),
        };
        self.clients.insert(self.last_client, client);
        self.last_client
    }

    /// Forgets a client, its watches and its transactions. Nodes that it wrote stay.
    pub(super) fn disconnect(&mut self, client: u64) {
        self.clients.remove(&client);
    }

    /// The bytes that wait for a client. The server removes the bytes that it has sent.
    pub(super) fn output(&mut self, client: u64) -> Option<&mut Vec<u8>> {
        self.clients.get_mut(&client).map(|client| &mut client.outbox.bytes)
    }

    /// True if the client must be disconnected.
    pub(super) fn is_over(&self, client: u64) -> bool {
        self.clients.get(&client).is_none_or(|client| client.outbox.is_over)
    }

    /// Serves the whole messages at the start of `stream`, and takes them away. Some stay while too
    /// many bytes wait for the client.
    pub(super) fn receive(&mut self, client: u64, stream: &mut Vec<u8>) {
        let mut taken = 0;
        while self.output(client).is_some_and(|output| output.len() < OUTPUT_SIZE_FULL) {
            let (header, size) = match split(&stream[taken..]) {
                Ok(None) => break,
                Ok(Some(message)) => {
                    self.answer(client, &message.header, Request::parse(&message));
                    (message.header, message.size())
                }
                Err(_) => {
                    if let Some(client) = self.clients.get_mut(&client) {
                        client.outbox.is_over = true;
                    }
                    break;
                }
            };
            debug_assert!(header.size as usize <= PAYLOAD_SIZE_MAX);
            taken += size;
        }
        stream.drain(..taken);
    }

    fn answer(&mut self, id: u64, header: &StoreHeader, request: Result<Request<'_>, ErrorName>) {
        let watch = match &request {
            Ok(Request::Watch { watched, token, .. }) => Some((*watched, *token)),
            _ => None,
        };
        let served = request.and_then(|request| self.serve(id, header.tx_id, request));
        let Some(Client { outbox, .. }) = self.clients.get_mut(&id) else { return };
        let output = &mut outbox.bytes;
        match served {
            Err(error) => refuse(output, header, error),
            Ok(payload) => {
                if reply(output, header, &payload).is_err() {
                    refuse(output, header, ErrorName::E2big);
                }
                if let Some((watched, token)) = watch {
                    outbox.tell(watched, token);
                }
            }
        }
    }

    fn serve(&mut self, id: u64, transaction: u32, request: Request<'_>) -> Served {
        let client = self.clients.get_mut(&id).ok_or(ErrorName::Eio)?;
        let domain = client.domain;
        let only_dom0 = || if domain == DOM0 { Ok(()) } else { Err(ErrorName::Eacces) };
        match request {
            Request::Read(path) => self.see(id, transaction, path, |node| node.value.clone()),
            Request::Directory(path) => self.see(id, transaction, path, children),
            Request::DirectoryPart { path, offset } => {
                self.see(id, transaction, path, |node| part(node, offset)).and_then(|part| part)
            }
            Request::GetPerms(path) => self.see(id, transaction, path, permissions),
            Request::Write { path, value } => {
                self.change(id, transaction, path, Change::Write(value.to_vec()))
            }
            Request::Mkdir(path) => self.change(id, transaction, path, Change::Mkdir),
            Request::Rm(path) => self.change(id, transaction, path, Change::Rm),
            Request::SetPerms { path, permissions } => {
                self.change(id, transaction, path, Change::SetPerms(permissions))
            }
            Request::Watch { watched, token, depth } => watch(client, watched, token, depth),
            Request::Unwatch { watched, token } => unwatch(client, watched, token),
            Request::TransactionStart => self.begin(id),
            Request::TransactionEnd { commit } => self.end(id, transaction, commit),
            Request::ResetWatches => {
                client.watches.clear();
                client.transactions.clear();
                Ok(Answer::OK.to_vec())
            }
            Request::GetDomainPath(of) => Ok(format!("{}\0", home(of)).into_bytes()),
            Request::IsDomainIntroduced(of) => {
                Ok(if self.introduced.contains(&of) { b"T\0" } else { b"F\0" }.to_vec())
            }
            Request::Introduce { domain: of, .. } => {
                only_dom0()?;
                self.introduce(of);
                Ok(Answer::OK.to_vec())
            }
            Request::Release(of) => {
                only_dom0()?;
                if self.release(of) { Ok(Answer::OK.to_vec()) } else { Err(ErrorName::Enoent) }
            }
            Request::Resume(_) => only_dom0().map(|()| Answer::OK.to_vec()),
            Request::SetTarget { .. } | Request::Optional(..) => Err(ErrorName::Enosys),
        }
    }

    /// Reads a node, in a transaction or outside.
    fn see<T>(
        &mut self,
        id: u64,
        transaction: u32,
        path: Path<'_>,
        see: impl FnOnce(&Node) -> T,
    ) -> Result<T, ErrorName> {
        let client = self.clients.get_mut(&id).ok_or(ErrorName::Eio)?;
        let absolute = client.absolute(path)?;
        let path = Path::parse(absolute.as_bytes()).map_err(|_| ErrorName::Einval)?;
        if transaction == 0 {
            return self.tree.read(client.domain, path).map(see);
        }
        let transaction = client.transactions.get_mut(&transaction).ok_or(ErrorName::Enoent)?;
        transaction.read(path).map(see)
    }

    /// Changes a node, in a transaction or at once.
    fn change(&mut self, id: u64, transaction: u32, path: Path<'_>, change: Change) -> Served {
        let client = self.clients.get_mut(&id).ok_or(ErrorName::Eio)?;
        let absolute = client.absolute(path)?;
        let path = Path::parse(absolute.as_bytes()).map_err(|_| ErrorName::Einval)?;
        if transaction == 0 {
            let changed = self.tree.apply(client.domain, path, &change)?;
            self.fire(changed.into_iter().collect());
        } else {
            let transaction = client.transactions.get_mut(&transaction);
            transaction.ok_or(ErrorName::Enoent)?.apply(path, change)?;
        }
        Ok(Answer::OK.to_vec())
    }

    fn begin(&mut self, id: u64) -> Served {
        let client = self.clients.get_mut(&id).ok_or(ErrorName::Eio)?;
        if client.transactions.len() >= TRANSACTIONS_MAX {
            return Err(ErrorName::Enospc);
        }
        // The number 0 stands for "outside of a transaction".
        self.last_transaction = self.last_transaction.checked_add(1).unwrap_or(1);
        let number = self.last_transaction;
        client.transactions.insert(number, Transaction::new(client.domain, &self.tree));
        Ok(format!("{number}\0").into_bytes())
    }

    fn end(&mut self, id: u64, transaction: u32, commit: bool) -> Served {
        let client = self.clients.get_mut(&id).ok_or(ErrorName::Eio)?;
        let transaction = client.transactions.remove(&transaction).ok_or(ErrorName::Enoent)?;
        if commit {
            let changed = transaction.commit(&mut self.tree)?;
            self.fire(changed);
        }
        Ok(Answer::OK.to_vec())
    }

    /// Tells all watches of changes.
    fn fire(&mut self, changes: Vec<ChangedNode>) {
        for ChangedNode { path, removed } in changes {
            let Ok(path) = Path::parse(path.as_bytes()) else { continue };
            let removed = removed.as_deref();
            let (_, nearest) = self.tree.nearest(path);
            for Client { domain, watches, outbox, .. } in self.clients.values_mut() {
                if !removed.unwrap_or(nearest).may_read(*domain) {
                    continue;
                }
                for watch in watches {
                    let seen = watch.sees(path, removed);
                    if let Some(seen) = seen.and_then(|seen| Path::parse(seen.as_bytes()).ok()) {
                        outbox.tell(Watched::Node(seen), &watch.token);
                    }
                }
            }
        }
    }

    /// Tells the watches of an event that the server invents.
    fn fire_special(&mut self, special: Watched<'_>) {
        for Client { watches, outbox, .. } in self.clients.values_mut() {
            for watch in watches.iter().filter(|watch| watch.watched == special.as_str()) {
                outbox.tell(special, &watch.token);
            }
        }
    }

    /// A domain is known from now on. Its home is domain 0's, which it may read.
    pub(super) fn introduce(&mut self, domain: u16) {
        if !self.introduced.insert(domain) {
            return;
        }
        let home = home(domain);
        if let Ok(path) = Path::parse(home.as_bytes()) {
            let changed = self.tree.apply(DOM0, path, &Change::Mkdir);
            self.fire(changed.ok().flatten().into_iter().collect());
            let owner = Permission { access: Access::None, domain: DOM0 };
            let reader = Permission { access: Access::Read, domain };
            let permissions = Change::SetPerms(vec![owner, reader]);
            let changed = self.tree.apply(DOM0, path, &permissions);
            self.fire(changed.ok().flatten().into_iter().collect());
        }
        self.fire_special(Watched::INTRODUCE_DOMAIN);
    }

    /// A domain is gone. Its nodes stay, for the toolstack to remove. False if it was not known.
    pub(super) fn release(&mut self, domain: u16) -> bool {
        let was_known = domain != DOM0 && self.introduced.remove(&domain);
        if was_known {
            self.fire_special(Watched::RELEASE_DOMAIN);
        }
        was_known
    }

    /// The nodes.
    #[cfg(test)]
    pub(super) fn tree(&self) -> &Tree {
        &self.tree
    }
}

/// The path under which the nodes of a domain lie.
pub(super) fn home(domain: u16) -> String {
    format!("/local/domain/{domain}")
}

fn watch(client: &mut Client, watched: Watched<'_>, token: &[u8], depth: Option<u32>) -> Served {
    let max = if client.domain == DOM0 { DOM0_WATCHES_MAX } else { WATCHES_MAX };
    let base = match watched {
        // Only domain 0 may see the events of other domains' lives.
        Watched::Special(_) if client.domain != DOM0 => return Err(ErrorName::Eacces),
        Watched::Node(path) if !path.is_absolute() => {
            client.absolute(path)?;
            client.base.clone()
        }
        _ => None,
    };
    let watched = watched.as_str().to_owned();
    if client.watches.iter().any(|watch| watch.watched == watched && watch.token == token) {
        return Err(ErrorName::Eexist);
    }
    if client.watches.len() >= max {
        return Err(ErrorName::Enospc);
    }
    client.watches.push(Watch { watched, base, token: token.to_vec(), depth });
    Ok(Answer::OK.to_vec())
}

fn unwatch(client: &mut Client, watched: Watched<'_>, token: &[u8]) -> Served {
    let is_it = |watch: &Watch| watch.watched == watched.as_str() && watch.token == token;
    let at = client.watches.iter().position(is_it).ok_or(ErrorName::Enoent)?;
    client.watches.remove(at);
    Ok(Answer::OK.to_vec())
}

/// The names of a node's children.
fn children(node: &Node) -> Vec<u8> {
    node.children.keys().flat_map(|name| name.bytes().chain([0])).collect()
}

/// A node's generation, and the whole names of its children from byte `offset` on that fit into a
/// message. An empty name is behind the last one.
fn part(node: &Node, offset: u32) -> Served {
    let all = children(node);
    let mut payload = format!("{}\0", node.generation).into_bytes();
    let rest = all.get(offset as usize..).ok_or(ErrorName::Einval)?;
    let room = PAYLOAD_SIZE_MAX - payload.len() - 1;
    if rest.len() <= room {
        payload.extend_from_slice(rest);
        payload.push(0);
        return Ok(payload);
    }
    let end = rest[..room].iter().rposition(|byte| *byte == 0).map_or(0, |at| at + 1);
    payload.extend_from_slice(&rest[..end]);
    Ok(payload)
}

fn permissions(node: &Node) -> Vec<u8> {
    node.permissions.iter().flat_map(|entry| format!("{entry}\0").into_bytes()).collect()
}

#[cfg(test)]
mod tests;
