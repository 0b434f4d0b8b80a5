//! `Bench`: a queue of a disk, driven as a worker drives it, with a ring or without.

use super::server::{SIZE, Server};
use crate::{Address, NbdDisk, NbdOptions, Target};
use manyring_backend::blk::{Burst, Completion, Disk, DiskQueue, Op};
use manyring_backend::sys::uring::{Event, Ring};
use manyring_memory::{GuestAddr, GuestMemory, LastHit, Mapping, SliceList};
use manyring_wire::nbd::{Host, Uri};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::time::Timespec;
use std::sync::Arc;
use std::time::Duration;

/// Nothing that a test waits for takes longer.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Where the server listens.
pub(super) fn uri(server: &Server) -> Uri {
    let host = Host::Unix(server.path().to_str().unwrap().to_owned());
    Uri { host, export: String::new(), tls: false, certificates: None, hostname: None }
}

pub(super) fn options(server: &Server) -> NbdOptions {
    let uri = uri(server);
    NbdOptions {
        name: "test".to_owned(),
        server: Arc::new(Address::of(&uri)),
        target: Target::of(&uri),
        read_only: false,
        reconnect: None,
        request_timeout: Duration::from_secs(60),
    }
}

pub(super) struct Bench {
    pub(super) disk: Arc<NbdDisk>,
    ring: Option<Ring>,
    pub(super) queue: Box<dyn DiskQueue>,
    pub(super) memory: Arc<Mapping>,
    guest: Arc<GuestMemory>,
    pub(super) done: Vec<Completion>,
}

/// Calls `test` for a worker with a ring and for one without.
pub(super) fn both(test: impl Fn(bool)) {
    [true, false].into_iter().for_each(test);
}

impl Bench {
    pub(super) fn new(options: NbdOptions, has_ring: bool) -> Self {
        Self::on(&Arc::new(NbdDisk::open(options).unwrap()), has_ring)
    }

    /// One more queue of a disk.
    pub(super) fn on(disk: &Arc<NbdDisk>, has_ring: bool) -> Self {
        let mut ring = has_ring.then(|| Ring::new().unwrap());
        let mut queue = disk.open_queue(has_ring).unwrap();
        queue.attach(ring.as_mut(), 0);
        let memory = Arc::new(Mapping::anonymous(SIZE).unwrap());
        let guest = SliceList::of_mapping(&memory, &[]).unwrap().memory().clone();
        Self { disk: disk.clone(), ring, queue, memory, guest, done: Vec::new() }
    }

    pub(super) fn of(server: &Server, has_ring: bool) -> Self {
        Self::new(options(server), has_ring)
    }

    /// Starts requests, whose tokens are their places; the memory of each lies where it does on
    /// the disk, in slices of an odd length.
    pub(super) fn start(&mut self, requests: &[(Op, u64, u64)]) {
        self.start_from(0, requests);
    }

    /// Starts a request of `len` bytes at `offset` with this token.
    pub(super) fn start_as(&mut self, token: u32, op: Op, offset: u64, len: u64) {
        self.start_from(token, &[(op, offset, len)]);
    }

    fn start_from(&mut self, first: u32, requests: &[(Op, u64, u64)]) {
        let mut burst = Burst::default();
        burst.slices().restart(&self.guest);
        for ((op, offset, len), token) in requests.iter().zip(first..) {
            if matches!(op, Op::Read | Op::Write { .. }) {
                let cut = len / 3;
                let places = [(*offset, cut), (offset + cut, len - cut)];
                for (at, len) in places {
                    let (at, len) = (GuestAddr(at), u32::try_from(len).unwrap());
                    burst.slices().resolve(at, len, &mut LastHit::default()).unwrap();
                }
            }
            burst.push(token, *op, *offset, *len);
        }
        self.queue.submit(&burst, self.ring.as_mut(), &mut self.done);
    }

    /// Does what a worker does until `is_done`.
    pub(super) fn until(&mut self, mut is_done: impl FnMut(&mut Self) -> bool) {
        let deadline = super::super::clock::now() + TIMEOUT;
        while !is_done(self) {
            assert!(super::super::clock::now() < deadline, "it takes too long");
            self.turn(Duration::from_millis(5));
        }
    }

    /// Does what a worker does in one turn, and waits for `step` if there is nothing to do.
    pub(super) fn turn(&mut self, step: Duration) {
        let step = if self.queue.reap(&mut self.done) { Duration::ZERO } else { step };
        if let Some(ring) = &mut self.ring {
            let mut events: Vec<Event> = Vec::new();
            ring.wait(Some(step)).unwrap();
            ring.reap(&mut events);
            for event in events.drain(..) {
                let token = u32::try_from(event.user_data).unwrap();
                self.queue.on_event(token, event.result, Some(ring), &mut self.done);
            }
        } else {
            let fd = self.queue.readiness().unwrap();
            let step = Timespec::try_from(step).unwrap();
            poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&step)).unwrap();
        }
    }

    /// The results of requests, by token.
    pub(super) fn run(&mut self, requests: &[(Op, u64, u64)]) -> Vec<Result<(), Errno>> {
        self.start(requests);
        self.results(requests.len())
    }

    /// The results of the next `count` requests that end, ordered by token.
    pub(super) fn results(&mut self, count: usize) -> Vec<Result<(), Errno>> {
        self.until(|bench| bench.done.len() >= count);
        let mut done = std::mem::take(&mut self.done);
        done.sort_by_key(|done| done.token);
        assert!(done.iter().zip(0..).all(|(done, token)| done.token == token), "{done:?}");
        done.into_iter().map(|done| done.result).collect()
    }

    /// The bytes of memory that belong to a place of the disk.
    pub(super) fn bytes(&self, offset: u64, len: u64) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(len).unwrap()];
        let at = usize::try_from(offset).unwrap();
        assert_eq!(self.memory.slice(at, bytes.len()).unwrap().read_into(&mut bytes), bytes.len());
        bytes
    }

    /// Fills the memory of a place of the disk.
    pub(super) fn fill(&self, offset: u64, len: u64, byte: u8) {
        let (at, len) = (usize::try_from(offset).unwrap(), usize::try_from(len).unwrap());
        self.memory.slice(at, len).unwrap().write_from(&vec![byte; len]);
    }

    /// How often the queue's connection was lost.
    pub(super) fn losses(&self) -> u64 {
        self.disk.connections()[0].losses
    }
}

/// The bytes that the server has at first.
pub(super) fn at_first(offset: u64, len: u64) -> Vec<u8> {
    (offset..offset + len).map(|at| (at / 512 % 251) as u8).collect()
}
