//! `Counts`: the counters of a device that a device process serves, as the supervisor reads and
//! shows them.
//!
//! The counters lie in a sealed memfd of fixed size. The device process writes the file when the
//! supervisor asks for it; the supervisor reads the file with `read`, and maps nothing. Any number
//! is a valid counter, so the file needs no check.
//!
//! ```text
//! counters of each queue, of each connection of the queues, of the port; histograms of each queue
//! ```
//! A page of the memfd that was never written takes no memory. So the counters, which are always
//! written, lie together, and a histogram is written only once it has a value.

use crate::assemble::nbd_host::Remote;
use manyring_backend::blk::Connection;
use manyring_backend::net::Port;
use manyring_backend::net::switch::PortCounters;
use manyring_device::{DeviceStats, HostSide};
use manyring_engine::QueueStats;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{MemfdFlags, SealFlags, SeekFrom};
use rustix::io::Errno;
use std::sync::{Arc, Mutex, PoisonError};

/// The counters of one device.
#[derive(Debug)]
pub struct Counts {
    shown: Arc<DeviceStats>,
    remote: Option<Arc<Remote>>,
    /// The device's port, if it belongs to a switch: the port's counters are then shown.
    port: Option<Arc<dyn Port>>,
    file: Mutex<OwnedFd>,
    /// The sums of the counters of former device processes, by queue.
    before: Mutex<Vec<Vec<u64>>>,
    /// The sums of the port's counters of former device processes.
    of_port_before: Mutex<Vec<u64>>,
}

impl Counts {
    /// Makes the counters of a device that no device process serves yet.
    pub fn new(shown: Arc<DeviceStats>, remote: Option<Arc<Remote>>) -> Result<Self, Errno> {
        let before = vec![Vec::new(); shown.count()];
        let file = Mutex::new(blank(before.len())?);
        let of_port_before = Mutex::default();
        let (before, port) = (Mutex::new(before), None);
        Ok(Self { shown, remote, port, file, before, of_port_before })
    }

    /// Sets the device's port, whose counters are shown if the port belongs to a switch.
    pub fn of_port(self, port: Option<Arc<dyn Port>>) -> Self {
        Self { port, ..self }
    }

    fn port(&self) -> Option<&PortCounters> {
        self.port.as_ref()?.counted()
    }

    /// Makes an empty file in place of the former one; returns its descriptor for the next process.
    pub fn begin(&self) -> Result<OwnedFd, Errno> {
        let queues = self.before.lock().unwrap_or_else(PoisonError::into_inner).len();
        let file = blank(queues)?;
        let given = rustix::io::fcntl_dupfd_cloexec(&file, 3)?;
        *self.file.lock().unwrap_or_else(PoisonError::into_inner) = file;
        Ok(given)
    }

    /// Reads and shows the counters that the device process has written.
    pub fn read(&self) {
        let file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let before = self.before.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(remote) = &self.remote {
            let all = (0..before.len()).map_while(|at| connection(&file, before.len(), at));
            remote.show(all.collect());
        }
        if let Some(port) = self.port() {
            let of_before = self.of_port_before.lock().unwrap_or_else(PoisonError::into_inner);
            let of_before = of_before.iter().copied().chain(std::iter::repeat(0));
            let now = port_numbers(&file, before.len(), port.all().len());
            let sums = now.into_iter().zip(of_before).map(|(now, before)| now.wrapping_add(before));
            port.show(&sums.collect::<Vec<_>>());
        }
        let queues = before.len();
        for (index, (before, stats)) in before.iter().zip(&*self.shown.all()).enumerate() {
            if let Some(now) = queue_numbers(&file, queues, index) {
                stats.show(before, &now);
            }
        }
    }

    /// Ends the counters of a device process that has ended: adds them to the sums of the former
    /// processes.
    pub fn end(&self) {
        self.read();
        // The process's connections to the NBD server have ended with it.
        self.remote.iter().for_each(|remote| remote.show(Vec::new()));
        if let Some(port) = self.port() {
            let now = port.all().into_iter().map(|counter| counter.value).collect();
            *self.of_port_before.lock().unwrap_or_else(PoisonError::into_inner) = now;
        }
        let mut before = self.before.lock().unwrap_or_else(PoisonError::into_inner);
        for (before, stats) in before.iter_mut().zip(&*self.shown.all()) {
            *before = stats.numbers();
            before.shrink_to_fit();
            stats.show(before, &[]);
        }
    }
}

/// Size of the counters of one queue, in bytes.
const OF_QUEUE: usize = QueueStats::COUNTERS * size_of::<u64>();
/// Size of the histograms of one queue, in bytes.
const OF_HISTOGRAMS: usize = (QueueStats::NUMBERS_MAX - QueueStats::COUNTERS) * size_of::<u64>();

/// Offsets in the file: of a queue's counters, and of its histograms.
fn queue_places(queues: usize, index: usize) -> [u64; 2] {
    let behind = place(queues, queues).saturating_add((OF_PORT_MAX * size_of::<u64>()) as u64);
    let [counters, histograms] = [index * OF_QUEUE, index * OF_HISTOGRAMS].map(|at| at as u64);
    [counters, behind.saturating_add(histograms)]
}

