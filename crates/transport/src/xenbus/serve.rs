//! One device: reads its nodes for the state machine, and does what the machine says.

use super::DeviceId;
use super::negotiate::{
    Reason, Seen, back_names, front_names, queue_names, queues_offered, state_of,
};
use super::readings::Readings;
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

/// When a disk is opened again that could not be opened or connected, of a guest that waits for
/// its answers.
const OPEN_PAUSE: Duration = Duration::from_secs(1);
/// When nodes that changed while they were read are read again, and when xenstore is asked again
/// that did not answer or had no room.
const PASSING_PAUSE: Duration = Duration::from_millis(200);

/// Why a host cannot serve a device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct HostError {
    /// The reason, as the guest's tool stack will read it.
    pub text: String,
    /// The host lacks something that it may have again later: memory, file descriptors.
    pub is_passing: bool,
}

impl HostError {
    /// One that stays.
    #[must_use]
    pub fn new(text: impl Into<String>) -> Self {
        Self { text: text.into(), is_passing: false }
    }
}

/// Who serves the requests of a device: opens the disk, maps rings, runs queues. The calls come in
/// this order: `open`, any number of `connect` and `disconnect` in turn, `close`. An `open` that
/// follows another one replaces it.
pub trait Host: Send {
    /// Most queues that any front-end gets: more are neither offered nor looked for, unless a
    /// former process has offered them.
    fn queues_max(&self) -> u32;

    /// Opens what the tool stack names, and says what can be offered for it.
    ///
    /// # Errors
    /// [`HostError`], which goes to the device's `error` node; if a former process has left a
    /// front-end connected, it is told to nobody, and tried again.
    fn open<'a>(
        &'a mut self,
        assignment: &'a Assignment,
    ) -> Later<'a, Result<(Offer, Disk), HostError>>;

    /// Maps the rings, binds the event channels, starts the queues.
    ///
    /// # Errors
    /// [`HostError`]; nothing of the front-end may be in use any more then. One that passes is told
    /// to nobody if rings were to be taken over: what was opened is opened again later, and the
    /// rings are to be as they were.
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
    /// The back-end's folder was removed, as somebody saw: the device is over if it is not there.
    Vanished,
}

/// Why a device is served no longer, other than that it is over.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// xenstore is lost, or refuses what has to be done.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Serves a device until it has vanished, or until `stop` turns true: then the queues stop and the
/// nodes stay as they are, so that the next process takes the device over.
///
/// The queues need nothing of xenstore. While it does not answer they run, and what is to be read
/// or written is tried again. When the connection is lost they run on as well, until the device is
/// told to end: who finds the connection lost ([`Store::lost`]) opens another one, turns `stop`
/// true, and serves the device again with the new one, which takes the rings over.
///
/// # Errors
/// [`ServeError`]; the queues have stopped then. [`StoreError::Lost`]: no queue was running.
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
    // Whatever became of xenstore, the guest's pages are given back.
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
    /// The front-end's folder, once it is watched.
    front: Option<String>,
    /// The front-end's nodes, as they were read last; `None` if they were not read yet.
    nodes: Option<Nodes>,
    stop: watch::Receiver<bool>,
    /// The back-end's folder was there when it was looked for last; `None`: nobody knows.
    is_there: Option<bool>,
    /// Queues run.
    is_running: bool,
    /// It was told that xenstore does not answer, since it did last.
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
                    (true, _) => tokio::time::sleep(PASSING_PAUSE).await,
                    (false, Some(_)) => tokio::time::sleep(OPEN_PAUSE).await,
                    (false, None) => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                () = stopped(&mut stop) => return self.perform(Event::Leave).await,
                command = commands.recv() => match command {
                    None => return self.perform(Event::Seen(Seen::default())).await,
                    // Whoever saw that may tell it late: the folder may be there again.
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

    /// xenstore is lost while queues run: returns when they are to stop. Nobody can be told of
    /// anything else.
    async fn run_on(&mut self, error: &StoreError, commands: &mut mpsc::Receiver<Command>) {
        tracing::warn!(device = %self.back.id(), %error, "queues run on");
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

    /// Reads the nodes and goes on from there. True if they are to be read again: the front-end's
    /// changed meanwhile, or xenstore did not answer. Then the former ones count until that.
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
        // Whoever was not looked at yet is not a front-end that is not there.
        let Some(front) = self.nodes.clone() else { return Ok(true) };
        self.perform(Event::Seen(Seen { back, front })).await?;
        Ok(is_contended)
    }

    /// Reads the nodes of the back-end, and those of the front-end into `nodes`. True if these are
    /// as they were before.
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
            // A guest may take our permission to read its nodes: then there are none.
            Err(StoreError::Refused { error, .. }) => {
                tracing::warn!(device = %self.back.id(), %error, "front-end's nodes not readable");
                self.nodes = Some(Nodes::new());
            }
            Err(error) => return Err(error),
        }
        Ok((back, false))
    }

    /// Says once that xenstore does not answer. A front-end that changes its nodes while they are
    /// read is no news.
    fn tell_passing(&mut self, error: &StoreError) {
        if *error != StoreError::Contended && !std::mem::replace(&mut self.is_told, true) {
            tracing::warn!(device = %self.back.id(), %error, "xenstore is asked again");
        }
    }

    /// Waits before xenstore is asked again.
    ///
    /// # Errors
    /// `error`, if that is of no use.
    async fn pause(&mut self, error: StoreError) -> Result<(), StoreError> {
        if !error.is_passing() {
            return Err(error);
        }
        self.tell_passing(&error);
        tokio::time::sleep(PASSING_PAUSE).await;
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

    /// Gives the machine an event, does what it says, and gives it the answers.
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
            tracing::error!(device = %self.back.id(), problem, "its requests wait: tried again");
        }
        Ok(())
    }

    /// Writes and removes nodes at once, however often others come between or xenstore does not
    /// answer. When the process ends the nodes stay as they are. False: the back-end's folder is
    /// gone.
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

fn refusal(HostError { text, is_passing }: HostError) -> Event {
    if is_passing { Event::Delayed(text) } else { Event::Failed(text) }
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
