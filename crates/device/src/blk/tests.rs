//! Every kind of request, well-formed and not, from a driver's ring to a disk and back, without a
//! thread: the driver half is the guest, a memory disk the host.

mod in_flight_max;
mod limited;
pub(crate) mod moderation;
mod recall;

mod state;

use super::config::RANGES_MAX;
use super::virtio::BlkQueue;
use super::{BlkDevice, BlkOptions, Shared};
use crate::Device;
use manyring_backend::blk::Disk;
use manyring_backend::blk::fault::{FaultDisk, FaultPlan};
use manyring_backend::blk::memory::MemoryDisk;
use manyring_backend::blk::null::NullDisk;
use manyring_engine::Moderation;
use manyring_engine::solo::Wait;
use manyring_engine::stats::QueueStats;
use manyring_engine::{Pool, PoolOptions};
use manyring_memory::{GuestMemory, GuestSlice, Mapping, RegionSpec};
use manyring_queue::{
    DeviceQueue, DriverQueue, QueueConfig, QueueError, RingAddresses, RingFeatures,
};
use manyring_wire::blk::{
    CONFIG_WRITEBACK, VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_MQ,
    VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SECURE_ERASE, VIRTIO_BLK_F_SIZE_MAX, VIRTIO_BLK_T_DISCARD,
    VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
    VIRTIO_BLK_T_SECURE_ERASE, VIRTIO_BLK_T_WRITE_ZEROES,
};
use manyring_wire::virtio::VIRTIO_F_VERSION_1;
use std::sync::Arc;
use std::sync::atomic::Ordering;

const DISK_SIZE: u64 = 1 << 20;
const SIZE: u16 = 16;
const MEMORY: u64 = 8 << 20;
/// Where things lie in the guest: the ring below, header, data and status above.
const HEADER: u64 = 0x4000;
const DATA: u64 = 0x5000;
const STATUS: u64 = 0x7000;
const NOT_WRITTEN: u8 = 0xee;

struct Guest {
    mapping: Arc<Mapping>,
    driver: DriverQueue,
    queue: DeviceQueue,
    device: BlkDevice,
    blk: BlkQueue,
    stats: QueueStats,
    wait: Wait,
}

impl Guest {
    fn new(disk: Arc<dyn Disk>, read_only: bool) -> Self {
        let mapping = Arc::new(Mapping::anonymous(MEMORY).unwrap());
        let spec = RegionSpec { guest_addr: 0, size: MEMORY, user_addr: 0, mmap_offset: 0 };
        let memory = GuestMemory::default().with_mapping(spec, mapping.clone()).unwrap();
        let memory = Arc::new(memory);
        let config = QueueConfig {
            size: SIZE,
            addresses: RingAddresses { descriptor: 0, available: 0x1000, used: 0x2000 },
            base: 0.into(),
            features: RingFeatures {
                event_idx: true,
                indirect: true,
                in_order: false,
                packed: false,
            },
        };
        let options = BlkOptions {
            name: "test".to_owned(),
            num_queues: 2,
            serial: "serial-0".to_owned(),
            read_only,
            moderation: Moderation::Off,
            ..BlkOptions::default()
        };
        let queue = disk.open_queue(false).unwrap();
        let device = BlkDevice::new(options, disk, Pool::new(PoolOptions::default()));
        Self {
            driver: DriverQueue::new(config, &memory).unwrap(),
            queue: DeviceQueue::new(config, memory.clone()).unwrap(),
            blk: BlkQueue::new(queue, device.shared.clone(), memory),
            mapping,
            device,
            stats: QueueStats::default(),
            wait: Wait::new(false).unwrap(),
        }
    }

    fn plain() -> Self {
        Self::new(Arc::new(MemoryDisk::new(DISK_SIZE).unwrap()), false)
    }

    fn shared(&self) -> &Shared {
        &self.device.shared
    }

