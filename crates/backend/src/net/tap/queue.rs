//! The two halves of a tap's queue: one system call per frame, straight from and to guest memory.
//!
//! A short frame is first copied behind its header into the daemon's memory, and leaves by `write`.
//! With `writev` the kernel would copy the iovec array before the frame, which takes three times as
//! long as this copy of 1500 bytes (98 ns of 1500). A long frame that the merger has joined of
//! short ones is copied too, since its iovec would have a slice for each of them.

use super::flows::FlowRecorder;
use crate::net::merge::{Merger, bits};
use crate::net::{Frames, GROUP_BYTES, GROUP_FRAMES, PortRx, PortTx, Readiness, Sent, Stop};
use crate::sys::tuntap as sys;
use manyring_memory::{
    GuestSlice, Mapping, copy_from_slices, copy_to_slices, fault_count, total_len,
};
use manyring_wire::net::head::HEAD_SIZE_MAX;
use manyring_wire::net::{FRAME_SIZE_MAX, HDR_F_NEEDS_CSUM, HEADER_SIZE, RawNetHeader};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::{Errno, retry_on_intr};
use std::sync::Arc;
use zerocopy::FromBytes;

/// A private copy of a frame with more slices than one system call takes (`IOV_MAX`).
#[derive(Debug, Default)]
struct FrameBounce {
    memory: Option<Mapping>,
    /// The bytes on their way from slices to slices: safe code cannot copy between them directly.
    bytes: Vec<u8>,
}

impl FrameBounce {
    /// The first `len` bytes of [`Self::memory`], and [`Self::bytes`] of the same length.
    fn parts(&mut self, len: usize) -> Result<(GuestSlice<'_>, &mut Vec<u8>), Errno> {
        if self.memory.is_none() {
            let size = (HEADER_SIZE + FRAME_SIZE_MAX) as u64;
            self.memory = Some(Mapping::anonymous(size).map_err(|_| Errno::NOMEM)?);
        }
        self.bytes.resize(len, 0);
        let own = self.memory.as_ref().and_then(|memory| memory.slice(0, len));
        Ok((own.ok_or(Errno::MSGSIZE)?, &mut self.bytes))
    }

    /// Copies all bytes of `slices` into one slice.
    fn gather(&mut self, slices: &[GuestSlice]) -> Result<GuestSlice<'_>, Errno> {
        let len = usize::try_from(total_len(slices)).map_err(|_| Errno::MSGSIZE)?;
        let (own, bytes) = self.parts(len)?;
        copy_from_slices(slices, bytes);
        own.write_from(bytes);
        Ok(own)
    }

    /// Copies the first `len` bytes of the private copy to `slices`.
    fn scatter(&mut self, len: usize, slices: &[GuestSlice]) -> Result<(), Errno> {
        let (own, bytes) = self.parts(len)?;
        own.read_into(bytes);
        copy_to_slices(slices, bytes);
        Ok(())
    }
}

/// The sending half of a tap's queue pair.
#[derive(Debug)]
pub(super) struct TapTx {
    outlet: Outlet,
    /// Joins frames; `None`: every frame leaves as the guest has sent it.
    merger: Option<Merger>,
}

/// Bytes of a short frame at most, with its header: a frame of an MTU of 1500 bytes is short.
const SHORT: usize = 2048;

/// Writes frames to the tap's queue.
#[derive(Debug)]
struct Outlet {
    queue: Arc<OwnedFd>,
    bounce: FrameBounce,
    /// The copy of one short frame, in the daemon's memory.
    own: Vec<u8>,
    /// A long frame whose headers were copied; `None` until the first one.
    held: Option<Frames>,
    /// The value of [`fault_count`] up to which the frames' memory has been checked.
    faults: u64,
    /// Notes the pair of each flow that the guest sends; `None`: the kernel learns flows by itself.
    steering: Option<FlowRecorder>,
}

impl Outlet {
    fn new(queue: Arc<OwnedFd>, steering: Option<FlowRecorder>) -> Self {
        let (bounce, own) = (FrameBounce::default(), vec![0; SHORT]);
        Self { queue, bounce, own, held: None, faults: fault_count(), steering }
    }