/// Returns the number of queues for which the file has room. A front-end may start more queues than
/// the device offers; those are not shown.
fn room(file: impl AsFd) -> usize {
    let size = rustix::fs::seek(file, SeekFrom::End(0)).unwrap_or(0);
    let [_, of_none] = queue_places(0, 0);
    let [_, of_one] = queue_places(1, 1);
    usize::try_from(size.saturating_sub(of_none) / (of_one - of_none)).unwrap_or(0)
}

/// Reads the counters and histograms of a queue; `None` if the file cannot be read.
fn queue_numbers(file: &OwnedFd, queues: usize, index: usize) -> Option<Vec<u64>> {
    let mut bytes = vec![0; OF_QUEUE + OF_HISTOGRAMS];
    let (counters, histograms) = bytes.split_at_mut(OF_QUEUE);
    for (part, at) in [counters, histograms].into_iter().zip(queue_places(queues, index)) {
        if rustix::io::pread(file, &mut *part, at) != Ok(part.len()) {
            return None;
        }
    }
    Some(bytes.as_chunks().0.iter().map(|word| u64::from_ne_bytes(*word)).collect())
}

/// The count of numbers for a connection: 1 (the slot is in use), flags, and four counters.
const OF_CONNECTION: usize = 6;
/// Bits of the flags: the connection is up; several queues share it.
const IS_UP: u64 = 1;
const IS_SHARED: u64 = 2;

/// Offset of a connection's numbers, which lie behind the counters of all queues.
fn place(queues: usize, index: usize) -> u64 {
    let at = queues * OF_QUEUE + index * OF_CONNECTION * size_of::<u64>();
    u64::try_from(at).unwrap_or(u64::MAX)
}

/// Reads the connection of this index; `None`: there are no more.
fn connection(file: &OwnedFd, queues: usize, index: usize) -> Option<Connection> {
    let mut bytes = [0; OF_CONNECTION * size_of::<u64>()];
    let count = rustix::io::pread(file, &mut bytes, place(queues, index)).ok()?;
    let numbers: Vec<_> = bytes.as_chunks().0.iter().map(|n| u64::from_ne_bytes(*n)).collect();
    let [1, is, losses, in_flight, bytes_sent, bytes_received] = numbers[..] else { return None };
    let (is_up, is_shared) = (is & IS_UP != 0, is & IS_SHARED != 0);
    let connection = Connection { is_up, is_shared, losses, in_flight, bytes_sent, bytes_received };
    (count == bytes.len()).then_some(connection)
}

/// Counters of a switch's port for which the file has room, behind all connections.
const OF_PORT_MAX: usize = 32;

/// Reads the counters of the switch's port; empty if the file cannot be read.
fn port_numbers(file: &OwnedFd, queues: usize, count: usize) -> Vec<u64> {
    let mut bytes = vec![0; count.min(OF_PORT_MAX) * size_of::<u64>()];
    match rustix::io::pread(file, &mut bytes, place(queues, queues)) {
        Ok(read) if read == bytes.len() => {
            bytes.as_chunks().0.iter().map(|n| u64::from_ne_bytes(*n)).collect()
        }
        _ => Vec::new(),
    }
}

fn blank(queues: usize) -> Result<OwnedFd, Errno> {
    let [_, end] = queue_places(queues, queues);
    sealed("counters", usize::try_from(end).unwrap_or(usize::MAX))
}

/// Makes a memfd of `bytes` bytes, sealed so that nobody can change its length.
pub fn sealed(name: &str, bytes: usize) -> Result<OwnedFd, Errno> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create(name, flags)?;
    rustix::fs::ftruncate(&file, u64::try_from(bytes).unwrap_or(u64::MAX))?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}

/// Writes the counters of a device into the file that the supervisor reads.
pub(super) fn write(file: impl AsFd, side: &HostSide) {
    let connections = side.as_blk().map(|blk| blk.host.disk().connections()).unwrap_or_default();
    let (all, queues) = (side.stats.all(), room(&file));
    if let Some(port) = side.as_net().and_then(|net| net.port().counted()) {
        let numbers = port.all().into_iter().take(OF_PORT_MAX);
        let bytes: Vec<_> = numbers.flat_map(|counter| counter.value.to_ne_bytes()).collect();
        let _ = rustix::io::pwrite(&file, &bytes, place(queues, queues));
    }
    for (index, connection) in connections.into_iter().take(queues).enumerate() {
        let Connection { is_up, is_shared, losses, in_flight, bytes_sent, bytes_received } =
            connection;
        let is = (u64::from(is_up) * IS_UP) | (u64::from(is_shared) * IS_SHARED);
        let numbers = [1, is, losses, in_flight, bytes_sent, bytes_received];
        let bytes: Vec<_> = numbers.iter().flat_map(|n| n.to_ne_bytes()).collect();
        let _ = rustix::io::pwrite(&file, &bytes, place(queues, index));
    }
    for (index, stats) in all.iter().take(queues).enumerate() {
        let bytes: Vec<_> = stats.numbers().iter().flat_map(|n| n.to_ne_bytes()).collect();
        let (counters, histograms) = bytes.split_at(OF_QUEUE);
        for (part, at) in [counters, histograms].into_iter().zip(queue_places(queues, index)) {
            // A histogram without a value is not written, so that its pages take no memory.
            let _ = rustix::io::pwrite(&file, part, at);
        }
    }
}