    fn slice(&self, addr: u64, len: usize) -> GuestSlice<'_> {
        self.mapping.slice(usize::try_from(addr).unwrap(), len).unwrap()
    }

    fn write_header(&self, kind: u32, sector: u64) {
        let bytes = [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat();
        self.slice(HEADER, 16).write_from(&bytes);
    }

    /// Lets the device look once; returns what the driver gets back.
    fn serve(&mut self) -> Option<u32> {
        self.driver.publish();
        self.blk.pop_and_submit(&mut self.queue, None, (0, usize::MAX));
        self.blk.complete(&mut self.queue, &self.stats, || self.wait.now_ns());
        self.queue.publish();
        self.blk.requests.acknowledge();
        self.driver.take_used().map(|(_, written)| written)
    }

    fn status(&self) -> u8 {
        let mut byte = [0];
        self.slice(STATUS, 1).read_into(&mut byte);
        byte[0]
    }

    /// One request of a header, `readable` bytes of data or `writable` ones, and a status byte.
    /// Returns the status and how much the device says it wrote.
    fn request(&mut self, kind: u32, sector: u64, readable: u32, writable: u32) -> (u8, u32) {
        self.write_header(kind, sector);
        self.slice(STATUS, 1).write_from(&[NOT_WRITTEN]);
        let mut read = vec![(HEADER, 16)];
        let mut write = Vec::new();
        if readable > 0 {
            read.push((DATA, readable));
        }
        if writable > 0 {
            write.push((DATA, writable));
        }
        write.push((STATUS, 1));
        self.driver.add(&read, &write).unwrap();
        let written = self.serve().expect("the chain comes back");
        (self.status(), written)
    }

    fn range_request(&mut self, kind: u32, sector: u64, sectors: u32, flags: u32) -> u8 {
        let bytes =
            [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()].concat();
        self.slice(DATA, 16).write_from(&bytes);
        self.request(kind, 0, 16, 0).0
    }

    fn data(&self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.slice(DATA, len).read_into(&mut bytes);
        bytes
    }

    /// A chain that breaks the rules: the queue stops and gives nothing back.
    fn expect_fault(&mut self, readable: &[(u64, u32)], writable: &[(u64, u32)]) {
        self.driver.add(readable, writable).unwrap();
        assert_eq!(self.serve(), None);
        assert!(matches!(self.queue.fault(), Some(QueueError::Request(_))));
        assert_eq!(self.queue.in_flight(), 0);
    }
}

#[test]
fn what_was_written_is_read_again() {
    let mut guest = Guest::plain();
    guest.slice(DATA, 4096).write_from(&[0x5a; 4096]);
    assert_eq!(guest.request(VIRTIO_BLK_T_OUT, 8, 4096, 0), (0, 1));
    guest.slice(DATA, 4096).fill_zero();
    assert_eq!(guest.request(VIRTIO_BLK_T_IN, 8, 0, 4096), (0, 4097));
    assert_eq!(guest.data(4096), [0x5a; 4096]);
    assert_eq!(guest.stats.bytes_read.value(), 4096);
    assert_eq!(guest.stats.bytes_written.value(), 4096);
}

#[test]
fn header_and_status_may_share_descriptors_with_data() {
    let mut guest = Guest::plain();
    guest.slice(DATA, 512).write_from(&[7; 512]);
    guest.request(VIRTIO_BLK_T_OUT, 1, 512, 0);
    // Header in three pieces; data and status in one descriptor.
    guest.write_header(VIRTIO_BLK_T_IN, 1);
    let header = [(HEADER, 5), (HEADER + 5, 1), (HEADER + 6, 10)];
    guest.driver.add(&header, &[(DATA + 0x1000 - 512, 513)]).unwrap();
    assert_eq!(guest.serve(), Some(513));
    let mut bytes = [1; 513];
    guest.slice(DATA + 0x1000 - 512, 513).read_into(&mut bytes);
    assert_eq!((&bytes[..512], bytes[512]), (&[7; 512][..], 0));
}

