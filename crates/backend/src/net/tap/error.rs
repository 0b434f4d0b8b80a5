//! `TapError`: why a tap, or another interface, cannot be opened, in one sentence for the operator.

use rustix::io::Errno;

/// Queue pairs of one tap at most (`MAX_TAP_QUEUES`).
pub const TAP_QUEUE_PAIRS_MAX: usize = 256;

/// Why a tap, a macvtap or an interface for AF_XDP cannot be opened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the Display text says what each is")]
pub enum TapError {
    #[error("{0:?} is not an interface name: 1 to 15 bytes, no space, slash or colon")]
    Name(String),
    #[error("{0} queue pairs: a tap has 1 to {TAP_QUEUE_PAIRS_MAX}")]
    QueuePairs(usize),
    #[error("{0}: no such interface")]
    Missing(String),
    #[error("{0} is an interface, but not a {1}")]
    WrongKind(String, &'static str),
    #[error("tap {name} is not multi-queue: it cannot have {queue_pairs} queue pairs")]
    SingleQueue { name: String, queue_pairs: usize },
    #[error("{0} is in use by another process")]
    Busy(String),
    #[error("{name}: no permission to {action} (needs CAP_NET_ADMIN)")]
    Permission { name: String, action: &'static str },
    #[error("{given} tap file descriptors for {queue_pairs} queue pairs: one is needed for each")]
    FdCount { given: usize, queue_pairs: usize },
    #[error("file descriptor {0} is not a queue of a tap")]
    FdKind(i32),
    #[error("file descriptor {0} belongs to a tun, not to a tap (IFF_TAP)")]
    FdTun(i32),
    #[error("file descriptor {0} gives no virtio-net headers (IFF_VNET_HDR)")]
    FdHeader(i32),
    #[error("file descriptor {0} puts packet information before frames (lacks IFF_NO_PI)")]
    FdPacketInfo(i32),
    #[error("file descriptor {fd} belongs to {name}, others to {other}")]
    FdOther { fd: i32, name: String, other: String },
    #[error("file descriptor {0} is the same queue of the tap as another")]
    FdTwice(i32),
    #[error(
        "{0} is in another network namespace: its MTU, bridge, length of queues and state cannot \
         be set from here"
    )]
    Elsewhere(String),
    #[error(
        "{0} was passed as file descriptors and cannot be joined again; restart the daemon with \
         queues of an existing interface"
    )]
    HandedIn(String),
    #[error("bridge {0}: no such interface")]
    BridgeMissing(String),
    #[error("{0} is an interface, but not a bridge")]
    NotABridge(String),
    #[error("{0} already belongs to another bridge")]
    OtherBridge(String),
    #[error("MTU {0} is too small; the minimum is 68")]
    Mtu(u16),
    #[error("setting MTU {mtu} of {name} failed: the interface does not support it")]
    MtuRefused { name: String, mtu: u16 },
    #[error(
        "{name} has MTU {mtu}: a frame must lie in one page for AF_XDP, so its MTU may be {max} \
         at most"
    )]
    MtuLong { name: String, mtu: u32, max: u32 },
    #[error(
        "{name} has fewer queues than {queue_pairs}: each pair takes one (ethtool -L {name} \
         combined {queue_pairs})"
    )]
    FewQueues { name: String, queue_pairs: usize },
    #[error("{0}: its driver does not support AF_XDP zero-copy; remove zero_copy")]
    NoZeroCopy(String),
    #[error("{name}: cannot {action}")]
    System {
        name: String,
        action: &'static str,
        #[source]
        errno: Errno,
    },
}

impl TapError {
    /// `action` on `name` failed with `errno`.
    #[must_use]
    pub fn system(name: &str, action: &'static str, errno: Errno) -> Self {
        let name = name.to_owned();
        match errno {
            Errno::PERM => Self::Permission { name, action },
            errno => Self::System { name, action, errno },
        }
    }
}
