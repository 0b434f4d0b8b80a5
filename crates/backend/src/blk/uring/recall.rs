//! Takes requests back when their queue stops: those that no thread has begun to serve.

use super::UringQueue;
use super::in_flight::Stage;
use crate::sys::uring::Ring;

impl UringQueue {
    /// Takes back a request that waits for a kernel thread, or for the disk's own thread. Returns
    /// true if it was taken back. If a thread has begun to serve it, a long transfer ends after its
    /// present piece.
    pub(super) fn take_back(&mut self, token: u32, ring: &mut Ring) -> bool {
        let Some(entry) = self.in_flight.get_mut(token as usize) else { return false };
        let user_data = self.tag | u64::from(token);
        let is_taken = match (entry.stage, self.disk) {
            (Stage::Transfer, Some(disk)) => ring.recall(disk, user_data),
            (Stage::Aside, _) => self.offload.recall(ring.inbox(), user_data),
            _ => false,
        };
        if is_taken {
            self.close(token);
        } else {
            entry.is_recalled = true;
        }
        is_taken
    }
}
