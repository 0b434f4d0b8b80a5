//! Queue pairs against a device half in the same process; the session against a script.

use super::*;
use crate::Virtqueue;
use manyring_memory::{copy_from_slices, copy_to_slices, total_len};
use manyring_queue::{BATCH_CHAINS, Batch, DeviceQueue, QueueConfig};
use manyring_wire::net::{
    Coalescing, HEADER_SIZE, MacAddress, RawNetHeader, VIRTIO_NET_F_MRG_RXBUF, class,
};
use manyring_wire::vhost_user::{FLAG_NEED_REPLY, FLAG_REPLY, FLAG_VERSION, Header};
use manyring_wire::virtio::{VIRTIO_F_EVENT_IDX, VIRTIO_F_VERSION_1};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::thread::JoinHandle;
use std::time::Duration;

const SHORT: Duration = Duration::from_millis(1);

fn options(queue_size: u16) -> NetDriverOptions {
    let (mergeable_size, big_size, transmit_size) = (64, 256, 256);
    NetDriverOptions {
        queue_size,
        mergeable_size,
        big_size,
        transmit_size,
        ..NetDriverOptions::default()
    }
}

fn arena() -> Arc<Arena> {
    Arc::new(Arena::new(1 << 20).unwrap())
}

/// The device half of a ring that is set up.
struct Device {
    queue: DeviceQueue,
    batch: Batch,
}

impl Device {
    fn new(arena: &Arc<Arena>, vring: &Virtqueue, features: u64) -> Self {
        let features = RingFeatures::from_bits(features);
        let (size, addresses) = (vring.size(), vring.addresses());
        let config = QueueConfig { size, addresses, base: 0.into(), features };
        let memory = arena.memory().clone();
        Self { queue: DeviceQueue::new(config, memory).unwrap(), batch: Batch::new() }
    }

    /// Takes the frames that the driver has sent: of each chain the sizes of its descriptors, and
    /// the bytes.
    fn take_frames(&mut self) -> Vec<(Vec<usize>, Vec<u8>)> {
        let mut frames = Vec::new();
        while self.queue.pop_batch(&mut self.batch, BATCH_CHAINS) > 0 {
            for index in 0..self.batch.len() {
                let (chain, readable, _) = self.batch.take(index).unwrap();
                let mut bytes = vec![0; usize::try_from(total_len(&readable)).unwrap()];
                copy_from_slices(&readable, &mut bytes);
                frames
                    .push((readable.iter().map(manyring_memory::GuestSlice::len).collect(), bytes));
                self.queue.push_used(chain, 0);
            }
            self.queue.publish();
        }
        frames
    }

    /// Fills the next buffers with `bytes`; they are seen after `publish`.
    fn deliver(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            assert_eq!(self.queue.pop_batch(&mut self.batch, 1), 1, "the driver gave no buffer");
            let (chain, _, writable) = self.batch.take(0).unwrap();
            let count = copy_to_slices(&writable, bytes);
            self.queue.push_used(chain, u32::try_from(count).unwrap());
            bytes = &bytes[count..];
        }
    }
}

fn tx_rig(options: &NetDriverOptions, features: u64) -> (NetDriverTx, Device) {
    let arena = arena();
    let mut tx = NetDriverTx::new(&arena, 0, RingFeatures::from_bits(features), options).unwrap();
    let device = Device::new(&arena, tx.vring(), features);
    (tx, device)
}

fn rx_rig(features: u64) -> (NetDriverRx, Device) {
    let arena = arena();
    let mut rx = NetDriverRx::new(&arena, 0, features, &options(8)).unwrap();
    let device = Device::new(&arena, rx.vring(), features);
    (rx, device)
}

fn with_buffers(num_buffers: u16, frame: &[u8]) -> Vec<u8> {
    let header = RawNetHeader { num_buffers: num_buffers.into(), ..RawNetHeader::default() };
    [header.as_bytes(), frame].concat()
}

