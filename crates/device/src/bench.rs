//! A running queue without a worker, whose instructions the benchmark `turn` counts.
//!
//! The benchmark makes the same calls in the same order as the worker does (`worker/mod.rs`). The
//! queue, its handler and its disk or port are those of the daemon.

use crate::StartError;
use crate::blk::blkif::{Attachment, XenBlkDevice, XenBlkOptions};
use crate::blk::{BlkDevice, BlkOptions};
use crate::net::{NetRx, NetTx, Rules};
use manyring_backend::blk::Disk;
use manyring_backend::net::Port;
use manyring_engine::Activation;
use manyring_engine::AnyFormat;
use manyring_engine::Moderation;
use manyring_engine::QueueIo;
use manyring_engine::policy::polling::Decision;
use manyring_engine::solo::{EventSource, Wait, Woken};
use manyring_engine::solo::{Happened, Run};
use manyring_engine::stats::{QueueClass, QueueStats};
use manyring_engine::{Pool, PoolOptions};
use manyring_memory::MemoryError;
use manyring_wire::net::{FRAME_SIZE_MAX, Offloads};
use rustix::io::Errno;
use std::sync::Arc;

/// Slot and generation that the queue would have in a worker.
const SLOT: (u32, u32) = (0, 0);
/// Time between two turns.
const TURN_NS: u64 = 1000;
/// The start of the simulated time, later than any value of this machine's clock. A block queue
/// reads the real clock when requests complete, so every request seems to take 0 ns, in every run.
const EPOCH_NS: u64 = 1 << 62;
/// Longest frame that the guest of a receiveq expects: an MTU of 1500, Ethernet header and VLAN
/// tag.
const ROOM_SIZE: usize = 1500 + 18;

/// A running queue that no worker owns. Its time is simulated.
#[derive(Debug)]
pub struct SoloRunning {
    queue: Box<dyn Run>,
    wait: Wait,
    woken: Vec<Woken>,
    now_ns: u64,
}

impl SoloRunning {
    /// Makes a queue of a block device on `disk`, which must complete requests in `submit`.
    ///
    /// # Errors
    /// The disk cannot open a queue, or epoll fails.
    pub fn blk(activation: Activation, disk: Arc<dyn Disk>) -> Result<Self, StartError> {
        let (size, memory) = (activation.queue.size(), activation.queue.memory().clone());
        let options = BlkOptions {
            name: "solo".to_owned(),
            queue_size: size,
            serial: "solo-serial".to_owned(),
            moderation: Moderation::Off,
            ..BlkOptions::default()
        };
        let disk_queue = disk.open_queue(false)?;
        // No thread runs: the pool starts one only with a queue.
        let device = BlkDevice::new(options, disk, Pool::new(PoolOptions::default()));
        let handler = device.solo(disk_queue, memory);
        Self::new(activation, handler, QueueClass::Blk)
    }

    /// Makes a queue of a Xen disk, with the default grants, rings and limits.
    ///
    /// # Errors
    /// The ring cannot be mapped, the disk cannot open a queue, or epoll fails.
    pub fn xen_blk(attachment: Attachment, disk: Arc<dyn Disk>) -> Result<Self, StartError> {
        let options = XenBlkOptions::new("solo", 1);
        let device = XenBlkDevice::new(options, disk, Pool::new(PoolOptions::default()));
        Self::of(device.solo(attachment)?)
    }

    /// Makes a transmitq that sends into pair 0 of `port`, for a guest that uses every offload.
    ///
    /// # Errors
    /// The port cannot open the transmit half, epoll fails, or no memory can be allocated.
    pub fn tx(activation: Activation, port: &dyn Port) -> Result<Self, StartError> {
        let half = port.open_tx(0)?;
        let tx = NetTx::new(half, rules(), port.taken()).map_err(no_memory)?;
        Self::new(activation, tx, QueueClass::Net)
    }

    /// Makes a receiveq of pair 0 of `port`, for a guest with mergeable buffers and without
    /// offloads.
    ///
    /// # Errors
    /// The port cannot open the receive half, epoll fails, or no memory can be allocated.
    pub fn rx(activation: Activation, port: &dyn Port) -> Result<Self, StartError> {
        let half = port.open_rx(0)?;
        let rx = NetRx::new(half, rules(), true, activation.queue.size()).map_err(no_memory)?;
        Self::new(activation, rx, QueueClass::Net)
    }

    fn new<H>(activation: Activation, handler: H, class: QueueClass) -> Result<Self, StartError>
    where
        H: AnyFormat,
    {
        let stats = Arc::new(QueueStats::new(class));
        Self::of(activation.running(handler, stats, Moderation::Off))
    }

    fn of(mut queue: Box<dyn Run>) -> Result<Self, StartError> {
        let (mut wait, now_ns) = (Wait::new(false)?, EPOCH_NS);
        queue.attach(&mut QueueIo::new(&mut wait, SLOT.0, SLOT.1, now_ns));
        Ok(Self { queue, wait, woken: Vec::new(), now_ns })
    }

    /// Takes one turn of a hot queue. Returns true if there was work.
    #[inline]
    pub fn turn(&mut self) -> bool {
        self.now_ns += TURN_NS;
        self.queue.turn(&mut QueueIo::new(&mut self.wait, SLOT.0, SLOT.1, self.now_ns)).worked
    }

    /// Sleeps until the driver kicks, or another event comes.
    pub fn sleep(&mut self) {
        self.wait.sleep(&mut self.woken, None);
    }

    /// Serves one kick: handles its event, takes turns until one finds nothing, and asks the driver
    /// for the next kick. Returns false if the ring has new work, so that the queue asks for no
    /// kick.
    ///
    /// The queue settles at once. A worker would check the ring for some time first, but each
    /// further check would only be a turn that finds nothing.
    #[inline]
    pub fn serve_kick(&mut self) -> bool {
        for event in self.woken.drain(..) {
            if let EventSource::Kick { watch, .. } = event.source {
                let mut io = QueueIo::new(&mut self.wait, SLOT.0, SLOT.1, self.now_ns);
                self.queue.on_event(Happened::Kick(watch), event, &mut io);
            }
        }
        while self.turn() {}
        let never = Decision::Sleep;
        let looks_on = self.queue.looks_at_ring(never, self.now_ns);
        let mut io = QueueIo::new(&mut self.wait, SLOT.0, SLOT.1, self.now_ns);
        self.queue.settle(never, looks_on, &mut io)
    }
}

/// Returns the rules of the network queues: the link is up, and every frame passes.
fn rules() -> Arc<Rules> {
    Arc::new(Rules {
        link_up: true,
        given: Offloads::default(),
        frame_size_max: FRAME_SIZE_MAX,
        room_size: ROOM_SIZE,
        filter: None,
        hash: None,
    })
}

fn no_memory(_: MemoryError) -> StartError {
    StartError::Backend(Errno::NOMEM)
}
