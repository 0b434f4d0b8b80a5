//! The routes of the control API, and the handlers of `GET` requests. Errors are JSON, too.

use crate::device_by_name::entry;
use crate::refusal::{Problem, Refusal, aside};
use crate::refusal_log::{Refused, Why};
use crate::request_parts::{Asked, BODY_SIZE_MAX, Name};
use crate::snapshot::{DeviceInfo, Devices};
use crate::state::State;
use crate::{
    config, device_actions, limits, openapi, put_patch_delete as manage, scrape, takeover,
};
use axum::extract::{DefaultBodyLimit, Request, State as Extract};
use axum::http::{Method, StatusCode, header};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use manyring_serve::times::EVENTS_WAIT;
use manyring_serve::worker_view::Workers;
use manyring_supervisor::model::{Since, Who};
use manyring_supervisor::processes::ProcessInfo;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use utoipa::{IntoParams, OpenApi, ToSchema};
use utoipa_axum::router::{OpenApiRouter, UtoipaMethodRouterExt};
use utoipa_axum::routes;

/// The routes of one control socket. Requests that are refused are logged by `refused`.
pub(super) fn router(state: State, role: Role, refused: Arc<Refused>) -> Router {
    let (router, _) = routes().split_for_parts();
    router
        .fallback(async || Refusal::new(StatusCode::NOT_FOUND, "no such path"))
        .method_not_allowed_fallback(async || {
            Refusal::new(StatusCode::METHOD_NOT_ALLOWED, "no such method for this path")
        })
        .layer(DefaultBodyLimit::max(BODY_SIZE_MAX))
        .layer(from_fn(move |request, next| admit(role, refused.clone(), request, next)))
        .with_state(state)
}

/// Returns the routes of the API, with their descriptions for the OpenAPI document.
pub(super) fn routes() -> OpenApiRouter<State> {
    let whole = routes!(config::show, config::replace);
    OpenApiRouter::with_openapi(openapi::Document::openapi())
        .routes(routes!(index))
        .routes(routes!(devices))
        .routes(routes!(device, manage::put, manage::patch, manage::delete))
        .routes(routes!(device_actions::resize))
        .routes(routes!(device_actions::link))
        .routes(routes!(device_actions::mtu))
        .routes(routes!(device_actions::announce))
        .routes(whole.layer(DefaultBodyLimit::max(manyring_config::SIZE_MAX)))
        .routes(routes!(config::read_again))
        .routes(routes!(limits::show))
        .routes(routes!(limits::set))
        .routes(routes!(events))
        .routes(routes!(workers))
        .routes(routes!(processes))
        .routes(routes!(takeover::begin))
        .routes(routes!(scrape::metrics))
        .routes(routes!(show))
}

/// The requests that a socket allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// All requests.
    Change,
    /// `GET` and `HEAD` only.
    Read,
}

async fn admit(role: Role, refused: Arc<Refused>, request: Request, next: Next) -> Response {
    let who = request.extensions().get::<Who>().cloned().unwrap_or_default();
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let reads = [Method::GET, Method::HEAD].contains(&method);
    let response = if role == Role::Read && !reads {
        let error = "this is the read-only socket; use the control socket for changes";
        Refusal::new(StatusCode::FORBIDDEN, error).into_response()
    } else {
        next.run(request).await
    };
    let why = response.extensions().get::<Why>();
    refused.log(&who, (&method, &path), response.status(), why);
    response
}

/// The OpenAPI 3.1 document of this API.
#[utoipa::path(
    get,
    path = "/v1/openapi.json",
    responses((status = 200, body = BTreeMap<String, Value>, description = "This document")),
)]
async fn show() -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "application/json")], openapi_text())
}

/// Returns the OpenAPI document as JSON. It is made at the first call.
pub fn openapi_text() -> &'static str {
    static TEXT: OnceLock<String> = OnceLock::new();
    TEXT.get_or_init(|| {
        let (_, mut document) = routes().split_for_parts();
        openapi::complete(&mut document);
        serde_json::to_string(&document).unwrap_or_default()
    })
}

/// The answer to `GET /v1`.
#[derive(Clone, Debug, Serialize, ToSchema)]
struct Index {
    /// The version of the daemon.
    version: &'static str,
    /// The paths that take no name and can be read with `GET`, by the last word of each path.
    links: BTreeMap<String, String>,
}

