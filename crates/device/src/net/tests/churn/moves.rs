//! Queues that move while they are disabled or hold frames: nothing is lost.

use super::*;

/// A running queue that two workers can have.
struct Moving {
    runtime: tokio::runtime::Runtime,
    device: NetDevice,
    ring: Ring,
    queue: Started,
}

impl Moving {
    /// Queue `index` of a device of one pair.
    fn new(index: usize, port: impl Port + 'static, uring: bool) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let pool = Pool::new(PoolOptions { workers_max: 2, polling: Polling::NEVER, uring });
        let device = NetDevice::new(options(1), Arc::new(port), pool);
        let ring = Ring::new(32, true);
        let [kick, call] = [(); 2].map(|()| eventfd(0, EventfdFlags::NONBLOCK).unwrap());
        let (config, memory) = (ring.config, ring.memory.clone());
        let events = mpsc::channel(4).0;
        let mut queue = Started { index, config, memory, kick, call, events, handle: None };
        runtime.block_on(queue.start(&device));
        Self { runtime, device, ring, queue }
    }
}

#[test]
fn a_queue_that_is_disabled_moves_and_is_kicked_elsewhere_without_a_look_at_its_ring() {
    for uring in [true, false] {
        let port = Scripted::default();
        port.script().attached = vec![false];
        let Moving { runtime, device, mut ring, mut queue } = Moving::new(1, port, uring);
        let pause = || std::thread::sleep(Duration::from_millis(50));
        ring.write(DATA, &[&[0; HEADER_SIZE][..], &frame(0, LEN)].concat());
        ring.driver.add(&[(DATA, len32(HEADER_SIZE + LEN))], &[]).unwrap();
        ring.driver.publish();
        rustix::io::write(&queue.kick, &1u64.to_ne_bytes()).unwrap();
        pause();
        assert!(ring.driver.take_used().is_some());
        let handle = queue.handle.as_ref().unwrap();
        runtime.block_on(device.set_enabled(1, handle, false));
        // The memory is the driver's again.
        ring.write(ring.config.addresses.available, &[0xa5; 64]);
        assert!(runtime.block_on(handle.move_to(1)));
        pause();
        runtime.block_on(handle.set_kick(Some(queue.kick())));
        pause();
        let stats = device.stats(1).unwrap();
        assert_eq!((stats.moves.value(), stats.faults.value()), (1, 0), "uring {uring}");
        runtime.block_on(queue.stop(&device));
    }
}

#[test]
fn a_transmitq_with_frames_that_its_port_has_not_taken_moves_when_it_has() {
    for uring in [true, false] {
        let (ours, theirs) = UnixDatagram::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        theirs.set_nonblocking(true).unwrap();
        // The port is full.
        let filled = (0..).take_while(|_| ours.send(&[0]).is_ok()).count();
        let port = Wire(Arc::new(ours));
        let Moving { runtime, device, mut ring, mut queue } = Moving::new(1, port, uring);
        let bytes = [&[0; HEADER_SIZE][..], &frame(0, LEN)].concat();
        ring.write(DATA, &bytes);
        ring.driver.add(&[(DATA, len32(HEADER_SIZE + LEN))], &[]).unwrap();
        ring.driver.publish();
        rustix::io::write(&queue.kick, &1u64.to_ne_bytes()).unwrap();
        let stats = device.stats(1).unwrap();
        while stats.blocked.value() == 0 {
            std::thread::yield_now();
        }
        let handle = queue.handle.as_ref().unwrap();
        assert!(!runtime.block_on(handle.move_to(1)), "the port is full all the time");
        assert_eq!(stats.dropped_port_full.value(), 0, "uring {uring}");
        let mut received = vec![0; 4096];
        let moved = runtime.block_on(async {
            let take = async {
                for _ in 0..filled {
                    tokio::task::yield_now().await;
                    assert_eq!(theirs.recv(&mut received).unwrap(), 1);
                }
            };
            tokio::join!(handle.move_to(1), take).0
        });
        assert!(moved && handle.worker() == Some(1));
        theirs.set_nonblocking(false).unwrap();
        let len = theirs.recv(&mut received).unwrap();
        assert_eq!(received[..len], bytes, "uring {uring}");
        assert_eq!(stats.dropped_port_full.value(), 0);
        runtime.block_on(queue.stop(&device));
    }
}

#[test]
fn a_receiveq_with_a_frame_that_waits_for_buffers_moves_when_it_has_them() {
    const SMALL: usize = 64;
    for uring in [true, false] {
        let (ours, theirs) = UnixDatagram::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let port = Wire(Arc::new(ours));
        let Moving { runtime, device, mut ring, mut queue } = Moving::new(0, port, uring);
        let offer = |ring: &mut Ring, at: u64, len: usize| {
            ring.driver.add(&[], &[(at, len32(len))]).unwrap();
            ring.driver.publish();
            rustix::io::write(&queue.kick, &1u64.to_ne_bytes()).unwrap();
        };
        let stats = device.stats(0).unwrap();
        let await_out = |count| {
            while stats.out_of_buffers.value() < count {
                std::thread::yield_now();
            }
        };
        // The queue counts `out_of_buffers` for the empty ring too. It has done so before the
        // buffer is offered: the second count can then only be that of the frame.
        rustix::io::write(&queue.kick, &1u64.to_ne_bytes()).unwrap();
        await_out(1);
        offer(&mut ring, DATA, SMALL);
        let bytes = [&[0; HEADER_SIZE][..], &frame(0, LEN)].concat();
        theirs.send(&bytes).unwrap();
        await_out(2);
        let handle = queue.handle.as_ref().unwrap();
        assert!(!runtime.block_on(handle.move_to(1)), "no buffer comes");
        assert_eq!(stats.dropped_small_buffers.value(), 0, "uring {uring}");
        let moved = runtime.block_on(async {
            let give = async {
                tokio::task::yield_now().await;
                offer(&mut ring, DATA + SMALL as u64, LEN);
            };
            tokio::join!(handle.move_to(1), give).0
        });
        assert!(moved && handle.worker() == Some(1));
        let used = [ring.driver.take_used(), ring.driver.take_used()].map(Option::unwrap);
        let rest = len32(bytes.len() - SMALL);
        assert_eq!(used.map(|(_, written)| written), [len32(SMALL), rest], "uring {uring}");
        assert_eq!(ring.read(DATA, bytes.len())[HEADER_SIZE..], bytes[HEADER_SIZE..]);
        assert_eq!(stats.dropped_small_buffers.value(), 0);
        runtime.block_on(queue.stop(&device));
    }
}
