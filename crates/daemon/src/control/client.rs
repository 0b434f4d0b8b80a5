//! The asking half: one request to a running daemon.

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1::handshake;
use hyper::{Method, Request};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use std::path::Path;
use std::time::Duration;
use tokio::net::UnixStream;

/// Longest wait for an answer; a resize on a slow host takes its time.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Largest answer that is read.
const ANSWER_SIZE_MAX: usize = 256 << 20;

/// Asks the daemon behind the socket at `control`, and parses its answer.
pub(crate) async fn ask<T: DeserializeOwned>(
    control: &Path,
    method: Method,
    path: &str,
    body: String,
) -> Result<T, String> {
    let answer = tokio::time::timeout(TIMEOUT, exchange(control, method, path, body)).await;
    let bytes = answer.unwrap_or_else(|_| Err(format!("{}: no answer", control.display())))?;
    serde_json::from_slice(&bytes)
        .map_err(|error| format!("{}: not understood: {error}", control.display()))
}

async fn exchange(
    control: &Path,
    method: Method,
    path: &str,
    body: String,
) -> Result<Bytes, String> {
    let at = control.display();
    let failed = |error: &dyn std::fmt::Display| format!("{at}: {error}");
    let stream = UnixStream::connect(control)
        .await
        .map_err(|error| format!("--control: cannot connect to {at}: {error}"))?;
    let (mut sender, connection) = handshake(TokioIo::new(stream)).await.map_err(|e| failed(&e))?;
    // Ends with the sender, or with the daemon: the request then fails and says so.
    tokio::spawn(connection);
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header("host", "manyring")
        .header("content-type", "application/json")
        .body(Full::new(Bytes::from(body)))
        .map_err(|e| failed(&e))?;
    let answer = sender.send_request(request).await.map_err(|e| failed(&e))?;
    let status = answer.status();
    let body = Limited::new(answer.into_body(), ANSWER_SIZE_MAX);
    let bytes = body.collect().await.map_err(|e| failed(&e))?.to_bytes();
    if status.is_success() {
        return Ok(bytes);
    }
    let error: Option<serde_json::Value> = serde_json::from_slice(&bytes).ok();
    let text = error.as_ref().and_then(|e| e["error"].as_str());
    Err(text.map_or_else(|| failed(&status), str::to_owned))
}