    /// Sends frame `index` with its header: a short one from a copy.
    #[inline]
    fn write_frame(&mut self, frames: &Frames, index: usize) -> Result<usize, Errno> {
        let size = HEADER_SIZE + frames.len(index);
        if size <= SHORT {
            self.write_copy(frames, index, size)
        } else if frames.header(index).flags & HDR_F_NEEDS_CSUM == 0 {
            self.write(frames, index)
        } else {
            self.write_unfinished(frames, index)
        }
    }

    /// Sends the one frame of `joined`: from a copy if its slices are short on average.
    fn write_joined(&mut self, joined: &Frames) -> Result<usize, Errno> {
        let size = HEADER_SIZE + joined.len(0);
        if size > SHORT * joined.slices(0).len() {
            return self.write(joined, 0);
        }
        if self.own.len() < size {
            self.own.resize(size, 0);
        }
        self.write_copy(joined, 0, size)
    }

    /// Sends a frame of `size` bytes, with its header, from a copy.
    #[inline]
    fn write_copy(&mut self, frames: &Frames, index: usize, size: usize) -> Result<usize, Errno> {
        let copied = copy_from_slices(frames.slices(index), &mut self.own[..size]);
        self.check_faults(frames)?;
        if let Some(steering) = &mut self.steering {
            steering.note(self.own.get(HEADER_SIZE..copied).unwrap_or_default());
        }
        check_place(&self.own[..copied])?;
        retry_on_intr(|| rustix::io::write(&self.queue, &self.own[..copied]))
    }

    /// Checks that the memory of these frames was not cut away. It is looked at only if memory of
    /// some guest was cut away since the last check.
    ///
    /// # Errors
    /// As for [`Self::check_memory`].
    #[inline]
    fn check_faults(&mut self, frames: &Frames) -> Result<(), Errno> {
        let faults = fault_count();
        if faults == self.faults { Ok(()) } else { self.check_memory(frames, faults) }
    }

    /// Checks whether these frames lie in memory that was cut away, because some guest's memory was
    /// cut away since the last check. A copy of such memory has zeroes, and must not be sent.
    ///
    /// `faults` was read before the check. If more memory is cut away after the check,
    /// [`fault_count`] grows beyond `faults`, and the next frame is checked again.
    ///
    /// # Errors
    /// `EFAULT`: the memory of these frames was cut away.
    #[cold]
    fn check_memory(&mut self, frames: &Frames, faults: u64) -> Result<(), Errno> {
        if frames.is_broken() {
            return Err(Errno::FAULT);
        }
        self.faults = faults;
        Ok(())
    }

    #[inline]
    fn write(&mut self, frames: &Frames, index: usize) -> Result<usize, Errno> {
        let slices = frames.slices(index);
        if let Some(steering) = &mut self.steering {
            steering.note_slices(slices);
        }
        // The kernel finds by itself memory that was cut away, unless some thread has read it
        // before: that memory has zeroes since then.
        if slices.len() <= sys::IOV_MAX {
            self.check_faults(frames)?;
            return retry_on_intr(|| sys::write(self.queue.as_fd(), slices));
        }
        let own = self.bounce.gather(slices)?;
        if fault_count() != self.faults && frames.is_broken() {
            return Err(Errno::FAULT);
        }
        retry_on_intr(|| sys::write(self.queue.as_fd(), &[own]))
    }

    /// Sends a frame with a partial checksum: its headers from a copy, which the guest cannot
    /// change between the check of the checksum's place and the host's decisions.
    fn write_unfinished(&mut self, frames: &Frames, index: usize) -> Result<usize, Errno> {
        let mut start = [0; HEADER_SIZE + HEAD_SIZE_MAX];
        let known = copy_from_slices(frames.slices(index), &mut start);
        self.check_faults(frames)?;
        check_place(&start[..known])?;
        let head = start.get(HEADER_SIZE..known).unwrap_or_default();
        // Of a frame that a switch passes on, the first bytes lie in the daemon's memory.
        let (own, payload) = frames.guest_part(index).ok_or(Errno::MSGSIZE)?;
        let mut held = match self.held.take() {
            Some(held) => held,
            None => Frames::for_joined().map_err(|_| Errno::NOMEM)?,
        };
        let behind = head.len().saturating_sub(own);
        let has_room = held.push_joined(&frames.header(index), head, (behind, [payload]));
        let is_whole = has_room && held.len(0) == frames.len(index);
        let written = if is_whole { self.write(&held, 0) } else { Err(Errno::MSGSIZE) };
        held.release();
        self.held = Some(held);
        written
    }

