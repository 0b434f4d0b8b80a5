//! TCP streams between two namespaces, all of a side in one process, each on a thread of its own:
//! `listen` and `connect`, of which one sends and the other receives.
//!
//! They run and rest as whoever holds the standard input says, so that streams over several ways
//! can take turns: connections are not made anew for each turn, and what is measured begins and
//! ends while everything rests. A page that all share says whether the streams run, and how many
//! bytes have arrived: to ask for that costs them nothing.
//! ```text
//! asked to run:  the page says so; a byte on the standard input wakes the senders
//! to rest:       the page says so; each sender ends its write, and waits for the next byte
//! ```
//! The page has times, too. Once in a mebibyte a sender notes when it began a message, and where in
//! its stream that ends; the receiver notes how long it took until it had read that byte.
//!
//! A guest and its host share no page. There the sender is told for how long to send (`--seconds`).
//! Then it waits until the receiver has read everything, and says how many bytes that were.

use super::{LoadError, measure_rate};
use crate::measure::now;
use clap::Args;
use manyring_memory::{Mapping, MemoryFiles};
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Shutdown, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{Ordering, fence};
use std::sync::mpsc;
use std::time::Duration;

/// `manyring-bench load stream ..`
#[derive(Args, Clone, Debug)]
pub(crate) struct StreamArgs {
    /// Wait for the streams at this address.
    #[arg(long, value_name = "ADDRESS", required_unless_present = "connect")]
    listen: Option<IpAddr>,
    /// Connect them to this address.
    #[arg(long, value_name = "ADDRESS", conflicts_with = "listen")]
    connect: Option<IpAddr>,
    /// The first stream's port; those of the others follow.
    #[arg(long, default_value_t = 5201)]
    port: u16,
    /// Streams.
    #[arg(long, default_value_t = 1)]
    streams: u16,
    /// Send messages of this many bytes [default: receive].
    #[arg(long, value_name = "BYTES")]
    send: Option<usize>,
    /// Send without Nagle's algorithm.
    #[arg(long, requires = "send")]
    nodelay: bool,
    /// Send for this many seconds, wait until everything has arrived, and print JSON.
    #[arg(long, requires = "send", conflicts_with = "page")]
    seconds: Option<f64>,
    /// The page that says whether streams run, and what has arrived [default, for a receiver and
    /// with `--seconds`: one that nobody else sees].
    #[arg(long, value_name = "PATH")]
    page: Option<PathBuf>,
}

/// The bytes and the rate at the receiver, for a sender with `--seconds`.
#[derive(Clone, Debug, Serialize)]
struct StreamResult {
    /// Bytes of all streams.
    bytes: u64,
    /// From the first write until the receiver had read everything.
    seconds: f64,
    /// Bytes in a second.
    rate: f64,
}

/// Bytes that a receiver takes at a time.
const RECEIVED_MAX: usize = 128 << 10;
/// Tries to connect until the receiver listens, and the pause between two.
const CONNECT_TRIES: u32 = 1000;
const CONNECT_AGAIN: Duration = Duration::from_millis(2);

/// A page in a file: whether streams run, how many bytes each has received, and how long some
/// messages took.
#[derive(Debug)]
pub(crate) struct Page(Mapping);

/// Bytes of the words of all streams, and from one of them to the next: each has a cache line of
/// its own. The words of receivers come first, then those of senders, then the times.
const WORDS: usize = 4096;
const WORD: usize = 64;
/// The latest times of each stream that are kept, of 8 bytes each.
const TIMES: usize = 64;
const PAGE: usize = 2 * WORDS + (STREAMS_MAX as usize + 1) * TIMES * size_of::<u64>();
/// Bytes of a stream from one message that is timed to the next.
const TIMED_EACH: u64 = 1 << 20;
/// Streams that a page has words for.
pub(crate) const STREAMS_MAX: u16 = 63;
const _: () =
    assert!((STREAMS_MAX as usize + 1) * WORD == WORDS, "a word for each, behind the first");

