//! One device: reads its nodes for the state machine, and carries out the machine's actions.

use super::DeviceId;
use super::negotiate::{
    Reason, Seen, back_names, front_names, queue_names, queues_offered, state_of,
};
use super::readings::Readings;
use super::state::{Action, Back, Change, Event, Negotiated};
use super::store::{Store, StoreError, Transaction, Tries, Watch};
use manyring_device::PendingResult;
use manyring_wire::xen::device::{Assignment, DiskGeometry, Nodes, Offer};
use manyring_wire::xen::keys;
use manyring_wire::xen::path::Path;
use manyring_wire::xen::state::XenbusState;
use std::collections::VecDeque;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

/// Pause before opening or connecting a disk is retried, for a guest that a former process has left
/// connected.
const OPEN_RETRY_DELAY: Duration = Duration::from_secs(1);
/// Pause before nodes are read again that changed while they were read, and before a request is
/// repeated that xenstore did not answer, or had no room for.
const PASSING_RETRY_DELAY: Duration = Duration::from_millis(200);

/// Why a host cannot serve a device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct HostError {
    /// The reason, in words for the device's `error` node.
    pub text: String,
    /// True if another attempt may succeed later: for example, memory or descriptors are short now.
    pub is_passing: bool,
}

impl HostError {
    /// Makes an error that does not pass: another attempt would fail, too.
    #[must_use]
    pub fn new(text: impl Into<String>) -> Self {
        Self { text: text.into(), is_passing: false }
    }
}

/// Serves the requests of a device: opens the disk, maps rings, runs queues. The calls come in this
/// order: `open`, any number of `connect` and `disconnect` in turn, `close`. An `open` that follows
/// another one replaces it.
pub trait Host: Send {
    /// Returns the most queues of a front-end. More are neither offered nor read, unless a former
    /// process has offered them.
    fn queues_max(&self) -> u32;

    /// Opens the disk that the tool stack names, and returns the features that can be offered for
    /// it.
    ///
    /// # Errors
    /// [`HostError`], which is written to the device's `error` node. If a former process has left a
    /// front-end connected, the error is only logged, and opening is retried later.
    fn open<'a>(
        &'a mut self,
        assignment: &'a Assignment,
    ) -> PendingResult<'a, Result<(Offer, DiskGeometry), HostError>>;

    /// Maps the rings, binds the event channels, starts the queues.
    ///
    /// # Errors
    /// [`HostError`]: nothing of the front-end may stay mapped or open. If the rings of a former
    /// process should be resumed and the error is passing, it is only logged, and opening is
    /// retried later: the implementation must then leave the rings as they were.
    fn connect<'a>(
        &'a mut self,
        config: &'a Negotiated,
    ) -> PendingResult<'a, Result<(), HostError>>;

    /// Stops the queues; returns when nothing of the front-end is in use any more.
    fn disconnect(&mut self) -> PendingResult<'_, ()>;

    /// Closes the disk that was opened.
    fn close(&mut self);
}

/// A message from other tasks of the process to the task of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// The disk has another size.
    Resized(DiskGeometry),
    /// A queue met a fault of the front-end.
    Fault {
        /// The [`Negotiated::number`] of the connection that met the fault.
        number: u32,
        /// The fault, in words for the log and the `error` node.
        text: String,
    },
    /// Remove the device: ask the front-end to close it, and wait until it has.
    Detach,
    /// Remove the device at once.
    DetachNow,
    /// The discovery has seen that the back-end's folder was removed. The device ends if the folder
    /// is not there now.
    Vanished,
}

/// Why a device that still exists is no longer served.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// xenstore is lost, or refuses a read or write that the device needs.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Serves a device until it has vanished, or until `stop` turns true: then the queues stop and the
/// nodes stay as they are, so that the next process can take the device over.
///
/// Queues do not need xenstore while they run. If xenstore does not answer, or the connection is
/// lost, the queues keep running, and reads and writes are retried or left out. A caller that finds
/// the connection lost ([`Store::lost`]) must open another one, turn `stop` true, and serve the
/// device again with the new connection, which resumes the rings.
///
/// # Errors
/// [`ServeError`]: xenstore refuses a read or write that the device needs; the queues have stopped.
/// With [`StoreError::Lost`] no queue was running when the connection was lost.
pub async fn serve(
    store: &Store,
    id: DeviceId,
    host: &mut dyn Host,
    mut commands: mpsc::Receiver<Command>,
    stop: watch::Receiver<bool>,
) -> Result<(), ServeError> {
    let mut device = Device {
        store,
        host,
        back: Back::new(id),
        watch: store.watch(),
        front: None,
        nodes: None,
        stop,
        is_there: None,
        is_running: false,
        is_told: false,
    };
    let result = match device.run(&mut commands).await {
        Err(error) if device.is_running && error.is_lost() => {
            device.run_on(&error, &mut commands).await;
            Ok(())
        }
        result => result,
    };
    // In every case the queues stop, and the guest's pages are unmapped.
    if device.is_running {
        device.host.disconnect().await;
    }
    device.host.close();
    Ok(result?)
}

