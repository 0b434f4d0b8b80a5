//! `FrontEnd`: the vhost-user front-end over a blocking socket.

mod net;
mod start;

use crate::vring::now;
use crate::{DriverError, TableEntry};
use manyring_queue::Base;
use manyring_wire::vhost_user::{
    FLAG_NEED_REPLY, FLAG_REPLY, FLAG_VERSION, HEADER_SIZE, Header, PAYLOAD_SIZE_MAX,
    PROTOCOL_F_REPLY_ACK, Region, VringAddr, VringState,
};
use rustix::fd::{AsFd, BorrowedFd};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::io::{self, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;
use zerocopy::{FromBytes, IntoBytes};

/// Most file descriptors of one message: more than the protocol permits, for hostile tests.
const FDS_MAX: usize = 64;
/// Longest time a reply may take, unless set otherwise.
const REPLY_TIMEOUT: Duration = Duration::from_secs(30);

/// A connection to a back-end. Every method sends one message. Methods that set something wait for
/// the acknowledgement if `REPLY_ACK` was negotiated.
#[derive(Debug)]
pub struct FrontEnd {
    stream: UnixStream,
    /// The virtio features of the last `SET_FEATURES`.
    features: u64,
    /// The protocol features of the last `SET_PROTOCOL_FEATURES`.
    protocol: u64,
}

impl Drop for FrontEnd {
    /// Shuts the connection down at once. A close alone could take effect late: a process that a
    /// test is starting at this moment holds a copy of every descriptor until its exec.
    fn drop(&mut self) {
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }
}

impl FrontEnd {
    /// Connects to the socket `path`, waiting up to `max_wait` for it to appear.
    ///
    /// # Errors
    /// [`DriverError::Io`].
    pub fn connect(path: &Path, max_wait: Duration) -> Result<Self, DriverError> {
        let deadline = now() + max_wait;
        loop {
            match UnixStream::connect(path) {
                Ok(stream) => return Self::from_stream(stream),
                Err(error) if now() >= deadline => return Err(error.into()),
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }

    /// Uses a connected socket (for a back-end in client mode).
    ///
    /// # Errors
    /// [`DriverError::Io`].
    pub fn from_stream(stream: UnixStream) -> Result<Self, DriverError> {
        stream.set_read_timeout(Some(REPLY_TIMEOUT))?;
        stream.set_write_timeout(Some(REPLY_TIMEOUT))?;
        Ok(Self { stream, features: 0, protocol: 0 })
    }

    /// The socket of the connection.
    #[must_use]
    pub fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Sends raw bytes with file descriptors.
    ///
    /// # Errors
    /// [`DriverError::System`], [`DriverError::Io`].
    pub fn send_bytes(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), DriverError> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(DriverError::TooLong { len: fds.len(), max: FDS_MAX });
        }
        let flags = SendFlags::NOSIGNAL;
        let sent = sendmsg(&self.stream, &[IoSlice::new(bytes)], &mut control, flags)?;
        self.stream.write_all(bytes.get(sent..).unwrap_or(&[]))?;
        Ok(())
    }

    /// Sends a message of any id, payload and file descriptors, without asking for an
    /// acknowledgement.
    ///
    /// # Errors
    /// [`DriverError::System`], [`DriverError::Io`].
    pub fn send_message(
        &mut self,
        request: u32,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), DriverError> {
        self.send_flagged(request, FLAG_VERSION, payload, fds)
    }

    fn send_flagged(
        &mut self,
        request: u32,
        flags: u32,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), DriverError> {
        let size = u32::try_from(payload.len());
        let size =
            size.map_err(|_| DriverError::TooLong { len: payload.len(), max: PAYLOAD_SIZE_MAX })?;
        let mut bytes = Header { request, flags, size }.emit().to_vec();
        bytes.extend_from_slice(payload);
        self.send_bytes(&bytes, fds)
    }

    /// Receives the reply to `request`. Returns its payload.
    ///
    /// # Errors
    /// [`DriverError::Io`] (`UnexpectedEof`: the back-end has closed the connection),
    /// [`DriverError::Reply`].
    pub fn receive_reply(&mut self, request: u32) -> Result<Vec<u8>, DriverError> {
        let mut bytes = [0; HEADER_SIZE];
        self.stream.read_exact(&mut bytes)?;
        let header = Header::parse(&bytes).map_err(io::Error::other)?;
        let mut payload = vec![0; header.size as usize];
        self.stream.read_exact(&mut payload)?;
        if header.request != request || header.flags & FLAG_REPLY == 0 {
            let (answer, size) = (header.request, payload.len());
            return Err(DriverError::Reply { request, answer, size });
        }
        Ok(payload)
    }

    /// Sends a message that sets something, and waits for its acknowledgement if `REPLY_ACK` was
    /// negotiated.
    ///
    /// # Errors
    /// [`DriverError::Refused`], or the socket's.
    pub fn set(
        &mut self,
        request: u32,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), DriverError> {
        if !self.has_reply_ack() {
            return self.send_message(request, payload, fds);
        }
        self.send_flagged(request, FLAG_VERSION | FLAG_NEED_REPLY, payload, fds)?;
        match self.receive_number(request)? {
            0 => Ok(()),
            _ => Err(DriverError::Refused { request }),
        }
    }

    fn receive_number(&mut self, request: u32) -> Result<u64, DriverError> {
        let payload = self.receive_reply(request)?;
        let size = payload.len();
        u64::read_from_bytes(&payload).map_err(|_| DriverError::Reply {
            request,
            answer: request,
            size,
        })
    }

    fn number_of(&mut self, request: u32) -> Result<u64, DriverError> {
        self.send_message(request, &[], &[])?;
        self.receive_number(request)
    }

    fn set_number(&mut self, request: u32, value: u64) -> Result<(), DriverError> {
        self.set(request, &value.to_ne_bytes(), &[])
    }

    fn set_state(&mut self, request: u32, index: u32, num: u32) -> Result<(), DriverError> {
        self.set(request, VringState { index, num }.as_bytes(), &[])
    }

    /// True if the back-end acknowledges every message that sets something.
    #[must_use]
    pub fn has_reply_ack(&self) -> bool {
        self.protocol & PROTOCOL_F_REPLY_ACK != 0
    }

    /// The protocol features that this front-end has set last.
    #[must_use]
    pub fn agreed_protocol_features(&self) -> u64 {
        self.protocol
    }

    /// `GET_FEATURES`
    ///
    /// # Errors
    /// The socket's errors, as for all requests below; those that set something can also return
    /// [`DriverError::Refused`].
    pub fn features(&mut self) -> Result<u64, DriverError> {
        self.number_of(1)
    }

    /// `SET_FEATURES`
    ///
    /// # Errors
    /// See [`Self::features`].
    pub fn set_features(&mut self, features: u64) -> Result<(), DriverError> {
        self.set_number(2, features)?;
        self.features = features;
        Ok(())
    }

    /// `SET_OWNER`
    ///
    /// # Errors
    /// See [`Self::features`].
    pub fn set_owner(&mut self) -> Result<(), DriverError> {
        self.set(3, &[], &[])
    }

    /// `SET_MEM_TABLE`
    ///
    /// # Errors
    /// See [`Self::features`].
    pub fn set_mem_table(&mut self, table: &[TableEntry<'_>]) -> Result<(), DriverError> {
        let count = u32::try_from(table.len()).unwrap_or(u32::MAX);
        let mut payload = [count, 0].as_bytes().to_vec();
        payload.extend(table.iter().flat_map(|(region, _)| region.as_bytes().to_vec()));
        let fds: Vec<_> = table.iter().map(|(_, fd)| *fd).collect();
        self.set(5, &payload, &fds)
    }

    /// `SET_VRING_NUM`
    ///
    /// # Errors
    /// See [`Self::features`].
    pub fn set_vring_num(&mut self, index: u32, size: u32) -> Result<(), DriverError> {
        self.set_state(8, index, size)
    }

    /// `SET_VRING_ADDR`
    ///
    /// # Errors
    /// See [`Self::features`].
    pub fn set_vring_addr(&mut self, addr: &VringAddr) -> Result<(), DriverError> {
        self.set(9, addr.as_bytes(), &[])
    }

    /// `SET_VRING_BASE`
    ///
    /// # Errors
    /// See [`Self::features`].
    pub fn set_vring_base(&mut self, index: u32, base: impl Into<Base>) -> Result<(), DriverError> {
        self.set_state(10, index, base.into().bits())
    }

    /// `GET_VRING_BASE`: stops the ring. Returns its base, where it goes on later.
    ///
    /// # Errors
    /// See [`Self::features`].
    pub fn vring_base(&mut self, index: u32) -> Result<Base, DriverError> {
        let request = 11;
        self.send_message(request, VringState { index, num: 0 }.as_bytes(), &[])?;
        let payload = self.receive_reply(request)?;
        let wrong = DriverError::Reply { request, answer: request, size: payload.len() };
        let state = VringState::read_from_bytes(&payload).map_err(|_| wrong)?;
        Ok(Base::from_bits(state.num))
    }

    /// `SET_VRING_KICK`; without an fd the device polls.
    ///
    /// # Errors
    /// See [`Self::features`].
    pub fn set_vring_kick(
        &mut self,
        index: u32,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<(), DriverError> {
        self.set_event(12, index, fd)
    }

    /// `SET_VRING_CALL`; without an fd the driver polls.
    ///
    /// # Errors
    /// See [`Self::features`].
    pub fn set_vring_call(
        &mut self,
        index: u32,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<(), DriverError> {
        self.set_event(13, index, fd)
    }

    /// `SET_VRING_ERR`
    ///
    /// # Errors
    /// See [`Self::features`].
    pub fn set_vring_err(
        &mut self,
        index: u32,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<(), DriverError> {
        self.set_event(14, index, fd)
    }

    fn set_event(
        &mut self,
        request: u32,
        index: u32,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<(), DriverError> {
        let no_fd = if fd.is_some() { 0 } else { 1 << 8 };
        let value = u64::from(index) | no_fd;
        self.set(request, &value.to_ne_bytes(), fd.as_slice())
    }

    /// `GET_PROTOCOL_FEATURES`
    ///
    /// # Errors
    /// See [`Self::features`].
    pub fn protocol_features(&mut self) -> Result<u64, DriverError> {
        self.number_of(15)
    }

    /// `SET_PROTOCOL_FEATURES`, which is never acknowledged.
    ///
    /// # Errors
    /// See [`Self::features`].
    pub fn set_protocol_features(&mut self, features: u64) -> Result<(), DriverError> {
        self.send_message(16, &features.to_ne_bytes(), &[])?;
        self.protocol = features;
        Ok(())
    }

    /// `GET_QUEUE_NUM`
    ///
    /// # Errors
    /// See [`Self::features`].
    pub fn queue_num(&mut self) -> Result<u64, DriverError> {
        self.number_of(17)
    }

    /// `SET_VRING_ENABLE`
    ///
    /// # Errors
    /// See [`Self::features`].
    pub fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<(), DriverError> {
        self.set_state(18, index, enable.into())
    }

    /// `SET_BACKEND_REQ_FD`: returns the front-end's end of the channel.
    ///
    /// # Errors
    /// See [`Self::features`].
    pub fn open_backend_channel(&mut self) -> Result<UnixStream, DriverError> {
        let (ours, theirs) = UnixStream::pair()?;
        self.set(21, &[], &[theirs.as_fd()])?;
        ours.set_read_timeout(Some(REPLY_TIMEOUT))?;
        Ok(ours)
    }

    /// `GET_CONFIG`: `size` bytes of the config space from `offset` on.
    ///
    /// # Errors
    /// See [`Self::features`].
    pub fn config(&mut self, offset: u32, size: u32) -> Result<Vec<u8>, DriverError> {
        let request = 24;
        let mut payload = [offset, size, 0].as_bytes().to_vec();
        payload.resize(12 + size as usize, 0);
        self.send_message(request, &payload, &[])?;
        let reply = self.receive_reply(request)?;
        match reply.get(12..) {
            Some(bytes) if bytes.len() == size as usize => Ok(bytes.to_vec()),
            _ => Err(DriverError::Reply { request, answer: request, size: reply.len() }),
        }
    }

    /// `SET_CONFIG`
    ///
    /// # Errors
    /// See [`Self::features`].
    pub fn set_config(&mut self, offset: u32, bytes: &[u8]) -> Result<(), DriverError> {
        let size = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        let mut payload = [offset, size, 0].as_bytes().to_vec();
        payload.extend_from_slice(bytes);
        self.set(25, &payload, &[])
    }

    /// `RESET_DEVICE`
    ///
    /// # Errors
    /// See [`Self::features`].
    pub fn reset_device(&mut self) -> Result<(), DriverError> {
        self.set(34, &[], &[])
    }

    /// `GET_MAX_MEM_SLOTS`
    ///
    /// # Errors
    /// See [`Self::features`].
    pub fn max_mem_slots(&mut self) -> Result<u64, DriverError> {
        self.number_of(36)
    }

    /// `ADD_MEM_REG`
    ///
    /// # Errors
    /// See [`Self::features`].
    pub fn add_mem_region(&mut self, entry: &TableEntry<'_>) -> Result<(), DriverError> {
        self.set(37, &region_payload(&entry.0), &[entry.1])
    }

    /// `REM_MEM_REG`
    ///
    /// # Errors
    /// See [`Self::features`].
    pub fn remove_mem_region(&mut self, region: &Region) -> Result<(), DriverError> {
        self.set(38, &region_payload(region), &[])
    }

    /// `SET_STATUS`
    ///
    /// # Errors
    /// See [`Self::features`].
    pub fn set_status(&mut self, status: u64) -> Result<(), DriverError> {
        self.set_number(39, status)
    }

    /// `GET_STATUS`
    ///
    /// # Errors
    /// See [`Self::features`].
    pub fn status(&mut self) -> Result<u64, DriverError> {
        self.number_of(40)
    }

    /// True if the back-end closes the connection within `timeout`. Data that it still sends is
    /// discarded.
    ///
    /// # Errors
    /// [`DriverError::Io`].
    pub fn is_closed_within(&mut self, timeout: Duration) -> Result<bool, DriverError> {
        self.stream.set_read_timeout(Some(timeout))?;
        let mut bytes = [0; 256];
        let closed = loop {
            match self.stream.read(&mut bytes) {
                Ok(0) => break true,
                Ok(_) => {}
                Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock) => break false,
                Err(e) if e.kind() == io::ErrorKind::ConnectionReset => break true,
                Err(e) => return Err(e.into()),
            }
        };
        self.stream.set_read_timeout(Some(REPLY_TIMEOUT))?;
        Ok(closed)
    }
}

/// The payload of a memory region message: padding and the region.
fn region_payload(region: &Region) -> Vec<u8> {
    [&[0; 8], region.as_bytes()].concat()
}
