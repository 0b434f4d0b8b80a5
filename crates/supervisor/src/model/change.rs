//! Changes while the process runs: what can be asked, and what is answered.

use super::Who;
use manyring_config::diff::StepInfo;
use manyring_config::plan::{Plan, Wanted};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, oneshot};

/// Changes that can wait for the one before them.
const CHANGES_MAX: usize = 16;

/// Keys of a device and their values, as in a request.
pub type Keys = serde_json::Map<String, serde_json::Value>;

/// A change that somebody asks for.
#[derive(Clone, Debug)]
pub enum Change {
    /// A device of the control API as `device` says, with the request's keys as they are kept.
    Put {
        /// The device.
        device: Wanted,
        /// The keys of the request, as they are kept.
        text: String,
    },
    /// Other values of live keys.
    Patch {
        /// The device.
        name: String,
        /// The keys that change.
        keys: Keys,
    },
    /// The MTU of an interface is set, also if it is what the plan says: others can have set it.
    Mtu {
        /// The device.
        name: String,
        /// In bytes, as the interface counts it.
        mtu: u16,
    },
    /// A group of `[[limit]]` has these keys instead.
    Limit {
        /// The name of the group.
        group: String,
        /// All keys that it has from now on.
        keys: Keys,
    },
    /// A session of the device has ended: what was put off till then is done.
    Settle {
        /// The device.
        name: String,
    },
    /// The device goes; with `force` also if a front-end uses it.
    Delete {
        /// The device.
        name: String,
        /// Also if a front-end uses it.
        force: bool,
    },
    /// The devices of the configuration file become those of this plan. With `dry_run` the steps
    /// are only told; with `if_match` only if this is the generation.
    All {
        /// The configuration.
        plan: Box<Plan>,
        /// The steps are told, and nothing changes.
        dry_run: bool,
        /// The generation that is to be replaced.
        if_match: Option<u64>,
    },
}

impl Change {
    /// The device that it names; none for a group or a whole plan.
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

/// The steps that were carried out, or would be.
#[derive(Clone, Debug, Deserialize, Serialize, utoipa::ToSchema)]
pub struct Done {
    /// How many changes the process has seen.
    pub generation: u64,
    /// The step that was carried out for each device.
    pub steps: Vec<StepInfo>,
}

/// Why nothing was done.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// There is no such device.
    #[error("{0}")]
    Missing(String),
    /// Another device, a front-end or another process is in the way.
    #[error("{0}")]
    Conflict(String),
    /// This can never be.
    #[error("{0}")]
    Wrong(String),
    /// The configuration has changed since the caller looked at it.
    #[error("the generation has changed to {0}")]
    Moved(u64),
    /// The host refuses what the change needs, or does not answer in time.
    #[error("{0}")]
    Host(String),
    /// Too many others wait for their changes: asked again later, this one may be done.
    #[error("too many changes are under way; try again")]
    Busy,
}

/// A change, who asks for it, and who waits for the answer.
#[derive(Debug)]
pub struct Order {
    pub(crate) change: Change,
    pub(crate) who: Who,
    /// The daemon itself asks, since another change or a session has ended.
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
    /// [`Refused`]: everything is as it was.
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

    /// Asks for a change that follows from another one: it waits for its turn, however many do.
    pub(crate) async fn follow(&self, change: Change) {
        let (answer, answered) = oneshot::channel();
        let order = Order { change, who: Who::default(), follows: true, answer };
        if self.0.send(order).await.is_ok() {
            let _ = answered.await;
        }
    }
}
