//! How a worker's time is divided among the guests whose queues it serves.
//!
//! A round of the loop goes over all hot queues. If each simply took its turn, a guest with
//! sixty-four busy queues would get sixty-four times the time of a guest with one. So the worker
//! keeps account of how far each guest is ahead of the guest that has had the least:
//!
//! ```text
//! a turn, an order:           lead[guest] += its time
//! a submission of much work:  lead[guest] += its time; the guest rests until the next round
//! a queue may take its turn:  lead[guest] < LEAD_NS, and its guest does not rest
//! after a round:              a guest that had turns and no work is lifted to the lowest lead of
//!                             those that had work; then the lowest lead is taken off all
//! a guest comes back:         lead[guest] -= the time for which it had no hot queue
//! ```
//! 1. Guests that always have work get equal times, however many queues they have: who is ahead by
//!    [`LEAD_NS`] waits until the others have caught up. A lead may be overdrawn by one turn of one
//!    queue, which has a bound of its own.
//! 2. Nobody waits for a guest that has nothing to do: it is lifted, and saves no time up. It is
//!    lifted no higher than that. A guest that needs little is without work in most rounds; at the
//!    lead of a guest that takes long turns, it would wait with each of its requests until the
//!    others have caught up with that guest.
//! 3. A guest alone is not measured at all: reading the clock for every turn would cost it a tenth.
//! 4. A guest that has been alone for [`ALONE_NS`] may take longer turns than others would bear:
//!    a guest that comes then waits for one of them, once. A guest that comes ten times in a second
//!    or more keeps the turns of the others short.
//! 5. A guest pays its lead off by waiting, and by nothing else: it cannot lose its lead by
//!    stopping a queue and starting it again. While a guest has no hot queue, its lead falls as
//!    fast as time passes, for the others can have had no more time than that.
//! 6. An order of a front-end waits like a turn while its guest is ahead, and its time is charged
//!    to the guest: a front-end that gives orders without end has its share, and no more. No lead
//!    grows above [`LEAD_NS_MAX`]: nobody waits for longer than that beside each other guest.

/// Nanoseconds by which a guest may be ahead of another guest with work on the same worker.
pub const LEAD_NS: u64 = 100_000;
/// The maximum of a lead, in nanoseconds.
pub const LEAD_NS_MAX: u64 = 20_000_000;
/// A guest is alone if no other guest has had work for this many nanoseconds.
pub const ALONE_NS: u64 = 100_000_000;

/// Whether a guest has work in the present round.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum RoundWork {
    /// The guest had no turn in the round, or only turns without work.
    #[default]
    Idle,
    /// The guest had a turn with work, or [`Shares::may_turn`] refused it a turn.
    Busy,
}

#[derive(Clone, Copy, Debug, Default)]
struct Guest {
    /// How far the guest was ahead at `at_ns`, in nanoseconds.
    lead_ns: u64,
    at_ns: u64,
    /// The last round in which the guest had a hot queue.
    round: u64,
    /// The round in which the guest takes no further turns.
    rests_in: u64,
    came: RoundWork,
}

impl Guest {
    /// Subtracts from the lead the time until `now_ns`, in which the guest had no hot queue.
    #[inline]
    fn wait_until(&mut self, now_ns: u64) {
        self.lead_ns = self.lead_ns.saturating_sub(now_ns.saturating_sub(self.at_ns));
        self.at_ns = now_ns;
    }

    #[inline]
    fn add(&mut self, ns: u64) {
        self.lead_ns = self.lead_ns.saturating_add(ns).min(LEAD_NS_MAX);
    }
}

/// The lead of each guest, and the state of the present round.
#[derive(Clone, Debug, Default)]
pub struct Shares {
    guests: Vec<Guest>,
    /// The guests that have had a hot queue in the present round.
    seen: Vec<usize>,
    round: u64,
    /// When the present round began, in nanoseconds.
    now_ns: u64,
    /// True if several guests have hot queues in the present round.
    is_divided: bool,
    /// The time of the last round with hot queues of several guests.
    divided_at_ns: u64,
    is_alone: bool,
}

impl Shares {
    /// Begins a round, and closes the accounts of the one before. `is_divided`: several guests have
    /// hot queues. The value holds for the whole round, so that a new guest does not wait for a
    /// full round of another guest.
    #[inline]
    pub fn begin_round(&mut self, is_divided: bool, now_ns: u64) {
        self.round += 1;
        self.now_ns = now_ns;
        if self.is_divided {
            self.level();
        }
        self.is_divided = is_divided;
        if is_divided {
            self.divided_at_ns = now_ns;
        }
        self.is_alone = now_ns.saturating_sub(self.divided_at_ns) >= ALONE_NS;
        self.seen.clear();
    }

