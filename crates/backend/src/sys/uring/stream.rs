//! `Stream`: a connected socket with the memory that the kernel sends from and receives into.
//!
//! ```text
//! with a ring:  append to out(); start_send(ring);   its event: sent(result)
//!               start_receive(ring, len);   its event: received(result); bytes(), consume()
//! without:      append to out(); send_now();   receive_now(len); bytes(), consume()
//! ```
//! At most one send and one receive are under way. Bytes that are appended during a send are sent
//! with the next one, so that many commands of a turn cost one entry.
//!
//! **Why this is sound.** The kernel has a pointer into `sending` or `incoming` from the moment
//! that an entry is placed until its completion. Both are private, and no method changes, moves or
//! frees them while `is_sending` or `is_receiving` is set. Only [`Stream::sent`] and
//! [`Stream::received`] clear these, and the owner calls them with the completion's result. If a
//! stream is dropped before, its memory is never freed.
#![allow(unsafe_code, reason = "allow-listed: answers for memory that the kernel has")]

use super::entry::Work;
use super::{Ring, UnwrittenEntry};
use libc::iovec;
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown};

/// Capacity for received bytes: one message at most. Measured: receives of 64 KiB or more do not
/// make a request cheaper.
const INCOMING: usize = (256 << 10) + 4096;
/// Capacity that a stream keeps for commands and data after they are sent.
const KEPT: usize = 64 << 10;

/// A connected stream socket.
#[derive(Debug)]
pub struct Stream {
    socket: OwnedFd,
    /// The bytes of the next send.
    next: Vec<u8>,
    /// The bytes of the present send; those before `sent` are sent.
    sending: Vec<u8>,
    sent: usize,
    is_sending: bool,
    incoming: Vec<u8>,
    /// The received bytes that are not consumed: from `first` to `end` of `incoming`.
    first: usize,
    end: usize,
    is_receiving: bool,
}

impl Stream {
    /// Makes a stream over a socket in blocking mode, because io_uring waits for such a socket
    /// itself.
    #[must_use]
    pub fn new(socket: OwnedFd) -> Self {
        Self {
            socket,
            next: Vec::new(),
            sending: Vec::new(),
            sent: 0,
            is_sending: false,
            incoming: vec![0; INCOMING],
            first: 0,
            end: 0,
            is_receiving: false,
        }
    }

    /// Returns the socket.
    #[must_use]
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Returns the buffer to which bytes to be sent are appended.
    pub fn out(&mut self) -> &mut Vec<u8> {
        &mut self.next
    }

    /// Returns the number of bytes that the kernel has not taken yet.
    #[must_use]
    pub fn unsent(&self) -> usize {
        self.next.len() + self.sending.len() - self.sent
    }

