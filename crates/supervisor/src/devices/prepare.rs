//! `Prepared`: a device that is opened, with its socket bound, and not visible yet. Dropping it
//! undoes both. `Ready`: the same after the socket has its name; dropping it still undoes
//! everything.

use super::Shared;
use super::front::{Front, Stage};
use super::held_elsewhere::{Wait, failed};
use crate::model::Refused;
use manyring_config::plan::Wanted;
use manyring_engine::{AsideRow, aside_for};
use manyring_serve::assemble::{Assemble, AssembleError, Made, Opened, Served, served};
use manyring_serve::times::{DEVICE_BACKOFF, DEVICE_HELD, DEVICES_OPEN};
use manyring_transport::vhost_user::{Endpoint, ListenError, Listener, SocketPermissions, Unnamed};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::{OwnedSemaphorePermit, oneshot};
use tokio::time::{Instant, sleep, timeout, timeout_at};

/// A device that is opened, while no client can see it or connect to it.
#[derive(Debug)]
pub(super) struct Prepared {
    wanted: Wanted,
    opened: Opened,
    served: Served,
    /// The socket, unless it was handed in or exists already.
    socket: Option<Unnamed>,
}

/// A prepared device whose socket has its name: clients that connect wait in the backlog.
#[derive(Debug)]
pub(super) struct Ready {
    wanted: Wanted,
    opened: Opened,
    served: Served,
}

/// The slow calls of the host that prepare a device, made one after the other on one thread: the
/// first binds its socket, unless it was handed in or exists already, and the second opens the
/// device.
#[derive(Debug)]
struct Calls {
    bound: Option<oneshot::Receiver<Result<Unnamed, ListenError>>>,
    opened: oneshot::Receiver<Result<Opened, AssembleError>>,
}

impl Calls {
    /// Queues both calls, behind those of other devices. The permit `call` is held until both calls
    /// have returned.
    fn new(
        shared: &Shared,
        prepared: &Begun,
        row: &AsideRow,
        call: &Arc<OwnedSemaphorePermit>,
    ) -> Self {
        let ((tells, bound), (opens, opened)) = (oneshot::channel(), oneshot::channel());
        let (wanted, host, call) = (prepared.wanted.clone(), shared.host.clone(), call.clone());
        let listens = prepared.listens();
        let bound = listens.is_some().then_some(bound);
        row.add(&prepared.wanted.plan().name, move || {
            let _call = call;
            if let Some((path, permissions)) = listens {
                let socket = Unnamed::bind(&path, permissions);
                let is_bound = socket.is_ok();
                // Do not open the device if it has no socket, or if nobody waits for the result
                // any more.
                if tells.send(socket).is_err() || !is_bound {
                    return;
                }
            }
            let _ = opens.send(wanted.open(&host));
        });
        Self { bound, opened }
    }
}

/// A device that is being prepared; its socket may not be bound yet.
#[derive(Debug)]
struct Begun {
    wanted: Wanted,
    served: Served,
    socket: Option<Unnamed>,
}

impl Begun {
    /// Where to bind the socket. `None`: the socket is bound already, or was handed in.
    fn listens(&self) -> Option<(PathBuf, SocketPermissions)> {
        match &self.served.endpoint {
            Endpoint::Listen { path, permissions } if self.socket.is_none() => {
                Some((path.clone(), *permissions))
            }
            _ => None,
        }
    }

    /// Waits until the socket is bound, and then until the device is opened.
    async fn answered(&mut self, calls: Calls, limit: Instant) -> Result<Opened, AssembleError> {
        let Self { wanted, served, socket } = self;
        if let (Some(bound), Endpoint::Listen { path, .. }) = (calls.bound, &served.endpoint) {
            let slow = || Err(ListenError::Slow { path: path.clone() });
            let bound = timeout_at(limit, bound).await.unwrap_or_else(|_| Ok(slow()));
            let bound = bound.map_err(|_| failed(wanted))?;
            let bound = bound.map_err(|source| AssembleError::Socket {
                at: at_key(wanted, served, &source),
                source: wanted.plan().socket.error(source),
            })?;
            *socket = Some(bound);
        }
        let slow = || AssembleError::Slow { at: wanted.plan().place.at(wanted.key()) };
        let opened = timeout_at(limit, calls.opened).await.map_err(|_| slow())?;
        opened.unwrap_or_else(|_| Err(failed(wanted)))
    }
}

impl Prepared {
    /// Binds the sockets of these devices, and opens the devices. Waits for a slow host, and for
    /// another process that is about to release a resource, as long as at the start of the daemon.
    ///
    /// # Errors
    /// The error of the first device that cannot be served; everything that was created is
    /// removed.
    pub(super) async fn all(
        shared: &Shared,
        devices: Vec<Wanted>,
    ) -> Result<Vec<Self>, AssembleError> {
        if devices.is_empty() {
            return Ok(Vec::new());
        }
        let (row, call) = (AsideRow::default(), Arc::new(shared.call()?));
        let mut begun = Vec::new();
        for wanted in devices {
            let served = served(wanted.plan())?;
            let device = Begun { wanted, served, socket: None };
            let calls = Calls::new(shared, &device, &row, &call);
            begun.push((device, calls));
        }
        drop(call);
        row.go_on();
        let mut prepared = Vec::new();
        for (device, calls) in begun {
            prepared.push(Self::new(shared, device, calls).await?);
        }
        Ok(prepared)
    }

