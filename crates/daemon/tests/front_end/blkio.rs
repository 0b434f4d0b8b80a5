//! libblkio, a vhost-user-blk client that is not ours, finds its bytes where it put them: four
//! queues, on every kind of disk.

use crate::support::foreign::{Client, Lane, SIZE_MAX, pattern};
use crate::support::process::Daemon;
use blkio::ReqFlags;
use std::os::unix::fs::FileExt;

const DISK: u64 = 16 << 20;

impl Lane {
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

    /// The contents at `offset` after [`Lane::work`]; within one hole or beside all.
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
