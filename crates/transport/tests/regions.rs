//! A session over a real socket: the memory that a front-end gives beside that of its guest, an
//! in-flight region and a migration log.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where it fails")]

mod front;

use front::{Asked, Front, REGION, VERSION_1, doorbell, memory, region};
use manyring_queue::Base;
use manyring_wire::vhost_user::{InflightArea, LogArea, Region};
use manyring_wire::virtio::VIRTIO_ID_BLOCK;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{SealFlags, fcntl_get_seals, fstat};
use std::sync::atomic::Ordering;
use zerocopy::IntoBytes;

const AREA: InflightArea =
    InflightArea { size: 0, offset: 0, queues: 2, queue_size: 128, padding: [0; 2] };
/// Bytes of the place of a ring of 128 entries.
const PLACE: u64 = (16 + 128 * 16_u64).next_multiple_of(64);

#[test]
fn a_ring_goes_on_from_the_in_flight_region_and_not_from_its_base() {
    let mut front = Front::new(VIRTIO_ID_BLOCK, true);
    let file = memory(REGION.size);
    assert_eq!(front.ask("ADD_MEM_REG", &region(REGION), &[file.as_fd()]), 0);
    // As the specification says, and as QEMU does.
    for size in [20, 24] {
        let (area, fd) = front.new_region(AREA, size);
        assert_eq!(area, InflightArea { size: 2 * PLACE, ..AREA });
        assert_eq!(fstat(&fd).unwrap().st_size, i64::try_from(2 * PLACE).unwrap());
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        assert_eq!(fcntl_get_seals(&fd), Ok(seals));
        assert_eq!(front.ask("SET_INFLIGHT_FD", area.as_bytes(), &[fd.as_fd()]), 0);
        let (queue, place) = if size == 20 { (0, 0) } else { (1, PLACE) };
        let kick = u64::from(queue);
        front.describe(queue);
        // Nobody has recorded anything: the base counts. The recorder's queues do not run.
        front.ask("SET_VRING_KICK", kick.as_bytes(), &[doorbell().as_fd()]);
        let mut header = [0; 16];
        rustix::io::pread(&fd, &mut header, place).unwrap();
        assert_eq!(header, [0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 128, 0, 0, 0, 0, 0]);
        // Chain 3 is in flight: it is owed, and the next one is that after it.
        rustix::io::pwrite(&fd, &[1], place + 16 + 3 * 16).unwrap();
        front.ask("SET_VRING_KICK", kick.as_bytes(), &[doorbell().as_fd()]);
        let index = usize::try_from(queue).unwrap();
        let started =
            |base: u16| Asked::Start(index, 128, base.into(), false, [true, false, false]);
        let asked = front.device.asked();
        assert_eq!(asked[asked.len() - 2..], [started(77), started(1)]);
    }
    // The driver begins anew: so do its rings.
    assert_eq!(front.ask("RESET_DEVICE", &[], &[]), 0);
    front.ask("SET_FEATURES", VERSION_1.as_bytes(), &[]);
    front.describe(1);
    front.ask("SET_VRING_KICK", 1_u64.as_bytes(), &[doorbell().as_fd()]);
    let asked = front.leave();
    let started = Asked::Start(1, 128, 77.into(), true, [true, false, false]);
    assert!(asked.contains(&started), "{asked:?}");
}

/// Writes what a dead process has left: the driver has made chains 0 to 9 available, four were
/// returned, and `owed` were taken and not returned.
fn leave_behind(guest: &OwnedFd, inflight: &OwnedFd, owed: &[u16]) {
    let put = |file: &OwnedFd, bytes: &[u8], at: u64| {
        assert_eq!(rustix::io::pwrite(file, bytes, at), Ok(bytes.len()));
    };
    let heads: Vec<u16> = (0..10).collect();
    // Flags and index: of the available ring, and of the used ring.
    put(guest, [0u16, 10].as_bytes(), 0x1000);
    put(guest, heads.as_bytes(), 0x1004);
    put(guest, [0u16, 4].as_bytes(), 0x2000);
    // Version, entries, the head that was returned last, the used index.
    put(inflight, [1u16, 128, 3, 4].as_bytes(), 8);
    for head in 0..10 {
        let at = 16 + u64::from(head) * 16;
        put(inflight, u64::from(owed.contains(&head)).as_bytes(), at);
        put(inflight, u64::from(head).as_bytes(), at + 8);
    }
}

