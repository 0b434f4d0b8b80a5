//! What the parts of the process say of its devices: which there are, what is asked to change, and
//! what is shown of them. Below all that serve, change and show them.

mod change;
mod events;
mod registry;
mod who;

pub use change::{Change, ChangeSender, Order, Refused};
pub use change::{Done, Keys};
pub use events::Since;
pub use registry::{Controlled, Entry, Registry, Waiting, closed};
pub use who::Who;
