//! Frames go round while everything that can be done to a running queue is done to it: no wake-up
//! may be lost on either side, and no frame change or overtake another.

#[path = "churn/busy.rs"]
mod busy;

#[path = "churn/moves.rs"]
mod moves;

#[path = "churn/switched.rs"]
mod switched;

pub(super) use busy::Endless;

use super::*;
use crate::Device;
use crate::net::NetDevice;
use busy::Busy;
use manyring_backend::net::late::{LateOptions, LatePort};
use manyring_engine::Activation;
use manyring_engine::Order;
use manyring_engine::QueueHandle;
use manyring_engine::policy::moderation::Limits;
use manyring_engine::policy::polling::Polling;
use manyring_engine::{Call, Kick};
use manyring_engine::{Pool, PoolOptions};
use manyring_wire::net::{MacAddress, VIRTIO_NET_F_MRG_RXBUF};
use manyring_wire::virtio::VIRTIO_F_VERSION_1;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fd::{AsFd, OwnedFd};
use std::collections::HashMap;
use std::os::unix::net::UnixDatagram;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::Duration;
use tokio::sync::mpsc;

/// Longer than any step takes, unless a thread waits for a wake-up that never comes.
const STALL: Timespec = Timespec { tv_sec: 6, tv_nsec: 0 };
const STALL_MS: usize = 3000;
/// Buffers of each ring that are used.
const DEPTH: u64 = 16;
const LEN: usize = 200;
const DISTURBANCES: usize = 200;

/// A port whose frames go into a socket of few frames, and come from it.
#[derive(Clone, Debug)]
pub(super) struct Wire(pub(super) Arc<UnixDatagram>);

impl PortTx for Wire {
    fn send(&mut self, frames: &Frames, first: usize) -> Sent {
        let mut sent = Sent::default();
        for index in first..frames.count() {
            let mut bytes = vec![0; HEADER_SIZE + frames.len(index)];
            copy_from_slices(frames.slices(index), &mut bytes);
            if self.0.send(&bytes).is_err() {
                sent.stop = Some(Stop::Blocked);
                break;
            }
            sent.taken += 1;
        }
        sent
    }

    fn readiness(&self) -> Readiness<'_> {
        Readiness::Fd(self.0.as_fd())
    }
}

impl PortRx for Wire {
    fn recv(&mut self, buffers: &[GuestSlice]) -> Result<usize, Errno> {
        let mut bytes = vec![0; 4096];
        let len = self.0.recv(&mut bytes).map_err(|_| Errno::AGAIN)?;
        Ok(copy_to_slices(buffers, &bytes[..len]))
    }

    fn readiness(&self) -> Readiness<'_> {
        Readiness::Fd(self.0.as_fd())
    }
}

impl Port for Wire {
    fn kind(&self) -> &'static str {
        "wire"
    }

    fn queue_pairs(&self) -> usize {
        1
    }

    fn taken(&self) -> Offloads {
        ALL
    }

    fn given(&self) -> Offloads {
        ALL
    }

    fn mtu(&self) -> Option<u16> {
        None
    }

    fn open_tx(&self, _: usize) -> Result<Box<dyn PortTx>, Errno> {
        // As a tap's: the other half's wait is apart.
        let own = self.0.try_clone().map_err(|_| Errno::MFILE)?;
        Ok(Box::new(Self(Arc::new(own))))
    }

    fn open_rx(&self, _: usize) -> Result<Box<dyn PortRx>, Errno> {
        Ok(Box::new(self.clone()))
    }

    fn set_offloads(&self, _: Offloads) -> Result<(), Errno> {
        Ok(())
    }

    fn set_attached(&self, _: usize, _: bool) -> Result<(), Errno> {
        Ok(())
    }

    fn set_mtu(&self, _: u16) -> Result<(), Errno> {
        Ok(())
    }

    fn set_link(&self, _: bool) {}

    fn transmit(&self, _: &[u8]) -> Result<(), Errno> {
        Ok(())
    }
}

/// One side of the guest: a ring, its doorbells, and how far it has come.
struct Side {
    ring: Ring,
    kick: OwnedFd,
    call: OwnedFd,
    frames: Arc<AtomicU64>,
    ends: Arc<AtomicBool>,
    is_rx: bool,
    /// The frames must arrive in the order in which they were sent.
    in_order: bool,
    /// Where the frames go.
    to: MacAddress,
}

