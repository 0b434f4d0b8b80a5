//! Requests and responses over TCP: a server that answers each message with itself, a client with
//! N connections, one request in flight on each. One thread each, which sleeps in epoll.
//!
//! No two requests of a run have the same bytes (if they have eight or more), and the client
//! compares each answer with what it asked: one that is wrong, stale or another connection's ends
//! the run as an error.

pub(crate) mod crr;

use super::{LoadError, STUCK, measure_rate};
use crate::measure::{Latencies, now};
use clap::Args;
use rustix::buffer::spare_capacity;
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// `manyring-bench load rr-server ..`
#[derive(Args, Clone, Debug)]
pub(crate) struct RrServerArgs {
    /// Where to listen.
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: SocketAddr,
    /// Bytes of a request, and of its response.
    #[arg(long, default_value_t = 256)]
    size: usize,
    /// Close each connection behind its first response.
    #[arg(long)]
    close: bool,
    /// How long at most, in seconds.
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
}

/// `manyring-bench load rr ..`
#[derive(Args, Clone, Debug)]
pub(crate) struct RrArgs {
    /// The server.
    #[arg(long, value_name = "ADDRESS:PORT")]
    server: SocketAddr,
    /// Connections.
    #[arg(long, default_value_t = 1)]
    connections: usize,
    /// Bytes of a request, and of its response.
    #[arg(long, default_value_t = 256)]
    size: usize,
    /// How long, in seconds.
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
}

/// The results of a client: transactions, rate and latencies.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct RrResult {
    /// Number of transactions.
    pub(crate) transactions: u64,
    /// Transactions per second.
    pub(crate) rate: f64,
    /// Median latency in microseconds.
    pub(crate) p50_us: f64,
    /// 99th percentile of the latencies in microseconds.
    pub(crate) p99_us: f64,
}

impl RrResult {
    /// The results of transactions with these latencies, within `elapsed`.
    fn of(latencies: &Latencies, elapsed: Duration) -> Self {
        let transactions = latencies.count();
        Self {
            transactions,
            rate: measure_rate(transactions, elapsed.as_secs_f64()),
            p50_us: latencies.quantile_us(0.5),
            p99_us: latencies.quantile_us(0.99),
        }
    }
}

/// A connection, and the message that is being received on it.
struct RrConnection {
    stream: TcpStream,
    message: Vec<u8>,
    len: usize,
    sent: Instant,
}

