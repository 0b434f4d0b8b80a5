//! Changes while the daemon runs: the requests and their answers.

use super::Who;
use manyring_config::diff::StepInfo;
use manyring_config::plan::{Plan, Wanted};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, oneshot};

/// Most changes that wait while another change is carried out.
const CHANGES_MAX: usize = 16;

/// Keys of a device and their values, as in a request.
pub type Keys = serde_json::Map<String, serde_json::Value>;

/// A change that a client, or the daemon itself, asks for.
#[derive(Clone, Debug)]
pub enum Change {
    /// Create or replace a device of the control API.
    Put {
        /// The device, as the request describes it.
        device: Wanted,
        /// The keys of the request, as they are saved.
        text: String,
    },
    /// Change live keys of a device.
    Patch {
        /// The name of the device.
        name: String,
        /// The keys that change.
        keys: Keys,
    },
    /// Set the MTU of an interface, even if the plan already has this value: somebody else may
    /// have changed the interface.
    Mtu {
        /// The name of the network device that has the interface.
        name: String,
        /// The MTU in bytes, as the interface counts it.
        mtu: u16,
    },
    /// Replace the keys of a group of `[[limit]]`.
    Limit {
        /// The name of the group.
        group: String,
        /// All keys of the group after the change.
        keys: Keys,
    },
    /// Carry out the deferred changes of a device whose session has ended.
    Settle {
        /// The name of the device.
        name: String,
    },
    /// Remove a device.
    Delete {
        /// The name of the device.
        name: String,
        /// True: remove the device even if a front-end uses it.
        force: bool,
    },
    /// Replace the devices of the configuration file by those of this plan.
    All {
        /// The plan of the configuration file.
        plan: Box<Plan>,
        /// True: return the steps, and change nothing.
        dry_run: bool,
        /// The generation that the client has read: any other present one refuses the change.
        if_match: Option<u64>,
    },
}

impl Change {
    /// Returns the device that the change names; `None` for a change of a group or whole plan.
    pub(crate) fn device(&self) -> Option<&str> {
        match self {
            Self::Put { device, .. } => Some(&device.plan().name),
            Self::Patch { name, .. }
            | Self::Mtu { name, .. }
            | Self::Settle { name }
            | Self::Delete { name, .. } => Some(name),
            Self::Limit { .. } | Self::All { .. } => None,
        }
    }
}

/// The result of a change: its steps were carried out, or (`dry_run`) would be.
#[derive(Clone, Debug, Deserialize, Serialize, utoipa::ToSchema)]
pub struct Done {
    /// The generation: how many changes the daemon has carried out.
    pub generation: u64,
    /// The step that was carried out for each device.
    pub steps: Vec<StepInfo>,
}

/// Why a change was refused. Nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// There is no such device.
    #[error("{0}")]
    Missing(String),
    /// Another device, a front-end or another process uses a resource that the change needs.
    #[error("{0}")]
    Conflict(String),
    /// The request is wrong: repeating it cannot succeed.
    #[error("{0}")]
    Wrong(String),
    /// The configuration has changed since the client read it.
    #[error("the generation has changed to {0}")]
    Moved(u64),
    /// A system call that the change needs failed, or has not returned in time.
    #[error("{0}")]
    Host(String),
    /// Too many other changes wait. The client can send the request again.
    #[error("too many changes are under way; try again")]
    Busy,
}

/// A change, the process that asks for it, and the channel for the answer.
#[derive(Debug)]
pub struct Order {
    pub(crate) change: Change,
    pub(crate) who: Who,
    /// True if the daemon itself asks for the change, because a session has ended.
    pub(crate) follows: bool,
    pub(crate) answer: oneshot::Sender<Result<Done, Refused>>,
}

/// Sends changes to the device manager.
#[derive(Clone, Debug)]
pub struct ChangeSender(mpsc::Sender<Order>);

impl ChangeSender {
    pub(crate) fn new() -> (Self, mpsc::Receiver<Order>) {
        let (sender, orders) = mpsc::channel(CHANGES_MAX);
        (Self(sender), orders)
    }

    /// Asks for a change, and waits until it is done.
    ///
    /// # Errors
    /// [`Refused`]: nothing was changed.
    pub async fn ask(&self, change: Change, who: Who) -> Result<Done, Refused> {
        let (answer, answered) = oneshot::channel();
        let ends = || Refused::Host("the daemon is stopping".to_owned());
        self.0.try_send(Order { change, who, follows: false, answer }).map_err(
            |error| match error {
                TrySendError::Full(_) => Refused::Busy,
                TrySendError::Closed(_) => ends(),
            },
        )?;
        answered.await.unwrap_or_else(|_| Err(ends()))
    }

    /// Asks for a change on behalf of the daemon itself. Waits for room in the queue, and for the
    /// answer.
    pub(crate) async fn follow(&self, change: Change) {
        let (answer, answered) = oneshot::channel();
        let order = Order { change, who: Who::default(), follows: true, answer };
        if self.0.send(order).await.is_ok() {
            let _ = answered.await;
        }
    }
}
