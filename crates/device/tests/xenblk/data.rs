//! Data in both directions, byte for byte, whatever the disk, the ring and the grants are.

use crate::guest::{SECTORS, TIMEOUT, World, memory, null, pattern, usual};
use manyring_backend::blk::file::FileDisk;
use manyring_backend::blk::uring::UringDisk;
use manyring_backend::blk::{Disk, Image, ImageOptions};
use manyring_device::blk::blkif::{XenBlkOptions, disk_nodes};
use manyring_driver::wire::xen::blkif::{Abi, BlkifStatus};
use manyring_driver::{BlkfrontOptions, XenOp};
use std::collections::HashMap;
use std::sync::Arc;

/// Writes and reads requests of all lengths that the front-end can send.
fn exchange(world: &World, number: u16, disk: Arc<dyn Disk>, front: &BlkfrontOptions) {
    let mut guest = world.guest(number, disk, front);
    let max = if front.indirect_segments > 0 { 64 << 10 } else { 11 << 12 };
    for (round, len) in [512, 4096, 4608, 11 << 12, max].into_iter().enumerate() {
        let (sector, data) = (3 + 130 * round as u64, pattern(len, round as u8));
        guest.queue.write(sector, &data).unwrap();
        let mut read = vec![0; len];
        guest.queue.read(sector, &mut read).unwrap();
        assert!(read == data, "{len} bytes with {front:?}");
    }
    guest.queue.flush().unwrap();
    let (_, mapped) = guest.stop();
    assert_eq!(mapped, 0, "pages stay mapped with {front:?}");
}

fn image(direct: bool) -> (tempfile::NamedTempFile, Image) {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(SECTORS * 512).unwrap();
    let options = ImageOptions { direct, ..ImageOptions::default() };
    let image = Image::open(file.path(), options).unwrap();
    (file, image)
}

#[test]
fn what_was_written_is_read_again_in_every_abi_and_with_every_kind_of_grants() {
    let world = World::new();
    let mut number = 1;
    for abi in Abi::ALL {
        for persistent in [true, false] {
            for indirect_segments in [0, 32] {
                let front =
                    BlkfrontOptions { abi, persistent, indirect_segments, ..Default::default() };
                exchange(&world, number, memory(), &front);
                number += 1;
            }
        }
    }
}

#[test]
fn rings_of_all_sizes_are_served() {
    let world = World::new();
    for order in 0..=4 {
        let buffer_size = 16 << 10;
        let front = BlkfrontOptions { ring_page_order: order, buffer_size, ..Default::default() };
        let mut guest = world.guest(order as u16 + 1, memory(), &front);
        let ring = usize::from(guest.queue.ring().size());
        // All of the ring at once, twice.
        for seed in [1, 2] {
            let data: Vec<_> = (0..ring).map(|n| pattern(512, n as u8 ^ seed)).collect();
            let write = |(n, data)| XenOp::Write { sector: n as u64, data };
            let writes: Vec<_> = data.iter().map(Vec::as_slice).enumerate().map(write).collect();
            assert!(guest.run_all(&writes).iter().all(|status| *status == BlkifStatus::Okay));
            let mut read = vec![0; 512];
            for (n, data) in data.iter().enumerate() {
                guest.queue.read(n as u64, &mut read).unwrap();
                assert!(read == *data, "sector {n} of a ring of {ring}");
            }
        }
        assert_eq!(guest.stop().1, 0);
    }
}

#[test]
fn files_are_written_and_read_buffered_and_direct_by_system_calls_and_by_io_uring() {
    let mut number = 1;
    for uring in [false, true] {
        let world = World::with_uring(uring);
        for direct in [false, true] {
            for persistent in [true, false] {
                let (file, image) = image(direct);
                let disk: Arc<dyn Disk> = if uring {
                    Arc::new(UringDisk::new(image).unwrap())
                } else {
                    Arc::new(FileDisk::new(image))
                };
                let front = BlkfrontOptions { persistent, ..Default::default() };
                exchange(&world, number, disk, &front);
                let bytes = std::fs::read(file.path()).unwrap();
                assert!(bytes[3 * 512..4 * 512] == pattern(512, 0), "it is in the file");
                number += 1;
            }
        }
    }
}