impl Page {
    /// A new one: nothing runs, nothing has arrived.
    pub(crate) fn create(path: &Path) -> std::io::Result<Self> {
        std::fs::write(path, [0; PAGE])?;
        Self::open(path)
    }

    fn open(path: &Path) -> std::io::Result<Self> {
        let file = std::fs::File::options().read(true).write(true).open(path)?;
        let mapping = Mapping::of_file_in(MemoryFiles::LocalDisk, &file, 0, PAGE as u64);
        mapping.map(Self).map_err(std::io::Error::other)
    }

    /// One that no other process sees.
    fn unshared() -> std::io::Result<Self> {
        Mapping::anonymous(PAGE as u64).map(Self).map_err(std::io::Error::other)
    }

    fn number(&self, at: usize) -> u64 {
        let slice = self.0.slice(at, size_of::<u64>());
        slice.and_then(|slice| slice.read_array()).map_or(0, u64::from_ne_bytes)
    }

    fn set_number(&self, at: usize, value: u64) {
        if let Some(slice) = self.0.slice(at, size_of::<u64>()) {
            slice.write_array(&value.to_ne_bytes());
        }
    }

    /// Of a sender: its message that ends behind `end` bytes of the stream began at `began_ns`.
    fn begin_message(&self, stream: usize, end: u64, began_ns: u64) {
        let at = WORDS + stream * WORD;
        self.set_number(at + size_of::<u64>(), began_ns);
        // Whoever sees the end sees the beginning.
        fence(Ordering::Release);
        self.set_number(at, end);
    }

    /// The end of the last message that a sender has timed, and when it began.
    fn message(&self, stream: usize) -> (u64, u64) {
        let at = WORDS + stream * WORD;
        let end = self.number(at);
        fence(Ordering::Acquire);
        (end, self.number(at + size_of::<u64>()))
    }

    fn times_at(stream: usize) -> usize {
        2 * WORDS + stream * TIMES * size_of::<u64>()
    }

    /// Of a receiver: the time of its `count`th message that was timed.
    fn set_time(&self, stream: usize, count: usize, ns: u64) {
        self.set_number(Self::times_at(stream) + count % TIMES * size_of::<u64>(), ns);
    }

    /// Returns the times of the latest timed messages of all streams, in nanoseconds, the shortest
    /// first.
    pub(crate) fn times(&self) -> Vec<u64> {
        let of_stream = |stream: usize| {
            (0..TIMES).map(move |n| self.number(Self::times_at(stream) + n * size_of::<u64>()))
        };
        let all = (1..=usize::from(STREAMS_MAX)).flat_map(of_stream);
        let mut times: Vec<u64> = all.filter(|ns| *ns > 0).collect();
        times.sort_unstable();
        times
    }

    fn runs(&self) -> bool {
        self.number(0) != 0
    }

    /// Lets streams run or rest; those that rest must be woken as well.
    pub(crate) fn set_running(&self, runs: bool) {
        self.set_number(0, runs.into());
    }

    /// True once each of the first `streams` has received something.
    pub(crate) fn all_received(&self, streams: u16) -> bool {
        (1..=usize::from(streams)).all(|index| self.number(index * WORD) > 0)
    }

    /// Bytes that all streams have received.
    pub(crate) fn received(&self) -> u64 {
        (1..=usize::from(STREAMS_MAX)).map(|index| self.number(index * WORD)).sum()
    }
}

