//! `/v1/limits`: shows the groups whose devices share a limit, and gives a group other rates.

use crate::put_patch_delete::refuse;
use crate::refusal::{Problem, Refusal, aside};
use crate::request_parts::{Body, Name};
use crate::state::State;
use axum::Json;
use axum::extract::{Extension, State as Extract};
use manyring_config::plan::{GroupPlan, Plan};
use manyring_config::tables::RawLimit;
use manyring_supervisor::model::{Change, Done, Who};
use serde::Serialize;
use utoipa::ToSchema;

/// The answer to `GET /v1/limits`: all groups.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Limits {
    limits: Vec<GroupInfo>,
}

/// A group of limits, with the names of its devices.
#[derive(Debug, Serialize, ToSchema)]
struct GroupInfo {
    /// The name of the group, and the keys of its limit.
    #[serde(flatten)]
    #[schema(value_type = BTreeMap<String, serde_json::Value>)]
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

/// The groups whose devices share a limit.
#[utoipa::path(
    get,
    path = "/v1/limits",
    responses(
        (status = 200, body = Limits, description = "All groups"),
    )
)]
pub(super) async fn show(Extract(state): Extract<State>) -> Result<Json<Limits>, Refusal> {
    let plan = state.shown.borrow().1.clone();
    aside(move || Limits::new(&plan)).await.map(Json)
}

/// Gives the group the keys of the body and no others. This lasts until the configuration file is
/// read again.
#[utoipa::path(
    put,
    path = "/v1/limits/{group}",
    params(("group" = String, Path, description = "Name of the group", example = "gold")),
    request_body = RawLimit,
    responses(
        (status = 200, body = Done, description = "The steps that were carried out"),
        (status = 404, body = Problem, description = "No group has the name"),
        (status = 409, body = Problem, description = "Another change is under way"),
        (status = 422, body = Problem, description = "A key or its value is wrong"),
    )
)]
pub(super) async fn set(
    Extract(state): Extract<State>,
    Name(group): Name,
    Extension(who): Extension<Who>,
    body: Body,
) -> Result<Json<Done>, Refusal> {
    let keys = body.keys()?;
    state.changes.ask(Change::Limit { group, keys }, who).await.map(Json).map_err(refuse)
}
