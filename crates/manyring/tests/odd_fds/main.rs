//! A hostile front-end sends file descriptors that block whoever touches or closes them; neither a
//! neighbour's flush nor the control API waits for one. Needs root, to hold locks of the kernel.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where it fails")]

#[path = "../support/mod.rs"]
mod support;

use crate::support::process::{self, Daemon, wait_until};
use crate::support::program::shown;
use manyring_driver::hostile::{HeldLock, HostileRing, Spoil};
use manyring_driver::wire::vhost_user::PROTOCOL_F_BACKEND_REQ;
use manyring_driver::{BlkDriver, BlkDriverOptions, DriverError, DriverOp, FrontEnd};
use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::OFlags;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::io::{IoSlice, Write};
use std::mem::MaybeUninit;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

const CONFIG: &str = "[daemon]\ncontrol = '@/control'\nworkers = 1\n\
    [[blk]]\nname = 'bad'\nsocket_path = '@/bad'\nmemory = '16M'\n\
    [[blk]]\nname = 'good'\nsocket_path = '@/good'\nmemory = '16M'\n";
const LONG: Duration = Duration::from_secs(30);
/// How long a lingering socket holds whoever closes it: longer than anything here may take.
const LINGER: Duration = Duration::from_secs(40);
/// How long a neighbour may wait: a tenth of the time for which a lingering socket would hold it.
const BOUND: Duration = Duration::from_secs(4);
/// Rounds in which a neighbour looks for a while.
const ROUNDS: usize = 12;

/// One at a time: a process that another test starts holds a copy of every fd until its exec.
static ALONE: Mutex<()> = Mutex::new(());

/// A daemon with a hostile guest and a neighbour on one worker.
struct Supervisor {
    daemon: Daemon,
    good: BlkDriver,
    _alone: MutexGuard<'static, ()>,
}

impl Supervisor {
    fn new() -> Self {
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let daemon = Daemon::run(CONFIG, &["bad", "good", "control"]);
        let good =
            BlkDriver::connect(&daemon.socket_of("good"), &BlkDriverOptions::default()).unwrap();
        Self { daemon, good, _alone: alone }
    }

    fn front(&self) -> FrontEnd {
        let mut front = FrontEnd::connect(&self.daemon.socket_of("bad"), LONG).unwrap();
        let protocol = PROTOCOL_F_BACKEND_REQ;
        front.negotiate(0, 1 << 30, protocol).unwrap();
        front
    }

    fn guest(&self) -> BlkDriver {
        let options = BlkDriverOptions { queue_size: 16, ..BlkDriverOptions::default() };
        BlkDriver::connect(&self.daemon.socket_of("bad"), &options).unwrap()
    }

