//! The entries of the submission queue: the requests that the ring can make, and their encoding. No
//! code here is unsafe: `Ring::write`, which pushes entries, guarantees that their memory is valid.

use super::slots::Width;
use io_uring::types::Fd;
use io_uring::{opcode, squeue};
use libc::iovec;

/// The direction of a transfer between a file and guest memory.
#[derive(Clone, Copy, Debug)]
pub enum FileOp {
    /// Read at an offset.
    Read,
    /// Write at an offset; durable at completion if `dsync`.
    Write {
        /// `RWF_DSYNC`
        dsync: bool,
    },
}

/// The thread that makes a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Submitter {
    /// The submitting thread. If the call would wait, a kernel thread makes it, which no slot
    /// counts.
    Own,
    /// The submitting thread. The transfer fails with `EAGAIN` if it would have to wait.
    OwnAtOnce,
    /// A kernel thread, of the slot of this width.
    Kernel(Width),
}

/// A file of the ring's requests: a slot of the registered files, or a descriptor.
#[derive(Clone, Copy, Debug)]
pub enum RingFile {
    /// An index of a registered file, which makes a request 50-60 ns cheaper.
    Registered(u32),
    /// A file descriptor.
    Plain(i32),
}

/// The request of an entry. The slices of a transfer are passed beside it.
#[derive(Clone, Copy, Debug)]
pub(super) enum Work {
    Poll {
        fd: i32,
        events: u32,
        multi: bool,
    },
    PollRemove {
        target: u64,
    },
    Transfer {
        op: FileOp,
        file: RingFile,
        offset: u64,
        submitter: Submitter,
    },
    Flush {
        file: RingFile,
    },
    Fallocate {
        file: RingFile,
        mode: i32,
        offset: u64,
        len: u64,
    },
    /// Send the bytes of the only slice to a socket.
    Send {
        fd: i32,
    },
    /// Receive bytes from a socket into the only slice.
    Receive {
        fd: i32,
    },
}

/// Encodes the entry for `work`. `slices` are the slices of a transfer; `listed` is their copy that
/// stays in memory until the kernel has read it.
pub(super) fn entry_of(work: Work, slices: &[iovec], listed: &[iovec]) -> squeue::Entry {
    match work {
        Work::Poll { fd, events, multi } => {
            opcode::PollAdd::new(Fd(fd), events).multi(multi).build()
        }
        Work::PollRemove { target } => opcode::PollRemove::new(target).build(),
        Work::Transfer { op, file, offset, submitter } => {
            let flags = rw_flags(op, submitter);
            let entry = transfer_entry((op, flags), file, offset, slices, listed);
            let is_aside = matches!(submitter, Submitter::Kernel(_));
            if is_aside { entry.flags(squeue::Flags::ASYNC) } else { entry }
        }
        Work::Flush { file } => {
            let flags = io_uring::types::FsyncFlags::DATASYNC;
            named(file, |fd| opcode::Fsync::new(fd).flags(flags).build())
        }
        Work::Fallocate { file, mode, offset, len } => {
            named(file, |fd| opcode::Fallocate::new(fd, len).offset(offset).mode(mode).build())
        }
        Work::Send { fd } => {
            let (address, len) = only(slices);
            opcode::Write::new(Fd(fd), address.cast_const(), len).offset(STREAM).build()
        }
        Work::Receive { fd } => {
            let (address, len) = only(slices);
            opcode::Read::new(Fd(fd), address, len).offset(STREAM).build()
        }
    }
}

/// The offset of a transfer on a socket, which has none.
const STREAM: u64 = u64::MAX;

/// Returns the only slice of a transfer on a socket. One call moves less than 2 GiB in any case;
/// the next call moves the rest.
fn only(slices: &[iovec]) -> (*mut u8, u32) {
    let [slice] = slices else { return (std::ptr::null_mut(), 0) };
    (slice.iov_base.cast(), u32::try_from(slice.iov_len).unwrap_or(u32::MAX))
}

fn transfer_entry(
    (op, flags): (FileOp, i32),
    file: RingFile,
    offset: u64,
    slices: &[iovec],
    listed: &[iovec],
) -> squeue::Entry {
    let iovecs = listed.as_ptr();
    let count = u32::try_from(listed.len()).unwrap_or(u32::MAX);
    let single = (slices.len() == 1).then(|| only(slices));
    named(file, |fd| match (op, single) {
        (FileOp::Read, Some((address, len))) => {
            opcode::Read::new(fd, address, len).offset(offset).rw_flags(flags).build()
        }
        (FileOp::Read, None) => {
            opcode::Readv::new(fd, iovecs, count).offset(offset).rw_flags(flags).build()
        }
        (FileOp::Write { .. }, Some((address, len))) => {
            opcode::Write::new(fd, address, len).offset(offset).rw_flags(flags).build()
        }
        (FileOp::Write { .. }, None) => {
            opcode::Writev::new(fd, iovecs, count).offset(offset).rw_flags(flags).build()
        }
    })
}

/// Builds the entry for a file: with its index if it is registered, else with its descriptor.
fn named(file: RingFile, build: impl FnOnce(Fd) -> squeue::Entry) -> squeue::Entry {
    match file {
        RingFile::Registered(slot) => {
            build(Fd(i32::try_from(slot).unwrap_or(-1))).flags(squeue::Flags::FIXED_FILE)
        }
        RingFile::Plain(fd) => build(Fd(fd)),
    }
}

pub(super) fn poll_mask(events: i16) -> u32 {
    u32::from(events.cast_unsigned())
}

const fn rw_flags(op: FileOp, submitter: Submitter) -> i32 {
    let dsync = if let FileOp::Write { dsync: true } = op { libc::RWF_DSYNC } else { 0 };
    let at_once = if let Submitter::OwnAtOnce = submitter { libc::RWF_NOWAIT } else { 0 };
    dsync | at_once
}