    /// Sends frame `index` of a burst as it is. False: it was not taken, for the reason in `sent`.
    #[inline]
    fn send_one(&mut self, frames: &Frames, index: usize, sent: &mut Sent) -> bool {
        // The kernel sends a frame whole or fails, so a short count is no error.
        if let Err(errno) = self.write_frame(frames, index) {
            sent.stop = count_error(sent, index, errno);
        }
        sent.stop.is_none()
    }
}

impl TapTx {
    pub(super) fn new(
        queue: Arc<OwnedFd>,
        merger: Option<Merger>,
        steering: Option<FlowRecorder>,
    ) -> Self {
        Self { outlet: Outlet::new(queue, steering), merger }
    }

    /// Sends the frames of a burst from `first` on, joined if the merger finds flows to join.
    #[inline]
    fn send_rest(&mut self, frames: &Frames, first: usize) -> Sent {
        if let Some(merger) = &mut self.merger
            && merger.plan(frames, first)
        {
            return self.send_groups(frames, first);
        }
        let (mut sent, mut bytes) = (Sent::default(), 0);
        for index in (first..frames.count()).take(GROUP_FRAMES) {
            if let Some(next) = frames.slices(index + 1).get(1) {
                next.prefetch_for_read();
            }
            if !self.outlet.send_one(frames, index, &mut sent) {
                break;
            }
            sent.taken += 1;
            bytes += frames.len(index);
            if bytes >= GROUP_BYTES {
                break;
            }
        }
        sent
    }

    /// Sends the groups of a planned burst. The plain version: send each frame of the group. The
    /// changes to it, and why they are right:
    /// 1. A group of several frames leaves as one joined frame. If the port is full, or the host
    ///    has no memory, the whole group waits.
    /// 2. If the host refuses the joined frame, or there is no memory for its headers, the frames
    ///    of the group are sent one by one, so none is lost because it was joined.
    /// 3. If one of these must wait, part of the group has left and part has not. The merger notes
    ///    which, and plans the rest anew.
    /// 4. Groups end after [`GROUP_FRAMES`] or [`GROUP_BYTES`], as frames do without a merger.
    /// 5. Frames of different flows may be sent out of order. Frames up to the first one that was
    ///    not sent count as taken; the merger remembers those sent behind it ([`Sent::ahead`]).
    fn send_groups(&mut self, frames: &Frames, first: usize) -> Sent {
        let Self { outlet, merger: Some(merger) } = self else { return Sent::default() };
        let (mut sent, mut holds, mut bytes) = (Sent::default(), true, 0);
        for _ in 0..GROUP_FRAMES {
            let Some(group) = merger.next() else { break };
            let (parts, is_joined, spared) =
                (group.parts, group.is_joined(), Merger::spared(group));
            let joined = is_joined.then(|| merger.next_joined(frames)).flatten();
            match joined.map(|joined| outlet.write_joined(joined)) {
                Some(Ok(_)) => {
                    sent.merged.packets += spared.packets;
                    sent.merged.frames += spared.frames;
                    merger.note_left(parts);
                }
                Some(Err(errno)) if stop_of(errno).is_some() => sent.stop = stop_of(errno),
                result => {
                    let refused_before = sent.refused;
                    for index in bits(parts) {
                        if !outlet.send_one(frames, index, &mut sent) {
                            // Point 3.
                            holds = false;
                            break;
                        }
                        merger.note_left(1 << index);
                    }
                    // The host has refused the header of the joined frame, and accepted its parts:
                    // it does not segment this kind. Join no more frames of it.
                    if matches!(result, Some(Err(errno)) if is_of_header(errno))
                        && sent.refused == refused_before
                    {
                        merger.refuse();
                        holds = false;
                    }
                }
            }
            if sent.stop.is_some() || !holds {
                break;
            }
            merger.go_on();
            bytes += bits(parts).map(|index| frames.len(index)).sum::<usize>();
            if bytes >= GROUP_BYTES {
                break;
            }
        }
        sent.taken = merger.taken(first, frames.count(), holds);
        sent.ahead = merger.ahead(first + sent.taken);
        merger.release();
        sent
    }
}

impl PortTx for TapTx {
    #[inline]
    fn send(&mut self, frames: &Frames, first: usize) -> Sent {
        if let Some(steering) = &mut self.outlet.steering {
            steering.begin();
        }
        let mut sent = self.send_rest(frames, first);
        if let Some(steering) = &mut self.outlet.steering {
            sent.steered = steering.end();
        }
        sent
    }