#[test]
fn frames_reach_the_device_whole_whichever_way_they_were_added() {
    let (mut tx, mut device) = tx_rig(&options(8), 0);
    let header = RawNetHeader { flags: 1, csum_start: 34.into(), ..RawNetHeader::default() };
    assert!(tx.send(&header, b"one").unwrap());
    assert!(tx.send_parts(&header, &[b"tw", b"", b"o"]).unwrap());
    let room = tx.room().unwrap();
    copy_to_slices(&[room], &[header.as_bytes(), b"three"].concat());
    assert!(tx.send_filled(17));
    assert!(tx.publish(0).unwrap(), "the device has asked for the first kick");
    let expected = |frame: &[u8]| [header.as_bytes(), frame].concat();
    let frames = device.take_frames();
    assert_eq!(frames[0], (vec![15], expected(b"one")));
    assert_eq!(frames[1].1, expected(b"two"));
    assert_eq!(frames[2], (vec![17], expected(b"three")));
    let counters = tx.counters();
    assert_eq!((counters.packets, counters.bytes, counters.kicks), (3, 11, 1));
}

#[test]
fn a_frame_longer_than_a_buffer_is_refused_and_nothing_is_added() {
    let (mut tx, mut device) = tx_rig(&options(8), 0);
    let long = [0; 256 - HEADER_SIZE + 1];
    let header = RawNetHeader::default();
    assert!(matches!(tx.send(&header, &long), Err(DriverError::TooLong { len: 257, max: 256 })));
    assert!(tx.send_parts(&header, &[&long[..200], &long[200..]]).is_err());
    assert!(!tx.publish(0).unwrap());
    assert!(device.take_frames().is_empty());
}

#[test]
fn sent_buffers_are_freed_when_more_than_half_the_ring_is_used_and_not_before() {
    let (mut tx, mut device) = tx_rig(&options(8), 0);
    for sent in 1..=5 {
        assert!(tx.send(&RawNetHeader::default(), b"frame").unwrap());
        tx.publish(0).unwrap();
        assert_eq!(device.take_frames().len(), 1);
        assert_eq!(tx.in_flight(), sent, "freed too early");
    }
    assert!(tx.send(&RawNetHeader::default(), b"frame").unwrap());
    assert_eq!(tx.in_flight(), 1);
}

#[test]
fn a_full_transmitq_says_so_until_the_device_has_sent() {
    let (mut tx, mut device) = tx_rig(&options(4), VIRTIO_F_EVENT_IDX);
    while tx.send(&RawNetHeader::default(), b"frame").unwrap() {}
    assert_eq!((tx.in_flight(), tx.room().is_none()), (4, true));
    tx.publish(0).unwrap();
    assert!(matches!(tx.wait_sent(SHORT), Err(DriverError::Timeout)));
    assert_eq!(device.take_frames().len(), 4);
    tx.drain(SHORT).unwrap();
    assert!(tx.send(&RawNetHeader::default(), b"frame").unwrap());
}

#[test]
fn queues_of_one_pool_never_have_the_same_buffer_and_take_the_last_that_came_back() {
    let (arena, options) = (arena(), options(4));
    let pool = Arc::new(BufferPool::new(&arena, 8, options.transmit_size).unwrap());
    let rig = |pair| {
        let ring = RingFeatures::from_bits(0);
        let mut tx = NetDriverTx::sharing(&pool, &arena, pair, ring, &options).unwrap();
        let device = Device::new(&arena, tx.vring(), 0);
        (tx, device)
    };
    let ((mut one, mut its_device), (mut two, mut other_device)) = (rig(0), rig(1));
    let header = RawNetHeader::default();
    // Both are filled, in turns: no frame is written over another one.
    for number in 0..4 {
        assert!(one.send(&header, &[b'a', number]).unwrap());
        assert!(two.send(&header, &[b'b', number]).unwrap());
    }
    assert!(one.room().is_none() && two.room().is_none());
    one.publish(0).unwrap();
    two.publish(0).unwrap();
    let bodies = |frames: Vec<(Vec<usize>, Vec<u8>)>| -> Vec<Vec<u8>> {
        frames.into_iter().map(|(_, bytes)| bytes[HEADER_SIZE..].to_vec()).collect()
    };
    let of = |letter| (0..4).map(|number| vec![letter, number]).collect::<Vec<_>>();
    assert_eq!(bodies(its_device.take_frames()), of(b'a'));
    assert_eq!(bodies(other_device.take_frames()), of(b'b'));
    // A buffer that comes back to one queue is next for the other, the last one first.
    assert_eq!((two.reclaim(), one.reclaim()), (4, 4));
    let found = two.room().unwrap().split_at(HEADER_SIZE).1.read_array::<2>();
    assert_eq!(found, Some([b'a', 3]));
    assert_eq!((one.in_flight(), two.in_flight()), (0, 0));
}

