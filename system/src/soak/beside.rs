//! A client of another disk of the daemons that are killed: libblkio, which compares what it reads.
//!
//! It never connects again by itself. So it is a new client for each daemon: it reads all blocks,
//! and then writes blocks at depth 16 until its daemon is killed. A block holds the last write that
//! was answered, or a later one that was not: whoever is killed may have done that or not.

use super::random::{Random, mix, stamp};
use crate::{Context, Outcome, check};
use blkio::{Blkio, Blkioq, MemoryRegion, ReqFlags};
use std::fs::File;
use std::mem::MaybeUninit;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Bytes of a block.
const BLOCK: usize = 4096;
/// Blocks of the disk.
const BLOCKS: usize = 1024;
/// Requests at a time.
const DEPTH: usize = 16;
/// Mebibytes of the disk.
pub(super) const DISK_MIB: u64 = (BLOCK * BLOCKS) as u64 >> 20;
/// How long a client waits before it looks whether its daemon is still the same.
const LOOK: Duration = Duration::from_millis(100);
/// How long an answer of a daemon that lives may take.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The client, on a thread of its own.
pub(super) struct Beside {
    told: Arc<Told>,
    thread: JoinHandle<Outcome<Compared>>,
}

/// The state by which the soak tells the client of the daemons and of the end.
#[derive(Default)]
struct Told {
    /// Counts the daemons.
    daemon: AtomicU32,
    /// When the one before was killed, until its successor has answered.
    killed: Mutex<Option<Instant>>,
    is_over: AtomicBool,
}

/// The client's results.
#[derive(Clone, Debug, Default)]
pub(super) struct Compared {
    /// How many blocks were read and compared.
    blocks: u64,
    /// How many daemons served it.
    daemons: u32,
    /// The times from the end of a daemon to the first answers of the next one.
    pauses: Vec<Duration>,
}

impl std::fmt::Display for Compared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut ms: Vec<_> = self.pauses.iter().map(Duration::as_millis).collect();
        ms.sort_unstable();
        let (middle, most) = (ms.get(ms.len() / 2).copied(), ms.last().copied());
        write!(
            f,
            "libblkio compared {} blocks, served by {} daemons; from a kill to the first answers \
             of the next daemon {} ms, at most {} ms",
            self.blocks,
            self.daemons,
            middle.unwrap_or_default(),
            most.unwrap_or_default()
        )
    }
}

impl Beside {
    /// Begins with a disk that is all zeroes, at this socket of a daemon that listens.
    pub(super) fn start(socket: PathBuf, seed: u64) -> Self {
        let told = Arc::new(Told::default());
        let mut client = Client {
            socket,
            told: told.clone(),
            random: Random::new(mix(seed)),
            blocks: vec![Block::default(); BLOCKS],
            version: 0,
            compared: Compared::default(),
        };
        Self { told, thread: std::thread::spawn(move || client.run()) }
    }

    /// A daemon was killed then, and another one listens, or will at once.
    pub(super) fn next_daemon(&self, killed: Instant) {
        *self.told.killed.lock().unwrap_or_else(PoisonError::into_inner) = Some(killed);
        self.told.daemon.fetch_add(1, Ordering::Relaxed);
    }

    /// Ends, after all blocks were compared once more.
    ///
    /// # Errors
    /// A block was not as it was written, or a daemon did not answer.
    pub(super) fn finish(self) -> Outcome<Compared> {
        self.told.is_over.store(true, Ordering::Relaxed);
        self.thread.join().unwrap_or_else(|_| Err("the client of libblkio has panicked".into()))
    }
}

/// The versions that a block may hold: the one whose write was answered last, or any whose write
/// was not answered.
#[derive(Clone, Debug, Default)]
struct Block {
    answered: u64,
    open: Vec<u64>,
}

struct Client {
    socket: PathBuf,
    told: Arc<Told>,
    random: Random,
    blocks: Vec<Block>,
    version: u64,
    compared: Compared,
}

/// A connection, with a buffer for each request.
struct Connection {
    queue: Blkioq,
    region: MemoryRegion,
    buffers: File,
    /// Which daemon it was made to.
    daemon: u32,
    _blkio: Blkio,
}

