//! The budget of file descriptors of all front-ends together, and the part of one message.

use rustix::io::Errno;
use std::sync::OnceLock;
use tokio::sync::{Semaphore, SemaphorePermit};

/// File descriptors of one message at most (`SCM_MAX_FD` of the kernel).
pub const MESSAGE_FDS_MAX: usize = 253;
/// Jobs that may wait for a janitor before its session receives the next message. Each may be the
/// close of a file descriptor that still counts, so the budget has room for this number of them.
pub(super) const JOBS_MAX: usize = 64;

/// Permits for file descriptors of front-ends: the limit of open files, less a quarter of it (and
/// no fewer than 256) for our own.
fn budget() -> &'static Semaphore {
    static BUDGET: OnceLock<Semaphore> = OnceLock::new();
    BUDGET.get_or_init(|| {
        use rustix::process::{Resource, getrlimit};
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(1 << 20);
        let limit = usize::try_from(limit.min(1 << 28)).unwrap_or(1 << 20);
        let ours = (limit / 4).max(256);
        Semaphore::new(limit.saturating_sub(ours).max(MESSAGE_FDS_MAX + JOBS_MAX))
    })
}

/// Permits for file descriptors that this process makes in the place of a front-end's, or copies
/// because of a front-end. They come from the budget of front-ends, which could otherwise use up
/// the descriptors that the daemon keeps for itself. The budget gets them back on drop.
#[derive(Debug)]
pub struct StandIns {
    _permit: SemaphorePermit<'static>,
}

impl StandIns {
    /// # Errors
    /// `EMFILE`: front-ends already have all the file descriptors that the budget allows.
    pub fn take(count: u32) -> Result<Self, Errno> {
        let permit = budget().try_acquire_many(count).map_err(|_| Errno::MFILE)?;
        Ok(Self { _permit: permit })
    }
}

/// Room for the file descriptors of one message.
///
/// If a process has no number left for an fd, the kernel closes that fd on the thread that receives
/// the message, and such a close may block. Therefore nobody receives a message with fds unless
/// there is room for [`MESSAGE_FDS_MAX`] of them.
#[derive(Debug)]
pub struct Room(Option<SemaphorePermit<'static>>);

/// Permits for a message with [`MESSAGE_FDS_MAX`] fds.
const ROOM: u32 = 253;
const _: () = assert!(ROOM as usize == MESSAGE_FDS_MAX);

impl Room {
    /// Waits until there is room for a message. Other sessions may keep their fds for ever: call
    /// this with a timeout.
    pub async fn for_message() -> Self {
        Self(budget().acquire_many(ROOM).await.ok())
    }

    /// Room for a message; `None` if there is too little now.
    #[must_use]
    pub fn at_once() -> Option<Self> {
        budget().try_acquire_many(ROOM).ok().map(|permit| Self(Some(permit)))
    }

    /// The permit for one of the message's descriptors; `None` once all of the room is split off.
    pub(super) fn split(&mut self) -> Option<SemaphorePermit<'static>> {
        self.0.as_mut().and_then(|permit| permit.split(1))
    }

    /// For a message that has no file descriptors.
    #[must_use]
    pub fn none() -> Self {
        Self(None)
    }
}
