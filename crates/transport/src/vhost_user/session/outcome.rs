//! What a message leads to: effects in order, then an answer; or the end of the session.

use manyring_queue::RingAddresses;
use manyring_wire::vhost_user::{ConfigAccess, ParseError, Region, Reply};

/// A change of guest memory.
#[derive(Debug, PartialEq, Eq)]
pub enum MemoryChange<F> {
    /// These regions and no others.
    Replace(Vec<(Region, F)>),
    /// One more.
    Add(Region, F),
    /// One less.
    Remove(Region),
}

/// What the transport has to do, in order, before it replies.
#[derive(Debug, PartialEq, Eq)]
pub enum Effect<F> {
    /// Tell the device what was negotiated.
    Features(u64),
    /// Change guest memory, for running queues too.
    Memory(MemoryChange<F>),
    /// Build the vring and start it.
    Start(usize),
    /// Stop the running queue and keep its base.
    Stop(usize),
    /// Serve a running queue, or let it wait.
    Enable(usize, bool),
    /// A running queue's ring is elsewhere.
    Relocate(usize, RingAddresses),
    /// Keep the kick, or give it to the running queue; `None` = the ring is polled.
    Kick(usize, Option<F>),
    /// Keep the call, or give it to the running queue; `None` = the driver polls.
    Call(usize, Option<F>),
    /// Keep the err, or give it to the running queue.
    Err(usize, Option<F>),
    /// Write the config space.
    WriteConfig(ConfigAccess, Vec<u8>),
    /// Keep the back-end request channel.
    BackendChannel(F),
    /// Announce the guest of this MAC address.
    SendRarp([u8; 6]),
    /// The front-end has told the guest this MTU.
    SetMtu(u64),
    /// The driver has reset the device: what it wrote to the config space counts no more.
    ResetConfig,
    /// Nothing: the request cannot be done. An acknowledgement says so.
    Refuse(ParseError),
}

/// The answer to a message.
#[derive(Debug, PartialEq, Eq)]
pub enum Answer {
    /// None is due.
    None,
    /// This.
    Reply(Reply),
    /// An acknowledgement: 0 once the effects are done, else 1.
    Ack,
    /// The base of a vring, once it has stopped.
    Base(usize),
    /// A read of the config space.
    Config(ConfigAccess),
}

/// What a message leads to.
#[derive(Debug, PartialEq, Eq)]
pub struct Outcome<F> {
    /// To do, in order.
    pub effects: Vec<Effect<F>>,
    /// To answer afterwards.
    pub answer: Answer,
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
    #[error("{name} of {value}")]
    Value { name: &'static str, value: u64 },
    #[error("SET_FEATURES with bits {bits:#x} that were not offered")]
    Features { bits: u64 },
    #[error("SET_PROTOCOL_FEATURES with bits {bits:#x} that were not offered")]
    ProtocolFeatures { bits: u64 },
    #[error("more than {max} memory regions")]
    Slots { max: u64 },
}
