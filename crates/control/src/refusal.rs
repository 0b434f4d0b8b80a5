//! An error as an answer: a status and one sentence, as JSON.

use crate::refused::Why;
use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;

/// Why nothing was done.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Problem {
    /// One sentence; begins with the key that is wrong, if one is.
    error: String,
}

/// An error as an answer: its status and its sentence.
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
        let why = Why(self.1.clone());
        let mut answer = (self.0, Json(Problem { error: self.1 })).into_response();
        answer.extensions_mut().insert(why);
        answer
    }
}

/// Runs what may take long beside the control thread.
pub(super) async fn aside<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Refusal> {
    let failed = || Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, "internal error");
    manyring_engine::aside(work).await.ok_or_else(failed)
}
