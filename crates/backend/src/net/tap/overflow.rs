//! Whether the queues of an interface share one queue length (`txqueuelen`), or each has the whole
//! length: decided by the frames that are lost because a queue is full.
//!
//! TCP senders fill a queue of any length, so several queues lose fewer frames if they share one
//! length. A burst to one queue needs the whole length there. So each choice loses frames of one
//! kind of load:
//!
//! ```text
//! shared:  few frames were lost for CALM looks       each queue gets the whole length
//!          RETRY looks, though many are lost         the same, on trial: these may be bursts
//! whole:   many were lost in LOSSY of RECENT looks   shared; both waits are doubled
//!          RETRY looks have passed                   both waits are as at first
//! ```
//! 1. A look is one second, and more where nothing changes ([`Overflow::is_settled`]). A change
//!    takes the interface out of service for a moment, and loses the frames of that moment.
//! 2. The interface begins shared, so TCP that begins at once does not fill several queues of the
//!    whole length.
//! 3. Whatever the guest does, two changes take [`CALM`] and [`LOSSY`] looks at least, and sixteen
//!    times as long where the whole length fails again and again.

/// Frames lost in a look that are many: a queue of the whole length that overflows now and then
/// loses fewer.
const MANY: u64 = 100;
/// So many of the last [`RECENT`] looks must have lost many frames: one alone is a burst. TCP that
/// fills queues of the whole length loses thousands of frames at once, and then none for some
/// seconds.
const LOSSY: u32 = 2;
const RECENT: u32 = 16;
/// Looks without many losses that end a load.
const CALM: u32 = 10;
/// Looks until the whole length is tried although frames are lost.
const RETRY: u32 = 30;
/// Both waits are this many times as long at most.
const FACTOR_MAX: u32 = 16;

/// The state of one interface.
#[derive(Debug)]
pub(super) struct Overflow {
    is_whole: bool,
    /// The frames that were lost until the last look.
    lost: Option<u64>,
    /// The last looks, the latest in bit 0: 1 for many losses.
    recent: u32,
    /// Looks since many frames were lost, and since the last change.
    calm: u32,
    since_change: u32,
    /// How many times as long both waits are.
    factor: u32,
}

impl Default for Overflow {
    fn default() -> Self {
        let (recent, calm, since_change) = (0, 0, 0);
        Self { is_whole: false, lost: None, recent, calm, since_change, factor: 1 }
    }
}

impl Overflow {
    /// True if each queue has the whole length.
    pub(super) fn is_whole(&self) -> bool {
        self.is_whole
    }

    /// True if each queue has the whole length and no recent look found many losses: the next look
    /// can come later than in a second.
    pub(super) fn is_settled(&self) -> bool {
        self.is_whole && self.recent == 0
    }

