//! The decision of a session about a message: effects in order, then an answer; or that it must
//! end.

use manyring_queue::RingAddresses;
use manyring_wire::vhost_user::{ConfigAccess, InflightArea, LogArea, ParseError, Region, Reply};

/// A change of guest memory.
#[derive(Debug, PartialEq, Eq)]
pub enum MemoryChange<F> {
    /// Replace all regions by these (`SET_MEM_TABLE`).
    Replace(Vec<(Region, F)>),
    /// Add a region (`ADD_MEM_REG`).
    Add(Region, F),
    /// Remove a region (`REM_MEM_REG`).
    Remove(Region),
}

/// An effect that the transport carries out before it replies.
#[derive(Debug, PartialEq, Eq)]
pub enum Effect<F> {
    /// Tell the device the negotiated features.
    Features(u64),
    /// Change guest memory, for running queues too.
    Memory(MemoryChange<F>),
    /// Build the vring and start it.
    Start(usize),
    /// Stop the running queue and keep its base.
    Stop(usize),
    /// Find the base of a vring that is complete and does not run.
    FindBase(usize),
    /// Enable or disable a running queue.
    Enable(usize, bool),
    /// Serve a running queue's ring at these addresses.
    Relocate(usize, RingAddresses),
    /// Store the kick, or give it to the running queue; `None`: the device must poll the ring.
    Kick(usize, Option<F>),
    /// Store the call, or give it to the running queue; `None`: the driver polls the ring.
    Call(usize, Option<F>),
    /// Store the err eventfd, or give it to the running queue.
    Err(usize, Option<F>),
    /// Write the config space.
    WriteConfig(ConfigAccess, Vec<u8>),
    /// Keep the back-end request channel.
    BackendChannel(F),
    /// Send a RARP frame from this MAC address, which announces the migrated guest to the network.
    SendRarp([u8; 6]),
    /// Tell the device the MTU that the front-end has told the guest.
    SetMtu(u64),
    /// The rings that start record their chains in flight in this region; `None`: they record
    /// nothing.
    Inflight(Option<(InflightArea, F)>),
    /// Mark the writes to guest memory in this log; `None`: mark nothing.
    Log(Option<(LogArea, F)>),
    /// Write the device's state to this fd.
    SaveState(F),
    /// Read a state for the device from this fd.
    LoadState(F),
    /// Undo the driver's writes to the config space: the driver has reset the device.
    ResetConfig,
    /// Log that the request is refused; an acknowledgement reports the failure.
    Refuse(ParseError),
}

/// The answer to a message.
#[derive(Debug, PartialEq, Eq)]
pub enum Answer {
    /// No answer is due.
    None,
    /// Send this reply.
    Reply(Reply),
    /// An acknowledgement: 0 if all effects were carried out, 1 if one was refused.
    Ack,
    /// Answer with the base of this vring, once the vring has stopped.
    Base(usize),
    /// Answer with the bytes of this read of the config space.
    Config(ConfigAccess),
    /// Answer with a new in-flight region for these queues and entries; the payload has this size.
    Inflight(InflightArea, usize),
    /// Answer `SET_DEVICE_STATE_FD`: the back-end sends no descriptor of its own, and says whether
    /// it has refused the front-end's.
    StateFd,
    /// Answer `CHECK_DEVICE_STATE`: whether the state was saved, or whether the device has restored
    /// it.
    CheckState {
        /// True if no ring runs. A device with a running ring restores no state.
        is_suspended: bool,
    },
}

/// The decision of a session about a message.
#[derive(Debug, PartialEq, Eq)]
pub struct Outcome<F> {
    /// The effects, in the order in which they must be carried out.
    pub effects: Vec<Effect<F>>,
    /// The answer that follows.
    pub answer: Answer,
}

impl<F> Outcome<F> {
    /// Makes an outcome with an answer and no effects.
    pub(super) fn of(answer: Answer) -> Self {
        Self { effects: Vec::new(), answer }
    }
}

/// Why a session must end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the Display text says what each field is")]
pub enum SessionError {
    #[error(transparent)]
    Parse(#[from] ParseError),
    #[error(
        "{name} for vring {index} of a device with {count}: the front-end is set to more queues or \
         queue pairs than the device has"
    )]
    Index { name: &'static str, index: usize, count: usize },
    #[error("{name} with the invalid value {value}")]
    Value { name: &'static str, value: u64 },
    #[error("{name} for an invalid region of {queues} queues with {queue_size} entries each")]
    Inflight { name: &'static str, queues: u16, queue_size: u16 },
    #[error("SET_INFLIGHT_FD while a vring runs")]
    InflightLate,
    #[error("SET_FEATURES with bits {bits:#x} that were not offered")]
    Features { bits: u64 },
    #[error("SET_PROTOCOL_FEATURES with bits {bits:#x} that were not offered")]
    ProtocolFeatures { bits: u64 },
    #[error("more than {max} memory regions")]
    Slots { max: u64 },
}
