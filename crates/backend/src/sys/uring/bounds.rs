//! Restricts io_urings to the requests that Manyring makes. Reserves the io_urings of a process
//! that may not make any later.
//!
//! ```text
//! any process:  io_uring_setup (disabled) -> files -> REGISTER_RESTRICTIONS -> the worker enables
//! a sandbox:    the first three before its first thread, for all workers (`reserve`); then its
//!               seccomp filter denies io_uring_setup, and a worker takes one of these rings
//! ```
//! An enabled ring accepts the requests below and no others (`EACCES`), whoever writes its
//! submission queue: it opens no file, makes no socket and starts nothing. The kernel never lifts
//! the restriction. A ring belongs to the thread that enables it (`SINGLE_ISSUER`).

use super::{COMPLETIONS, FILES, SUBMISSIONS};
use io_uring::register::Restriction;
use io_uring::{IoUring, opcode, squeue};
use std::io;
use std::sync::{Mutex, PoisonError};

/// The requests of disks and connected sockets, and the polls of a worker. None of these has the
/// address of a peer; a send with TCP fast open has one, and would connect the socket anew.
const REQUESTS: [u8; 8] = [
    opcode::PollAdd::CODE,
    opcode::PollRemove::CODE,
    opcode::Read::CODE,
    opcode::Readv::CODE,
    opcode::Write::CODE,
    opcode::Writev::CODE,
    opcode::Fsync::CODE,
    opcode::Fallocate::CODE,
];
/// The registrations that an enabled ring accepts: `IORING_REGISTER_FILES_UPDATE` and
/// `IORING_REGISTER_IOWQ_MAX_WORKERS`.
const REGISTRATIONS: [u8; 2] = [6, 19];

/// Entries of the completion queue of a reserved ring. A device process reserves a ring for each
/// worker that it may start, and most of these never run, so the queues are small. The kernel keeps
/// completions for which a queue has no room until the worker enters the ring.
const COMPLETIONS_RESERVED: u32 = 8192;

/// Rings that a sandboxed process has made in advance; `None`: each ring is made when it is needed.
static RESERVED: Mutex<Option<Vec<Disabled>>> = Mutex::new(None);

/// A ring that takes no requests until it is enabled.
pub(super) struct Disabled {
    uring: IoUring,
    /// True if it has a table of [`FILES`] registered files.
    pub(super) has_files: bool,
}

impl Disabled {
    fn new(completions: u32) -> io::Result<Self> {
        let uring = IoUring::builder()
            .setup_cqsize(completions)
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_taskrun_flag()
            .setup_r_disabled()
            .build(SUBMISSIONS)?;
        let has_files = uring.submitter().register_files_sparse(FILES).is_ok();
        let flags = squeue::Flags::FIXED_FILE | squeue::Flags::ASYNC;
        let mut list = vec![Restriction::sqe_flags_allowed(flags.bits())];
        list.extend(REQUESTS.map(Restriction::sqe_op));
        list.extend(REGISTRATIONS.map(Restriction::register_op));
        uring.submitter().register_restrictions(&mut list)?;
        Ok(Self { uring, has_files })
    }

    /// Takes a reserved ring, or makes one if the process has reserved none.
    ///
    /// # Errors
    /// `EPERM`: all reserved rings are in use. Otherwise the error of io_uring_setup or
    /// io_uring_register.
    pub(super) fn take() -> io::Result<Self> {
        let mut reserved = RESERVED.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *reserved {
            Some(rings) => rings.pop().ok_or(io::Error::from_raw_os_error(libc::EPERM)),
            None => Self::new(COMPLETIONS),
        }
    }

    /// Enables the ring for the calling thread. From now on its restrictions are in force.
    pub(super) fn enable(self) -> io::Result<IoUring> {
        self.uring.submitter().register_enable_rings()?;
        Ok(self.uring)
    }
}

/// Makes the rings of `count` workers now; none can be made later. Returns the number of rings
/// made. Each takes some 220 KiB of the kernel's memory.
pub fn reserve(count: usize) -> usize {
    let rings: Vec<_> =
        (0..count).map_while(|_| Disabled::new(COMPLETIONS_RESERVED).ok()).collect();
    let count = rings.len();
    *RESERVED.lock().unwrap_or_else(PoisonError::into_inner) = Some(rings);
    count
}

/// True if this process cannot make rings any more: then the ring of a thread that ends is lost for
/// good.
#[must_use]
pub fn are_reserved() -> bool {
    RESERVED.lock().unwrap_or_else(PoisonError::into_inner).is_some()
}
