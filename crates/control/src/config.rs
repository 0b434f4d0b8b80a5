//! Shows the running configuration, replaces it, and reads it again from its file.

use crate::put_patch_delete::refuse;
use crate::refusal::{Problem, Refusal, aside};
use crate::request_parts::{Asked, Body, bad};
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

/// The query of a request that replaces or reloads the configuration.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields, default)]
pub(super) struct How {
    /// True: answer with the steps that the change would take, and change nothing.
    dry_run: bool,
}

/// The running plan. Its `ETag` is the generation.
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

/// Carries out the configuration file in the body, in place of the one that runs. Devices that were
/// added over the control API stay.
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
        (status = 200, body = Done, description = "The steps that were carried out, or would be"),
        (status = 409, body = Problem, description = "A device or a resource is in use"),
        (status = 412, body = Problem, description = "The generation has changed"),
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
    // One request at a time, and the lock is taken before the body is read: 64 clients with a body
    // and a plan each could use more memory than the host has.
    let _whole = state.bodies.lock().await;
    let Body(body) = Body::from_request(request, &()).await?;
    // Looking up the names of accounts may block.
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

/// Makes the answer, then returns free memory to the host. A plan takes far more memory than its
/// text, and `done` refers to parts of the plan, so the answer is made first.
async fn answer(done: Result<Done, Refusal>) -> Result<Response, Refusal> {
    let answer = done.map(|done| Json(done).into_response());
    aside(heap::give_back).await?;
    answer
}

/// Reads the configuration file again, and carries out what has changed.
#[utoipa::path(
    post,
    path = "/v1/reload",
    params(How),
    responses(
        (status = 200, body = Done, description = "The steps that were carried out, or would be"),
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

/// Returns the generation in the header `If-Match`; `None` without the header, and for `*`.
fn expected(headers: &HeaderMap) -> Result<Option<u64>, Refusal> {
    let value = headers.get(header::IF_MATCH).filter(|value| *value != "*");
    let Some(value) = value else { return Ok(None) };
    let number = value.to_str().ok().and_then(|text| text.trim().trim_matches('"').parse().ok());
    let wrong = || bad("if-match: is not a generation, like \"7\"".to_owned());
    number.map(Some).ok_or_else(wrong)
}
