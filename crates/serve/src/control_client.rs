//! The client of the control API: sends one request to a running daemon.

use crate::times::{CLIENT_ANSWER, CLIENT_RETRY};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1::handshake;
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use manyring_config::plan::unexpanded;
use serde::de::DeserializeOwned;
use std::error::Error;
use std::io::{self, ErrorKind};
use std::path::Path;
use std::time::Duration;
use tokio::net::UnixStream;

/// The maximum size in bytes of an answer that is read.
const ANSWER_SIZE_MAX: usize = 256 << 20;

/// Returns the answer to a GET of `path`, from the daemon behind the socket at `control`.
///
/// # Errors
/// One sentence: the daemon refuses, cannot be reached, or has not answered within 5 s.
pub async fn look<T: DeserializeOwned>(control: &Path, path: &str) -> Result<T, String> {
    ask(control, exchange(control, Method::GET, path, String::new()), CLIENT_ANSWER).await
}

/// Sends a request that changes `path` to the daemon behind the socket at `control`. Waits for the
/// answer `host` longer than [`look`] does: the daemon may have to wait for its host.
///
/// # Errors
/// As [`look`].
pub async fn change<T: DeserializeOwned>(
    control: &Path,
    (method, path): (Method, &str),
    body: String,
    host: Duration,
) -> Result<T, String> {
    ask(control, exchange(control, method, path, body), CLIENT_ANSWER + host).await
}

/// Sends a request, waits for the answer, and parses it.
async fn ask<T: DeserializeOwned>(
    control: &Path,
    exchange: impl Future<Output = Result<Bytes, String>>,
    timeout: Duration,
) -> Result<T, String> {
    let silent = || {
        let (at, seconds) = (control.display(), timeout.as_secs());
        format!(
            "{at}: no answer from the daemon within {seconds} s; it is busy, blocked or stopped"
        )
    };
    if let Some(problem) = unexpanded(control) {
        return Err(format!("--control: {problem}"));
    }
    let answer = tokio::time::timeout(timeout, exchange).await;
    let bytes = answer.unwrap_or_else(|_| Err(silent()))?;
    let text = if bytes.is_empty() { b"null" } else { &bytes[..] };
    serde_json::from_slice(text)
        .map_err(|error| format!("{}: malformed answer: {error}", control.display()))
}

/// Repeats the request while the daemon is busy with other clients. The caller limits the time.
async fn exchange(
    control: &Path,
    method: Method,
    path: &str,
    body: String,
) -> Result<Bytes, String> {
    loop {
        match exchange_once(control, &method, path, body.clone()).await? {
            Answer::Done(bytes) => return Ok(bytes),
            Answer::Busy => tokio::time::sleep(CLIENT_RETRY).await,
        }
    }
}

/// The outcome of one attempt to get an answer.
enum Answer {
    Done(Bytes),
    /// The daemon did not carry the request out, because of too many clients or changes: try
    /// again.
    Busy,
}

async fn exchange_once(
    control: &Path,
    method: &Method,
    path: &str,
    body: String,
) -> Result<Answer, String> {
    let at = control.display();
    let failed = |error: &dyn std::fmt::Display| format!("{at}: {error}");
    let stream = UnixStream::connect(control)
        .await
        .map_err(|error| format!("--control: cannot connect to {at}: {error}"))?;
    let (mut sender, connection) = handshake(TokioIo::new(stream)).await.map_err(|e| failed(&e))?;
    // The task ends with `sender`, or when the daemon closes; the request itself then fails.
    tokio::spawn(connection);
    let request = Request::builder()
        .method(method.clone())
        .uri(path)
        .header("host", "manyring")
        .header("content-type", "application/json")
        .body(Full::new(Bytes::from(body)))
        .map_err(|e| failed(&e))?;
    let answer = match sender.send_request(request).await {
        Ok(answer) => answer,
        Err(error) if was_not_sent(&error) => return Ok(Answer::Busy),
        Err(error) => return Err(failed(&error)),
    };
    let status = answer.status();
    let body = Limited::new(answer.into_body(), ANSWER_SIZE_MAX);
    let bytes = body.collect().await.map_err(|e| failed(&e))?.to_bytes();
    if status.is_success() {
        return Ok(Answer::Done(bytes));
    }
    if status == StatusCode::SERVICE_UNAVAILABLE {
        return Ok(Answer::Busy);
    }
    let error: Option<serde_json::Value> = serde_json::from_slice(&bytes).ok();
    let text = error.as_ref().and_then(|e| e["error"].as_str());
    Err(text.map_or_else(|| failed(&status), str::to_owned))
}

/// True if the daemon has read nothing of the request, so that it can be sent again. A daemon that
/// has no room for a client closes the connection unread, and the kernel reports `EPIPE` or
/// `ECONNRESET`. A daemon that ends while it carries a request out has read it (the request is one
/// short write): then the connection ends without these errors.
fn was_not_sent(error: &hyper::Error) -> bool {
    let is_unread = |cause: &(dyn Error + 'static)| {
        let kind = cause.downcast_ref::<io::Error>().map(io::Error::kind);
        matches!(kind, Some(ErrorKind::BrokenPipe | ErrorKind::ConnectionReset))
    };
    error.is_canceled() || error.source().is_some_and(is_unread)
}