struct Device<'a> {
    store: &'a Store,
    host: &'a mut dyn Host,
    back: Back,
    watch: Watch,
    /// The path of the front-end's folder, once the folder is watched.
    front: Option<String>,
    /// The front-end's nodes, as they were read last; `None` if they were not read yet.
    nodes: Option<Nodes>,
    stop: watch::Receiver<bool>,
    /// True if the last reading found the back-end's folder; `None`: the reading failed.
    is_there: Option<bool>,
    /// True while queues run.
    is_running: bool,
    /// True if it was logged that xenstore does not answer, and it has not answered since.
    is_told: bool,
}

impl Device<'_> {
    async fn run(&mut self, commands: &mut mpsc::Receiver<Command>) -> Result<(), StoreError> {
        let mut stop = self.stop.clone();
        let folder = self.back.id().back_folder();
        let (mut read_again, mut has_vanished) = (false, false);
        let mut readings = Readings::new(Instant::now());
        while let Err(error) = self.watch.add(&folder).await {
            self.pause(error).await?;
            if *stop.borrow() {
                return Ok(());
            }
        }
        loop {
            let passing = async {
                match (read_again, self.back.waits_for()) {
                    (true, _) => tokio::time::sleep(PASSING_RETRY_DELAY).await,
                    (false, Some(_)) => tokio::time::sleep(OPEN_RETRY_DELAY).await,
                    (false, None) => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                () = stopped(&mut stop) => return self.perform(Event::Leave).await,
                command = commands.recv() => match command {
                    None => return self.perform(Event::Seen(Seen::default())).await,
                    // The command may come late, and the folder may exist again: look for it.
                    Some(Command::Vanished) => {
                        has_vanished = true;
                        read_again = self.look().await?;
                    }
                    Some(Command::Resized(disk)) => self.perform(Event::Resized(disk)).await?,
                    Some(Command::Fault { number, text }) => {
                        self.perform(Event::Fault { number, text }).await?;
                    }
                    Some(Command::Detach) => self.perform(Event::Detach).await?,
                    Some(Command::DetachNow) => self.perform(Event::DetachNow).await?,
                },
                changed = self.watch.changed() => {
                    changed?;
                    tokio::time::sleep_until(readings.due()).await;
                    readings.begin(Instant::now());
                    read_again = self.look().await?;
                }
                () = passing => read_again = self.look().await?,
            }
            if has_vanished && self.is_there == Some(false) {
                return Ok(());
            }
        }
    }

    /// The connection to xenstore is lost while queues run: returns when the queues must stop.
    /// Other commands are ignored, since nothing can be written to xenstore.
    async fn run_on(&mut self, error: &StoreError, commands: &mut mpsc::Receiver<Command>) {
        let device = self.back.id();
        tracing::warn!(%device, %error, "connection to xenstore lost; the queues keep running");
        loop {
            tokio::select! {
                () = stopped(&mut self.stop) => return,
                command = commands.recv() => match command {
                    Some(Command::Vanished | Command::DetachNow) | None => return,
                    Some(Command::Resized(_) | Command::Fault { .. } | Command::Detach) => {}
                }
            }
        }
    }

    /// Reads the nodes and gives them to the state machine. Returns true if they must be read
    /// again: the front-end changed its nodes during the reading, or xenstore did not answer. The
    /// nodes of the last reading hold until then.
    async fn look(&mut self) -> Result<bool, StoreError> {
        let mut stop = self.stop.clone();
        self.is_there = None;
        let read = tokio::select! {
            biased;
            () = stopped(&mut stop) => return Ok(false),
            read = self.read() => read,
        };
        let (back, is_contended) = match read {
            Ok(read) => read,
            Err(error) if error.is_passing() => {
                self.tell_passing(&error);
                return Ok(true);
            }
            Err(error) => return Err(error),
        };
        self.is_told = is_contended && self.is_told;
        self.is_there = Some(state_of(&back) != Some(XenbusState::Unknown));
        // The front-end's nodes were never read: this does not mean that there is no front-end.
        let Some(front) = self.nodes.clone() else { return Ok(true) };
        self.perform(Event::Seen(Seen { back, front })).await?;
        Ok(is_contended)
    }

    /// Reads and returns the nodes of the back-end, and reads those of the front-end into `nodes`.
    /// The flag is true if the front-end's could not be read: `nodes` then has the last reading.
    async fn read(&mut self) -> Result<(Nodes, bool), StoreError> {
        let folder = self.back.id().back_folder();
        let names: Vec<_> = back_names().map(str::to_owned).collect();
        let back = read_back(self.store, &folder, &names).await?;
        self.follow(&back).await?;
        let Some(front) = &self.front else {
            self.nodes = Some(Nodes::new());
            return Ok((back, false));
        };
        // A front-end may have the queues that a former process offered.
        let queues_max = queues_offered(&back).max(self.host.queues_max());
        match read_front(self.store, front, queues_max).await {
            Ok(front) => self.nodes = Some(front),
            Err(error) if error.is_passing() => {
                self.tell_passing(&error);
                return Ok((back, true));
            }
            // A guest may withdraw our permission to read its nodes: treat it as having no nodes.
            Err(StoreError::Refused { error, .. }) => {
                tracing::warn!(
                    device = %self.back.id(),
                    %error,
                    "reading the front-end's nodes failed"
                );
                self.nodes = Some(Nodes::new());
            }
            Err(error) => return Err(error),
        }
        Ok((back, false))
    }

    /// Logs once that xenstore does not answer. If the front-end has changed its nodes while they
    /// were read, nothing is logged.
    fn tell_passing(&mut self, error: &StoreError) {
        if *error != StoreError::Contended && !std::mem::replace(&mut self.is_told, true) {
            tracing::warn!(device = %self.back.id(), %error, "xenstore request failed; retrying");
        }
    }

    /// Waits before xenstore is asked again.
    ///
    /// # Errors
    /// `error`, if asking again would not help.
    async fn pause(&mut self, error: StoreError) -> Result<(), StoreError> {
        if !error.is_passing() {
            return Err(error);
        }
        self.tell_passing(&error);
        tokio::time::sleep(PASSING_RETRY_DELAY).await;
        Ok(())
    }

    /// Watches the folder of the front-end that the tool stack names.
    async fn follow(&mut self, back: &Nodes) -> Result<(), StoreError> {
        let path = back.get(keys::FRONTEND.name).and_then(|value| Path::parse(value).ok());
        let path = path.filter(|path| path.is_absolute()).map(|path| path.as_str().to_owned());
        if path == self.front {
            return Ok(());
        }
        if let Some(former) = self.front.take() {
            self.watch.remove(&former);
        }
        self.nodes = None;
        if let Some(path) = path {
            self.watch.add(&path).await?;
            self.front = Some(path);
        }
        Ok(())
    }

    /// Gives the state machine an event, carries out its actions, and gives it their results.
    async fn perform(&mut self, event: Event) -> Result<(), StoreError> {
        let (reason, state) = (self.back.reason().cloned(), self.back.state());
        let waited_for = self.back.waits_for().map(str::to_owned);
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            for action in self.back.handle(event) {
                match action {
                    Action::Open(assignment) => {
                        let queues_max = self.host.queues_max();
                        events.push_back(match self.host.open(&assignment).await {
                            Ok((offer, disk)) => {
                                let queues_max = offer.queues_max.min(queues_max);
                                Event::Opened { offer: Offer { queues_max, ..offer }, disk }
                            }
                            Err(error) => refusal(error),
                        });
                    }
                    Action::Connect(config) => {
                        let connected = self.host.connect(&config).await;
                        self.is_running = connected.is_ok();
                        events.push_back(match connected {
                            Ok(()) => Event::Started,
                            Err(error) => refusal(error),
                        });
                    }
                    Action::Disconnect => {
                        self.host.disconnect().await;
                        self.is_running = false;
                        events.push_back(Event::Stopped);
                    }
                    Action::Write(changes) => {
                        if !self.write(&changes).await? {
                            events.push_back(Event::Seen(Seen::default()));
                        }
                    }
                    Action::Close => self.host.close(),
                }
            }
        }
        self.tell(reason.as_ref(), state);
        if let Some(problem) = self.back.waits_for()
            && waited_for.as_deref() != Some(problem)
        {
            tracing::error!(
                device = %self.back.id(),
                problem,
                "the guest's requests wait; retrying"
            );
        }
        Ok(())
    }

    /// Writes and removes nodes in one transaction, which is retried while it conflicts with others
    /// or xenstore does not answer. When the process ends, the nodes stay as they are. Returns
    /// false if the back-end's folder is gone.
    async fn write(&mut self, changes: &[Change]) -> Result<bool, StoreError> {
        let state = format!("{}/{}", self.back.id().back_folder(), keys::BACK_STATE.name);
        loop {
            let result = tokio::select! {
                biased;
                () = stopped(&mut self.stop) => return Ok(true),
                result = try_write(self.store, &state, changes) => result,
            };
            match result {
                Err(error) => self.pause(error).await?,
                result => return result,
            }
        }
    }

    /// Logs why the device was closed, or else its new state, if either has changed.
    fn tell(&self, former_reason: Option<&Reason>, former_state: XenbusState) {
        let (device, state) = (self.back.id(), self.back.state());
        match self.back.reason() {
            Some(reason) if former_reason != Some(reason) => {
                tracing::warn!(%device, %reason, "device closed");
            }
            _ if former_state != state => tracing::info!(%device, %state, "device"),
            _ => {}
        }
    }
}