/// A process before this one has run the ring; the front-end's base is from before that.
#[test]
fn a_ring_that_does_not_run_is_told_as_its_in_flight_region_says() {
    let mut front = Front::new(VIRTIO_ID_BLOCK, true);
    let guest = memory(REGION.size);
    assert_eq!(front.ask("ADD_MEM_REG", &region(REGION), &[guest.as_fd()]), 0);
    let (area, inflight) = front.new_region(AREA, 20);
    assert_eq!(front.ask("SET_INFLIGHT_FD", area.as_bytes(), &[inflight.as_fd()]), 0);
    let base = |front: &mut Front, shortages| {
        front.device.shortages.store(shortages, Ordering::Relaxed);
        front.describe(0);
        let started = front.ask("SET_VRING_KICK", 0_u64.as_bytes(), &[doorbell().as_fd()]);
        assert_eq!(started, u64::from(shortages == 0), "it waits for the host, or cannot start");
        front.send("GET_VRING_BASE", 0, [0u32, 0].as_bytes(), &[]);
        let state = front.reply();
        u32::from_ne_bytes(state[4..].try_into().unwrap())
    };
    for shortages in [u32::MAX, 0] {
        leave_behind(&guest, &inflight, &[4, 5, 6, 7, 8, 9]);
        assert_eq!(base(&mut front, shortages), 4, "all of these are available again");
        let mut flag = [9; 2];
        rustix::io::pread(&inflight, &mut flag, 16 + 4 * 16).unwrap();
        assert_eq!(flag, [0, 0], "nothing is in flight, for a process that has the region too");
        // Chain 4 was returned before chain 3: no base says that.
        leave_behind(&guest, &inflight, &[3, 5, 6, 7, 8, 9]);
        assert_eq!(base(&mut front, shortages), 10);
    }
}

/// The bases at which a ring of this index has started, in order.
fn bases(asked: &[Asked], index: usize) -> Vec<(u16, Base)> {
    let starts = asked.iter().filter_map(|asked| match asked {
        Asked::Start(queue, size, base, ..) if *queue == index => Some((*size, *base)),
        _ => None,
    });
    starts.collect()
}

#[test]
fn a_ring_without_a_place_in_the_region_starts_at_its_base_without_a_record() {
    let mut front = Front::new(VIRTIO_ID_BLOCK, true);
    let file = memory(REGION.size);
    assert_eq!(front.ask("ADD_MEM_REG", &region(REGION), &[file.as_fd()]), 0);
    let (area, fd) = front.new_region(InflightArea { queues: 1, ..AREA }, 24);
    assert_eq!(front.ask("SET_INFLIGHT_FD", area.as_bytes(), &[fd.as_fd()]), 0);
    front.describe(1);
    front.ask("SET_VRING_KICK", 1_u64.as_bytes(), &[doorbell().as_fd()]);
    assert_eq!(bases(&front.leave(), 1), [(128, 77.into())]);
    assert_eq!(header(&fd), [0; 16], "the place of another ring");
}

/// The header of the first ring's place.
fn header(fd: impl AsFd) -> [u8; 16] {
    let mut header = [0; 16];
    rustix::io::pread(fd, &mut header, 0).unwrap();
    header
}

/// As QEMU 7.2's virtio-mmio has it: the guest's driver takes larger rings than the device has.
#[test]
fn a_ring_larger_than_its_place_in_the_region_starts_at_its_base_and_empties_the_place() {
    let mut front = Front::new(VIRTIO_ID_BLOCK, true);
    let file = memory(REGION.size);
    assert_eq!(front.ask("ADD_MEM_REG", &region(REGION), &[file.as_fd()]), 0);
    let (area, fd) = front.new_region(AREA, 24);
    assert_eq!(front.ask("SET_INFLIGHT_FD", area.as_bytes(), &[fd.as_fd()]), 0);
    front.describe(0);
    let mut start = |entries: u32| {
        assert_eq!(front.ask("SET_VRING_NUM", [0, entries].as_bytes(), &[]), 0);
        assert_eq!(front.ask("SET_VRING_BASE", [0u32, 77].as_bytes(), &[]), 0);
        front.ask("SET_VRING_KICK", 0_u64.as_bytes(), &[doorbell().as_fd()]);
    };
    start(128);
    let begun = header(&fd);
    assert_ne!(begun, [0; 16]);
    // Chain 3 of that ring is in flight. The larger ring is another one, and so is the last.
    rustix::io::pwrite(&fd, &[1], 16 + 3 * 16).unwrap();
    start(256);
    let mut place = vec![0xff; usize::try_from(PLACE).unwrap()];
    assert_eq!(rustix::io::pread(&fd, &mut place, 0), Ok(place.len()));
    assert!(place.iter().all(|byte| *byte == 0), "a record that is not of the ring");
    start(128);
    assert_eq!(header(&fd), begun);
    let started = [128, 256, 128].map(|size| (size, 77.into()));
    assert_eq!(bases(&front.leave(), 0), started);
}

