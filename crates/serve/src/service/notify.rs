//! The socket of the service manager, and the thread that sends to it.

use crate::times::NOTIFY_LAST;
use rustix::fd::{AsFd, OwnedFd};
use rustix::net::{AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use rustix::net::{SocketAddrUnix, SocketFlags, SocketType, sendmsg, socket_with};
use std::ffi::OsStr;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

/// Messages that may wait for a manager that does not read: enough for one for each of very many
/// devices.
const MESSAGES_MAX: usize = 16384;

/// A message, a descriptor to send with it, and a sender to notify when the message is sent.
type Message = (String, Option<OwnedFd>, Option<SyncSender<()>>);

/// The connection to the service manager: the queue of the thread that sends.
#[derive(Debug)]
pub(super) struct Manager(SyncSender<Message>);

impl Manager {
    /// Connects to the manager's socket: a path, or `@` and an abstract name. Nothing is sent while
    /// the other end of `hears` lives. `None`: connecting failed, and that was logged.
    pub(super) fn connect(path: &OsStr, hears: Receiver<()>) -> Option<Self> {
        let bytes = path.as_bytes();
        let address = match bytes.strip_prefix(b"@") {
            Some(name) => SocketAddrUnix::new_abstract_name(name),
            None => SocketAddrUnix::new(bytes),
        };
        let open = || {
            let (family, kind) = (AddressFamily::UNIX, SocketType::DGRAM);
            let socket = socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
            rustix::net::connect(&socket, &address?)?;
            Ok::<_, rustix::io::Errno>(socket)
        };
        let socket = open();
        let failed = |error: &dyn std::fmt::Display| {
            tracing::error!(
                %error,
                "NOTIFY_SOCKET is unusable; the service manager is not notified"
            );
        };
        let socket = socket.inspect_err(|errno| failed(errno)).ok()?;
        let (sender, messages) = sync_channel(MESSAGES_MAX);
        let send = move || {
            let _ = hears.recv();
            send_all(&socket, &messages);
        };
        let thread = std::thread::Builder::new().name("service".to_owned()).spawn(send);
        thread.inspect_err(|error| failed(error)).ok()?;
        Some(Self(sender))
    }

    /// Queues a message. Never waits.
    pub(super) fn tell(&self, text: String, descriptor: Option<OwnedFd>) {
        if self.0.try_send((text, descriptor, None)).is_err() {
            tracing::warn!("the service manager does not read its socket; notification dropped");
        }
    }

    /// Queues a message, and waits until it is sent, at most [`NOTIFY_LAST`].
    pub(super) fn tell_at_once(&self, text: String) {
        let (sent, is_sent) = sync_channel(1);
        let _ =
            self.0.try_send((text, None, Some(sent))).map(|()| is_sent.recv_timeout(NOTIFY_LAST));
    }
}

fn send_all(socket: &OwnedFd, messages: &Receiver<Message>) {
    while let Ok((text, descriptor, told)) = messages.recv() {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let descriptors = descriptor.as_ref().map(|descriptor| [descriptor.as_fd()]);
        if let Some(descriptors) = &descriptors {
            control.push(SendAncillaryMessage::ScmRights(descriptors));
        }
        let text = [IoSlice::new(text.as_bytes())];
        let mut sent = Err(rustix::io::Errno::INTR);
        while sent == Err(rustix::io::Errno::INTR) {
            sent = sendmsg(socket, &text, &mut control, SendFlags::NOSIGNAL);
        }
        if let Err(error) = sent {
            tracing::warn!(%error, "notifying the service manager failed");
        }
        let _ = told.map(|told| told.try_send(()));
    }
}
