//! `GET /metrics`, at the control sockets and at a TCP address: formats and compression.
//!
//! Every user of the host can connect to the TCP address. It serves metrics alone; clients have the
//! same timeouts and bounds as those of a control socket.

use crate::client_places::Places;
use crate::http_connection::answer;
use crate::metrics::{Format, text};
use crate::refusal::{Refusal, aside};
use crate::state::State;
use axum::Router;
use axum::extract::State as Extract;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use flate2::Compression;
use flate2::write::GzEncoder;
use manyring_config::plan::DaemonPlan;
use manyring_engine::FailureLines;
use manyring_serve::times::SCRAPE_RETRY;
use std::io::{self, Write};
use std::net::SocketAddr;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

/// All clients of the TCP address count as one user: TCP has no peer credentials.
const ANYBODY: u32 = 0;

/// All metrics: in OpenMetrics if the client accepts that, else in the text format of Prometheus.
#[utoipa::path(
    get,
    path = "/metrics",
    responses((status = 200, content(
        (String = "text/plain"),
        (String = "application/openmetrics-text")
    ), description = "All metrics")),
)]
pub(super) async fn metrics(
    Extract(state): Extract<State>,
    headers: HeaderMap,
) -> Result<Response, Refusal> {
    let format = Format::of(&listed(&headers, header::ACCEPT));
    let is_packed = takes_gzip(&listed(&headers, header::ACCEPT_ENCODING));
    state.processes.count().await;
    let body = aside(move || {
        let text = text(&state, format);
        if is_packed { gzip(&text) } else { Ok(text.into_bytes()) }
    });
    let failed = |error: io::Error| {
        Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, format!("gzip: {error}"))
    };
    let body = body.await?.map_err(failed)?;
    let vary = (header::VARY, "accept, accept-encoding");
    let kind = (header::CONTENT_TYPE, format.content_type());
    Ok(if is_packed {
        ([kind, vary, (header::CONTENT_ENCODING, "gzip")], body).into_response()
    } else {
        ([kind, vary], body).into_response()
    })
}

/// Returns all values of a header that holds a list, also if the request repeats the header.
fn listed(headers: &HeaderMap, name: header::HeaderName) -> String {
    let values = headers.get_all(name).iter().filter_map(|value| value.to_str().ok());
    values.collect::<Vec<_>>().join(",")
}

/// True if gzip is among the encodings that the client accepts.
fn takes_gzip(accepted: &str) -> bool {
    accepted.split(',').any(|coding| {
        let mut parts = coding.split(';').map(str::trim);
        let is_named = parts.next() == Some("gzip");
        let is_refused =
            |part: &str| part.strip_prefix("q=").and_then(|q| q.parse::<f32>().ok()) == Some(0.0);
        is_named && !parts.any(is_refused)
    })
}

fn gzip(text: &str) -> io::Result<Vec<u8>> {
    let mut packed = GzEncoder::new(Vec::new(), Compression::fast());
    packed.write_all(text.as_bytes())?;
    packed.finish()
}

/// The TCP address at which metrics can be scraped, and its listening socket.
#[derive(Debug)]
pub struct Scraped {
    address: SocketAddr,
    /// `None`: another process listens at the address; `serve` retries until it is free.
    socket: Option<TcpListener>,
}

/// Listens at `metrics_listen`, if the plan has that key. `is_next`: this daemon takes over from
/// another one, which may still listen at the address, so an address in use is no error.
///
/// # Errors
/// One line that begins with the key: the address cannot be listened at.
pub fn bind(plan: &DaemonPlan, is_next: bool) -> Result<Option<Scraped>, String> {
    let Some(address) = plan.metrics_listen else { return Ok(None) };
    let socket = match listen(address) {
        Ok(socket) => Some(socket),
        Err(error)
            if error.kind() == io::ErrorKind::AddrInUse && (plan.wait != Some(0) || is_next) =>
        {
            tracing::warn!(%address, "metrics_listen: {address} is in use; retrying");
            None
        }
        Err(error) => {
            let at = plan.place.at("metrics_listen");
            return Err(format!("{at}: cannot listen on {address}: {error}"));
        }
    };
    Ok(Some(Scraped { address, socket }))
}

fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = std::net::TcpListener::bind(address)?;
    socket.set_nonblocking(true)?;
    TcpListener::from_std(socket)
}

/// Retries to listen at the address until it is free.
async fn freed(address: SocketAddr) -> TcpListener {
    loop {
        tokio::time::sleep(SCRAPE_RETRY).await;
        if let Ok(socket) = listen(address) {
            tracing::info!(%address, "metrics_listen: listening on {address}");
            return socket;
        }
    }
}

/// Serves the clients of the address; never returns, also if the plan has no address.
pub async fn serve(scraped: Option<Scraped>, state: State) {
    let socket = match scraped {
        None => return std::future::pending().await,
        Some(Scraped { socket: Some(socket), .. }) => socket,
        Some(Scraped { address, .. }) => freed(address).await,
    };
    let router = Router::new()
        .route("/metrics", get(metrics))
        .fallback(async || Refusal::new(StatusCode::NOT_FOUND, "only /metrics is here"))
        .with_state(state);
    let (places, mut tasks) = (Places::default(), JoinSet::new());
    let mut lines = FailureLines::default();
    loop {
        let accepted = tokio::select! {
            accepted = socket.accept() => accepted,
            Some(_) = tasks.join_next() => continue,
        };
        match accepted {
            // Without a place the new client is disconnected: no older client is idle and could be
            // disconnected instead.
            Ok((stream, _)) => {
                let Some(place) = places.take(ANYBODY) else { continue };
                let (router, busy) = (router.clone(), place.busy.clone());
                let task = tasks.spawn(async move {
                    answer(stream, router, &busy).await;
                    drop(place);
                });
                places.serve(task);
            }
            Err(error) => {
                if let Some(failures) = lines.count() {
                    tracing::warn!(failures, %error, "metrics_listen: accept failed; retrying");
                }
                tokio::time::sleep(SCRAPE_RETRY).await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gzip_is_for_those_who_accept_it() {
        for (accepted, is) in [
            ("gzip", true),
            ("gzip, deflate, br", true),
            ("br;q=1.0, gzip;q=0.8", true),
            ("gzip;q=0", false),
            ("identity", false),
            ("", false),
        ] {
            assert_eq!(takes_gzip(accepted), is, "{accepted}");
        }
    }
}
