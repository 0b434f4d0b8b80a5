//! The waits of the neighbours on the same worker, beside every abuse of SECURITY.md that a program
//! can keep up and that does not hold the worker.

mod clients;
mod front_ends;
mod guests;
mod switched;

use crate::support::prober::{NEIGHBOURS, Prober, RETRY_DELAY, SOCKETS, STALL_MAX, check};
use crate::support::process::{Daemon, TIMEOUT, wait_until};
use crate::support::rings;
use crate::walls::PAGE;
use manyring_driver::hostile::{HeldLock, HostileRing, OddFd, Spoil, fill_eventfd};
use manyring_driver::{
    BlkDriver, BlkDriverOptions, ControlOwner, DriverOp, FrontEnd, NetDriver, NetDriverOptions,
};
use manyring_wire::net::{CtrlStatus, RawNetHeader, RxMode};
use rustix::event::epoll;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{FallocateFlags, fallocate, ftruncate};
use rustix::process::Signal;
use std::path::PathBuf;
use std::sync::atomic::Ordering;

/// The bad guest has the worker of the good one.
const BAD_BESIDE: &str = "
[daemon]
control = '@/control'
workers = 1
domains = 'one'
[[blk]]
name = 'bad'
socket_path = '@/bad'
memory = '64M'
num_queues = 8
handshake_timeout = 1
[[net]]
name = 'net'
socket_path = '@/net'
null = true
queue_pairs = 2
";

/// A daemon with one worker, and the prober of its good guest.
struct Beside {
    daemon: Daemon,
    prober: Prober,
}

impl Beside {
    fn new() -> Self {
        Self::with(&[], "")
    }

    /// With further devices of these names, which `more` describes.
    fn with(names: &[&str], more: &str) -> Self {
        let names = [&SOCKETS[..], &["bad", "net"], names].concat();
        let daemon = Daemon::run(&format!("{BAD_BESIDE}{more}{NEIGHBOURS}"), &names);
        let prober = Prober::at(&daemon, daemon.folder());
        Self { daemon, prober }
    }

    fn bad(&self) -> PathBuf {
        self.daemon.socket_of("bad")
    }

    /// Does `abuse` again and again while the prober looks. A thread of the daemon that holds a
    /// lock of its address space may have no CPU for a while, and the prober does not know which.
    /// So a stall counts against the daemon only if three tries in a row see one.
    fn bear(&mut self, name: &str, mut abuse: impl FnMut() + Send) {
        for is_last in [false, false, true] {
            let stalls = self.prober.beside(|is_over| {
                while !is_over.load(Ordering::Relaxed) {
                    abuse();
                }
            });
            if is_last || stalls.worst() < STALL_MAX {
                return check(name, stalls);
            }
        }
    }
}

/// Connects, as soon as not too many of those whose sessions are over wait for their end.
fn connect(socket: &std::path::Path, options: &BlkDriverOptions) -> BlkDriver {
    let mut guest = None;
    let connected = wait_until(|| {
        let front = FrontEnd::connect(socket, TIMEOUT);
        guest = front.and_then(|front| BlkDriver::start(front, options)).ok();
        guest.is_some()
    });
    assert!(connected, "the device serves nobody any more");
    guest.unwrap()
}

#[test]
fn a_stall_of_the_daemon_is_seen() {
    let mut beside = Beside::new();
    let stall = 4 * STALL_MAX;
    beside.daemon.send(Signal::STOP);
    let tasks = format!("/proc/{}/task", beside.daemon.pid());
    let is_stopped = |thread: std::fs::DirEntry| {
        let stat = std::fs::read_to_string(thread.path().join("stat")).unwrap();
        stat.rsplit_once(')').unwrap().1.starts_with(" T")
    };
    let threads = || std::fs::read_dir(&tasks).unwrap().map(Result::unwrap);
    assert!(wait_until(|| threads().all(is_stopped)));
    let stalls = std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(stall);
            beside.daemon.send(Signal::CONT);
        });
        beside.prober.worst(1)
    });
    assert!(stalls.guest > STALL_MAX, "{stalls:?}");
}

#[test]
fn neighbours_of_spoiled_rings_and_floods_of_kicks_wait_for_nothing() {
    let mut beside = Beside::new();
    let bad = beside.bad();
    let small = BlkDriverOptions { queue_size: 16, ..BlkDriverOptions::default() };
    let mut spoils = Spoil::ALL.into_iter().cycle();
    beside.bear("spoiled rings", || {
        let mut guest = connect(&bad, &small);
        let mut ring = HostileRing::new(&guest.arena, guest.queues[0].vring()).unwrap();
        ring.offer(spoils.next().unwrap()).unwrap();
        guest.queues[0].vring().kick().unwrap();
        let _ = guest.queues[0].vring().wait_err(TIMEOUT);
    });
    let mut guest = connect(&bad, &small);
    beside.bear("a flood of kicks", || {
        let _ = guest.queues[0].vring().kick();
    });
}

