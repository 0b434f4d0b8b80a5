//! Rings that other threads drive, whatever the device: a front-end stops and starts them, or
//! their device half is started here, without a daemon.

use manyring_driver::{Arena, FrontEnd, Virtqueue};
use manyring_engine::{Activation, Call, Kick};
use manyring_queue::{DeviceQueue, QueueConfig, RingFeatures};
use manyring_wire::vhost_user::{Region, VringAddr};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::mpsc;

/// Lets the threads of a test end, also where it fails.
pub(crate) struct StopAtEnd<'a>(pub(crate) &'a AtomicBool);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A region that no request uses.
pub(crate) fn spare_region(number: u64) -> (Region, OwnedFd) {
    let file = rustix::fs::memfd_create("spare", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let size = 1 << 20;
    rustix::fs::ftruncate(&file, size).unwrap();
    let guest_addr = (1 << 40) + number * (4 << 20);
    (Region { guest_addr, size, user_addr: guest_addr + (1 << 44), mmap_offset: 0 }, file)
}

/// Replaces the memory table: each second time there is a region more in it.
pub(crate) fn replace_table(front: &mut FrontEnd, arena: &Arena, round: usize) {
    let (region, file) = spare_region(0);
    let mut table = arena.table();
    if round.is_multiple_of(2) {
        table.push((region, file.as_fd()));
    }
    front.set_mem_table(&table).unwrap();
}

fn dup(fd: BorrowedFd<'_>) -> OwnedFd {
    fd.try_clone_to_owned().unwrap()
}

/// The addresses and descriptors for the start of a ring that another thread drives.
pub(crate) struct Restart {
    addr: VringAddr,
    size: u32,
    kick: OwnedFd,
    call: OwnedFd,
}

impl Restart {
    pub(crate) fn of(vring: &Virtqueue) -> Self {
        let at = vring.addresses();
        let addr = VringAddr {
            index: vring.index(),
            flags: 0,
            descriptor: at.descriptor,
            used: at.used,
            available: at.available,
            log: 0,
        };
        let (kick, call) = (dup(vring.kick_fd()), dup(vring.call_fd()));
        Self { addr, size: vring.size().into(), kick, call }
    }

    /// Has the ring be kicked by another eventfd from its next start on.
    pub(crate) fn kick_by(&mut self, kick: &OwnedFd) {
        self.kick = dup(kick.as_fd());
    }

    /// Stops the ring and starts it from where it stopped.
    pub(crate) fn run(&self, front: &mut FrontEnd) {
        let index = self.addr.index;
        let base = front.vring_base(index).unwrap();
        front.set_vring_num(index, self.size).unwrap();
        front.set_vring_base(index, base).unwrap();
        front.set_vring_addr(&self.addr).unwrap();
        front.set_vring_call(index, Some(self.call.as_fd())).unwrap();
        front.set_vring_kick(index, Some(self.kick.as_fd())).unwrap();
        front.set_vring_enable(index, true).unwrap();
    }
}

/// The device half of a queue whose driver half we have.
pub(crate) fn activation(arena: &Arena, vring: &Virtqueue, features: u64) -> Activation {
    let (addresses, base) = (vring.addresses(), vring.base().into());
    let ring = RingFeatures::from_bits(features);
    let config = QueueConfig { size: vring.size(), addresses, base, features: ring };
    Activation {
        index: usize::try_from(vring.index()).unwrap(),
        queue: DeviceQueue::new(config, arena.memory().clone()).unwrap(),
        addresses,
        kick: Some(Kick::new(dup(vring.kick_fd())).unwrap()),
        call: Some(Arc::new(Call::new(dup(vring.call_fd())).unwrap())),
        err: None,
        enabled: true,
        features,
        events: mpsc::channel(16).0,
    }
}
