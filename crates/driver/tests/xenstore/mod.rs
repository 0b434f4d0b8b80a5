//! The smallest client of xenstore: one request at a time, events kept for whoever waits for them.
#![allow(dead_code, reason = "every test program uses its own part of it")]

use manyring_wire::xen::path::{Path, Watched};
use manyring_wire::xen::store::{Answer, ErrorName, Permission, Request, split};
use std::collections::VecDeque;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// Longer than any answer takes on a busy machine.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

pub(crate) struct XenStore {
    stream: UnixStream,
    input: Vec<u8>,
    events: VecDeque<(String, String)>,
}

fn path(text: &str) -> Path<'_> {
    Path::parse(text.as_bytes()).unwrap()
}

impl XenStore {
    pub(crate) fn connect(socket: &std::path::Path) -> Self {
        Self::of(UnixStream::connect(socket).unwrap())
    }

    pub(crate) fn of(stream: UnixStream) -> Self {
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        Self { stream, input: Vec::new(), events: VecDeque::new() }
    }

    /// Receives a message; events are put aside. `None` for an event.
    fn receive(&mut self) -> Option<Result<Vec<u8>, ErrorName>> {
        loop {
            if let Some(message) = split(&self.input).unwrap() {
                let answer = match Answer::parse(&message).unwrap() {
                    Answer::Done(_, payload) => Some(Ok(payload.to_vec())),
                    Answer::Refused(error) => Some(Err(error)),
                    Answer::Event { watched, token } => {
                        let token = String::from_utf8(token.to_vec()).unwrap();
                        self.events.push_back((watched.as_str().to_owned(), token));
                        None
                    }
                };
                let size = message.size();
                self.input.drain(..size);
                return answer;
            }
            let mut bytes = [0; 4096];
            let read = self.stream.read(&mut bytes).expect("an answer in time");
            assert!(read > 0, "the server has closed the connection");
            self.input.extend_from_slice(&bytes[..read]);
        }
    }

    pub(crate) fn ask(&mut self, request: &Request<'_>) -> Result<Vec<u8>, ErrorName> {
        let mut message = Vec::new();
        request.emit(1, 0, &mut message).unwrap();
        self.stream.write_all(&message).unwrap();
        loop {
            if let Some(answer) = self.receive() {
                return answer;
            }
        }
    }

    pub(crate) fn write(&mut self, at: &str, value: impl ToString) {
        let value = value.to_string();
        self.ask(&Request::Write { path: path(at), value: value.as_bytes() }).unwrap();
    }

    pub(crate) fn read(&mut self, at: &str) -> Option<String> {
        self.ask(&Request::Read(path(at))).ok().map(|value| String::from_utf8(value).unwrap())
    }

    /// The number at a node that must have one.
    pub(crate) fn number(&mut self, at: &str) -> u32 {
        self.read(at).unwrap().parse().unwrap()
    }

    pub(crate) fn permit(&mut self, at: &str, permissions: &str) {
        let parse = |entry: &str| Permission::parse(entry.as_bytes()).unwrap();
        let permissions = permissions.split(' ').map(parse).collect();
        self.ask(&Request::SetPerms { path: path(at), permissions }).unwrap();
    }

    pub(crate) fn watch(&mut self, at: &str, token: &str) {
        let watched = Watched::parse(at.as_bytes()).unwrap();
        self.ask(&Request::Watch { watched, token: token.as_bytes(), depth: None }).unwrap();
        self.next_event(token);
    }

    /// Waits for the next event of the watch with `token`. Returns its path.
    pub(crate) fn next_event(&mut self, token: &str) -> String {
        loop {
            if let Some(at) = self.events.iter().position(|(_, of)| of == token) {
                return self.events.remove(at).unwrap().0;
            }
            assert!(self.receive().is_none(), "an answer to no request");
        }
    }

    /// Waits until a node holds `value`.
    pub(crate) fn await_value(&mut self, at: &str, value: &str) {
        let watched = Watched::parse(at.as_bytes()).unwrap();
        self.watch(at, at);
        while self.read(at).as_deref() != Some(value) {
            self.next_event(at);
        }
        self.ask(&Request::Unwatch { watched, token: at.as_bytes() }).unwrap();
    }
}
