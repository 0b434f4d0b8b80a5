//! `Quota`: how many bytes a queue may copy on its worker's thread before the next queue's turn;
//! `Patience`: how often a disk may answer "again". Pure: no clock, no I/O.

/// Bytes of a turn of a queue that goes on with the rest in its next turn. Copying them takes some
/// 15 microseconds from the page cache, some 90 if pages must be allocated. A smaller quota would
/// give the next queue its turn sooner, but the system call for each piece would begin to show.
pub(crate) const PIECE: u64 = 128 << 10;
/// Bytes of a turn of a queue that gives the rest to a kernel thread, which costs twice as much.
pub(crate) const BURST: u64 = 256 << 10;

/// What is left of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Quota {
    turn: u64,
    left: u64,
}

impl Quota {
    /// A quota of `turn` bytes for each turn.
    pub(crate) fn new(turn: u64) -> Self {
        Self { turn, left: turn }
    }

    /// The next turn begins.
    pub(crate) fn renew(&mut self) {
        self.left = self.turn;
    }

    /// Takes all of `bytes`; or takes nothing and returns false. For work that is not cut.
    pub(crate) fn take(&mut self, bytes: u64) -> bool {
        let fits = bytes <= self.left;
        if fits {
            self.left -= bytes;
        }
        fits
    }

    /// Takes as many of `bytes` as are left: for work that is done piece by piece.
    pub(crate) fn take_part(&mut self, bytes: u64) -> u64 {
        let part = bytes.min(self.left);
        self.left -= part;
        part
    }
}

/// How often in a row a disk may answer a request with `EAGAIN` or `EINTR`. A try takes
/// microseconds, so the limit is long enough for a shortage to pass, and each request ends.
const AGAIN_MAX: u32 = 1000;

/// How often the disk has said "again" since the request last went on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Patience {
    spent: u32,
}

impl Patience {
    /// Counts an answer "again". False if there were too many in a row: the request has failed.
    pub(crate) fn may_try_again(&mut self) -> bool {
        self.spent += 1;
        self.spent <= AGAIN_MAX
    }

    /// True if the last answer of the disk was "again".
    pub(crate) fn is_tried(self) -> bool {
        self.spent > 0
    }

    /// The request went on: begins to count anew.
    pub(crate) fn renew(&mut self) {
        self.spent = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_takes_whole_requests_until_one_does_not_fit() {
        for (requests, expected) in [
            (&[4096, 4096][..], &[true, true][..]),
            (&[PIECE, 1], &[true, false]),
            (&[PIECE + 1, PIECE], &[false, true]),
            (&[PIECE - 512, 1024, 512], &[true, false, true]),
        ] {
            let mut quota = Quota::new(PIECE);
            let taken: Vec<_> = requests.iter().map(|bytes| quota.take(*bytes)).collect();
            assert_eq!(taken, expected, "{requests:?}");
        }
    }

    #[test]
    fn a_long_request_has_a_piece_in_each_turn() {
        let (mut quota, mut left, mut turns) = (Quota::new(PIECE), 4 * PIECE + 1, 0);
        while left > 0 {
            left -= quota.take_part(left);
            assert!(left == 0 || !quota.take(1), "the turn is spent");
            quota.renew();
            turns += 1;
        }
        assert_eq!(turns, 5);
    }

    #[test]
    fn patience_ends_unless_the_request_goes_on() {
        let mut patience = Patience::default();
        assert!(!patience.is_tried());
        assert!((0..AGAIN_MAX).all(|_| patience.may_try_again()));
        patience.renew();
        assert!((0..AGAIN_MAX).all(|_| patience.may_try_again()));
        assert!(!patience.may_try_again());
    }
}
