//! One guest of the soak: a process of its own, so that it can be killed and can spoil its memory.
//!
//! It runs until its input ends. A well-behaved guest says `ready` when it has begun, and at its
//! end what it has seen, as one line of JSON.

mod blk;
mod frame;
mod hostile;
mod late;
mod net;
mod probe;

pub(super) use blk::{DISK_SIZE, QUEUES};
pub(super) use frame::{address, far_address, far_mac, mac};
pub(super) use hostile::{DISK_SIZE as HOSTILE_DISK_SIZE, check_names};
pub(super) use late::PROMISE;
pub(super) use net::PAIRS;

use crate::{Context, Outcome};
use serde_json::Value;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The orders of a guest, as words of its command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Orders {
    pub(super) role: Role,
    pub(super) socket: PathBuf,
    pub(super) seed: u64,
    /// Process id of the daemon.
    pub(super) daemon: u32,
    /// Its number among the guests.
    pub(super) number: u8,
    /// A disk's image, or the only tricks to play, with commas between.
    pub(super) more: String,
}

/// How a guest behaves, and what device it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// Writes, reads back and compares.
    Blk,
    /// Sends frames, and compares what comes back.
    Net,
    /// Hostile, with a disk.
    HostileBlk,
    /// Hostile, with a network.
    HostileNet,
}

const ROLES: [(Role, &str); 4] = [
    (Role::Blk, "blk"),
    (Role::Net, "net"),
    (Role::HostileBlk, "hostile-blk"),
    (Role::HostileNet, "hostile-net"),
];

impl Orders {
    /// The words that [`Self::parse`] understands.
    pub(super) fn words(&self) -> Vec<String> {
        let role = ROLES.iter().find(|(role, _)| *role == self.role).map_or("", |(_, name)| name);
        let socket = self.socket.display().to_string();
        let numbers = [self.seed.to_string(), self.daemon.to_string(), self.number.to_string()];
        [vec![role.to_owned(), socket], numbers.into(), vec![self.more.clone()]].concat()
    }

    fn parse(words: &[String]) -> Outcome<Self> {
        let [role, socket, seed, daemon, number, more] = words else {
            return Err(format!("a guest of the soak has six words, not {}", words.len()));
        };
        let found = ROLES.iter().find(|(_, name)| name == role);
        Ok(Self {
            role: found.ok_or_else(|| format!("no guest behaves as {role:?}"))?.0,
            socket: socket.into(),
            seed: seed.parse().context(seed)?,
            daemon: daemon.parse().context(daemon)?,
            number: number.parse().context(number)?,
            more: more.clone(),
        })
    }
}

/// Runs the guest that `words` order, until the input of this process ends.
///
/// # Errors
/// A well-behaved guest could not go on; the sentence says why.
pub fn run(words: &[String]) -> Outcome {
    let orders = Orders::parse(words)?;
    let stop = until_input_ends()?;
    let report = match orders.role {
        Role::Blk => blk::run(&orders, &stop)?,
        Role::Net => net::run(&orders, &stop)?,
        Role::HostileBlk | Role::HostileNet => return hostile::run(&orders, &stop),
    };
    say(&report)
}

/// Writes one line to the soak.
fn say(line: &Value) -> Outcome {
    let mut out = std::io::stdout();
    writeln!(out, "{line}").and_then(|()| out.flush()).context("the soak")
}

fn until_input_ends() -> Outcome<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = stop.clone();
    let wait = move || {
        let mut byte = [0];
        while matches!(std::io::stdin().read(&mut byte), Ok(1)) {}
        stopped.store(true, Ordering::Relaxed);
    };
    std::thread::Builder::new().name("input".into()).spawn(wait).context("a thread")?;
    Ok(stop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_survive_the_command_line() {
        for (role, _) in ROLES {
            let orders = Orders {
                role,
                socket: "/tmp/a b/0.sock".into(),
                seed: u64::MAX,
                daemon: 4711,
                number: 7,
                more: String::new(),
            };
            assert_eq!(Orders::parse(&orders.words()), Ok(orders));
        }
        assert!(Orders::parse(&[]).is_err());
    }
}
