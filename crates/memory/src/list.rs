//! `SliceList`, `SliceQueue`, `Gather`: slices together with the snapshot that maps them.
//!
//! ```text
//! restart(snapshot)       empties the list; its slices come from that snapshot from now on
//! resolve(addr, len)      adds the slices of a guest address
//! extend(pieces)          adds slices of another list of the same snapshot
//! ```
//! Why this is sound: a list lends its slices only while it is borrowed itself; all of them lie in
//! the snapshot (or the private memory) that it holds; and it changes the snapshot only when it is
//! empty. Which snapshot slices lie in is never taken on trust: [`Pieces`] carry it, and only this
//! file makes them. Lists are reused, and a list that keeps its snapshot costs no reference count;
//! [`SliceList::release`] lets go of a snapshot that is to be unmapped.
#![allow(unsafe_code, reason = "allow-listed: keeps slices with what maps them")]

use crate::error::MemoryError;
use crate::guest::{GuestMemory, LastHit};
use crate::iov::GuestSlice;
use crate::mapping::Mapping;
use crate::region::GuestAddr;
use crate::row::Row;
use std::ops::{Deref, Range};
use std::sync::Arc;

/// Slices of one snapshot, lent by the list that holds them.
///
/// Only this file makes them, so that the slices do lie in the snapshot.
#[derive(Clone, Copy, Debug)]
pub struct Pieces<'a> {
    memory: &'a Arc<GuestMemory>,
    slices: &'a [GuestSlice<'a>],
}

impl<'a> Deref for Pieces<'a> {
    type Target = [GuestSlice<'a>];

    #[inline]
    fn deref(&self) -> &Self::Target {
        self.slices
    }
}

impl<'a> Pieces<'a> {
    /// Returns the slices.
    #[must_use]
    #[inline]
    pub fn as_slices(self) -> &'a [GuestSlice<'a>] {
        self.slices
    }

    /// Returns the snapshot in which the slices lie.
    #[must_use]
    pub fn memory(self) -> &'a Arc<GuestMemory> {
        self.memory
    }

    /// Returns the last byte of the last slice, to be written later; `None` if there are no slices.
    #[must_use]
    #[inline]
    pub fn last_byte(self) -> Option<KeptByte> {
        let last = self.slices.last()?;
        let byte = last.split_at(last.len().checked_sub(1)?).1;
        // SAFETY: the byte is written only through a borrow of the snapshot in which it lies.
        Some(KeptByte { byte: unsafe { byte.keep() }, snapshot: self.memory.id() })
    }
}

/// A byte of guest memory that is written later, by a caller that has its snapshot. So thousands of
/// such bytes need no reference count of their own.
#[derive(Clone, Copy, Debug)]
pub struct KeptByte {
    byte: GuestSlice<'static>,
    snapshot: u64,
}

impl KeptByte {
    /// True if the byte lies in `memory`.
    #[must_use]
    #[inline]
    pub fn is_in(&self, memory: &GuestMemory) -> bool {
        self.snapshot == memory.id()
    }

    /// Writes it.
    ///
    /// # Panics
    /// If it does not lie in `memory`.
    #[inline]
    pub fn write(&self, memory: &GuestMemory, value: u8) {
        assert!(self.is_in(memory), "a byte of another snapshot");
        self.byte.write_byte(value);
    }
}

/// Slices of one snapshot, and that snapshot. The list is reused, and allocates only when it grows.
#[derive(Debug, Default)]
pub struct SliceList {
    /// The slices are lent only while `self`, which keeps their memory mapped, is borrowed. They
    /// are not `'static`, as the type says.
    slices: Vec<GuestSlice<'static>>,
    memory: Arc<GuestMemory>,
}

impl SliceList {
    /// Makes an empty list.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Empties the list, for slices of `memory`.
    #[inline]
    pub fn restart(&mut self, memory: &Arc<GuestMemory>) {
        self.slices.clear();
        if !Arc::ptr_eq(&self.memory, memory) {
            self.memory = memory.clone();
        }
    }

    /// Empties the list, but keeps its snapshot for the next use.
    #[inline]
    pub fn clear(&mut self) {
        self.slices.clear();
    }

