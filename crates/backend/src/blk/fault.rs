//! `fault`: a decorator for tests that makes another disk fail, hang, or claim features that it
//! lacks.

use super::{Burst, Completion, Connection, Disk, DiskQueue, Geometry, Image, Op, Request};
use crate::blk::ImageError;
use crate::sys::uring::Ring;
use manyring_memory::Pieces;
use rustix::fd::{BorrowedFd, OwnedFd};
use rustix::io::Errno;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The faults that a fault disk adds to another disk. The default adds none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultPlan {
    /// Every n-th read fails with `EIO`; 0: none.
    pub read_error_every: u64,
    /// Every n-th write fails with `EIO`; 0: none.
    pub write_error_every: u64,
    /// Every flush fails with `EIO`.
    pub flush_errors: bool,
    /// Every n-th request is held until [`FaultSwitch::release`]; 0: none.
    pub hold_every: u64,
    /// Every write and write-zeroes fails with `ENOSPC` until [`FaultSwitch::release`].
    pub full: bool,
    /// Claims to support secure erase, and writes zeroes instead.
    pub secure_erase: bool,
}

/// Releases the requests that a fault disk holds, from any thread.
#[derive(Clone, Debug, Default)]
pub struct FaultSwitch(Arc<AtomicBool>);

impl FaultSwitch {
    /// Ends `hold_every` and `full`: from now on no request is held, and no write fails for lack of
    /// space. The requests that are held fail with `EIO` in the next turn.
    pub fn release(&self) {
        self.0.store(true, Ordering::Release);
    }

    fn is_released(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// A disk that passes requests to another disk, except those that its plan holds or makes fail.
#[derive(Debug)]
pub struct FaultDisk {
    inner: Arc<dyn Disk>,
    plan: FaultPlan,
    switch: FaultSwitch,
    count: Arc<AtomicU64>,
}

impl FaultDisk {
    /// Decorates `inner`.
    #[must_use]
    pub fn new(inner: Arc<dyn Disk>, plan: FaultPlan) -> Self {
        Self { inner, plan, switch: FaultSwitch::default(), count: Arc::default() }
    }

    /// Returns the switch that releases the held requests.
    #[must_use]
    pub fn switch(&self) -> FaultSwitch {
        self.switch.clone()
    }
}

impl Disk for FaultDisk {
    fn geometry(&self) -> Geometry {
        let geometry = self.inner.geometry();
        let secure_erase_max =
            if self.plan.secure_erase { geometry.size } else { geometry.secure_erase_max };
        Geometry { secure_erase_max, ..geometry }
    }

    fn open_queue(&self, has_ring: bool) -> Result<Box<dyn DiskQueue>, Errno> {
        Ok(Box::new(FaultQueue {
            inner: self.inner.open_queue(has_ring)?,
            plan: self.plan,
            switch: self.switch.clone(),
            count: self.count.clone(),
            held: Vec::new(),
            pass: Burst::default(),
        }))
    }

    fn queues_max(&self) -> usize {
        self.inner.queues_max()
    }

    fn connections(&self) -> Vec<Connection> {
        self.inner.connections()
    }

    fn resize(&self, size: Option<u64>) -> Result<Geometry, Errno> {
        self.inner.resize(size)?;
        Ok(self.geometry())
    }

    fn measure(&self) -> Result<u64, Errno> {
        self.inner.measure()
    }

    fn hand_memory(&self) -> Result<Option<OwnedFd>, Errno> {
        self.inner.hand_memory()
    }

    fn acquire(&self) -> Result<(), ImageError> {
        self.inner.acquire()
    }

    fn release(&self) {
        self.inner.release();
    }

    fn kind(&self) -> &'static str {
        "fault"
    }

    fn image(&self) -> Option<&Image> {
        self.inner.image()
    }
}

#[derive(Debug)]
struct FaultQueue {
    inner: Box<dyn DiskQueue>,
    plan: FaultPlan,
    switch: FaultSwitch,
    count: Arc<AtomicU64>,
    /// The tokens of held requests. When they are released they fail with `EIO`, because their
    /// slices were not kept.
    held: Vec<u32>,
    /// The requests of a burst that pass to the inner disk.
    pass: Burst,
}

impl FaultQueue {
    /// Returns how the n-th request fails or is held; `None`: it passes to the inner disk.
    fn verdict(&self, request: &Request, n: u64) -> Option<Verdict> {
        let is_nth = |every: u64| every != 0 && n.is_multiple_of(every);
        let takes_room = matches!(request.op, Op::Write { .. } | Op::WriteZeroes { .. });
        if self.plan.full && takes_room && !self.switch.is_released() {
            return Some(Verdict::Fail(Errno::NOSPC));
        }
        let fails = match request.op {
            Op::Read => is_nth(self.plan.read_error_every),
            Op::Write { .. } => is_nth(self.plan.write_error_every),
            Op::Flush => self.plan.flush_errors,
            _ => false,
        };
        if is_nth(self.plan.hold_every) && !self.switch.is_released() {
            return Some(Verdict::Hold);
        }
        fails.then_some(Verdict::Fail(Errno::IO))
    }

    fn pass_on(&mut self, request: &Request, pieces: Pieces<'_>) {
        let op = match request.op {
            Op::SecureErase if self.plan.secure_erase => {
                Op::WriteZeroes { unmap: true, durable: true }
            }
            op => op,
        };
        self.pass.slices().extend(pieces);
        self.pass.push(request.token, op, request.offset, request.len);
    }
}

enum Verdict {
    Fail(Errno),
    Hold,
}

impl DiskQueue for FaultQueue {
    fn attach(&mut self, ring: Option<&mut Ring>, tag: u64) {
        self.inner.attach(ring, tag);
    }

    fn detach(&mut self, ring: Option<&mut Ring>) {
        self.inner.detach(ring);
    }

    fn burst_max(&self) -> usize {
        self.inner.burst_max()
    }

    fn submit(&mut self, burst: &Burst, ring: Option<&mut Ring>, done: &mut Vec<Completion>) {
        for (request, pieces) in burst.iter() {
            let n = self.count.fetch_add(1, Ordering::Relaxed) + 1;
            match self.verdict(request, n) {
                Some(Verdict::Fail(errno)) => {
                    done.push(Completion { token: request.token, result: Err(errno) });
                }
                Some(Verdict::Hold) => self.held.push(request.token),
                None => self.pass_on(request, pieces),
            }
        }
        self.inner.submit(&self.pass, ring, done);
        self.pass.clear();
    }

    fn on_event(
        &mut self,
        token: u32,
        result: i32,
        ring: Option<&mut Ring>,
        done: &mut Vec<Completion>,
    ) {
        self.inner.on_event(token, result, ring, done);
    }

    fn recall(&mut self, token: u32, ring: Option<&mut Ring>) -> bool {
        !self.held.contains(&token) && self.inner.recall(token, ring)
    }

    fn release_memory(&mut self) {
        self.pass.release();
        self.inner.release_memory();
    }

    fn readiness(&self) -> Option<BorrowedFd<'_>> {
        self.inner.readiness()
    }

    fn reap(&mut self, done: &mut Vec<Completion>) -> bool {
        if self.switch.is_released() {
            let failed = |token| Completion { token, result: Err(Errno::IO) };
            done.extend(self.held.drain(..).map(failed));
        }
        self.inner.reap(done)
    }
}
