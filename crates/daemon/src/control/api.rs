//! The routes: what can be asked and changed. Errors are JSON too.

use super::snapshot::{DeviceInfo, Devices, Workers};
use super::{Controlled, State};
use crate::assemble::Kind;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{DefaultBodyLimit, Path, State as Extract};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

/// Longest body that is read.
const BODY_SIZE_MAX: usize = 4096;

/// What `/metrics` is.
const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// All routes.
pub(super) fn router(state: State) -> Router {
    Router::new()
        .route("/v1/devices", get(devices))
        .route("/v1/devices/{name}", get(device))
        .route("/v1/devices/{name}/resize", post(resize))
        .route("/v1/workers", get(workers))
        .route("/metrics", get(metrics))
        .fallback(async || Refusal::new(StatusCode::NOT_FOUND, "no such path"))
        .method_not_allowed_fallback(async || {
            Refusal::new(StatusCode::METHOD_NOT_ALLOWED, "no such method for this path")
        })
        .layer(DefaultBodyLimit::max(BODY_SIZE_MAX))
        .with_state(state)
}

/// An answer that is none.
#[derive(Debug)]
struct Refusal(StatusCode, String);

impl Refusal {
    fn new(status: StatusCode, error: impl Into<String>) -> Self {
        Self(status, error.into())
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        (self.0, Json(serde_json::json!({ "error": self.1 }))).into_response()
    }
}

/// Runs what may take long beside the control thread.
async fn aside<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, Refusal> {
    let ended = tokio::task::spawn_blocking(work).await;
    ended.map_err(|error| Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))
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
    show(move || Ok(Devices::new(&state))).await
}

async fn device(
    Extract(state): Extract<State>,
    Path(name): Path<String>,
) -> Result<Response, Refusal> {
    show(move || find(&state, &name).map(DeviceInfo::new)).await
}

async fn workers(Extract(state): Extract<State>) -> Result<Response, Refusal> {
    show(move || Ok(Workers::new(&state))).await
}

async fn metrics(Extract(state): Extract<State>) -> Result<Response, Refusal> {
    let text = aside(move || crate::metrics::text(&state)).await?;
    Ok(([(header::CONTENT_TYPE, OPENMETRICS)], text).into_response())
}

fn find<'a>(state: &'a State, name: &str) -> Result<&'a Controlled, Refusal> {
    let found = state.devices.iter().find(|d| d.part.device.name() == name);
    found.ok_or_else(|| Refusal::new(StatusCode::NOT_FOUND, format!("no device is named {name:?}")))
}

/// The body of a resize; empty means: as large as the host's file is now.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Resize {
    /// Bytes.
    size: Option<u64>,
}

/// The answer to a resize.
#[derive(Debug, Serialize)]
struct Resized {
    name: String,
    /// Bytes.
    size: u64,
}

async fn resize(
    Extract(state): Extract<State>,
    Path(name): Path<String>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<Resized>, Refusal> {
    let controlled = find(&state, &name)?;
    let body = body.map_err(|error| Refusal::new(error.status(), error.body_text()))?;
    let wanted = parse_resize(&body)?;
    let Ok(permit) = controlled.resizing.clone().try_acquire_owned() else {
        return Err(Refusal::new(StatusCode::CONFLICT, "a resize of this device is under way"));
    };
    let Kind::Blk(device) = controlled.part.kind.clone() else {
        return Err(Refusal::new(StatusCode::UNPROCESSABLE_ENTITY, "this device has no disk"));
    };
    let result = aside(move || {
        let _permit = permit;
        device.resize(wanted)
    });
    match result.await? {
        Ok(size) => {
            tracing::info!(device = name, size, "resized");
            Ok(Json(Resized { name, size }))
        }
        Err(errno) => {
            tracing::warn!(device = name, %errno, "cannot resize");
            Err(refuse_resize(errno))
        }
    }
}

fn parse_resize(body: &[u8]) -> Result<Option<u64>, Refusal> {
    if body.is_empty() {
        return Ok(None);
    }
    let bad = |text: String| Refusal::new(StatusCode::BAD_REQUEST, text);
    let Resize { size } = serde_json::from_slice(body).map_err(|e| bad(format!("body: {e}")))?;
    match size {
        Some(size) if size == 0 || !size.is_multiple_of(512) => {
            Err(bad(format!("size: {size} bytes are no whole sectors of 512")))
        }
        size => Ok(size),
    }
}

/// What the host refuses is the request's fault if the disk cannot be so, else the host's.
fn refuse_resize(errno: Errno) -> Refusal {
    let (status, text) = match errno {
        Errno::OPNOTSUPP => {
            (StatusCode::UNPROCESSABLE_ENTITY, "this disk cannot change its size".to_owned())
        }
        Errno::ROFS => (StatusCode::CONFLICT, "the disk is read-only".to_owned()),
        Errno::INVAL => {
            (StatusCode::UNPROCESSABLE_ENTITY, "the disk cannot have that size".to_owned())
        }
        errno => (StatusCode::INTERNAL_SERVER_ERROR, format!("the host refuses: {errno}")),
    };
    Refusal::new(status, text)
}