#[test]
fn neighbours_of_floods_of_messages_and_clients_wait_for_nothing() {
    let mut beside = Beside::new();
    let bad = beside.bad();
    let mut guest = connect(&bad, &BlkDriverOptions::default());
    let (arena, mut round) = (guest.arena.clone(), 0);
    beside.bear("memory tables that are replaced", || {
        round += 1;
        rings::replace_table(&mut guest.front, &arena, round);
    });
    beside.bear("a flood of messages", || {
        let _ = guest.front.set_vring_enable(0, round.is_multiple_of(2));
        round += 1;
    });
    let restart = rings::Restart::of(guest.queues[0].vring());
    beside.bear("rings that stop and start", || restart.run(&mut guest.front));
    drop(guest);
    beside.bear("clients that come and go", || {
        let front = FrontEnd::connect(&bad, TIMEOUT);
        drop(front);
    });
}

#[test]
fn neighbours_of_long_requests_wait_for_nothing() {
    let mut beside = Beside::new();
    let bad = beside.bad();
    let options = BlkDriverOptions {
        queue_size: 16,
        buffer_size: 8 << 20,
        segment_size: 1 << 20,
        ..BlkDriverOptions::default()
    };
    let mut guest = connect(&bad, &options);
    let ops = [
        DriverOp::Read { sector: 0, len: 8 << 20 },
        DriverOp::WriteAny { sector: 0, len: 8 << 20 },
        DriverOp::WriteZeroes { sector: 0, count: (64 << 20) / 512, unmap: false },
    ];
    for op in ops {
        beside.bear(&format!("long requests: {op:?}"), || {
            let queue = &mut guest.queues[0];
            while queue.submit(op).unwrap().is_some() {}
            queue.publish().unwrap();
            while queue.in_flight() > 0 {
                queue.wait(TIMEOUT).unwrap();
            }
        });
    }
}

#[test]
fn neighbours_of_memory_that_is_cut_or_punched_wait_for_nothing() {
    const BYTES: u64 = 32 << 20;
    let mut beside = Beside::new();
    let bad = beside.bad();
    let options =
        BlkDriverOptions { buffer_size: 1 << 20, spare: BYTES, ..BlkDriverOptions::default() };
    let read = DriverOp::Read { sector: 0, len: 1 << 20 };
    beside.bear("memory that is cut away", || {
        let mut guest = connect(&bad, &options);
        guest.queues[0].run(read).unwrap();
        guest.queues[0].submit(read).unwrap();
        guest.queues[0].publish().unwrap();
        guest.arena.table().iter().for_each(|(_, file)| ftruncate(file, 0).unwrap());
        let _ = guest.queues[0].vring().kick();
        let _ = guest.front.is_closed_within(TIMEOUT);
        // The driver's own memory is gone as well: nothing of it may be touched here any more.
        std::mem::forget(guest);
    });
    let mut guest = connect(&bad, &options);
    let first = guest.arena.table()[0].1.try_clone_to_owned().unwrap();
    beside.bear("holes that are punched into free memory", || {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let free = guest.arena.table()[0].0.size - BYTES;
        fallocate(&first, flags, free.next_multiple_of(PAGE), BYTES - 2 * PAGE).unwrap();
        guest.queues[0].run(read).unwrap();
    });
}

#[test]
fn neighbours_of_large_memory_that_goes_wait_for_nothing() {
    let mut beside = Beside::new();
    let bad = beside.bad();
    const LEN: usize = 48 << 20;
    let options = BlkDriverOptions {
        queue_size: 4,
        buffer_size: u32::try_from(LEN).unwrap(),
        segment_size: 1 << 20,
        ..BlkDriverOptions::default()
    };
    beside.bear("large memory that is unmapped", || {
        let mut guest = connect(&bad, &options);
        let queue = &mut guest.queues[0];
        while queue.submit(DriverOp::Read { sector: 0, len: LEN }).unwrap().is_some() {}
        queue.publish().unwrap();
        while queue.in_flight() > 0 {
            queue.wait(TIMEOUT).unwrap();
        }
    });
}

#[test]
fn neighbours_of_frames_and_commands_without_end_wait_for_nothing() {
    let mut beside = Beside::new();
    let options = NetDriverOptions { control: ControlOwner::Device, ..NetDriverOptions::default() };
    let mut guest = NetDriver::connect(&beside.daemon.socket_of("net"), &options).unwrap();
    let frame = vec![0x5a; 60_000];
    beside.bear("frames without end", || {
        let tx = &mut guest.pairs[0].tx;
        while tx.send(&RawNetHeader::default(), &frame).unwrap() {}
        tx.publish(0).unwrap();
        tx.drain(TIMEOUT).unwrap();
    });
    let mut on = false;
    beside.bear("commands without end", || {
        on = !on;
        let control = guest.control().unwrap();
        assert_eq!(control.set_rx_mode(RxMode::Promisc, on).unwrap(), CtrlStatus::Ok);
    });
    beside.bear("pairs that change without end", || {
        on = !on;
        let _ = guest.control().unwrap().set_queue_pairs(1 + u16::from(on));
    });
    beside.bear("commands that are none", || {
        let _ = guest.control().unwrap().raw(&[&[0xff; 4096]], &[1]);
    });
}

