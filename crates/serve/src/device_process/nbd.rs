//! The disk of an NBD server, in its device process: the supervisor connects to the server, and
//! this process negotiates and sends requests.

use super::say;
use crate::assemble::nbd_host::{error_of, export_of, failure_of, spec_of};
use crate::channel::Channel;
use crate::credentials;
use crate::supervisor_client::SupervisorClient;
use crate::times::NBD_REQUEST;
use manyring_backend::blk::Disk;
use manyring_engine::aside;
use manyring_nbd::{Connected, JoinError, NbdDisk, NbdOptions, Server, Target, measure};
use manyring_protocol::message::Report;
use manyring_protocol::nbd::{NbdFailure, NbdFound, NbdSpec, NbdTarget};
use rustix::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Asks the supervisor for sockets that are connected to the disk's NBD server.
#[derive(Debug)]
struct FromSupervisor {
    supervisor: SupervisorClient,
    /// Locked during a request: the supervisor answers one request of a device at a time.
    turn: Mutex<()>,
}

impl Server for FromSupervisor {
    fn connect(&self, limit: Duration) -> Result<Connected, JoinError> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let fds = self.supervisor.connect(limit).map_err(error_of)?;
        credentials::taken(fds).map_err(|errno| JoinError::Connect(errno.into()))
    }
}

/// Makes the disk of an NBD server. The supervisor connects when a queue starts.
pub(super) fn disk(
    spec: NbdSpec,
    read_only: bool,
    supervisor: SupervisorClient,
) -> Result<Arc<dyn Disk>, String> {
    let NbdSpec { target: NbdTarget { export, tls }, reconnect, told } = spec;
    let told = export_of(told).ok_or("supervisor: an impossible disk of a server")?;
    let options = NbdOptions {
        name: supervisor.device.clone(),
        server: Arc::new(FromSupervisor { supervisor, turn: Mutex::default() }),
        target: Target { export, tls },
        read_only,
        reconnect: reconnect.map(Duration::from_secs),
        request_timeout: NBD_REQUEST,
    };
    let disk = NbdDisk::told(options, told);
    Ok(Arc::new(disk.map_err(|error| error.to_string())?))
}

/// Asks the server at the other end of a socket for its export, and reports the answer to the
/// supervisor.
pub(super) async fn export(
    channel: Arc<Channel>,
    target: NbdTarget,
    limit_ms: u32,
    fds: Vec<OwnedFd>,
) {
    let limit = Duration::from_millis(limit_ms.into());
    let found = aside(move || found(target, limit, fds)).await.unwrap_or_else(unasked);
    say(&channel, &Report::Export { found }).await;
}

/// Negotiates with the server at the other end of the socket, and returns its export. Blocks.
fn found(target: NbdTarget, limit: Duration, fds: Vec<OwnedFd>) -> NbdFound {
    let NbdTarget { export, tls } = target;
    let connected = credentials::taken(fds).map_err(|errno| JoinError::Connect(errno.into()));
    let measured = connected.and_then(|c| measure(c, &Target { export, tls }, limit));
    match measured {
        Ok(export) => NbdFound::Export(spec_of(&export)),
        Err(error) => NbdFound::Failed(failure_of(&error)),
    }
}

/// Returns the failure that is reported if no thread could be made to ask the server.
fn unasked() -> NbdFound {
    let text = "was not asked for its export: internal error".to_owned();
    NbdFound::Failed(NbdFailure { text, is_limit: false, passes: true })
}
