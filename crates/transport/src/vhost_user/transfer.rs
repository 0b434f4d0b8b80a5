//! `Transfer`: writes the device's state to a descriptor of the front-end, or reads it from there
//! (vhost-user, "Migrating back-end state").
//!
//! ```text
//! save:    write the state to the front-end's descriptor, then close it
//! load:    read the state until the front-end closes its end, or until the state is too long
//! check:   save: is all of it written?     load: is all of it read, and does the device accept it?
//! ```
//! 1. **The janitor reads and writes**, since the front-end has chosen the descriptor: a pipe, a
//!    socket, or a file in memory. Even a write to a non-blocking pipe waits for the thread that
//!    holds the pipe's lock.
//! 2. **No thread waits for the front-end.** A step reads or writes as much as possible without
//!    blocking, and a pause follows. Pipes and sockets have room for a whole state, so an honest
//!    front-end needs one step or two. A transfer that is not complete when the front-end asks for
//!    its result has failed: by then the front-end has read, or written, all that it wanted.
//! 3. **A descriptor is not kept for long.** It may be the front-end's end of the session's own
//!    socket, or carry that socket: while this process has it open, the session does not see that
//!    the front-end has disconnected.

use manyring_device::Device;
use manyring_engine::{ForeignFd, Janitor};
use manyring_memory::MemoryFiles;
use rustix::fs::{FileType, OFlags, fcntl_getfl, fcntl_setfl, fstat};
use rustix::io::{Errno, retry_on_intr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// The longest state in bytes. The states of all devices of this program are shorter.
const STATE_SIZE_MAX: usize = 16 << 10;
/// Longest time from the beginning of a transfer to its end.
const TIMEOUT: Duration = Duration::from_secs(30);
/// First and longest pause between two steps.
const RETRY_DELAYS: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(500));

/// A transfer that has begun, and whose result the front-end has not asked for yet.
#[derive(Debug)]
pub(super) struct Transfer {
    janitor: Arc<Janitor>,
    channel: Arc<Mutex<Channel>>,
    is_load: bool,
    is_over: bool,
    pause: Duration,
    deadline: Instant,
}

/// Why a transfer fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum TransferError {
    #[error("the file descriptor is not a pipe, a socket or a file in memory")]
    Kind,
    #[error("reading or writing the file descriptor failed: {0}")]
    Io(#[from] Errno),
    #[error("the state is longer than {STATE_SIZE_MAX} bytes")]
    TooLong,
    #[error("the state is incomplete")]
    Unfinished,
    #[error("no thread available to read or write it")]
    NoThread,
}

impl Transfer {
    /// Begins to save the device's state to `fd`, or to load a state from there.
    ///
    /// # Errors
    /// [`TransferError`]: the descriptor is of the wrong kind, or the first step failed.
    pub(super) async fn begin(
        janitor: Arc<Janitor>,
        fd: ForeignFd,
        save: Option<&dyn Device>,
    ) -> Result<Self, TransferError> {
        let bytes = save.map(Device::save);
        let is_load = bytes.is_none();
        let bytes = bytes.unwrap_or_default();
        let channel = Channel { fd: Some(fd), bytes, at: 0, is_late: false };
        let channel = Arc::new(Mutex::new(channel));
        let (pause, deadline) = (RETRY_DELAYS.0, Instant::now() + TIMEOUT);
        let mut transfer = Self { janitor, channel, is_load, is_over: false, pause, deadline };
        transfer.on_janitor(Channel::prepare).await?;
        transfer.step().await?;
        Ok(transfer)
    }

    async fn on_janitor<T: Send + 'static>(
        &self,
        act: impl FnOnce(&mut Channel) -> Result<T, TransferError> + Send + 'static,
    ) -> Result<T, TransferError> {
        let channel = self.channel.clone();
        let done = self
            .janitor
            .run(move || act(&mut channel.lock().unwrap_or_else(PoisonError::into_inner)));
        done.await.unwrap_or(Err(TransferError::NoThread))
    }

    /// Reads or writes all that is possible without waiting.
    async fn step(&mut self) -> Result<(), TransferError> {
        let is_load = self.is_load;
        let act = move |channel: &mut Channel| {
            if is_load { channel.read() } else { channel.write() }
        };
        self.is_over = self.on_janitor(act).await?;
        Ok(())
    }

    /// Takes steps until the transfer is over, then waits for ever. The future may be dropped: the
    /// transfer continues when this is called again.
    pub(super) async fn go_on(&mut self) {
        while !self.is_over {
            tokio::time::sleep(self.pause).await;
            self.pause = (self.pause * 2).min(RETRY_DELAYS.1);
            // A step that has failed fails again when the front-end asks for the result.
            self.is_over = self.step().await.is_err() || self.is_over;
            if !self.is_over && Instant::now() >= self.deadline {
                let _ = self.on_janitor(Channel::give_up).await;
                self.is_over = true;
            }
        }
        std::future::pending().await
    }

    /// Ends the transfer, when the front-end asks for its result. Returns the state that was read;
    /// `None` after a save, if all of the state was written.
    ///
    /// # Errors
    /// [`TransferError`]: the transfer failed, or is not complete.
    pub(super) async fn end(mut self) -> Result<Option<Vec<u8>>, TransferError> {
        self.step().await?;
        if !self.is_over {
            return Err(TransferError::Unfinished);
        }
        let take = |channel: &mut Channel| Ok(std::mem::take(&mut channel.bytes));
        Ok(Some(self.on_janitor(take).await?).filter(|_| self.is_load))
    }
}