#[test]
fn a_kick_waits_for_packets_or_time_whichever_comes_first() {
    let kicks = Coalescing { packets_max: 3, delay_us_max: 50 };
    let (mut tx, mut device) = tx_rig(&NetDriverOptions { kicks, ..options(16) }, 0);
    let mut send_at = |now_ns| {
        assert!(tx.send(&RawNetHeader::default(), b"frame").unwrap());
        (tx.publish(now_ns).unwrap(), tx.kick_due_ns())
    };
    // Only the kick waits: a device that looks finds the frame.
    assert_eq!(send_at(1000), (false, Some(51_000)));
    assert_eq!(device.take_frames().len(), 1);
    assert_eq!(send_at(2000), (false, Some(51_000)));
    assert_eq!(send_at(3000), (true, None), "three packets");
    assert_eq!(send_at(4000), (false, Some(54_000)));
    assert_eq!(send_at(54_000), (true, None), "50 us");
    assert_eq!(send_at(60_000), (false, Some(110_000)));
    assert!(!tx.publish(109_999).unwrap());
    assert!(tx.publish(110_000).unwrap(), "time alone is enough");
    assert!(!tx.flush().unwrap());
    let counters = tx.counters();
    assert_eq!((counters.kicks, counters.kicks_delayed, counters.packets), (3, 4, 6));
}

#[test]
fn a_kick_that_the_device_does_not_want_is_counted_and_not_sent() {
    let (mut tx, mut device) = tx_rig(&options(16), VIRTIO_F_EVENT_IDX);
    device.queue.enable_notifications();
    for _ in 0..3 {
        tx.send(&RawNetHeader::default(), b"frame").unwrap();
        tx.publish(0).unwrap();
    }
    let counters = tx.counters();
    assert_eq!((counters.kicks, counters.kicks_suppressed), (1, 2));
}

#[test]
fn a_frame_in_several_buffers_is_gathered() {
    let (mut rx, mut device) = rx_rig(VIRTIO_NET_F_MRG_RXBUF);
    let frame: Vec<u8> = (0..140).collect();
    device.deliver(&with_buffers(3, &frame));
    device.deliver(&with_buffers(1, b"next"));
    let mut bytes = b"before".to_vec();
    assert_eq!(rx.recv(&mut bytes).unwrap(), None, "nothing was published");
    device.queue.publish();
    let header = rx.recv(&mut bytes).unwrap().unwrap();
    assert_eq!(
        (header.num_buffers.get(), &bytes[..6], &bytes[6..]),
        (3, &b"before"[..], &frame[..])
    );
    let slices = rx.recv_slices().unwrap().unwrap();
    assert_eq!((slices.len(), total_len(slices)), (1, 16));
    assert_eq!((rx.counters().packets, rx.counters().bytes), (2, 144));
    assert_eq!(rx.spare_count(), 4);
    rx.refill().unwrap();
    let mut count = 0;
    while device.queue.pop_batch(&mut device.batch, 1) == 1 {
        device.queue.discard(device.batch.take(0).unwrap().0);
        count += 1;
    }
    assert_eq!(count, 8, "all buffers are back");
}

#[test]
fn a_frame_whose_buffers_become_visible_one_by_one_is_an_error() {
    let (mut rx, mut device) = rx_rig(VIRTIO_NET_F_MRG_RXBUF);
    let bytes = with_buffers(2, &[7; 100]);
    device.deliver(&bytes[..64]);
    device.queue.publish();
    let error = rx.recv(&mut Vec::new());
    assert!(matches!(error, Err(DriverError::Split { buffers: 2, visible: 1 })), "{error:?}");
    device.deliver(&with_buffers(0, b"none"));
    device.queue.publish();
    let error = rx.recv(&mut Vec::new());
    assert!(matches!(error, Err(DriverError::Split { buffers: 0, visible: 1 })), "{error:?}");
}

