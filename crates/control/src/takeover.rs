//! `POST /v1/takeover`: the next daemon asks this one to hand everything over
//! (`processes/handoff/source.rs`).

use crate::asked::Body;
use crate::refusal::{Problem, Refusal};
use crate::state::State;
use axum::extract::{Extension, State as Extract};
use axum::http::StatusCode;
use manyring_serve::view::DeviceView;
use manyring_supervisor::devices::is_bound;
use manyring_supervisor::model::{Entry, Who};
use manyring_supervisor::processes::Shown;
use serde::Deserialize;
use std::path::PathBuf;
use utoipa::ToSchema;

/// The body of a takeover.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Takeover {
    /// The socket at which the next process waits. It must be of the daemon's own user.
    #[schema(value_type = String)]
    socket: PathBuf,
}

/// Hands sockets, disks and front-ends to the next process, and ends: there is an answer only if
/// that fails, and then all goes on.
#[utoipa::path(
    post,
    path = "/v1/takeover",
    request_body = Takeover,
    responses(
        (status = 403, body = Problem, description = "Only for root and the daemon's user"),
        (status = 409, body = Problem, description = "It is not taken over, and goes on"),
        (status = 422, body = Problem, description = "The body is wrong"),
    )
)]
pub(super) async fn begin(
    Extract(state): Extract<State>,
    Extension(who): Extension<Who>,
    body: Body,
) -> Result<(), Refusal> {
    if is_bound(who.uid) {
        // Every guest would wait for a process that he has named.
        let error = "a takeover is permitted to root and the daemon's user only";
        return Err(Refusal::new(StatusCode::FORBIDDEN, error));
    }
    let Takeover { socket } = body.parse()?;
    // The disks of Xen guests are left with their rings, wherever they are served; but the bytes of
    // one in memory lie in this process if no device process serves it.
    let is_left = |view: &DeviceView| {
        let xen = view.side.as_blk().filter(|blk| blk.is_xen);
        xen.is_some_and(|blk| view.process.is_some() || blk.host.disk().kind() != "memory")
    };
    let devices = state.devices;
    let shown = move || {
        let (served, all) = (devices.served(), devices.all());
        let helped = served.iter().filter(|device| device.view.has_helper);
        let helped = helped.map(|device| device.view.name().to_owned()).collect();
        let is_xdp =
            |view: &DeviceView| view.side.as_net().is_some_and(|net| net.port().kind() == "xdp");
        let bound = served.iter().filter(|device| is_xdp(&device.view));
        let bound = bound.map(|device| device.view.name().to_owned()).collect();
        let others = served.iter().filter(|device| !is_left(&device.view));
        let served = others.map(|device| device.view.name().to_owned()).collect();
        let waits = all.into_iter().filter_map(|entry| match entry {
            Entry::Waiting(waiting) => Some(waiting.name.clone()),
            Entry::Served(_) => None,
        });
        Shown { served, helped, bound, waits: waits.collect() }
    };
    let (processes, service) = (state.processes, state.service);
    // Whoever asks may die at any time: the device processes go on all the same.
    let handing = async move { processes.hand_over(&socket, &service, shown).await };
    let problem = match tokio::spawn(handing).await {
        Ok(Ok(never)) => match never {},
        Ok(Err(problem)) => problem,
        Err(_) => "internal error".to_owned(),
    };
    Err(Refusal::new(StatusCode::CONFLICT, problem))
}