/// The daemon's version, and the paths that can be read with `GET`.
#[utoipa::path(
    get,
    path = "/v1",
    responses((status = 200, body = Index, description = "The version and the paths")),
)]
async fn index() -> Json<Index> {
    static INDEX: OnceLock<Index> = OnceLock::new();
    let index = INDEX.get_or_init(|| {
        let (_, document) = routes().split_for_parts();
        let shown = document.paths.paths.into_iter().filter(|(_, item)| item.get.is_some());
        let links = shown.filter_map(|(path, _)| Some((link(&path)?.to_owned(), path)));
        Index { version: env!("CARGO_PKG_VERSION"), links: links.collect() }
    });
    Json(index.clone())
}

/// Returns the name under which the index lists a path; `None`: the path is not listed, because it
/// is that of the index, or contains the name of a device.
fn link(path: &str) -> Option<&str> {
    let (_, last) = path.rsplit_once('/').filter(|_| path != "/v1" && !path.contains('{'))?;
    last.split('.').next()
}

/// Collects an answer and writes it as JSON on a thread of its own: with many queues this takes
/// long, and must not block the control thread.
async fn collected<T: Serialize>(
    collect: impl FnOnce() -> Result<T, Refusal> + Send + 'static,
) -> Result<Response, Refusal> {
    let written = aside(move || {
        serde_json::to_vec(&collect()?)
            .map_err(|error| Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))
    });
    Ok(([(header::CONTENT_TYPE, "application/json")], written.await??).into_response())
}

/// All devices, with the counters of their queues.
#[utoipa::path(
    get,
    path = "/v1/devices",
    responses(
        (status = 200, body = Devices, description = "All devices"),
    )
)]
async fn devices(Extract(state): Extract<State>) -> Result<Response, Refusal> {
    state.processes.count().await;
    collected(move || Ok(state.devices())).await
}

/// A device, with the counters of its queues.
#[utoipa::path(
    get,
    path = "/v1/devices/{name}",
    params(("name" = String, Path, description = "Name of the device", example = "vm1")),
    responses(
        (status = 200, body = DeviceInfo, description = "The device"),
        (status = 404, body = Problem, description = "No device has the name"),
    )
)]
async fn device(Extract(state): Extract<State>, Name(name): Name) -> Result<Response, Refusal> {
    state.processes.count_of(&name).await;
    collected(move || entry(&state, &name).map(|device| state.device(&device))).await
}

/// The answer to `GET /v1/processes`.
#[derive(Debug, Serialize, ToSchema)]
struct AllProcesses {
    processes: Vec<ProcessInfo>,
}

/// The device processes: one for each trust domain.
#[utoipa::path(
    get,
    path = "/v1/processes",
    responses(
        (status = 200, body = AllProcesses, description = "All device processes"),
    )
)]
async fn processes(Extract(state): Extract<State>) -> Result<Response, Refusal> {
    state.processes.count().await;
    collected(move || Ok(AllProcesses { processes: state.processes.all() })).await
}

/// The threads that serve queues, of the daemon and of its device processes.
#[utoipa::path(
    get,
    path = "/v1/workers",
    responses(
        (status = 200, body = Workers, description = "All workers"),
    )
)]
async fn workers(Extract(state): Extract<State>) -> Result<Response, Refusal> {
    state.processes.count().await;
    collected(move || Ok(state.workers())).await
}

/// The query of a request for events.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields, default)]
struct From {
    /// The number of the last event that the caller knows.
    #[param(maximum = 18446744073709551615u64)]
    since: u64,
}

/// The events of devices whose number is greater than `since`. If there is none, the answer waits
/// for one, for 25 seconds at most.
#[utoipa::path(
    get,
    path = "/v1/events",
    params(From),
    responses(
        (status = 200, body = Since, description = "The events"),
    )
)]
async fn events(
    Extract(state): Extract<State>,
    Asked(From { since }): Asked<From>,
) -> Result<Response, Refusal> {
    let events = state.devices.events().clone();
    let _ = tokio::time::timeout(EVENTS_WAIT, events.wait(since)).await;
    collected(move || Ok(events.since(since))).await
}