    /// Looks at the number of frames that were lost in all. True: [`Self::is_whole`] has changed.
    pub(super) fn look(&mut self, lost: u64) -> bool {
        let before = self.lost.replace(lost).unwrap_or(lost);
        let is_lossy = lost.saturating_sub(before) >= MANY;
        self.recent = (self.recent << 1 | u32::from(is_lossy)) & ((1 << RECENT) - 1);
        self.calm = if is_lossy { 0 } else { self.calm.saturating_add(1) };
        self.since_change = self.since_change.saturating_add(1);
        if self.is_whole && self.since_change >= RETRY {
            self.factor = 1;
        }
        let is_over = match self.is_whole {
            true => self.recent.count_ones() >= LOSSY,
            false => self.calm >= CALM * self.factor || self.since_change >= RETRY * self.factor,
        };
        if is_over {
            if self.is_whole {
                self.factor = (self.factor * 2).min(FACTOR_MAX);
            }
            (self.is_whole, self.recent, self.since_change) = (!self.is_whole, 0, 0);
            self.calm = 0;
        }
        is_over
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An interface, and what is lost of a load in each look while it is shared or whole.
    #[derive(Default)]
    struct Simulated {
        overflow: Overflow,
        lost: u64,
        changes: Vec<u32>,
        looks: u32,
    }

    impl Simulated {
        fn run(&mut self, looks: u32, load: impl Fn(u32, bool) -> u64) -> &mut Self {
            for look in 0..looks {
                self.lost += load(look, self.overflow.is_whole());
                self.looks += 1;
                if self.overflow.look(self.lost) {
                    self.changes.push(self.looks);
                }
            }
            self
        }
    }

    /// Streams that fill a queue of any length, and bursts that fit into one of the whole length.
    const STREAMS: fn(u32, bool) -> u64 = |_, is_whole| if is_whole { 6000 } else { 1000 };
    const BURSTS: fn(u32, bool) -> u64 = |_, is_whole| if is_whole { 4 } else { 30_000 };
    const NOTHING: fn(u32, bool) -> u64 = |_, _| 0;

    #[test]
    fn streams_share_one_length_nearly_all_the_time() {
        let mut simulated = Simulated::default();
        let whole = std::cell::Cell::new(0_u32);
        simulated.run(3600, |_, is_whole| {
            whole.set(whole.get() + u32::from(is_whole));
            STREAMS(0, is_whole)
        });
        // Trials of two seconds after 30, 60, 120, 240, 480, 480 .. seconds.
        assert!(whole.get() <= 24, "{}", whole.get());
        assert!(simulated.changes.len() <= 24, "{:?}", simulated.changes);
    }

    #[test]
    fn streams_that_lose_much_at_once_and_then_nothing_for_long_share_one_length() {
        let mut simulated = Simulated::default();
        let whole = std::cell::Cell::new(0_u32);
        simulated.run(60, NOTHING).run(3600, |look, is_whole| {
            whole.set(whole.get() + u32::from(is_whole));
            match is_whole {
                true => u64::from(look % 8 == 7) * 3000,
                false => 150,
            }
        });
        assert!(whole.get() < 360, "{}", whole.get());
        assert!(simulated.changes.len() <= 24, "{:?}", simulated.changes);
    }

    #[test]
    fn bursts_get_the_whole_length_and_keep_it() {
        let mut simulated = Simulated::default();
        simulated.run(3600, BURSTS);
        assert_eq!(simulated.changes, [RETRY], "the trial is no failure");
        // After a pause they have it at once.
        let mut simulated = Simulated::default();
        simulated.run(CALM, NOTHING).run(3600, BURSTS);
        assert_eq!(simulated.changes, [CALM]);
    }

    #[test]
    fn streams_after_a_pause_share_again_within_seconds() {
        let mut simulated = Simulated::default();
        simulated.run(60, NOTHING).run(5, STREAMS);
        assert_eq!(simulated.changes, [CALM, 62]);
        // The load becomes another one in the middle: bursts are tried again in time.
        simulated.run(RETRY * 2, BURSTS);
        assert!(simulated.overflow.is_whole(), "{:?}", simulated.changes);
        // One burst that is longer than the whole length changes nothing.
        simulated.run(100, |look, _| if look == 50 { 5000 } else { 0 });
        assert!(simulated.overflow.is_whole(), "{:?}", simulated.changes);
    }

    #[test]
    fn no_guest_makes_the_length_change_without_end() {
        // Loads that lose for a while and rest for a while, at the border of what counts.
        for (lossy, calm) in [(1, 1), (2, 1), (2, 10), (1, 3), (5, 9), (3, 11), (30, 10)] {
            for lost in [MANY - 1, MANY, 10_000] {
                let load = |look: u32, _| if look % (lossy + calm) < lossy { lost } else { 0 };
                let mut simulated = Simulated::default();
                simulated.run(10_000, load);
                let bound = 2 * 10_000 / (CALM + LOSSY) as usize;
                assert!(simulated.changes.len() <= bound, "{lossy} {calm} {lost}");
            }
        }
        // The worst guest knows the state.
        let mut simulated = Simulated::default();
        simulated.run(10_000, |_, is_whole| if is_whole { 10_000 } else { 0 });
        let changes = simulated.changes.len();
        let bound = 2 * (10_000 / (CALM * FACTOR_MAX + LOSSY) + 5) as usize;
        assert!(changes <= bound, "{changes}");
    }

    #[test]
    fn a_counter_that_begins_anew_is_no_loss() {
        let mut overflow = Overflow::default();
        assert!((0..CALM).any(|_| overflow.look(1_000_000)));
        assert!(!overflow.look(0) && !overflow.look(0));
        assert!(overflow.is_whole());
    }
}
