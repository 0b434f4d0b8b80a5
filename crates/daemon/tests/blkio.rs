//! libblkio, a vhost-user-blk client that is not ours, finds its bytes where it put them: four
//! queues, on every kind of disk.
#![allow(unsafe_code, reason = "allow-listed: libblkio fills completions as `MaybeUninit`")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where it fails")]

mod process;

use blkio::{Blkio, Blkioq, Completion, MemoryRegion, ReqFlags};
use process::Daemon;
use std::fs::File;
use std::mem::MaybeUninit;
use std::os::unix::fs::FileExt;
use std::path::Path;

const QUEUES: usize = 4;
const DEPTH: usize = 16;
/// Largest request of these tests.
const SIZE_MAX: usize = 64 << 10;
const DISK: u64 = 16 << 20;

/// Random numbers with a seed: splitmix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed ^ (mixed >> 27)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

/// What belongs at an offset: every eight bytes say where they are and which run wrote them.
fn pattern(offset: u64, len: usize, seed: u64) -> Vec<u8> {
    (0..len as u64 / 8).flat_map(|i| Random((offset + i * 8) ^ seed).next().to_le_bytes()).collect()
}

/// A connected client and its queues.
struct Client {
    queues: Vec<Blkioq>,
    region: MemoryRegion,
    /// Block size of the disk: requests are whole ones.
    unit: u64,
    capacity: u64,
    driver: Blkio,
}

impl Client {
    fn connect(socket: &Path, poll: bool) -> Self {
        let mut driver = Blkio::new("virtio-blk-vhost-user").unwrap();
        driver.set_str("path", socket.to_str().unwrap()).unwrap();
        driver.connect().unwrap();
        let (property, none) = if poll {
            ("num-poll-queues", "num-queues")
        } else {
            ("num-queues", "num-poll-queues")
        };
        driver.set_i32(none, 0).unwrap();
        driver.set_i32(property, i32::try_from(QUEUES).unwrap()).unwrap();
        let started = driver.start().unwrap();
        let region = driver.alloc_mem_region(QUEUES * DEPTH * SIZE_MAX).unwrap();
        driver.map_mem_region(&region).unwrap();
        Self {
            queues: started.queues.into_iter().chain(started.poll_queues).collect(),
            region,
            unit: u64::try_from(driver.get_i32("request-alignment").unwrap()).unwrap(),
            capacity: driver.get_u64("capacity").unwrap(),
            driver,
        }
    }

    /// The queues, each with its part of the disk and of the memory.
    fn lanes(&mut self, seed: u64) -> Vec<Lane> {
        let share = self.capacity / QUEUES as u64;
        let lane = |(index, queue): (usize, Blkioq)| Lane {
            queue,
            memory: File::options()
                .read(true)
                .write(true)
                .open(format!("/proc/self/fd/{}", self.region.fd))
                .unwrap(),
            address: self.region.addr,
            slot: index * DEPTH,
            start: index as u64 * share,
            end: (index as u64 + 1) * share,
            unit: self.unit,
            seed,
            random: Random(seed ^ index as u64),
        };
        self.queues.drain(..).enumerate().map(lane).collect()
    }
}

/// One queue, and the part of the disk that it alone writes.
struct Lane {
    queue: Blkioq,
    memory: File,
    address: usize,
    /// The first of its buffers.
    slot: usize,
    start: u64,
    end: u64,
    unit: u64,
    seed: u64,
    random: Random,
}

impl Lane {
    fn at(&self, token: usize) -> usize {
        (self.slot + token) * SIZE_MAX
    }

    fn buffer(&self, token: usize) -> *mut u8 {
        std::ptr::without_provenance_mut(self.address + self.at(token))
    }

    /// Waits for one completion; its token and result.
    fn reap(&mut self) -> (usize, i32) {
        let mut slots = [MaybeUninit::<Completion>::uninit()];
        let mut patience = process::PATIENCE;
        let count = self.queue.do_io(&mut slots, 1, Some(&mut patience), None);
        assert_eq!(count.expect("a completion"), 1);
        // SAFETY: `do_io` has returned 1, and has filled the slot.
        let completion = unsafe { slots[0].assume_init_ref() };
        (completion.user_data, completion.ret)
    }