    fn readiness(&self) -> Readiness<'_> {
        Readiness::Fd(self.outlet.queue.as_fd())
    }

    /// [`check_place`] looks at a frame that is sent as it is; a merger joins only frames of which
    /// it has found the checksum in its place.
    fn checks_place(&self) -> bool {
        true
    }
}

/// The error of a frame whose partial checksum lies in what the host judges. The host itself never
/// fails with it.
const MISPLACED: Errno = Errno::BADMSG;

/// Checks the place of the partial checksum of a frame that begins with these bytes, which the
/// guest cannot change any more: the host judges the frame, and writes the checksum later.
///
/// # Errors
/// [`MISPLACED`]: the checksum would be written into what the host judges.
#[inline]
fn check_place(frame: &[u8]) -> Result<(), Errno> {
    let read = RawNetHeader::read_from_prefix(frame);
    let is_right = read.is_ok_and(|(header, frame)| header.is_in_place(frame));
    if is_right { Ok(()) } else { Err(MISPLACED) }
}

/// True for the errors with which the host refuses a virtio-net header that it does not know.
const fn is_of_header(errno: Errno) -> bool {
    matches!(errno, Errno::INVAL | Errno::OPNOTSUPP | Errno::PROTONOSUPPORT)
}

/// Why a frame that failed with `errno` must be offered again later; `None`: it is lost.
const fn stop_of(errno: Errno) -> Option<Stop> {
    match errno {
        Errno::AGAIN => Some(Stop::Blocked),
        Errno::NOMEM | Errno::NOBUFS => Some(Stop::NoMemory),
        _ => None,
    }
}

/// Counts frame `index`, whose write failed, as lost; or returns why it must wait.
#[cold]
fn count_error(sent: &mut Sent, index: usize, errno: Errno) -> Option<Stop> {
    if let Some(stop) = stop_of(errno) {
        return Some(stop);
    }
    match errno {
        Errno::FAULT => sent.faulted += 1,
        MISPLACED => sent.misplaced += 1,
        // The interface is down or deleted, or the lower interface of a macvtap is gone.
        Errno::IO
        | Errno::BADFD
        | Errno::NODEV
        | Errno::NXIO
        | Errno::NETDOWN
        | Errno::NOLINK
        | Errno::NETUNREACH => sent.down += 1,
        _ => sent.refused += 1,
    }
    sent.lost |= 1 << index;
    None
}

/// The receiving half of a tap's queue pair.
#[derive(Debug)]
pub(super) struct TapRx {
    queue: Arc<OwnedFd>,
    bounce: FrameBounce,
}

impl TapRx {
    pub(super) fn new(queue: Arc<OwnedFd>) -> Self {
        Self { queue, bounce: FrameBounce::default() }
    }

    #[cold]
    fn recv_by_copy(&mut self, buffers: &[GuestSlice]) -> Result<usize, Errno> {
        let room = usize::try_from(total_len(buffers)).unwrap_or(usize::MAX);
        let (own, _) = self.bounce.parts(room.min(HEADER_SIZE + FRAME_SIZE_MAX))?;
        let len = retry_on_intr(|| sys::read(self.queue.as_fd(), &[own]))?;
        self.bounce.scatter(len, buffers)?;
        Ok(len)
    }
}

impl PortRx for TapRx {
    #[inline]
    fn recv(&mut self, buffers: &[GuestSlice]) -> Result<usize, Errno> {
        if buffers.len() > sys::IOV_MAX {
            return self.recv_by_copy(buffers);
        }
        retry_on_intr(|| sys::read(self.queue.as_fd(), buffers))
    }

    fn readiness(&self) -> Readiness<'_> {
        Readiness::Fd(self.queue.as_fd())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use manyring_memory::SliceList;
    use manyring_wire::net::RawNetHeader;