impl Side {
    fn add(&mut self, slot: u64, number: u64) -> u16 {
        let at = DATA + slot * 0x1000;
        if self.is_rx {
            return self.ring.driver.add(&[], &[(at, 1024)]).unwrap();
        }
        self.ring.write(at, &[&[0; HEADER_SIZE][..], &self.frame(number)].concat());
        self.ring.driver.add(&[(at, len32(HEADER_SIZE + LEN))], &[]).unwrap()
    }

    fn frame(&self, number: u64) -> Vec<u8> {
        let mut frame = frame(number, LEN);
        frame[..6].copy_from_slice(&self.to);
        frame
    }

    fn publish(&mut self) {
        if self.ring.driver.publish() {
            rustix::io::write(&self.kick, &1u64.to_ne_bytes()).unwrap();
        }
    }

    /// Sends, or receives, until the end; sleeps like a driver whose only alarm is the call.
    fn run(mut self) {
        let (mut next, mut seen, mut slots) = (0u64, None, HashMap::new());
        let mut random = 1u64;
        for slot in 0..DEPTH {
            slots.insert(self.add(slot, next), slot);
            next += 1;
        }
        self.publish();
        while !self.ends.load(SeqCst) {
            self.ring.driver.disable_notifications();
            while let Some((id, written)) = self.ring.driver.take_used() {
                let slot = slots.remove(&id).unwrap();
                if self.is_rx {
                    assert_eq!(written as usize, HEADER_SIZE + LEN);
                    let bytes = self.ring.read(DATA + slot * 0x1000 + HEADER_SIZE as u64, LEN);
                    let number = u64::from_le_bytes(*bytes[14..].first_chunk().unwrap());
                    let whole = self.frame(number / 0x9e37_79b9);
                    assert!(bytes == whole, "frame {number} has changed");
                    let overtakes = self.in_order && seen.is_some_and(|seen| seen >= number);
                    assert!(!overtakes, "{seen:?}, then {number}");
                    seen = Some(number);
                }
                self.frames.fetch_add(1, SeqCst);
                slots.insert(self.add(slot, next), slot);
                next += 1;
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                if random >> 61 == 0 {
                    self.publish();
                }
                if random >> 58 == 1 {
                    // Pause, so that the worker of this queue falls asleep.
                    std::thread::sleep(Duration::from_micros(random >> 20 & 0xff));
                }
            }
            self.publish();
            if !self.ring.driver.enable_notifications() {
                self.sleep();
            }
        }
    }

    fn sleep(&mut self) {
        let mut fds = [PollFd::new(&self.call, PollFlags::IN)];
        let count = poll(&mut fds, Some(&STALL)).unwrap();
        if count == 0 && !self.ends.load(SeqCst) {
            let used = self.ring.driver.take_used().is_some();
            panic!("rx {}: no call; there is something used: {used}", self.is_rx);
        }
        let _ = rustix::io::read(&self.call, &mut [0; 8]);
    }
}

/// Sends every frame back until it `ends`, and takes what comes until it is over.
fn echo(host: &UnixDatagram, ends: &AtomicBool, is_over: &AtomicBool) {
    let mut bytes = vec![0; 4096];
    while !is_over.load(SeqCst) {
        if let Ok(len) = host.recv(&mut bytes) {
            while !ends.load(SeqCst) && host.send(&bytes[..len]).is_err() {
                std::thread::yield_now();
            }
        }
    }
}

/// A queue as the session knows it.
struct Started {
    index: usize,
    config: QueueConfig,
    memory: Arc<GuestMemory>,
    kick: OwnedFd,
    call: OwnedFd,
    events: mpsc::Sender<manyring_engine::Event>,
    handle: Option<QueueHandle>,
}

impl Started {
    async fn start(&mut self, device: &NetDevice) {
        let activation = Activation {
            index: self.index,
            queue: DeviceQueue::new(self.config, self.memory.clone()).unwrap(),
            addresses: self.config.addresses,
            kick: Some(self.kick()),
            call: Some(Arc::new(Call::new(self.call.try_clone().unwrap()).unwrap())),
            err: None,
            enabled: true,
            features: VIRTIO_F_VERSION_1 | VIRTIO_NET_F_MRG_RXBUF,
            events: self.events.clone(),
        };
        self.handle = Some(device.start(activation).await.unwrap());
    }