impl RrConnection {
    fn new(stream: TcpStream, size: usize) -> std::io::Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        Ok(Self { stream, message: vec![0; size], len: 0, sent: now() })
    }

    /// Sends a whole message, which is small enough for any send buffer.
    fn send(&mut self) -> std::io::Result<()> {
        self.stream.write_all(&self.message)
    }

    /// Sends the request with this number.
    fn ask(&mut self, number: u64) -> std::io::Result<()> {
        for (word, chunk) in request(number).zip(self.message.chunks_mut(8)) {
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
        self.send()
    }

    /// True if the message received is the answer to request `number`: the same bytes.
    fn is_answer(&self, number: u64) -> bool {
        let mut words = request(number).zip(self.message.chunks(8));
        words.all(|(word, chunk)| word[..chunk.len()] == *chunk)
    }

    /// Reads the bytes that have arrived. True: the message is complete.
    fn receive(&mut self) -> std::io::Result<bool> {
        match self.stream.read(&mut self.message[self.len..]) {
            Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => {
                self.len = (self.len + count) % self.message.len();
                Ok(self.len == 0)
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// True if the other side has closed the connection. Further bytes from it are an error.
    fn is_closed(&mut self) -> std::io::Result<bool> {
        match self.stream.read(&mut [0]) {
            Ok(0) => Ok(true),
            Ok(_) => Err(ErrorKind::InvalidData.into()),
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// The bytes of a request, eight at a time: different for each number, and within a request.
fn request(number: u64) -> impl Iterator<Item = [u8; 8]> {
    (0..).map(move |index: u64| {
        // An odd factor keeps different numbers different, and fills all eight bytes.
        (number.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ index).to_le_bytes()
    })
}

/// Waits for events of several connections, by epoll.
struct Poller {
    epoll: OwnedFd,
    events: Vec<epoll::Event>,
}

/// Most events of one wait.
const EVENTS: usize = 128;

impl Poller {
    fn new() -> Result<Self, Errno> {
        Ok(Self { epoll: epoll::create(CreateFlags::CLOEXEC)?, events: Vec::with_capacity(EVENTS) })
    }

    fn add(&self, source: impl AsFd, token: usize) -> Result<(), Errno> {
        self.add_for(source, token, EventFlags::IN)
    }

    fn add_for(&self, source: impl AsFd, token: usize, flags: EventFlags) -> Result<(), Errno> {
        epoll::add(&self.epoll, source, EventData::new_u64(token as u64), flags)
    }

    /// Waits for other events of a source that was added before.
    fn wait_for(&self, source: impl AsFd, token: usize, flags: EventFlags) -> Result<(), Errno> {
        epoll::modify(&self.epoll, source, EventData::new_u64(token as u64), flags)
    }

    /// Waits, and returns the tokens of the sources that have events.
    fn wait(&mut self) -> Result<Vec<usize>, Errno> {
        let timeout = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
        self.events.clear();
        match epoll::wait(&self.epoll, spare_capacity(&mut self.events), Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
        let tokens = self.events.iter().map(|e| usize::try_from(e.data.u64()).unwrap_or(0));
        Ok(tokens.collect())
    }
}

/// A run of a client: its end, and the time of the last answer.
#[derive(Debug)]
struct RrRun {
    start: Instant,
    end: Instant,
    last: Instant,
    /// How many answers the client waits for at a time.
    in_flight: usize,
    max_wait: Duration,
}

/// The connections that have something, and when they were asked.
struct ReadyConnections {
    tokens: Vec<usize>,
    at: Instant,
}

impl RrRun {
    fn begin(seconds: f64, in_flight: usize) -> Self {
        let duration = Duration::try_from_secs_f64(seconds).unwrap_or_default();
        let (start, max_wait) = (now(), STUCK.min(duration));
        Self { start, end: start + duration, last: start, in_flight, max_wait }
    }

    /// Waits for connections that have something; `None` when the time is over.
    ///
    /// # Errors
    /// [`LoadError::Stuck`]: nothing has come for too long.
    fn next(&mut self, poller: &mut Poller) -> Result<Option<ReadyConnections>, LoadError> {
        let tokens = poller.wait().map_err(poll_failed)?;
        let at = now();
        if at >= self.end {
            return Ok(None);
        }
        if !tokens.is_empty() {
            self.last = at;
        } else if at - self.last > self.max_wait {
            let (in_flight, seconds) = (self.in_flight, STUCK.as_secs());
            return Err(LoadError::Stuck { in_flight, seconds });
        }
        Ok(Some(ReadyConnections { tokens, at }))
    }
}

fn failed(step: &'static str) -> impl Fn(std::io::Error) -> LoadError {
    move |error| LoadError::Client { step, problem: error.to_string() }
}

fn poll_failed(errno: Errno) -> LoadError {
    failed("epoll")(errno.into())
}

/// Answers each message with itself.
///
/// # Errors
/// [`LoadError`] if it cannot listen.
pub(crate) fn server(args: &RrServerArgs) -> Result<(), LoadError> {
    check(args.size)?;
    let end = now() + Duration::try_from_secs_f64(args.seconds).unwrap_or_default();
    let listener = TcpListener::bind(args.listen).map_err(failed("listen"))?;
    listener.set_nonblocking(true).map_err(failed("listen"))?;
    let mut poller = Poller::new().map_err(poll_failed)?;
    poller.add(&listener, 0).map_err(poll_failed)?;
    // The first place is the listener's.
    let (mut peers, mut free): (Vec<Option<RrConnection>>, Vec<usize>) = (vec![None], Vec::new());
    while now() < end {
        for token in poller.wait().map_err(poll_failed)? {
            if token == 0 {
                while let Ok((stream, _)) = listener.accept() {
                    let peer = RrConnection::new(stream, args.size).map_err(failed("accept"))?;
                    let place = free.pop().unwrap_or(peers.len());
                    poller.add(&peer.stream, place).map_err(poll_failed)?;
                    if place == peers.len() {
                        peers.push(None);
                    }
                    peers[place] = Some(peer);
                }
            } else if let Some(peer) = &mut peers[token] {
                let is_answered = peer.receive().and_then(|is_whole| {
                    if is_whole {
                        peer.send()?;
                    }
                    Ok(is_whole)
                });
                if is_answered.map_or(true, |is_answered| is_answered && args.close) {
                    peers[token] = None;
                    free.push(token);
                }
            }
        }
    }
    Ok(())
}

/// Sends requests on all connections until the time is over.
///
/// # Errors
/// [`LoadError`] if the server cannot be reached, goes silent, or answers with other bytes.
pub(crate) fn client(args: &RrArgs) -> Result<RrResult, LoadError> {
    check(args.size)?;
    let mut poller = Poller::new().map_err(poll_failed)?;
    let mut peers = Vec::with_capacity(args.connections);
    for token in 0..args.connections {
        let stream = connect(args.server)?;
        let peer = RrConnection::new(stream, args.size).map_err(failed("connect"))?;
        poller.add(&peer.stream, token).map_err(poll_failed)?;
        peers.push(peer);
    }
    let (mut run, mut latencies) = (RrRun::begin(args.seconds, peers.len()), Latencies::new());
    // A request's number combines its connection and how many requests that has sent.
    let number = |token: usize, turn: u64| ((token as u64) << 40) | turn;
    let mut turns = vec![0; peers.len()];
    for (token, peer) in peers.iter_mut().enumerate() {
        peer.sent = run.start;
        peer.ask(number(token, 0)).map_err(failed("send"))?;
    }
    while let Some(ReadyConnections { tokens, at }) = run.next(&mut poller)? {
        for token in tokens {
            let (peer, turn) = (&mut peers[token], &mut turns[token]);
            if peer.receive().map_err(failed("receive"))? {
                if !peer.is_answer(number(token, *turn)) {
                    return Err(LoadError::Options("an answer has other bytes than its request"));
                }
                latencies.record(at - peer.sent);
                *turn += 1;
                peer.sent = at;
                peer.ask(number(token, *turn)).map_err(failed("send"))?;
            }
        }
    }
    Ok(RrResult::of(&latencies, run.start.elapsed()))
}

fn check(size: usize) -> Result<(), LoadError> {
    match size {
        1..=16_384 => Ok(()),
        _ => Err(LoadError::Options("messages of 1 to 16384 bytes")),
    }
}

/// Connects, waiting for the server to come up.
fn connect(server: SocketAddr) -> Result<TcpStream, LoadError> {
    let start = now();
    loop {
        match TcpStream::connect_timeout(&server, Duration::from_secs(2)) {
            Ok(stream) => return Ok(stream),
            Err(error) if start.elapsed() > Duration::from_secs(3) => {
                return Err(failed("connect")(error));
            }
            Err(_) => std::thread::sleep(Duration::from_millis(10)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A client's connection, and the other end of it.
    fn pair(size: usize) -> (RrConnection, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let peer = RrConnection::new(near, size).unwrap();
        (peer, listener.accept().unwrap().0)
    }

    fn until_whole(peer: &mut RrConnection) {
        while !peer.receive().unwrap() {
            std::thread::yield_now();
        }
    }

    #[test]
    fn an_answer_is_right_only_with_the_bytes_of_its_own_request() {
        // The last of them does not end with a whole word.
        for size in [8, 256, 259] {
            let (mut peer, mut far) = pair(size);
            peer.ask(7).unwrap();
            let mut asked = vec![0; size];
            far.read_exact(&mut asked).unwrap();
            far.write_all(&asked).unwrap();
            until_whole(&mut peer);
            assert!(peer.is_answer(7), "{size}");
            assert!(!peer.is_answer(6) && !peer.is_answer(7 | (1 << 40)), "{size}");
            for at in [0, size / 2, size - 1] {
                let mut wrong = asked.clone();
                wrong[at] ^= 0x10;
                far.write_all(&wrong).unwrap();
                until_whole(&mut peer);
                assert!(!peer.is_answer(7), "{size}, byte {at}");
            }
        }
    }
}
