//! The calls of the simulated Xen, in the place of a real Xen's hypercalls.
//!
//! The server of the simulated Xen listens on two sockets. One speaks xenstore's protocol
//! ([`super::store`]). The other, at the same path with [`SOCKET_SUFFIX`] appended, serves these
//! calls. A call and its answer are four words each, in the host's byte order; an answer may bring
//! file descriptors. A connection that calls [`Hypercall::Create`] is that domain from then on; the
//! domain ends with the connection. Every other connection is domain 0.

/// The suffix by which the second socket's path differs from the first's.
pub const SOCKET_SUFFIX: &str = ".hypercall";
/// Bytes of a call, and of an answer.
pub const CALL_SIZE: usize = 16;

/// A call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hypercall {
    /// Creates a domain and becomes it. Answered with its memory (a file that begins with the grant
    /// table) and its connection to xenstore.
    Create {
        /// The number of the domain, not 0.
        domain: u16,
        /// Number of pages of memory, including those of the grant table.
        pages: u32,
        /// Number of entries of the grant table.
        entries: u32,
    },
    /// Takes a seat, from which pages of a domain are mapped. Answered with the number of entries
    /// of the domain's grant table, the seat, and the domain's memory.
    Attach {
        /// The domain whose pages are to be mapped.
        domain: u16,
    },
    /// Gives back the caller's seat at a domain. All marks of the seat are cleared.
    Detach {
        /// The domain at which the caller has a seat.
        domain: u16,
    },
    /// Makes a port that a domain may bind to. Answered with the port and two eventfds: the first
    /// is signalled for the caller, the second signals the other end.
    AllocUnbound {
        /// The domain that may bind.
        remote: u16,
    },
    /// Makes a port that is joined with an unbound one of another domain. Answered like
    /// [`Hypercall::AllocUnbound`].
    Bind {
        /// The domain that has made the port.
        remote: u16,
        /// The port of that domain.
        port: u32,
    },
    /// Closes a port of the caller. The other end may be bound again.
    Close {
        /// The port to close.
        port: u32,
    },
}

/// An answer: 0 or an errno, and two words that the call defines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// 0, or why the call failed: an errno.
    pub errno: u32,
    /// The first word: a port, or the number of entries of a grant table.
    pub first: u32,
    /// The second word: the seat.
    pub second: u32,
}

impl Hypercall {
    /// Parses a call. `None`: the number names no call, or an argument is out of range.
    #[must_use]
    pub fn parse(bytes: &[u8; CALL_SIZE]) -> Option<Self> {
        let [number, a, b, c] = words(bytes);
        let domain = || u16::try_from(a).ok();
        match number {
            1 => Some(Self::Create { domain: domain()?, pages: b, entries: c }),
            2 => Some(Self::Attach { domain: domain()? }),
            3 => Some(Self::Detach { domain: domain()? }),
            4 => Some(Self::AllocUnbound { remote: domain()? }),
            5 => Some(Self::Bind { remote: domain()?, port: b }),
            6 => Some(Self::Close { port: a }),
            _ => None,
        }
    }

    /// The bytes of the call.
    #[must_use]
    pub fn emit(self) -> [u8; CALL_SIZE] {
        bytes(match self {
            Self::Create { domain, pages, entries } => [1, domain.into(), pages, entries],
            Self::Attach { domain } => [2, domain.into(), 0, 0],
            Self::Detach { domain } => [3, domain.into(), 0, 0],
            Self::AllocUnbound { remote } => [4, remote.into(), 0, 0],
            Self::Bind { remote, port } => [5, remote.into(), port, 0],
            Self::Close { port } => [6, port, 0, 0],
        })
    }
}

impl Outcome {
    /// Parses an answer.
    #[must_use]
    pub fn parse(bytes: &[u8; CALL_SIZE]) -> Self {
        let [errno, first, second, _] = words(bytes);
        Self { errno, first, second }
    }

    /// The bytes of the answer.
    #[must_use]
    pub fn emit(self) -> [u8; CALL_SIZE] {
        bytes([self.errno, self.first, self.second, 0])
    }
}

fn words(bytes: &[u8; CALL_SIZE]) -> [u32; 4] {
    std::array::from_fn(|i| {
        let at = 4 * i;
        u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
    })
}

fn bytes(words: [u32; 4]) -> [u8; CALL_SIZE] {
    std::array::from_fn(|at| words[at / 4].to_ne_bytes()[at % 4])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_and_answers_are_parsed_as_they_were_emitted() {
        for call in [
            Hypercall::Create { domain: 7, pages: 1000, entries: 512 },
            Hypercall::Attach { domain: u16::MAX },
            Hypercall::Detach { domain: 0 },
            Hypercall::AllocUnbound { remote: 3 },
            Hypercall::Bind { remote: 3, port: u32::MAX },
            Hypercall::Close { port: 5 },
        ] {
            assert_eq!(Hypercall::parse(&call.emit()), Some(call));
        }
        let outcome = Outcome { errno: 22, first: 1, second: u32::MAX };
        assert_eq!(Outcome::parse(&outcome.emit()), outcome);
    }

    #[test]
    fn a_call_that_does_not_exist_or_names_no_domain_is_none() {
        for words in [[0, 1, 1, 1], [7, 1, 1, 1], [2, 0x1_0000, 0, 0], [u32::MAX; 4]] {
            assert_eq!(Hypercall::parse(&bytes(words)), None, "{words:?}");
        }
    }
}
