//! Indirect requests: copies their segments out of the granted pages that hold them.

use super::plan::{IoKind, access_of, errno_of};
use super::queue::BlkifQueue;
use manyring_memory::{GrantAccess, GrantRef, copy_from_slices};
use manyring_queue::blkif::BackRing;
use manyring_queue::{QueueError, Ring};
use manyring_wire::xen::blkif::{Indirect, RequestError, Segment};
use rustix::io::Errno;
use std::ops::Range;

impl BlkifQueue {
    /// Copies the segments of the planned indirect requests out of the granted pages, and asks for
    /// the data pages that these segments name. At the first fault of the front-end the ring stops:
    /// that request and all later ones are discarded.
    pub(super) fn read_segments(&mut self, ring: &mut BackRing, now_ns: u64) {
        self.lists.clear();
        for planned in &self.planned {
            if let IoKind::Indirect(indirect) = &planned.what {
                for gref in indirect.grefs() {
                    self.lists.push(GrantRef(*gref), GrantAccess::Read);
                }
                self.lists.end_request();
            }
        }
        if self.lists.is_empty() {
            return;
        }
        self.grants.acquire(&mut self.lists, now_ns);
        self.page.restart(self.grants.pages().memory());
        let (mut number, mut fault) = (0, None);
        for index in 0..self.planned.len() {
            let IoKind::Indirect(indirect) = self.planned[index].what else { continue };
            let numbers = number..number + indirect.grefs().len();
            number = numbers.end;
            match self.segments_of(&indirect, numbers) {
                Ok(what) => self.planned[index].what = what,
                Err(error) => {
                    fault = Some((index, error));
                    break;
                }
            }
        }
        self.page.clear();
        let pages = self.lists.acquired(0..self.lists.len());
        self.grants.release(pages, now_ns);
        if let Some((index, error)) = fault {
            ring.latch_fault(QueueError::Blkif(error));
            self.give_up(index, now_ns, |chain| ring.discard(chain));
        }
    }

    /// Reads the segments of one indirect request out of its pages, which are `numbers` in `lists`.
    /// Returns an answer instead of segments if the pages cannot be mapped, or the request lies
    /// outside the disk.
    ///
    /// # Errors
    /// A [`RequestError`] that is a fault of the front-end: the ring must stop.
    #[allow(clippy::cast_possible_truncation, reason = "at most a page")]
    fn segments_of(
        &mut self,
        indirect: &Indirect,
        numbers: Range<usize>,
    ) -> Result<IoKind, RequestError> {
        let first = self.segments.len();
        for (index, number) in numbers.enumerate() {
            let len = indirect.page_bytes(index);
            let bytes = &mut self.bytes[..len];
            let list = &mut self.page;
            list.clear();
            let range = (0, len as u32);
            let last = &mut self.last;
            let found = self
                .lists
                .page(number)
                .and_then(|page| self.grants.resolve(page, range, GrantAccess::Read, last, list));
            if let Err(error) = found {
                self.segments.truncate(first);
                return Ok(IoKind::Answer(errno_of(error)));
            }
            copy_from_slices(list.as_slices(), bytes);
            for segment in Segment::parse_page(bytes) {
                self.segments.push(segment?);
            }
        }
        let segments = first..self.segments.len();
        match indirect.check(&self.segments[segments.clone()], &self.limits) {
            Ok(_) => {
                let (op, sector) = (indirect.op, indirect.sector);
                for segment in &self.segments[segments.clone()] {
                    self.grants.ask(&mut self.asks, GrantRef(segment.gref()), access_of(op));
                }
                self.asks.end_request();
                Ok(IoKind::Data { op, sector, segments })
            }
            Err(error) if error.is_fault() => Err(error),
            Err(_) => {
                self.segments.truncate(first);
                Ok(IoKind::Answer(Errno::IO))
            }
        }
    }
}