/// Sends or receives until the standard input ends, the other side does, or the time is over.
///
/// # Errors
/// [`LoadError`] if a stream cannot be had, or breaks.
pub(crate) fn run(args: &StreamArgs) -> Result<(), LoadError> {
    if !(1..=STREAMS_MAX).contains(&args.streams) || args.send == Some(0) {
        return Err(LoadError::Options("1 to 63 streams, messages of 1 byte or more"));
    }
    let time = args.seconds.map(Duration::try_from_secs_f64).transpose();
    let time = time.map_err(|_| LoadError::Options("--seconds is no time"))?;
    if args.send.is_some() && args.page.is_none() && time.is_none() {
        return Err(LoadError::Options("who sends needs --page or --seconds"));
    }
    let failed =
        |error: std::io::Error| LoadError::Client { step: "streams", problem: error.to_string() };
    let page = args.page.as_ref().map_or_else(Page::unshared, |path| Page::open(path));
    let page = page.map_err(failed)?;
    let streams = open_all(args).map_err(failed)?;
    if args.nodelay {
        streams.iter().try_for_each(|stream| stream.set_nodelay(true)).map_err(failed)?;
    }
    let start = now();
    let bytes = carry(args, time, streams, &page).map_err(failed)?;
    if time.is_some() {
        let seconds = start.elapsed().as_secs_f64();
        let result = StreamResult { bytes, seconds, rate: measure_rate(bytes, seconds) };
        println!("{}", serde_json::to_string(&result).map_err(|error| failed(error.into()))?);
    }
    Ok(())
}

/// Has each stream a thread, and gives the bytes that all of them have sent or received.
fn carry(
    args: &StreamArgs,
    time: Option<Duration>,
    streams: Vec<TcpStream>,
    page: &Page,
) -> std::io::Result<u64> {
    std::thread::scope(|scope| {
        let (mut wakers, mut ends) = (Vec::new(), Vec::new());
        for (place, mut stream) in (1..).zip(streams) {
            ends.push(match args.send {
                Some(size) => {
                    let (waker, woken) = mpsc::channel();
                    wakers.push(waker);
                    scope.spawn(move || {
                        let sent = send(&mut stream, size, (page, place), &woken)?;
                        if time.is_some() {
                            await_reader(&mut stream)?;
                        }
                        Ok(sent)
                    })
                }
                None => scope.spawn(move || receive(stream, page, place)),
            });
        }
        match (args.send, time) {
            (Some(_), Some(time)) => run_for(time, page, &wakers),
            (Some(_), None) => wake_each(&wakers)?,
            (None, _) => {}
        }
        drop(wakers);
        let end = |thread: std::thread::ScopedJoinHandle<'_, _>| {
            thread.join().unwrap_or_else(|_| Err(std::io::Error::other("panicked")))
        };
        ends.into_iter().map(end).sum()
    })
}

/// Lets all senders run for a while, once.
fn run_for(time: Duration, page: &Page, wakers: &[mpsc::Sender<()>]) {
    page.set_running(true);
    // One that is gone has said why.
    wakers.iter().for_each(|waker| _ = waker.send(()));
    std::thread::sleep(time);
    page.set_running(false);
}

/// Waits until the other side has read everything: it closes when it has seen our end.
fn await_reader(stream: &mut TcpStream) -> std::io::Result<()> {
    stream.shutdown(Shutdown::Write)?;
    match stream.read(&mut [0])? {
        0 => Ok(()),
        _ => Err(ErrorKind::InvalidData.into()),
    }
}

/// Wakes every sender for each byte of the standard input, until that ends.
fn wake_each(wakers: &[mpsc::Sender<()>]) -> std::io::Result<()> {
    let mut stdin = std::io::stdin().lock();
    while stdin.read(&mut [0])? > 0 {
        // One that is gone has said why.
        wakers.iter().for_each(|waker| _ = waker.send(()));
    }
    Ok(())
}

fn open_all(args: &StreamArgs) -> std::io::Result<Vec<TcpStream>> {
    let ports = (args.port..).take(args.streams.into());
    if let Some(address) = args.listen {
        let listeners: Vec<TcpListener> =
            ports.map(|port| TcpListener::bind((address, port))).collect::<Result<_, _>>()?;
        return listeners.iter().map(|listener| Ok(listener.accept()?.0)).collect();
    }
    let address = args.connect.ok_or(ErrorKind::InvalidInput)?;
    ports.map(|port| connect((address, port))).collect()
}

