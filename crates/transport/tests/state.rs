//! A session over a real socket: the device's state is saved, and loaded, as QEMU, Cloud Hypervisor
//! and others do it; and as a front-end does it that wants to hold the daemon up. The device, here
//! a recorder, decides about a state that it gets.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where it fails")]

mod front;

use front::{Asked, Front, STATE, TIMEOUT, doorbell, memory};
use manyring_wire::vhost_user::{
    STATE_FAILED, STATE_LOAD, STATE_NO_FD, STATE_SAVE, STATE_STOPPED, StateTransfer,
};
use manyring_wire::virtio::{VIRTIO_ID_BLOCK, VIRTIO_ID_NET};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl, seek};
use rustix::pipe::{PipeFlags, fcntl_setpipe_size, pipe_with};
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use zerocopy::IntoBytes;

const SAVE: StateTransfer = StateTransfer { direction: STATE_SAVE, phase: STATE_STOPPED };
const LOAD: StateTransfer = StateTransfer { direction: STATE_LOAD, phase: STATE_STOPPED };
const REFUSED: u64 = STATE_NO_FD | STATE_FAILED;

/// Bytes of a state at most (`transfer.rs`).
const LONGEST: usize = 16 << 10;

fn pipe() -> (File, OwnedFd) {
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).unwrap();
    (reader.into(), writer)
}

/// The front-end's end, and the one that it gives away.
fn sockets() -> (UnixStream, OwnedFd) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    (ours, theirs.into())
}

/// True as soon as nobody reads any more: the device's janitor closes what it was given.
fn has_no_reader(writer: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(writer, PollFlags::empty())];
    poll(&mut fds, Some(&Timespec::try_from(TIMEOUT).unwrap())) == Ok(1)
}

impl Front {
    fn begins(&mut self, transfer: StateTransfer, fd: OwnedFd) -> u64 {
        self.send("SET_DEVICE_STATE_FD", 0, transfer.as_bytes(), &[fd.as_fd()]);
        self.number()
    }

    fn check(&mut self) -> u64 {
        self.send("CHECK_DEVICE_STATE", 0, &[], &[]);
        self.number()
    }

    /// The states that the device was to take.
    fn taken(&self) -> Vec<Vec<u8>> {
        let state = |asked| match asked {
            Asked::Restore(state) => Some(state),
            _ => None,
        };
        self.device.asked().into_iter().filter_map(state).collect()
    }
}

/// QEMU gives one end of a pipe and reads the other, Cloud Hypervisor has a socket, OpenVMM a file
/// in memory.
#[test]
fn a_state_is_saved_to_whatever_the_front_end_gives() {
    let mut front = Front::new(VIRTIO_ID_NET, true);
    let mut state = Vec::new();
    let (mut reader, writer) = pipe();
    assert_eq!(front.begins(SAVE, writer), STATE_NO_FD);
    reader.read_to_end(&mut state).unwrap();
    assert_eq!((front.check(), &state[..]), (0, STATE));
    let (mut ours, theirs) = sockets();
    assert_eq!(front.begins(SAVE, theirs), STATE_NO_FD);
    state.clear();
    ours.read_to_end(&mut state).unwrap();
    assert_eq!((front.check(), &state[..]), (0, STATE));
    let file = memory(0);
    assert_eq!(front.begins(SAVE, file.try_clone().unwrap()), STATE_NO_FD);
    assert_eq!(front.check(), 0);
    let mut file = File::from(file);
    seek(&file, rustix::fs::SeekFrom::Start(0)).unwrap();
    state.clear();
    file.read_to_end(&mut state).unwrap();
    assert_eq!(state, STATE);
    // There is no transfer any more.
    assert_eq!(front.check(), STATE_FAILED);
    front.leave();
}

#[test]
fn a_state_is_loaded_from_whatever_the_front_end_gives() {
    for agrees in [true, false] {
        let mut front = Front::new(VIRTIO_ID_BLOCK, agrees);
        let answer = if agrees { 0 } else { STATE_FAILED };
        let (reader, writer) = pipe();
        assert_eq!(front.begins(LOAD, reader.into()), STATE_NO_FD);
        let mut writer = File::from(writer);
        // In pieces, as they come out of a migration stream.
        for piece in STATE.chunks(1000) {
            writer.write_all(piece).unwrap();
        }
        drop(writer);
        assert_eq!(front.check(), answer);
        let (mut ours, theirs) = sockets();
        assert_eq!(front.begins(LOAD, theirs), STATE_NO_FD);
        ours.write_all(&[1; LONGEST]).unwrap();
        drop(ours);
        assert_eq!(front.check(), answer);
        let mut file = File::from(memory(0));
        file.write_all(&[2; 5]).unwrap();
        file.sync_all().unwrap();
        seek(&file, rustix::fs::SeekFrom::Start(0)).unwrap();
        assert_eq!(front.begins(LOAD, file.into()), STATE_NO_FD);
        assert_eq!(front.check(), answer);
        assert_eq!(front.taken(), [STATE, &[1; LONGEST], &[2; 5]]);
        front.leave();
    }
}