    /// Empties the list and drops its reference to the snapshot, which may then be unmapped.
    pub fn release(&mut self) {
        self.restart(&Arc::default());
    }

    /// Returns the number of slices.
    #[must_use]
    #[inline]
    pub fn len(&self) -> usize {
        self.slices.len()
    }

    /// True if the list has no slices.
    #[must_use]
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.slices.is_empty()
    }

    /// Returns the snapshot in which the slices lie.
    #[must_use]
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// True once guest memory was truncated: since then it reads as zeroes.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.memory.is_broken()
    }

    /// Returns all slices.
    #[must_use]
    #[inline]
    pub fn as_slices(&self) -> &[GuestSlice<'_>] {
        &self.slices
    }

    /// Returns all slices, with their snapshot.
    #[must_use]
    #[inline]
    pub fn all(&self) -> Pieces<'_> {
        Pieces { memory: &self.memory, slices: &self.slices }
    }

    /// Returns the slices of a range of indexes, with their snapshot.
    #[must_use]
    #[inline]
    pub fn pieces(&self, range: Range<usize>) -> Pieces<'_> {
        Pieces { memory: &self.memory, slices: &self.slices[range] }
    }

    /// Adds the slices of `len` bytes at guest address `addr`.
    ///
    /// # Errors
    /// [`MemoryError::GuestRange`] if a byte is in no region; the list is then longer by those that
    /// were found.
    #[inline]
    pub fn resolve(
        &mut self,
        addr: GuestAddr,
        len: u32,
        last: &mut LastHit,
    ) -> Result<(), MemoryError> {
        let Self { slices, memory } = self;
        // SAFETY: the bytes are mapped while `memory` is held, which is replaced only together with
        // the emptying of the list; and they are lent only while the list is borrowed.
        memory.each_slice(addr, len, last, |slice| slices.push(unsafe { slice.keep() }))
    }

    /// Adds pieces of another list.
    ///
    /// # Panics
    /// If this list holds slices of another snapshot.
    #[inline]
    pub fn extend(&mut self, pieces: Pieces<'_>) {
        self.adopt(pieces);
        // SAFETY: the slices lie in `pieces.memory`, which is now `self.memory`; see `resolve`.
        self.slices.extend(pieces.iter().map(|slice| unsafe { slice.keep() }));
    }

    /// Adds the `len` bytes behind the first `skip` bytes of pieces of another list, or all bytes
    /// behind these if there are fewer.
    ///
    /// # Panics
    /// If this list holds slices of another snapshot.
    #[inline]
    pub fn extend_part(&mut self, pieces: Pieces<'_>, skip: usize, len: usize) {
        self.adopt(pieces);
        let slices = &mut self.slices;
        // SAFETY: as in `extend`.
        each_part(&pieces, skip, len, |part| slices.push(unsafe { part.keep() }));
    }

    /// The slices of `len` bytes at `offset` of `mapping`, for each of `places`.
    ///
    /// # Errors
    /// [`MemoryError::GuestRange`] if a byte is not inside.
    pub fn of_mapping(mapping: &Arc<Mapping>, places: &[(u64, u32)]) -> Result<Self, MemoryError> {
        let mut list = Self::new();
        list.restart(&Arc::new(GuestMemory::of_mapping(mapping.clone())));
        for (offset, len) in places {
            list.resolve(GuestAddr(*offset), *len, &mut LastHit::default())?;
        }
        Ok(list)
    }

    /// Removes all slices behind the first `len`.
    pub fn truncate(&mut self, len: usize) {
        self.slices.truncate(len);
    }

    /// Removes the first `n` bytes, after a system call that has transferred only a part.
    pub fn advance(&mut self, n: usize) {
        crate::iov::advance(&mut self.slices, n);
    }

    /// Shrinks the allocation of a list that has grown beyond `slices` entries.
    pub fn shrink_to(&mut self, slices: usize) {
        self.slices.shrink_to(slices);
    }

    #[inline]
    fn adopt(&mut self, pieces: Pieces<'_>) {
        if !Arc::ptr_eq(&self.memory, pieces.memory) {
            assert!(self.slices.is_empty(), "slices of two snapshots in one list");
            self.memory = pieces.memory.clone();
        }
    }
}

