//! Bursts in which requests of all kinds follow each other, sound ones and others: each ends as it
//! would alone, whatever its neighbours were.

use crate::guest::{Guest, SECTORS, TIMEOUT, World, memory, pattern, usual};
use manyring_backend::blk::file::FileDisk;
use manyring_backend::blk::uring::UringDisk;
use manyring_backend::blk::{Disk, Image, ImageOptions};
use manyring_device::blk::blkif::XenBlkOptions;
use manyring_driver::wire::xen::blkif::{
    Abi, BlkifStatus, OP_DISCARD, OP_READ, OP_WRITE, RawRequest, Segment,
};
use manyring_driver::{BlkfrontOptions, XEN_PAGE_SIZE, XenOp};
use manyring_engine::EventKind;
use manyring_memory::GrantRef;
use manyring_queue::QueueError;
use std::sync::Arc;

/// Sectors that a request of a burst has for itself.
const SHARE: u64 = SECTORS / 32;
/// A reference that lends nothing.
const NOTHING: u32 = 16_000;

/// Numbers that look random and are the same in each run.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % sides
    }
}

/// A request in flight: its tag, how it is to end, and what it is to read.
struct Expected {
    tag: u16,
    status: BlkifStatus,
    read: Option<Vec<u8>>,
}

/// The content that the disk must have.
struct Twin(Vec<u8>);

impl Twin {
    fn bytes(&mut self, sector: u64, len: usize) -> &mut [u8] {
        &mut self.0[512 * sector as usize..][..len]
    }
}

/// Adds a request that the front-end's own code makes.
fn sound(guest: &mut Guest, twin: &mut Twin, dice: &mut Dice, sector: u64) -> Expected {
    // From one sector to more pages than one page of segments describes.
    let len = 512 * (1 + dice.roll(SHARE) as usize);
    let data = pattern(len, dice.roll(256) as u8);
    let (op, read) = match dice.roll(8) {
        0..3 => (XenOp::Read { sector, len }, Some(twin.bytes(sector, len).to_vec())),
        3..6 => (XenOp::Write { sector, data: &data }, None),
        6 => (XenOp::Flush, None),
        _ => {
            let data = &data[..len.min(11 << 12)];
            (XenOp::Barrier { sector, data }, None)
        }
    };
    if let XenOp::Write { data, .. } | XenOp::Barrier { data, .. } = op {
        twin.bytes(sector, data.len()).copy_from_slice(data);
    }
    let tag = guest.queue.submit(op).unwrap().unwrap();
    Expected { tag, status: BlkifStatus::Okay, read }
}

/// Adds a request that fails.
fn unsound(guest: &mut Guest, dice: &mut Dice, sector: u64) -> Expected {
    let abi = guest.queue.options().abi;
    let (kind, at) = (dice.roll(6), dice.roll(11) as usize);
    let operation = match kind {
        0 => 4,
        1 => OP_DISCARD,
        2 => OP_READ,
        _ => OP_WRITE,
    };
    let mut list = None;
    let raw = |id, grefs: &[GrantRef], lists: &[GrantRef]| {
        let mut segments: Vec<_> = grefs[..11].iter().map(|gref| Segment::page(gref.0)).collect();
        match kind {
            0 => RawRequest::data(abi, operation, id, sector, &segments),
            1 => RawRequest::discard(abi, 0, id, SECTORS - 1, 2),
            2 | 3 => {
                segments[at] = Segment::page(NOTHING + at as u32);
                RawRequest::data(abi, operation, id, sector, &segments[..=at])
            }
            4 => RawRequest::indirect(abi, operation, id, sector, (9, &[NOTHING])),
            _ => {
                segments[at] = Segment::page(NOTHING);
                list = Some((lists[0], segments));
                RawRequest::indirect(abi, operation, id, sector, (11, &[lists[0].0]))
            }
        }
    };
    let tag = guest.queue.submit_raw(operation, raw).unwrap();
    if let Some((gref, segments)) = list {
        let page = guest.domain.table().entry(gref).unwrap().page();
        let bytes: Vec<u8> = segments.iter().flat_map(|segment| segment.emit_bytes()).collect();
        let place = guest.domain.memory().slice(page as usize * XEN_PAGE_SIZE, bytes.len());
        place.unwrap().write_from(&bytes);
    }
    let status = if kind == 0 { BlkifStatus::Unsupported } else { BlkifStatus::Error };
    Expected { tag, status, read: None }
}