/// The session goes on: it is the front-end that is told.
#[test]
fn a_state_without_an_end_too_long_or_from_nowhere_is_not_taken() {
    let mut front = Front::new(VIRTIO_ID_NET, true);
    // A pipe that never ends.
    let (reader, writer) = pipe();
    assert_eq!(front.begins(LOAD, reader.into()), STATE_NO_FD);
    rustix::io::write(&writer, STATE).unwrap();
    assert_eq!(front.check(), STATE_FAILED);
    assert!(has_no_reader(&writer));
    // A state that is too long, and whose writer waits for its reader.
    let (reader, writer) = pipe();
    assert_eq!(front.begins(LOAD, reader.into()), STATE_NO_FD);
    let mut writer = File::from(writer);
    assert!(writer.write_all(&vec![1; 1 << 20]).is_err(), "nobody reads on");
    assert_eq!(front.check(), STATE_FAILED);
    let (mut ours, theirs) = sockets();
    assert_eq!(front.begins(LOAD, theirs), STATE_NO_FD);
    ours.write_all(&[1; LONGEST + 1]).unwrap();
    drop(ours);
    assert_eq!(front.check(), STATE_FAILED);
    // Files that are no channel.
    for path in ["/dev/zero", "/proc/self/maps", "/"] {
        assert_eq!(front.begins(LOAD, File::open(path).unwrap().into()), REFUSED, "{path}");
        assert_eq!(front.check(), STATE_FAILED);
    }
    assert_eq!(front.begins(SAVE, doorbell()), REFUSED);
    // The wrong end, and an end without another.
    let (reader, _writer) = pipe();
    assert_eq!(front.begins(SAVE, reader.into()), REFUSED);
    let (reader, writer) = pipe();
    drop(reader);
    assert_eq!(front.begins(SAVE, writer), REFUSED);
    assert_eq!(front.taken(), [[0; 0]; 0]);
    // An empty state is the device's to refuse.
    let (reader, writer) = pipe();
    assert_eq!(front.begins(LOAD, reader.into()), STATE_NO_FD);
    drop(writer);
    assert_eq!(front.check(), 0);
    assert_eq!(front.taken(), [[0; 0]]);
    front.leave();
}

#[test]
fn a_reader_that_is_slow_has_the_state_when_it_has_read_and_one_that_does_not_read_has_not() {
    let mut front = Front::new(VIRTIO_ID_NET, true);
    let full = || {
        let (reader, writer) = pipe();
        fcntl_setpipe_size(&writer, 4096).unwrap();
        fcntl_setfl(&writer, fcntl_getfl(&writer).unwrap() | OFlags::NONBLOCK).unwrap();
        while rustix::io::write(&writer, &[1]).is_ok() {}
        (reader, writer)
    };
    let (mut reader, writer) = full();
    assert_eq!(front.begins(SAVE, writer), STATE_NO_FD);
    // Other messages are answered.
    assert_eq!(front.ask("SET_OWNER", &[], &[]), 0);
    let mut all = Vec::new();
    reader.read_to_end(&mut all).unwrap();
    assert!(all.ends_with(STATE) && all.len() > STATE.len());
    assert_eq!(front.check(), 0);
    let (_reader, writer) = full();
    assert_eq!(front.begins(SAVE, writer), STATE_NO_FD);
    assert_eq!(front.check(), STATE_FAILED);
    front.leave();
}

#[test]
fn a_transfer_of_another_direction_or_phase_is_refused() {
    let mut front = Front::new(VIRTIO_ID_NET, true);
    for (direction, phase) in [(2, STATE_STOPPED), (STATE_SAVE, 1), (STATE_LOAD, u32::MAX)] {
        let (_reader, writer) = pipe();
        assert_eq!(front.begins(StateTransfer { direction, phase }, writer), REFUSED);
    }
    // A new transfer takes the place of one that was not asked about.
    let (reader, _writer) = pipe();
    assert_eq!(front.begins(LOAD, reader.into()), STATE_NO_FD);
    let (mut reader, writer) = pipe();
    assert_eq!(front.begins(SAVE, writer), STATE_NO_FD);
    let mut state = Vec::new();
    reader.read_to_end(&mut state).unwrap();
    assert_eq!((front.check(), &state[..]), (0, STATE));
    // A transfer ends with its session, for which nobody waits.
    let (reader, _writer) = pipe();
    assert_eq!(front.begins(LOAD, reader.into()), STATE_NO_FD);
    front.leave();
    let mut front = Front::new(VIRTIO_ID_NET, true);
    assert!(front.ends_with("SET_DEVICE_STATE_FD", SAVE.as_bytes(), &[]), "an fd comes with it");
    front.leave();
}
