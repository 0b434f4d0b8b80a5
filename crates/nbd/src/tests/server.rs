//! `Server`: an NBD server in this process, which does what a test wants.

use manyring_wire::nbd::{
    CAN_MULTI_CONN, COMMAND_SIZE, Chunk, ChunkKind, Command, CommandKind, HAS_FLAGS, Reply,
    SEND_FLUSH, SEND_FUA, SEND_TRIM, SEND_WRITE_ZEROES,
};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

/// The reaction of the test server to a command.
pub(super) enum Act {
    /// It serves the command as the protocol demands.
    Serve,
    /// It ends the connection.
    Close,
    /// It sends these bytes in the place of a reply.
    Send(Vec<u8>),
    /// It sends these bytes, and ends the connection.
    SendAndClose(Vec<u8>),
    /// It says nothing.
    Ignore,
    /// It reads nothing more, and keeps the connection until the client ends it.
    Stall,
    /// It sends these bytes past TLS, and then serves the command.
    Raw(Vec<u8>),
    /// It asks for new keys this many times, and then serves the command.
    NewKeys(usize),
}

/// A connection, under TLS or not.
trait Peer: Read + Write {
    fn socket(&mut self) -> &mut UnixStream;
    fn new_keys(&mut self) {}
}

impl Peer for UnixStream {
    fn socket(&mut self) -> &mut UnixStream {
        self
    }
}

impl Peer for StreamOwned<ServerConnection, UnixStream> {
    fn socket(&mut self) -> &mut UnixStream {
        &mut self.sock
    }

    fn new_keys(&mut self) {
        self.conn.refresh_traffic_keys().unwrap();
        while self.conn.wants_write() {
            if self.conn.write_tls(&mut self.sock).is_err() {
                return;
            }
        }
    }
}

/// Chooses the reaction, from the connection's number, the command's number on it, and the command.
pub(super) type Law = Box<dyn Fn(usize, usize, &Command) -> Act + Send + Sync>;

/// The export that the server offers.
#[derive(Clone, Copy)]
pub(super) struct Offer {
    pub(super) size: u64,
    pub(super) flags: u16,
    pub(super) blocks: [u32; 3],
    pub(super) structured: bool,
    /// Writes are answered before their data are read, which waits until the gate is open.
    pub(super) early: bool,
}

impl Default for Offer {
    fn default() -> Self {
        let flags = HAS_FLAGS | SEND_FLUSH | SEND_FUA | SEND_TRIM | SEND_WRITE_ZEROES;
        let flags = flags | CAN_MULTI_CONN;
        Self { size: SIZE, flags, blocks: [1, 4096, 64 << 10], structured: true, early: false }
    }
}

/// Bytes of the disk.
pub(super) const SIZE: u64 = 4 << 20;

/// How many connections the server takes at a time.
#[derive(Clone, Copy, Default)]
pub(super) struct Limit {
    pub(super) takes: usize,
    /// One more is left waiting for its greeting, in place of being ended.
    pub(super) lets_wait: bool,
    /// Connections now, and at most so far.
    pub(super) open: usize,
    pub(super) most: usize,
}

pub(super) struct Shared {
    offer: Mutex<Offer>,
    law: Mutex<Arc<Law>>,
    bytes: Mutex<Vec<u8>>,
    log: Mutex<Vec<(usize, Command)>>,
    connections: Mutex<usize>,
    limit: Mutex<Limit>,
    sockets: Mutex<Vec<UnixStream>>,
    gate: (Mutex<bool>, Condvar),
    tls: Mutex<Option<Arc<ServerConfig>>>,
}

pub(super) struct Server {
    folder: tempfile::TempDir,
    pub(super) shared: Arc<Shared>,
}

