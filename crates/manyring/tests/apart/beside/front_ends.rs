//! Beside front-ends that send wrong messages, more of them than are due, odd doorbells, or memory
//! that they take back or spoil.

use super::{Beside, connect};
use crate::support::prober::RETRY_DELAY;
use crate::support::process::TIMEOUT;
use crate::support::rings::{Restart, spare_region};
use manyring_driver::hostile::OddFd;
use manyring_driver::{BlkDriver, BlkDriverOptions, DriverOp, FrontEnd};
use manyring_wire::vhost_user::{
    F_LOG_ALL, F_PROTOCOL_FEATURES, InflightArea, LogArea, PROTOCOL_F_CONFIGURE_MEM_SLOTS,
    PROTOCOL_F_DEVICE_STATE, PROTOCOL_F_INFLIGHT_SHMFD, PROTOCOL_F_LOG_SHMFD, PROTOCOL_F_REPLY_ACK,
    Region, STATE_SAVE, STATE_STOPPED, StateTransfer,
};
use rustix::event::epoll;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::path::Path;
use zerocopy::IntoBytes;

/// Numbers of vhost-user requests.
const GET_FEATURES: u32 = 1;
const SET_LOG_BASE: u32 = 6;
const SET_INFLIGHT_FD: u32 = 32;
const SET_DEVICE_STATE_FD: u32 = 42;
/// Numbers of requests and more: all that there are, and some that there are not.
const REQUESTS: u32 = 48;
/// Sets of epoll that watch a file descriptor: a wake-up of each costs some 200 ns.
const SETS: usize = 1000;

fn memory(size: u64) -> OwnedFd {
    let file = memfd_create("beside", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, size).unwrap();
    file
}

fn watched_by_many(fd: impl AsFd) -> Vec<OwnedFd> {
    let watch = || {
        let set = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        epoll::add(&set, fd.as_fd(), epoll::EventData::new_u64(0), epoll::EventFlags::IN).unwrap();
        set
    };
    (0..SETS).map(|_| watch()).collect()
}

fn with_protocol(bits: u64) -> BlkDriverOptions {
    let options = BlkDriverOptions::default();
    BlkDriverOptions { protocol_features: options.protocol_features | bits, ..options }
}

#[test]
fn neighbours_of_wrong_messages_and_of_more_descriptors_than_are_due_wait_for_nothing() {
    let mut beside = Beside::new();
    let bad = beside.bad();
    let mut number = 0_u32;
    beside.bear("messages that are wrong", || {
        let mut front = FrontEnd::connect(&bad, TIMEOUT).unwrap();
        for size in [0, 1, 8, 40, 264, 4096, 5000] {
            number += 1;
            let _ = front.send_message(number % REQUESTS, &vec![0xff; size], &[]);
        }
        let _ = front.is_closed_within(RETRY_DELAY);
    });
    beside.bear("more file descriptors than a message has", || {
        let front = FrontEnd::connect(&bad, TIMEOUT).unwrap();
        let file = OddFd::File.open().unwrap();
        let fds = vec![file.fd.as_fd(); 250];
        let _ = send_many(&front, &fds);
        std::thread::sleep(RETRY_DELAY);
    });
    beside.bear("answers that nobody reads", || {
        let mut front = FrontEnd::connect(&bad, TIMEOUT).unwrap();
        front.stream().set_nonblocking(true).unwrap();
        while front.send_message(GET_FEATURES, &[], &[]).is_ok() {}
        std::thread::sleep(RETRY_DELAY);
    });
}

