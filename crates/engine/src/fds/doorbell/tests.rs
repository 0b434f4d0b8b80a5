//! File descriptors that a front-end may give as doorbells, and the notifications through them.

mod refused;

use super::*;
use crate::fds::budget::FdReservation;
use crate::fds::foreign::{Janitor, Origin};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Runtime;

/// A session without a socket.
struct Session {
    runtime: Runtime,
    origin: Arc<Origin>,
}

impl Session {
    fn new() -> Self {
        Self::of(&Arc::default())
    }

    /// A session of the device that has this janitor.
    fn of(janitor: &Arc<Janitor>) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        Self { runtime, origin: Origin::new(janitor.clone()) }
    }

    fn send(&self, fd: impl Into<OwnedFd>) -> ForeignFd {
        let mut room = self.runtime.block_on(FdReservation::for_message());
        self.origin.adopt(fd.into(), &mut room)
    }

    fn kick(&self, fd: impl Into<OwnedFd>) -> Result<Kick, DoorbellError> {
        self.kick_of(0, fd)
    }

    fn kick_of(&self, ring: usize, fd: impl Into<OwnedFd>) -> Result<Kick, DoorbellError> {
        self.runtime.block_on(Kick::of_front_end(self.send(fd), ring))
    }

    fn call(&self, fd: impl Into<OwnedFd>) -> Result<Call, DoorbellError> {
        self.runtime.block_on(Call::of_front_end(self.send(fd)))
    }

    fn is_idle(&self) {
        self.runtime.block_on(self.origin.janitor().idle());
    }
}

/// Waits until there is something to read.
fn is_rung(fd: impl AsFd) -> bool {
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec { tv_sec: 20, tv_nsec: 0 })) == Ok(1)
}

fn blocking(fd: &impl AsFd) {
    let flags = rustix::fs::fcntl_getfl(fd).unwrap();
    rustix::fs::fcntl_setfl(fd, flags - OFlags::NONBLOCK).unwrap();
}

fn pair() -> (OwnedFd, OwnedFd) {
    let (one, other) = UnixStream::pair().unwrap();
    (one.into(), other.into())
}

/// Kicks that have come ring the kick once, and then no more: the thread that passes them on
/// sleeps.
fn rings_once(session: &Session, kick: &Kick) {
    assert!(is_rung(kick), "what has come is lost");
    session.is_idle();
    std::thread::sleep(Duration::from_millis(50));
    rustix::io::read(kick, &mut [0; 8]).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    let mut fds = [PollFd::new(kick, PollFlags::IN)];
    assert_eq!(poll(&mut fds, Some(&Timespec::default())), Ok(0), "it rings again and again");
}

#[test]
fn an_eventfd_is_rung_itself() {
    let session = Session::new();
    let theirs = eventfd(0, EventfdFlags::empty()).unwrap();
    let call = session.call(theirs.try_clone().unwrap()).unwrap();
    assert!(matches!(call.0, BellFile::Foreign(_)));
    call.ring();
    assert!(is_rung(&theirs));
    assert!(matches!(*session.kick(theirs).unwrap().0, BellFile::Foreign(_)));
}

#[test]
fn a_worker_watches_an_eventfd_for_one_ring_only_and_each_kick_is_heard_by_all() {
    let session = Session::new();
    let theirs = eventfd(0, EventfdFlags::empty()).unwrap();
    let kick_of = |ring| session.kick_of(ring, theirs.try_clone().unwrap()).unwrap();
    let is_watched = |kick: &Kick| matches!(*kick.0, BellFile::Foreign(_));
    let first = kick_of(0);
    assert!(is_watched(&first));
    let others = [kick_of(1), kick_of(2)];
    assert!(!others.iter().any(is_watched), "a worker would wait once for each");
    // A front-end may send its kick again.
    assert!(is_watched(&kick_of(0)));
    for round in 1..=3_u64 {
        rustix::io::write(&theirs, &1u64.to_ne_bytes()).unwrap();
        for kick in &others {
            rings_once(&session, kick);
        }
        // Nobody has read the eventfd, so the worker of the first ring still sees it readable.
        let mut count = [0; 8];
        let mut fds = [PollFd::new(&first, PollFlags::IN)];
        assert_eq!(poll(&mut fds, Some(&Timespec::default())), Ok(1), "round {round}: it was read");
        if round == 3 {
            rustix::io::read(&theirs, &mut count).unwrap();
            assert_eq!(u64::from_ne_bytes(count), round);
        }
    }
    // Another eventfd of this ring makes the first one free.
    let other = eventfd(0, EventfdFlags::empty()).unwrap();
    assert!(is_watched(&session.kick_of(0, other).unwrap()));
    assert!(is_watched(&kick_of(1)));
}