impl Server {
    pub(super) fn new(offer: Offer) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let shared = Arc::new(Shared {
            offer: Mutex::new(offer),
            law: Mutex::new(Arc::new(Box::new(|_, _, _| Act::Serve))),
            bytes: Mutex::new((0..SIZE).map(|at| (at / 512 % 251) as u8).collect()),
            log: Mutex::default(),
            connections: Mutex::default(),
            limit: Mutex::new(Limit { takes: usize::MAX, ..Limit::default() }),
            sockets: Mutex::default(),
            gate: <_>::default(),
            tls: Mutex::default(),
        });
        let server = Self { folder, shared };
        server.listen();
        server
    }

    pub(super) fn path(&self) -> PathBuf {
        self.folder.path().join("nbd.sock")
    }

    /// Begins to listen.
    pub(super) fn listen(&self) {
        let (listener, shared) = (UnixListener::bind(self.path()).unwrap(), self.shared.clone());
        std::thread::Builder::new()
            .spawn(move || {
                while let Ok((socket, _)) = listener.accept() {
                    if socket.peer_addr().is_err() {
                        return;
                    }
                    let mut connections = shared.connections.lock().unwrap();
                    *connections += 1;
                    let (number, shared) = (*connections, shared.clone());
                    shared.sockets.lock().unwrap().push(socket.try_clone().unwrap());
                    std::thread::Builder::new()
                        .spawn(move || shared.admit(socket, number))
                        .unwrap();
                }
            })
            .unwrap();
    }

    /// Nobody can connect any more, and every connection ends: as if the process were killed.
    pub(super) fn die(&self) {
        // The thread in `accept` keeps its socket, which has no name any more.
        std::fs::remove_file(self.path()).unwrap();
        for socket in self.shared.sockets.lock().unwrap().drain(..) {
            let _ = socket.shutdown(std::net::Shutdown::Both);
        }
    }

    pub(super) fn law(&self, law: impl Fn(usize, usize, &Command) -> Act + Send + Sync + 'static) {
        *self.shared.law.lock().unwrap() = Arc::new(Box::new(law));
    }

    /// Lets data of early writes be read.
    pub(super) fn open_gate(&self) {
        *self.shared.gate.0.lock().unwrap() = true;
        self.shared.gate.1.notify_all();
    }

    /// Asks for TLS from now on.
    pub(super) fn require_tls(&self, config: Arc<ServerConfig>) {
        *self.shared.tls.lock().unwrap() = Some(config);
    }

    pub(super) fn offer(&self, offer: Offer) {
        *self.shared.offer.lock().unwrap() = offer;
    }

    pub(super) fn bytes(&self) -> MutexGuard<'_, Vec<u8>> {
        self.shared.bytes.lock().unwrap()
    }

    /// The commands of each connection, in order.
    pub(super) fn log(&self) -> Vec<(usize, Command)> {
        self.shared.log.lock().unwrap().clone()
    }

    /// Takes this many connections at a time from now on; those beyond wait or are ended.
    pub(super) fn limit(&self, takes: usize, lets_wait: bool) {
        let mut limit = self.shared.limit.lock().unwrap();
        *limit = Limit { takes, lets_wait, ..*limit };
    }

    pub(super) fn limits(&self) -> Limit {
        *self.shared.limit.lock().unwrap()
    }

    pub(super) fn connections(&self) -> usize {
        *self.shared.connections.lock().unwrap()
    }
}

impl Shared {
    fn admit(&self, mut socket: UnixStream, number: usize) {
        {
            let mut limit = self.limit.lock().unwrap();
            if limit.open >= limit.takes {
                let lets_wait = limit.lets_wait;
                drop(limit);
                if lets_wait {
                    let _ = socket.read(&mut [0; 1]);
                }
                return;
            }
            limit.open += 1;
            limit.most = limit.most.max(limit.open);
        }
        self.serve(socket, number);
        self.limit.lock().unwrap().open -= 1;
    }

    fn serve(&self, mut socket: UnixStream, number: usize) {
        let tls = self.tls.lock().unwrap().clone();
        if greet(&mut socket).is_none() {
            return;
        }
        let Some(config) = tls else { return self.talk(socket, number) };
        if let Some(5) = next_option(&mut socket)
            && reply(&mut socket, 5, 1, &[]).is_some()
        {
            let connection = ServerConnection::new(config).unwrap();
            self.talk(StreamOwned::new(connection, socket), number);
        }
    }

    fn talk(&self, mut socket: impl Peer, number: usize) {
        let offer = *self.offer.lock().unwrap();
        if negotiate(&mut socket, offer).is_none() {
            // The alert of a failed TLS handshake has gone out; what is not read must not reset it.
            let _ = socket.socket().shutdown(std::net::Shutdown::Write);
            let _ = std::io::copy(socket.socket(), &mut std::io::sink());
            return;
        }
        for nth in 0.. {
            let mut bytes = [0; COMMAND_SIZE];
            if socket.read_exact(&mut bytes).is_err() {
                return;
            }
            let command = Command::parse(&bytes).expect("a command");
            let is_early = offer.early && command.kind == CommandKind::Write;
            if is_early {
                let _ = socket.write_all(&Reply::simple(0, command.cookie));
                let is_shut = |is_open: &mut bool| !*is_open;
                drop(self.gate.1.wait_while(self.gate.0.lock().unwrap(), is_shut).unwrap());
            }
            let mut data =
                vec![0; if command.kind == CommandKind::Write { command.len as usize } else { 0 }];
            if socket.read_exact(&mut data).is_err() || command.kind == CommandKind::Disconnect {
                return;
            }
            self.log.lock().unwrap().push((number, command));
            if is_early {
                continue;
            }
            let law = self.law.lock().unwrap().clone();
            let out = match law(number, nth, &command) {
                Act::Serve => self.obey(&command, &data, offer.structured),
                Act::Send(bytes) => bytes,
                Act::Ignore => continue,
                Act::Stall => return wait_for_end(socket.socket()),
                Act::Raw(bytes) => {
                    let _ = socket.socket().write_all(&bytes);
                    self.obey(&command, &data, offer.structured)
                }
                Act::NewKeys(count) => {
                    (0..count).for_each(|_| socket.new_keys());
                    self.obey(&command, &data, offer.structured)
                }
                Act::Close => return end(&mut socket),
                Act::SendAndClose(bytes) => {
                    let _ = socket.write_all(&bytes);
                    return end(&mut socket);
                }
            };
            if socket.write_all(&out).is_err() {
                return;
            }
        }
    }

