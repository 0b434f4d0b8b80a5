//! Frames that a port finishes after the call that has sent them.

/// Names a frame that comes back later: the slot of the frame's chain. No two frames that are with
/// a port at the same time have the same token.
pub type Token = u16;

/// A frame that was [`Sent::later`](super::Sent::later) and has come back: the port uses its memory
/// no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Returned {
    /// Names the frame.
    pub token: Token,
    /// Whether the frame was passed on, and if not, why.
    pub outcome: Outcome,
}

/// The end of a frame that the port finished after [`PortTx::send`](super::PortTx::send) had
/// returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The port has passed the frame on.
    Passed,
    /// The host refused the frame (a header it finds wrong).
    Refused,
    /// The frame is lost because the host's interface is down or gone.
    Down,
    /// The frame is lost because its guest memory was cut away (`EFAULT`).
    Faulted,
    /// [`PortTx::recall`](super::PortTx::recall) took the frame back: it is not passed on.
    Recalled,
}
