//! `file`: pread and pwrite on the worker's thread. The plain twin of `uring`, and what is used
//! where io_uring is refused.

use super::{Burst, Completion, Disk, DiskQueue, Geometry, Image, Op, Request};
use crate::sys::file as sys;
use crate::sys::uring::Ring;
use manyring_memory::{GuestSlice, advance};
use rustix::fd::BorrowedFd;
use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use std::sync::Arc;

/// The disk.
#[derive(Debug)]
pub struct FileDisk {
    image: Arc<Image>,
}

impl FileDisk {
    /// Serves `image`.
    #[must_use]
    pub fn new(image: Image) -> Self {
        Self { image: Arc::new(image) }
    }
}

impl Disk for FileDisk {
    fn geometry(&self) -> Geometry {
        self.image.geometry()
    }

    fn open_queue(&self, _has_ring: bool) -> Result<Box<dyn DiskQueue>, Errno> {
        Ok(Box::new(FileQueue::new(self.image.clone())))
    }

    fn resize(&self, size: Option<u64>) -> Result<Geometry, Errno> {
        self.image.resize(size)
    }

    fn kind(&self) -> &'static str {
        "file"
    }
}

/// A queue that serves each request before the next.
#[derive(Debug)]
pub(crate) struct FileQueue {
    image: Arc<Image>,
    rest: Vec<GuestSlice>,
}

impl FileQueue {
    pub(crate) fn new(image: Arc<Image>) -> Self {
        Self { image, rest: Vec::new() }
    }

    fn serve(&mut self, request: &Request, slices: &[GuestSlice]) -> Result<(), Errno> {
        let image = self.image.clone();
        match request.op {
            Op::Read | Op::Write { .. } => {
                let aligned = image.is_aligned(request.offset, slices);
                let file = if aligned { image.file() } else { image.buffered() };
                self.transfer(file, request, slices)
            }
            op => serve_without_data(&image, op, request.offset, request.len),
        }
    }

    /// All of a read or write: short counts go on where they ended.
    fn transfer(
        &mut self,
        file: BorrowedFd<'_>,
        request: &Request,
        slices: &[GuestSlice],
    ) -> Result<(), Errno> {
        let flags = match request.op {
            Op::Write { durable: true } => sys::RWF_DSYNC,
            _ => 0,
        };
        self.rest.clear();
        self.rest.extend_from_slice(slices);
        let mut at = request.offset;
        while !self.rest.is_empty() {
            let result = match request.op {
                Op::Read => sys::read(file, &self.rest, at, flags),
                _ => sys::write(file, &self.rest, at, flags),
            };
            match result {
                // The file ends early: it was cut behind our back.
                Ok(0) => return Err(Errno::IO),
                Ok(n) => {
                    advance(&mut self.rest, n);
                    at += n as u64;
                }
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }
}

/// Requests served between two looks at the ring.
pub(crate) const INLINE_BURST: usize = 8;

impl DiskQueue for FileQueue {
    fn burst_max(&self) -> usize {
        INLINE_BURST
    }

    fn submit(&mut self, burst: &Burst, _ring: Option<&mut Ring>, done: &mut Vec<Completion>) {
        for (request, slices) in burst.iter() {
            done.push(Completion { token: request.token, result: self.serve(request, slices) });
        }
    }
}

/// Flush, discard, write-zeroes and secure erase, waiting for each.
pub(crate) fn serve_without_data(
    image: &Image,
    op: Op,
    offset: u64,
    len: u64,
) -> Result<(), Errno> {
    match op {
        Op::Flush => rustix::fs::fdatasync(image.file()),
        Op::Discard => discard(image, offset, len),
        Op::WriteZeroes { unmap, durable } => {
            write_zeroes(image, offset, len, unmap)?;
            if durable { rustix::fs::fdatasync(image.file()) } else { Ok(()) }
        }
        Op::SecureErase => sys::secure_erase(image.file(), offset, len),
        Op::Read | Op::Write { .. } => Err(Errno::INVAL),
    }
}

/// Punches a hole. A discard is a hint: where it is not supported nothing happens.
fn discard(image: &Image, offset: u64, len: u64) -> Result<(), Errno> {
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    match rustix::fs::fallocate(image.file(), mode, offset, len) {
        Err(Errno::OPNOTSUPP) => Ok(()),
        other => other,
    }
}

/// Zeroes a range by the cheapest way that is allowed and supported, at last by writing them.
fn write_zeroes(image: &Image, offset: u64, len: u64, unmap: bool) -> Result<(), Errno> {
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    let zero = FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE;
    for mode in if unmap { [punch, zero] } else { [zero, zero] } {
        match rustix::fs::fallocate(image.file(), mode, offset, len) {
            Err(Errno::OPNOTSUPP) => {}
            other => return other,
        }
    }
    static ZEROES: [u8; 65536] = [0; 65536];
    let (mut at, end) = (offset, offset + len);
    while at < end {
        let n = usize::try_from(end - at).unwrap_or(ZEROES.len()).min(ZEROES.len());
        match rustix::io::pwrite(image.buffered(), &ZEROES[..n], at) {
            Ok(0) => return Err(Errno::IO),
            Ok(n) => at += n as u64,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}
