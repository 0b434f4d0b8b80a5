//! `Front`: a device and its vhost-user socket, from the first try to open it to its end.

use super::Shared;
use super::held_elsewhere::{Later, Wait};
use crate::processes::{self, workers_of};
use manyring_config::plan::{Plan, Wanted};
use manyring_serve::assemble::{AssembleError, Here, Made, Served, listens_at, socket_key};
use manyring_serve::interface_watch;
use manyring_serve::service::{Kept, Whose};
use manyring_serve::times::DEVICE_OPEN;
use manyring_transport::vhost_user::{Endpoint, ListenError, serve};
use std::sync::Arc;
use tokio::sync::{mpsc, watch};

/// A device with its vhost-user socket, from the first try to open the device to its end.
#[derive(Debug)]
pub(super) struct Front {
    pub(super) wanted: Wanted,
    pub(super) wait: Wait,
    pub(super) stage: Stage,
    /// The device's endpoint and options. `None`: not known before the device is opened.
    pub(super) served: Option<Served>,
    /// Dropped when the device listens or has to wait; the daemon's start waits for the drop.
    pub(super) begins: Option<mpsc::Sender<()>>,
}

/// `Made`: the device is made and can be served. `Waits`: the device is still to be opened.
#[derive(Debug)]
pub(super) enum Stage {
    Made(Made),
    Waits(Later),
}

impl Front {
    /// Waits until the device can be opened, and serves it until `stop` turns true.
    ///
    /// # Errors
    /// Listening at the device's socket failed, and is not retried: the process has no other
    /// device, or has inherited the socket.
    pub(super) async fn serve(
        self,
        shared: Arc<Shared>,
        mut stop: watch::Receiver<bool>,
    ) -> Result<(), AssembleError> {
        let Self { wanted, mut wait, stage, served, mut begins } = self;
        let stopping = stop.clone();
        let (made, mut is_late) = match stage {
            Stage::Made(made) => (made, false),
            Stage::Waits(later) => {
                drop(begins.take());
                tokio::select! {
                    opened = wait.opened(later) => {
                        (shared.made(&wanted, opened), true)
                    }
                    _ = stop.wait_for(|stop| *stop) => return Ok(()),
                }
            }
        };
        let served = served.map_or_else(|| manyring_serve::assemble::served(wanted.plan()), Ok);
        let Served { mut endpoint, options, at } = served?;
        let mut has_waited = is_late;
        is_late |= shared.keeps_on;
        let _looked_after = interface_watch::look_after(made.view(), is_late);
        loop {
            if has_waited {
                // Another process may listen at the path: do not show the device as served yet.
                tokio::select! {
                    () = wait.listens(&endpoint, &at) => {}
                    _ = stop.wait_for(|stop| *stop) => return Ok(()),
                }
            }
            wait.end(&made);
            let bound = tokio::select! {
                bound = shared.listen_late(&mut wait, endpoint, &mut begins) => bound,
                _ = stop.wait_for(|stop| *stop) => return Ok(()),
            };
            drop(begins.take());
            if bound.is_ok() {
                wait.end(&made);
            }
            let ended = match (bound, &made) {
                (Err(error), _) => Err(error),
                (Ok((endpoint, _kept)), Made::Owned(owned)) => {
                    let stop = stopping.clone();
                    processes::serve(&shared.processes, owned, &wanted, endpoint, stop).await
                }
                (Ok((endpoint, _kept)), Made::Here(Here { device, view })) => {
                    let (connected, stop) = (view.connected.clone(), stopping.clone());
                    serve(device.clone(), endpoint, options, connected, stop).await
                }
            };
            let Err(source) = ended else { return Ok(()) };
            let key = socket_key(&source);
            let at = if key == "socket_path" { at.clone() } else { wanted.plan().place.at(key) };
            let source = wanted.plan().socket.error(source);
            let error = AssembleError::Socket { at: at.clone(), source };
            // Another process can have begun to listen at the path since the check: wait again.
            is_late |= error.is_held() && shared.wait != Some(0);
            let next = listens_at(wanted.plan());
            let (true, Some(next)) = (is_late, next) else { return Err(error) };
            endpoint = next;
            wait.note(&error);
            has_waited = true;
            tokio::select! {
                () = wait.pause() => {}
                _ = stop.wait_for(|stop| *stop) => return Ok(()),
            }
        }
    }
}

impl Shared {
    /// Releases what an earlier supervisor handed over and this plan does not use: front-ends of
    /// devices that no device process serves, and descriptors and capture files of devices that the
    /// plan lacks.
    pub(super) async fn release_others(&self, plan: &Plan) {
        let of = |name: &str| plan.wanted().find(|wanted| wanted.plan().name == name);
        let workers = |name: &str| {
            let wanted = of(name).filter(|wanted| wanted.domain(self.domains).is_some())?;
            Some(workers_of(wanted.plan()))
        };
        self.processes.keep_adopted_sessions(workers).await;
        // Closes the queues of taps that no device of this plan takes over.
        let takes = |wanted: Wanted| match wanted {
            Wanted::Blk(_) => true,
            Wanted::Net(net) => net.port.kind().are_queues_left,
        };
        self.host.adopted_fds.keep(|name| of(name).is_some_and(takes));
        self.host.captures.keep(|name| of(name).is_some_and(|wanted| wanted.has_capture()));
    }

    /// Listens for a device, however long the host takes to create the socket. After
    /// [`DEVICE_OPEN`] the device is shown as waiting.
    async fn listen_late(
        &self,
        wait: &mut Wait,
        endpoint: Endpoint,
        begins: &mut Option<mpsc::Sender<()>>,
    ) -> Result<(Endpoint, Option<Kept>), ListenError> {
        let slow = match &endpoint {
            Endpoint::Listen { path, .. } => Some(ListenError::Slow { path: path.clone() }),
            _ => None,
        };
        let plan = wait.wanted().plan().clone();
        let listening = self.listen(&plan.name, endpoint);
        tokio::pin!(listening);
        match (tokio::time::timeout(DEVICE_OPEN, &mut listening).await, slow) {
            (Ok(bound), _) => return bound,
            (Err(_), Some(source)) => {
                let source = plan.socket.error(source);
                wait.note(&AssembleError::Socket { at: plan.place.at("socket_path"), source });
            }
            (Err(_), None) => {}
        }
        drop(begins.take());
        listening.await
    }

    /// Listens for a device, unless its socket listens already, and has the service manager keep
    /// the socket.
    async fn listen(
        &self,
        name: &str,
        endpoint: Endpoint,
    ) -> Result<(Endpoint, Option<Kept>), ListenError> {
        let whose = Whose::Device(name);
        let mut listener = match endpoint {
            Endpoint::Listen { path, permissions } => {
                self.service.listen(whose, path, permissions).await?
            }
            Endpoint::Bound(listener) => listener,
            other => return Ok((other, None)),
        };
        let kept = self.service.keep(whose, &mut listener);
        Ok((Endpoint::Bound(listener), kept))
    }
}
