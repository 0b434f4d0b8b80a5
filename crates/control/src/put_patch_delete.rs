//! Adds, changes and removes devices while the daemon runs: `PUT`, `PATCH` and `DELETE` of
//! `/v1/devices/{name}`.

use crate::openapi::{DeviceKeys, LiveKeys};
use crate::refusal::{Problem, Refusal, aside};
use crate::request_parts::{Asked, Body, Name};
use crate::state::State;
use axum::Json;
use axum::extract::{Extension, State as Extract};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use manyring_config as config;
use manyring_config::plan::Unfound;
use manyring_supervisor::devices::{Denied, admitted, is_bound};
use manyring_supervisor::model::{Change, Done, Refused, Who};
use serde::Deserialize;
use utoipa::IntoParams;

/// The query of a `DELETE`.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Force {
    /// True: remove the device although a front-end is connected.
    force: bool,
}

/// Adds the device, or gives it the keys of the body and no others. The device is saved in
/// `state_dir`, if there is one, for the next start of the daemon. The answer comes when front-ends
/// can connect.
#[utoipa::path(
    put,
    path = "/v1/devices/{name}",
    params(("name" = String, Path, description = "Name of the device", example = "vm1")),
    request_body = DeviceKeys,
    responses(
        (status = 200, body = Done, description = "The device existed, and has these keys now"),
        (status = 201, body = Done, description = "The device was added"),
        (status = 409, body = Problem, description = "A VMM is connected, or a resource in use"),
        (status = 422, body = Problem, description = "A key or its value is wrong"),
    )
)]
pub(super) async fn put(
    Extract(state): Extract<State>,
    Name(name): Name,
    Extension(who): Extension<Who>,
    body: Body,
) -> Result<Response, Refusal> {
    let text = serde_json::Value::Object(body.keys()?).to_string();
    let allowed = state.shown.borrow().1.daemon.allow_paths.clone();
    let (keys, uid) = (text.clone(), who.uid);
    // Looking up an account, and opening the paths that an unprivileged user names, may block.
    let has_account = text.contains("socket_owner") || text.contains("socket_group");
    let may_block = has_account || is_bound(uid);
    let plan = move || {
        let wrong = |error| Refusal::new(StatusCode::UNPROCESSABLE_ENTITY, error);
        let device = config::device(&name, &keys).map_err(wrong)?;
        let denied = |denied: Denied| Refusal::new(StatusCode::FORBIDDEN, denied.to_string());
        let device = admitted(device, uid, &allowed).map_err(denied)?;
        let unfound = |unfound: Unfound| Refusal::new(StatusCode::FORBIDDEN, unfound.to_string());
        device.find().map_err(unfound).map(|()| device)
    };
    let device = if may_block { aside(plan).await?? } else { plan()? };
    let done = state.changes.ask(Change::Put { device, text }, who).await.map_err(refuse)?;
    let is_new = done.steps.iter().any(|step| step.step == "add");
    let status = if is_new { StatusCode::CREATED } else { StatusCode::OK };
    Ok((status, Json(done)).into_response())
}

/// Gives live keys other values, without disconnecting the guest.
#[utoipa::path(
    patch,
    path = "/v1/devices/{name}",
    params(("name" = String, Path, description = "Name of the device", example = "vm1")),
    request_body = LiveKeys,
    responses(
        (status = 200, body = Done, description = "The steps that were carried out"),
        (status = 404, body = Problem, description = "No device has the name"),
        (status = 409, body = Problem, description = "The device is busy"),
        (status = 422, body = Problem, description = "A key is not live, or its value is wrong"),
    )
)]
pub(super) async fn patch(
    Extract(state): Extract<State>,
    Name(name): Name,
    Extension(who): Extension<Who>,
    body: Body,
) -> Result<Json<Done>, Refusal> {
    let keys = body.keys()?;
    state.changes.ask(Change::Patch { name, keys }, who).await.map(Json).map_err(refuse)
}

/// Removes the device. If no device has the name, this succeeds and changes nothing.
#[utoipa::path(
    delete,
    path = "/v1/devices/{name}",
    params(("name" = String, Path, description = "Name of the device", example = "vm1"), Force),
    responses(
        (status = 204, description = "No device has the name any more"),
        (status = 409, body = Problem, description = "A VMM is connected, or not an API device"),
        (status = 422, body = Problem, description = "The change is not possible"),
    )
)]
pub(super) async fn delete(
    Extract(state): Extract<State>,
    Name(name): Name,
    Extension(who): Extension<Who>,
    Asked(Force { force }): Asked<Force>,
) -> Result<StatusCode, Refusal> {
    let Done { .. } =
        state.changes.ask(Change::Delete { name, force }, who).await.map_err(refuse)?;
    Ok(StatusCode::NO_CONTENT)
}

/// Makes the HTTP answer to a change that the supervisor refused.
pub(super) fn refuse(refused: Refused) -> Refusal {
    let status = match &refused {
        Refused::Missing(_) => StatusCode::NOT_FOUND,
        Refused::Conflict(_) => StatusCode::CONFLICT,
        Refused::Wrong(_) => StatusCode::UNPROCESSABLE_ENTITY,
        Refused::Moved(_) => StatusCode::PRECONDITION_FAILED,
        Refused::Host(_) => StatusCode::INTERNAL_SERVER_ERROR,
        Refused::Busy => StatusCode::SERVICE_UNAVAILABLE,
    };
    Refusal::new(status, refused.to_string())
}