/// Slices of one snapshot, and that snapshot. Slices are added at the end and removed at the front.
#[derive(Debug, Default)]
pub struct SliceQueue {
    /// The lifetime is as in [`SliceList`].
    slices: Row<GuestSlice<'static>>,
    memory: Arc<GuestMemory>,
}

impl SliceQueue {
    /// Makes an empty queue.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds pieces of a list.
    ///
    /// # Panics
    /// If this queue holds slices of another snapshot.
    #[inline]
    pub fn extend(&mut self, pieces: Pieces<'_>) {
        if !Arc::ptr_eq(&self.memory, pieces.memory) {
            assert!(self.slices.is_empty(), "slices of two snapshots in one queue");
            self.memory = pieces.memory.clone();
        }
        // SAFETY: they lie in `pieces.memory`, which is `self.memory` now, and which is replaced
        // only while the queue is empty; and they are lent only while the queue is borrowed.
        self.slices.extend(pieces.iter().map(|slice| unsafe { slice.keep() }));
    }

    /// Returns the slices, from the front.
    #[inline]
    pub fn iter(&self) -> impl Iterator<Item = &GuestSlice<'_>> {
        self.slices.as_slice().iter()
    }

    /// Returns the slice at `index` from the front.
    #[must_use]
    #[inline]
    pub fn piece(&self, index: usize) -> Option<Pieces<'_>> {
        let slice = self.slices.as_slice().get(index)?;
        Some(Pieces { memory: &self.memory, slices: std::slice::from_ref(slice) })
    }

    /// Returns the number of slices.
    #[must_use]
    #[inline]
    pub fn len(&self) -> usize {
        self.slices.len()
    }

    /// True if the queue has no slices.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.slices.is_empty()
    }

    /// Removes the first `count` slices.
    #[inline]
    pub fn drop_front(&mut self, count: usize) {
        self.slices.drop_front(count);
    }

    /// Empties the queue and drops its reference to the snapshot, which may then be unmapped.
    pub fn release(&mut self) {
        self.slices.clear();
        self.memory = Arc::default();
    }
}

/// Slices of private memory and of one guest's snapshot, in any order, for one system call.
#[derive(Debug)]
pub struct Gather {
    /// The slices of both kinds, with the guest's snapshot.
    list: SliceList,
    /// True if some slices are the guest's, so that the snapshot must stay.
    has_pieces: bool,
    own: Arc<Mapping>,
}

impl Gather {
    /// Makes an empty list, which can also hold slices of the private memory `own`.
    #[must_use]
    pub fn new(own: Arc<Mapping>) -> Self {
        Self { list: SliceList::new(), has_pieces: false, own }
    }

    /// Returns the private memory, of which [`Self::push_own`] adds slices.
    #[must_use]
    #[inline]
    pub fn own(&self) -> &Mapping {
        &self.own
    }

    /// Adds `len` bytes at `offset` of the private memory; false if they are not all inside.
    #[inline]
    pub fn push_own(&mut self, offset: usize, len: usize) -> bool {
        let Some(slice) = self.own.slice(offset, len) else { return false };
        // SAFETY: the bytes are mapped while `own` is held, for the whole life of this list.
        self.list.slices.push(unsafe { slice.keep() });
        true
    }

    /// Adds two adjacent slices of the private memory at `offset`, with `FIRST` and `len` bytes.
    /// Returns both; `None`, and nothing is added, if they are not all inside.
    #[inline]
    pub fn push_own_pair<const FIRST: usize>(
        &mut self,
        offset: usize,
        len: usize,
    ) -> Option<[GuestSlice<'_>; 2]> {
        let (first, second) = self.own.slice(offset, FIRST + len)?.split_at(FIRST);
        // SAFETY: as in `push_own`.
        self.list.slices.extend([first, second].map(|slice| unsafe { slice.keep() }));
        Some([first, second])
    }

