//! `Prepared`: a device that is opened and whose socket is bound, but that nobody sees yet. It is
//! undone by dropping it. `Ready`: the same with its name; dropping it still undoes everything.

use super::Shared;
use super::change::Refused;
use super::front::{Front, Stage};
use super::waiting::{HELD_PATIENCE, OPEN_PATIENCE_ALL, PAUSE, Wait, open};
use crate::assemble::{AssembleError, Made, Opened, Served, served};
use crate::config::plan::Wanted;
use manyring_engine::aside_for;
use manyring_transport::vhost_user::{Endpoint, ListenError, Unnamed};
use std::sync::Arc;
use tokio::time::{Instant, sleep, timeout, timeout_at};

/// Nothing of it can be seen from outside.
#[derive(Debug)]
pub(super) struct Prepared {
    wanted: Wanted,
    opened: Opened,
    served: Served,
    /// The socket, if it is made here.
    socket: Option<Unnamed>,
}

/// Its socket has its name: clients that connect wait in the backlog.
#[derive(Debug)]
pub(super) struct Ready {
    wanted: Wanted,
    opened: Opened,
    served: Served,
}

impl Prepared {
    /// Opens the device, and binds its socket. A host that does not answer is waited for as long as
    /// at the start of the process, and so is another process that is about to end.
    ///
    /// # Errors
    /// The device cannot be served; all that was made is gone.
    pub(super) async fn new(shared: &Shared, wanted: Wanted) -> Result<Self, AssembleError> {
        let began = Instant::now();
        let limit = began + OPEN_PATIENCE_ALL;
        let held = |error: &AssembleError| error.is_held() && began.elapsed() < HELD_PATIENCE;
        let served = served(wanted.plan())?;
        let socket = loop {
            let Endpoint::Listen { path, permissions } = &served.endpoint else { break None };
            let ((at, permissions), call) = ((path.clone(), *permissions), shared.call()?);
            let bound = aside_for(&wanted.plan().name, move || {
                let _call = call;
                Unnamed::bind(&at, permissions)
            });
            let slow = ListenError::Slow { path: path.clone() };
            match timeout_at(limit, bound).await.ok().flatten().unwrap_or(Err(slow)) {
                Ok(socket) => break Some(socket),
                Err(source) => {
                    let error =
                        AssembleError::Socket { at: at_key(&wanted, &served, &source), source };
                    if !held(&error) {
                        return Err(error);
                    }
                }
            }
            sleep(PAUSE.0).await;
        };
        let slow = || AssembleError::Slow { at: wanted.plan().place.at(wanted.key()) };
        let opened = loop {
            let attempt = open(&wanted, &shared.host, Some(shared.call()?));
            let answer = timeout_at(limit, attempt).await;
            match answer.map_err(|_| slow())?.ok().flatten() {
                Some(Ok(opened)) => break opened,
                Some(Err(error)) if held(&error) => sleep(PAUSE.0).await,
                Some(Err(error)) => return Err(error),
                None => return Err(super::waiting::failed(&wanted)),
            }
        };
        Ok(Self { wanted, opened, served, socket })
    }

    /// Begins its capture, if it has one: the file of an earlier one is emptied only now.
    pub(super) async fn finished(mut self) -> Result<Self, AssembleError> {
        let (wanted, opened) = (self.wanted.clone(), self.opened);
        if !wanted.has_capture() {
            self.opened = wanted.decorated(opened)?;
            return Ok(self);
        }
        let (name, at) = (wanted.plan().name.clone(), wanted.plan().place.at("pcap"));
        let opened = aside_for(&name, move || wanted.decorated(opened));
        let opened = timeout(OPEN_PATIENCE_ALL, opened).await;
        let opened = opened.map_err(|_| AssembleError::Slow { at })?;
        self.opened = opened.unwrap_or_else(|| Err(super::waiting::failed(&self.wanted)))?;
        Ok(self)
    }

    /// Gives the socket its name.
    ///
    /// # Errors
    /// The host refuses that, or does not answer; all that was made is gone.
    pub(super) async fn published(self) -> Result<Ready, AssembleError> {
        let Self { wanted, opened, mut served, socket } = self;
        if let Some(socket) = socket {
            let slow = ListenError::Slow { path: socket.path().to_path_buf() };
            let named = aside_for(&wanted.plan().name, move || socket.publish());
            let named = timeout(OPEN_PATIENCE_ALL, named).await.ok().flatten();
            let at = |source: &ListenError| at_key(&wanted, &served, source);
            let named = named.unwrap_or(Err(slow));
            let named = named.map_err(|e| AssembleError::Socket { at: at(&e), source: e })?;
            served.endpoint = Endpoint::Bound(named);
        }
        Ok(Ready { wanted, opened, served })
    }
}

fn at_key(wanted: &Wanted, served: &Served, error: &ListenError) -> String {
    match crate::assemble::socket_key(error) {
        "socket_path" => served.at.clone(),
        key => wanted.plan().place.at(key),
    }
}

impl Ready {
    /// Shows the device. Its front is to be served.
    pub(super) fn shown(self, shared: &Arc<Shared>) -> Front {
        let Self { wanted, opened, served } = self;
        let made: Made = shared.made(&wanted, opened);
        shared.devices.add(made.part.clone());
        let wait = Wait::new(shared.clone(), wanted.clone());
        Front { wanted, wait, stage: Stage::Made(made), served: Some(served), begins: None }
    }
}

/// Whose fault it is that a device cannot be prepared.
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