    #[test]
    fn a_copy_holds_the_longest_frame_and_no_longer_one() {
        let guest = Mapping::anonymous(1 << 18).unwrap();
        let bytes: Vec<_> = (0..=u8::MAX).cycle().take(HEADER_SIZE + FRAME_SIZE_MAX).collect();
        guest.slice(0, bytes.len()).unwrap().write_from(&bytes);
        let pieces: Vec<_> = (0..bytes.len()).map(|at| guest.slice(at, 1).unwrap()).collect();
        let mut bounce = FrameBounce::default();
        let own = bounce.gather(&pieces).unwrap();
        let mut copy = vec![0; bytes.len()];
        assert_eq!(own.read_into(&mut copy), bytes.len());
        assert!(copy == bytes);
        for piece in &pieces {
            piece.fill_zero();
        }
        bounce.scatter(bytes.len(), &pieces).unwrap();
        assert_eq!(copy_from_slices(&pieces, &mut copy), bytes.len());
        assert!(copy == bytes);
        let more = [&pieces[..], &pieces[..1]].concat();
        assert_eq!(bounce.gather(&more).err(), Some(Errno::MSGSIZE));
    }

    #[test]
    fn a_burst_is_sent_in_groups_that_the_driver_can_see_meanwhile() {
        let sink = std::fs::File::options().write(true).open("/dev/null").unwrap();
        let mut tx = TapTx::new(Arc::new(sink.into()), None, None);
        let memory = Arc::new(Mapping::anonymous(4096).unwrap());
        let slices = SliceList::of_mapping(&memory, &[(0, 60)]).unwrap();
        let mut frames = Frames::new().unwrap();
        (0..40).for_each(|_| assert!(frames.push(&RawNetHeader::default(), slices.all(), 0, 60)));
        let taken: Vec<_> = [0, 16, 32].map(|first| tx.send(&frames, first)).to_vec();
        assert_eq!(taken, [16, 16, 8].map(|taken| Sent { taken, ..Sent::default() }));
    }

    #[test]
    fn a_group_ends_after_so_many_bytes_though_some_frames_of_the_burst_are_merged() {
        let sink = std::fs::File::options().write(true).open("/dev/null").unwrap();
        let mut tx = TapTx::new(Arc::new(sink.into()), Some(Merger::new(true)), None);
        let memory = Arc::new(Mapping::anonymous(1 << 18).unwrap());
        let (header, bytes) = datagram(1, 100);
        memory.slice(1 << 17, bytes.len()).unwrap().write_from(&bytes);
        let len = bytes.len();
        let places = [(0, 64_012), (1 << 17, u32::try_from(len).unwrap())];
        let list = SliceList::of_mapping(&memory, &places).unwrap();
        let mut frames = Frames::new().unwrap();
        (0..2).for_each(|_| assert!(frames.push(&header, list.pieces(1..2), 0, len)));
        let long = RawNetHeader::default();
        (2..64).for_each(|_| assert!(frames.push(&long, list.pieces(0..1), 0, 64_000)));
        let sent = tx.send(&frames, 0);
        let bytes: usize = (0..sent.taken).map(|index| frames.len(index)).sum();
        assert!(bytes < GROUP_BYTES + (1 << 16), "{} frames, {bytes} bytes", sent.taken);
    }

    #[test]
    fn what_the_system_says_of_a_frame_is_counted_as_what_it_means() {
        let mut sent = Sent::default();
        assert_eq!(count_error(&mut sent, 9, Errno::AGAIN), Some(Stop::Blocked));
        assert_eq!(count_error(&mut sent, 9, Errno::NOBUFS), Some(Stop::NoMemory));
        assert_eq!(count_error(&mut sent, 9, Errno::NOMEM), Some(Stop::NoMemory));
        assert_eq!(sent, Sent::default());
        let lost = [Errno::INVAL, Errno::MSGSIZE, Errno::IO, Errno::BADFD, Errno::FAULT, MISPLACED];
        for (index, errno) in (58..).zip(lost) {
            assert_eq!(count_error(&mut sent, index, errno), None);
        }
        assert_eq!((sent.refused, sent.down, sent.faulted, sent.misplaced), (2, 2, 1, 1));
        assert_eq!(sent.lost, 0b11_1111 << 58);
    }

    /// A UDP datagram over IPv6 of the flow from `port`, which is the last byte of its payload too.
    fn datagram(port: u8, payload: usize) -> (RawNetHeader, Vec<u8>) {
        let len = u16::try_from(8 + payload).unwrap();
        let mut bytes = vec![0; 12];
        bytes.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
        bytes.extend(len.to_be_bytes());
        bytes.extend([17, 64]);
        bytes.extend([0; 32]);
        bytes.extend([0, port, 0, 9]);
        bytes.extend(len.to_be_bytes());
        bytes.extend((len + 17).to_be_bytes());
        bytes.resize(bytes.len() + payload, port);
        let flags = HDR_F_NEEDS_CSUM;
        let (csum_start, csum_offset) = (54.into(), 6.into());
        (RawNetHeader { flags, csum_start, csum_offset, ..RawNetHeader::default() }, bytes)
    }

