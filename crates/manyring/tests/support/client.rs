//! A foreign vhost-user-blk client (libblkio), for tests that need real requests.

use blkio::{Blkio, Blkioq, MemoryRegion, ReqFlags};
use std::mem::MaybeUninit;
use std::path::Path;
use std::time::Duration;

/// A connected client with its queues.
pub(crate) struct Client {
    pub(crate) queues: Vec<Blkioq>,
    memory: MemoryRegion,
    _blkio: Blkio,
}

impl Client {
    /// Connects and starts `count` queues.
    pub(crate) fn connect(socket: &Path, count: i32) -> Self {
        let mut blkio = Blkio::new("virtio-blk-vhost-user").unwrap();
        blkio.set_str("path", socket.to_str().unwrap()).unwrap();
        blkio.connect().unwrap();
        // libblkio knows no longest descriptor unless it has negotiated SIZE_MAX.
        assert_eq!(blkio.get_i32("max-segment-len").unwrap(), 2 << 20, "SIZE_MAX");
        blkio.set_i32("num-queues", count).unwrap();
        let queues = blkio.start().unwrap().queues;
        let memory = blkio.alloc_mem_region(1 << 20).unwrap();
        blkio.map_mem_region(&memory).unwrap();
        Self { queues, memory, _blkio: blkio }
    }

    /// Submits reads of 4 KiB from the start of the disk on one queue, and kicks.
    pub(crate) fn submit_reads(&mut self, queue: usize, count: usize) {
        let buffer = std::ptr::without_provenance_mut::<u8>(self.memory.addr);
        for _ in 0..count {
            self.queues[queue].read(0, buffer, 4096, 0, ReqFlags::empty());
        }
        self.wait_for(queue, 0, Duration::ZERO);
    }

    /// Waits until `count` requests are done, at most for `at_most`; returns how many are.
    pub(crate) fn wait_for(&mut self, queue: usize, count: usize, at_most: Duration) -> usize {
        let mut slots: Vec<_> = (0..count.max(1)).map(|_| MaybeUninit::uninit()).collect();
        let mut timeout = at_most;
        let timeout = (count > 0).then_some(&mut timeout);
        self.queues[queue].do_io(&mut slots[..count], count, timeout, None).unwrap_or(0)
    }
}
