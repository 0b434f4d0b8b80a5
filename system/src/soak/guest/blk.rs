//! A well-behaved guest with a disk of many queues: every sector it reads is the one it wrote.

use super::late::{Latencies, Mark, Route};
use super::probe::Probe;
use super::{Orders, say};
use crate::soak::random::{Random, stamp};
use crate::soak::stage::is_direct;
use crate::{Context, Outcome, check};
use manyring_driver::wire::blk::VIRTIO_BLK_F_WRITE_ZEROES;
use manyring_driver::{BlkDriver, BlkDriverOptions, BlkDriverQueue, DriverOp};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::{Value, json};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Queues of the disk. A worker takes 4 or 8 requests of a queue in one turn: with 80 queues, a
/// worker that was held up for a moment has more to start than its submission queue holds.
pub(in crate::soak) const QUEUES: u16 = 80;
/// Requests in flight in each queue.
const DEPTH: u64 = 8;
/// Bytes of the disk.
pub(in crate::soak) const DISK_SIZE: u64 = 48 << 20;

const BLOCK: usize = 4096;
/// The largest request, in blocks.
const RUN: u64 = 4;
/// Blocks that one request of a queue may touch; the next request has the next ones.
const LANE: u64 = DISK_SIZE / BLOCK as u64 / QUEUES as u64 / DEPTH;
/// A request that takes longer is lost.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Guest memory that no request names and that must stay as it is.
const CANARY: usize = 256 << 10;

/// A request in flight.
struct Flight {
    queue: usize,
    tag: u16,
    op: Kind,
    block: u64,
    blocks: u64,
    sent: Instant,
    took: Option<Duration>,
    /// Made when it was taken back, if it is suspect: what others wait for later explains nothing.
    end: Option<Rc<Mark>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Read,
    Write,
    Zeroes,
    Flush,
}

struct Guest {
    number: u64,
    driver: BlkDriver,
    random: Random,
    /// The version with which each block was written last; 0: zeroes.
    versions: Vec<u64>,
    next_version: u64,
    canary: u64,
    latencies: Latencies,
    requests: u64,
    wrong: u64,
    first_wrong: String,
    /// The pattern that is written or expected.
    pattern: Vec<u8>,
    /// The bytes of the last read.
    bytes: Vec<u8>,
}

/// Runs until `stop`, then compares the whole image.
pub(super) fn run(orders: &Orders, stop: &AtomicBool) -> Outcome<Value> {
    let mut guest = Guest::new(orders)?;
    say(&json!("ready"))?;
    while !stop.load(Ordering::Relaxed) {
        guest.round()?;
        std::thread::sleep(Duration::from_micros(guest.random.below(20_000)));
    }
    guest.driver.queues[0].flush().context("the last flush")?;
    guest.compare_image(&orders.more)?;
    guest.compare_canary()?;
    let mut report = guest.latencies.report();
    report["what"] = json!("requests");
    report["count"] = json!(guest.requests);
    report["wrong"] = json!(guest.wrong);
    report["first_wrong"] = json!(guest.first_wrong);
    Ok(report)
}

impl Guest {
    fn new(orders: &Orders) -> Outcome<Self> {
        let defaults = BlkDriverOptions::default();
        let options = BlkDriverOptions {
            queues: QUEUES,
            queue_size: 16,
            features: defaults.features | VIRTIO_BLK_F_WRITE_ZEROES,
            buffer_size: u32::try_from(RUN).unwrap_or(1) * 4096,
            // A request is in several pieces of memory.
            segment_size: 4096,
            spare: 1 << 20,
            ..defaults
        };
        let driver = BlkDriver::connect(&orders.socket, &options).context("the session")?;
        let probe = Probe::start(Path::new(&orders.more), is_direct(orders.number))?;
        check(driver.capacity() == DISK_SIZE, || format!("a disk of {}", driver.capacity()))?;
        let canary = driver.arena.alloc(CANARY as u64, 4096).context("guest memory")?;
        let mut pattern = vec![0; CANARY];
        stamp(&mut pattern, orders.number.into(), u64::MAX, 0);
        driver.arena.write(canary, &pattern).context("guest memory")?;
        let blocks = usize::try_from(DISK_SIZE).unwrap_or(0) / BLOCK;
        Ok(Self {
            number: orders.number.into(),
            driver,
            random: Random::new(orders.seed),
            versions: vec![0; blocks],
            next_version: 1,
            canary,
            latencies: Latencies::new(orders.daemon, Route::Disk(probe))?,
            requests: 0,
            wrong: 0,
            first_wrong: String::new(),
            pattern,
            bytes: vec![0; BLOCK],
        })
    }

