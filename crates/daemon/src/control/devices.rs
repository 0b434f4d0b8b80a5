//! Devices that come and go while the daemon runs: `PUT`, `PATCH` and `DELETE` of
//! `/v1/devices/{name}`.

use super::refusal::{Refusal, aside};
use super::{State, Who};
use crate::config;
use crate::house::{Change, Denied, Done, Keys, Refused, admitted, is_bound};
use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, QueryRejection};
use axum::extract::{Extension, Path, Query, State as Extract};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;

/// Whether a device that a front-end uses goes too.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Force {
    force: bool,
}

/// The device becomes what the body says, and is kept for the next process. The answer comes when
/// clients can connect.
pub(super) async fn put(
    Extract(state): Extract<State>,
    Path(name): Path<String>,
    Extension(who): Extension<Who>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, Refusal> {
    let body = body.map_err(|error| Refusal::new(error.status(), error.body_text()))?;
    let text = String::from_utf8_lossy(&body).into_owned();
    let allowed = state.shown.borrow().1.daemon.allow_paths.clone();
    let (keys, uid) = (text.clone(), who.uid);
    // Accounts are looked up by name, and files of other users are found, which may take long.
    let has_account = text.contains("socket_owner") || text.contains("socket_group");
    let may_block = has_account || is_bound(uid);
    let plan = move || {
        let wrong = |error| Refusal::new(StatusCode::UNPROCESSABLE_ENTITY, error);
        let device = config::device(&name, &keys).map_err(wrong)?;
        let denied = |denied: Denied| Refusal::new(StatusCode::FORBIDDEN, denied.to_string());
        admitted(device, uid, &allowed).map_err(denied)
    };
    let device = if may_block { aside(plan).await?? } else { plan()? };
    let done = state.door.ask(Change::Put { device, text }, who).await.map_err(refuse)?;
    let is_new = done.steps.iter().any(|step| step.step == "add");
    let status = if is_new { StatusCode::CREATED } else { StatusCode::OK };
    Ok((status, Json(done)).into_response())
}

/// Live keys get other values.
pub(super) async fn patch(
    Extract(state): Extract<State>,
    Path(name): Path<String>,
    Extension(who): Extension<Who>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<Done>, Refusal> {
    let body = body.map_err(|error| Refusal::new(error.status(), error.body_text()))?;
    let bad = |error| Refusal::new(StatusCode::BAD_REQUEST, format!("body: {error}"));
    let keys: Keys = serde_json::from_slice(&body).map_err(bad)?;
    state.door.ask(Change::Patch { name, keys }, who).await.map(Json).map_err(refuse)
}

/// The device goes. One that there is not is gone already.
pub(super) async fn delete(
    Extract(state): Extract<State>,
    Path(name): Path<String>,
    Extension(who): Extension<Who>,
    force: Result<Query<Force>, QueryRejection>,
) -> Result<StatusCode, Refusal> {
    let Query(Force { force }) =
        force.map_err(|error| Refusal::new(StatusCode::BAD_REQUEST, error.body_text()))?;
    let Done { .. } = state.door.ask(Change::Delete { name, force }, who).await.map_err(refuse)?;
    Ok(StatusCode::NO_CONTENT)
}

/// A refusal of the house as an answer.
pub(super) fn refuse(refused: Refused) -> Refusal {
    let status = match &refused {
        Refused::Missing(_) => StatusCode::NOT_FOUND,
        Refused::Conflict(_) => StatusCode::CONFLICT,
        Refused::Wrong(_) => StatusCode::UNPROCESSABLE_ENTITY,
        Refused::Moved(_) => StatusCode::PRECONDITION_FAILED,
        Refused::Host(_) => StatusCode::INTERNAL_SERVER_ERROR,
    };
    Refusal::new(status, refused.to_string())
}