#[test]
fn neighbours_of_many_busy_queues_wait_for_nothing() {
    let mut beside = Beside::new();
    let options = BlkDriverOptions { queues: 8, buffer_size: 4096, ..BlkDriverOptions::default() };
    let mut guest = connect(&beside.bad(), &options);
    beside.bear("many busy queues", || {
        for queue in &mut guest.queues {
            while queue.take().is_some() {}
            while queue.submit(DriverOp::Read { sector: 0, len: 4096 }).unwrap().is_some() {}
            queue.publish().unwrap();
        }
    });
}

/// A front-end whose message never ends, a second client, and one that holds a lock of the kernel
/// which the close of its pipe needs.
#[test]
fn neighbours_of_front_ends_that_wait_or_hold_a_lock_wait_for_nothing() {
    let mut beside = Beside::new();
    let bad = beside.bad();
    beside.bear("messages that do not end", || {
        let mut front = FrontEnd::connect(&bad, TIMEOUT).unwrap();
        front.send_bytes(&[1, 0, 0, 0, 1, 0], &[]).unwrap();
        let second = FrontEnd::connect(&bad, TIMEOUT).unwrap();
        std::thread::sleep(RETRY_DELAY);
        drop((front, second));
    });
    let mut front = FrontEnd::connect(&bad, TIMEOUT).unwrap();
    let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    front.features().unwrap();
    front.set_vring_call(0, Some(writer.as_fd())).unwrap();
    let hold = HeldLock::pipe(writer).unwrap();
    drop(front);
    beside.bear("a lock that is held", || std::thread::sleep(RETRY_DELAY));
    drop((hold, reader));
}

#[test]
fn neighbours_of_odd_file_descriptors_wait_for_nothing() {
    let mut beside = Beside::new();
    let bad = beside.bad();
    let mut kinds = OddFd::ALL.into_iter().cycle();
    beside.bear("odd file descriptors", || {
        let odd = kinds.next().unwrap().open().unwrap();
        let mut front = FrontEnd::connect(&bad, TIMEOUT).unwrap();
        let _ = front.set_vring_kick(0, Some(odd.fd.as_fd()));
        let _ = front.set_vring_call(0, Some(odd.fd.as_fd()));
        drop(front);
        // Its other ends go first: the close of the last copy must not wait here.
        drop(odd);
    });
    beside.bear("calls that block", || {
        let mut guest = connect(&bad, &BlkDriverOptions::default());
        let queue = &mut guest.queues[0];
        fill_eventfd(queue.vring().call_fd()).unwrap();
        queue.submit(DriverOp::Flush).unwrap();
        queue.publish().unwrap();
        let _ = guest.front.is_closed_within(TIMEOUT);
    });
}

#[test]
fn neighbours_of_a_call_with_many_waiters_wait_for_little() {
    /// Each costs a write to the call some 200 ns.
    const SETS: usize = 1000;
    let mut beside = Beside::new();
    let waits = |call: &OwnedFd| {
        let set = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        epoll::add(&set, call, epoll::EventData::new_u64(0), epoll::EventFlags::IN).unwrap();
        set
    };
    let bad = beside.bad();
    let mut guest = connect(&bad, &BlkDriverOptions::default());
    let call = guest.queues[0].vring().call_fd().try_clone_to_owned().unwrap();
    let waiters: Vec<_> = (0..SETS).map(|_| waits(&call)).collect();
    beside.bear("a call with many waiters", || {
        guest.queues[0].run(DriverOp::Flush).map(drop).unwrap()
    });
    drop((guest, waiters));
    // The driver half watches its own eventfd: this guest is called by a socket, and looks.
    let (theirs, ours) = std::os::unix::net::UnixStream::pair().unwrap();
    theirs.set_nonblocking(true).unwrap();
    let theirs = OwnedFd::from(theirs);
    let mut guest = connect(&bad, &BlkDriverOptions::default());
    guest.front.set_vring_call(0, Some(ours.as_fd())).unwrap();
    let waiters: Vec<_> = (0..SETS).map(|_| waits(&theirs)).collect();
    let mut calls = 0;
    beside.bear("a socket with many waiters", || {
        let queue = &mut guest.queues[0];
        queue.submit(DriverOp::Flush).unwrap();
        queue.publish().unwrap();
        while queue.take().is_none() {
            queue.vring().queue().enable_notifications();
            std::thread::yield_now();
        }
        calls += usize::from(rustix::io::read(&theirs, &mut [0; 8]).is_ok());
    });
    assert!(calls > 0, "the guest was never called");
    drop(waiters);
}