    async fn stop(&mut self, device: &NetDevice) {
        let handle = self.handle.take().unwrap();
        self.config.base = device.stop(self.index, handle).await.unwrap();
    }

    fn kick(&self) -> Kick {
        Kick::new(self.kick.try_clone().unwrap()).unwrap()
    }

    /// Does one of the things that can be done to a queue that runs.
    async fn disturb(&mut self, device: &NetDevice, what: u64) {
        let (index, more) = (self.index, what / 8);
        let number = |below: u64| u32::try_from(more % below).unwrap();
        let Some(handle) = &self.handle else { return };
        match what % 8 {
            0 | 1 => drop(handle.move_to(usize::from(more % 2 == 1)).await),
            2 => {
                device.set_enabled(index, handle, false).await;
                tokio::time::sleep(Duration::from_micros(number(500).into())).await;
                device.set_enabled(index, handle, true).await;
            }
            3 => {
                let memory = Arc::new((*self.memory).clone());
                assert_eq!(handle.set_memory(memory, self.config.addresses).await, Ok(()));
            }
            4 => handle.set_kick(Some(self.kick())).await,
            5 => {
                let (packets_max, delay_us_max) = (number(40), number(300));
                let limits = Some(Limits { count_max: packets_max, delay_us_max });
                let route = handle.route();
                route.ask(|reply| Order::Moderate(limits, reply)).await;
            }
            6 => {
                device.set_link(false).await;
                device.set_link(true).await;
            }
            _ => {
                self.stop(device).await;
                self.start(device).await;
            }
        }
    }
}