#[test]
fn transfers_outside_of_the_disk_or_not_in_sectors_are_errors() {
    let mut guest = Guest::plain();
    let sectors = DISK_SIZE / 512;
    for (sector, len) in [(sectors, 512), (sectors - 1, 1024), (u64::MAX, 512), (0, 511)] {
        assert_eq!(guest.request(VIRTIO_BLK_T_IN, sector, 0, len).0, 1, "{sector} {len}");
        assert_eq!(guest.request(VIRTIO_BLK_T_OUT, sector, len, 0).0, 1, "{sector} {len}");
    }
    assert_eq!(guest.request(VIRTIO_BLK_T_IN, sectors - 1, 0, 512).0, 0);
    assert_eq!(guest.stats.errors.value(), 8);
}

#[test]
fn a_read_of_no_bytes_is_done_at_once() {
    assert_eq!(Guest::plain().request(VIRTIO_BLK_T_IN, 0, 0, 0), (0, 1));
}

#[test]
fn the_device_id_is_the_serial_padded_with_zeroes() {
    let mut guest = Guest::plain();
    assert_eq!(guest.request(VIRTIO_BLK_T_GET_ID, 0, 0, 20), (0, 21));
    assert_eq!(guest.data(20), *b"serial-0\0\0\0\0\0\0\0\0\0\0\0\0");
}

#[test]
fn the_device_id_is_cut_off_where_the_drivers_buffer_ends() {
    let mut guest = Guest::plain();
    assert_eq!(guest.request(VIRTIO_BLK_T_GET_ID, 0, 0, 6), (0, 7));
    assert_eq!(guest.data(7), *b"serial\0");
    assert_eq!(guest.request(VIRTIO_BLK_T_GET_ID, 0, 0, 0), (0, 1));
    assert_eq!(guest.request(VIRTIO_BLK_T_GET_ID, 0, 0, 100), (0, 21), "it is no longer than 20");
}

#[test]
fn an_unknown_type_is_unsupported_and_the_queue_goes_on() {
    let mut guest = Guest::plain();
    assert_eq!(guest.request(999, 0, 0, 0).0, 2);
    assert_eq!(guest.request(VIRTIO_BLK_T_FLUSH, 0, 0, 0), (0, 1));
    assert_eq!(guest.stats.flushes.value(), 1);
}

#[test]
fn ranges_are_zeroed_and_bad_ones_refused() {
    let mut guest = Guest::plain();
    for kind in [VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_WRITE_ZEROES] {
        guest.slice(DATA, 4096).write_from(&[9; 4096]);
        guest.request(VIRTIO_BLK_T_OUT, 0, 4096, 0);
        assert_eq!(guest.range_request(kind, 1, 7, 0), 0);
        guest.request(VIRTIO_BLK_T_IN, 0, 0, 4096);
        let data = guest.data(4096);
        assert!(data[..512].iter().all(|b| *b == 9) && data[512..].iter().all(|b| *b == 0));
        // Past the end; then a reserved flag.
        assert_eq!(guest.range_request(kind, DISK_SIZE / 512, 1, 0), 1);
        assert_eq!(guest.range_request(kind, 0, 1, 2), 2);
        assert_eq!(guest.range_request(kind, 5, 0, 0), 0);
        // Half a segment, and more segments than offered.
        assert_eq!(guest.request(kind, 0, 8, 0).0, 1);
        assert_eq!(guest.request(kind, 0, 16 * (RANGES_MAX + 1), 0).0, 1);
    }
    assert_eq!(guest.range_request(VIRTIO_BLK_T_DISCARD, 0, 1, 1), 2);
    assert_eq!(guest.range_request(VIRTIO_BLK_T_WRITE_ZEROES, 0, 1, 1), 0);
    assert_eq!(guest.stats.discards.value(), 5, "those that were served");
}

