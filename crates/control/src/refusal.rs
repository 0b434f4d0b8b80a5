//! The answer to a request that is refused: an HTTP status, and one sentence in a JSON object.

use crate::refusal_log::Why;
use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;

/// The JSON body of a refusal. A refused request has changed nothing.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Problem {
    /// One sentence. If a key of the request is wrong, the sentence begins with that key.
    error: String,
}

/// A refused request: the HTTP status, and the sentence that says why.
#[derive(Debug)]
pub struct Refusal(StatusCode, String);

impl Refusal {
    pub(super) fn new(status: StatusCode, error: impl Into<String>) -> Self {
        Self(status, error.into())
    }
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.1)
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        // The middleware that logs refusals (`api.rs`) cannot read the body: it gets the sentence
        // from this extension.
        let why = Why(self.1.clone());
        let mut answer = (self.0, Json(Problem { error: self.1 })).into_response();
        answer.extensions_mut().insert(why);
        answer
    }
}

/// Runs `work`, which may block, on a thread of its own. The control thread serves other clients
/// until `work` ends. The status is 500 if `work` panicked.
pub(super) async fn aside<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Refusal> {
    let failed = || Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, "internal error");
    manyring_engine::aside(work).await.ok_or_else(failed)
}
