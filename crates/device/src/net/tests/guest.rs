//! A guest with a whole device: its data queues run, and the control queue if it has one.

use super::*;
use crate::Device;
use crate::net::NetDevice;
use manyring_engine::Activation;
use manyring_engine::QueueHandle;
use manyring_engine::policy::polling::Polling;
use manyring_engine::{Call, Kick};
use manyring_engine::{Event, EventKind};
use manyring_engine::{Pool, PoolOptions};
use manyring_wire::net::*;
use manyring_wire::virtio::VIRTIO_F_VERSION_1;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;
use std::time::Duration;
use tokio::runtime::Runtime;
use tokio::sync::mpsc;
use tokio::time::Instant;

pub(super) const OK: u8 = 0;
pub(super) const ERR: u8 = 1;
const NOT_WRITTEN: u8 = 0xee;
pub(super) const ANSWER: u64 = DATA + 0x4_0000;
pub(super) const TIMEOUT: Duration = Duration::from_secs(20);
/// Everything but what depends on the port or the options.
pub(super) const EVERYTHING: u64 =
    VIRTIO_F_VERSION_1 | CTRL_BITS | HASH_BITS | VIRTIO_NET_F_MRG_RXBUF | GUEST_OFFLOAD_BITS;
/// Several pairs, and the hash by which frames are spread over them.
const HASH_BITS: u64 = VIRTIO_NET_F_MQ | VIRTIO_NET_F_RSS | VIRTIO_NET_F_HASH_REPORT;
pub(super) const PAIRS: usize = 2;
/// Data queues of the device, and the control queue's index.
pub(super) const COUNT: usize = PAIRS * 2;

/// A pool of at most `workers_max` workers, which sleep when they have nothing to do.
pub(super) fn pool(workers_max: usize) -> Arc<Pool> {
    Pool::new(PoolOptions { workers_max, polling: Polling::NEVER, uring: false })
}

pub(super) struct Guest {
    pub(super) runtime: Runtime,
    pub(super) device: NetDevice,
    pub(super) port: Scripted,
    pub(super) features: u64,
    pub(super) ring: Ring,
    pub(super) kick: OwnedFd,
    pub(super) data: Vec<(Ring, QueueHandle)>,
    /// Where the device calls, for each data queue.
    pub(super) calls: Vec<OwnedFd>,
    pub(super) control: Option<QueueHandle>,
    pub(super) events: mpsc::Receiver<Event>,
    pub(super) sender: mpsc::Sender<Event>,
}

impl Guest {
    /// A guest whose data queues run, with a control queue if it is among `features`.
    pub(super) fn new(features: u64) -> Self {
        Self::in_pool(features, pool(1))
    }

    /// As [`Self::new`], in a pool that other guests may use as well.
    pub(super) fn in_pool(features: u64, pool: Arc<Pool>) -> Self {
        let port = Scripted::default();
        port.script().attached = vec![false; PAIRS];
        port.script().host.1 = true;
        let (sender, events) = mpsc::channel(16);
        let mut guest = Self {
            runtime: tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap(),
            device: NetDevice::new(options(PAIRS), Arc::new(port.clone()), pool),
            port,
            features,
            ring: Ring::new(64, true),
            kick: eventfd(0, EventfdFlags::NONBLOCK).unwrap(),
            data: Vec::new(),
            calls: Vec::new(),
            control: None,
            events,
            sender,
        };
        guest.runtime.block_on(guest.device.set_features(features));
        guest.start_data();
        if features & VIRTIO_NET_F_CTRL_VQ != 0 {
            guest.start_control();
        }
        guest
    }

    pub(super) fn start_data(&mut self) {
        // The control queue lies behind those that the driver may use.
        for index in 0..self.control_index() {
            let ring = Ring::new(64, true);
            let call = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
            let handle = self.start(&ring, index, None, call.try_clone().unwrap());
            self.data.push((ring, handle));
            self.calls.push(call);
        }
    }

