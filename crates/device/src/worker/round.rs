//! A round of the loop: every hot queue takes a turn, while its guest has time left.

use super::{Slot, Worker, index_of};
use crate::io::QueueIo;
use crate::running::Turned;

/// What a round of turns has come to.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Round {
    /// A queue had work, or must wait for the next round to do it.
    pub(super) worked: bool,
    /// A queue should not wait for the others to settle.
    pub(super) overdue: bool,
}

/// A round of a guest alone is cut after so long: whoever comes meanwhile waits no longer for it.
const ROUND_NS: u64 = 200_000;
/// Turns with work between two looks at the clock in such a round.
const TURNS_UNTIMED: u32 = 4;

impl Worker {
    /// Every hot queue takes a turn, unless its guest has used up its time. A guest alone can have
    /// hundreds of busy queues: its round is cut, and goes on after a look at what has happened.
    #[inline]
    pub(super) fn turn_hot(&mut self) -> Round {
        let mut round = Round::default();
        let count = self.hot.len();
        self.first = if self.first + 1 < count { self.first + 1 } else { 0 };
        self.shares.begin_round(self.serves_several());
        let (round_began_ns, mut began_ns) = (self.now_ns, self.now_ns);
        let mut turns = 0u32;
        for step in 0..count {
            let at = self.first + step;
            let at = if at < count { at } else { at - count };
            let slot = self.hot[at];
            let Slot { entry, guest, is_due, generation, .. } = &mut self.slots[slot];
            let Some((_, queue)) = entry else { continue };
            if !self.shares.may_turn(*guest) {
                round.worked = true;
                continue;
            }
            *is_due = false;
            let (place, now_ns) = (index_of(slot), self.now_ns);
            let mut io = QueueIo::new(&mut self.wait, place, *generation, now_ns);
            let Turned { worked, is_overdue } = queue.turn(&mut io);
            if self.shares.is_divided() {
                let ended_ns = self.wait.now_ns();
                self.shares.charge(*guest, ended_ns.saturating_sub(began_ns), worked);
                began_ns = ended_ns;
            }
            if !worked {
                round.overdue |= is_overdue;
                continue;
            }
            round.worked = true;
            turns += 1;
            if !self.shares.is_divided()
                && turns.is_multiple_of(TURNS_UNTIMED)
                && self.wait.now_ns().saturating_sub(round_began_ns) >= ROUND_NS
            {
                self.first = at;
                break;
            }
        }
        round
    }

    /// True if the hot queues are of more than one guest.
    #[inline]
    fn serves_several(&self) -> bool {
        let mut guests = self.hot.iter().map(|&slot| &self.slots[slot]);
        let Some(first) = guests.next() else { return false };
        guests.any(|slot| slot.guest != first.guest && slot.entry.is_some())
    }
}
