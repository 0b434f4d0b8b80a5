//! Commands that are sent to a device process, with their file descriptors.

use crate::channel::Channel;
use crate::times::PROCESS_ANSWER;
use manyring_engine::{ForeignFd, aside};
use manyring_protocol::message::{Command, NamedFds};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::pin::Pin;
use std::sync::Arc;
use tokio::time::timeout;

/// A command to a device process, with its file descriptors.
pub type OutgoingMessage = (Command, Vec<MessageFd>);

/// A file descriptor that is sent with a command.
#[derive(Debug)]
pub enum MessageFd {
    /// A descriptor that the supervisor opened; it is closed after it was sent.
    Own(OwnedFd),
    /// A descriptor of a front-end; the supervisor keeps a copy.
    Foreign(Arc<ForeignFd>),
}

impl From<OwnedFd> for MessageFd {
    fn from(fd: OwnedFd) -> Self {
        Self::Own(fd)
    }
}

impl AsFd for MessageFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Own(fd) => fd.as_fd(),
            Self::Foreign(fd) => fd.as_fd(),
        }
    }
}

/// Splits the descriptors of a message into groups by their names.
pub fn by_name(
    named: Vec<NamedFds>,
    fds: Vec<OwnedFd>,
) -> impl Iterator<Item = (u64, Vec<OwnedFd>)> {
    let mut fds = fds.into_iter();
    named
        .into_iter()
        .map(move |NamedFds { name, count }| (name, fds.by_ref().take(count).collect()))
}

/// The sending of a command, in progress. An error is the reason to end the device process.
pub type Sending<'a> = Pin<Box<dyn Future<Output = Result<(), String>> + Send + 'a>>;

/// Sends a message and its descriptors. An error is the reason to end the device process.
pub async fn send(channel: &Channel, bytes: Vec<u8>, fds: Vec<MessageFd>) -> Result<(), String> {
    match timeout(PROCESS_ANSWER, channel.send(&bytes, &fds)).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => return Err(format!("sending a command failed: {error}")),
        Err(_) => return Err("sending a command timed out".to_owned()),
    }
    if !fds.is_empty() {
        aside(move || drop(fds)).await;
    }
    Ok(())
}

/// Waits until the command has been sent. Without a command, never returns, so that a `select`
/// waits for its other branches only.
pub async fn sent(sending: &mut Option<Sending<'_>>) -> Result<(), String> {
    match sending {
        Some(sending) => sending.await,
        None => std::future::pending().await,
    }
}