    /// The lane cut into requests of random sizes, in random order.
    fn cut(&mut self) -> Vec<(u64, usize)> {
        let mut pieces = Vec::new();
        let mut offset = self.start;
        while offset < self.end {
            let units_max = (SIZE_MAX as u64 / self.unit).min((self.end - offset) / self.unit);
            let len = (1 + self.random.below(units_max)) * self.unit;
            pieces.push((offset, usize::try_from(len).unwrap()));
            offset += len;
        }
        for i in (1..pieces.len()).rev() {
            let j = self.random.below(i as u64 + 1);
            pieces.swap(i, usize::try_from(j).unwrap());
        }
        pieces
    }

    /// Keeps [`DEPTH`] requests in flight until all pieces are done.
    fn transfer(&mut self, write: bool) {
        let mut waiting = self.cut();
        let mut at = vec![(0, 0); DEPTH];
        let mut free: Vec<usize> = (0..DEPTH).collect();
        while !waiting.is_empty() || free.len() < DEPTH {
            while let Some(token) = free.pop() {
                let Some((offset, len)) = waiting.pop() else {
                    free.push(token);
                    break;
                };
                at[token] = (offset, len);
                self.submit(write, offset, len, token);
            }
            let (token, result) = self.reap();
            let (offset, len) = at[token];
            assert_eq!(result, 0, "{len} bytes at {offset}, seed {}", self.seed);
            if !write {
                self.check(token, &pattern(offset, len, self.seed), offset);
            }
            free.push(token);
        }
    }

    fn submit(&mut self, write: bool, offset: u64, len: usize, token: usize) {
        let (none, at) = (ReqFlags::empty(), self.at(token) as u64);
        if write {
            self.memory.write_all_at(&pattern(offset, len, self.seed), at).unwrap();
            self.queue.write(offset, self.buffer(token), len, token, none);
        } else {
            // So that a read that does nothing is seen.
            self.memory.write_all_at(&vec![0xee; len], at).unwrap();
            self.queue.read(offset, self.buffer(token), len, token, none);
        }
    }

    fn check(&self, token: usize, expected: &[u8], offset: u64) {
        let mut found = vec![0; expected.len()];
        self.memory.read_exact_at(&mut found, self.at(token) as u64).unwrap();
        let wrong = found.iter().zip(expected).position(|(a, b)| a != b);
        assert_eq!(wrong, None, "bytes read at {offset} differ, seed {}", self.seed);
    }

    /// One request that is not a transfer.
    fn single(&mut self, submit: impl FnOnce(&mut Blkioq)) {
        submit(&mut self.queue);
        assert_eq!(self.reap(), (0, 0), "seed {}", self.seed);
    }

    /// Everything a guest may do to a disk, on this queue.
    fn work(&mut self) {
        let none = ReqFlags::empty();
        self.transfer(true);
        self.single(|queue| queue.flush(0, none));
        self.transfer(false);
        // Three holes: discarded, zeroed and unmapped, zeroed; what lies between them stays.
        let (start, len) = (self.start, self.hole());
        self.single(|queue| queue.discard(start, len, 0, none));
        self.single(|queue| queue.write_zeroes(start, len, 0, none));
        self.single(|queue| queue.write_zeroes(start + 2 * len, len, 0, none));
        self.single(|queue| queue.write_zeroes(start + 4 * len, len, 0, ReqFlags::NO_UNMAP));
        for piece in 0..6 {
            let (offset, len) = (start + piece * len, usize::try_from(len).unwrap());
            self.submit(false, offset, len, 0);
            assert_eq!(self.reap(), (0, 0));
            self.check(0, &self.expected(offset, len), offset);
        }
        // A write that must be on the disk when it completes.
        let offset = self.start;
        self.memory.write_all_at(&vec![0; 4096], self.at(0) as u64).unwrap();
        let buffer = self.buffer(0);
        self.single(|queue| queue.write(offset, buffer, 4096, 0, ReqFlags::FUA));
    }

