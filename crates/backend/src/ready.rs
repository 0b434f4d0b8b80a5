//! `Readiness`: what a half of a port waits for.

use rustix::fd::BorrowedFd;

/// What to wait for before another try.
#[derive(Debug)]
pub enum Readiness<'a> {
    /// Wait until this file descriptor is ready: for input, or output if it is of a sending half.
    Fd(BorrowedFd<'a>),
    /// Do not wait: the half is always ready.
    Always,
    /// There is nothing to wait for: the half will never be ready.
    Never,
}