    /// Adds the bytes behind the first `skip` bytes of pieces of a guest.
    ///
    /// # Panics
    /// If this list holds slices of another snapshot.
    #[inline(always)]
    #[allow(clippy::inline_always, reason = "a call costs 7 % of a sent frame")]
    pub fn extend(&mut self, pieces: Pieces<'_>, skip: usize) {
        if !self.has_pieces {
            self.has_pieces = true;
            if !Arc::ptr_eq(&self.list.memory, pieces.memory) {
                self.list.memory = pieces.memory.clone();
            }
        }
        self.list.extend_part(pieces, skip, usize::MAX);
    }

    /// Replaces the slice at `index` by the first slice of `pieces` without its first `skip` bytes.
    ///
    /// # Panics
    /// If this list holds other slices of another snapshot.
    #[inline]
    pub fn replace(&mut self, index: usize, pieces: Pieces<'_>, skip: usize) {
        if let (Some(target), Some(slice)) = (self.list.slices.get_mut(index), pieces.first()) {
            assert!(Arc::ptr_eq(&self.list.memory, pieces.memory), "slices of two snapshots");
            // SAFETY: the slice lies in `pieces.memory`, which is the list's snapshot.
            *target = unsafe { slice.split_at(skip).1.keep() };
        }
    }

    /// Returns all slices.
    #[must_use]
    #[inline]
    pub fn as_slices(&self) -> &[GuestSlice<'_>] {
        self.list.as_slices()
    }

    /// True once the guest's memory was truncated: since then it reads as zeroes.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.list.memory.is_broken()
    }

    /// True if the guest's slices in `other` can be added to this list.
    #[must_use]
    #[inline]
    pub fn is_compatible(&self, other: &Self) -> bool {
        !self.has_pieces || Arc::ptr_eq(&self.list.memory, &other.list.memory)
    }

    /// Returns the slices of a range of indexes, if all of them are the guest's.
    #[must_use]
    pub fn pieces(&self, range: Range<usize>) -> Option<Pieces<'_>> {
        let ours = self.own.slice(0, self.own.size())?;
        let ours = ours.address()..ours.address() + ours.len();
        let pieces = self.list.pieces(range);
        let is_ours = |slice: &GuestSlice<'_>| ours.contains(&slice.address());
        (!pieces.iter().any(is_ours)).then_some(pieces)
    }

    /// Returns the number of slices.
    #[must_use]
    #[inline]
    pub fn len(&self) -> usize {
        self.list.len()
    }

    /// True if the list has no slices.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Empties the list, but keeps its snapshot for the next use.
    #[inline]
    pub fn clear(&mut self) {
        self.has_pieces = false;
        self.list.clear();
    }

    /// Empties the list and drops its reference to the snapshot, which may then be unmapped.
    pub fn release(&mut self) {
        self.has_pieces = false;
        self.list.release();
    }
}