    /// Waits for the calls of one device. They are repeated for a while if another process holds a
    /// file or the socket's name.
    async fn new(
        shared: &Shared,
        mut device: Begun,
        mut calls: Calls,
    ) -> Result<Self, AssembleError> {
        let began = Instant::now();
        let limit = began + DEVICES_OPEN;
        let mut row;
        loop {
            match device.answered(calls, limit).await {
                Ok(opened) => {
                    let Begun { wanted, served, socket } = device;
                    return Ok(Self { wanted, opened, served, socket });
                }
                Err(error) if error.is_held() && began.elapsed() < DEVICE_HELD => {}
                Err(error) => return Err(error),
            }
            sleep(DEVICE_BACKOFF.0).await;
            row = AsideRow::default();
            calls = Calls::new(shared, &device, &row, &Arc::new(shared.call()?));
            row.go_on();
        }
    }

    /// Begins the device's capture, if it has one. This truncates the file of an earlier capture,
    /// so it is done only after all devices of the change are prepared.
    pub(super) async fn finished(mut self) -> Result<Self, AssembleError> {
        let (wanted, opened) = (self.wanted.clone(), self.opened);
        if !wanted.has_capture() {
            self.opened = wanted.decorated(opened)?;
            return Ok(self);
        }
        let (name, at) = (wanted.plan().name.clone(), wanted.plan().place.at("pcap"));
        let opened = aside_for(&name, move || wanted.decorated(opened));
        let opened = timeout(DEVICES_OPEN, opened).await;
        let opened = opened.map_err(|_| AssembleError::Slow { at })?;
        self.opened = opened.unwrap_or_else(|| Err(failed(&self.wanted)))?;
        Ok(self)
    }

    /// Queues the call that renames the socket to its path. The call does nothing unless `may` is
    /// set by then: an earlier call of the queue sets it when the request of the control API is
    /// saved.
    pub(super) fn named(self, row: &AsideRow, may: &Arc<AtomicBool>) -> Named {
        let Self { wanted, opened, served, socket } = self;
        let named = socket.map(|socket| {
            let (tells, named) = oneshot::channel();
            let may = may.clone();
            row.add(&wanted.plan().name, move || {
                if may.load(Ordering::Acquire) {
                    let _ = tells.send(socket.publish());
                }
            });
            named
        });
        Named { wanted, opened, served, named }
    }
}

/// A device whose socket is being renamed to its path.
#[derive(Debug)]
pub(super) struct Named {
    wanted: Wanted,
    opened: Opened,
    served: Served,
    named: Option<oneshot::Receiver<Result<Listener, ListenError>>>,
}

impl Named {
    /// Waits until the socket has its name.
    ///
    /// # Errors
    /// The host refuses the rename, or does not answer in time; everything that was created is
    /// removed.
    pub(super) async fn published(self) -> Result<Ready, AssembleError> {
        let Self { wanted, opened, mut served, named } = self;
        if let (Some(named), Endpoint::Listen { path, .. }) = (named, &served.endpoint) {
            let named = match timeout(DEVICES_OPEN, named).await {
                Ok(named) => named.map_err(|_| failed(&wanted))?,
                Err(_) => Err(ListenError::Slow { path: path.clone() }),
            };
            let named = named.map_err(|source| AssembleError::Socket {
                at: at_key(&wanted, &served, &source),
                source: wanted.plan().socket.error(source),
            })?;
            served.endpoint = Endpoint::Bound(named);
        }
        Ok(Ready { wanted, opened, served })
    }
}

fn at_key(wanted: &Wanted, served: &Served, error: &ListenError) -> String {
    match manyring_serve::assemble::socket_key(error) {
        "socket_path" => served.at.clone(),
        key => wanted.plan().place.at(key),
    }
}

impl Ready {
    /// Shows the device as served, and returns its front. The caller must start the task of the
    /// front.
    pub(super) fn shown(self, shared: &Arc<Shared>) -> Front {
        let Self { wanted, opened, served } = self;
        let made: Made = shared.made(&wanted, opened);
        shared.devices.add(made.view().clone());
        let wait = Wait::new(shared.clone(), wanted.clone());
        Front { wanted, wait, stage: Stage::Made(made), served: Some(served), begins: None }
    }
}

/// Returns the refusal for a device that cannot be prepared: a conflict if a resource is in use,
/// else a failure of the host, or a wrong request.
pub(super) fn refused(error: &AssembleError) -> Refused {
    let text = error.to_string();
    match error {
        error if error.is_held() => Refused::Conflict(text),
        error if error.is_awaited() => Refused::Host(text),
        AssembleError::Failed { .. } | AssembleError::Workers | AssembleError::Calls => {
            Refused::Host(text)
        }
        _ => Refused::Wrong(text),
    }
}