    /// True if the guest that has work now is the only one that has had any for [`ALONE_NS`].
    #[must_use]
    #[inline]
    pub fn is_alone(&self) -> bool {
        self.is_alone
    }

    /// Lifts the idle guests, and subtracts the lowest lead of the busy guests from all leads. If
    /// no guest was busy, all leads become 0.
    fn level(&mut self) {
        let Self { guests, seen, now_ns, .. } = self;
        let busy =
            seen.iter().map(|guest| guests[*guest]).filter(|guest| guest.came == RoundWork::Busy);
        let lowest_ns = busy.map(|guest| guest.lead_ns).min().unwrap_or(u64::MAX);
        for guest in &*seen {
            // The lead of an idle guest below the lowest lead was lifted to it, so it becomes 0.
            guests[*guest].lead_ns = guests[*guest].lead_ns.saturating_sub(lowest_ns);
            guests[*guest].at_ns = *now_ns;
        }
    }

    /// True if several guests have hot queues, so that the caller must charge the time of turns.
    #[must_use]
    #[inline]
    pub fn is_divided(&self) -> bool {
        self.is_divided
    }

    /// True if a hot queue of `guest` may take its turn in this round. Guests have small numbers,
    /// which are indexes of a list.
    #[must_use]
    #[inline]
    pub fn may_turn(&mut self, guest: usize) -> bool {
        match self.guests.get(guest) {
            Some(known) if known.round == self.round => {}
            _ => self.see(guest),
        }
        let known = &self.guests[guest];
        if self.is_divided && (known.lead_ns >= LEAD_NS || known.rests_in == self.round) {
            self.guests[guest].came = RoundWork::Busy;
            return false;
        }
        true
    }

    /// Records the first hot queue of a guest in this round.
    fn see(&mut self, guest: usize) {
        let (round, now_ns) = (self.round, self.now_ns);
        let known = self.known(guest);
        // If the lead was adjusted when this round began, no time has passed, and the lead stays.
        known.wait_until(now_ns);
        (known.round, known.came) = (round, RoundWork::Idle);
        self.seen.push(guest);
    }

    fn known(&mut self, guest: usize) -> &mut Guest {
        if self.guests.len() <= guest {
            self.guests.resize(guest + 1, Guest::default());
        }
        &mut self.guests[guest]
    }

    /// Charges `guest` with the time of a turn that [`Self::may_turn`] has allowed. Does nothing
    /// while [`Self::is_divided`] is false. A turn without work is charged as well: a guest can
    /// have hundreds of queues that must be polled.
    #[inline]
    pub fn charge(&mut self, guest: usize, ns: u64, worked: bool) {
        if let Some(known) = self.guests.get_mut(guest).filter(|_| self.is_divided) {
            known.add(ns);
            if worked {
                known.came = RoundWork::Busy;
            }
        }
    }

    /// Ends the guest's turns in this round, after a long one, so that other guests have theirs
    /// before the guest's next turn.
    pub fn rest(&mut self, guest: usize) {
        let round = self.round;
        self.known(guest).rests_in = round;
    }

    /// True if the worker may follow an order for a queue of `guest` between two rounds.
    #[must_use]
    pub fn may_order(&self, guest: usize, now_ns: u64) -> bool {
        let Some(known) = self.guests.get(guest) else { return true };
        // The lead of a guest that had no hot queue in the last round has fallen since.
        let waited_ns =
            if known.round == self.round { 0 } else { now_ns.saturating_sub(known.at_ns) };
        !self.is_divided || known.lead_ns.saturating_sub(waited_ns) < LEAD_NS
    }

    /// Charges `guest` with `ns`, in which the worker followed an order for one of its queues
    /// between two rounds. The order was done at `now_ns`.
    pub fn charge_order(&mut self, guest: usize, ns: u64, now_ns: u64) {
        let round = self.round;
        let known = self.known(guest);
        // A guest that had hot queues in the last round is levelled when the next one begins.
        if known.round != round {
            known.wait_until(now_ns.saturating_sub(ns));
        }
        known.at_ns = now_ns;
        known.add(ns);
    }

    /// True if `guest` would have a lead if it came back at `now_ns`. While this is true, its
    /// number must not be given to another guest.
    #[must_use]
    pub fn is_ahead(&self, guest: usize, now_ns: u64) -> bool {
        let known = self.guests.get(guest);
        known.is_some_and(|known| known.lead_ns > now_ns.saturating_sub(known.at_ns))
    }