/// Calls `each` for the parts of `slices` with the `len` bytes that follow the first `skip` bytes.
#[inline(always)]
#[allow(
    clippy::inline_always,
    reason = "two formats of a ring call it; in each it is the loop's body"
)]
fn each_part<'m>(
    slices: &[GuestSlice<'m>],
    mut skip: usize,
    mut len: usize,
    mut each: impl FnMut(GuestSlice<'m>),
) {
    for slice in slices {
        let mut part = *slice;
        if skip > 0 {
            let (before, rest) = part.split_at(skip);
            skip -= before.len();
            part = rest;
        }
        if part.len() > len {
            part = part.split_at(len).0;
        }
        if !part.is_empty() {
            len -= part.len();
            each(part);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(size: u64) -> Arc<GuestMemory> {
        let mapping = Arc::new(Mapping::anonymous(size).unwrap());
        Arc::new(GuestMemory::of_mapping(mapping))
    }

    fn list(memory: &Arc<GuestMemory>, places: &[(u64, u32)]) -> SliceList {
        let mut list = SliceList::new();
        list.restart(memory);
        for (addr, len) in places {
            list.resolve(GuestAddr(*addr), *len, &mut LastHit::default()).unwrap();
        }
        list
    }

    fn lens(slices: &[GuestSlice<'_>]) -> Vec<usize> {
        slices.iter().map(GuestSlice::len).collect()
    }

    #[test]
    fn a_list_keeps_its_snapshot_until_it_is_released() {
        let memory = memory(4096);
        let mut first = list(&memory, &[(0, 4)]);
        let weak = Arc::downgrade(&memory);
        drop(memory);
        first.as_slices()[0].write_from(b"kept");
        first.clear();
        assert!(weak.upgrade().is_some(), "it is kept for the next use");
        first.release();
        assert!(weak.upgrade().is_none() && first.is_empty());
    }

    #[test]
    fn lists_of_every_kind_know_how_many_slices_they_hold() {
        let source = list(&memory(4096), &[(0, 4), (8, 4), (16, 4)]);
        let mut queue = SliceQueue::new();
        let mut gather = Gather::new(Arc::new(Mapping::anonymous(16).unwrap()));
        let mut target = SliceList::new();
        for held in 0..=3 {
            target.clear();
            target.extend(source.pieces(0..held));
            assert_eq!((target.len(), target.is_empty()), (held, held == 0));
            assert_eq!((gather.len(), gather.is_empty()), (held, held == 0));
            assert_eq!((queue.len(), queue.is_empty()), (held, held == 0));
            gather.extend(source.pieces(0..1), 0);
            queue.extend(source.pieces(0..1));
        }
        target.truncate(2);
        assert_eq!((source.len(), target.len()), (3, 2));
        gather.release();
        queue.release();
        assert!(gather.is_empty() && queue.is_empty());
    }

    #[test]
    fn pieces_of_a_mapping_are_where_they_were_asked_for_and_name_their_snapshot() {
        let own = Arc::new(Mapping::anonymous(4096).unwrap());
        own.slice(8, 3).unwrap().write_from(b"abc");
        let list = SliceList::of_mapping(&own, &[(8, 2), (10, 1)]).unwrap();
        let mut bytes = [0; 3];
        assert_eq!(crate::copy_from_slices(list.all().as_slices(), &mut bytes), 3);
        assert_eq!(&bytes, b"abc");
        assert!(Arc::ptr_eq(list.all().memory(), list.memory()));
        assert!(SliceList::of_mapping(&own, &[(4095, 2)]).is_err());
    }

    #[test]
    fn a_queue_is_drained_from_the_front_whatever_the_count() {
        let source = list(&memory(4096), &[(0, 1), (8, 2), (16, 3), (24, 4)]);
        for (count, left) in [(0, &[1, 2, 3, 4][..]), (1, &[2, 3, 4]), (3, &[4]), (4, &[])] {
            let mut queue = SliceQueue::new();
            queue.extend(source.all());
            queue.drop_front(count);
            assert_eq!(queue.iter().map(GuestSlice::len).collect::<Vec<_>>(), left, "{count}");
        }
    }

    #[test]
    fn a_list_goes_on_where_a_system_call_ended() {
        let mut rest = list(&memory(4096), &[(0, 3), (8, 5)]);
        rest.advance(4);
        assert_eq!(lens(rest.as_slices()), [4]);
    }

    #[test]
    fn a_list_that_has_grown_gives_memory_back() {
        let mut grown = list(&memory(4096), &[(0, 1); 1000]);
        grown.clear();
        grown.shrink_to(10);
        assert!(grown.slices.capacity() < 100);
    }

    #[test]
    fn a_kept_byte_knows_the_snapshot_that_it_lies_in() {
        let (one, other) = (memory(4096), memory(4096));
        let byte = list(&one, &[(0, 4)]).all().last_byte().unwrap();
        assert!(byte.is_in(&one) && !byte.is_in(&other));
    }

    #[test]
    fn pieces_of_a_gather_list_are_the_guests_wherever_its_memory_lies() {
        // The kernel places one mapping after the other: the guest's memory lies on either side of
        // the private memory.
        let (first, own) = (memory(4096), Arc::new(Mapping::anonymous(4096).unwrap()));
        for guest in [first, memory(4096)] {
            let mut gather = Gather::new(own.clone());
            assert!(gather.push_own(0, 1) && gather.push_own(4095, 1));
            gather.extend(list(&guest, &[(0, 1), (4095, 1)]).all(), 0);
            assert!((0..2).all(|at| gather.pieces(at..at + 1).is_none()), "they are ours");
            assert_eq!(gather.pieces(2..4).map(|pieces| pieces.len()), Some(2));
        }
    }

    #[test]
    #[should_panic(expected = "a byte of another snapshot")]
    fn a_kept_byte_is_written_in_its_own_snapshot_only() {
        let (one, other) = (memory(4096), memory(4096));
        let slices = list(&one, &[(0, 4), (8, 2)]);
        let byte = slices.all().last_byte().unwrap();
        byte.write(&one, 7);
        assert_eq!(slices.as_slices()[1].read_array(), Some([0, 7]));
        assert!(slices.pieces(0..0).last_byte().is_none());
        byte.write(&other, 9);
    }

    #[test]
    fn parts_are_cut_at_both_ends_and_across_slices() {
        let source = list(&memory(4096), &[(0, 10), (100, 10), (200, 10)]);
        let mut part = SliceList::new();
        for (skip, len, wanted) in [
            (0, usize::MAX, vec![10, 10, 10]),
            (10, usize::MAX, vec![10, 10]),
            (12, usize::MAX, vec![8, 10]),
            (12, 9, vec![8, 1]),
            (12, 12, vec![8, 4]),
            (29, 5, vec![1]),
            (30, 5, vec![]),
            (5, 0, vec![]),
        ] {
            part.clear();
            part.extend_part(source.pieces(0..3), skip, len);
            assert_eq!(lens(part.as_slices()), wanted, "{skip} {len}");
        }
    }

    #[test]
    #[should_panic(expected = "slices of two snapshots")]
    fn slices_of_two_snapshots_never_share_a_list() {
        let mut first = list(&memory(4096), &[(0, 4)]);
        first.extend(list(&memory(4096), &[(0, 4)]).pieces(0..1));
    }

    #[test]
    #[should_panic(expected = "slices of two snapshots")]
    fn nor_a_queue() {
        let mut queue = SliceQueue::new();
        queue.extend(list(&memory(4096), &[(0, 4)]).pieces(0..1));
        queue.extend(list(&memory(4096), &[(0, 4)]).pieces(0..1));
    }

    #[test]
    fn an_empty_list_follows_to_another_snapshot() {
        let (one, other) = (memory(4096), memory(8192));
        let mut target = list(&one, &[(0, 4)]);
        target.clear();
        target.extend(list(&other, &[(8000, 4)]).pieces(0..1));
        assert!(Arc::ptr_eq(target.memory(), &other));
        let mut queue = SliceQueue::new();
        queue.extend(target.pieces(0..1));
        queue.drop_front(1);
        queue.extend(list(&one, &[(0, 4), (9, 2)]).pieces(0..2));
        assert_eq!(queue.iter().map(GuestSlice::len).collect::<Vec<_>>(), [4, 2]);
        assert_eq!(queue.piece(1).map(|pieces| pieces[0].len()), Some(2));
    }

    #[test]
    fn a_gather_list_holds_our_bytes_beside_the_guests() {
        let own = Arc::new(Mapping::anonymous(16).unwrap());
        own.slice(0, 2).unwrap().write_from(b"ab");
        let guest = list(&memory(4096), &[(0, 3), (50, 3)]);
        guest.as_slices()[0].write_from(b"xyz");
        let mut gather = Gather::new(own);
        assert!(gather.push_own(0, 2) && !gather.push_own(15, 2));
        gather.extend(guest.pieces(0..1), 1);
        let mut bytes = [0; 4];
        crate::copy_from_slices(gather.as_slices(), &mut bytes);
        assert_eq!(&bytes, b"abyz");
        gather.replace(1, guest.pieces(0..1), 2);
        assert_eq!(lens(gather.as_slices()), [2, 1]);
        assert!(gather.pieces(0..2).is_none() && gather.pieces(1..2).is_some());
        // Emptied, it takes pieces of another guest behind ours.
        gather.clear();
        assert!(gather.push_own(0, 12));
        gather.extend(list(&memory(4096), &[(0, 9)]).pieces(0..1), 0);
        assert_eq!(lens(gather.as_slices()), [12, 9]);
    }
}
