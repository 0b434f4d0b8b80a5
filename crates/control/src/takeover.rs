//! `POST /v1/takeover`: the next daemon asks this one to hand everything over
//! (`processes/handoff/source.rs`).

use crate::refusal::{Problem, Refusal};
use crate::request_parts::Body;
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
    /// The socket at which the next daemon listens for the handoff. The process that listens must
    /// run as the user of this daemon.
    #[schema(value_type = String)]
    socket: PathBuf,
}

/// Hands sockets, disks and front-ends to the next daemon, and ends this one. A client gets an
/// answer only if the handoff fails; this daemon then continues to serve all devices.
#[utoipa::path(
    post,
    path = "/v1/takeover",
    request_body = Takeover,
    responses(
        (status = 403, body = Problem, description = "Only for root and the daemon's user"),
        (status = 409, body = Problem, description = "The takeover failed; this daemon continues"),
        (status = 422, body = Problem, description = "The body is wrong"),
    )
)]
pub(super) async fn begin(
    Extract(state): Extract<State>,
    Extension(who): Extension<Who>,
    body: Body,
) -> Result<(), Refusal> {
    if is_bound(who.uid) {
        // A takeover hands every guest's connection to the process that the request names.
        let error = "a takeover is permitted to root and the daemon's user only";
        return Err(Refusal::new(StatusCode::FORBIDDEN, error));
    }
    let Takeover { socket } = body.parse()?;
    // A disk of a Xen guest can be handed over also without a device process: the next daemon
    // resumes the ring that the guest shares. The exception is a memory disk that this process
    // serves itself, because its contents lie in this process.
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
    // Run the handoff in a task: it must run to its end even if the client disconnects.
    let handing = async move { processes.hand_over(&socket, &service, shown).await };
    let problem = match tokio::spawn(handing).await {
        Ok(Ok(never)) => match never {},
        Ok(Err(problem)) => problem,
        Err(_) => "internal error".to_owned(),
    };
    Err(Refusal::new(StatusCode::CONFLICT, problem))
}
