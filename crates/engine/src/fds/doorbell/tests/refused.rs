//! File descriptors that are no doorbells, and those that would keep others open.

use super::*;

#[test]
fn what_is_no_doorbell_is_refused() {
    let session = Session::new();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let epoll = rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC).unwrap();
    let file = tempfile::tempfile().unwrap();
    for fd in [listener.into(), epoll, OwnedFd::from(file)] {
        let again = fd.try_clone().unwrap();
        assert_eq!(session.kick(fd).unwrap_err(), DoorbellError::Kind);
        assert_eq!(session.call(again).unwrap_err(), DoorbellError::Kind);
    }
    let message = Channel::of_front_end(
        session.send(eventfd(0, EventfdFlags::empty()).unwrap()),
        vec![0; 12],
    );
    assert_eq!(session.runtime.block_on(message).unwrap_err(), DoorbellError::Kind);
}

#[test]
fn a_doorbell_without_the_access_that_its_use_needs_is_refused() {
    let session = Session::new();
    let event = eventfd(0, EventfdFlags::empty()).unwrap();
    let path = format!("/proc/self/fd/{}", event.as_raw_fd());
    let by_path = || rustix::fs::open(&path, OFlags::PATH, rustix::fs::Mode::empty()).unwrap();
    assert_eq!(session.kick(by_path()).unwrap_err(), DoorbellError::Access);
    assert_eq!(session.call(by_path()).unwrap_err(), DoorbellError::Access);
    let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    assert_eq!(session.kick(writer).unwrap_err(), DoorbellError::Access);
    assert_eq!(session.call(reader).unwrap_err(), DoorbellError::Access);
}

#[test]
fn a_pipe_or_socket_with_a_name_is_no_doorbell() {
    let session = Session::new();
    let folder = tempfile::tempdir().unwrap();
    let fifo = folder.path().join("fifo");
    let made = std::process::Command::new("mkfifo").arg(&fifo).status().unwrap();
    assert!(made.success());
    let open = |path: &std::path::Path, flags| {
        rustix::fs::open(path, flags, rustix::fs::Mode::empty()).unwrap()
    };
    let path = folder.path().join("listens");
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let client = UnixStream::connect(&path).unwrap();
    let (accepted, _) = listener.accept().unwrap();
    let flags = rustix::net::SocketFlags::CLOEXEC;
    let unconnected =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
    let fds: [OwnedFd; 5] =
        [open(&fifo, OFlags::RDWR), listener.into(), client.into(), accepted.into(), unconnected];
    for fd in fds {
        assert_eq!(session.kick(fd.try_clone().unwrap()).unwrap_err(), DoorbellError::Named);
        assert_eq!(session.call(fd).unwrap_err(), DoorbellError::Named);
    }
    let by_path = open(&fifo, OFlags::PATH);
    assert_eq!(session.call(by_path).unwrap_err(), DoorbellError::Access);
}

#[test]
fn an_end_of_a_session_is_no_doorbell() {
    let session = Session::new();
    let (ours, theirs) = pair();
    let known = ends::SessionSocket::new(&ours);
    for end in [&ours, &theirs] {
        let end = || end.try_clone().unwrap();
        assert_eq!(session.kick(end()).unwrap_err(), DoorbellError::Session);
        assert_eq!(session.call(end()).unwrap_err(), DoorbellError::Session);
        let channel = Channel::of_front_end(session.send(end()), vec![0; 12]);
        assert_eq!(session.runtime.block_on(channel).unwrap_err(), DoorbellError::Session);
    }
    drop(known);
    session.call(theirs).unwrap();
}

/// Sends a message with a file descriptor, which the kernel keeps open until the message is read.
fn send_along(socket: &impl AsFd, bytes: &[u8], fd: &OwnedFd, flags: rustix::net::SendFlags) {
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = rustix::net::SendAncillaryBuffer::new(&mut space);
    let fds = [fd.as_fd()];
    assert!(control.push(rustix::net::SendAncillaryMessage::ScmRights(&fds)));
    let bytes = [std::io::IoSlice::new(bytes)];
    rustix::net::sendmsg(socket, &bytes, &mut control, flags).unwrap();
}

/// A message that lies unread in a doorbell could hold the front-end's end of the session's socket,
/// which would stay open with the doorbell.
#[test]
fn what_lies_in_a_socket_is_not_kept_open() {
    let plain = rustix::net::SendFlags::empty();
    for flags in [plain, rustix::net::SendFlags::OOB] {
        for (is_kick, is_shut) in [(false, false), (false, true), (true, false), (true, true)] {
            let session = Session::new();
            let (theirs, peer) = pair();
            let (kept, other) = pair();
            for _ in 0..3 {
                send_along(&peer, b"x", &kept, flags);
            }
            drop(kept);
            if is_shut {
                rustix::net::shutdown(&peer, rustix::net::Shutdown::Both).unwrap();
            }
            let kick = is_kick.then(|| session.kick(theirs.try_clone().unwrap()).unwrap());
            let call = (!is_kick).then(|| session.call(theirs).unwrap());
            assert!(is_rung(&other), "{flags:?} {is_kick} {is_shut}: it is kept open");
            assert_eq!(rustix::io::read(&other, &mut [0; 8]), Ok(0));
            if is_kick || is_shut {
                continue;
            }
            // Nothing more can be put into a call.
            let sent = rustix::net::send(&peer, b"x", rustix::net::SendFlags::NOSIGNAL);
            assert_eq!(sent, Err(Errno::PIPE));
            drop((kick, call));
        }
    }
}