#[test]
fn a_range_longer_than_the_config_space_allows_is_refused() {
    let mut guest = Guest::new(Arc::new(NullDisk::new(4 << 30)), false);
    let sectors_max = (1 << 30) / 512;
    for kind in [VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_WRITE_ZEROES] {
        assert_eq!(guest.range_request(kind, 0, sectors_max, 0), 0);
        assert_eq!(guest.range_request(kind, 0, sectors_max + 1, 0), 1);
    }
}

#[test]
fn secure_erase_is_offered_only_by_a_disk_that_can() {
    let mut guest = Guest::plain();
    assert_eq!(guest.device.features() & VIRTIO_BLK_F_SECURE_ERASE, 0);
    for sectors in [0, 1, 1 << 22] {
        assert_eq!(guest.range_request(VIRTIO_BLK_T_SECURE_ERASE, 0, sectors, 0), 2);
    }
    assert_eq!(guest.request(VIRTIO_BLK_T_SECURE_ERASE, 0, 8, 0).0, 2, "whatever follows it");
    let plan = FaultPlan { secure_erase: true, ..FaultPlan::default() };
    let disk = FaultDisk::new(Arc::new(MemoryDisk::new(DISK_SIZE).unwrap()), plan);
    let mut guest = Guest::new(Arc::new(disk), false);
    assert_ne!(guest.device.features() & VIRTIO_BLK_F_SECURE_ERASE, 0);
    assert_eq!(guest.range_request(VIRTIO_BLK_T_SECURE_ERASE, 0, 1, 0), 0);
}

#[test]
fn nothing_writes_to_a_read_only_device() {
    let mut guest = Guest::new(Arc::new(MemoryDisk::new(DISK_SIZE).unwrap()), true);
    assert_ne!(guest.device.features() & VIRTIO_BLK_F_RO, 0);
    assert_eq!(guest.request(VIRTIO_BLK_T_OUT, 0, 512, 0).0, 1);
    let not_offered = [VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_WRITE_ZEROES, VIRTIO_BLK_T_SECURE_ERASE];
    for kind in not_offered {
        assert_eq!(guest.range_request(kind, 0, 1, 0), 2);
    }
    assert_eq!(guest.request(VIRTIO_BLK_T_IN, 0, 0, 512).0, 0);
}

#[test]
fn each_request_counts_with_the_time_that_it_took() {
    let mut guest = Guest::plain();
    guest.write_header(VIRTIO_BLK_T_FLUSH, 0);
    for popped_at_ns in [1000, 1000, 4000] {
        guest.driver.add(&[(HEADER, 16)], &[(STATUS, 1)]).unwrap();
        guest.driver.publish();
        guest.blk.pop_and_submit(&mut guest.queue, None, (popped_at_ns, usize::MAX));
    }
    guest.blk.complete(&mut guest.queue, &guest.stats, || 9000);
    let serve_ns = &guest.stats.serve_ns;
    assert_eq!((serve_ns.count(), serve_ns.sum()), (3, 8000 + 8000 + 5000));
    assert_eq!(serve_ns.filled().iter().map(|(_, count)| *count).collect::<Vec<_>>(), [1, 2]);
    assert!(serve_ns.ops().all(|(op, times)| (op == "flush") == (times.count() > 0)));
}

#[test]
fn disk_errors_reach_the_driver_and_the_queue_goes_on() {
    let plan = FaultPlan { read_error_every: 2, flush_errors: true, ..FaultPlan::default() };
    let disk = FaultDisk::new(Arc::new(MemoryDisk::new(DISK_SIZE).unwrap()), plan);
    let mut guest = Guest::new(Arc::new(disk), false);
    let statuses: Vec<_> = (0..4).map(|_| guest.request(VIRTIO_BLK_T_IN, 0, 0, 512).0).collect();
    assert_eq!(statuses, [0, 1, 0, 1]);
    assert_eq!(guest.request(VIRTIO_BLK_T_FLUSH, 0, 0, 0).0, 1);
}