/// Waits until both sides have passed further frames, without any other event that wakes them.
fn goes_on(frames: &[Arc<AtomicU64>]) {
    let before: Vec<_> = frames.iter().map(|count| count.load(SeqCst)).collect();
    for _ in 0..STALL_MS {
        let on = |(count, before): (&Arc<AtomicU64>, &u64)| count.load(SeqCst) > *before + 1;
        if frames.iter().zip(&before).all(on) {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    let after: Vec<_> = frames.iter().map(|count| count.load(SeqCst)).collect();
    panic!("received, sent: {before:?}, and three seconds later {after:?}");
}

/// Queues whose drivers run, and how many frames each has had.
#[derive(Default)]
struct Round {
    queues: Vec<Started>,
    threads: Vec<std::thread::JoinHandle<()>>,
    frames: Vec<Arc<AtomicU64>>,
    ends: Arc<AtomicBool>,
}

impl Round {
    /// Starts queue `index` of a device, and a driver whose frames go to an address.
    fn add(
        &mut self,
        runtime: &tokio::runtime::Runtime,
        device: &NetDevice,
        (index, event_idx, in_order, to): (usize, bool, bool, MacAddress),
    ) {
        let ring = Ring::new(32, event_idx);
        let [kick, call] = [(); 2].map(|()| eventfd(0, EventfdFlags::NONBLOCK).unwrap());
        let (config, memory) = (ring.config, ring.memory.clone());
        let (kick_too, call_too) = (kick.try_clone().unwrap(), call.try_clone().unwrap());
        let events = mpsc::channel(4).0;
        let mut queue = Started { index, config, memory, kick, call, events, handle: None };
        runtime.block_on(queue.start(device));
        self.queues.push(queue);
        let frames = Arc::new(AtomicU64::new(0));
        self.frames.push(frames.clone());
        let (kick, call, is_rx) = (kick_too, call_too, index == 0);
        let side = Side { ring, kick, call, frames, ends: self.ends.clone(), is_rx, in_order, to };
        self.threads.push(std::thread::Builder::new().spawn(move || side.run()).unwrap());
    }

    /// Stops the queues, each of its own device, and their drivers.
    fn end(&mut self, runtime: &tokio::runtime::Runtime, devices: &[&NetDevice]) {
        self.ends.store(true, SeqCst);
        for (queue, device) in self.queues.iter_mut().zip(devices) {
            runtime.block_on(queue.stop(device));
            // Nobody else wakes it any more.
            rustix::io::write(&queue.call, &1u64.to_ne_bytes()).unwrap();
        }
        let counts: Vec<_> = self.frames.iter().map(|count| count.load(SeqCst)).collect();
        println!("received, sent: {counts:?}");
        self.threads.drain(..).for_each(|thread| thread.join().unwrap());
        assert!(counts.iter().all(|count| *count > 0), "{counts:?}");
    }
}

/// `late`: the port finishes frames later, and tells by a timer or must be asked.
fn churn(uring: bool, event_idx: bool, neighbour: bool, late: Option<bool>, seed: u64) {
    println!("uring {uring}, EVENT_IDX {event_idx}, neighbour {neighbour}, seed {seed}, {late:?}");
    let (ours, host) = UnixDatagram::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    host.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    host.set_write_timeout(Some(Duration::from_millis(50))).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    // Beside a neighbour there is no way out to another worker.
    let workers_max = if neighbour { 1 } else { 2 };
    let pool = Pool::new(PoolOptions { workers_max, polling: Polling::up_to_us(1), uring });
    let busy = neighbour.then(|| runtime.block_on(Busy::start(&pool, 1)));
    let mut port: Arc<dyn Port> = Arc::new(Wire(Arc::new(ours)));
    if let Some(tells) = late {
        port = Arc::new(LatePort::new(port, LateOptions { seed, calls_max: 4, tells }));
    }
    let device = NetDevice::new(options(1), port, pool);
    runtime.block_on(device.set_features(VIRTIO_F_VERSION_1 | VIRTIO_NET_F_MRG_RXBUF));
    let mut round = Round::default();
    for index in 0..2 {
        round.add(&runtime, &device, (index, event_idx, late.is_none(), [0xff; 6]));
    }
    let is_over = Arc::new(AtomicBool::new(false));
    let until = (round.ends.clone(), is_over.clone());
    let host = std::thread::Builder::new().spawn(move || echo(&host, &until.0, &until.1)).unwrap();
    let mut random = seed;
    for _ in 0..DISTURBANCES {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695);
        let index = usize::try_from(random >> 63).unwrap();
        runtime.block_on(round.queues[index].disturb(&device, random >> 20 & 0xfff_ffff));
        goes_on(&round.frames);
    }
    round.end(&runtime, &[&device, &device]);
    // A port that finishes frames later needs room for them until its queue has stopped.
    is_over.store(true, SeqCst);
    host.join().unwrap();
    if let Some(busy) = busy {
        runtime.block_on(busy.stop());
    }
}

#[test]
fn a_guest_without_receive_buffers_lets_its_worker_sleep_whatever_its_port_has() {
    for uring in [true, false] {
        let (ours, theirs) = UnixDatagram::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let pool = Pool::new(PoolOptions { workers_max: 1, polling: Polling::NEVER, uring });
        let device = NetDevice::new(options(1), Arc::new(Wire(Arc::new(ours))), pool.clone());
        let ring = Ring::new(32, true);
        let [kick, call] = [(); 2].map(|()| eventfd(0, EventfdFlags::NONBLOCK).unwrap());
        let (config, memory) = (ring.config, ring.memory.clone());
        let events = mpsc::channel(4).0;
        let mut queue = Started { index: 0, config, memory, kick, call, events, handle: None };
        theirs.send(&[&[0; HEADER_SIZE][..], &frame(0, LEN)].concat()).unwrap();
        runtime.block_on(queue.start(&device));
        let sleeps = || pool.worker_stats()[0].sleeps.value();
        std::thread::sleep(Duration::from_millis(100));
        let before = sleeps();
        std::thread::sleep(Duration::from_millis(100));
        let woken = sleeps() - before;
        assert!(woken < 5, "uring {uring}: woken {woken} times for a frame that has no buffer");
        runtime.block_on(queue.stop(&device));
    }
}

#[test]
fn no_wake_up_is_lost_whatever_is_done_to_a_running_queue() {
    let seed = std::env::var("MANYRING_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(1);
    for uring in [true, false] {
        for event_idx in [true, false] {
            churn(uring, event_idx, false, None, seed);
        }
    }
}

#[test]
fn no_wake_up_is_lost_beside_a_neighbour_that_always_has_work() {
    for uring in [true, false] {
        churn(uring, true, true, None, 7);
    }
}

#[test]
fn no_wake_up_and_no_byte_is_lost_on_a_port_that_finishes_frames_later() {
    for (uring, tells) in [(true, true), (true, false), (false, true), (false, false)] {
        churn(uring, uring == tells, false, Some(tells), 11);
    }
}