    fn obey(&self, command: &Command, data: &[u8], structured: bool) -> Vec<u8> {
        let mut bytes = self.bytes.lock().unwrap();
        let at = usize::try_from(command.offset).unwrap();
        let range = at..at + command.len as usize;
        match command.kind {
            CommandKind::Read if structured => return chunks(command, &bytes[range]),
            CommandKind::Read => {
                return [&Reply::simple(0, command.cookie)[..], &bytes[range]].concat();
            }
            CommandKind::Write => bytes[range].copy_from_slice(data),
            CommandKind::WriteZeroes | CommandKind::Trim => bytes[range].fill(0),
            CommandKind::Flush | CommandKind::Disconnect => {}
        }
        Reply::simple(0, command.cookie).to_vec()
    }
}

/// A read's reply in chunks: its second half first, holes where there are zeroes.
fn chunks(command: &Command, bytes: &[u8]) -> Vec<u8> {
    let cookie = command.cookie;
    let (first, second) = bytes.split_at(bytes.len() / 2);
    let mut out = Vec::new();
    for (part, at, is_last) in [(second, first.len(), false), (first, 0, true)] {
        let (offset, len) = (command.offset + at as u64, u32::try_from(part.len()).unwrap());
        if part.iter().all(|byte| *byte == 0) {
            let kind = ChunkKind::Hole;
            out.extend(Chunk { kind, is_last, cookie, len: 12 }.emit());
            out.extend(offset.to_be_bytes());
            out.extend(len.to_be_bytes());
        } else {
            out.extend(data(cookie, offset, part, is_last));
        }
    }
    out
}

/// A chunk of data.
pub(super) fn data(cookie: u64, offset: u64, bytes: &[u8], is_last: bool) -> Vec<u8> {
    let len = u32::try_from(bytes.len() + 8).unwrap();
    let head = Chunk { kind: ChunkKind::Data, is_last, cookie, len }.emit();
    [&head[..], &offset.to_be_bytes(), bytes].concat()
}

/// A chunk of an error.
pub(super) fn error(cookie: u64, number: u32, is_last: bool) -> Vec<u8> {
    let head = Chunk { kind: ChunkKind::Error, is_last, cookie, len: 8 }.emit();
    [&head[..], &number.to_be_bytes(), &[0, 2], b"no"].concat()
}

fn end(socket: &mut impl Peer) {
    let _ = socket.socket().shutdown(std::net::Shutdown::Both);
}

/// Waits, without reading, until the client has ended the connection.
fn wait_for_end(socket: &UnixStream) {
    let mut fds = [PollFd::new(socket, PollFlags::empty())];
    while poll(&mut fds, None) == Err(Errno::INTR) {}
}

fn greet(socket: &mut UnixStream) -> Option<()> {
    socket.write_all(b"NBDMAGICIHAVEOPT\0\x03").ok()?;
    socket.read_exact(&mut [0; 4]).ok()
}

/// The client's next option.
fn next_option(socket: &mut impl Peer) -> Option<u32> {
    let mut head = [0; 16];
    socket.read_exact(&mut head).ok()?;
    let [option, len] = [8, 12].map(|at| u32::from_be_bytes(head[at..at + 4].try_into().unwrap()));
    socket.read_exact(&mut vec![0; len as usize]).ok()?;
    Some(option)
}

fn reply(socket: &mut impl Peer, option: u32, kind: u32, data: &[u8]) -> Option<()> {
    let mut out = 0x0003_e889_0455_65a9u64.to_be_bytes().to_vec();
    out.extend(option.to_be_bytes());
    out.extend(kind.to_be_bytes());
    out.extend(u32::try_from(data.len()).unwrap().to_be_bytes());
    out.extend(data);
    socket.write_all(&out).ok()
}

fn negotiate(socket: &mut impl Peer, offer: Offer) -> Option<()> {
    loop {
        let option = next_option(socket)?;
        if option == 5 {
            // It speaks no TLS, or speaks it already.
            reply(socket, option, 1 << 31 | 1, &[])?;
            continue;
        }
        if option != 7 {
            reply(socket, option, if offer.structured { 1 } else { 1 << 31 | 1 }, &[])?;
            continue;
        }
        let export = [&[0, 0][..], &offer.size.to_be_bytes(), &offer.flags.to_be_bytes()].concat();
        reply(socket, option, 3, &export)?;
        let blocks = offer.blocks.map(u32::to_be_bytes).concat();
        reply(socket, option, 3, &[&[0, 3][..], &blocks].concat())?;
        return reply(socket, option, 1, &[]);
    }
}