    /// Bytes of each of the three holes.
    fn hole(&self) -> u64 {
        SIZE_MAX as u64 / 2
    }

    /// What belongs at `offset` after [`Lane::work`]; within one hole or beside all.
    fn expected(&self, offset: u64, len: usize) -> Vec<u8> {
        let piece = (offset - self.start) / self.hole();
        if piece < 6 && piece.is_multiple_of(2) {
            vec![0; len]
        } else {
            pattern(offset, len, self.seed)
        }
    }
}

/// Runs the whole client against a daemon with these arguments; returns the disk's bytes.
fn four_queues(arguments: &[&str], poll: bool, seed: u64) -> (Daemon, Vec<u8>) {
    println!("seed {seed}");
    let mut all = vec!["--num-queues=4"];
    all.extend(arguments);
    let mut daemon = Daemon::blk(&all);
    let mut client = Client::connect(&daemon.socket(), poll);
    assert_eq!(client.capacity, DISK);
    let mut lanes = client.lanes(seed);
    std::thread::scope(|scope| {
        for lane in &mut lanes {
            scope.spawn(|| lane.work());
        }
    });
    let hole = usize::try_from(lanes[0].hole()).unwrap();
    let expected = lanes.iter().flat_map(|lane| {
        (lane.start..lane.end).step_by(hole).flat_map(|offset| lane.expected(offset, hole))
    });
    let expected = expected.collect();
    drop((lanes, client));
    assert!(daemon.is_running());
    (daemon, expected)
}

/// A file of the disk's size, on a file system that knows O_DIRECT if any here does.
fn image() -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    file.as_file().set_len(DISK).unwrap();
    file
}

fn file_holds_what_was_written(arguments: &[&str], seed: u64) {
    let image = image();
    let mut all = vec!["--blk-file", image.path().to_str().unwrap()];
    all.extend(arguments);
    let (daemon, expected) = four_queues(&all, false, seed);
    assert!(daemon.terminate().success());
    let found = std::fs::read(image.path()).unwrap();
    let wrong = found.iter().zip(&expected).position(|(a, b)| a != b);
    assert_eq!(
        (wrong, found.len()),
        (None, expected.len()),
        "the host's file differs, seed {seed}"
    );
}

#[test]
fn a_memory_disk_keeps_what_four_queues_wrote() {
    four_queues(&["--memory=16M"], false, 0x11);
}

#[test]
fn a_memory_disk_serves_a_client_that_polls() {
    four_queues(&["--memory=16M"], true, 0x12);
}

#[test]
fn a_file_keeps_what_four_queues_wrote() {
    file_holds_what_was_written(&[], 0x21);
}

#[test]
fn a_file_without_the_page_cache_keeps_what_four_queues_wrote() {
    file_holds_what_was_written(&["--direct"], 0x22);
}

#[test]
fn a_file_without_io_uring_keeps_what_four_queues_wrote() {
    file_holds_what_was_written(&["--no-io-uring"], 0x23);
}

#[test]
fn a_file_without_io_uring_and_page_cache_keeps_what_four_queues_wrote() {
    file_holds_what_was_written(&["--no-io-uring", "--direct"], 0x24);
}

#[test]
fn one_worker_serves_all_four_queues() {
    file_holds_what_was_written(&["--workers=1", "--spin-us=0"], 0x25);
}

#[test]
fn the_longest_request_offered_fits_what_libblkio_counts_in() {
    // It multiplies size_max by seg_max in 31 bits, and ends if that overflows.
    let daemon = Daemon::blk(&["--null=1G", "--queue-size=1024", "--num-queues=4"]);
    let client = Client::connect(&daemon.socket(), false);
    assert!(client.driver.get_i32("max-transfer").unwrap() >= 1 << 20);
}
