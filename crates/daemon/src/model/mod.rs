//! What the parts of the process say of its devices: which there are, what is asked to change, and
//! what is shown of them. Below all that serve, change and show them.

mod change;
mod events;
mod registry;
pub mod snapshot;
mod view;
mod who;

pub(crate) use change::{Change, ChangeSender, Order, Refused};
pub use change::{Done, Keys};
pub(crate) use events::Since;
pub(crate) use registry::{Controlled, Entry, Registry, Waiting, closed};
pub(crate) use view::DeviceView;
pub(crate) use who::Who;