    /// A burst of frames that lie in a guest's memory.
    fn burst(of: &[(RawNetHeader, Vec<u8>)]) -> Frames {
        let memory = Arc::new(Mapping::anonymous(1 << 22).unwrap());
        let mut places = Vec::new();
        for (at, (_, bytes)) in (0..).step_by(1 << 15).zip(of) {
            memory.slice(at, bytes.len()).unwrap().write_from(bytes);
            places.push((at as u64, u32::try_from(bytes.len()).unwrap()));
        }
        let list = SliceList::of_mapping(&memory, &places).unwrap();
        let mut frames = Frames::new().unwrap();
        for (n, (header, bytes)) in of.iter().enumerate() {
            assert!(frames.push(header, list.pieces(n..n + 1), 0, bytes.len()));
        }
        frames
    }

    #[test]
    fn a_frame_leaves_as_it_is_whether_it_is_copied_first_or_not() {
        let (tap, host) = std::os::unix::net::UnixDatagram::pair().unwrap();
        let mut tx = TapTx::new(Arc::new(tap.into()), None, None);
        // Bytes of payload of such a datagram in a frame of `size` bytes.
        let payload = |size: usize| size - HEADER_SIZE - 62;
        let sizes = [SHORT + 1, SHORT, 100, SHORT - 1, 1500, 75];
        let of: Vec<_> = (0..).zip(sizes).map(|(n, size)| datagram(n, payload(size))).collect();
        let frames = burst(&of);
        assert_eq!(tx.send(&frames, 0).taken, of.len());
        for (header, bytes) in &of {
            let mut received = vec![0; 1 << 16];
            let len = host.recv(&mut received).unwrap();
            let sent = [zerocopy::IntoBytes::as_bytes(header), bytes].concat();
            assert!(received[..len] == sent, "{} bytes", bytes.len());
        }
    }

    #[test]
    fn a_frame_that_was_changed_so_that_its_checksum_lies_in_its_headers_is_refused() {
        let (tap, host) = std::os::unix::net::UnixDatagram::pair().unwrap();
        let mut tx = TapTx::new(Arc::new(tap.into()), None, None);
        for payload in [100, 9000] {
            let memory = Arc::new(Mapping::anonymous(1 << 16).unwrap());
            let (header, bytes) = datagram(1, payload);
            memory.slice(0, bytes.len()).unwrap().write_from(&bytes);
            let len = u32::try_from(bytes.len()).unwrap();
            let list = SliceList::of_mapping(&memory, &[(0, 30), (30, len - 30)]).unwrap();
            let mut frames = Frames::new().unwrap();
            (0..2).for_each(|_| assert!(frames.push(&header, list.all(), 0, bytes.len())));
            // The driver makes the frame one of another kind after the device has checked it.
            for kind in [[8, 6], [8, 0], [0x81, 0]] {
                memory.slice(12, 2).unwrap().write_from(&kind);
                let sent = tx.send(&frames, 1);
                assert_eq!(sent, Sent { taken: 1, misplaced: 1, lost: 0b10, ..Sent::default() });
            }
            memory.slice(12, 2).unwrap().write_from(&[0x86, 0xdd]);
            assert_eq!(tx.send(&frames, 1), Sent { taken: 1, ..Sent::default() });
            let mut received = vec![0; 1 << 16];
            let size = host.recv(&mut received).unwrap();
            assert!(received[HEADER_SIZE..size] == bytes, "{payload}");
        }
    }