#[test]
fn a_frame_without_a_whole_header_is_an_error() {
    let (mut rx, mut device) = rx_rig(VIRTIO_NET_F_MRG_RXBUF);
    device.deliver(&[0; 11]);
    device.queue.publish();
    let error = rx.recv(&mut Vec::new());
    assert!(matches!(error, Err(DriverError::ShortFrame { written: 11 })), "{error:?}");
}

#[test]
fn without_mergeable_buffers_a_frame_lies_in_one_big_buffer() {
    // A legacy driver's header ends before `num_buffers`.
    for (features, header_size) in [(VIRTIO_F_VERSION_1, 12), (0, 10)] {
        let (mut rx, mut device) = rx_rig(features);
        device.deliver(&[vec![0; header_size], vec![9; 200]].concat());
        device.queue.publish();
        let mut frame = Vec::new();
        rx.recv_wait(&mut frame, SHORT).unwrap();
        assert_eq!(frame, [9; 200]);
        assert!(matches!(rx.wait(SHORT), Err(DriverError::Timeout)));
        assert_eq!(rx.spare_count(), 0);
    }
}

#[test]
fn a_frame_that_nobody_announced_is_a_lost_call_only_if_it_was_asked_for() {
    let (mut rx, mut device) = rx_rig(VIRTIO_F_EVENT_IDX);
    device.deliver(&with_buffers(1, b"frame"));
    device.queue.publish();
    assert!(!device.queue.needs_notification(), "a driver that polls wants no call");
    rx.wait(SHORT).unwrap();
    rx.recv(&mut Vec::new()).unwrap().unwrap();
    assert!(!rx.enable_notifications());
    device.deliver(&with_buffers(1, b"frame"));
    device.queue.publish();
    assert!(device.queue.needs_notification());
}

#[test]
fn a_command_carries_its_class_its_data_and_room_for_the_answer() {
    let arena = arena();
    let mut control = ControlDriverQueue::new(&arena, 2, RingFeatures::default()).unwrap();
    let mut device = Device::new(&arena, control.vring(), 0);
    let kick = control.vring().kick_fd().try_clone_to_owned().unwrap();
    let call = control.vring().call_fd().try_clone_to_owned().unwrap();
    let serve = move || {
        let mut seen = Vec::new();
        for answer in [&[0][..], &[1], &[0, 9, 0, 0, 0, 100, 0, 0, 0]] {
            let mut fds = [rustix::event::PollFd::new(&kick, rustix::event::PollFlags::IN)];
            rustix::event::poll(&mut fds, None).unwrap();
            rustix::io::read(&kick, &mut [0; 8]).unwrap();
            assert_eq!(device.queue.pop_batch(&mut device.batch, 8), 1);
            let (chain, readable, writable) = device.batch.take(0).unwrap();
            let mut bytes = vec![0; usize::try_from(total_len(&readable)).unwrap()];
            copy_from_slices(&readable, &mut bytes);
            let written = u32::try_from(copy_to_slices(&writable, answer)).unwrap();
            seen.push((bytes, total_len(&writable)));
            device.queue.push_used(chain, written);
            device.queue.publish();
            rustix::io::write(&call, &1u64.to_ne_bytes()).unwrap();
        }
        seen
    };
    let thread = std::thread::Builder::new().spawn(serve).unwrap();
    assert_eq!(control.set_queue_pairs(4).unwrap(), CtrlStatus::Ok);
    assert_eq!(control.add_vlan(4096).unwrap(), CtrlStatus::Err);
    let coalescing = control.coalescing_of(5).unwrap().unwrap();
    assert_eq!((coalescing.index, coalescing.coalescing.packets_max), (5, 9));
    let seen = thread.join().unwrap();
    assert_eq!(seen[0], (vec![class::MQ, class::MQ_VQ_PAIRS_SET, 4, 0], 1));
    assert_eq!(seen[1], (vec![class::VLAN, class::VLAN_ADD, 0, 16], 1));
    assert_eq!(seen[2], (vec![class::NOTF_COAL, class::NOTF_COAL_VQ_GET, 5, 0, 0, 0], 9));
    control.set_timeout(SHORT);
    assert!(matches!(control.set_mac([2, 0, 0, 0, 0, 1]), Err(DriverError::Timeout)));
}

/// The messages that a scripted back-end has received: request and payload.
type Heard = Vec<(u32, Vec<u8>)>;

