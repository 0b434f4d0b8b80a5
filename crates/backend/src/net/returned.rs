//! Frames that a port finishes after the call that has sent them.

/// Identifies a frame that comes back later: the slot of the frame's chain. No two frames that are
/// with a port at the same time have the same token.
pub type Token = u16;

/// A frame that was [`Sent::later`](super::Sent::later) and has come back: the port no longer uses
/// its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Returned {
    /// Names the frame.
    pub token: Token,
    /// Whether the frame was passed on; if not, the reason.
    pub outcome: Outcome,
}

/// How a frame ended that the port finished after [`PortTx::send`](super::PortTx::send) had
/// returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The port has passed the frame on.
    Passed,
    /// The host refused the frame (for an invalid header).
    Refused,
    /// The frame is lost because the host's interface is down or deleted.
    Down,
    /// The frame is lost because its guest memory was truncated (`EFAULT`).
    Faulted,
    /// [`PortTx::recall`](super::PortTx::recall) took the frame back before it was sent.
    Recalled,
}