    #[test]
    fn a_frame_whose_checksum_lies_in_its_headers_is_refused_among_frames_that_are_joined() {
        let (tap, host) = std::os::unix::net::UnixDatagram::pair().unwrap();
        let mut tx = TapTx::new(Arc::new(tap.into()), Some(Merger::new(true)), None);
        let mut of = vec![datagram(1, 100); 7];
        for (n, start) in [(1, 12), (2, 34), (3, 48)] {
            of[n].0.csum_start = start.into();
        }
        let sent = tx.send(&burst(&of), 0);
        let merged = crate::net::Merged { packets: 3, frames: 1 };
        let lost = Sent { taken: 7, misplaced: 3, lost: 0b1110, ..Sent::default() };
        assert_eq!(sent, Sent { merged, ..lost });
        let mut received = vec![0; 1 << 16];
        let (header, bytes) = &of[0];
        let size = host.recv(&mut received).unwrap();
        assert!(received[..size] == [zerocopy::IntoBytes::as_bytes(header), bytes].concat());
        assert_eq!(host.recv(&mut received).unwrap(), HEADER_SIZE + 62 + 3 * 100);
    }

    #[test]
    fn a_frame_that_a_switch_passes_on_leaves_whole_if_its_checksum_is_left_to_the_host() {
        let (tap, host) = std::os::unix::net::UnixDatagram::pair().unwrap();
        let mut tx = TapTx::new(Arc::new(tap.into()), None, None);
        let (header, mut bytes) = datagram(1, 9000);
        (0_u8..=255).cycle().zip(&mut bytes[62..]).for_each(|(n, byte)| *byte = n);
        let memory = Arc::new(Mapping::anonymous(1 << 16).unwrap());
        memory.slice(0, bytes.len()).unwrap().write_from(&bytes);
        let end = u32::try_from(bytes.len()).unwrap();
        for cuts in [vec![], vec![10], vec![116], vec![117], vec![13, 119, 5000]] {
            let starts: Vec<u32> = [&[0][..], &cuts].concat();
            let ends: Vec<u32> = [&cuts[..], &[end]].concat();
            let places: Vec<_> =
                starts.iter().zip(&ends).map(|(from, to)| (u64::from(*from), to - from)).collect();
            let list = SliceList::of_mapping(&memory, &places).unwrap();
            let mut frames = Frames::new().unwrap();
            assert!(frames.push(&header, list.all(), 0, bytes.len()));
            // The switch copies the bytes that it has examined.
            for head in [14, 18, 116] {
                let mut passed = Frames::for_channel().unwrap();
                assert!(passed.push_lent(&frames, 0, &bytes[..head]));
                assert_eq!(tx.send(&passed, 0), Sent { taken: 1, ..Sent::default() });
                let mut received = vec![0; 1 << 16];
                let len = host.recv(&mut received).unwrap();
                let sent = [zerocopy::IntoBytes::as_bytes(&header), &bytes].concat();
                assert!(received[..len] == sent, "{len} bytes of {cuts:?} behind {head}");
            }
        }
    }

