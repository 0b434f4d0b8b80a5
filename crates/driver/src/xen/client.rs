//! `XenStore`: a client of xenstore for tests and bench: one request at a time, over a socket.

use crate::DriverError;
use crate::vring::now;
use manyring_wire::xen::path::{Path, Watched};
use manyring_wire::xen::store::{Answer, ErrorName, Permission, Request, split, strings};
use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// A connection to xenstore, as a domain or, through the socket of the simulated Xen, as domain 0.
#[derive(Debug)]
pub struct XenStore {
    stream: UnixStream,
    input: Vec<u8>,
    /// Events not yet taken by the caller: the token of the watch, and the path that changed.
    events: VecDeque<(String, String)>,
    max_wait: Duration,
}

fn wrong(what: impl ToString) -> DriverError {
    DriverError::Store(what.to_string())
}

fn path(text: &str) -> Result<Path<'_>, DriverError> {
    Path::parse(text.as_bytes()).map_err(wrong)
}

impl XenStore {
    /// Speaks over `stream`, and waits for an answer or an event this long.
    #[must_use]
    pub fn new(stream: UnixStream, max_wait: Duration) -> Self {
        Self { stream, input: Vec::new(), events: VecDeque::new(), max_wait }
    }

    /// Connects to a socket of xenstore.
    ///
    /// # Errors
    /// [`DriverError::Io`].
    pub fn connect(socket: &std::path::Path, max_wait: Duration) -> Result<Self, DriverError> {
        Ok(Self::new(UnixStream::connect(socket)?, max_wait))
    }

    /// Receives a message. An event is kept in `events`; `None` is returned then.
    fn receive(
        &mut self,
        max_wait: Duration,
    ) -> Result<Option<Result<Vec<u8>, ErrorName>>, DriverError> {
        loop {
            if let Some(message) = split(&self.input).map_err(wrong)? {
                let answer = match Answer::parse(&message).map_err(wrong)? {
                    Answer::Done(_, payload) => Some(Ok(payload.to_vec())),
                    Answer::Refused(error) => Some(Err(error)),
                    Answer::Event { watched, token } => {
                        let token = String::from_utf8_lossy(token).into_owned();
                        self.events.push_back((token, watched.as_str().to_owned()));
                        None
                    }
                };
                let size = message.size();
                self.input.drain(..size);
                return Ok(answer);
            }
            self.stream.set_read_timeout(Some(max_wait.max(Duration::from_millis(1))))?;
            let mut bytes = [0; 4096];
            match self.stream.read(&mut bytes) {
                Ok(0) => return Err(wrong("the server has closed the connection")),
                Ok(read) => self.input.extend_from_slice(&bytes[..read]),
                // A process that was stopped for a moment: a read with a timeout does not go on.
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Sends a request, and waits for the answer.
    ///
    /// # Errors
    /// [`DriverError::Io`], [`DriverError::Store`] for a message that is no answer.
    pub fn ask(
        &mut self,
        request: &Request<'_>,
    ) -> Result<Result<Vec<u8>, ErrorName>, DriverError> {
        let mut message = Vec::new();
        request.emit(1, 0, &mut message).map_err(wrong)?;
        self.stream.write_all(&message)?;
        loop {
            if let Some(answer) = self.receive(self.max_wait)? {
                return Ok(answer);
            }
        }
    }

    fn done(&mut self, request: &Request<'_>) -> Result<Vec<u8>, DriverError> {
        self.ask(request)?.map_err(|error| wrong(format!("{request:?}: {error}")))
    }

    /// Writes a node.
    ///
    /// # Errors
    /// [`DriverError::Store`]: why it is refused.
    pub fn write(&mut self, at: &str, value: impl ToString) -> Result<(), DriverError> {
        let value = value.to_string();
        self.done(&Request::Write { path: path(at)?, value: value.as_bytes() }).map(drop)
    }

    /// Removes a node and all below it, if it is there.
    ///
    /// # Errors
    /// [`DriverError::Store`]: why it is refused.
    pub fn remove(&mut self, at: &str) -> Result<(), DriverError> {
        let request = Request::Rm(path(at)?);
        match self.ask(&request)? {
            Ok(_) | Err(ErrorName::Enoent) => Ok(()),
            Err(error) => Err(wrong(format!("{request:?}: {error}"))),
        }
    }

    /// The value of a node; `None` if the node does not exist or may not be read.
    ///
    /// # Errors
    /// [`DriverError::Io`], [`DriverError::Store`].
    pub fn read(&mut self, at: &str) -> Result<Option<Vec<u8>>, DriverError> {
        Ok(self.ask(&Request::Read(path(at)?))?.ok())
    }

    /// The names of a node's children.
    ///
    /// # Errors
    /// [`DriverError::Store`]: why it is refused.
    pub fn children(&mut self, at: &str) -> Result<Vec<String>, DriverError> {
        let payload = self.done(&Request::Directory(path(at)?))?;
        Ok(strings(&payload).map(|name| String::from_utf8_lossy(name).into_owned()).collect())
    }

    /// Sets the permissions of a node, as `n7 r0` writes them.
    ///
    /// # Errors
    /// [`DriverError::Store`]: why it is refused.
    pub fn permit(&mut self, at: &str, permissions: &str) -> Result<(), DriverError> {
        let parse = |entry: &str| Permission::parse(entry.as_bytes());
        let permissions = permissions.split(' ').map(parse).collect::<Option<_>>();
        let permissions = permissions.ok_or_else(|| wrong("permissions"))?;
        self.done(&Request::SetPerms { path: path(at)?, permissions }).map(drop)
    }

    /// Waits until a node has the wanted value, or is absent if that is wanted.
    ///
    /// # Errors
    /// [`DriverError::Timeout`], [`DriverError::Io`], [`DriverError::Store`].
    pub fn await_value(
        &mut self,
        at: &str,
        is_right: impl Fn(Option<&[u8]>) -> bool,
    ) -> Result<(), DriverError> {
        let watched = Watched::parse(at.as_bytes()).map_err(wrong)?;
        let token = at.as_bytes();
        self.done(&Request::Watch { watched, token, depth: None })?;
        let deadline = now() + self.max_wait;
        while !is_right(self.read(at)?.as_deref()) {
            while !self.events.iter().any(|(of, _)| of == at) {
                let left = deadline.saturating_duration_since(now());
                if left.is_zero() {
                    return Err(DriverError::Timeout);
                }
                match self.receive(left) {
                    Ok(None) => {}
                    Ok(Some(_)) => return Err(wrong("an answer to no request")),
                    // The time is over; looked at above.
                    Err(DriverError::Io(error)) if error.kind() == ErrorKind::WouldBlock => {}
                    Err(error) => return Err(error),
                }
            }
            self.events.retain(|(of, _)| of != at);
        }
        self.events.retain(|(of, _)| of != at);
        self.done(&Request::Unwatch { watched, token }).map(drop)
    }
}
