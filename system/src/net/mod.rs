//! The host's side of a guest's network: all of it in a network namespace that ends with us.
//!
//! A [`Namespace`] holds taps, bridges, veths, the daemon, the [`Far`] end that guests talk to
//! and the [`Capture`]s; [`testpmd`] is a foreign front-end without a guest.

mod capture;
mod far;
mod flood;
mod flow;
mod namespace;
mod ovs;
mod service;
pub mod testpmd;

pub use capture::{Capture, Frames};
pub use far::Far;
pub use flood::flood;
pub use flow::Flow;
pub use namespace::Namespace;
pub use ovs::Ovs;
pub use service::Service;

/// The packages for the host's side of a network.
pub const PACKAGES: [&str; 6] =
    ["busybox-static", "ethtool", "iperf3", "iproute2", "iputils-ping", "tshark"];

/// Words for a guest's script: `network`, `pings`, `floods`, `agrees`, `flow`; see the file.
pub const WORDS: &str = include_str!("words.sh");

/// The far end's addresses; the guest has the same with 2 at the end.
pub const HOST: [&str; 2] = ["192.0.2.1/24", "2001:db8::1/64"];
