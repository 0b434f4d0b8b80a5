//! What happens to a device, and what is to be done about it.

use manyring_wire::xen::device::{Assignment, Connection, Disk, Offer};

use super::super::negotiate::Seen;

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The nodes were read: at the start, and after a watch fired.
    Seen(Seen),
    /// The answer to [`Action::Open`].
    Opened {
        /// What the device can do.
        offer: Offer,
        /// What it serves.
        disk: Disk,
    },
    /// The answer to [`Action::Connect`]: its queues run.
    Started,
    /// The answer to [`Action::Disconnect`]: nothing of the front-end is in use any more.
    Stopped,
    /// The answer to [`Action::Open`] and [`Action::Connect`] that it cannot be.
    Failed(String),
    /// The same, for want of something that this host may have again later.
    Delayed(String),
    /// A queue has met a fault of the front-end.
    Fault {
        /// [`Config::number`] of its connection: a fault of a former one counts no more.
        number: u32,
        /// What the front-end did.
        text: String,
    },
    /// The disk has another size.
    Resized(Disk),
    /// The operator takes the device away: the front-end is asked to close it.
    Detach,
    /// The operator takes the device away, whatever the front-end does.
    DetachNow,
    /// This process ends. Nodes stay as they are: the next one takes the rings over.
    Leave,
}

/// What is to be done, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Open what is served, then say [`Event::Opened`] or [`Event::Failed`].
    Open(Assignment),
    /// Write and remove nodes in one transaction, unless the back-end's `state` node is gone:
    /// nothing may be written into a folder that the tool stack has removed.
    Write(Vec<Change>),
    /// Map the rings, bind the event channels and start the queues, then say [`Event::Started`] or
    /// [`Event::Failed`].
    Connect(Config),
    /// Stop the queues and give everything back, then say [`Event::Stopped`].
    Disconnect,
    /// The device is over: what was opened may be closed. No answer.
    Close,
}

/// A change of a node. Its path begins in the home of the back-end's domain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// The node.
    pub path: String,
    /// Its value; `None`: the node is removed, if it is there.
    pub value: Option<String>,
}

/// What was negotiated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Tells this connection of the device from its others.
    pub number: u32,
    /// What the tool stack says.
    pub assignment: Assignment,
    /// The front-end's rings and event channels.
    pub connection: Connection,
    /// Grants stay mapped: both ends want it.
    pub persistent: bool,
    /// What the front-end was offered.
    pub offer: Offer,
    /// The rings are those of a former process and may hold requests that it took and did not
    /// answer. Otherwise both indices of each ring begin at 0.
    pub takeover: bool,
    /// A former process has offered the device, and may have had these event channels until just
    /// now: always so in a takeover, and where that process was killed while it connected.
    pub inherited: bool,
}