/// A back-end that offers everything, grants everything, and has `pairs` queue pairs.
fn scripted(pairs: u16) -> (FrontEnd, JoinHandle<Heard>) {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let serve = move || {
        let mut heard = Vec::new();
        let mut bytes = [0; 12];
        while theirs.read_exact(&mut bytes).is_ok() {
            let header = Header::parse(&bytes).unwrap();
            let mut payload = vec![0; header.size as usize];
            theirs.read_exact(&mut payload).unwrap();
            let reply = match header.request {
                1 | 15 => u64::MAX.to_ne_bytes().to_vec(),
                24 => {
                    let max_virtqueue_pairs = pairs.into();
                    let config = NetConfig { max_virtqueue_pairs, ..NetConfig::default() };
                    [&payload[..12], config.as_bytes()].concat()
                }
                _ => vec![0; 8],
            };
            if matches!(header.request, 1 | 15 | 24) || header.flags & FLAG_NEED_REPLY != 0 {
                let size = u32::try_from(reply.len()).unwrap();
                let header = Header { flags: FLAG_VERSION | FLAG_REPLY, size, ..header };
                theirs.write_all(&[&header.emit()[..], &reply].concat()).unwrap();
            }
            heard.push((header.request, payload));
        }
        heard
    };
    let thread = std::thread::Builder::new().spawn(serve).unwrap();
    (FrontEnd::from_stream(ours).unwrap(), thread)
}

/// The rings that were enabled or disabled, in order.
fn enables(heard: &Heard) -> Vec<(u8, bool)> {
    heard.iter().filter(|(request, _)| *request == 18).map(|(_, p)| (p[0], p[4] != 0)).collect()
}

#[test]
fn a_call_that_is_on_its_way_when_the_time_is_over_is_not_lost() {
    let (mut rx, mut device) = rx_rig(VIRTIO_F_EVENT_IDX);
    rx.refill().unwrap();
    assert!(matches!(rx.vring().find_lost_call(), Err(DriverError::Timeout)));
    device.deliver(&with_buffers(1, b"frame"));
    device.queue.publish();
    let call = rx.vring().call_fd().try_clone_to_owned().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(SHORT);
            rustix::io::write(&call, &1u64.to_ne_bytes()).unwrap();
        });
        rx.vring().find_lost_call().unwrap();
    });
    rx.wait(SHORT).unwrap();
    assert!(matches!(rx.vring().find_lost_call(), Err(DriverError::LostCall)), "nobody calls");
}

#[test]
fn a_front_end_that_owns_the_control_queue_enables_the_pairs_in_use_ring_by_ring() {
    let (front, thread) = scripted(2);
    let options = NetDriverOptions { queue_pairs: 2, ..options(8) };
    let mut driver = NetDriver::start(front, &options).unwrap();
    assert_eq!((driver.queue_pairs_max(), driver.features & VIRTIO_NET_F_CTRL_VQ), (2, 0));
    assert!(matches!(driver.control(), Err(DriverError::NoControlQueue)));
    driver.set_queue_pairs(1).unwrap();
    driver.front.net_set_mtu(9000).unwrap();
    let mac: MacAddress = [2, 3, 4, 5, 6, 7];
    driver.front.send_rarp(mac).unwrap();
    drop(driver);
    let heard = thread.join().unwrap();
    let all_on = [(0, true), (1, true), (2, true), (3, true)];
    let one_on = [(0, true), (1, true), (2, false), (3, false)];
    assert_eq!(enables(&heard), [all_on, one_on].concat());
    assert!(heard.contains(&(20, 9000u64.to_ne_bytes().to_vec())));
    assert!(heard.contains(&(19, vec![2, 3, 4, 5, 6, 7, 0, 0])));
}

#[test]
fn the_control_queue_of_a_device_lies_behind_all_its_pairs() {
    let (front, thread) = scripted(4);
    let options = NetDriverOptions { queue_pairs: 2, control: ControlOwner::Device, ..options(8) };
    let mut driver = NetDriver::start(front, &options).unwrap();
    assert_eq!(driver.control().unwrap().vring().index(), 8);
    drop(driver);
    let heard = thread.join().unwrap();
    assert_eq!(enables(&heard), [0, 1, 2, 3, 8].map(|index| (index, true)));
}
