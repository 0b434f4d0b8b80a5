//! What an entry of the submission queue asks of the kernel, and how the entry is written. Nothing
//! here is unsafe: `Ring::write`, which pushes an entry, answers for the memory that it names.

use super::lanes::Width;
use io_uring::types::Fd;
use io_uring::{opcode, squeue};
use libc::iovec;

/// What to do with a file.
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

/// Who makes a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hand {
    /// The submitting thread, or a thread of the kernel where it would have to wait. No lane counts
    /// that one.
    Own,
    /// The submitting thread; the transfer fails with `EAGAIN` where it would have to wait.
    OwnAtOnce,
    /// A thread of the kernel, one of this lane.
    Kernel(Width),
}

/// A file as this ring knows it.
#[derive(Clone, Copy, Debug)]
pub enum RingFile {
    /// Registered: 50-60 ns less per request.
    Registered(u32),
    /// Plain.
    Plain(i32),
}

/// What an entry asks of the kernel. The slices of a transfer travel beside it.
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
        hand: Hand,
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
    /// The bytes of the one slice, to a socket.
    Send {
        fd: i32,
    },
    /// Bytes of a socket, into the one slice.
    Receive {
        fd: i32,
    },
}

/// The entry for `work`. `slices` are those of a transfer, `listed` the same where the kernel will
/// read them.
pub(super) fn entry_of(work: Work, slices: &[iovec], listed: &[iovec]) -> squeue::Entry {
    match work {
        Work::Poll { fd, events, multi } => {
            opcode::PollAdd::new(Fd(fd), events).multi(multi).build()
        }
        Work::PollRemove { target } => opcode::PollRemove::new(target).build(),
        Work::Transfer { op, file, offset, hand } => {
            let flags = rw_flags(op, hand);
            let entry = transfer_entry((op, flags), file, offset, slices, listed);
            let is_aside = matches!(hand, Hand::Kernel(_));
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
            opcode::Send::new(Fd(fd), address.cast_const(), len).flags(libc::MSG_NOSIGNAL).build()
        }
        Work::Receive { fd } => {
            let (address, len) = only(slices);
            opcode::Recv::new(Fd(fd), address, len).build()
        }
    }
}

/// The only slice of a transfer that has one. A call transfers less than 2 GiB whatever it is asked
/// for; the rest comes with the next.
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

/// The entry that `build` makes for the file: by its slot if it is registered.
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

const fn rw_flags(op: FileOp, hand: Hand) -> i32 {
    let dsync = if let FileOp::Write { dsync: true } = op { libc::RWF_DSYNC } else { 0 };
    let at_once = if let Hand::OwnAtOnce = hand { libc::RWF_NOWAIT } else { 0 };
    dsync | at_once
}
