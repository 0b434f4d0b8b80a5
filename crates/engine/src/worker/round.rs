//! A round of the loop: every hot queue takes a turn, while its guest has time left.
//!
//! The time of a round is charged to the queues that worked in it (`busy_ns`), because the balance
//! must know how much each of them takes. The clock is not read for that alone:
//!
//! ```text
//! a turn with work whose time is known, since guests share the worker:  charge it to the queue
//! the submission of what the turns of several guests have placed for the kernel, which copies it
//! then:  divide it among the queues by how much each has placed
//! an order:  charge it to the queue
//! when the next round begins:  the round's time that is not charged yet (turns and
//! submissions of a guest alone, completions) is divided among the queues that worked in it
//! ```

use super::{Slot, Worker, index_of};
use crate::io::QueueIo;
use crate::running::run::Turned;

/// The sum of the turns of a round.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Round {
    /// True if a queue had work, or has work that must wait for the next round.
    pub(super) worked: bool,
    /// The number of requests or packets that were taken.
    pub(super) taken: u64,
    /// True if a queue has long been without work: it should settle, though others are busy.
    pub(super) overdue: bool,
}

/// The time of the present round, and the queues to which it will be charged.
#[derive(Debug, Default)]
pub(super) struct Bill {
    /// When the round began.
    began_ns: u64,
    /// The time that has been charged already, to turns whose time was measured and to orders.
    charged_ns: u64,
    /// The slots whose queues have placed work for the kernel since the last submission, and how
    /// much.
    placed: Vec<(usize, u64)>,
    placed_all: u64,
    /// When the last turn ended, in a round of several guests: the submission began then.
    turned_ns: u64,
    /// The slots of the queues that worked.
    payers: Vec<usize>,
}

impl Bill {
    /// Call when a queue was charged with the time of an order.
    pub(super) fn charge_order(&mut self, ns: u64) {
        self.charged_ns += ns;
    }

    #[inline]
    fn place(&mut self, slot: usize, placed: u64) {
        if placed > 0 {
            self.placed.push((slot, placed));
            self.placed_all += placed;
        }
    }

    /// Call when the queue in `slot` leaves the worker. Its share of the round is charged neither
    /// to it nor to the next queue in the slot.
    #[cold]
    pub(super) fn strike(&mut self, slot: usize) {
        self.payers.iter_mut().filter(|payer| **payer == slot).for_each(|payer| *payer = GONE);
    }
}

/// The slot number that replaces the slot of a queue that has left in `payers`: no slot has it.
const GONE: usize = usize::MAX;
/// The maximum time of a round of a guest alone: another guest that becomes active waits for it.
const ROUND_NS: u64 = 200_000;
/// If guests share the worker, the work that the turns of one place for the kernel is submitted at
/// this size (`Ring::placed`: bytes that are copied, and some thousand for each entry) and not at
/// the end of the round: that guest is charged, and its other queues wait for the next round.
const PLACED_MAX: u64 = 64 << 10;
/// The maximum of turns with work between two reads of the clock in a round of a guest alone, if
/// each took few requests or frames. A turn with work that took none continued an earlier burst,
/// which can be long.
const TURNS_UNTIMED: u32 = 4;
const TAKEN_UNTIMED: std::ops::RangeInclusive<usize> = 1..=4;

