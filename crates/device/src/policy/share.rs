//! How a worker's time is divided among the guests whose queues it serves.
//!
//! A turn of the loop goes round all hot queues. A guest with sixty-four busy queues would so get
//! sixty-four times the time of a guest with one. So each guest has a budget of time for a round;
//! once it is spent the guest's other queues wait for the next round, which starts with another
//! queue. A budget may be overdrawn by one turn of one queue, which has a bound of its own.

/// Nanoseconds that the queues of one guest have together in one round, while other guests' queues
/// are hot on the same worker.
pub const ROUND_NS: u64 = 100_000;

/// What each guest has used of the present round.
#[derive(Clone, Debug, Default)]
pub struct Shares {
    spent_ns: Vec<u64>,
    /// The guests that were seen in the present round, as far as it matters: none, one, several.
    seen: Seen,
    /// Several guests had hot queues in the last round.
    is_divided: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Seen {
    #[default]
    Nobody,
    One(usize),
    Several,
}

impl Shares {
    /// Begins a round: everybody's budget is whole again.
    #[inline]
    pub fn begin_round(&mut self) {
        self.is_divided = self.seen == Seen::Several;
        self.seen = Seen::Nobody;
        if self.is_divided {
            self.spent_ns.fill(0);
        }
    }

    /// True if the time of turns must be charged: several guests want it.
    #[must_use]
    #[inline]
    pub fn is_divided(&self) -> bool {
        self.is_divided
    }

    /// Whether a queue of `guest` may take its turn in this round.
    #[must_use]
    #[inline]
    pub fn may_turn(&mut self, guest: usize) -> bool {
        self.seen = match self.seen {
            Seen::Nobody => Seen::One(guest),
            Seen::One(other) if other == guest => Seen::One(guest),
            Seen::One(_) | Seen::Several => Seen::Several,
        };
        !self.is_divided || self.spent_ns.get(guest).is_none_or(|spent| *spent < ROUND_NS)
    }

    /// A turn of a queue of `guest` took so long.
    pub fn charge(&mut self, guest: usize, ns: u64) {
        if self.spent_ns.len() <= guest {
            self.spent_ns.resize(guest + 1, 0);
        }
        self.spent_ns[guest] = self.spent_ns[guest].saturating_add(ns);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Plays rounds in which every queue, given by its guest, would work for `turn_ns`. Returns the
    /// time that each guest has got.
    fn play(queues: &[usize], turn_ns: u64, rounds: usize) -> Vec<u64> {
        let mut shares = Shares::default();
        let mut got = vec![0; queues.iter().max().map_or(0, |guest| guest + 1)];
        for round in 0..rounds {
            shares.begin_round();
            for step in 0..queues.len() {
                let guest = queues[(round + step) % queues.len()];
                if shares.may_turn(guest) {
                    got[guest] += turn_ns;
                    if shares.is_divided() {
                        shares.charge(guest, turn_ns);
                    }
                }
            }
        }
        got
    }

    #[test]
    fn a_guest_of_many_queues_gets_no_more_than_a_guest_of_one() {
        let mut queues = vec![0; 64];
        queues.push(1);
        let got = play(&queues, ROUND_NS, 1000);
        assert!(got[0] <= got[1] + 64 * ROUND_NS, "{got:?}");
    }

    #[test]
    fn short_turns_fit_the_budget_and_none_is_put_off() {
        let queues = [0, 0, 0, 1];
        let got = play(&queues, ROUND_NS / 10, 100);
        assert_eq!(got, [300 * (ROUND_NS / 10), 100 * (ROUND_NS / 10)]);
    }

    #[test]
    fn a_guest_alone_has_the_whole_worker() {
        assert_eq!(play(&[0; 8], 10 * ROUND_NS, 10), [800 * ROUND_NS]);
    }

    #[test]
    fn every_queue_of_a_guest_over_budget_has_its_turn_in_time() {
        let queues: Vec<usize> = [vec![0; 15], vec![1]].concat();
        let mut shares = Shares::default();
        let mut turns = vec![0; queues.len()];
        for round in 0..160 {
            shares.begin_round();
            for step in 0..queues.len() {
                let at = (round + step) % queues.len();
                if shares.may_turn(queues[at]) {
                    turns[at] += 1;
                    shares.charge(queues[at], 2 * ROUND_NS);
                }
            }
        }
        assert!(turns.iter().all(|turns| *turns >= 10), "{turns:?}");
    }
}
