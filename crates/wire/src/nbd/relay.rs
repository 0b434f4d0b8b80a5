//! `Relay`: carries the commands of several clients on one connection to a server, and finds the
//! client of each reply. Pure.
//!
//! A client's cookies have two unused bytes, [`CLIENT`]. The relay writes the client's number there
//! in a command that leaves, and clears it in the reply. Each command is remembered until it is
//! answered, because a simple reply does not say how many bytes follow it. What a client gets is
//! checked by the client's own session: the relay checks only what it needs to find the client.

use super::{COMMAND_SIZE, Command, CommandKind, NbdError, Replied, Reply};
use std::collections::HashMap;
use std::ops::Range;

/// The bytes of a cookie that are the client's number, as offsets in a command and in a reply.
const CLIENT: Range<usize> = 12..14;

/// A command that waits for its reply.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    client: u16,
    /// Bytes that follow a simple reply without an error.
    data: u32,
}

/// The commands of several clients that wait for a reply on one connection.
#[derive(Debug, Default)]
pub struct Relay {
    /// The waiting commands, by the cookie that the server knows.
    waiting: HashMap<u64, Waiting>,
    /// The client to which the next bytes of the server belong, and how many bytes these are.
    payload: (u16, u32),
}

/// What the bytes that a client has sent begin with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// A part of a command: more bytes must come.
    Needs,
    /// A command with its data; the number of bytes of both.
    Command(usize),
    /// `NBD_CMD_DISC`, or bytes that are no command: the client must be disconnected.
    Ends,
}

impl Relay {
    /// True if a command of `client` waits for a reply.
    #[must_use]
    pub fn is_waiting(&self, client: u16) -> bool {
        self.waiting.values().any(|waiting| waiting.client == client)
    }

    /// Examines the message that `bytes` of `client` begin with. Appends a whole command to `out`,
    /// with the client's number in its cookie.
    pub fn command(&mut self, client: u16, bytes: &[u8], out: &mut Vec<u8>) -> Message {
        let Some(head) = bytes.first_chunk::<COMMAND_SIZE>() else { return Message::Needs };
        let Some(command) = Command::parse(head) else { return Message::Ends };
        if command.kind == CommandKind::Disconnect || head[CLIENT] != [0, 0] {
            return Message::Ends;
        }
        let data = if command.kind == CommandKind::Write { command.len as usize } else { 0 };
        let Some(message) = bytes.get(..COMMAND_SIZE + data) else { return Message::Needs };
        let first = out.len();
        out.extend_from_slice(message);
        let mark = &mut out[first + CLIENT.start..first + CLIENT.end];
        mark.copy_from_slice(&client.to_be_bytes());
        let cookie = command.cookie | u64::from(client) << 16;
        let data = if command.kind == CommandKind::Read { command.len } else { 0 };
        self.waiting.insert(cookie, Waiting { client, data });
        Message::Command(message.len())
    }

    /// Appends the leading bytes that belong to one client to that client's buffer, which `out`
    /// returns for its number. Returns how many bytes were consumed; 0: `bytes` ends inside the
    /// head of a reply. The cookie in the head is replaced by the client's own. If `out` returns
    /// `None`, the client's bytes are dropped.
    ///
    /// # Errors
    /// [`NbdError::Reply`]: the bytes are no reply to a waiting command.
    pub fn reply<'a>(
        &mut self,
        bytes: &[u8],
        out: impl FnOnce(u16) -> Option<&'a mut Vec<u8>>,
    ) -> Result<usize, NbdError> {
        let (client, left) = self.payload;
        if left > 0 {
            let n = u32::try_from(bytes.len()).unwrap_or(u32::MAX).min(left);
            self.payload.1 -= n;
            if let Some(out) = out(client) {
                out.extend_from_slice(&bytes[..n as usize]);
            }
            return Ok(n as usize);
        }
        let Some(Replied { reply, size }) = Reply::parse(bytes)? else { return Ok(0) };
        let (cookie, is_last) = match reply {
            Reply::Simple { cookie, .. } => (cookie, true),
            Reply::Chunk(chunk) => (chunk.cookie, chunk.is_last),
        };
        let unknown = NbdError::Reply("to a command that was not sent, or was answered");
        let Waiting { client, data } = *self.waiting.get(&cookie).ok_or(unknown)?;
        if is_last {
            self.waiting.remove(&cookie);
        }
        let left = match reply {
            Reply::Simple { error: None, .. } => data,
            Reply::Simple { .. } => 0,
            Reply::Chunk(chunk) => chunk.len,
        };
        self.payload = (client, left);
        if let Some(out) = out(client) {
            let first = out.len();
            out.extend_from_slice(&bytes[..size]);
            out[first + CLIENT.start..first + CLIENT.end].fill(0);
        }
        Ok(size)
    }
}