fn connect(to: (IpAddr, u16)) -> std::io::Result<TcpStream> {
    let mut tries = 0..CONNECT_TRIES;
    loop {
        match TcpStream::connect(to) {
            Err(error)
                if error.kind() == ErrorKind::ConnectionRefused && tries.next().is_some() =>
            {
                std::thread::sleep(CONNECT_AGAIN);
            }
            result => return result,
        }
    }
}

/// Sends while the page says so; returns how many bytes, once nobody can wake it any more.
fn send(
    stream: &mut TcpStream,
    size: usize,
    (page, place): (&Page, usize),
    woken: &mpsc::Receiver<()>,
) -> std::io::Result<u64> {
    let message = vec![0; size];
    let (mut sent, mut next) = (0, 0);
    while woken.recv().is_ok() {
        while page.runs() {
            if sent >= next {
                page.begin_message(place, sent + size as u64, clock_ns());
                next = sent + TIMED_EACH;
            }
            stream.write_all(&message)?;
            sent += size as u64;
        }
    }
    Ok(sent)
}

/// The clock that all processes of the host share.
fn clock_ns() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    u64::try_from(time.tv_sec * 1_000_000_000 + time.tv_nsec).unwrap_or(0)
}

fn receive(mut stream: TcpStream, page: &Page, place: usize) -> std::io::Result<u64> {
    let mut buffer = vec![0; RECEIVED_MAX];
    let (mut received, mut timed, mut count) = (0, 0, 0);
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return Ok(received),
            Ok(len) => received += len as u64,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        page.set_number(place * WORD, received);
        let (end, began_ns) = page.message(place);
        if end > timed && received >= end {
            page.set_time(place, count, clock_ns().saturating_sub(began_ns).max(1));
            (timed, count) = (end, count + 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_tells_other_processes_what_runs_and_what_has_arrived() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("page");
        let ours = Page::create(&path).unwrap();
        let theirs = Page::open(&path).unwrap();
        assert!(!theirs.runs());
        ours.set_running(true);
        assert!(theirs.runs());
        theirs.set_number(WORD, 5);
        theirs.set_number(usize::from(STREAMS_MAX) * WORD, 7);
        assert_eq!(ours.received(), 12);
        theirs.begin_message(STREAMS_MAX.into(), 9, 3);
        assert_eq!(ours.message(STREAMS_MAX.into()), (9, 3));
        (0..=TIMES).for_each(|count| theirs.set_time(1, count, 100 + count as u64));
        assert_eq!((ours.times().len(), ours.times()[0]), (TIMES, 101), "the oldest one is gone");
        assert_eq!(ours.received(), 12);
    }

    #[test]
    fn a_sender_sends_while_streams_run_and_rests_after_that() {
        let folder = tempfile::tempdir().unwrap();
        let page = Page::create(&folder.path().join("page")).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = listener.local_addr().unwrap();
        let mut sender = connect((to.ip(), to.port())).unwrap();
        let receiver = listener.accept().unwrap().0;
        let (waker, woken) = mpsc::channel();
        std::thread::scope(|scope| {
            let page = &page;
            let sends = scope.spawn(move || {
                let sent = send(&mut sender, 512, (page, 1), &woken)?;
                await_reader(&mut sender).map(|()| sent)
            });
            let receives = scope.spawn(move || receive(receiver, page, 1));
            let mut before = 0;
            for _ in 0..2 {
                page.set_running(true);
                waker.send(()).unwrap();
                while page.received() == before {
                    std::thread::yield_now();
                }
                page.set_running(false);
                before = page.received();
            }
            drop(waker);
            let (sent, received) = (sends.join().unwrap(), receives.join().unwrap());
            assert_eq!(sent.unwrap(), received.unwrap());
        });
        assert_eq!(page.received() % 512, 0, "whole messages");
        let times = page.times();
        assert!(!times.is_empty() && times.is_sorted(), "the first message is timed: {times:?}");
    }
}
