//! Connect, request, response, close: each transaction has a connection of its own.
//!
//! The server closes first, once it has answered (`rr-server --close`): the port that waits for
//! late segments is then the server's, and the client never runs out of ports. A transaction ends
//! when the client has read the answer and the end behind it.

use super::{
    Poller, ReadyConnections, RrArgs, RrConnection, RrResult, RrRun, check, connect, failed,
    poll_failed,
};
use crate::load::LoadError;
use crate::measure::{Latencies, now};
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with, sockopt};
use std::net::{SocketAddr, TcpStream};

/// The state of a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Connecting,
    Asked,
    /// The answer is complete; the server has not closed the connection yet.
    Answered,
    /// The server has closed its side, too.
    Ended,
}

/// One transaction, and its number.
struct Transaction {
    peer: RrConnection,
    stage: Stage,
    number: u64,
}

impl Transaction {
    /// Begins to connect.
    fn begin(server: SocketAddr, size: usize, number: u64) -> Result<Self, LoadError> {
        let begun = now();
        let stream = connecting(server).map_err(|errno| failed("connect")(errno.into()))?;
        let mut peer = RrConnection::new(stream, size).map_err(failed("connect"))?;
        peer.sent = begun;
        Ok(Self { peer, stage: Stage::Connecting, number })
    }

    /// Advances the transaction as far as possible without waiting.
    fn go_on(&mut self) -> Result<(), LoadError> {
        if self.stage == Stage::Connecting {
            let refused = sockopt::socket_error(&self.peer.stream);
            let refused = refused.map_err(|errno| failed("connect")(errno.into()))?;
            refused.map_err(|errno| failed("connect")(errno.into()))?;
            self.peer.ask(self.number).map_err(failed("send"))?;
            self.stage = Stage::Asked;
        }
        if self.stage == Stage::Asked && self.peer.receive().map_err(failed("receive"))? {
            if !self.peer.is_answer(self.number) {
                return Err(LoadError::Options("an answer has other bytes than its request"));
            }
            self.stage = Stage::Answered;
        }
        if self.stage == Stage::Answered && self.peer.is_closed().map_err(failed("close"))? {
            self.stage = Stage::Ended;
        }
        Ok(())
    }
}

/// A connection that is being made.
fn connecting(server: SocketAddr) -> Result<TcpStream, Errno> {
    let family = if server.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(family, SocketType::STREAM, flags, None)?;
    match rustix::net::connect(&socket, &server) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(socket.into()),
        Err(errno) => Err(errno),
    }
}

/// Runs transactions until the time is over, each on a new connection, several at a time.
///
/// # Errors
/// [`LoadError`] if the server cannot be reached, goes silent, or answers with other bytes.
pub(crate) fn client(args: &RrArgs) -> Result<RrResult, LoadError> {
    check(args.size)?;
    // The first one waits for the server to come up.
    drop(connect(args.server)?);
    let mut poller = Poller::new().map_err(poll_failed)?;
    let mut count = 0;
    let mut begin = |poller: &Poller, token: usize| {
        count += 1;
        let transaction = Transaction::begin(args.server, args.size, count)?;
        let stream = &transaction.peer.stream;
        poller.add_for(stream, token, EventFlags::OUT).map_err(poll_failed)?;
        Ok::<_, LoadError>(transaction)
    };
    let (mut run, mut latencies) = (RrRun::begin(args.seconds, args.connections), Latencies::new());
    let mut all: Vec<Transaction> =
        (0..args.connections).map(|token| begin(&poller, token)).collect::<Result<_, _>>()?;
    while let Some(ReadyConnections { tokens, at }) = run.next(&mut poller)? {
        for token in tokens {
            let transaction = &mut all[token];
            let was_connecting = transaction.stage == Stage::Connecting;
            transaction.go_on()?;
            if transaction.stage == Stage::Ended {
                latencies.record(at - transaction.peer.sent);
                // The one before is closed by this.
                *transaction = begin(&poller, token)?;
            } else if was_connecting {
                let stream = &transaction.peer.stream;
                poller.wait_for(stream, token, EventFlags::IN).map_err(poll_failed)?;
            }
        }
    }
    Ok(RrResult::of(&latencies, run.start.elapsed()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::TcpListener;

    /// A server that answers with what it was asked, `spoiled` at the first byte, and closes.
    fn answer(listener: &TcpListener, size: usize, spoiled: u8) {
        let (mut stream, _) = listener.accept().unwrap();
        let mut message = vec![0; size];
        stream.read_exact(&mut message).unwrap();
        message[0] ^= spoiled;
        stream.write_all(&message).unwrap();
    }

    fn to_the_end(transaction: &mut Transaction) -> Result<(), LoadError> {
        // The server's thread decides when there is something: this looks until then.
        while transaction.stage != Stage::Ended {
            match transaction.go_on() {
                Err(LoadError::Client { step: "send", .. }) => {}
                result => result?,
            }
            std::thread::yield_now();
        }
        Ok(())
    }

    #[test]
    fn a_transaction_ends_when_the_server_has_closed_behind_the_right_answer() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let server = listener.local_addr().unwrap();
        for (spoiled, is_right) in [(0, true), (1, false)] {
            let mut transaction = Transaction::begin(server, 256, 7).unwrap();
            std::thread::scope(|scope| {
                scope.spawn(|| answer(&listener, 256, spoiled));
                assert_eq!(to_the_end(&mut transaction).is_ok(), is_right);
            });
        }
    }

    #[test]
    fn a_server_that_refuses_is_an_error_of_the_connection() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let server = listener.local_addr().unwrap();
        drop(listener);
        let error = match Transaction::begin(server, 256, 7) {
            Ok(mut transaction) => transaction.go_on().unwrap_err(),
            Err(error) => error,
        };
        assert!(error.to_string().starts_with("connect: "), "{error}");
    }
}
