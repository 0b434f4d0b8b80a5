//! The control socket: HTTP with JSON over a unix socket, for the owner of the process.
//!
//! Runs on the control thread and never blocks it: what may block or take long (a resize, all
//! counters of many queues) runs on a thread of its own. Names are fixed in `docs/design/0001`.

#![allow(unused_qualifications, reason = "utoipa's macros write types by longer paths than needed")]

mod api;
mod asked;
mod change;
mod config;
mod devices;
mod events;
mod limits;
mod openapi;
mod patient;
mod places;
mod refusal;
mod refused;
mod registry;
mod reserve;
mod scrape;
pub(crate) mod snapshot;
mod socket;
mod stream;
mod takeover;

pub(crate) use config::reload;
pub(crate) use openapi::text as openapi;
pub(crate) use registry::{Controlled, Entry, Registry, Waiting, closed};
pub(crate) use scrape::{bind as bind_metrics, serve as serve_metrics};
pub(crate) use socket::{bind, serve};

use crate::config::Plan;
use crate::house::Door;
use crate::rooms::Rooms;
use crate::service::Service;
use manyring_engine::Pool;
use std::path::PathBuf;
use std::sync::Arc;
use tokio::sync::watch;

/// The state that the control API shows and changes.
#[derive(Clone, Debug)]
pub(crate) struct State {
    pub(crate) pool: Arc<Pool>,
    pub(crate) devices: Registry,
    pub(crate) door: Door,
    pub(crate) rooms: Rooms,
    pub(crate) service: Arc<Service>,
    /// The generation, and the plan that is carried out.
    pub(crate) shown: watch::Receiver<(u64, Arc<Plan>)>,
    /// The configuration file, if there is one.
    pub(crate) file: Option<PathBuf>,
    /// Held from when that file is read until it is carried out: what was read first comes first.
    pub(crate) reads: Arc<tokio::sync::Mutex<()>>,
    /// One configuration at a time is taken from a client.
    pub(crate) bodies: Arc<tokio::sync::Mutex<()>>,
}

/// Who asks for a change, as the kernel tells.
#[derive(Clone, Debug, Default)]
pub(crate) struct Who {
    pub(crate) uid: u32,
    pub(crate) pid: i32,
    /// The name of its program, as it calls itself.
    pub(crate) comm: String,
}
