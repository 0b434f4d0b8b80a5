//! Serves HTTP/1 to one client, with a timeout for each step.

use crate::client_places::Busy;
use crate::client_timeouts::{Patient, Prompt};
use axum::Router;
use hyper::Request;
use hyper::body::Incoming;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use manyring_serve::times::HTTP_HEADER;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tokio::io::{AsyncRead, AsyncWrite};

/// Answers a client's requests until the client disconnects, or a timeout expires: [`HTTP_HEADER`]
/// for the head of a request, and those of [`Prompt`] and [`Patient`] for its body and its answer.
pub(super) async fn answer(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    router: Router,
    busy: &Arc<Busy>,
) {
    let mut server = hyper::server::conn::http1::Builder::new();
    server.timer(TokioTimer::new()).header_read_timeout(HTTP_HEADER);
    let (router, asking) = (TowerToHyperService::new(router), busy.clone());
    let service = service_fn(move |request: Request<Incoming>| {
        asking.asks.store(true, Ordering::Relaxed);
        let (answer, asking) = (router.call(request.map(Prompt::new)), asking.clone());
        async move {
            let answer = answer.await;
            asking.asks.store(false, Ordering::Relaxed);
            answer
        }
    });
    let stream = TokioIo::new(Patient::new(stream, busy.clone()));
    if let Err(error) = server.serve_connection(stream, service).await {
        tracing::debug!(%error, "a client of the control socket");
    }
}
