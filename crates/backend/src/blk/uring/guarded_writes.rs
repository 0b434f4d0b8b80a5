//! Tells the image's guard which writes a queue begins and ends, so that no other write is under
//! way in a unit of which the disk's thread changes a part.

use super::{Stage, UringQueue};
use crate::blk::{Op, Request};
use crate::sys::uring::Ring;

impl UringQueue {
    /// True if `fallocate` alone can serve a discard or write-zeroes, because its range consists of
    /// whole units.
    pub(super) fn is_whole(&self, request: &Request) -> bool {
        let (offset, len) = (request.offset, request.len);
        let is_range = matches!(request.op, Op::Discard | Op::WriteZeroes { .. });
        !is_range || self.image.whole_units(offset, len) == (offset..offset + len)
    }

    /// Registers the queue with the image's guard; `ring` is that of the queue's worker.
    pub(super) fn sit_down(&self, ring: &Ring, tag: u64) {
        if self.image.is_direct() {
            self.image.guard().attach(self.name, ring.inbox(), tag);
        }
    }

    /// Removes the queue from the guard, before it leaves its worker or ends.
    pub(super) fn stand_up(&self) {
        self.image.guard().detach(self.name);
    }

    /// Call before a request is started: lists it as under way, or marks it for the disk's thread
    /// if that thread is changing a unit that the request touches.
    #[inline]
    pub(super) fn keep_apart(&mut self, token: u32) {
        if self.image.guard().is_active() {
            self.keep_apart_of_changes(token);
        }
    }

    #[cold]
    fn keep_apart_of_changes(&mut self, token: u32) {
        let entry = &mut self.in_flight[token as usize];
        if entry.changes_disk()
            && entry.stage != Stage::Aside
            && !self.image.guard().enter(self.name, token, entry.range())
        {
            entry.stage = Stage::Aside;
        }
    }

    /// Takes a request off the guard's list, because it has ended or is passed to the disk's
    /// thread.
    #[inline]
    pub(super) fn left(&self, token: u32) {
        let guard = self.image.guard();
        if guard.is_active() && self.in_flight[token as usize].changes_disk() {
            guard.leave(self.name, token);
        }
    }

    /// Answers the guard's question which writes of this queue the kernel has.
    #[cold]
    pub(super) fn answer(&self) {
        let writes = (0..).zip(&self.in_flight).filter(|(_, entry)| {
            entry.is_open && entry.stage != Stage::Aside && entry.changes_disk()
        });
        self.image.guard().answer(self.name, writes.map(|(token, entry)| (token, entry.range())));
    }
}
