//! A hostile guest: every second another trick, until it is killed.

mod messages;
mod rings;

pub(in crate::soak) use rings::DISK_SIZE;

use super::{Orders, Role};
use crate::soak::random::Random;
use crate::{Outcome, check};
use manyring_driver::wire::blk::{VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_WRITE_ZEROES};
use manyring_driver::{
    BlkDriver, BlkDriverOptions, DriverError, FrontEnd, NetDriver, NetDriverOptions,
};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The result of a trick: its end, or the daemon's answer to it.
type Played = Result<(), DriverError>;

/// A way to be hostile, on a disk, a network or either.
struct Trick {
    name: &'static str,
    device: Option<Role>,
    play: fn(&mut Hostile<'_>) -> Played,
}

const fn any(name: &'static str, play: fn(&mut Hostile<'_>) -> Played) -> Trick {
    Trick { name, device: None, play }
}

const fn of(role: Role, name: &'static str, play: fn(&mut Hostile<'_>) -> Played) -> Trick {
    Trick { name, device: Some(role), play }
}

const TRICKS: &[Trick] = &[
    any("half-messages", messages::half_messages),
    any("reconnect-storm", messages::reconnect_storm),
    any("odd-doorbells", messages::odd_doorbells),
    any("unexpected-fds", messages::unexpected_fds),
    any("moved-memory", messages::moved_memory),
    any("cut-memory", messages::cut_memory),
    any("punched-memory", messages::punched_memory),
    any("held-lock", messages::held_lock),
    any("many-waiters", messages::many_waiters),
    any("blocking-call", messages::blocking_call),
    any("kick-flood", rings::kick_flood),
    of(Role::HostileBlk, "spoiled-requests", rings::spoiled_requests),
    of(Role::HostileBlk, "racing-header", rings::racing_header),
    of(Role::HostileBlk, "giant-reads", rings::giant_reads),
    of(Role::HostileBlk, "giant-zeroes", rings::giant_zeroes),
    of(Role::HostileBlk, "giant-discards", rings::giant_discards),
    of(Role::HostileBlk, "request-flood", rings::request_flood),
    of(Role::HostileNet, "spoiled-frames", rings::spoiled_frames),
    of(Role::HostileNet, "frame-flood", rings::frame_flood),
];

/// How long one trick is played.
const TURN: Duration = Duration::from_secs(1);
/// Between two times that a trick is played.
const PAUSE: Duration = Duration::from_millis(20);
/// The longest time for a socket that another session still holds.
const TIMEOUT: Duration = Duration::from_secs(2);

/// A hostile guest in the middle of a trick.
struct Hostile<'a> {
    socket: &'a Path,
    role: Role,
    random: Random,
    stop: &'a AtomicBool,
    end: Instant,
}

/// Fails unless `names`, with commas between, are tricks.
pub(in crate::soak) fn check_names(names: &str) -> Outcome {
    for name in names.split(',').filter(|name| !name.is_empty()) {
        check(TRICKS.iter().any(|trick| trick.name == name), || {
            let all: Vec<_> = TRICKS.iter().map(|trick| trick.name).collect();
            format!("no trick is called {name:?}; there are {}", all.join(", "))
        })?;
    }
    Ok(())
}

/// Plays tricks until `stop`. The daemon may answer them as it likes: no failure of a trick is an
/// error.
pub(super) fn run(orders: &Orders, stop: &AtomicBool) -> Outcome {
    let is_wanted =
        |trick: &&Trick| orders.more.is_empty() || orders.more.split(',').any(|n| n == trick.name);
    let is_possible = |trick: &&Trick| trick.device.is_none_or(|role| role == orders.role);
    let tricks: Vec<_> = TRICKS.iter().filter(is_wanted).filter(is_possible).collect();
    let mut hostile = Hostile {
        socket: &orders.socket,
        role: orders.role,
        random: Random::new(orders.seed),
        stop,
        end: Instant::now(),
    };
    while !stop.load(Ordering::Relaxed) {
        hostile.end = Instant::now() + TURN;
        if tricks.is_empty() {
            hostile.wait(TURN);
            continue;
        }
        let trick = hostile.random.pick(&tricks);
        // A trick that is cut short, by the daemon or by a session that still ends, begins anew.
        let mut times = 0;
        while !hostile.is_over() {
            times += 1;
            if let Err(answer) = (trick.play)(&mut hostile)
                && times == 1
            {
                println!("{} {}: {answer}", orders.seed, trick.name);
            }
            hostile.wait(PAUSE);
        }
        println!("{} {}: {times} times", orders.seed, trick.name);
    }
    Ok(())
}

/// A session with running rings, of either device.
enum Driver {
    Blk(Box<BlkDriver>),
    Net(Box<NetDriver>),
}

impl Hostile<'_> {
    /// True when the trick's time is over.
    fn is_over(&self) -> bool {
        self.stop.load(Ordering::Relaxed) || Instant::now() >= self.end
    }

    /// Waits for `limit`, or until the trick's time is over.
    fn wait(&self, limit: Duration) {
        let end = Instant::now() + limit;
        while !self.is_over() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits for some random milliseconds.
    fn pause(&mut self) {
        let limit = Duration::from_millis(self.random.below(800));
        self.wait(limit);
    }

    fn front(&self) -> Result<FrontEnd, DriverError> {
        FrontEnd::connect(self.socket, TIMEOUT)
    }

    fn blk(&self, options: BlkDriverOptions) -> Result<BlkDriver, DriverError> {
        let features = options.features | VIRTIO_BLK_F_DISCARD | VIRTIO_BLK_F_WRITE_ZEROES;
        let options = BlkDriverOptions { features, max_wait: TIMEOUT, ..options };
        BlkDriver::connect(self.socket, &options)
    }

    fn net(&self) -> Result<NetDriver, DriverError> {
        let options = NetDriverOptions {
            transmit_size: 2048,
            max_wait: TIMEOUT,
            ..NetDriverOptions::default()
        };
        NetDriver::connect(self.socket, &options)
    }

    /// A session of this guest's device, its rings running.
    fn driver(&self) -> Result<Driver, DriverError> {
        Ok(match self.role {
            Role::HostileNet | Role::Net => Driver::Net(Box::new(self.net()?)),
            _ => Driver::Blk(Box::new(self.blk(BlkDriverOptions::default())?)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trick_that_is_none_is_refused_with_the_names_there_are() {
        check_names("").unwrap();
        check_names("giant-reads,half-messages").unwrap();
        let error = check_names("giant-reads,tickle").unwrap_err();
        assert!(error.contains("tickle") && error.contains("moved-memory"), "{error}");
    }

    #[test]
    fn names_of_tricks_are_unique() {
        for (index, trick) in TRICKS.iter().enumerate() {
            assert!(TRICKS[..index].iter().all(|other| other.name != trick.name));
        }
    }
}