#[test]
fn a_read_that_fails_has_written_its_status_byte_and_nothing_else() {
    let plan = FaultPlan { read_error_every: 1, write_error_every: 1, ..FaultPlan::default() };
    let disk = FaultDisk::new(Arc::new(MemoryDisk::new(DISK_SIZE).unwrap()), plan);
    let mut guest = Guest::new(Arc::new(disk), false);
    assert_eq!(guest.request(VIRTIO_BLK_T_IN, 0, 0, 512), (1, 1));
    assert_eq!(guest.request(VIRTIO_BLK_T_OUT, 0, 512, 0), (1, 1));
    assert_eq!((guest.stats.reads.value(), guest.stats.bytes_read.value()), (1, 0));
    assert_eq!((guest.stats.writes.value(), guest.stats.bytes_written.value()), (1, 0));
}

#[test]
fn a_segment_longer_than_size_max_is_an_error_for_a_driver_that_knows_the_limit() {
    let size_max = 2 << 20;
    for (features, expected) in [(0, 0), (VIRTIO_BLK_F_SIZE_MAX, 1)] {
        let mut guest = Guest::new(Arc::new(NullDisk::new(1 << 30)), false);
        assert_ne!(guest.device.features() & VIRTIO_BLK_F_SIZE_MAX, 0);
        guest.blk = guest.blk.with_features(features);
        assert_eq!(guest.request(VIRTIO_BLK_T_OUT, 0, size_max, 0).0, 0);
        assert_eq!(guest.request(VIRTIO_BLK_T_OUT, 0, size_max + 512, 0).0, expected);
    }
}

#[test]
fn a_long_request_is_served_in_pieces_of_a_turn_each() {
    let mut guest = Guest::new(Arc::new(MemoryDisk::new(DISK_SIZE).unwrap()), false);
    guest.slice(DATA, 1 << 20).write_from(&vec![7; 1 << 20]);
    guest.write_header(VIRTIO_BLK_T_OUT, 0);
    guest.driver.add(&[(HEADER, 16), (DATA, 1 << 20)], &[(STATUS, 1)]).unwrap();
    let mut turns = 1;
    while guest.serve().is_none() {
        turns += 1;
        assert!(turns < 100, "it never ends");
    }
    assert!(turns >= 4, "{turns} turns for a megabyte");
    guest.slice(DATA, 1 << 20).fill_zero();
    assert_eq!(guest.request(VIRTIO_BLK_T_IN, (1 << 11) - 1, 0, 512), (0, 513));
    assert_eq!(guest.data(512), [7; 512]);
}

#[test]
fn a_request_without_a_status_byte_or_with_a_short_header_stops_the_queue() {
    Guest::plain().expect_fault(&[(HEADER, 16)], &[]);
    Guest::plain().expect_fault(&[(HEADER, 15)], &[(STATUS, 1)]);
    Guest::plain().expect_fault(&[], &[(STATUS, 1)]);
    Guest::plain().expect_fault(&[(HEADER, 16)], &[(STATUS, 0)]);
}

#[test]
fn what_came_before_a_fault_in_a_batch_is_served_and_nothing_after() {
    let mut guest = Guest::plain();
    guest.write_header(VIRTIO_BLK_T_FLUSH, 0);
    guest.driver.add(&[(HEADER, 16)], &[(STATUS, 1)]).unwrap();
    guest.driver.add(&[(HEADER, 3)], &[(STATUS, 1)]).unwrap();
    guest.driver.add(&[(HEADER, 16)], &[(STATUS, 1)]).unwrap();
    assert_eq!(guest.serve(), Some(1));
    assert_eq!(guest.driver.take_used(), None);
    assert_eq!(guest.stats.requests.value(), 1);
}