/// The descriptor of a transfer and the bytes of the state. Only the janitor touches it.
#[derive(Debug)]
struct Channel {
    /// The front-end's descriptor; `None` once it is closed.
    fd: Option<ForeignFd>,
    /// The bytes that were read, or must be written; `at` counts those that were written.
    bytes: Vec<u8>,
    at: usize,
    /// True if the descriptor was closed because the transfer took too long.
    is_late: bool,
}

impl Channel {
    /// Checks the kind of the descriptor, and makes a pipe or socket non-blocking.
    fn prepare(&mut self) -> Result<(), TransferError> {
        let Some(fd) = &self.fd else { return Ok(()) };
        match FileType::from_raw_mode(fstat(fd)?.st_mode) {
            FileType::Fifo | FileType::Socket => {
                fcntl_setfl(fd, fcntl_getfl(fd)? | OFlags::NONBLOCK)?;
                Ok(())
            }
            // A file in memory has no peer, so reading and writing it does not block.
            FileType::RegularFile => {
                MemoryFiles::InMemory.check(fd).map_err(|_| TransferError::Kind)
            }
            _ => Err(TransferError::Kind),
        }
    }

    fn give_up(&mut self) -> Result<(), TransferError> {
        (self.fd, self.is_late) = (None, true);
        Ok(())
    }

    /// Continues to write. Returns true if all is written.
    fn write(&mut self) -> Result<bool, TransferError> {
        if self.is_late {
            return Err(TransferError::Unfinished);
        }
        while let (Some(fd), Some(rest)) = (&self.fd, self.bytes.get(self.at..)) {
            match rest.is_empty() {
                // Closing the descriptor marks the end of the state for the front-end.
                true => self.fd = None,
                false => match retry_on_intr(|| rustix::io::write(fd, rest)) {
                    Ok(0) | Err(Errno::AGAIN) => return Ok(false),
                    Ok(written) => self.at += written,
                    Err(errno) => return Err(errno.into()),
                },
            }
        }
        Ok(true)
    }

    /// Continues to read. Returns true at the end of the state.
    fn read(&mut self) -> Result<bool, TransferError> {
        if self.is_late {
            return Err(TransferError::Unfinished);
        }
        while let Some(fd) = &self.fd {
            if self.bytes.len() > STATE_SIZE_MAX {
                // Close the descriptor, so that the front-end's writes fail.
                self.fd = None;
                break;
            }
            let mut some = [0; 4096];
            match retry_on_intr(|| rustix::io::read(fd, &mut some)) {
                Ok(0) => self.fd = None,
                Ok(read) => self.bytes.extend_from_slice(&some[..read]),
                Err(Errno::AGAIN) => return Ok(false),
                Err(errno) => return Err(errno.into()),
            }
        }
        if self.bytes.len() > STATE_SIZE_MAX { Err(TransferError::TooLong) } else { Ok(true) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use manyring_engine::{FdReservation, Origin};
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::fd::OwnedFd;
    use rustix::pipe::{PipeFlags, pipe_with};

    /// Moves the clock on until nobody has the other end of the pipe. The janitor is a thread of
    /// its own: a clock that goes on by itself would not wait for it.
    async fn nobody_reads(writer: &OwnedFd) {
        let look = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
        for _ in 0..60_000 {
            let mut fds = [PollFd::new(writer, PollFlags::empty())];
            if poll(&mut fds, Some(&look)).unwrap() > 0 {
                return;
            }
            tokio::time::advance(RETRY_DELAYS.0).await;
        }
        panic!("the pipe's other end is not closed");
    }

    #[tokio::test(start_paused = true)]
    async fn an_fd_is_closed_when_its_transfer_takes_too_long() {
        let janitor = Arc::new(Janitor::of("test"));
        let origin = Origin::new(janitor.clone());
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        let theirs = origin.adopt(reader, &mut FdReservation::none());
        let began = Instant::now();
        let mut transfer = Transfer::begin(janitor.clone(), theirs, None).await.unwrap();
        rustix::io::write(&writer, b"a part").unwrap();
        tokio::select! {
            () = transfer.go_on() => panic!("it has nothing to end with"),
            () = nobody_reads(&writer) => {}
        }
        assert_eq!(rustix::io::write(&writer, b"another"), Err(Errno::PIPE));
        drop(writer);
        assert_eq!(transfer.end().await, Err(TransferError::Unfinished));
        assert!(began.elapsed() >= TIMEOUT);
    }
}