impl Client {
    fn run(&mut self) -> Outcome<Compared> {
        loop {
            let mut connection = self.connect_in_time()?;
            self.compared.daemons += 1;
            if self.use_disk(&mut connection)? {
                return Ok(std::mem::take(&mut self.compared));
            }
            // Its daemon is gone. The next one may not listen yet.
            let began = Instant::now();
            while self.told.daemon.load(Ordering::Relaxed) == connection.daemon {
                check(began.elapsed() < TIMEOUT, || "no daemon comes for libblkio".into())?;
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }

    /// Compares and writes until all is over. False: the daemon was killed before that.
    fn use_disk(&mut self, connection: &mut Connection) -> Outcome<bool> {
        let mut is_served = self.compare_all(connection)?;
        while is_served && !self.told.is_over.load(Ordering::Relaxed) {
            is_served = self.write(connection)?;
        }
        Ok(is_served && self.compare_all(connection)?)
    }

    /// Connects to the daemon that runs now. Tries again while the daemon does not listen yet, or
    /// if it is killed before the connection is made.
    fn connect_in_time(&self) -> Outcome<Connection> {
        let began = Instant::now();
        loop {
            match self.connect() {
                Err(_) if began.elapsed() < TIMEOUT => std::thread::sleep(LOOK / 10),
                connected => return connected,
            }
        }
    }

    fn connect(&self) -> Outcome<Connection> {
        let daemon = self.told.daemon.load(Ordering::Relaxed);
        let mut blkio = Blkio::new("virtio-blk-vhost-user").context("libblkio")?;
        blkio.set_str("path", &self.socket.display().to_string()).context("libblkio")?;
        blkio.connect().context("libblkio connects")?;
        blkio.set_i32("num-queues", 1).context("libblkio")?;
        let mut queues = blkio.start().context("libblkio starts")?.queues;
        let region = blkio.alloc_mem_region(DEPTH * BLOCK).context("libblkio")?;
        blkio.map_mem_region(&region).context("libblkio")?;
        let buffers = format!("/proc/self/fd/{}", region.fd);
        let buffers = File::options().read(true).write(true).open(&buffers).context(buffers)?;
        Ok(Connection { queue: queues.remove(0), region, buffers, daemon, _blkio: blkio })
    }

    /// Reads all blocks and compares them. False: the daemon was killed before all were read.
    fn compare_all(&mut self, connection: &mut Connection) -> Outcome<bool> {
        for first in (0..BLOCKS).step_by(DEPTH) {
            for slot in 0..DEPTH {
                let (at, buffer) = connection.place(first + slot, slot);
                connection.queue.read(at, buffer, BLOCK, slot, ReqFlags::empty());
            }
            if !self.wait(connection)? {
                return Ok(false);
            }
            self.note_pause();
            for slot in 0..DEPTH {
                let mut bytes = [0; BLOCK];
                let at = connection.offset(slot);
                connection.buffers.read_exact_at(&mut bytes, at).context("a buffer")?;
                self.compare(first + slot, &bytes)?;
            }
        }
        Ok(true)
    }

    /// Requests were answered: if they are the first of a daemon, it has come as quickly as this.
    fn note_pause(&mut self) {
        let killed = self.told.killed.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.compared.pauses.extend(killed.map(|killed| killed.elapsed()));
    }

    fn compare(&mut self, block: usize, bytes: &[u8; BLOCK]) -> Outcome {
        let Block { answered, open } = &mut self.blocks[block];
        let versions = std::iter::once(*answered).chain(open.drain(..));
        let found = versions.into_iter().find(|version| *bytes == content(block, *version));
        *answered = found.ok_or_else(|| {
            format!("block {block} of libblkio's disk does not hold what was written")
        })?;
        self.compared.blocks += 1;
        Ok(())
    }

    /// Writes blocks, and waits until all writes are answered. False: the daemon was killed first.
    fn write(&mut self, connection: &mut Connection) -> Outcome<bool> {
        // Different ones: of two writes to one block the order would not be known.
        let first = usize::try_from(self.random.below(BLOCKS as u64)).unwrap_or_default();
        let blocks: Vec<_> = (0..DEPTH).map(|n| (first + n * 61) % BLOCKS).collect();
        for (slot, block) in blocks.iter().enumerate() {
            self.version += 1;
            self.blocks[*block].open.push(self.version);
            let bytes = content(*block, self.version);
            connection.buffers.write_all_at(&bytes, connection.offset(slot)).context("a buffer")?;
            let (at, buffer) = connection.place(*block, slot);
            connection.queue.write(at, buffer.cast_const(), BLOCK, slot, ReqFlags::empty());
        }
        if !self.wait(connection)? {
            return Ok(false);
        }
        for block in blocks {
            let Block { answered, open } = &mut self.blocks[block];
            *answered = open.pop().unwrap_or(*answered);
            open.clear();
        }
        Ok(true)
    }

    /// Waits until all requests are answered. False: the daemon was killed first.
    fn wait(&self, connection: &mut Connection) -> Outcome<bool> {
        let (began, mut done) = (Instant::now(), 0);
        while done < DEPTH {
            let mut slots: [_; DEPTH] = std::array::from_fn(|_| MaybeUninit::uninit());
            let left = DEPTH - done;
            let mut time = LOOK;
            let queue = &mut connection.queue;
            // Without an answer in that time it fails; what was submitted stays so.
            done += queue.do_io(&mut slots[..left], 1, Some(&mut time), None).unwrap_or(0);
            if self.told.daemon.load(Ordering::Relaxed) != connection.daemon {
                return Ok(false);
            }
            check(began.elapsed() < TIMEOUT, || "libblkio waits for an answer".into())?;
        }
        Ok(true)
    }
}

impl Connection {
    /// Where a block lies on the disk, and the buffer of a slot.
    fn place(&self, block: usize, slot: usize) -> (u64, *mut u8) {
        let buffer = std::ptr::without_provenance_mut(self.region.addr + slot * BLOCK);
        ((block * BLOCK) as u64, buffer)
    }

    /// Where the buffer of a slot lies in the memory's file.
    fn offset(&self, slot: usize) -> u64 {
        self.region.fd_offset.unsigned_abs() + (slot * BLOCK) as u64
    }
}

/// The bytes of a block at a version; at version 0 the block is zeroes, as the disk was made.
fn content(block: usize, version: u64) -> [u8; BLOCK] {
    let mut bytes = [0; BLOCK];
    if version > 0 {
        stamp(&mut bytes, 0, block as u64, version);
    }
    bytes
}
