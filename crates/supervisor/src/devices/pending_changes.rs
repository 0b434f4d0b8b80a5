//! Changes that are put off until an earlier change is done, and the limits of their number.

use super::admit::is_bound;
use crate::model::{Order, Refused};
use std::collections::VecDeque;

/// The most put-off changes of one user to one device. Further ones are refused.
const OF_DEVICE_MAX: usize = 2;
/// The most put-off changes of one user, to all devices together.
const OF_USER_MAX: usize = 4;
/// The most put-off changes of root, and of the daemon's user: tools run as these users change the
/// devices of many guests.
const OF_ROOT_MAX: usize = 16;
/// The most put-off changes of all other users together.
const PUT_OFF_MAX: usize = 64;

/// The changes that are put off, the oldest first.
#[derive(Debug, Default)]
pub(super) struct PutOff(VecDeque<Order>);

impl PutOff {
    /// Puts a change off; refuses it if its user has too many put-off changes.
    pub(super) fn add(&mut self, order: Order) {
        if self.has_room(&order) {
            self.0.push_back(order);
        } else {
            let _ = order.answer.send(Err(Refused::Busy));
        }
    }

    /// True if a change of this device is put off.
    pub(super) fn names(&self, device: &str) -> bool {
        self.0.iter().any(|order| order.change.device() == Some(device))
    }

    /// Removes and returns all changes, the oldest first.
    pub(super) fn take(&mut self) -> VecDeque<Order> {
        std::mem::take(&mut self.0)
    }

    fn has_room(&self, Order { change, who, follows, .. }: &Order) -> bool {
        let asked = || self.0.iter().filter(|order| !order.follows);
        let of_user = asked().filter(|order| order.who.uid == who.uid);
        // Changes of the daemon itself are never refused: each device causes a bounded number of
        // them, and the daemon does not ask again.
        if *follows {
            return true;
        }
        if !is_bound(who.uid) {
            return of_user.count() < OF_ROOT_MAX;
        }
        let is_of_device = |order: &&Order| order.change.device() == change.device();
        let of_device = of_user.clone().filter(is_of_device).count();
        let all = asked().filter(|order| is_bound(order.who.uid)).count();
        of_device < OF_DEVICE_MAX && of_user.count() < OF_USER_MAX && all < PUT_OFF_MAX
    }
}