    /// Resets the lead of the number `guest`, which names another guest from now on.
    pub fn forget(&mut self, guest: usize) {
        *self.known(guest) = Guest::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Plays rounds over queues, each given by its guest and the time of its turn (0: it has
    /// nothing to do). Returns how many turns with work each queue had.
    fn play(queues: &[(usize, u64)], rounds: usize) -> Vec<u64> {
        let mut shares = Shares::default();
        let mut turns = vec![0; queues.len()];
        for round in 0..rounds {
            shares.begin_round(queues.iter().any(|(guest, _)| *guest != queues[0].0), 0);
            for step in 0..queues.len() {
                let at = (round + step) % queues.len();
                let (guest, turn_ns) = queues[at];
                if shares.may_turn(guest) && turn_ns > 0 {
                    turns[at] += 1;
                    shares.charge(guest, turn_ns, true);
                }
            }
        }
        turns
    }

    #[test]
    fn a_guest_that_rests_takes_its_next_turn_in_the_next_round_if_it_is_not_ahead() {
        let mut shares = Shares::default();
        shares.begin_round(true, 1000);
        assert!(shares.may_turn(0) && shares.may_turn(1));
        shares.rest(0);
        assert!(!shares.may_turn(0) && shares.may_turn(1));
        shares.begin_round(true, 2000);
        assert!(shares.may_turn(0) && shares.may_turn(1));
        // Nobody else is there.
        shares.rest(0);
        shares.begin_round(false, 3000);
        shares.rest(0);
        assert!(shares.may_turn(0));
    }

    #[test]
    fn a_guest_of_many_queues_gets_as_much_as_a_guest_of_one() {
        for turn_ns in [1000, LEAD_NS / 3, 4 * LEAD_NS] {
            let queues = [vec![(0, turn_ns); 64], vec![(1, turn_ns)]].concat();
            let turns = play(&queues, 10_000);
            let many: u64 = turns[..64].iter().sum();
            assert!(turns[64].abs_diff(many) < many / 20 + 200, "{turn_ns}: {turns:?}");
            assert!(turns[..64].iter().all(|turns| *turns > 0), "{turn_ns}: {turns:?}");
        }
    }

    #[test]
    fn long_turns_cost_the_guest_that_takes_them() {
        let turns = play(&[(0, 10 * LEAD_NS), (1, LEAD_NS / 10)], 10_000);
        assert!(turns[1] > 80 * turns[0], "{turns:?}");
    }

    #[test]
    fn nobody_waits_for_a_guest_that_has_nothing_to_do() {
        let turns = play(&[(0, 10 * LEAD_NS), (1, 0), (2, 0)], 1000);
        assert_eq!(turns, [1000, 0, 0]);
    }

    #[test]
    fn a_guest_that_needs_little_does_not_wait_for_the_debt_of_another_one() {
        for turns_ns in [[4 * LEAD_NS, LEAD_NS / 10], [LEAD_NS / 2, LEAD_NS / 30]] {
            let (mut shares, mut waited, mut served) = (Shares::default(), 0, 0);
            let mut has_request = false;
            for round in 0..10_000 {
                shares.begin_round(true, 0);
                for (guest, turn_ns) in turns_ns.into_iter().enumerate() {
                    if shares.may_turn(guest) {
                        shares.charge(guest, turn_ns, true);
                    }
                }
                has_request |= round % 7 == 0;
                if !shares.may_turn(2) {
                    waited += u64::from(has_request);
                } else if std::mem::take(&mut has_request) {
                    served += 1;
                    shares.charge(2, LEAD_NS / 100, true);
                } else {
                    shares.charge(2, LEAD_NS / 1000, false);
                }
            }
            assert_eq!((served, waited), (10_000_u64.div_ceil(7), 0), "{turns_ns:?}");
        }
    }

    #[test]
    fn looks_at_hundreds_of_idle_queues_take_no_more_time_than_the_work_of_another_guest() {
        let (mut shares, mut spent_ns) = (Shares::default(), [0, 0]);
        for _ in 0..10_000 {
            shares.begin_round(true, 0);
            for (guest, turn_ns, worked) in [(0, 2000, true), (1, LEAD_NS, false)] {
                if shares.may_turn(guest) {
                    spent_ns[guest] += turn_ns;
                    shares.charge(guest, turn_ns, worked);
                }
            }
        }
        assert!(spent_ns[0] > spent_ns[1] * 9 / 10, "{spent_ns:?}");
    }

    #[test]
    fn a_guest_that_was_away_has_saved_nothing_up() {
        let mut shares = Shares::default();
        let mut turns = [0, 0];
        for round in 0..2000 {
            // The second one comes in the middle.
            let here = if round < 1000 { 1 } else { 2 };
            shares.begin_round(here > 1, 0);
            for (guest, turns) in turns.iter_mut().enumerate().take(here) {
                if shares.may_turn(guest) {
                    *turns += u64::from(round >= 1000);
                    shares.charge(guest, LEAD_NS / 2, true);
                }
            }
        }
        assert!(turns[0].abs_diff(turns[1]) < 10, "{turns:?}");
    }

    #[test]
    fn a_guest_that_blinks_keeps_its_lead_but_for_the_time_it_was_away() {
        // Four queues take 1 ms in a turn each; the guest is away in every second round.
        let (mut shares, mut now_ns, mut spent_ns) = (Shares::default(), 0, [0_u64; 2]);
        for round in 0..10_000 {
            let turns = [1, if round % 2 == 0 { 4 } else { 0 }];
            shares.begin_round(turns[1] > 0, now_ns);
            for (guest, turn_ns) in [(0, LEAD_NS / 5), (1, 10 * LEAD_NS)] {
                for _ in 0..turns[guest] {
                    if shares.may_turn(guest) {
                        shares.charge(guest, turn_ns, true);
                        spent_ns[guest] += turn_ns;
                        now_ns += turn_ns;
                    }
                }
            }
        }
        assert!(spent_ns[0] > spent_ns[1] * 9 / 10, "{spent_ns:?}");
        assert!(spent_ns[1] > spent_ns[0] / 3, "{spent_ns:?}");
    }

    #[test]
    fn an_order_is_paid_by_waiting_whether_its_guest_is_here_or_away() {
        for is_here in [true, false] {
            let mut shares = Shares::default();
            let round = |shares: &mut Shares, now_ns: u64, turn_ns| {
                shares.begin_round(true, now_ns);
                let may = [0, 1].map(|guest| (is_here || guest == 0) && shares.may_turn(guest));
                shares.charge(0, turn_ns, true);
                may[1]
            };
            assert_eq!(round(&mut shares, 1000, 10), is_here);
            // The order comes between two rounds.
            let (ends_ns, took_ns) = (6_000_000, 5_000_000);
            shares.charge_order(1, took_ns, ends_ns);
            assert!(!round(&mut shares, ends_ns - took_ns, LEAD_NS));
            assert!(is_here || shares.is_ahead(1, ends_ns));
            let rounds = took_ns / LEAD_NS;
            let waited = (1..=2 * rounds).find(|count| {
                shares.begin_round(true, ends_ns + count * LEAD_NS);
                let may = shares.may_turn(1);
                assert!(shares.may_turn(0));
                shares.charge(0, LEAD_NS, true);
                may
            });
            assert!(waited.is_some_and(|count| count.abs_diff(rounds) <= 3), "{waited:?}");
        }
    }

    #[test]
    fn a_lead_has_an_end_and_its_number_is_kept_until_then() {
        let mut shares = Shares::default();
        shares.begin_round(true, 0);
        (0..1000).for_each(|_| shares.charge_order(3, LEAD_NS_MAX / 2, 7));
        assert!(shares.is_ahead(3, 7 + LEAD_NS_MAX - 1));
        assert!(!shares.is_ahead(3, 7 + LEAD_NS_MAX));
        assert!(!shares.is_ahead(2, 7) && !shares.is_ahead(99, 7));
        shares.begin_round(true, 8);
        assert!(!shares.may_turn(3));
        shares.forget(3);
        shares.begin_round(true, 9);
        assert!(shares.may_turn(3) && !shares.is_ahead(3, 9));
    }

    #[test]
    fn a_guest_alone_has_every_turn_of_all_its_queues() {
        assert_eq!(play(&[(0, 10 * LEAD_NS); 8], 10), [10; 8]);
    }

    #[test]
    fn a_guest_is_alone_when_nobody_else_has_come_for_a_while() {
        let mut shares = Shares::default();
        let second = 1_000_000_000;
        for (now_ns, is_divided, is_alone) in [
            (second, false, true),
            (second + 1, true, false),
            (second + 2, false, false),
            (second + ALONE_NS, false, false),
            (second + ALONE_NS + 1, false, true),
            // One that comes now and then keeps it short for the whole time.
            (2 * second, true, false),
            (2 * second + ALONE_NS - 1, false, false),
            (2 * second + ALONE_NS - 1, true, false),
            (2 * second + 2 * ALONE_NS - 2, false, false),
            (2 * second + 2 * ALONE_NS - 1, false, true),
            // A clock that the worker has not read anew.
            (second, false, false),
        ] {
            shares.begin_round(is_divided, now_ns);
            assert_eq!(shares.is_alone(), is_alone, "{now_ns} {is_divided}");
        }
    }
}
