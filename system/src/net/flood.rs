//! A flood of echoes from one guest of a daemon to another, and what the daemon counts of it.

use crate::daemon::{Counters, Daemon};
use crate::guest::Guest;
use crate::{Outcome, check};
use std::time::Duration;

/// Echoes that the word `floods` of a guest's script sends.
const ECHOES: u64 = 5000;

/// Where a net device has its first receiveq and its first transmitq among its queues.
const RECEIVES: usize = 0;
const TRANSMITS: usize = 1;

/// Lets a guest, whose script comes to `floods` next, flood another guest. Each echo and each
/// answer is counted by the device of its sender and by that of its receiver, and no queue of the
/// two drops any.
///
/// # Errors
/// The guest has lost echoes, or the daemon has counted fewer or dropped some.
pub fn flood(daemon: &Daemon, guest: &mut Guest, devices: [&str; 2], limit: Duration) -> Outcome {
    let counted = || -> Outcome<Vec<Vec<Counters>>> {
        devices.iter().map(|device| daemon.queues_of(device)).collect()
    };
    guest.reach("flood", limit)?;
    let before = counted()?;
    guest.proceed()?;
    guest.reach("flooded", limit)?;
    let after = counted()?;
    for (device, (before, after)) in devices.iter().zip(before.iter().zip(&after)) {
        for (queue, what) in [(RECEIVES, "received"), (TRANSMITS, "sent")] {
            let (before, after) = (&before[queue], &after[queue]);
            let packets = after.value("packets")? - before.value("packets")?;
            check(packets >= ECHOES, || {
                format!("{device} has {what} {packets} frames of {ECHOES} echoes")
            })?;
            // A guest's filter drops what other guests say to groups that it has not joined.
            let is_loss = |(name, _): &(String, u64)| name != "dropped_filtered";
            let drops = |all: &Counters| -> Vec<_> {
                all.starting_with("dropped").into_iter().filter(is_loss).collect()
            };
            check(drops(after) == drops(before), || {
                format!("{device} has dropped frames of a flood: {:?}", drops(after))
            })?;
        }
    }
    guest.proceed()
}