#[test]
fn pipes_and_unix_sockets_ring_through_an_eventfd_of_ours() {
    let session = Session::new();
    let (socket, peer) = pair();
    for (reader, writer) in
        [rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap(), (socket, peer)]
    {
        let kick = session.kick(reader.try_clone().unwrap()).unwrap();
        rustix::io::write(&writer, b"k").unwrap();
        assert!(is_rung(&kick), "the kick is lost");
        drop(kick);
        session.is_idle();
        let call = session.call(writer).unwrap();
        call.ring();
        assert!(is_rung(&reader), "the call is lost");
    }
}

/// Where the kernel sends without waiting, nobody else is woken for a call.
#[test]
fn a_call_by_a_socket_is_sent_by_whoever_rings_and_by_the_janitor_after_a_long_one() {
    let session = Session::new();
    let (theirs, ours) = pair();
    let call = session.call(ours).unwrap();
    let is_sent_at_once = bridge::sends_never_wait();
    assert_eq!(matches!(call.0, BellFile::Foreign(_)), is_sent_at_once);
    let is_here = || {
        let mut fds = [PollFd::new(&theirs, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())) == Ok(1)
    };
    let hold = || {
        let (release, held) = std::sync::mpsc::channel::<()>();
        session.origin.janitor().push_write(move || _ = held.recv());
        release
    };
    let release = hold();
    call.ring();
    assert_eq!(is_here(), is_sent_at_once);
    drop(release);
    assert!(is_rung(&theirs));
    assert_eq!(rustix::io::read(&theirs, &mut [0; 64]), Ok(8));
    session.origin.note_write(Duration::from_millis(2));
    let release = hold();
    (0..3).for_each(|_| call.ring());
    assert!(!is_here(), "the session pays for long ones by its janitor");
    drop(release);
    assert!(is_rung(&theirs));
    session.is_idle();
    assert_eq!(rustix::io::read(&theirs, &mut [0; 64]), Ok(8), "three calls are one by then");
}

#[test]
fn a_socket_that_nobody_reads_takes_calls_until_it_is_full_and_blocks_nobody() {
    assert!(sentry::start());
    let session = Session::new();
    let (theirs, ours) = pair();
    let call = session.call(ours.try_clone().unwrap()).unwrap();
    blocking(&ours);
    for _ in 0..10_000 {
        call.ring();
    }
    session.is_idle();
    assert!(!session.origin.is_blocked());
    let mut bytes = vec![0; 1 << 20];
    let held = rustix::io::read(&theirs, &mut bytes).unwrap();
    assert!(held % 8 == 0 && held < 80_000, "{held} bytes");
    call.ring();
    assert!(is_rung(&theirs), "it takes calls again");
    // Its reader is gone: there is nobody to call, and no signal for us.
    drop(theirs);
    call.ring();
}

#[test]
fn the_last_call_is_passed_on_though_its_doorbell_is_dropped_behind_it() {
    let session = Session::new();
    for _ in 0..50 {
        let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        let call = session.call(writer).unwrap();
        call.ring();
        drop(call);
        session.is_idle();
        assert_eq!(rustix::io::read(&reader, &mut [0; 64]), Ok(8));
        assert_eq!(rustix::io::read(&reader, &mut [0; 64]), Ok(0), "the pipe is kept open");
    }
}

