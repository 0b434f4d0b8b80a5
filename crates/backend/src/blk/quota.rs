//! `Quota`: how many bytes a queue may copy on its worker's thread before the next queue's turn.
//! `Retries`: how often a disk may answer "again". Pure: no clock, no I/O.

/// The quota of a turn, in bytes, for a queue that continues a transfer in its next turn. Copying
/// so much takes some 15 microseconds from the page cache, some 90 if pages must be allocated. With
/// a smaller quota the next queue would wait less, but each piece costs a system call.
pub(crate) const PIECE: u64 = 128 << 10;
/// The quota of a turn, in bytes, for a queue that leaves the rest to a kernel thread, at twice the
/// cost.
pub(crate) const BURST: u64 = 256 << 10;

/// The bytes that a queue may still copy in its present turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Quota {
    turn: u64,
    left: u64,
}

impl Quota {
    /// Makes a quota of `turn` bytes for each turn.
    pub(crate) fn new(turn: u64) -> Self {
        Self { turn, left: turn }
    }

    /// Begins the next turn.
    pub(crate) fn renew(&mut self) {
        self.left = self.turn;
    }

    /// Charges `bytes` if the quota covers all of them, else charges nothing and returns false: for
    /// a transfer that is not split.
    pub(crate) fn take(&mut self, bytes: u64) -> bool {
        let fits = bytes <= self.left;
        if fits {
            self.left -= bytes;
        }
        fits
    }

    /// Charges `bytes`, or the rest of the quota if that is less, and returns that number. A
    /// transfer in pieces calls this for each piece.
    pub(crate) fn take_part(&mut self, bytes: u64) -> u64 {
        let part = bytes.min(self.left);
        self.left -= part;
        part
    }
}

/// How often in a row a disk may answer a request with `EAGAIN` or `EINTR` before the request
/// fails. A try takes microseconds, so a thousand of them outlast a short lack of memory, and yet
/// each request ends.
const AGAIN_MAX: u32 = 1000;

/// How often in a row the disk has answered a request with `EAGAIN` or `EINTR`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Retries {
    spent: u32,
}

impl Retries {
    /// Counts an answer `EAGAIN` or `EINTR`. Returns false if there were too many, so that the
    /// request must fail.
    pub(crate) fn may_try_again(&mut self) -> bool {
        self.spent += 1;
        self.spent <= AGAIN_MAX
    }

    /// True if the last answer of the disk was `EAGAIN` or `EINTR`.
    pub(crate) fn is_tried(self) -> bool {
        self.spent > 0
    }

    /// Resets the count, because some bytes of the request were transferred.
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
    fn retries_end_unless_the_request_goes_on() {
        let mut retries = Retries::default();
        assert!(!retries.is_tried());
        assert!((0..AGAIN_MAX).all(|_| retries.may_try_again()));
        retries.renew();
        assert!((0..AGAIN_MAX).all(|_| retries.may_try_again()));
        assert!(!retries.may_try_again());
    }
}
