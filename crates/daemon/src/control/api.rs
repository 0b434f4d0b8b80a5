//! The routes, and what can be asked. Errors are JSON too.

use super::refusal::{Refusal, aside};
use super::snapshot::{DeviceInfo, Devices, Workers};
use super::{Controlled, Entry, State, change, config, devices as manage, limits, scrape};
use axum::Router;
use axum::extract::rejection::QueryRejection;
use axum::extract::{DefaultBodyLimit, Path, Query, Request, State as Extract};
use axum::http::{Method, StatusCode, header};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post, put};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;

/// Longest body that is read.
const BODY_SIZE_MAX: usize = 4096;

/// Longest configuration that is read.
const CONFIG_SIZE_MAX: usize = 8 << 20;

/// Longest wait for an event: a client then asks again.
const EVENTS_WAIT: Duration = Duration::from_secs(25);

/// All routes.
pub(super) fn router(state: State, role: Role) -> Router {
    let one = get(device).put(manage::put).patch(manage::patch).delete(manage::delete);
    let whole = get(config::show).put(config::replace);
    let whole = whole.layer(DefaultBodyLimit::max(CONFIG_SIZE_MAX));
    Router::new()
        .route("/v1/devices", get(devices))
        .route("/v1/devices/{name}", one)
        .route("/v1/devices/{name}/resize", post(change::resize))
        .route("/v1/devices/{name}/link", post(change::link))
        .route("/v1/devices/{name}/mtu", post(change::mtu))
        .route("/v1/devices/{name}/announce", post(change::announce))
        .route("/v1/config", whole)
        .route("/v1/reload", post(config::read_again))
        .route("/v1/limits", get(limits::show))
        .route("/v1/limits/{group}", put(limits::set))
        .route("/v1/events", get(events))
        .route("/v1/workers", get(workers))
        .route("/v1/rooms", get(rooms))
        .route("/metrics", get(scrape::metrics))
        .fallback(async || Refusal::new(StatusCode::NOT_FOUND, "no such path"))
        .method_not_allowed_fallback(async || {
            Refusal::new(StatusCode::METHOD_NOT_ALLOWED, "no such method for this path")
        })
        .layer(DefaultBodyLimit::max(BODY_SIZE_MAX))
        .layer(from_fn(move |request, next| admit(role, request, next)))
        .with_state(state)
}

/// What can be asked at a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// Everything.
    Change,
    /// To be shown something.
    Read,
}

async fn admit(role: Role, request: Request, next: Next) -> Response {
    let reads = [Method::GET, Method::HEAD].contains(request.method());
    if role == Role::Read && !reads {
        let error = "this socket only shows: changes are asked for at the control socket";
        return Refusal::new(StatusCode::FORBIDDEN, error).into_response();
    }
    next.run(request).await
}

/// Collects, and writes as JSON, beside the control thread.
async fn show<T: Serialize>(
    collect: impl FnOnce() -> Result<T, Refusal> + Send + 'static,
) -> Result<Response, Refusal> {
    let written = aside(move || {
        serde_json::to_vec(&collect()?)
            .map_err(|error| Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))
    });
    Ok(([(header::CONTENT_TYPE, "application/json")], written.await??).into_response())
}

async fn devices(Extract(state): Extract<State>) -> Result<Response, Refusal> {
    state.rooms.count().await;
    show(move || Ok(Devices::new(&state))).await
}

async fn device(
    Extract(state): Extract<State>,
    Path(name): Path<String>,
) -> Result<Response, Refusal> {
    state.rooms.count().await;
    show(move || entry(&state, &name).map(|device| DeviceInfo::of(&device))).await
}

async fn rooms(Extract(state): Extract<State>) -> Result<Response, Refusal> {
    state.rooms.count().await;
    show(move || Ok(serde_json::json!({ "rooms": state.rooms.all() }))).await
}

async fn workers(Extract(state): Extract<State>) -> Result<Response, Refusal> {
    show(move || Ok(Workers::new(&state))).await
}

/// From which event on.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct From {
    since: u64,
}

/// What has become of devices since; waits until something has, or for [`EVENTS_WAIT`].
async fn events(
    Extract(state): Extract<State>,
    from: Result<Query<From>, QueryRejection>,
) -> Result<Response, Refusal> {
    let Query(From { since }) =
        from.map_err(|error| Refusal::new(StatusCode::BAD_REQUEST, error.body_text()))?;
    let events = state.devices.events().clone();
    let _ = tokio::time::timeout(EVENTS_WAIT, events.wait(since)).await;
    show(move || Ok(events.since(since))).await
}

/// The device of this name, to be changed: one that waits for another process cannot be.
pub(super) fn find(state: &State, name: &str) -> Result<Arc<Controlled>, Refusal> {
    match entry(state, name)? {
        Entry::Served(controlled) => Ok(controlled),
        Entry::Waiting(waiting) => {
            let error = format!("the device is not served yet: {}", waiting.reason);
            Err(Refusal::new(StatusCode::CONFLICT, error))
        }
    }
}

fn entry(state: &State, name: &str) -> Result<Entry, Refusal> {
    let missing = || Refusal::new(StatusCode::NOT_FOUND, format!("no device is named {name:?}"));
    state.devices.find(name).ok_or_else(missing)
}