    pub(super) fn stop_data(&mut self) {
        for (index, (_ring, handle)) in self.data.drain(..).enumerate() {
            let _ = self.runtime.block_on(self.device.stop(index, handle));
        }
        self.calls.clear();
    }

    pub(super) fn start(
        &self,
        ring: &Ring,
        index: usize,
        kick: Option<Kick>,
        call: OwnedFd,
    ) -> QueueHandle {
        let activation = Activation {
            index,
            queue: ring.device_half(),
            addresses: ring.config.addresses,
            kick,
            call: Some(Arc::new(Call::new(call).unwrap())),
            err: None,
            enabled: true,
            features: self.features,
            events: self.sender.clone(),
        };
        self.runtime.block_on(self.device.start(activation)).unwrap()
    }

    fn control_index(&self) -> usize {
        controlq(self.features, PAIRS)
    }

    pub(super) fn start_control(&mut self) {
        self.ring = Ring::new(64, true);
        let kick = Kick::new(self.kick.try_clone().unwrap()).unwrap();
        let call = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        self.control = Some(self.start(&self.ring, self.control_index(), Some(kick), call));
    }

    pub(super) fn stop_control(&mut self) -> u16 {
        let handle = self.control.take().unwrap();
        let stopped = self.runtime.block_on(self.device.stop(self.control_index(), handle));
        stopped.unwrap().split().unwrap()
    }

    pub(super) fn offer(&mut self, bytes: &[u8], room: usize) {
        self.ring.write(DATA, bytes);
        self.ring.write(ANSWER, &[NOT_WRITTEN; 64]);
        let readable = [(DATA, len32(bytes.len()))];
        let readable = if bytes.is_empty() { &[][..] } else { &readable };
        let writable = [(ANSWER, len32(room))];
        let writable = if room == 0 { &[][..] } else { &writable };
        self.ring.driver.add(readable, writable).unwrap();
        self.ring.driver.publish();
        rustix::io::write(&self.kick, &1u64.to_ne_bytes()).unwrap();
    }

    /// The bytes the device writes to a command with room for `room` of them.
    pub(super) fn command_with(&mut self, bytes: &[u8], room: usize) -> Vec<u8> {
        self.offer(bytes, room);
        let driver = &mut self.ring.driver;
        let written = self.runtime.block_on(async {
            let start = Instant::now();
            while start.elapsed() < TIMEOUT {
                if let Some((_, written)) = driver.take_used() {
                    return written as usize;
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            panic!("no answer");
        });
        let answer = self.ring.read(ANSWER, 64);
        assert!(written <= room && answer[written..].iter().all(|b| *b == NOT_WRITTEN));
        answer[..written].to_vec()
    }

    pub(super) fn command(&mut self, class: u8, command: u8, data: &[u8]) -> u8 {
        let answer = self.command_with(&[&[class, command], data].concat(), 1);
        assert_eq!(answer.len(), 1);
        answer[0]
    }

    pub(super) fn coalescing_of(&mut self, index: u16) -> Result<(u32, u32), u8> {
        let [low, high] = index.to_le_bytes();
        let get = [class::NOTF_COAL, class::NOTF_COAL_VQ_GET, low, high, 0, 0];
        // There is more room than the answer needs: none of it is written.
        let answer = self.command_with(&get, 21);
        if answer.len() == 1 {
            return Err(answer[0]);
        }
        assert_eq!((answer[0], answer.len()), (OK, 9), "status, packets, microseconds");
        let number = |at: usize| u32::from_le_bytes(*answer[at..].first_chunk().unwrap());
        Ok((number(1), number(5)))
    }

    pub(super) fn attached(&self) -> Vec<bool> {
        self.port.script().attached.clone()
    }

    pub(super) fn next_event(&mut self) -> EventKind {
        let events = &mut self.events;
        let event = async { tokio::time::timeout(TIMEOUT, events.recv()).await };
        self.runtime.block_on(event).expect("an event").unwrap().kind
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.port.script().is_held = false;
        self.port.script().holds_worker = false;
        // Workers end before the rings do.
        self.stop_data();
    }
}