    /// Fills all queues, kicks them all, takes what comes back, and compares.
    fn round(&mut self) -> Outcome {
        let mut flights = Vec::new();
        for queue in 0..self.driver.queues.len() {
            for lane in 0..DEPTH {
                flights.push(self.submit(queue, lane)?);
            }
        }
        let mark = self.latencies.mark();
        let sent = Instant::now();
        for flight in &mut flights {
            flight.sent = sent;
        }
        for queue in &mut self.driver.queues {
            queue.publish().context("a kick")?;
        }
        self.collect(&mut flights)?;
        for flight in &flights {
            let took = flight.took.unwrap_or(TIMEOUT);
            let requests = self.requests;
            let what = || format!("{:?} of queue {}, request {requests}", flight.op, flight.queue);
            let marks = (&mark, flight.end.as_deref());
            self.latencies.add(flight.sent, took, marks, what);
            self.requests += 1;
        }
        for flight in flights.iter().filter(|flight| flight.op == Kind::Read) {
            self.compare_flight(flight)?;
        }
        if self.random.below(16) == 0 { self.compare_canary() } else { Ok(()) }
    }

    fn submit(&mut self, queue: usize, lane: u64) -> Outcome<Flight> {
        let blocks = 1 + self.random.below(RUN);
        let first = (queue as u64 * DEPTH + lane) * LANE;
        let block = first + self.random.below(LANE - blocks);
        let op = match self.random.below(32) {
            0..15 => Kind::Read,
            15..30 => Kind::Write,
            30 => Kind::Zeroes,
            _ => Kind::Flush,
        };
        let sector = block * 8;
        let len = usize::try_from(blocks).unwrap_or(1) * BLOCK;
        if matches!(op, Kind::Write | Kind::Zeroes) {
            let version = if op == Kind::Write { self.next_version } else { 0 };
            self.next_version += 1;
            for index in block..block + blocks {
                self.versions[slot(index)] = version;
                let at = slot(index - block) * BLOCK;
                fill(&mut self.pattern[at..at + BLOCK], self.number, index, version);
            }
        }
        let request = match op {
            Kind::Read => DriverOp::Read { sector, len },
            Kind::Write => DriverOp::Write { sector, data: &self.pattern[..len] },
            Kind::Zeroes => {
                let count = u32::try_from(blocks * 8).unwrap_or(8);
                DriverOp::WriteZeroes { sector, count, unmap: false }
            }
            Kind::Flush => DriverOp::Flush,
        };
        let tag = self.driver.queues[queue].submit(request).context("a request")?;
        let tag = tag.ok_or("the ring is full")?;
        Ok(Flight { queue, tag, op, block, blocks, sent: Instant::now(), took: None, end: None })
    }

    /// Takes every request back, sleeping while none is back; notes how long each took.
    fn collect(&mut self, flights: &mut [Flight]) -> Outcome {
        let start = Instant::now();
        let mut missing = flights.len();
        while missing > 0 {
            let (mut found, mut end) = (0, None);
            for (index, queue) in self.driver.queues.iter_mut().enumerate() {
                while let Some(done) = queue.take() {
                    let flight = flights
                        .iter_mut()
                        .find(|f| f.queue == index && f.tag == done.tag && f.took.is_none());
                    let flight = flight.ok_or("a request was returned that was not sent")?;
                    flight.took = Some(flight.sent.elapsed());
                    // All were sent at once; those that are found in one look share a mark.
                    end = end.or_else(|| self.latencies.end(flight.sent).map(Rc::new));
                    flight.end.clone_from(&end);
                    check(done.status == 0, || {
                        format!("{:?} ended with status {}", flight.op, done.status)
                    })?;
                    found += 1;
                }
            }
            missing -= found;
            if found == 0 && missing > 0 {
                sleep_until_called(&mut self.driver.queues)?;
                check(start.elapsed() < TIMEOUT, || {
                    format!("{missing} requests did not come back within {TIMEOUT:?}")
                })?;
            }
        }
        Ok(())
    }

