//! The sockets of the simulated Xen, served by one thread that never blocks on a client.
//!
//! A client that sends faster than it reads is not read any further. A client that makes others
//! wait in another way is disconnected: if it has more events waiting than it may have, if it sends
//! a message that is too long, or if it does not take the answers to its calls.

use super::hypervisor::{Reply, SimulatedHypervisor, refused};
use super::store::{OUTPUT_SIZE_FULL, SimulatedStore};
use manyring_wire::xen::hypercall::{CALL_SIZE, Hypercall};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::io::{ErrorKind, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::unix::net::{UnixListener, UnixStream};

/// Most connections at a time; further ones wait to be accepted.
const PEERS_MAX: usize = 1024;
/// Bytes that are read from a client at a time.
const READ_SIZE: usize = 8192;
/// Most file descriptors that an answer brings.
const FDS_MAX: usize = 2;
/// How long no connection is accepted after the process ran out of file descriptors.
const PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// The protocol of a connection.
#[derive(Clone, Copy, Debug)]
enum Speaks {
    /// xenstore's protocol, as this client of the store, which runs in a domain or over the socket.
    Store { client: u64, domain: Option<u16> },
    /// Calls.
    Calls,
}

#[derive(Debug)]
struct ServedPeer {
    /// The number by which the hypervisor knows the connection.
    id: u64,
    stream: UnixStream,
    speaks: Speaks,
    /// Bytes that have come and are no whole message yet, or that wait to be served.
    input: Vec<u8>,
    is_over: bool,
}

/// The server's thread.
#[derive(Debug)]
pub(super) struct Server {
    store: SimulatedStore,
    hypervisor: SimulatedHypervisor,
    stop: OwnedFd,
    store_socket: UnixListener,
    call_socket: UnixListener,
    peers: Vec<ServedPeer>,
    last_peer: u64,
    /// A connection waits for which the process had no file descriptor.
    is_short: bool,
}

impl Server {
    pub(super) fn new(
        stop: OwnedFd,
        store_socket: UnixListener,
        call_socket: UnixListener,
    ) -> Self {
        let (store, hypervisor, peers) =
            (SimulatedStore::new(), SimulatedHypervisor::default(), Vec::new());
        let (last_peer, is_short) = (0, false);
        Self { store, hypervisor, stop, store_socket, call_socket, peers, last_peer, is_short }
    }

    /// Serves until `stop` is signalled.
    pub(super) fn run(mut self) {
        loop {
            let ready = match self.wait() {
                Ok(ready) => ready,
                Err(Errno::INTR) => continue,
                Err(_) => return,
            };
            let [stop, store_socket, call_socket, peers @ ..] = ready.as_slice() else { return };
            if !stop.is_empty() {
                return;
            }
            for (at, ready) in peers.iter().enumerate() {
                self.serve(at, *ready);
            }
            // Events of one client's changes wait for others.
            (0..self.peers.len()).for_each(|at| self.send(at));
            self.bury();
            if !store_socket.is_empty() {
                self.accept(false);
            }
            if !call_socket.is_empty() {
                self.accept(true);
            }
        }
    }

    /// Waits until something is ready: stop, the two sockets, the peers.
    fn wait(&mut self) -> Result<Vec<PollFlags>, Errno> {
        let is_open = self.peers.len() < PEERS_MAX && !self.is_short;
        let accept = if is_open { PollFlags::IN } else { PollFlags::empty() };
        let timeout = self.is_short.then_some(&PAUSE);
        self.is_short = false;
        let mut flags = Vec::with_capacity(self.peers.len());
        for peer in &self.peers {
            flags.push(match peer.speaks {
                Speaks::Calls => PollFlags::IN,
                Speaks::Store { client, .. } => {
                    match self.store.output(client).map_or(0, |o| o.len()) {
                        0 => PollFlags::IN,
                        1..OUTPUT_SIZE_FULL => PollFlags::IN | PollFlags::OUT,
                        _ => PollFlags::OUT,
                    }
                }
            });
        }
        let mut fds = vec![
            PollFd::new(&self.stop, PollFlags::IN),
            PollFd::new(&self.store_socket, accept),
            PollFd::new(&self.call_socket, accept),
        ];
        fds.extend(
            self.peers.iter().zip(flags).map(|(peer, flags)| PollFd::new(&peer.stream, flags)),
        );
        poll(&mut fds, timeout)?;
        Ok(fds.iter().map(PollFd::revents).collect())
    }

    fn accept(&mut self, are_calls: bool) {
        let socket = if are_calls { &self.call_socket } else { &self.store_socket };
        match socket.accept() {
            Ok((stream, _)) => {
                let speaks = if are_calls { Speaks::Calls } else { self.store_client(None) };
                self.add(stream, speaks);
            }
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(_) => self.is_short = true,
        }
    }

    fn store_client(&mut self, domain: Option<u16>) -> Speaks {
        Speaks::Store { client: self.store.connect(domain), domain }
    }

    fn add(&mut self, stream: UnixStream, speaks: Speaks) {
        self.last_peer += 1;
        let is_over = stream.set_nonblocking(true).is_err();
        self.peers.push(ServedPeer {
            id: self.last_peer,
            stream,
            speaks,
            input: Vec::new(),
            is_over,
        });
    }

    /// Reads the bytes that a peer has sent, and serves it.
    fn serve(&mut self, at: usize, ready: PollFlags) {
        let peer = &mut self.peers[at];
        if ready.contains(PollFlags::IN) {
            let start = peer.input.len();
            peer.input.resize(start + READ_SIZE, 0);
            let read = match peer.stream.read(&mut peer.input[start..]) {
                Ok(0) => Err(()),
                Ok(read) => Ok(read),
                Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(0),
                Err(_) => Err(()),
            };
            peer.is_over |= read.is_err();
            peer.input.truncate(start + read.unwrap_or(0));
        } else if ready.intersects(PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL) {
            peer.is_over = true;
        }
        match peer.speaks {
            Speaks::Store { client, .. } => {
                self.send(at);
                let peer = &mut self.peers[at];
                self.store.receive(client, &mut peer.input);
                peer.is_over |= self.store.is_over(client);
            }
            Speaks::Calls => self.serve_calls(at),
        }
    }

    fn serve_calls(&mut self, at: usize) {
        while let Some((bytes, rest)) = self.peers[at].input.split_first_chunk::<CALL_SIZE>() {
            let (call, rest) = (Hypercall::parse(bytes), rest.to_vec());
            let caller = self.peers[at].id;
            let (outcome, mut fds) = match call {
                Some(call) => self.hypervisor.serve(caller, call),
                None => refused(Errno::NOSYS),
            };
            if let (Some(Hypercall::Create { domain, .. }), 0) = (call, outcome.errno) {
                match UnixStream::pair() {
                    Ok((ours, theirs)) => {
                        self.store.introduce(domain);
                        let speaks = self.store_client(Some(domain));
                        self.add(ours, speaks);
                        fds.push(theirs.into());
                    }
                    Err(_) => self.peers[at].is_over = true,
                }
            }
            let peer = &mut self.peers[at];
            peer.input = rest;
            peer.is_over |= send_reply(&peer.stream, &(outcome, fds)).is_err();
        }
    }

    /// Sends the bytes that wait for a client of the store, until the client takes no more.
    fn send(&mut self, at: usize) {
        let peer = &mut self.peers[at];
        let Speaks::Store { client, .. } = peer.speaks else { return };
        let Some(output) = self.store.output(client) else { return };
        while !output.is_empty() {
            match peer.stream.write(output) {
                Ok(sent) => drop(output.drain(..sent)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(_) => {
                    peer.is_over = true;
                    break;
                }
            }
        }
        peer.is_over |= self.store.is_over(client);
    }

    /// Removes peers that have disconnected or must be disconnected, and their domains.
    fn bury(&mut self) {
        while let Some(at) = self.peers.iter().position(|peer| peer.is_over) {
            let peer = self.peers.swap_remove(at);
            match peer.speaks {
                Speaks::Store { client, .. } => self.store.disconnect(client),
                Speaks::Calls => {
                    let Some(ended) = self.hypervisor.disconnect(peer.id) else { continue };
                    for peer in &mut self.peers {
                        let domain = if let Speaks::Store { domain, .. } = peer.speaks {
                            domain
                        } else {
                            None
                        };
                        peer.is_over |= domain == Some(ended);
                    }
                    self.store.release(ended);
                }
            }
        }
    }
}

/// Sends an answer with its file descriptors. A client whose socket is full does not read answers.
fn send_reply(stream: &UnixStream, (outcome, fds): &Reply) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(Errno::NOBUFS);
    }
    let (bytes, flags) = (outcome.emit(), SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
    let sent = sendmsg(stream, &[IoSlice::new(&bytes)], &mut control, flags)?;
    if sent == bytes.len() { Ok(()) } else { Err(Errno::PIPE) }
}