#[test]
fn an_in_flight_region_that_cannot_be_one_ends_the_session() {
    let ends = |name: &str, area: InflightArea, fds: &[BorrowedFd<'_>]| {
        let mut front = Front::new(VIRTIO_ID_BLOCK, true);
        assert!(front.ends_with(name, area.as_bytes(), fds), "{name} {area:?}");
        front.leave();
    };
    let file = memory(2 * PLACE);
    let whole = InflightArea { size: 2 * PLACE, ..AREA };
    for area in [
        InflightArea { queues: 0, ..whole },
        InflightArea { queues: u16::MAX, ..whole },
        InflightArea { queue_size: 0, ..whole },
        InflightArea { queue_size: 32769, ..whole },
    ] {
        ends("GET_INFLIGHT_FD", area, &[]);
        ends("SET_INFLIGHT_FD", area, &[file.as_fd()]);
    }
    for area in [
        InflightArea { size: 2 * PLACE - 1, ..whole },
        InflightArea { queue_size: 256, ..whole },
        InflightArea { offset: 64, ..whole },
        InflightArea { offset: u64::MAX - 63, ..whole },
        InflightArea { size: u64::MAX, queue_size: 32768, ..whole },
    ] {
        ends("SET_INFLIGHT_FD", area, &[file.as_fd()]);
    }
    ends("SET_INFLIGHT_FD", whole, &[]);
    ends("SET_INFLIGHT_FD", whole, &[doorbell().as_fd()]);
}

#[test]
fn an_in_flight_region_that_is_not_aligned_holds_no_record_and_its_rings_start() {
    let mut front = Front::new(VIRTIO_ID_BLOCK, true);
    let (file, ours) = (memory(REGION.size), memory(4 * PLACE));
    assert_eq!(front.ask("ADD_MEM_REG", &region(REGION), &[file.as_fd()]), 0);
    let area = InflightArea { size: 2 * PLACE, offset: 4, ..AREA };
    assert_eq!(front.ask("SET_INFLIGHT_FD", area.as_bytes(), &[ours.as_fd()]), 0);
    front.describe(0);
    front.ask("SET_VRING_KICK", 0_u64.as_bytes(), &[doorbell().as_fd()]);
    assert_eq!(bases(&front.leave(), 0), [(128, 77.into())]);
    assert_eq!(header(&ours), [0; 16]);
}

/// The guest has 16 pages: two bytes of a log.
#[test]
fn a_log_that_cannot_be_one_ends_the_session() {
    let file = memory(4096);
    let log = |size, offset| LogArea { size, offset };
    let bad = [log(0, 0), log(1, 0), log(4097, 0), log(2, 4095), log(2, u64::MAX)];
    for area in bad.into_iter().chain([log(u64::MAX, 0), log(u64::MAX, 2), log(1 << 33, 0)]) {
        let mut front = Front::new(VIRTIO_ID_BLOCK, true);
        let memory = memory(REGION.size);
        assert_eq!(front.ask("ADD_MEM_REG", &region(REGION), &[memory.as_fd()]), 0);
        assert!(front.ends_with("SET_LOG_BASE", area.as_bytes(), &[file.as_fd()]), "{area:?}");
        front.leave();
    }
    let mut front = Front::new(VIRTIO_ID_BLOCK, true);
    assert!(front.ends_with("SET_LOG_BASE", log(2, 0).as_bytes(), &[doorbell().as_fd()]));
    front.leave();
}

#[test]
fn memory_that_a_log_is_too_short_for_ends_the_session() {
    let mut front = Front::new(VIRTIO_ID_BLOCK, true);
    let (file, log) = (memory(REGION.size), memory(4096));
    assert_eq!(front.ask("ADD_MEM_REG", &region(REGION), &[file.as_fd()]), 0);
    // It is answered with 0, and may lie anywhere in its file.
    let area = LogArea { size: 2, offset: 4094 };
    assert_eq!(front.ask("SET_LOG_BASE", area.as_bytes(), &[log.as_fd()]), 0);
    let high = Region { guest_addr: 0x1_0000, user_addr: 0x7100_0000, ..REGION };
    assert!(front.ends_with("ADD_MEM_REG", &region(high), &[file.as_fd()]));
    front.leave();
}