/// Bursts of random length, each of which is answered before the next one.
fn run_bursts(guest: &mut Guest, seed: u64, bursts: usize) {
    let (mut twin, mut dice) = (Twin(vec![0; 512 * SECTORS as usize]), Dice(seed | 1));
    for burst in 0..bursts {
        let count = 1 + dice.roll(32);
        let mut expected: Vec<Expected> = (0..count)
            .map(|n| match dice.roll(4) {
                0 => unsound(guest, &mut dice, n * SHARE),
                _ => sound(guest, &mut twin, &mut dice, n * SHARE),
            })
            .collect();
        guest.queue.publish();
        while !expected.is_empty() {
            let done = guest.queue.wait(TIMEOUT).unwrap();
            let at = expected.iter().position(|expected| expected.tag == done.tag).unwrap();
            let Expected { status, read, .. } = expected.swap_remove(at);
            assert_eq!(done.status, status, "burst {burst} of {seed}");
            if let Some(wanted) = read {
                let mut read = vec![0; wanted.len()];
                guest.queue.read_data(done.tag, &mut read).unwrap();
                assert!(read == wanted, "burst {burst} of {seed}");
            }
        }
        assert!(guest.queue.take().unwrap().is_none(), "a request is answered once");
    }
    let mut all = vec![0; 64 << 10];
    for sector in (0..SECTORS).step_by(128) {
        guest.queue.read(sector, &mut all).unwrap();
        assert!(all == twin.bytes(sector, 64 << 10), "sector {sector} of {seed}");
    }
}

fn image() -> (tempfile::NamedTempFile, Image) {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(SECTORS * 512).unwrap();
    let image = Image::open(file.path(), ImageOptions::default()).unwrap();
    (file, image)
}

#[test]
fn requests_of_all_kinds_in_bursts_end_as_each_would_alone_and_leave_no_page_mapped() {
    let world = World::with_uring(true);
    let (one, two) = (image(), image());
    let disks: [(Arc<dyn Disk>, u32); 5] = [
        (memory(), 1056),
        (memory(), 40),
        (memory(), 0),
        (Arc::new(FileDisk::new(one.1)), 40),
        (Arc::new(UringDisk::new(two.1).unwrap()), 1056),
    ];
    let mut guests: Vec<_> = (1..)
        .zip(disks)
        .map(|(number, (disk, persistent_max))| {
            let abi = Abi::ALL[usize::from(number) % 3];
            let front =
                BlkfrontOptions { abi, persistent: persistent_max > 0, ..Default::default() };
            let options = XenBlkOptions { persistent_max, ..usual() };
            world.guest_of(number, disk, &front, options)
        })
        .collect();
    std::thread::scope(|scope| {
        for (n, guest) in guests.iter_mut().enumerate() {
            scope.spawn(move || run_bursts(guest, 0x9e37_79b9_7f4a_7c15 ^ (n as u64) << 32, 40));
        }
    });
    for guest in &mut guests {
        assert_eq!(guest.stats().faults.value(), 0);
        end_in_the_midst(guest);
        assert_eq!(guest.stop().1, 0);
    }
}

/// A fault between sound requests, some of whose pages are mapped already and others not. The
/// requests before the fault are answered, and no other.
fn end_in_the_midst(guest: &mut Guest) {
    let abi = guest.queue.options().abi;
    let mut twin = Twin(vec![0; 512 * SECTORS as usize]);
    let mut before: Vec<u16> = Vec::new();
    let mut dice = Dice(7);
    for n in 0..5 {
        before.push(sound(guest, &mut twin, &mut dice, n * SHARE).tag);
    }
    let mut list = None;
    let raw = |id, _: &[GrantRef], lists: &[GrantRef]| {
        list = Some(lists[0]);
        RawRequest::indirect(abi, OP_WRITE, id, 0, (16, &[lists[0].0]))
    };
    guest.queue.submit_raw(OP_WRITE, raw).unwrap();
    let page = guest.domain.table().entry(list.unwrap()).unwrap().page();
    let place = guest.domain.memory().slice(page as usize * XEN_PAGE_SIZE, 8).unwrap();
    place.write_from(&[1, 0, 0, 0, 7, 3, 0, 0]);
    for n in 6..12 {
        sound(guest, &mut twin, &mut dice, n * SHARE);
    }
    guest.queue.publish();
    while !before.is_empty() {
        let done = guest.queue.wait(TIMEOUT).unwrap();
        assert_eq!(done.status, BlkifStatus::Okay);
        before.retain(|tag| *tag != done.tag);
    }
    assert!(matches!(guest.next_event(), EventKind::Fault(QueueError::Blkif(_))));
    assert!(guest.queue.take().unwrap().is_none(), "what comes after the fault is not answered");
}