#[test]
fn the_cache_is_write_through_unless_the_driver_can_flush_and_wants_write_back() {
    let guest = Guest::plain();
    let write_through = || guest.shared().write_through.load(Ordering::Relaxed);
    drop(guest.device.set_features(0));
    assert!(write_through());
    drop(guest.device.set_features(VIRTIO_BLK_F_FLUSH));
    assert!(!write_through());
    guest.device.write_config(CONFIG_WRITEBACK, &[0]).unwrap();
    assert!(write_through());
    let mut byte = [9];
    guest.device.read_config(CONFIG_WRITEBACK, &mut byte);
    assert_eq!(byte, [0]);
    guest.device.write_config(CONFIG_WRITEBACK, &[1]).unwrap();
    assert!(!write_through());
    assert!(guest.device.write_config(0, &[0]).is_err());
    assert!(guest.device.write_config(CONFIG_WRITEBACK, &[0, 0]).is_err());
}

fn writeback_of(device: &BlkDevice) -> u8 {
    let mut byte = [9];
    device.read_config(CONFIG_WRITEBACK, &mut byte);
    byte[0]
}

#[test]
fn a_driver_that_cannot_flush_reads_write_through_and_a_reset_restores_the_field() {
    let guest = Guest::plain();
    let is_durable = || guest.shared().write_through.load(Ordering::Relaxed);
    let device = &guest.device;
    assert_eq!(writeback_of(device), 1);
    drop(device.set_features(VIRTIO_F_VERSION_1 | VIRTIO_BLK_F_CONFIG_WCE));
    assert_eq!((writeback_of(device), is_durable()), (0, true));
    device.write_config(CONFIG_WRITEBACK, &[1]).unwrap();
    assert_eq!((writeback_of(device), is_durable()), (0, true), "it cannot flush");
    device.reset_config();
    assert_eq!(writeback_of(device), 1);
    // The next driver can.
    drop(device.set_features(VIRTIO_F_VERSION_1 | VIRTIO_BLK_F_FLUSH));
    assert_eq!((writeback_of(device), is_durable()), (1, false));
    // Without a reset between: the features say that it is another driver.
    drop(device.set_features(VIRTIO_F_VERSION_1));
    assert_eq!((writeback_of(device), is_durable()), (0, true));
    drop(device.set_features(VIRTIO_F_VERSION_1 | VIRTIO_BLK_F_FLUSH));
    assert_eq!((writeback_of(device), is_durable()), (1, false));
}

#[test]
fn a_reset_does_not_weaken_the_writes_of_a_guest_that_chose_write_through() {
    let guest = Guest::plain();
    let is_durable = || guest.shared().write_through.load(Ordering::Relaxed);
    let (device, features) = (&guest.device, VIRTIO_F_VERSION_1 | VIRTIO_BLK_F_FLUSH);
    drop(device.set_features(features));
    device.write_config(CONFIG_WRITEBACK, &[0]).unwrap();
    // As QEMU does when it is paused and goes on: the guest has not heard of it.
    device.reset_config();
    drop(device.set_features(features));
    assert_eq!((writeback_of(device), is_durable()), (1, true));
    device.write_config(CONFIG_WRITEBACK, &[1]).unwrap();
    assert!(!is_durable(), "the driver has asked for it");
    device.write_config(CONFIG_WRITEBACK, &[0]).unwrap();
    device.reset_config();
    // RESET_DEVICE, or the end of the session.
    drop(device.set_features(0));
    drop(device.set_features(features));
    assert!(!is_durable());
}

#[test]
fn a_config_read_past_the_end_is_filled_with_zeroes() {
    let guest = Guest::plain();
    let mut bytes = [0xff; 256];
    guest.device.read_config(0, &mut bytes);
    assert_eq!(u64::from_le_bytes(*bytes.first_chunk().unwrap()), DISK_SIZE / 512);
    assert!(bytes[72..].iter().all(|b| *b == 0));
    let mut bytes = [0xff; 4];
    guest.device.read_config(1000, &mut bytes);
    assert_eq!(bytes, [0; 4]);
    assert_ne!(guest.device.features() & VIRTIO_BLK_F_MQ, 0);
}
