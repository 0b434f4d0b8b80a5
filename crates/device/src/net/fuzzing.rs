//! Network queues without a worker, for the fuzz targets.

use super::commands::Commands;
use super::control_queue::{Clerk, ControlQueue, halves};
use super::rules::Filter;
use super::{NetDevice, NetOptions, NetRx, NetTx, Rules};
use crate::Device;
use manyring_backend::net::{Port, PortRx, PortTx};
use manyring_engine::Moderation;
use manyring_engine::stats::QueueStats;
use manyring_engine::{Pool, PoolOptions};
use manyring_memory::MemoryError;
use manyring_queue::DeviceQueue;
use manyring_wire::net::{Command, FRAME_SIZE_MAX, MacAddress, Offloads};
use std::sync::Arc;
use tokio::runtime::Runtime;

/// Rules for a guest that accepts the offloads `given`.
fn rules(given: Offloads, filter: Option<Filter>) -> Arc<Rules> {
    Arc::new(Rules {
        link_up: true,
        given,
        frame_size_max: FRAME_SIZE_MAX,
        room_size: FRAME_SIZE_MAX,
        filter,
        hash: None,
    })
}

/// A transmitq without a worker: the caller takes the turns.
#[derive(Debug)]
pub struct SoloTx {
    queue: DeviceQueue,
    tx: NetTx,
    stats: QueueStats,
}

impl SoloTx {
    /// Serves `queue` into `port`, which accepts the offloads `taken`.
    ///
    /// # Errors
    /// [`MemoryError`]: no memory for the burst.
    pub fn new(
        queue: DeviceQueue,
        port: Box<dyn PortTx>,
        taken: Offloads,
    ) -> Result<Self, MemoryError> {
        let tx = NetTx::new(port, rules(taken, None), taken)?;
        Ok(Self { queue, tx, stats: QueueStats::default() })
    }

    /// Sets the driver's header size in bytes.
    #[must_use]
    pub fn with_headers(mut self, size: usize) -> Self {
        self.tx.set_headers(size);
        self
    }

    /// Pops a batch and sends it, or sends the rest of the last one. Returns the numbers of chains
    /// popped and returned.
    pub fn turn(&mut self, is_enabled: bool, now_ns: u64) -> (usize, usize) {
        self.tx.on_port();
        let time = (now_ns, || now_ns);
        let turn = self.tx.turn(&mut self.queue, &self.stats, is_enabled, time);
        self.queue.publish();
        self.queue.needs_notification();
        (turn.packets, turn.used)
    }

    /// Returns every chain to the driver.
    pub fn let_go(&mut self) {
        self.tx.let_go(&mut self.queue, &self.stats);
        self.queue.publish();
    }

    /// Returns the device side of the ring.
    #[must_use]
    pub fn queue(&self) -> &DeviceQueue {
        &self.queue
    }
}

impl Drop for SoloTx {
    fn drop(&mut self) {
        self.let_go();
    }
}

/// A receiveq without a worker: the caller takes the turns.
#[derive(Debug)]
pub struct SoloRx {
    queue: DeviceQueue,
    rx: NetRx,
    stats: QueueStats,
}

impl SoloRx {
    /// Serves `queue` with the frames of `port`.
    ///
    /// # Errors
    /// [`MemoryError`]: no memory for the spill.
    pub fn new(
        queue: DeviceQueue,
        port: Box<dyn PortRx>,
        given: Offloads,
        is_mergeable: bool,
    ) -> Result<Self, MemoryError> {
        let rx = NetRx::new(port, rules(given, None), is_mergeable, queue.size())?;
        Ok(Self { queue, rx, stats: QueueStats::default() })
    }

    /// Sets the driver's header size in bytes.
    #[must_use]
    pub fn with_headers(mut self, size: usize) -> Self {
        self.rx.set_headers(size);
        self
    }

    /// Takes a turn. Returns the number of buffers returned to the driver.
    pub fn turn(&mut self) -> usize {
        let turn = self.rx.turn(&mut self.queue, &self.stats);
        self.queue.publish();
        self.queue.needs_notification();
        turn.used
    }

    /// Puts every buffer back into the ring.
    pub fn let_go(&mut self) {
        self.rx.let_go(&mut self.queue, &self.stats);
        self.queue.publish();
    }

    /// Returns the device side of the ring.
    #[must_use]
    pub fn queue(&self) -> &DeviceQueue {
        &self.queue
    }
}

impl Drop for SoloRx {
    fn drop(&mut self) {
        self.let_go();
    }
}

/// A control queue without a worker: the caller serves its commands.
pub struct SoloControl {
    ring: DeviceQueue,
    queue: ControlQueue,
    clerk: Clerk,
    stats: QueueStats,
    device: NetDevice,
}

impl SoloControl {
    /// Serves `ring` as the control queue of a device on `port`, with these features negotiated.
    ///
    /// # Panics
    /// If no eventfd can be made.
    pub fn new(runtime: &Runtime, ring: DeviceQueue, port: Arc<dyn Port>, features: u64) -> Self {
        let queue_pairs = port.queue_pairs();
        let options = NetOptions {
            name: "solo".to_owned(),
            queue_pairs,
            mac: [2, 0, 0, 0, 0, 1],
            hash_report: true,
            ..NetOptions::default()
        };
        // No thread runs: the pool starts one only with a queue.
        let device = NetDevice::new(options, port, Pool::new(PoolOptions::default()));
        runtime.block_on(async {
            device.set_features(features).await;
            device.0.begin_control(false);
        });
        let commands = Commands::new(device.0.clone());
        let memory = ring.memory().clone();
        let Ok((queue, clerk)) = halves(&device.0, commands, memory) else {
            panic!("the system gives no eventfd");
        };
        Self { ring, queue, clerk, stats: QueueStats::default(), device }
    }

    /// Serves commands until the ring has none.
    pub fn serve(&mut self, runtime: &Runtime) {
        loop {
            let is_answered = self.queue.answer(&mut self.ring, &self.stats);
            if !self.queue.take(&mut self.ring) && !is_answered {
                return;
            }
            self.ring.publish();
            self.ring.needs_notification();
            runtime.block_on(self.clerk.serve_next());
        }
    }

    /// Returns the number of pairs that the driver's hash may choose.
    #[must_use]
    pub fn hashed_pairs(&self) -> usize {
        self.device.0.state().port.rss.as_ref().map_or(1, |rss| rss.config().pairs())
    }

    /// Returns the device, with the settings that the commands have made.
    #[must_use]
    pub fn device(&self) -> &NetDevice {
        &self.device
    }

    /// Returns the device side of the ring.
    #[must_use]
    pub fn queue(&self) -> &DeviceQueue {
        &self.ring
    }
}

/// True if the filter that `commands` produce passes a frame that starts with `bytes`.
#[must_use]
pub fn passes(mac: MacAddress, filters_vlans: bool, commands: Vec<Command>, bytes: &[u8]) -> bool {
    let mut filter = Filter::new(mac, filters_vlans);
    for command in commands {
        match command {
            Command::Rx(mode, on) => filter.set_mode(mode, on),
            Command::MacTable(table) => filter.set_table(table),
            Command::MacAddr(mac) => filter.set_mac(mac),
            Command::VlanAdd(id) => filter.set_vlan(id, true),
            Command::VlanDel(id) => filter.set_vlan(id, false),
            _ => {}
        }
    }
    let passes = filter.passes(bytes);
    assert!(passes || !filter.passes_all());
    passes
}
