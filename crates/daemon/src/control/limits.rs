//! The groups whose devices share a limit: shown, and given other rates.

use super::devices::refuse;
use super::refusal::{Refusal, aside};
use super::{State, Who};
use crate::config::plan::{GroupPlan, Plan};
use crate::house::{Change, Done, Keys};
use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{Extension, Path, State as Extract};
use axum::http::StatusCode;
use serde::Serialize;

/// All groups.
#[derive(Debug, Serialize)]
pub(super) struct Limits {
    limits: Vec<GroupInfo>,
}

/// A group, with the devices that are in it.
#[derive(Debug, Serialize)]
struct GroupInfo {
    #[serde(flatten)]
    group: GroupPlan,
    devices: Vec<String>,
}

impl Limits {
    fn new(plan: &Plan) -> Self {
        let info = |group: &GroupPlan| GroupInfo {
            group: group.clone(),
            devices: plan
                .wanted()
                .filter(|device| device.plan().limit.group.as_ref() == Some(&group.name))
                .map(|device| device.plan().name.clone())
                .collect(),
        };
        Self { limits: plan.limit.iter().map(info).collect() }
    }
}

pub(super) async fn show(Extract(state): Extract<State>) -> Result<Json<Limits>, Refusal> {
    let plan = state.shown.borrow().1.clone();
    aside(move || Limits::new(&plan)).await.map(Json)
}

/// The group has the keys of the body, and no others, from now on until the file is read again.
pub(super) async fn set(
    Extract(state): Extract<State>,
    Path(group): Path<String>,
    Extension(who): Extension<Who>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<Done>, Refusal> {
    let body = body.map_err(|error| Refusal::new(error.status(), error.body_text()))?;
    let bad = |error| Refusal::new(StatusCode::BAD_REQUEST, format!("body: {error}"));
    let keys: Keys = serde_json::from_slice(&body).map_err(bad)?;
    state.door.ask(Change::Limit { group, keys }, who).await.map(Json).map_err(refuse)
}