#[test]
fn many_requests_in_flight_are_answered_each_with_its_own_data() {
    let world = World::new();
    let front = BlkfrontOptions { ring_page_order: 2, persistent: false, ..Default::default() };
    let mut guest = world.guest(1, memory(), &front);
    let all = pattern(usize::try_from(SECTORS * 512).unwrap(), 9);
    for (n, data) in all.chunks(32 << 10).enumerate() {
        guest.queue.write(n as u64 * 64, data).unwrap();
    }
    let (mut wanted, mut next, mut taken) = (HashMap::new(), 0_u64, 0);
    while taken < 500 {
        while let Some(tag) = guest
            .queue
            .submit(XenOp::Read {
                sector: next * 37 % (SECTORS - 64),
                len: 512 * (1 + next as usize % 60),
            })
            .unwrap()
        {
            wanted.insert(tag, (next * 37 % (SECTORS - 64), 512 * (1 + next as usize % 60)));
            next += 1;
        }
        guest.queue.publish();
        let done = guest.queue.wait(TIMEOUT).unwrap();
        let (sector, len) = wanted.remove(&done.tag).unwrap();
        let mut read = vec![0; len];
        guest.queue.read_data(done.tag, &mut read).unwrap();
        let at = usize::try_from(sector * 512).unwrap();
        assert!(done.status == BlkifStatus::Okay && read == all[at..at + len], "{len} at {sector}");
        taken += 1;
    }
    let left = guest.queue.in_flight();
    (0..left)
        .for_each(|_| assert_eq!(guest.queue.wait(TIMEOUT).unwrap().status, BlkifStatus::Okay));
    assert_eq!(guest.stop().1, 0);
}

#[test]
fn requests_count_as_those_of_a_virtio_disk_do() {
    let world = World::new();
    let mut guest = world.guest(1, null(), &BlkfrontOptions::default());
    guest.queue.write(0, &[1; 4096]).unwrap();
    guest.queue.read(0, &mut [0; 1024]).unwrap();
    guest.queue.flush().unwrap();
    guest.queue.discard(0, 8).unwrap();
    let past = XenOp::Read { sector: SECTORS, len: 512 };
    assert_eq!(guest.status(past), BlkifStatus::Error);
    guest.sync();
    let stats = guest.stats();
    let counts = [&stats.requests, &stats.reads, &stats.writes, &stats.flushes, &stats.discards];
    assert_eq!(counts.map(|counter| counter.value()), [5, 1, 1, 1, 1]);
    let bytes = (stats.bytes_read.value(), stats.bytes_written.value());
    assert_eq!((bytes, stats.errors.value()), ((1024, 4096), 1));
    let times: Vec<_> = stats.serve_ns.ops().map(|(op, times)| (op, times.count())).collect();
    let each = [("read", 1), ("write", 1), ("flush", 1), ("discard", 1), ("other", 1)];
    assert_eq!(times, each);
}

#[test]
fn nothing_writes_to_a_read_only_disk() {
    let world = World::new();
    let options = XenBlkOptions { read_only: true, ..usual() };
    let mut guest = world.guest_of(1, memory(), &BlkfrontOptions::default(), options);
    assert!(guest.device.offer().discard.is_none());
    assert_eq!(disk_nodes(guest.device.host()).info, 4, "VDISK_READONLY");
    let data = &[7; 512][..];
    assert_eq!(guest.status(XenOp::Write { sector: 0, data }), BlkifStatus::Error);
    assert_eq!(guest.status(XenOp::Barrier { sector: 0, data }), BlkifStatus::Error);
    let discard = XenOp::Discard { sector: 0, count: 1, secure: false };
    assert_eq!(guest.status(discard), BlkifStatus::Unsupported);
    let mut read = [1; 512];
    guest.queue.read(0, &mut read).unwrap();
    assert_eq!(read, [0; 512]);
}

#[test]
fn sectors_outside_of_the_disk_are_refused_and_the_ring_goes_on() {
    let world = World::new();
    let mut guest = world.guest(1, null(), &BlkfrontOptions::default());
    for (sector, sectors, status) in [
        (SECTORS - 1, 1, BlkifStatus::Okay),
        (SECTORS - 1, 2, BlkifStatus::Error),
        (SECTORS - 8, 100, BlkifStatus::Error),
        (SECTORS, 1, BlkifStatus::Error),
        (u64::MAX, 1, BlkifStatus::Error),
    ] {
        let len = sectors * 512;
        assert_eq!(guest.status(XenOp::Read { sector, len }), status, "{sectors} at {sector}");
        assert_eq!(guest.status(XenOp::WriteAny { sector, len }), status, "{sectors} at {sector}");
        let discard = XenOp::Discard { sector, count: sectors as u64, secure: false };
        assert_eq!(guest.status(discard), status, "{sectors} at {sector}");
    }
    guest.queue.flush().unwrap();
}