    /// Compares what a read has brought.
    fn compare_flight(&mut self, flight: &Flight) -> Outcome {
        let mut bytes = std::mem::take(&mut self.bytes);
        bytes.resize(slot(flight.blocks) * BLOCK, 0);
        let queue = &self.driver.queues[flight.queue];
        queue.read_data(flight.tag, &mut bytes).context("guest memory")?;
        for (block, bytes) in (flight.block..).zip(bytes.chunks(BLOCK)) {
            self.compare_block(block, bytes, "a read of");
        }
        self.bytes = bytes;
        Ok(())
    }

    fn compare_block(&mut self, block: u64, bytes: &[u8], how: &str) {
        let version = self.versions[slot(block)];
        fill(&mut self.pattern[..BLOCK], self.number, block, version);
        if bytes != &self.pattern[..BLOCK] {
            let differs = bytes.iter().zip(&self.pattern).position(|(one, other)| one != other);
            let at = differs.unwrap_or(0);
            self.note(|| format!("{how} block {block}, version {version}, differs from byte {at}"));
        }
    }

    /// Reads the image as the host has it, past the daemon.
    fn compare_image(&mut self, image: &str) -> Outcome {
        let file = std::fs::File::open(image).context(image)?;
        let mut bytes = vec![0; BLOCK];
        for block in 0..self.versions.len() as u64 {
            file.read_exact_at(&mut bytes, block * BLOCK as u64).context(image)?;
            self.compare_block(block, &bytes, "the image's");
        }
        Ok(())
    }

    fn compare_canary(&mut self) -> Outcome {
        self.bytes.resize(CANARY, 0);
        self.driver.arena.read(self.canary, &mut self.bytes).context("guest memory")?;
        stamp(&mut self.pattern, self.number, u64::MAX, 0);
        if self.bytes != self.pattern {
            self.note(|| "guest memory that no request names was written".into());
        }
        Ok(())
    }

    fn note(&mut self, what: impl FnOnce() -> String) {
        if self.wrong == 0 {
            self.first_wrong = what();
        }
        self.wrong += 1;
    }
}

/// Asks all queues for calls, looks again, and sleeps until one comes (100 ms at most).
fn sleep_until_called(queues: &mut [BlkDriverQueue]) -> Outcome {
    let mut is_there = false;
    for queue in queues.iter_mut().filter(|queue| queue.in_flight() > 0) {
        is_there |= queue.vring().queue().enable_notifications();
    }
    if !is_there {
        let busy: Vec<_> = queues.iter_mut().filter(|queue| queue.in_flight() > 0).collect();
        let vrings: Vec<_> = busy.into_iter().map(|queue| &*queue.vring()).collect();
        let mut fds: Vec<_> =
            vrings.iter().map(|v| PollFd::from_borrowed_fd(v.call_fd(), PollFlags::IN)).collect();
        let limit = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
        poll(&mut fds, Some(&limit)).context("poll")?;
    }
    for queue in queues {
        queue.vring().clear_call().context("a call")?;
        queue.vring().queue().disable_notifications();
    }
    Ok(())
}

fn slot(block: u64) -> usize {
    usize::try_from(block).unwrap_or(usize::MAX)
}

/// The content of a block: a stamp for each sector, or zeroes.
fn fill(bytes: &mut [u8], guest: u64, block: u64, version: u64) {
    if version == 0 {
        bytes.fill(0);
        return;
    }
    for (sector, bytes) in (block * 8..).zip(bytes.chunks_mut(512)) {
        stamp(bytes, guest, sector, version);
    }
}