fn refusal(HostError { text, is_passing }: HostError) -> Event {
    if is_passing { Event::Delayed(text) } else { Event::Failed(text) }
}

/// Returns when `stop` turns true: the process ends, or serves the device with another connection.
async fn stopped(stop: &mut watch::Receiver<bool>) {
    let _ = stop.wait_for(|stop| *stop).await;
}

async fn write(tx: &Transaction, state: &str, changes: &[Change]) -> Result<bool, StoreError> {
    if tx.read(state).await?.is_none() {
        return Ok(false);
    }
    for Change { path, value } in changes {
        match value {
            Some(value) => tx.write(path, value.as_bytes()).await?,
            None => tx.remove(path).await?,
        }
    }
    Ok(true)
}

/// Reads nodes of a folder; nodes that do not exist are left out.
async fn read(tx: &Transaction, folder: &str, names: &[String]) -> Result<Nodes, StoreError> {
    let paths: Vec<_> = names.iter().map(|name| format!("{folder}/{name}")).collect();
    let values = tx.read_all(&paths).await?;
    let found = names.iter().zip(values).filter_map(|(name, value)| Some((name.clone(), value?)));
    Ok(found.collect())
}

async fn read_back(store: &Store, folder: &str, names: &[String]) -> Result<Nodes, StoreError> {
    let mut tries = Tries::default();
    loop {
        let tx = store.begin().await?;
        let result = read(&tx, folder, names).await;
        if let Some(nodes) = tries.end(tx, result).await? {
            return Ok(nodes);
        }
    }
}

async fn read_front(store: &Store, folder: &str, queues_max: u32) -> Result<Nodes, StoreError> {
    let names: Vec<_> = front_names().map(str::to_owned).collect();
    let mut tries = Tries::default();
    loop {
        let tx = store.begin().await?;
        let result = read_all_of_front(&tx, folder, &names, queues_max).await;
        if let Some(nodes) = tries.end(tx, result).await? {
            return Ok(nodes);
        }
    }
}

async fn read_all_of_front(
    tx: &Transaction,
    folder: &str,
    names: &[String],
    queues_max: u32,
) -> Result<Nodes, StoreError> {
    let mut nodes = read(tx, folder, names).await?;
    nodes.extend(read(tx, folder, &queue_names(&nodes, queues_max)).await?);
    Ok(nodes)
}

async fn try_write(store: &Store, state: &str, changes: &[Change]) -> Result<bool, StoreError> {
    let mut tries = Tries::default();
    loop {
        let tx = store.begin().await?;
        let result = write(&tx, state, changes).await;
        if let Some(is_there) = tries.end(tx, result).await? {
            return Ok(is_there);
        }
    }
}
