//! The control socket: HTTP with JSON over a unix socket, for the users whom its mode admits.
//!
//! ```text
//! in    HTTP requests at two sockets, one of them read-only; scrapes of metrics
//! out   each Change, through ChangeSender, to the supervisor; the answers
//! ```
//! Begin with `api.rs` (the routes), `socket.rs` (clients) and `snapshot.rs` (the answers about
//! devices).
//!
//! The crate runs on the control thread and never blocks it: work that may block or take long (a
//! resize, collecting the counters of many queues) runs on a thread of its own. Names of paths and
//! keys are fixed in `docs/design/0001`.

#![deny(clippy::print_stdout, clippy::print_stderr)]
#![allow(unused_qualifications, reason = "utoipa's macros write types by longer paths than needed")]

mod api;
mod client_places;
mod client_timeouts;
mod config;
mod device_actions;
mod device_by_name;
mod http_connection;
mod limits;
mod metrics;
mod openapi;
mod put_patch_delete;
mod refusal;
mod refusal_log;
mod request_parts;
mod reserve;
mod scrape;
pub mod snapshot;
mod socket;
pub mod state;
mod stream;
mod takeover;

pub use api::openapi_text as openapi;
pub use config::reload;
pub use scrape::{bind as bind_metrics, serve as serve_metrics};
pub use socket::{bind, serve};
