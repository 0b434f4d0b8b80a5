//! `uring`: the same image through the worker's io_uring.
//!
//! ```text
//! submit: read through the page cache -> try preadv2(RWF_NOWAIT) here: a hit costs no round trip
//!         else -> an entry of the ring, submitted once per burst
//! event:  all bytes -> done;  a part -> the rest again;  EAGAIN, EINTR -> again
//! ```
//! What was measured: a cache hit served inline is as cheap as a batched entry and has no latency;
//! a file system that cannot say "would wait" (tmpfs) has every entry punted to a kernel thread,
//! at 2-3 times the cost, so such a file is served inline like `file`.

use super::file::{FileQueue, INLINE_BURST, serve_without_data};
use super::{Burst, Completion, Disk, DiskQueue, Geometry, Image, Op, Request};
use crate::sys::file as sys;
use crate::sys::uring::{FileOp, Ring, RingFile};
use manyring_memory::{GuestSlice, advance};
use rustix::io::Errno;
use std::sync::Arc;

/// `FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE`
const PUNCH_HOLE: i32 = 1 | 2;

/// The disk.
#[derive(Debug)]
pub struct UringDisk {
    image: Arc<Image>,
}

impl UringDisk {
    /// Serves `image`.
    #[must_use]
    pub fn new(image: Image) -> Self {
        Self { image: Arc::new(image) }
    }
}

impl Disk for UringDisk {
    fn geometry(&self) -> Geometry {
        self.image.geometry()
    }

    fn open_queue(&self, has_ring: bool) -> Result<Box<dyn DiskQueue>, Errno> {
        let punts = !self.image.is_direct() && !self.image.has_nowait();
        if !has_ring || punts {
            return Ok(Box::new(FileQueue::new(self.image.clone())));
        }
        Ok(Box::new(UringQueue {
            image: self.image.clone(),
            tag: 0,
            file: RingFile::Plain(-1),
            buffered: RingFile::Plain(-1),
            in_flight: Vec::new(),
        }))
    }

    fn resize(&self, size: Option<u64>) -> Result<Geometry, Errno> {
        self.image.resize(size)
    }

    fn kind(&self) -> &'static str {
        "uring"
    }
}

/// A request the kernel has: what is left of it.
#[derive(Debug)]
struct InFlight {
    op: Op,
    offset: u64,
    len: u64,
    aligned: bool,
    rest: Vec<GuestSlice>,
}

#[derive(Debug)]
struct UringQueue {
    image: Arc<Image>,
    tag: u64,
    file: RingFile,
    buffered: RingFile,
    /// By token; the slices' memory is reused.
    in_flight: Vec<InFlight>,
}

impl UringQueue {
    /// Remembers a request under its token.
    fn remember(&mut self, request: &Request, slices: &[GuestSlice]) {
        let at = request.token as usize;
        while self.in_flight.len() <= at {
            let (op, rest) = (Op::Flush, Vec::new());
            self.in_flight.push(InFlight { op, offset: 0, len: 0, aligned: true, rest });
        }
        let entry = &mut self.in_flight[at];
        entry.op = request.op;
        entry.offset = request.offset;
        entry.len = request.len;
        entry.aligned = self.image.is_aligned(request.offset, slices);
        entry.rest.clear();
        entry.rest.extend_from_slice(slices);
    }

    /// Gives what is left of a request to the ring.
    fn start(&self, token: u32, ring: &mut Ring) {
        let entry = &self.in_flight[token as usize];
        let file = if entry.aligned { self.file } else { self.buffered };
        let user_data = self.tag | u64::from(token);
        match entry.op {
            Op::Read => ring.transfer(FileOp::Read, file, &entry.rest, entry.offset, user_data),
            Op::Write { durable } => {
                let op = FileOp::Write { dsync: durable };
                ring.transfer(op, file, &entry.rest, entry.offset, user_data);
            }
            Op::Flush => ring.flush(self.file, user_data),
            _ => ring.fallocate(self.file, PUNCH_HOLE, entry.offset, entry.len, user_data),
        }
    }

    /// Tries a read of the page cache here. `None`: it would wait, the ring takes the rest.
    fn read_cached(&mut self, token: u32) -> Option<Result<(), Errno>> {
        let entry = &mut self.in_flight[token as usize];
        loop {
            match sys::read(self.image.file(), &entry.rest, entry.offset, sys::RWF_NOWAIT) {
                Ok(0) => return Some(Err(Errno::IO)),
                Ok(n) => {
                    advance(&mut entry.rest, n);
                    entry.offset += n as u64;
                    if entry.rest.is_empty() {
                        return Some(Ok(()));
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return None,
                Err(errno) => return Some(Err(errno)),
            }
        }
    }

    /// Serves what the ring is not needed for.
    fn serve_inline(&mut self, request: &Request) -> Option<Result<(), Errno>> {
        match request.op {
            Op::Read if !self.image.is_direct() => self.read_cached(request.token),
            Op::WriteZeroes { .. } | Op::SecureErase => {
                let (offset, len) = (request.offset, request.len);
                Some(serve_without_data(&self.image, request.op, offset, len))
            }
            _ => None,
        }
    }
}

impl DiskQueue for UringQueue {
    fn burst_max(&self) -> usize {
        if self.image.is_direct() { usize::MAX } else { INLINE_BURST }
    }

    fn attach(&mut self, ring: Option<&mut Ring>, tag: u64) {
        self.tag = tag;
        if let Some(ring) = ring {
            self.file = ring.register_file(self.image.file());
            self.buffered = if self.image.is_direct() {
                ring.register_file(self.image.buffered())
            } else {
                self.file
            };
        }
    }

    fn detach(&mut self, ring: Option<&mut Ring>) {
        if let Some(ring) = ring {
            ring.unregister_file(self.file);
            if self.image.is_direct() {
                ring.unregister_file(self.buffered);
            }
        }
    }

    fn submit(&mut self, burst: &Burst, ring: Option<&mut Ring>, done: &mut Vec<Completion>) {
        let Some(ring) = ring else {
            let refused = Err(Errno::NODEV);
            done.extend(burst.iter().map(|(r, _)| Completion { token: r.token, result: refused }));
            return;
        };
        for (request, slices) in burst.iter() {
            self.remember(request, slices);
            match self.serve_inline(request) {
                Some(result) => done.push(Completion { token: request.token, result }),
                None => self.start(request.token, ring),
            }
        }
    }

    fn on_event(
        &mut self,
        token: u32,
        result: i32,
        ring: Option<&mut Ring>,
        done: &mut Vec<Completion>,
    ) {
        let (Some(entry), Some(ring)) = (self.in_flight.get_mut(token as usize), ring) else {
            return;
        };
        let result = match usize::try_from(result) {
            Ok(n) => match entry.op {
                Op::Read | Op::Write { .. } if n == 0 => Err(Errno::IO),
                Op::Read | Op::Write { .. } => {
                    advance(&mut entry.rest, n);
                    entry.offset += n as u64;
                    if !entry.rest.is_empty() {
                        let whole = self.image.is_aligned(entry.offset, &entry.rest);
                        entry.aligned = entry.aligned && whole;
                        return self.start(token, ring);
                    }
                    Ok(())
                }
                _ => Ok(()),
            },
            Err(_) => match (Errno::from_raw_os_error(-result), entry.op) {
                (Errno::AGAIN | Errno::INTR, _) => return self.start(token, ring),
                // A discard is a hint.
                (Errno::OPNOTSUPP, Op::Discard) => Ok(()),
                (errno, _) => Err(errno),
            },
        };
        done.push(Completion { token, result });
    }
}
