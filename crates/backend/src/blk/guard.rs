//! `Guard`: while a write changes a part of the host's unit, keeps other writes of the disk out of
//! that unit.
//!
//! With `O_DIRECT` the host writes whole units: 4096 bytes on some devices and file systems, where
//! a guest may write 512. The disk's own thread then reads a unit, changes a part of it and writes
//! it back (`bounce.rs`). A write to another part of the unit that ends between the read and the
//! write would be undone, although the guest was told that it is done. So, for all queues and
//! workers of a disk:
//! ```text
//! thread: announces the range that it changes; waits until no write there is under way; reads,
//!         changes and writes the units; ends the announcement
//! queue:  a write in the announced range? the thread serves it, after its present task
//!         else list the write as under way until it ends
//! ```
//! The thread waits for writes that the kernel has, and never for a request that waits for the
//! thread: a write that is passed to the thread is taken off the list before. The thread serves one
//! request after the other, so one range is announced at a time. No worker waits.
//!
//! A disk without such writes so far keeps no list: its queues check a flag for each write. The
//! first such write sets the flag, and sends each queue a question through the inbox of its ring.
//! The queue answers on its worker with the writes that it has under way, and the thread waits for
//! all answers, too. A queue that sees the flag before the question lists its writes from then on,
//! and adds the earlier ones with its answer.

use crate::sys::uring::Inbox;
use rustix::io::Errno;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Token of the question which writes a queue has under way. No request has this token.
pub(super) const QUESTION: u32 = u32::MAX;

/// The writes under way of a disk, and the range that the disk's thread is changing.
#[derive(Debug, Default)]
pub(super) struct Guard {
    /// True once a write of a part of a unit has happened, so that queues must list their writes.
    is_active: AtomicBool,
    state: Mutex<State>,
    /// Notified when the thread may continue.
    ended: Condvar,
    next_queue: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    changed: Option<Range<u64>>,
    /// The range of each write under way, by its queue and token. The list is bounded: each of
    /// these writes takes an entry of a ring.
    under_way: HashMap<(u64, u32), Range<u64>>,
    seats: HashMap<u64, AttachedQueue>,
    /// How often the thread has checked whether a listed write overlaps its range.
    #[cfg(test)]
    looks: u64,
}

/// A queue that is attached to a worker.
#[derive(Debug)]
struct AttachedQueue {
    inbox: Arc<Inbox>,
    tag: u64,
    /// True if the queue has listed all writes that it has under way.
    has_answered: bool,
}

fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

impl State {
    fn is_free(&self, range: &Range<u64>) -> bool {
        self.seats.values().all(|seat| seat.has_answered)
            && !self.under_way.values().any(|other| overlap(other, range))
    }
}

impl Guard {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True if queues must list their writes.
    #[inline]
    pub(super) fn is_active(&self) -> bool {
        // A queue may see the flag late. The question then has it list the writes that it has begun
        // until then.
        self.is_active.load(Ordering::Relaxed)
    }

    /// Returns the number by which this guard knows a new queue.
    pub(super) fn name_queue(&self) -> u64 {
        self.next_queue.fetch_add(1, Ordering::Relaxed)
    }

    /// Attaches a queue that has nothing under way; `inbox` is that of its worker's ring.
    pub(super) fn attach(&self, queue: u64, inbox: &Arc<Inbox>, tag: u64) {
        let mut state = self.lock();
        let has_answered = self.is_active();
        state.seats.insert(queue, AttachedQueue { inbox: inbox.clone(), tag, has_answered });
    }

    /// Detaches a queue that leaves its worker, or ends.
    pub(super) fn detach(&self, queue: u64) {
        let mut state = self.lock();
        state.seats.remove(&queue);
        state.under_way.retain(|(of, _), _| *of != queue);
        drop(state);
        self.ended.notify_all();
    }

    /// Stores a queue's answer to the question: the writes that it has under way.
    pub(super) fn answer(&self, queue: u64, writes: impl Iterator<Item = (u32, Range<u64>)>) {
        let mut state = self.lock();
        state.under_way.extend(writes.map(|(token, range)| ((queue, token), range)));
        if let Some(seat) = state.seats.get_mut(&queue) {
            seat.has_answered = true;
        }
        drop(state);
        self.ended.notify_all();
    }

    /// Lists a write as under way. Returns false if the disk's thread must serve it, because that
    /// thread is changing a unit that the write touches.
    pub(super) fn enter(&self, queue: u64, token: u32, range: Range<u64>) -> bool {
        let mut state = self.lock();
        if state.changed.as_ref().is_some_and(|changed| overlap(changed, &range)) {
            return false;
        }
        state.under_way.insert((queue, token), range);
        true
    }

    /// Takes a write off the list, if it is listed, because it has ended or is passed to the disk's
    /// thread.
    pub(super) fn leave(&self, queue: u64, token: u32) {
        let mut state = self.lock();
        let ended = state.under_way.remove(&(queue, token));
        let may_be_free = ended
            .zip(state.changed.as_ref())
            .is_some_and(|(ended, changed)| overlap(&ended, changed));
        drop(state);
        if may_be_free {
            self.ended.notify_all();
        }
    }

