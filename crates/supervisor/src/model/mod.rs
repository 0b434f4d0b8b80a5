//! The supervisor's model of its devices: which devices there are, which changes are requested,
//! and what the API shows. The modules that serve, change and show devices build on this one.

mod change;
mod events;
mod registry;
mod who;

pub use change::{Change, ChangeSender, Order, Refused};
pub use change::{Done, Keys};
pub use events::Since;
pub use registry::{Controlled, Entry, Registry, Waiting, closed};
pub use who::Who;
