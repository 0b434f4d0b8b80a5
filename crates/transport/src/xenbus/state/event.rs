//! The events that the state machine of a device handles, and the actions that it returns.

use manyring_wire::xen::device::{Assignment, Connection, DiskGeometry, Offer};

use super::super::negotiate::Seen;

/// An event for the state machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The nodes were read: at the start, and after a watch fired.
    Seen(Seen),
    /// The answer to [`Action::Open`].
    Opened {
        /// The features that can be offered to the front-end.
        offer: Offer,
        /// The disk that was opened.
        disk: DiskGeometry,
    },
    /// The answer to [`Action::Connect`]: its queues run.
    Started,
    /// The answer to [`Action::Disconnect`]: nothing of the front-end is in use any more.
    Stopped,
    /// The answer to [`Action::Open`] or [`Action::Connect`]: it failed for this reason.
    Failed(String),
    /// The answer to [`Action::Open`] or [`Action::Connect`]: it failed for this reason, and
    /// another attempt may succeed later.
    Delayed(String),
    /// A queue has met a fault of the front-end.
    Fault {
        /// [`Negotiated::number`] of the queue's connection: a fault of a former connection is
        /// ignored.
        number: u32,
        /// The fault, in words for the log and the `error` node.
        text: String,
    },
    /// The disk has another size.
    Resized(DiskGeometry),
    /// The operator removes the device: the front-end is asked to close it.
    Detach,
    /// The operator removes the device at once, whatever the front-end does.
    DetachNow,
    /// This process ends. The nodes stay as they are, and the next process resumes the rings.
    Leave,
}

/// An action of the state machine; actions are carried out in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Open the disk, then answer with [`Event::Opened`], [`Event::Failed`] or [`Event::Delayed`].
    Open(Assignment),
    /// Write and remove nodes in one transaction, unless the back-end's `state` node is gone:
    /// nothing may be written into a folder that the tool stack has removed.
    Write(Vec<Change>),
    /// Map the rings, bind the event channels and start the queues, then answer with
    /// [`Event::Started`], [`Event::Failed`] or [`Event::Delayed`].
    Connect(Negotiated),
    /// Stop the queues and unmap everything, then answer with [`Event::Stopped`].
    Disconnect,
    /// The device is over: close the disk. There is no answer.
    Close,
}

/// A change of a node. Its path is relative to the home of the back-end's domain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// The path of the node.
    pub path: String,
    /// The new value; `None`: remove the node, if it exists.
    pub value: Option<String>,
}

/// A negotiated connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Negotiated {
    /// The number of the connection, which no other connection of the device has.
    pub number: u32,
    /// The parsed nodes that the tool stack has written for the device.
    pub assignment: Assignment,
    /// The front-end's rings and event channels.
    pub connection: Connection,
    /// True if grants stay mapped, because both ends have `feature-persistent`.
    pub persistent: bool,
    /// The offer that the front-end got.
    pub offer: Offer,
    /// True if a former process has served the rings, which may hold requests that it took and did
    /// not answer. Otherwise both indices of each ring begin at 0.
    pub takeover: bool,
    /// True if a former process has offered the device, and may have had these event channels until
    /// a moment ago: for every takeover, and if that process was killed while it connected.
    pub inherited: bool,
}