    #[test]
    fn a_frame_is_lost_if_its_memory_was_cut_away_behind_headers_that_are_right() {
        manyring_memory::install_sigbus_handler();
        let (tap, host) = std::os::unix::net::UnixDatagram::pair().unwrap();
        host.set_nonblocking(true).unwrap();
        let mut tx = TapTx::new(Arc::new(tap.into()), None, None);
        let (header, bytes) = datagram(1, 9000);
        // A switch has copied the headers before the cut, or there is none.
        for is_passed_on in [false, true] {
            let file = rustix::fs::memfd_create("cut", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
            rustix::fs::ftruncate(&file, 1 << 16).unwrap();
            let memory = Arc::new(Mapping::of_file(&file, 0, 1 << 16).unwrap());
            // The page ends behind the headers.
            let at = 4096 - 62;
            memory.slice(at, bytes.len()).unwrap().write_from(&bytes);
            let place = (at as u64, u32::try_from(bytes.len()).unwrap());
            let list = SliceList::of_mapping(&memory, &[place]).unwrap();
            let (mut frames, mut passed) = (Frames::new().unwrap(), Frames::for_channel().unwrap());
            assert!(frames.push(&header, list.all(), 0, bytes.len()));
            assert!(passed.push_lent(&frames, 0, &bytes[..62]));
            rustix::fs::ftruncate(&file, 4096).unwrap();
            for _ in 0..2 {
                let sent = tx.send(if is_passed_on { &passed } else { &frames }, 0);
                assert_eq!(sent, Sent { taken: 1, faulted: 1, lost: 1, ..Sent::default() });
                assert!(host.recv(&mut [0; 64]).is_err(), "zeroes were sent");
            }
        }
    }

    #[test]
    fn a_joined_frame_holds_what_its_parts_do_whether_it_is_copied_first_or_not() {
        for (payload, parts) in [(1, 64), (100, 16), (1400, 40), (2048, 16), (2100, 8), (9000, 7)] {
            let (tap, host) = std::os::unix::net::UnixDatagram::pair().unwrap();
            let mut tx = TapTx::new(Arc::new(tap.into()), Some(Merger::new(true)), None);
            let mut of: Vec<_> = (0..parts).map(|_| datagram(1, payload)).collect();
            // Each part has bytes of its own; the checksum is the host's to finish.
            for (n, (_, bytes)) in (0..).zip(&mut of) {
                bytes[62..].fill(n);
            }
            let sent = tx.send(&burst(&of), 0);
            assert_eq!((sent.taken, sent.merged.frames), (of.len(), 1), "{payload}");
            let mut received = vec![0; 1 << 17];
            let len = host.recv(&mut received).unwrap();
            let all: Vec<u8> = of.iter().flat_map(|(_, bytes)| bytes[62..].to_vec()).collect();
            assert!(received[HEADER_SIZE + 62..len] == all, "{payload}");
            assert_eq!(received[12..24], of[0].1[..12]);
        }
    }

    #[test]
    fn a_port_that_is_full_between_two_flows_gets_each_frame_once() {
        use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair, sockopt};
        let (flags, unix) = (SocketFlags::NONBLOCK, AddressFamily::UNIX);
        let (tap, host) = socketpair(unix, SocketType::SEQPACKET, flags, None).unwrap();
        sockopt::set_socket_send_buffer_size(&tap, 1).unwrap();
        let turns: Vec<_> = (0..8).map(|n| datagram(1 + n % 2, 1000)).collect();
        let frames = burst(&turns);
        let mut tx = TapTx::new(Arc::new(tap), Some(Merger::new(true)), None);
        let received = || {
            let mut bytes = vec![0; 1 << 16];
            let len = rustix::io::read(&host, &mut bytes).unwrap();
            (len, bytes[len - 1])
        };
        let joined = HEADER_SIZE + 62 + 4 * 1000;
        let mut sent = tx.send(&frames, 0);
        // The first flow has left, all of it; the second has not begun.
        assert_eq!((sent.taken, sent.stop, sent.ahead), (1, Some(Stop::Blocked), 0b101_0100));
        assert_eq!((sent.merged.packets, sent.merged.frames), (4, 1));
        assert_eq!(tx.send(&frames, 1).taken, 0, "it is full still");
        assert_eq!(received(), (joined, 1));
        sent = tx.send(&frames, 1);
        assert_eq!((sent.taken, sent.stop, sent.ahead), (7, None, 0));
        assert_eq!(received(), (joined, 2));
        let none = rustix::io::read(&host, &mut [0; 64][..]);
        assert_eq!(none, Err(Errno::AGAIN), "a frame came twice");
    }

    #[test]
    fn only_a_header_that_the_host_refuses_ends_merging_of_its_kind() {
        let told = [
            (Errno::INVAL, true),
            (Errno::OPNOTSUPP, true),
            (Errno::IO, false),
            (Errno::BADFD, false),
            (Errno::FAULT, false),
            (Errno::MSGSIZE, false),
            (Errno::NETDOWN, false),
        ];
        for (errno, ends) in told {
            assert_eq!(is_of_header(errno), ends, "{errno}");
        }
        // If there is no room for a long frame, the host has not refused its header.
        let (ours, theirs) = std::os::unix::net::UnixDatagram::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        theirs.set_nonblocking(true).unwrap();
        // The kernel doubles the size that it is told: one frame fits, and both joined do not.
        rustix::net::sockopt::set_socket_send_buffer_size(&ours, 16 << 10).unwrap();
        let mut tx = TapTx::new(Arc::new(ours.into()), Some(Merger::new(true)), None);
        let send = |tx: &mut TapTx, payload: usize| {
            let of: Vec<_> = (0..2).map(|_| datagram(1, payload)).collect();
            let sent = tx.send(&burst(&of), 0);
            assert_eq!((sent.taken, sent.lost), (2, 0), "{payload}");
            sent.merged.frames
        };
        assert_eq!(send(&mut tx, 17_000), 0, "each of them left alone");
        let mut bytes = [0; 64];
        (0..2).for_each(|_| assert_eq!(theirs.recv(&mut bytes).unwrap(), 64));
        assert_eq!(send(&mut tx, 100), 1);
    }
}
