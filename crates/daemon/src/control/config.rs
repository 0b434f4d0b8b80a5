//! The configuration as a whole: shown, replaced, read again from its file.

use super::devices::refuse;
use super::refusal::{Refusal, aside};
use super::{State, Who};
use crate::config;
use crate::house::{Change, Done, is_bound};
use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, QueryRejection};
use axum::extract::{Extension, Query, State as Extract};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;

/// Whether the steps are only told.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct How {
    dry_run: bool,
}

/// The plan that is carried out; its tag is the generation.
pub(super) async fn show(Extract(state): Extract<State>) -> Result<Response, Refusal> {
    let (generation, plan) = state.shown.borrow().clone();
    let text = aside(move || serde_json::to_vec(&*plan).unwrap_or_default()).await?;
    let headers = [
        (header::CONTENT_TYPE, "application/json".to_owned()),
        (header::ETAG, format!("\"{generation}\"")),
    ];
    Ok((headers, text).into_response())
}

/// The devices of the configuration file become those of the body, which is such a file.
pub(super) async fn replace(
    Extract(state): Extract<State>,
    Extension(who): Extension<Who>,
    how: Result<Query<How>, QueryRejection>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<Done>, Refusal> {
    let dry_run = dry_run(how)?;
    if is_bound(who.uid) {
        let error = "a whole configuration is only for root and the daemon's user";
        return Err(Refusal::new(StatusCode::FORBIDDEN, error));
    }
    let body = body.map_err(|error| Refusal::new(error.status(), error.body_text()))?;
    let if_match = expected(&headers)?;
    let text = String::from_utf8(body.to_vec());
    let text = text.map_err(|_| Refusal::new(StatusCode::BAD_REQUEST, "body: is no text"))?;
    // The names of accounts are looked up, which may take long.
    let plan = aside(move || config::parse(&text)).await?.map_err(wrong)?;
    let change = Change::All { plan: Box::new(plan), dry_run, if_match };
    state.door.ask(change, who).await.map(Json).map_err(refuse)
}

/// The configuration file is read again.
pub(super) async fn read_again(
    Extract(state): Extract<State>,
    Extension(who): Extension<Who>,
    how: Result<Query<How>, QueryRejection>,
) -> Result<Json<Done>, Refusal> {
    reload(&state, who, dry_run(how)?).await.map(Json)
}

/// Reads the configuration file again, and carries out what has changed.
pub(crate) async fn reload(state: &State, who: Who, dry_run: bool) -> Result<Done, Refusal> {
    let none = || Refusal::new(StatusCode::CONFLICT, "the daemon has no configuration file");
    let file = state.file.clone().ok_or_else(none)?;
    let _reads = state.reads.lock().await;
    let plan = aside(move || config::read(&file)).await?;
    let plan = plan.map_err(|error| wrong(error.to_string()))?;
    let change = Change::All { plan: Box::new(plan), dry_run, if_match: None };
    state.door.ask(change, who).await.map_err(refuse)
}

fn dry_run(how: Result<Query<How>, QueryRejection>) -> Result<bool, Refusal> {
    let Query(How { dry_run }) =
        how.map_err(|error| Refusal::new(StatusCode::BAD_REQUEST, error.body_text()))?;
    Ok(dry_run)
}

fn wrong(error: String) -> Refusal {
    Refusal::new(StatusCode::UNPROCESSABLE_ENTITY, error)
}

/// The generation that the caller has seen, if it says so.
fn expected(headers: &HeaderMap) -> Result<Option<u64>, Refusal> {
    let Some(value) = headers.get(header::IF_MATCH) else { return Ok(None) };
    let number = value.to_str().ok().and_then(|text| text.trim().trim_matches('"').parse().ok());
    let bad = || Refusal::new(StatusCode::BAD_REQUEST, "if-match: is no generation, like \"7\"");
    number.map(Some).ok_or_else(bad)
}
