//! libblkio, a vhost-user-blk client that is not ours, finds its bytes where it put them: four
//! queues, on every kind of disk.

use crate::support::foreign::{Client, Lane, SIZE_MAX, pattern};
use crate::support::process::Daemon;
use blkio::{Blkio, ReqFlags};
use manyring_wire::blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH,
    VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_SIZE_MAX, VIRTIO_BLK_F_TOPOLOGY,
    VIRTIO_BLK_F_WRITE_ZEROES,
};
use manyring_wire::vhost_user::{
    F_PROTOCOL_FEATURES, HEADER_SIZE, Header, PROTOCOL_F_CONFIG, PROTOCOL_F_CONFIGURE_MEM_SLOTS,
    PROTOCOL_F_MQ, PROTOCOL_F_REPLY_ACK,
};
use manyring_wire::virtio::{VIRTIO_F_EVENT_IDX, VIRTIO_F_VERSION_1};
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

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

/// The messages that a client sends to the back-end at `socket` by way of `listener`: request and
/// payload of each. Passes no file descriptors on.
fn overheard(listener: &UnixListener, socket: &Path) -> Vec<(u32, Vec<u8>)> {
    let (mut client, _) = listener.accept().unwrap();
    let mut back_end = UnixStream::connect(socket).unwrap();
    let (mut replies, mut to_client) = (back_end.try_clone().unwrap(), client.try_clone().unwrap());
    std::thread::scope(|scope| {
        scope.spawn(|| std::io::copy(&mut replies, &mut to_client));
        let (mut heard, mut bytes) = (Vec::new(), [0; HEADER_SIZE]);
        while client.read_exact(&mut bytes).is_ok() {
            let header = Header::parse(&bytes).unwrap();
            let mut payload = vec![0; header.size as usize];
            client.read_exact(&mut payload).unwrap();
            back_end.write_all(&[&bytes[..], &payload].concat()).unwrap();
            heard.push((header.request, payload));
        }
        back_end.shutdown(std::net::Shutdown::Both).unwrap();
        heard
    })
}

/// The tests with libblkio are tests of these features: a daemon that offers fewer is not noticed
/// by the client.
#[test]
fn libblkio_negotiates_event_indexes_all_of_a_disk_and_the_protocol_features_that_it_needs() {
    let daemon = Daemon::blk(&["--memory=16M", "--num-queues=4"]);
    let between = daemon.folder().join("between");
    let listener = UnixListener::bind(&between).unwrap();
    let socket = daemon.socket();
    let heard = std::thread::scope(|scope| {
        let relay = scope.spawn(|| overheard(&listener, &socket));
        let mut client = Blkio::new("virtio-blk-vhost-user").unwrap();
        client.set_str("path", between.to_str().unwrap()).unwrap();
        client.connect().unwrap();
        drop(client);
        relay.join().unwrap()
    });
    let said = |request| {
        let mut payloads = heard.iter().filter(|(r, _)| *r == request).map(|(_, payload)| payload);
        let payload = payloads.next().unwrap();
        assert!(payloads.next().is_none(), "{request} twice");
        u64::from_ne_bytes(payload.as_slice().try_into().unwrap())
    };
    let rings = F_PROTOCOL_FEATURES | VIRTIO_F_VERSION_1 | VIRTIO_F_EVENT_IDX;
    let shape = VIRTIO_BLK_F_SIZE_MAX
        | VIRTIO_BLK_F_SEG_MAX
        | VIRTIO_BLK_F_BLK_SIZE
        | VIRTIO_BLK_F_TOPOLOGY
        | VIRTIO_BLK_F_MQ;
    let requests = VIRTIO_BLK_F_FLUSH
        | VIRTIO_BLK_F_CONFIG_WCE
        | VIRTIO_BLK_F_DISCARD
        | VIRTIO_BLK_F_WRITE_ZEROES;
    let (set_features, set_protocol_features) = (2, 16);
    assert_eq!(said(set_features), rings | shape | requests);
    let protocol =
        PROTOCOL_F_MQ | PROTOCOL_F_REPLY_ACK | PROTOCOL_F_CONFIG | PROTOCOL_F_CONFIGURE_MEM_SLOTS;
    assert_eq!(said(set_protocol_features), protocol);
}