#[test]
fn a_front_end_cannot_make_a_pipe_or_socket_block_the_thread() {
    let session = Session::new();
    let (_reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    let (socket, _peer) = pair();
    for theirs in [writer, socket] {
        let call = session.call(theirs.try_clone().unwrap()).unwrap();
        let flags = rustix::fs::fcntl_getfl(&theirs).unwrap();
        rustix::fs::fcntl_setfl(&theirs, flags | OFlags::NONBLOCK).unwrap();
        while rustix::io::write(&theirs, &[0; 4096]).is_ok() {}
        blocking(&theirs);
        call.ring();
        session.is_idle();
        drop(call);
        session.is_idle();
    }
}

#[test]
fn a_kick_whose_other_end_is_closed_lets_the_thread_sleep() {
    let session = Session::new();
    let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    let kick = session.kick(reader).unwrap();
    rustix::io::write(&writer, b"k").unwrap();
    drop(writer);
    rings_once(&session, &kick);
}

/// A socket is "ready" for ever once somebody has shut it down: that costs its front-end nothing,
/// and must not cost a thread and a worker all their time.
#[test]
fn a_kick_that_is_ready_and_has_nothing_lets_the_thread_sleep() {
    let session = Session::new();
    let (shut, peer) = UnixStream::pair().unwrap();
    peer.shutdown(std::net::Shutdown::Write).unwrap();
    let (deaf, _peer) = UnixStream::pair().unwrap();
    deaf.shutdown(std::net::Shutdown::Read).unwrap();
    for fd in [OwnedFd::from(shut), deaf.into()] {
        rings_once(&session, &session.kick(fd).unwrap());
    }
}

#[test]
fn a_full_eventfd_that_blocks_is_rung_once_and_its_session_is_told() {
    assert!(sentry::start());
    let session = Session::new();
    let theirs = eventfd(0, EventfdFlags::empty()).unwrap();
    let call = session.call(theirs.try_clone().unwrap()).unwrap();
    rustix::io::write(&theirs, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    call.ring();
    assert!(!session.origin.is_blocked(), "full, and it does not block");
    blocking(&theirs);
    call.ring();
    session.runtime.block_on(session.origin.blocked());
    assert!(session.origin.is_blocked());
    call.ring();
}

#[test]
fn a_write_that_was_long_leaves_the_others_to_the_janitor() {
    let session = Session::new();
    let theirs = eventfd(0, EventfdFlags::empty()).unwrap();
    let call = session.call(theirs.try_clone().unwrap()).unwrap();
    let origin = &session.origin;
    // A write that the sentry has seen makes some be measured, and no more if these are short.
    origin.suspect(Duration::from_millis(9));
    let mut measured = 0;
    while origin.next_write() == Some(Write::Measured) {
        call.ring();
        measured += 1;
    }
    assert_eq!((measured, origin.next_write()), (16, None));
    origin.note_write(Duration::from_millis(2));
    assert_eq!(origin.next_write(), Some(Write::ByJanitor));
    session.is_idle();
    let mut count = [0; 8];
    rustix::io::read(&theirs, &mut count).unwrap();
    // Calls that come before the janitor has written are one.
    let hold = std::sync::mpsc::channel::<()>();
    origin.janitor().push_write(move || {
        let _ = hold.1.recv();
    });
    (0..3).for_each(|_| call.ring());
    drop(hold.0);
    session.is_idle();
    rustix::io::read(&theirs, &mut count).unwrap();
    assert_eq!(u64::from_ne_bytes(count), 1);
    assert!(!origin.is_blocked());
}

#[test]
fn a_write_that_was_far_too_long_ends_the_session() {
    let session = Session::new();
    let theirs = eventfd(0, EventfdFlags::empty()).unwrap();
    let call = session.call(theirs.try_clone().unwrap()).unwrap();
    session.origin.note_write(Duration::from_millis(10));
    session.runtime.block_on(session.origin.blocked());
    assert!(session.origin.is_costly() && session.origin.is_blocked());
    for ring in [Call::ring, Call::ring_aside] {
        ring(&call);
    }
    session.is_idle();
    make_nonblocking(&theirs).unwrap();
    assert_eq!(rustix::io::read(&theirs, &mut [0; 8]), Err(Errno::AGAIN), "it was written");
}

/// A front-end that takes its waiters off between two long writes, or leaves and comes back, must
/// not have a worker walk them again and again.
#[test]
fn a_front_end_whose_eventfd_took_far_too_long_gets_no_worker_to_touch_another() {
    let long = Duration::from_millis(10);
    let offences: [fn(&Origin, Duration); 3] =
        [Origin::suspect, Origin::note_write, Origin::note_watch];
    for (index, offend) in offences.into_iter().enumerate() {
        let janitor = Arc::<Janitor>::default();
        let first = Session::of(&janitor);
        assert_eq!(first.origin.next_write(), None);
        offend(&first.origin, long);
        let expected = if index == 1 { Write::Never } else { Write::ByJanitor };
        assert_eq!(first.origin.next_write(), Some(expected));
        first.origin.note_watch(long);
        assert!(first.origin.is_costly());
        let second = Session::of(&janitor);
        assert_eq!(second.origin.next_write(), Some(Write::ByJanitor));
        assert!(!second.origin.is_blocked());
        let theirs = eventfd(0, EventfdFlags::empty()).unwrap();
        let kick = second.kick(theirs.try_clone().unwrap()).unwrap();
        assert!(matches!(*kick.0, BellFile::Bridged(_)), "a worker would watch it");
        rustix::io::write(&theirs, &1u64.to_ne_bytes()).unwrap();
        rings_once(&second, &kick);
        let call = second.call(theirs.try_clone().unwrap()).unwrap();
        drop(kick);
        second.is_idle();
        rustix::io::read(&theirs, &mut [0; 8]).unwrap();
        call.ring();
        assert!(is_rung(&theirs), "the call is lost");
        assert_eq!(Session::new().origin.next_write(), None, "another device pays");
    }
}

#[test]
fn a_front_end_that_goes_on_waits_longer_and_longer() {
    let janitor = Arc::<Janitor>::default();
    assert_eq!(janitor.penance(), Duration::from_secs(1));
    let pauses = (0..12).map(|_| {
        Session::of(&janitor).origin.note_write(Duration::from_millis(10));
        janitor.penance().as_secs()
    });
    assert_eq!(pauses.collect::<Vec<_>>(), [1, 1, 2, 4, 8, 16, 32, 64, 64, 64, 64, 64]);
}

#[test]
fn a_kick_that_takes_its_janitor_far_too_long_is_left_alone() {
    let session = Session::new();
    session.origin.note_write(Duration::from_millis(2));
    let theirs = eventfd(0, EventfdFlags::empty()).unwrap();
    let kick = session.kick(theirs.try_clone().unwrap()).unwrap();
    session.origin.note_watch(Duration::from_millis(10));
    session.runtime.block_on(session.origin.blocked());
    // The janitor has done a job, and goes on with what it watches now.
    session.is_idle();
    rustix::io::write(&theirs, &1u64.to_ne_bytes()).unwrap();
    session.runtime.block_on(session.origin.janitor().run(|| ()));
    session.is_idle();
    let mut fds = [PollFd::new(&kick, PollFlags::IN)];
    let soon = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
    assert_eq!(poll(&mut fds, Some(&soon)), Ok(0), "it is read");
}

#[test]
fn a_semaphore_that_stays_readable_lets_the_thread_sleep() {
    let session = Session::new();
    session.origin.note_write(Duration::from_millis(2));
    let theirs = eventfd(0, EventfdFlags::SEMAPHORE).unwrap();
    rustix::io::write(&theirs, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    let kick = session.kick(theirs).unwrap();
    rings_once(&session, &kick);
}

#[test]
fn a_call_from_aside_is_written_by_the_janitor() {
    let session = Session::new();
    let theirs = eventfd(0, EventfdFlags::empty()).unwrap();
    let call = session.call(theirs.try_clone().unwrap()).unwrap();
    call.ring_aside();
    assert!(is_rung(&theirs));
}

#[test]
fn what_is_dropped_is_closed_by_the_janitor_whose_thread_ends() {
    let session = Session::new();
    let (reader, writer) = pair();
    let fd = session.send(writer);
    drop(fd);
    session.is_idle();
    assert_eq!(rustix::io::read(&reader, &mut [0; 8]), Ok(0), "it is still open");
    // The thread holds the janitor while it runs.
    while Arc::strong_count(session.origin.janitor()) > 1 {
        std::thread::yield_now();
    }
}

#[test]
fn an_event_of_a_port_is_taken_when_the_kick_is_heard_and_unmasks_the_port() {
    use std::io::{Read, Write};
    // The other end of the socket is the event device.
    let (ours, mut device) = UnixStream::pair().unwrap();
    for end in [&ours, &device] {
        end.set_nonblocking(true).unwrap();
    }
    let port = Arc::new(EventPort::of_fd(ours.into(), 3));
    let kick = Kick::of_port(port);
    kick.hear();
    assert!(!kick.keeps() && device.read(&mut [0; 8]).is_err(), "nothing has come");
    device.write_all(&3_u32.to_ne_bytes()).unwrap();
    assert!(kick.keeps());
    kick.hear();
    let mut bytes = [0; 8];
    assert_eq!((device.read(&mut bytes).unwrap(), kick.keeps()), (4, false));
    assert_eq!(bytes[..4], 3_u32.to_ne_bytes(), "the port is unmasked");
}