    /// True while an entry of this stream is under way.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.is_sending || self.is_receiving
    }

    /// True while a send of this stream is under way.
    #[must_use]
    pub fn is_sending(&self) -> bool {
        self.is_sending
    }

    /// True while a receive of this stream is under way, so that the kernel may write to its
    /// memory.
    #[must_use]
    pub fn is_receiving(&self) -> bool {
        self.is_receiving
    }

    /// True if the peer has closed the connection, and nothing is left to be received.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        matches!(recv(&self.socket, &mut [0; 1][..], flags), Ok((0, _)) | Err(Errno::CONNRESET))
    }

    /// Shuts the connection down in both directions, so that entries under way complete soon.
    pub fn shut(&self) {
        // An error is ignored: it means that the socket is not connected any more.
        let _ = shutdown(&self.socket, Shutdown::Both);
    }

    /// Takes the appended bytes for the next send. Returns false if there are none, or the last
    /// send has not ended.
    fn load(&mut self) -> bool {
        if self.is_sending {
            return false;
        }
        if self.sent == self.sending.len() {
            self.sent = 0;
            self.sending.clear();
            self.sending.shrink_to(KEPT);
            std::mem::swap(&mut self.sending, &mut self.next);
        }
        self.sent < self.sending.len()
    }

    /// Sends the appended bytes, unless a send is under way.
    pub fn start_send(&mut self, ring: &mut Ring, user_data: u64) {
        if !self.load() {
            return;
        }
        self.is_sending = true;
        let rest = &mut self.sending[self.sent..];
        let slice = iovec { iov_base: rest.as_mut_ptr().cast(), iov_len: rest.len() };
        let work = Work::Send { fd: self.socket.as_raw_fd() };
        ring.place(UnwrittenEntry { work, user_data, waits_for: None }, &[slice]);
    }

    /// Handles the result of the send. Bytes that are left over are sent by the next
    /// [`Self::start_send`].
    ///
    /// # Errors
    /// The error of the send: the connection is over.
    pub fn sent(&mut self, result: i32) -> Result<(), Errno> {
        self.is_sending = false;
        match usize::try_from(result) {
            Ok(n) => {
                self.sent = (self.sent + n).min(self.sending.len());
                Ok(())
            }
            Err(_) => passing(Errno::from_raw_os_error(-result)),
        }
    }

    /// Receives up to `len` bytes, unless a receive is under way.
    ///
    /// # Panics
    /// If unconsumed bytes fill the whole buffer. (The head of a message never does.)
    pub fn start_receive(&mut self, ring: &mut Ring, len: usize, user_data: u64) {
        if self.is_receiving {
            return;
        }
        let room = self.room(len);
        let slice = iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() };
        self.is_receiving = true;
        let work = Work::Receive { fd: self.socket.as_raw_fd() };
        ring.place(UnwrittenEntry { work, user_data, waits_for: None }, &[slice]);
    }

    /// Handles the result of the receive.
    ///
    /// # Errors
    /// `ECONNRESET`: the peer has closed the connection. Any other: the error of the receive.
    pub fn received(&mut self, result: i32) -> Result<(), Errno> {
        self.is_receiving = false;
        match usize::try_from(result) {
            Ok(0) => Err(Errno::CONNRESET),
            Ok(n) => {
                self.end = (self.end + n).min(self.incoming.len());
                Ok(())
            }
            Err(_) => passing(Errno::from_raw_os_error(-result)),
        }
    }

    /// Returns memory for `len` bytes behind the unconsumed ones, or for fewer at the end of the
    /// buffer.
    fn room(&mut self, len: usize) -> &mut [u8] {
        self.incoming.copy_within(self.first..self.end, 0);
        (self.first, self.end) = (0, self.end - self.first);
        assert!(self.end < self.incoming.len(), "what came in was consumed before");
        let end = (self.end + len).min(self.incoming.len());
        &mut self.incoming[self.end..end]
    }

    /// Returns the received bytes that are not consumed.
    ///
    /// # Panics
    /// If a receive is under way, whose bytes the kernel may be writing.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        assert!(!self.is_receiving, "the kernel has this memory");
        &self.incoming[self.first..self.end]
    }

    /// Drops the first `n` of [`Self::bytes`].
    pub fn consume(&mut self, n: usize) {
        self.first = (self.first + n).min(self.end);
    }

    /// Sends without waiting. Returns true if the socket does not accept all bytes now.
    ///
    /// # Errors
    /// The error of the send: the connection is over.
    pub fn send_now(&mut self) -> Result<bool, Errno> {
        while self.load() {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match send(&self.socket, &self.sending[self.sent..], flags) {
                Ok(n) => self.sent += n,
                Err(Errno::AGAIN) => return Ok(true),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(false)
    }

    /// Receives up to `len` bytes without waiting. Returns false if no bytes have arrived.
    ///
    /// # Errors
    /// `ECONNRESET`: the peer has closed the connection. Any other: the error of the receive.
    pub fn receive_now(&mut self, len: usize) -> Result<bool, Errno> {
        assert!(!self.is_receiving, "the kernel has this memory");
        self.room(len);
        let end = (self.end + len).min(self.incoming.len());
        let came = recv(&self.socket, &mut self.incoming[self.end..end], RecvFlags::DONTWAIT);
        match came {
            Ok((0, _)) => Err(Errno::CONNRESET),
            Ok((n, _)) => {
                self.end += n;
                Ok(true)
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(false),
            Err(errno) => Err(errno),
        }
    }
}

/// `EAGAIN` and `EINTR` do not end a connection.
fn passing(errno: Errno) -> Result<(), Errno> {
    match errno {
        Errno::AGAIN | Errno::INTR => Ok(()),
        errno => Err(errno),
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.is_sending {
            std::mem::forget(std::mem::take(&mut self.sending));
        }
        if self.is_receiving {
            std::mem::forget(std::mem::take(&mut self.incoming));
        }
    }
}
