//! One device: reads its nodes for the state machine, and does what the machine says.

use super::DeviceId;
use super::negotiate::{Reason, Seen, back_names, front_names, queue_names};
use super::state::{Action, Back, Change, Config, Event};
use super::store::{Store, StoreError, Transaction, Tries, Watch};
use manyring_device::Later;
use manyring_wire::xen::device::{Assignment, Disk, Nodes, Offer};
use manyring_wire::xen::keys;
use manyring_wire::xen::path::Path;
use manyring_wire::xen::state::XenbusState;
use std::collections::VecDeque;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

/// Shortest time between two readings of a device's nodes: a guest that changes its nodes all the
/// time makes us read them that often.
const READ_PAUSE: Duration = Duration::from_millis(20);
/// When nodes that changed while they were read are read again.
const CONTENDED_PAUSE: Duration = Duration::from_millis(200);
/// How often a write is tried, each time as often as a transaction is.
const WRITES_MAX: u32 = 10;

/// Why a host cannot serve a device, as the guest's tool stack will read it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct HostError(pub String);

/// Who serves the requests of a device: opens the disk, maps rings, runs queues. The calls come in
/// this order: `open`, any number of `connect` and `disconnect` in turn, `close`. An `open` that
/// follows another one replaces it.
pub trait Host: Send {
    /// Most queues that any front-end gets: more are neither offered nor looked for.
    fn queues_max(&self) -> u32;

    /// Opens what the tool stack names, and says what can be offered for it.
    ///
    /// # Errors
    /// [`HostError`], which goes to the device's `error` node.
    fn open<'a>(
        &'a mut self,
        assignment: &'a Assignment,
    ) -> Later<'a, Result<(Offer, Disk), HostError>>;

    /// Maps the rings, binds the event channels, starts the queues.
    ///
    /// # Errors
    /// [`HostError`]; nothing of the front-end may be in use any more then.
    fn connect<'a>(&'a mut self, config: &'a Config) -> Later<'a, Result<(), HostError>>;

    /// Stops the queues; returns when nothing of the front-end is in use any more.
    fn disconnect(&mut self) -> Later<'_, ()>;

    /// Closes what was opened.
    fn close(&mut self);
}

/// What a device hears from the rest of the process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Its disk has another size.
    Resized(Disk),
    /// A queue met a fault of the front-end.
    Fault {
        /// [`Config::number`] of its connection.
        number: u32,
        /// What the front-end did.
        text: String,
    },
    /// The operator takes the device away, when the front-end has closed it.
    Detach,
    /// The operator takes the device away at once.
    DetachNow,
    /// The back-end's folder was removed: the device is over.
    Vanished,
}

/// Why a device is served no longer, other than that it is over.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// xenstore is lost, or does not do what has to be done.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Serves a device until it has vanished, or until `stop` turns true: then the queues stop and the
/// nodes stay as they are, so that the next process takes the device over.
///
/// # Errors
/// [`ServeError`]; the queues have stopped then.
pub async fn serve(
    store: &Store,
    id: DeviceId,
    host: &mut dyn Host,
    mut commands: mpsc::Receiver<Command>,
    mut stop: watch::Receiver<bool>,
) -> Result<(), ServeError> {
    let watch = store.watch();
    let back = Back::new(id);
    let mut device =
        Device { store, host, back, watch, front: None, nodes: Nodes::new(), is_running: false };
    let result = device.run(&mut commands, &mut stop).await;
    // Whatever became of xenstore, the guest's pages are given back.
    if device.is_running {
        device.host.disconnect().await;
    }
    device.host.close();
    result
}

struct Device<'a> {
    store: &'a Store,
    host: &'a mut dyn Host,
    back: Back,
    watch: Watch,
    /// The front-end's folder, once it is watched.
    front: Option<String>,
    /// The front-end's nodes, as they were read last.
    nodes: Nodes,
    /// Queues run.
    is_running: bool,
}

impl Device<'_> {
    async fn run(
        &mut self,
        commands: &mut mpsc::Receiver<Command>,
        stop: &mut watch::Receiver<bool>,
    ) -> Result<(), ServeError> {
        let folder = self.back.id().back_folder();
        self.watch.add(&folder).await?;
        let mut read_again = false;
        let mut read_at = Instant::now();
        loop {
            let contended = async {
                match read_again {
                    true => tokio::time::sleep(CONTENDED_PAUSE).await,
                    false => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                () = stopped(stop) => {
                    self.perform(Event::Leave).await?;
                    return Ok(());
                }
                command = commands.recv() => match command {
                    Some(Command::Vanished) | None => {
                        self.perform(Event::Seen(Seen::default())).await?;
                        return Ok(());
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
                    tokio::time::sleep_until(read_at + READ_PAUSE).await;
                    read_again = self.look().await?;
                    read_at = Instant::now();
                }
                () = contended => read_again = self.look().await?,
            }
        }
    }

    /// Reads the nodes and goes on from there. True if the front-end's changed meanwhile: then its
    /// former ones count until they are read again.
    async fn look(&mut self) -> Result<bool, ServeError> {
        let folder = self.back.id().back_folder();
        let names: Vec<_> = back_names().map(str::to_owned).collect();
        let back = read_back(self.store, &folder, &names).await?;
        self.follow(&back).await?;
        let front = match &self.front {
            None => Ok(Nodes::new()),
            Some(front) => read_front(self.store, front, self.host.queues_max()).await,
        };
        let is_contended = match front {
            Ok(front) => {
                self.nodes = front;
                false
            }
            Err(StoreError::Contended) => true,
            // A guest may take our permission to read its nodes: then there are none.
            Err(StoreError::Refused { error, .. }) => {
                tracing::warn!(device = %self.back.id(), %error, "front-end's nodes not readable");
                self.nodes.clear();
                false
            }
            Err(error) => return Err(error.into()),
        };
        let seen = Seen { back, front: self.nodes.clone() };
        self.perform(Event::Seen(seen)).await?;
        Ok(is_contended)
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
        self.nodes.clear();
        if let Some(path) = path {
            self.watch.add(&path).await?;
            self.front = Some(path);
        }
        Ok(())
    }

    /// Gives the machine an event, does what it says, and gives it the answers.
    async fn perform(&mut self, event: Event) -> Result<(), ServeError> {
        let (reason, state) = (self.back.reason().cloned(), self.back.state());
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
                            Err(error) => Event::Failed(error.to_string()),
                        });
                    }
                    Action::Connect(config) => {
                        let connected = self.host.connect(&config).await;
                        self.is_running = connected.is_ok();
                        events.push_back(match connected {
                            Ok(()) => Event::Started,
                            Err(error) => Event::Failed(error.to_string()),
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
        Ok(())
    }

    /// Writes and removes nodes at once. False: the back-end's folder is gone.
    async fn write(&mut self, changes: &[Change]) -> Result<bool, StoreError> {
        let state = format!("{}/{}", self.back.id().back_folder(), keys::BACK_STATE.name);
        for _ in 0..WRITES_MAX {
            match try_write(self.store, &state, changes).await {
                Err(StoreError::Contended) => {}
                result => return result,
            }
        }
        Err(StoreError::Contended)
    }

    /// Logs what has changed: why the device was closed, or how far it has come.
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

/// Returns when the process ends.
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

/// Reads nodes of a folder; those that are not there are left out.
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
