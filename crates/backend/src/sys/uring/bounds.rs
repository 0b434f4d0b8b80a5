//! Restricts io_urings to the requests that Manyring makes, and reserves the io_urings of a process
//! that may not make any later.
//!
//! ```text
//! any process:  io_uring_setup (disabled) -> files -> REGISTER_RESTRICTIONS -> the worker enables
//! a sandbox:    the first three before its first thread, for all workers (`reserve`); then its
//!               list of calls denies io_uring_setup, and a worker takes one of these rings
//! ```
//! A ring that is enabled takes the requests below and no others (`EACCES`), whoever writes its
//! submission queue: it opens no file, makes no socket and starts nothing. The kernel forgets the
//! list never. A ring belongs to the thread that enables it (`SINGLE_ISSUER`).

use super::{COMPLETIONS, FILES, SUBMISSIONS};
use io_uring::register::Restriction;
use io_uring::{IoUring, opcode, squeue};
use std::io;
use std::sync::{Mutex, PoisonError};

/// Requests of disks, and the watches of a worker.
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
/// Requests of sockets that are connected already (`Stream`). A reserved ring does not take them.
const OF_SOCKETS: [u8; 2] = [opcode::Send::CODE, opcode::Recv::CODE];
/// The registrations that an enabled ring accepts: of files, and of a number of threads.
/// `IORING_REGISTER_FILES_UPDATE`, `IORING_REGISTER_IOWQ_MAX_WORKERS`.
const REGISTRATIONS: [u8; 2] = [6, 19];

/// Rings that a sandboxed process has made in advance; `None`: rings are made when they are wanted.
static RESERVED: Mutex<Option<Vec<Disabled>>> = Mutex::new(None);

/// A ring that takes no requests before it is enabled.
pub(super) struct Disabled {
    uring: IoUring,
    /// It has a table of [`FILES`] files.
    pub(super) has_files: bool,
}

impl Disabled {
    fn new(others: &[u8]) -> io::Result<Self> {
        let uring = IoUring::builder()
            .setup_cqsize(COMPLETIONS)
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_taskrun_flag()
            .setup_r_disabled()
            .build(SUBMISSIONS)?;
        let has_files = uring.submitter().register_files_sparse(FILES).is_ok();
        let flags = squeue::Flags::FIXED_FILE | squeue::Flags::ASYNC;
        let mut list = vec![Restriction::sqe_flags_allowed(flags.bits())];
        list.extend(REQUESTS.iter().chain(others).map(|code| Restriction::sqe_op(*code)));
        list.extend(REGISTRATIONS.map(Restriction::register_op));
        uring.submitter().register_restrictions(&mut list)?;
        Ok(Self { uring, has_files })
    }

    /// The ring of the calling thread: one of those in reserve, if any were made.
    ///
    /// # Errors
    /// `EPERM`: the process makes no more rings, and all that it has made are in use. Otherwise
    /// that of io_uring_setup or io_uring_register.
    pub(super) fn take() -> io::Result<Self> {
        let mut reserved = RESERVED.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *reserved {
            Some(rings) => rings.pop().ok_or(io::Error::from_raw_os_error(libc::EPERM)),
            None => Self::new(&OF_SOCKETS),
        }
    }

    /// Makes it a ring of the calling thread. From here on its list of requests is in force.
    pub(super) fn enable(self) -> io::Result<IoUring> {
        self.uring.submitter().register_enable_rings()?;
        Ok(self.uring)
    }
}

/// Makes the rings of `count` workers now, and none later: returns how many could be had. Each
/// takes some 350 KiB of the kernel's memory from now on.
pub fn reserve(count: usize) -> usize {
    let rings: Vec<_> = (0..count).map_while(|_| Disabled::new(&[]).ok()).collect();
    let count = rings.len();
    *RESERVED.lock().unwrap_or_else(PoisonError::into_inner) = Some(rings);
    count
}

/// True if this process makes no more rings: a thread that ends takes its ring with it for good.
#[must_use]
pub fn are_reserved() -> bool {
    RESERVED.lock().unwrap_or_else(PoisonError::into_inner).is_some()
}