impl Worker {
    /// Has every hot queue take a turn, unless its guest has used up its time. A guest alone can
    /// have hundreds of busy queues: its round ends early, and the next round, after new events are
    /// collected, continues with the other queues.
    #[inline]
    pub(super) fn turn_hot(&mut self) -> Round {
        let mut round = Round::default();
        let count = self.hot.len();
        self.first = if self.first + 1 < count { self.first + 1 } else { 0 };
        self.shares.begin_round(self.serves_several(), self.now_ns);
        // Before the turns, by which the guest would use up its time and leave none for its orders.
        self.obey_put_off();
        let round_began_ns = self.now_ns;
        let mut began_ns = round_began_ns;
        if self.shares.is_divided() {
            // The events of the round were for all queues, not for the first one.
            began_ns = self.wait.now_ns();
        }
        let mut turns = 0u32;
        for step in 0..count {
            let at = self.first + step;
            let at = if at < count { at } else { at - count };
            let slot = self.hot[at];
            let Slot { entry, guest, is_due, generation, .. } = &mut self.slots[slot];
            let Some((id, queue)) = entry else { continue };
            if !self.shares.may_turn(*guest) {
                round.worked = true;
                continue;
            }
            *is_due = false;
            self.lot.post.serve(id.0);
            let (place, now_ns) = (index_of(slot), self.now_ns);
            let placed = self.wait.placed();
            let io = QueueIo::new(&mut self.wait, place, *generation, now_ns);
            let mut io = io.alone(self.shares.is_alone());
            let Turned { worked, taken, is_overdue } = queue.turn(&mut io);
            if self.shares.is_divided() {
                let ended_ns = self.wait.now_ns();
                let took_ns = ended_ns.saturating_sub(began_ns);
                self.shares.charge(*guest, took_ns, worked);
                if worked {
                    queue.stats().busy_ns.add(took_ns);
                    self.bill.charged_ns += took_ns;
                }
                began_ns = ended_ns;
                let placed = self.wait.placed().wrapping_sub(placed);
                self.bill.turned_ns = ended_ns;
                self.bill.place(slot, placed);
            }
            if !worked {
                round.overdue |= is_overdue;
                continue;
            }
            round.worked = true;
            self.bill.payers.push(slot);
            if self.bill.placed_all >= PLACED_MAX {
                self.submit();
                began_ns = self.bill.turned_ns;
            }
            round.taken += taken as u64;
            turns += 1;
            if !self.shares.is_divided()
                && (turns.is_multiple_of(TURNS_UNTIMED) || !TAKEN_UNTIMED.contains(&taken))
                && self.wait.now_ns().saturating_sub(round_began_ns) >= ROUND_NS
            {
                self.first = at;
                break;
            }
        }
        if !self.arrivals.is_empty() {
            self.note_arrivals();
        }
        round
    }

    /// Submits the work that the turns have placed for the kernel. Where guests share the worker,
    /// the time of the submission is charged to the guest that placed the work: a turn that writes
    /// to the page cache places an entry within a microsecond, and the kernel copies the bytes
    /// here.
    #[inline]
    pub(super) fn submit(&mut self) {
        self.lot.post.serve_all();
        self.wait.submit();
        if !self.bill.placed.is_empty() {
            self.charge_submission();
        }
    }

    fn charge_submission(&mut self) {
        let now_ns = self.wait.now_ns();
        let took_ns = now_ns.saturating_sub(std::mem::replace(&mut self.bill.turned_ns, now_ns));
        let all = std::mem::take(&mut self.bill.placed_all);
        self.bill.charged_ns += took_ns;
        for (slot, placed) in self.bill.placed.drain(..) {
            let part_ns = u128::from(took_ns) * u128::from(placed) / u128::from(all);
            let part_ns = u64::try_from(part_ns).unwrap_or(took_ns);
            let Slot { entry, guest, .. } = &self.slots[slot];
            self.shares.charge(*guest, part_ns, true);
            self.shares.rest(*guest);
            if let Some((_, queue)) = entry {
                queue.stats().busy_ns.add(part_ns);
            }
        }
    }

    /// Charges the time of the last round to the queues that worked in it. After a round with work
    /// the next one follows without a sleep.
    #[inline]
    pub(super) fn settle_bill(&mut self) {
        let Bill { began_ns, charged_ns, payers, .. } = &mut self.bill;
        if !payers.is_empty() {
            let round_ns = self.now_ns.saturating_sub(*began_ns);
            let each_ns = round_ns.saturating_sub(*charged_ns) / payers.len() as u64;
            for slot in payers.drain(..) {
                let entry = self.slots.get(slot).and_then(|slot| slot.entry.as_ref());
                if let Some((_, queue)) = entry {
                    queue.stats().busy_ns.add(each_ns);
                }
            }
        }
        (*began_ns, *charged_ns) = (self.now_ns, 0);
    }

    /// Records the pause of each queue that came from another worker and has now had a turn.
    #[cold]
    fn note_arrivals(&mut self) {
        let (slots, pauses, now_ns) = (&self.slots, &self.stats.pause_ns, self.wait.now_ns());
        self.arrivals.retain(|&(slot, left_ns)| {
            let is_here = slots[slot].entry.is_some();
            let waits = is_here && slots[slot].is_due;
            if is_here && !waits {
                pauses.record(now_ns.saturating_sub(left_ns), 1);
            }
            waits
        });
    }

    /// True if the hot queues belong to more than one guest.
    #[inline]
    fn serves_several(&self) -> bool {
        // The slot of a queue that has left stays in the list until queues settle next.
        let mut guests =
            self.hot.iter().map(|&slot| &self.slots[slot]).filter(|slot| slot.entry.is_some());
        let Some(first) = guests.next() else { return false };
        guests.any(|slot| slot.guest != first.guest)
    }
}