    /// Keeps other writes out of `range`, which consists of whole units, until the returned object
    /// is dropped.
    ///
    /// # Errors
    /// `EAGAIN`: a write to the range is under way, and the caller may not wait (`may_wait` is
    /// false).
    pub(super) fn change(&self, range: Range<u64>, may_wait: bool) -> Result<Changing<'_>, Errno> {
        let mut state = self.lock();
        if !self.is_active.swap(true, Ordering::Relaxed) {
            for seat in state.seats.values() {
                seat.inbox.put(seat.tag | u64::from(QUESTION), 0);
            }
        }
        debug_assert!(state.changed.is_none(), "the disk's thread does one thing at a time");
        state.changed = Some(range.clone());
        let changing = Changing(self);
        while !state.is_free(&range) {
            #[cfg(test)]
            {
                state.looks += 1;
            }
            if !may_wait {
                drop(state);
                return Err(Errno::AGAIN);
            }
            state = self.ended.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        drop(state);
        Ok(changing)
    }
}

/// Keeps other writes of the disk out of a range of units until it is dropped.
#[derive(Debug)]
pub(super) struct Changing<'a>(&'a Guard);

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        self.0.lock().changed = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::uring::Event;

    fn questions(inbox: &Inbox) -> Vec<u64> {
        let mut events: Vec<Event> = Vec::new();
        inbox.take(&mut events);
        events.iter().map(|event| event.user_data).collect()
    }

    #[test]
    fn a_unit_is_changed_when_no_write_to_it_is_under_way_on_any_queue() {
        let guard = Guard::default();
        let inbox = Arc::new(Inbox::new().unwrap());
        let (one, other) = (guard.name_queue(), guard.name_queue());
        guard.attach(one, &inbox, 1 << 32);
        guard.attach(other, &inbox, 2 << 32);
        assert!(!guard.is_active());
        assert_eq!(guard.change(0..4096, false).unwrap_err(), Errno::AGAIN, "nobody has answered");
        assert!(guard.is_active());
        let mut asked = questions(&inbox);
        asked.sort_unstable();
        assert_eq!(asked, [1, 2].map(|tag| tag << 32 | u64::from(QUESTION)));
        guard.answer(one, [(3, 2048..2560)].into_iter());
        assert!(guard.enter(other, 3, 4096..8192));
        guard.answer(other, std::iter::empty());
        assert_eq!(guard.change(0..4096, false).unwrap_err(), Errno::AGAIN);
        let free = guard.change(8192..12_288, false).unwrap();
        assert!(!guard.enter(other, 4, 4096..8704), "it overlaps");
        assert!(guard.enter(other, 4, 12_288..12_800));
        drop(free);
        guard.leave(one, 3);
        drop(guard.change(0..4096, false).unwrap());
        assert!(guard.change(4096..8192, false).is_err());
        guard.detach(other);
        drop(guard.change(4096..8192, false).unwrap());
        // A queue that comes now sees the flag: it is not asked.
        guard.attach(other, &inbox, 2 << 32);
        drop(guard.change(0..4096, false).unwrap());
        assert!(questions(&inbox).is_empty());
    }

    #[test]
    fn the_thread_waits_for_the_answers_and_for_the_writes_and_then_keeps_others_out() {
        let guard = Guard::default();
        let inbox = Arc::new(Inbox::new().unwrap());
        let queue = guard.name_queue();
        guard.attach(queue, &inbox, 0);
        let order = Mutex::new(Vec::new());
        let note = |what| order.lock().unwrap().push(what);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let changing = guard.change(0..4096, true).unwrap();
                note("changed");
                drop(changing);
            });
            while questions(&inbox).is_empty() {
                std::thread::yield_now();
            }
            guard.answer(queue, [(0, 512..1024)].into_iter());
            assert!(!guard.enter(queue, 1, 0..512), "the thread has named the unit");
            note("ended");
            guard.leave(queue, 0);
        });
        assert_eq!(*order.lock().unwrap(), ["ended", "changed"]);
        assert!(guard.enter(queue, 1, 0..512));
    }

    /// Each look at all writes keeps the workers waiting, and the guest chooses how many there are.
    #[test]
    fn the_thread_looks_again_only_when_a_write_that_it_waits_for_has_ended() {
        let guard = Guard::default();
        let inbox = Arc::new(Inbox::new().unwrap());
        let queue = guard.name_queue();
        guard.attach(queue, &inbox, 0);
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| drop(guard.change(0..4096, true).unwrap()));
            while questions(&inbox).is_empty() {
                std::thread::yield_now();
            }
            let others = (1..2000).map(|n| (n, 4096 * u64::from(n)..4096 * u64::from(n) + 512));
            guard.answer(queue, std::iter::once((0, 512..1024)).chain(others));
            for token in 1..2000 {
                guard.leave(queue, token);
                (0..10).for_each(|_| std::thread::yield_now());
            }
            assert!(!thread.is_finished());
            guard.leave(queue, 0);
        });
        let looks = guard.lock().looks;
        assert!(looks < 100, "{looks} looks");
    }
}
