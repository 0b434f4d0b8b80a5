//! Real guests on Manyring's disks and networks: from Debian packages to a booted Linux, and the
//! behaviours that must hold there.
//!
//! [`packages`] and [`guest::Kernel`] fetch what is needed, [`guest::Guest`] boots,
//! [`daemon::Daemon`] is the program under test, [`net`] the host's side of a network,
//! [`behaviours`] holds one file per promise, [`runner`] runs them, [`soak`] sets hostile guests
//! beside well-behaved ones for a time, [`guest_rr`] measures a guest's requests with each way of
//! polling, [`guest_reclaim`] a guest's small writes with and without `reclaim` ([`guest_load`] has
//! their common parts), [`guest_disks`] is a guest whose fio `manyring-bench` asks for loads,
//! [`xen`] is real Xen with its guests. Every process that is started here is ended here, on Ctrl-C
//! as well.
#![forbid(unsafe_code)]
#![allow(clippy::disallowed_methods, reason = "waiting for real guests needs the real clock")]

pub mod behaviours;
mod ceph;
mod certificates;
pub mod cleanup;
pub mod command;
pub mod daemon;
pub mod guest;
pub mod guest_disks;
pub mod guest_load;
pub mod guest_reclaim;
pub mod guest_rr;
pub mod host_fs;
pub mod lanes;
mod nbd;
pub mod net;
pub mod package;
pub mod packages;
pub mod processes;
pub mod runner;
pub mod soak;
mod systemd;
pub mod watch;
pub mod xen;

/// The result of everything here: a value, or one sentence for the person who ran it.
pub type Outcome<T = ()> = Result<T, String>;

/// Says what was tried when something fails.
pub trait Context<T> {
    /// Puts `what` in front of the error.
    ///
    /// # Errors
    /// The error, as a sentence that begins with `what`.
    fn context(self, what: impl std::fmt::Display) -> Outcome<T>;
}

impl<T, E: std::fmt::Display> Context<T> for Result<T, E> {
    fn context(self, what: impl std::fmt::Display) -> Outcome<T> {
        self.map_err(|error| format!("{what}: {error}"))
    }
}

/// Fails with a sentence unless `holds`.
///
/// # Errors
/// `sentence`, if it does not hold.
pub fn check(holds: bool, sentence: impl FnOnce() -> String) -> Outcome {
    if holds { Ok(()) } else { Err(sentence()) }
}
