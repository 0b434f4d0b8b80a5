//! The configuration as a whole: shown, replaced, read again from its file.

use crate::asked::{Asked, Body, bad};
use crate::devices::refuse;
use crate::refusal::{Problem, Refusal, aside};
use crate::state::State;
use axum::Json;
use axum::extract::{Extension, FromRequest, Request, State as Extract};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use manyring_backend::sys::heap;
use manyring_config as config;
use manyring_supervisor::devices::is_bound;
use manyring_supervisor::model::{Change, Done, Who};
use serde::Deserialize;
use utoipa::IntoParams;

/// Whether the steps are only told.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields, default)]
pub(super) struct How {
    /// The steps are told, and nothing is done.
    dry_run: bool,
}

/// The plan that is carried out; its tag is the generation.
#[utoipa::path(
    get,
    path = "/v1/config",
    responses(
        (
            status = 200,
            body = BTreeMap<String, serde_json::Value>,
            description = "The plan, as `manyring run --print-plan` shows it",
            headers(("ETag" = String, description = "The generation"))
        ),
    )
)]
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
#[utoipa::path(
    put,
    path = "/v1/config",
    params(
        (
            "If-Match" = Option<String>,
            Header,
            description = "The generation that the caller has seen",
            pattern = r#"^("[0-9]{1,18}"|\*)$"#
        ),
        How
    ),
    request_body(
        content((String = "text/plain"), (String = "application/toml")),
        description = "A configuration file"
    ),
    responses(
        (status = 200, body = Done, description = "What was done, or would be"),
        (status = 409, body = Problem, description = "A device is in use, or taken elsewhere"),
        (status = 412, body = Problem, description = "The generation is another"),
        (status = 422, body = Problem, description = "The configuration is wrong"),
    )
)]
pub(super) async fn replace(
    Extract(state): Extract<State>,
    Extension(who): Extension<Who>,
    Asked(How { dry_run }): Asked<How>,
    request: Request,
) -> Result<Response, Refusal> {
    if is_bound(who.uid) {
        let error = "replacing the configuration is permitted to root and the daemon's user only";
        return Err(Refusal::new(StatusCode::FORBIDDEN, error));
    }
    let if_match = expected(request.headers())?;
    // One after the other, from the body's first byte on: all clients together could send more than
    // the host has memory for.
    let _whole = state.bodies.lock().await;
    let Body(body) = Body::from_request(request, &()).await?;
    // The names of accounts are looked up, which may take long.
    let plan = aside(move || match std::str::from_utf8(&body) {
        Ok(text) => config::parse(text).map_err(wrong),
        Err(_) => Err(bad("body: is not text".to_owned())),
    });
    let plan = match plan.await? {
        Ok(plan) => plan,
        Err(error) => return answer(Err(error)).await,
    };
    let change = Change::All { plan: Box::new(plan), dry_run, if_match };
    answer(state.changes.ask(change, who).await.map_err(refuse)).await
}

/// The answer. A plan takes far more memory than its text, and pieces of that are in what was done:
/// once that is written, the memory is the host's again.
async fn answer(done: Result<Done, Refusal>) -> Result<Response, Refusal> {
    let answer = done.map(|done| Json(done).into_response());
    aside(heap::give_back).await?;
    answer
}

/// The configuration file is read again.
#[utoipa::path(
    post,
    path = "/v1/reload",
    params(How),
    responses(
        (status = 200, body = Done, description = "What was done, or would be"),
        (status = 409, body = Problem, description = "There is no file, or a device is in use"),
        (status = 422, body = Problem, description = "The configuration is wrong"),
    )
)]
pub(super) async fn read_again(
    Extract(state): Extract<State>,
    Extension(who): Extension<Who>,
    Asked(How { dry_run }): Asked<How>,
) -> Result<Response, Refusal> {
    answer(reload(&state, who, dry_run).await).await
}

/// Reads the configuration file again, and carries out what has changed.
pub async fn reload(state: &State, who: Who, dry_run: bool) -> Result<Done, Refusal> {
    let none = || Refusal::new(StatusCode::CONFLICT, "the daemon has no configuration file");
    let file = state.file.clone().ok_or_else(none)?;
    let _reads = state.reads.lock().await;
    let plan = aside(move || config::read(&file)).await?;
    let plan = plan.map_err(|error| wrong(error.to_string()))?;
    let change = Change::All { plan: Box::new(plan), dry_run, if_match: None };
    state.changes.ask(change, who).await.map_err(refuse)
}

fn wrong(error: String) -> Refusal {
    Refusal::new(StatusCode::UNPROCESSABLE_ENTITY, error)
}

/// The generation that the caller has seen, if it says so.
fn expected(headers: &HeaderMap) -> Result<Option<u64>, Refusal> {
    let value = headers.get(header::IF_MATCH).filter(|value| *value != "*");
    let Some(value) = value else { return Ok(None) };
    let number = value.to_str().ok().and_then(|text| text.trim().trim_matches('"').parse().ok());
    let wrong = || bad("if-match: is not a generation, like \"7\"".to_owned());
    number.map(Some).ok_or_else(wrong)
}