    /// The neighbour and the control API are answered at once, for a while.
    fn goes_on(&mut self, case: &str) {
        for _ in 0..ROUNDS {
            let start = SystemTime::now();
            self.good.queues[0].run(DriverOp::Flush).unwrap();
            let flushed = start.elapsed().unwrap();
            shown(&self.daemon.socket_of("control"), "/v1/devices");
            let answered = start.elapsed().unwrap();
            assert!(flushed < BOUND && answered < BOUND, "{case}: {flushed:?}, {answered:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn next_guest_is_served(&self) {
        let mut guest = self.guest();
        guest.queues[0].run(DriverOp::Flush).unwrap();
    }

    fn said(&self, what: &str) {
        assert!(wait_until(|| self.daemon.log().contains(what)), "{}", self.daemon.log());
    }
}

/// A TCP socket whose last close waits for its peer, which does not read.
fn lingering() -> (OwnedFd, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (peer, _) = listener.accept().unwrap();
    socket.set_nonblocking(true).unwrap();
    while Write::write(&mut &socket, &[0; 65536]).is_ok() {}
    rustix::net::sockopt::set_socket_linger(&socket, Some(LINGER)).unwrap();
    (socket.into(), peer)
}

type Place = fn(&mut FrontEnd, BorrowedFd<'_>) -> Result<(), DriverError>;

/// Every place of a message where a front-end can put a file descriptor.
const PLACES: [(&str, Place); 6] = [
    ("kick", |front, fd| front.set_vring_kick(0, Some(fd))),
    ("call", |front, fd| front.set_vring_call(0, Some(fd))),
    ("err", |front, fd| front.set_vring_err(0, Some(fd))),
    ("back-end channel", |front, fd| front.send_message(21, &[], &[fd])),
    ("memory", |front, fd| {
        let region = [1u32.to_ne_bytes(), [0; 4]].concat();
        front.send_message(5, &[region, vec![0; 32]].concat(), &[fd])
    }),
    ("unexpected", |front, fd| front.send_message(3, &[], &[fd])),
];

impl Supervisor {
    /// A front-end sends a socket that lingers, in whatever way, while the daemon stands still; the
    /// daemon's copy is the last one then. Nobody else waits, and the next guest is served when the
    /// peer lets go.
    fn bears_one_that_lingers(
        &mut self,
        case: &str,
        said: Option<&str>,
        send: impl FnOnce(&mut FrontEnd, OwnedFd),
    ) {
        let (fd, peer) = lingering();
        let mut front = self.front();
        self.daemon.while_stopped(|| send(&mut front, fd));
        self.goes_on(case);
        said.into_iter().for_each(|said| self.said(said));
        drop((peer, front));
        self.next_guest_is_served();
    }

    /// A front-end sends what `hold` holds: nobody else waits, neither while its session is open
    /// nor when it has ended.
    fn bears_one_that_is_held(
        &mut self,
        case: &str,
        hold: HeldLock,
        send: impl FnOnce(&Self, &mut FrontEnd),
    ) {
        let mut front = self.front();
        send(self, &mut front);
        self.goes_on(case);
        drop(front);
        self.goes_on(&format!("{case}, at the end of its session"));
        drop(hold);
        self.next_guest_is_served();
    }
}

#[test]
fn a_socket_that_lingers_holds_its_own_device_only() {
    let mut supervisor = Supervisor::new();
    for (place, send) in PLACES {
        supervisor
            .bears_one_that_lingers(place, None, |front, fd| send(front, fd.as_fd()).unwrap());
    }
}

#[test]
fn a_socket_that_lingers_among_too_many_holds_its_own_device_only() {
    let said = Some("too many file descriptors in a message");
    Supervisor::new().bears_one_that_lingers("too many", said, |front, fd| {
        let null = std::fs::File::open("/dev/null").unwrap();
        let mut fds = [null.as_fd(); 64];
        fds[63] = fd.as_fd();
        front.send_message(5, &[0; 8], &fds).unwrap();
    });
}

#[test]
fn a_socket_that_lingers_in_a_message_nobody_read_holds_its_own_device_only() {
    Supervisor::new().bears_one_that_lingers("unread", Some("request 200"), |front, fd| {
        front.send_message(200, &[], &[]).unwrap();
        front.send_message(3, &[], &[fd.as_fd()]).unwrap();
    });
}

#[test]
fn a_socket_that_lingers_sent_by_a_client_of_the_control_socket_holds_nobody() {
    let mut supervisor = Supervisor::new();
    // With bytes that are read, and with bytes that nobody reads behind the request.
    for asks in [&b""[..], b"GET /v1/processes HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"] {
        let (fd, peer) = lingering();
        let mut client = UnixStream::connect(supervisor.daemon.socket_of("control")).unwrap();
        supervisor.daemon.while_stopped(|| {
            client.write_all(asks).unwrap();
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            let fds = [fd.as_fd()];
            assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
            sendmsg(&client, &[IoSlice::new(b"G")], &mut control, SendFlags::empty()).unwrap();
            drop(fd);
        });
        supervisor.goes_on("a client of the control socket");
        drop((peer, client));
    }
    supervisor.next_guest_is_served();
}

#[test]
fn a_socket_that_lingers_sent_by_a_second_client_holds_its_own_device_only() {
    let mut supervisor = Supervisor::new();
    let socket = supervisor.daemon.socket_of("bad");
    supervisor.bears_one_that_lingers(
        "second client",
        Some("client refused: the device has one"),
        |_, fd| {
            let mut second = FrontEnd::connect(&socket, LONG).unwrap();
            second.send_message(3, &[], &[fd.as_fd()]).unwrap();
            // Dropped here: whoever closes the other end closes what was sent.
        },
    );
}

/// An epoll set in which something is ready.
fn ready_set() -> (OwnedFd, OwnedFd) {
    let set = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
    let event = eventfd(1, EventfdFlags::CLOEXEC).unwrap();
    let data = epoll::EventData::new_u64(1);
    epoll::add(&set, &event, data, epoll::EventFlags::IN).unwrap();
    (set, event)
}

#[test]
fn an_epoll_set_whose_lock_is_held_holds_its_own_device_only() {
    let mut supervisor = Supervisor::new();
    for (place, send) in PLACES {
        let (set, _event) = ready_set();
        let hold = HeldLock::epoll(set.try_clone().unwrap()).unwrap();
        supervisor
            .bears_one_that_is_held(place, hold, |_, front| send(front, set.as_fd()).unwrap());
    }
}

#[test]
fn an_eventfd_in_an_epoll_set_whose_lock_is_held_holds_its_own_device_only() {
    let mut supervisor = Supervisor::new();
    for (place, send) in &PLACES[..3] {
        let (set, event) = ready_set();
        let hold = HeldLock::epoll(set).unwrap();
        supervisor.bears_one_that_is_held(place, hold, |supervisor, front| {
            supervisor.daemon.while_stopped(|| {
                send(front, event.as_fd()).unwrap();
                // The back-end's copy is the last one now.
                drop(event);
            });
        });
    }
}

#[test]
fn a_kick_that_a_worker_watched_is_not_closed_by_the_worker() {
    let mut supervisor = Supervisor::new();
    let mut guest = supervisor.guest();
    let (set, event) = ready_set();
    guest.front.set_vring_kick(0, Some(event.as_fd())).unwrap();
    let queue = &mut guest.queues[0];
    queue.submit(DriverOp::Flush).unwrap().expect("device process in the ring");
    queue.publish().unwrap();
    // The queue kicks the eventfd that it began with, which the worker does not watch any more.
    rustix::io::write(&event, &1u64.to_ne_bytes()).unwrap();
    queue.wait(LONG).unwrap();
    let hold = HeldLock::epoll(set).unwrap();
    drop(event);
    supervisor.goes_on("watched");
    // Another one takes its place: the worker ends its watch.
    let next = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    supervisor.daemon.while_stopped(|| {
        guest.front.send_message(12, &0u64.to_ne_bytes(), &[next.as_fd()]).unwrap();
    });
    supervisor.goes_on("replaced");
    drop(guest);
    supervisor.goes_on("ended");
    drop(hold);
    supervisor.next_guest_is_served();
}

#[test]
fn a_pipe_whose_lock_is_held_holds_its_own_device_only() {
    let mut supervisor = Supervisor::new();
    for (place, send) in PLACES {
        let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        let hold = HeldLock::pipe(writer.try_clone().unwrap()).unwrap();
        let fd = if place == "kick" { reader.as_fd() } else { writer.as_fd() };
        supervisor.bears_one_that_is_held(place, hold, |_, front| send(front, fd).unwrap());
    }
}

#[test]
fn a_running_queue_whose_pipes_are_held_holds_its_own_device_only() {
    for is_kick in [true, false] {
        let mut supervisor = Supervisor::new();
        let mut guest = supervisor.guest();
        let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        if is_kick {
            guest.front.set_vring_kick(0, Some(reader.as_fd())).unwrap();
        } else {
            guest.front.set_vring_call(0, Some(writer.as_fd())).unwrap();
            rustix::io::read(&reader, &mut [0; 8]).unwrap();
        }
        let mut hold = None;
        supervisor.daemon.while_stopped(|| {
            if is_kick {
                rustix::io::write(&writer, b"k").unwrap();
            } else {
                let mut ring = HostileRing::new(&guest.arena, guest.queues[0].vring()).unwrap();
                ring.offer_valid().unwrap();
                guest.queues[0].vring().kick().unwrap();
            }
            hold = Some(HeldLock::pipe(writer.try_clone().unwrap()).unwrap());
        });
        supervisor.goes_on("running");
        drop(guest);
        supervisor.goes_on("ended");
        drop(hold);
        supervisor.next_guest_is_served();
    }
}

/// Fills an eventfd, and lets who writes to it wait.
fn fill(event: BorrowedFd<'_>) {
    let flags = rustix::fs::fcntl_getfl(event).unwrap();
    let _ = rustix::io::read(event, &mut [0; 8]);
    rustix::io::write(event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    rustix::fs::fcntl_setfl(event, flags - OFlags::NONBLOCK).unwrap();
}

const HELD: &str = "one of its eventfds is full and blocks writers";

impl Supervisor {
    /// A guest whose kick lets the worker write to an eventfd that is full, and blocks: the call,
    /// or for a chain that is `spoiled` the err.
    fn guest_that_blocks(&self, spoiled: Option<Spoil>) -> BlkDriver {
        let mut guest = self.guest();
        let mut ring = HostileRing::new(&guest.arena, guest.queues[0].vring()).unwrap();
        let vring = guest.queues[0].vring();
        match spoiled {
            None => {
                fill(vring.call_fd());
                ring.offer_valid().unwrap();
            }
            Some(spoil) => {
                fill(vring.err_fd());
                ring.offer(spoil).unwrap();
            }
        }
        vring.kick().unwrap();
        guest
    }

    fn ends_for_its_full_eventfd(&mut self, spoiled: Option<Spoil>) {
        let mut guest = self.guest_that_blocks(spoiled);
        self.goes_on("full");
        assert!(guest.front.is_closed_within(LONG).unwrap(), "the session goes on");
        self.said(HELD);
        drop(guest);
        self.next_guest_is_served();
    }
}

#[test]
fn a_full_call_that_blocks_ends_its_session_and_holds_nobody() {
    Supervisor::new().ends_for_its_full_eventfd(None);
}

#[test]
fn a_full_err_that_blocks_ends_its_session_and_holds_nobody() {
    Supervisor::new().ends_for_its_full_eventfd(Some(Spoil::SelfLoop));
}

/// After a call that blocked, the device rests for a second.
#[test]
fn a_client_behind_others_that_have_left_while_the_device_rests_is_served() {
    let supervisor = Supervisor::new();
    let mut guest = supervisor.guest_that_blocks(None);
    assert!(guest.front.is_closed_within(LONG).unwrap(), "the session goes on");
    for _ in 0..3 {
        let leaves = UnixStream::connect(supervisor.daemon.socket_of("bad")).unwrap();
        leaves.shutdown(Shutdown::Both).unwrap();
    }
    supervisor.next_guest_is_served();
    assert!(!supervisor.daemon.log().contains("refused"), "{}", supervisor.daemon.log());
}

/// A ring that is refused is told by the control thread.
#[test]
fn a_full_err_of_a_ring_that_does_not_start_holds_nobody() {
    let mut supervisor = Supervisor::new();
    let guest = supervisor.guest();
    drop(guest);
    let mut front = supervisor.front();
    let err = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    let kick = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    front.set_vring_num(0, 16).unwrap();
    front.set_vring_err(0, Some(err.as_fd())).unwrap();
    let addr = manyring_driver::wire::vhost_user::VringAddr {
        index: 0,
        flags: 0,
        descriptor: 0x1000,
        used: 0x2000,
        available: 0x3000,
        log: 0,
    };
    let arena = manyring_driver::Arena::new(1 << 20).unwrap();
    front.set_memory(&arena).unwrap();
    front.set_vring_addr(&addr).unwrap();
    front.features().unwrap();
    fill(err.as_fd());
    front.set_vring_kick(0, Some(kick.as_fd())).unwrap();
    supervisor.goes_on("err of a ring");
    assert!(front.is_closed_within(LONG).unwrap(), "the session goes on");
    supervisor.said(HELD);
}

#[test]
fn pipes_and_sockets_are_doorbells_and_nothing_of_them_is_left() {
    let supervisor = Supervisor::new();
    supervisor.next_guest_is_served();
    let settled = || {
        let mut last = supervisor.daemon.holdings();
        assert!(wait_until(|| {
            std::thread::sleep(Duration::from_millis(300));
            let now = supervisor.daemon.holdings();
            std::mem::replace(&mut last, now) == now
        }));
        last
    };
    let before = settled();
    for _ in 0..20 {
        let mut guest = supervisor.guest();
        let (kick, kicks) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        let (calls, call) = UnixStream::pair().unwrap();
        guest.front.set_vring_kick(0, Some(kick.as_fd())).unwrap();
        guest.front.set_vring_call(0, Some(call.as_fd())).unwrap();
        calls.set_read_timeout(Some(LONG)).unwrap();
        // The new call is rung once, for one that may have gone to the former.
        std::io::Read::read_exact(&mut &calls, &mut [0; 8]).unwrap();
        let mut ring = HostileRing::new(&guest.arena, guest.queues[0].vring()).unwrap();
        ring.offer_valid().unwrap();
        rustix::io::write(&kicks, b"k").unwrap();
        std::io::Read::read_exact(&mut &calls, &mut [0; 8]).unwrap();
        assert_eq!(ring.status().unwrap(), 0);
    }
    let left = |now: process::Holdings| (now.fds, now.threads);
    assert!(wait_until(|| left(supervisor.daemon.holdings()) == left(before)), "{before:?}");
}

#[test]
fn a_guest_of_a_device_that_was_held_is_served_when_the_hold_ends() {
    let supervisor = Supervisor::new();
    let (fd, peer) = lingering();
    let mut front = supervisor.front();
    supervisor.daemon.while_stopped(|| {
        front.send_message(3, &[], &[fd.as_fd()]).unwrap();
        drop(fd);
    });
    // The peer stays: the janitor's close is interrupted after a second.
    supervisor.next_guest_is_served();
    drop((peer, front));
}

/// A thread in the kernel keeps the process from ending; nothing else may be kept with it.
#[test]
fn a_daemon_that_is_held_lets_go_of_images_and_names_when_it_is_stopped() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let image = tempfile::NamedTempFile::new().unwrap();
    image.as_file().set_len(1 << 20).unwrap();
    let image = image.path().to_str().unwrap();
    let config = format!(
        "[[blk]]\nname = 'bad'\nsocket_path = '@/bad'\nmemory = '16M'\n\
         [[blk]]\nname = 'good'\nsocket_path = '@/good'\nfile = '{image}'\n"
    );
    for place in ["call", "kick"] {
        let mut daemon = Daemon::run(&config, &["bad", "good"]);
        let mut good =
            BlkDriver::connect(&daemon.socket_of("good"), &BlkDriverOptions::default()).unwrap();
        good.queues[0].run(DriverOp::Flush).unwrap();
        let mut front = FrontEnd::connect(&daemon.socket_of("bad"), LONG).unwrap();
        front.negotiate(0, 1 << 30, 0).unwrap();
        let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        let hold = HeldLock::pipe(writer.try_clone().unwrap()).unwrap();
        if place == "call" {
            front.set_vring_call(0, Some(writer.as_fd())).unwrap();
        } else {
            front.set_vring_kick(0, Some(reader.as_fd())).unwrap();
        }
        std::thread::sleep(Duration::from_millis(200));
        daemon.send(rustix::process::Signal::TERM);
        assert!(good.front.is_closed_within(LONG).unwrap(), "{place}: its socket stays open");
        assert!(wait_until(|| !daemon.socket_of("good").exists()), "{place}");
        let mut next = Daemon::blk(&["--blk-file", image]);
        assert!(next.stop().0.success());
        drop((hold, front));
        assert!(daemon.wait().success());
    }
}