/// Sends the first byte of a message with these file descriptors.
fn send_many(front: &FrontEnd, fds: &[rustix::fd::BorrowedFd<'_>]) -> rustix::io::Result<usize> {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    let mut space = vec![std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    sendmsg(front.stream(), &[std::io::IoSlice::new(&[1])], &mut control, SendFlags::NOSIGNAL)
}

#[test]
fn neighbours_of_regions_that_come_and_go_and_of_vast_memory_wait_for_nothing() {
    let mut beside = Beside::new();
    let bad = beside.bad();
    let mut guest = connect(&bad, &with_protocol(PROTOCOL_F_CONFIGURE_MEM_SLOTS));
    for number in 1..100 {
        let (region, file) = spare_region(number);
        guest.front.add_mem_region(&(region, file.as_fd())).unwrap();
    }
    let (region, file) = spare_region(1000);
    beside.bear("regions that come and go beside a hundred others", || {
        guest.front.add_mem_region(&(region, file.as_fd())).unwrap();
        guest.front.remove_mem_region(&region).unwrap();
    });
    drop(guest);
    let vast = memory(1 << 42);
    beside.bear("memory of terabytes without a page", || {
        let mut front = FrontEnd::connect(&bad, TIMEOUT).unwrap();
        let protocol = PROTOCOL_F_CONFIGURE_MEM_SLOTS | PROTOCOL_F_REPLY_ACK;
        front.negotiate(0, F_PROTOCOL_FEATURES, protocol).unwrap();
        for number in 0..16_u64 {
            let at = number << 42;
            let place = Region { guest_addr: at, size: 1 << 42, user_addr: at, mmap_offset: 0 };
            let _ = front.add_mem_region(&(place, vast.as_fd()));
        }
    });
}

#[test]
fn neighbours_of_doorbells_that_are_rung_watched_or_shared_without_end_wait_for_little() {
    let mut beside = Beside::new();
    let bad = beside.bad();
    let mut front = FrontEnd::connect(&bad, TIMEOUT).unwrap();
    front.negotiate(0, F_PROTOCOL_FEATURES, PROTOCOL_F_REPLY_ACK).unwrap();
    let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    front.set_vring_kick(0, Some(reader.as_fd())).unwrap();
    rustix::io::ioctl_fionbio(&writer, true).unwrap();
    beside.bear("a pipe that is kicked without end", || {
        let _ = rustix::io::write(&writer, &[1; 4096]);
    });
    drop((front, reader, writer));
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    ours.shutdown(std::net::Shutdown::Both).unwrap();
    beside.bear("a kick that is shut down, and one that is the session's own socket", || {
        let mut front = FrontEnd::connect(&bad, TIMEOUT).unwrap();
        front.negotiate(0, F_PROTOCOL_FEATURES, PROTOCOL_F_REPLY_ACK).unwrap();
        let _ = front.set_vring_kick(0, Some(theirs.as_fd()));
        let own = front.stream().try_clone().unwrap();
        let _ = front.set_vring_kick(0, Some(own.as_fd()));
    });
    let options = BlkDriverOptions { queues: 8, ..BlkDriverOptions::default() };
    let mut guest = connect(&bad, &options);
    let kick = guest.queues[0].vring().kick_fd().try_clone_to_owned().unwrap();
    for queue in 0..8 {
        guest.front.set_vring_kick(queue, Some(kick.as_fd())).unwrap();
    }
    let sets = watched_by_many(&kick);
    let mut restarts: Vec<_> = guest.queues.iter_mut().map(|q| Restart::of(q.vring())).collect();
    restarts.iter_mut().for_each(|restart| restart.kick_by(&kick));
    beside.bear(
        "one eventfd with many waiters as the kick of all rings that stop and start",
        || {
            for restart in &restarts {
                rustix::io::write(&kick, &1_u64.to_ne_bytes()).unwrap();
                restart.run(&mut guest.front);
            }
        },
    );
    drop((guest, sets));
    let mut front = FrontEnd::connect(&bad, TIMEOUT).unwrap();
    let sets = watched_by_many(front.stream());
    beside.bear("many waiters on the session's socket", || {
        front.features().unwrap();
    });
    drop(sets);
}

/// Has the rings of a guest recorded in a region of its own, from their beginning on.
fn record_in(guest: &mut BlkDriver, region: &OwnedFd, size: u64) {
    let restart = Restart::of(guest.queues[0].vring());
    guest.front.vring_base(0).unwrap();
    let queue_size = guest.queues[0].vring().size();
    let area = InflightArea { size, offset: 0, queues: 1, queue_size, padding: [0; 2] };
    guest.front.send_message(SET_INFLIGHT_FD, area.as_bytes(), &[region.as_fd()]).unwrap();
    restart.run(&mut guest.front);
}

#[test]
fn neighbours_of_regions_and_logs_that_their_front_end_spoils_wait_for_nothing() {
    const SIZE: u64 = 16 + 128 * 16;
    let mut beside = Beside::new();
    let bad = beside.bad();
    let options = with_protocol(PROTOCOL_F_INFLIGHT_SHMFD);
    let mut byte = 0;
    beside.bear("an in-flight region that is rewritten", || {
        byte += 1;
        let mut guest = connect(&bad, &options);
        let region = memory(SIZE.next_multiple_of(4096));
        record_in(&mut guest, &region, SIZE.next_multiple_of(64));
        for at in 0..SIZE {
            rustix::io::pwrite(&region, &[byte], at).unwrap();
            if at % 64 == 0 {
                let _ = guest.queues[0].submit(DriverOp::Flush);
                let _ = guest.queues[0].publish();
            }
        }
        let _ = guest.front.vring_base(0);
    });
    let logged = with_protocol(PROTOCOL_F_LOG_SHMFD);
    let logged = BlkDriverOptions { features: logged.features | F_LOG_ALL, ..logged };
    beside.bear("a migration log that is cut away", || {
        let mut guest = connect(&bad, &logged);
        let log = memory(1 << 20);
        let area = LogArea { size: 1 << 20, offset: 0 };
        guest.front.send_message(SET_LOG_BASE, area.as_bytes(), &[log.as_fd()]).unwrap();
        let _ = guest.queues[0].submit(DriverOp::Read { sector: 0, len: 4096 });
        let _ = guest.queues[0].publish();
        ftruncate(&log, 0).unwrap();
        let _ = guest.queues[0].submit(DriverOp::Read { sector: 0, len: 4096 });
        let _ = guest.queues[0].publish();
        let _ = guest.front.is_closed_within(RETRY_DELAY);
    });
    beside.bear("a state that goes to a pipe which is full", || save_to_a_full_pipe(&bad));
}

fn save_to_a_full_pipe(bad: &Path) {
    let mut guest = connect(bad, &with_protocol(PROTOCOL_F_DEVICE_STATE));
    guest.front.vring_base(0).unwrap();
    let odd = OddFd::FullPipe.open().unwrap();
    let transfer = StateTransfer { direction: STATE_SAVE, phase: STATE_STOPPED };
    let fds = [odd.fd.as_fd()];
    guest.front.send_message(SET_DEVICE_STATE_FD, transfer.as_bytes(), &fds).unwrap();
    let _ = guest.front.is_closed_within(RETRY_DELAY);
}
