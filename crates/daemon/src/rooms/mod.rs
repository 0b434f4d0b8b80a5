//! Rooms: a process for each trust domain, so that a front-end harms no other domain's devices
//! (docs/design/0021).
//!
//! ```text
//! the house (manyring run)                                  a room (manyring room)
//! front.rs   listens, accepts; opens and locks the image
//!               | which room? starts it                     inside.rs  sessions, workers, guest
//! house.rs   one process: what it is told and asked    <->             memory, as the daemon runs
//!               its end is waited for; begin.rs starts it              them
//! chatter.rs what it writes to standard error
//! lend.rs    does what a guest may choose of its       <-   wishes.rs  asks for that, and waits
//!            interface, and keeps the interface
//! estate.rs  keeps connections, and notes of the       <-   keeper.rs  notes what its sessions are
//!            sessions, for the next room                          told; turns.rs in which order
//! xen_front.rs hands a disk of a Xen guest over, and what  <-> inside/xen.rs maps its rings and
//!            its front-end has named; xen_line.rs checks the        serves them
//!            answers
//!            message.rs what they say    channel.rs how, with file descriptors    keys.rs a device
//!            counts.rs what a device has counted    threads.rs how its workers are
//!            sandbox.rs what a room gives up        identity.rs as whom it goes on
//!            calls.rs   the system calls of each of its threads
//!            house/park.rs  how a room stops for the next house    takeover.rs both houses
//!            left.rs    what one leaves to the other    before.rs  how the other one ends
//! ```
//! The house reads no byte that a front-end sends to a room, maps none of its memory, and waits for
//! no room: its orders for a room lie in a bounded queue, and a room that does not read is killed.
//! The messages of a room are checked as a hostile peer's. A room that dies is started again, and
//! its front-ends go on: they see a pause.

mod before;
mod begin;
mod calls;
mod channel;
mod chatter;
mod counts;
mod denied;
mod estate;
mod front;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod given;
mod house;
mod identity;
mod inside;
mod keeper;
pub(crate) mod keys;
mod left;
mod lend;
mod limits;
mod locked;
pub mod message;
mod net;
mod parcel;
mod question;
pub(crate) mod sandbox;
mod state;
mod takeover;
mod threads;
mod turns;
mod wishes;
mod xen_front;
mod xen_line;

pub(crate) use before::Before;
pub(crate) use begin::start_next;
pub(crate) use channel::watched;
pub(crate) use front::serve;
pub(crate) use inside::run;
pub use left::Left;
use left::{Remains, Share};
pub(crate) use takeover::{Bequest, Legacy, OfXen, Shown, XenBytes};
pub(crate) use xen_front::{
    XenFront, XenHolder, XenLent, XenLentRing, XenMeasures, XenRefusal, XenServed,
};

use crate::config::plan::{ANY_USER, GroupPlan, LimitPlan, XEN};
use crate::model::snapshot::Workers;
use channel::Channel;
use counts::Counts;
use estate::{Estates, Heirloom};
use given::Kin;
use house::Room;
use limits::Limits;
use manyring_engine::aside;
use rustix::io::Errno;
use serde::Serialize;
use state::State;
use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{OwnedRwLockReadGuard, RwLock, mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

/// Shortest time between two starts of a room: one that dies at once is not started for ever.
const START_PAUSE: Duration = Duration::from_millis(200);
/// Longest pause before a room is started of which those before have died within [`BRIEF`].
const START_PAUSE_MAX: Duration = Duration::from_secs(5);
/// A room that dies this soon may die of what it is told.
const BRIEF: Duration = Duration::from_secs(2);
/// How long after its start the room of a Xen guest that has ended is shown at least.
const GONE: Duration = Duration::from_secs(60);
/// How long a reader of counters waits for the rooms.
const COUNT_PATIENCE: Duration = Duration::from_millis(200);

/// The rooms of this process, by the name of their domain. Clones share them.
#[derive(Clone, Debug)]
pub(crate) struct Rooms {
    kept: Arc<Mutex<BTreeMap<String, Kept>>>,
    /// The options that each room is started with.
    arguments: Arc<[OsString]>,
    /// And that of Xen guests.
    xen_arguments: Arc<[OsString]>,
    limits: Arc<watch::Sender<Arc<Limits>>>,
    /// Where the front of each device is asked for what it leaves to another house, or to make its
    /// disk smaller.
    fronts: Arc<Mutex<HashMap<String, mpsc::Sender<Asked>>>>,
    xens: Arc<Mutex<Vec<Xen>>>,
    /// True while no room is started, because another house takes over.
    pauses: Arc<watch::Sender<bool>>,
    /// The channel to a house that would take over.
    successor: Arc<Mutex<Option<Arc<Channel>>>>,
    /// Held by each change, and for writing while another house takes over: that one has read by
    /// then what it will serve.
    changes: Arc<RwLock<()>>,
    /// The front-ends that another house has left, by device.
    heirlooms: Arc<Mutex<HashMap<String, Vec<Heirloom>>>>,
    /// Processes and requests of its rooms that have not ended, by device.
    remains: Arc<Mutex<HashMap<String, Remains>>>,
}

/// The disks of a Xen's guests.
#[derive(Clone, Debug)]
struct Xen {
    name: String,
    /// Where they are asked for what they leave to another house.
    asks: mpsc::Sender<Bequest>,
    /// Its xenstore is there. Without it another house could not go on with the disks.
    is_there: watch::Receiver<bool>,
}

/// A request to the front of a device, for which the device's room ends.
#[derive(Debug)]
enum Asked {
    /// Another house wants to know what it is left of the device.
    Bequest(Bequest),
    /// The disk is to have this size, which is smaller than before.
    Shrink { size: u64, done: oneshot::Sender<Result<u64, Errno>> },
}

#[derive(Debug)]
struct Kept {
    room: Arc<Room>,
    started: Instant,
    starts: u64,
    /// How long after this start the next one may be.
    pause: Duration,
}

/// `GET /v1/rooms`
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct RoomInfo {
    pub(crate) room: String,
    /// `starting`, `serving`, `ending`, `held` (it is killed, and the kernel does not end it) or
    /// `ended` (it is started with the next connection).
    pub(crate) state: &'static str,
    /// 0 while there is no process.
    pub(crate) pid: u32,
    pub(crate) devices: Vec<String>,
    pub(crate) starts: u64,
    /// It has answered the last question.
    pub(crate) answers: bool,
    /// Bytes of memory that its process uses; 0 while there is no process.
    pub(crate) resident_bytes: u64,
    /// Nanoseconds of CPU time that its process has used; 0 while there is no process.
    pub(crate) cpu_ns: u64,
}

impl Rooms {
    /// No room runs yet. `arguments`: the options that each is started with. `legacy`: what another
    /// house has left.
    pub(crate) fn new(arguments: Vec<OsString>, legacy: &mut Legacy) -> Self {
        let of_xen = arguments.iter().cloned().chain([sandbox::XEN_OPTION.into()]).collect();
        Self {
            kept: Arc::default(),
            arguments: arguments.into(),
            xen_arguments: of_xen,
            limits: Arc::default(),
            fronts: Arc::default(),
            xens: Arc::default(),
            pauses: Arc::new(watch::Sender::new(false)),
            successor: Arc::default(),
            changes: Arc::default(),
            heirlooms: Arc::new(Mutex::new(std::mem::take(&mut legacy.clients))),
            remains: Arc::new(Mutex::new(std::mem::take(&mut legacy.remains))),
        }
    }

    /// The front of a device can be asked for what it leaves, as long as the receiver lives; and
    /// the front-ends that it was left.
    fn register(&self, device: &str) -> (mpsc::Receiver<Asked>, Vec<Heirloom>) {
        let (asks, asked) = mpsc::channel(1);
        begin::prepare(self.arguments.clone());
        let mut fronts = self.fronts.lock().unwrap_or_else(PoisonError::into_inner);
        fronts.insert(device.to_owned(), asks);
        (asked, self.heirlooms().remove(device).unwrap_or_default())
    }

    /// The disks of a Xen can be asked for what they leave, as long as the receiver lives. The
    /// sender says whether its xenstore is there.
    pub(crate) fn register_xen(
        &self,
        name: &str,
    ) -> (mpsc::Receiver<Bequest>, watch::Sender<bool>) {
        let ((asks, asked), (there, is_there)) = (mpsc::channel(1), watch::channel(true));
        let xen = Xen { name: name.to_owned(), asks, is_there };
        self.xens.lock().unwrap_or_else(PoisonError::into_inner).push(xen);
        (asked, there)
    }

    fn xens(&self) -> Vec<Xen> {
        let xens = self.xens.lock().unwrap_or_else(PoisonError::into_inner);
        xens.iter().filter(|xen| !xen.asks.is_closed()).cloned().collect()
    }

    /// Disks of Xen guests are there: a room will be needed.
    fn prepare_xen(&self) {
        begin::prepare(self.xen_arguments.clone());
    }

    /// Lets go of the front-ends that another house has left of devices which have no front here.
    pub(crate) async fn keep_heirlooms(&self, has_front: impl Fn(&str) -> bool) {
        let all = std::mem::take(&mut *self.heirlooms());
        let (kept, others) = all.into_iter().partition(|(device, _)| has_front(device));
        *self.heirlooms() = kept;
        let others: HashMap<String, Vec<Heirloom>> = others;
        for device in others.keys() {
            tracing::warn!(device, "its front-ends are let go of: no room serves it any more");
        }
        // The last descriptor of a front-end's file may take long to close.
        aside(move || drop(others)).await;
    }

    fn heirlooms(&self) -> MutexGuard<'_, HashMap<String, Vec<Heirloom>>> {
        self.heirlooms.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The processes and requests of another house's rooms that may still use a device.
    fn remains(&self, device: &str) -> Remains {
        let mut remains = self.remains.lock().unwrap_or_else(PoisonError::into_inner);
        remains.remove(device).unwrap_or_default()
    }

    /// What is still there of [`Self::remains`], for the next house: of devices that wait here, or
    /// that this house does not serve. This house keeps it: the other one may not take over.
    fn remains_left(&self) -> io::Result<Share> {
        let remains = self.remains.lock().unwrap_or_else(PoisonError::into_inner);
        let mut share = Share::new();
        for (device, remains) in remains.iter() {
            share.extend(remains.share(device)?);
        }
        Ok(share)
    }

    fn has_front(&self, device: &str) -> bool {
        let fronts = self.fronts.lock().unwrap_or_else(PoisonError::into_inner);
        fronts.get(device).is_some_and(|asks| !asks.is_closed())
    }

    /// Makes a disk that rooms serve smaller: the room that has it ends first, so that no request
    /// is under way. Its front-ends go on with the next room, and are told.
    ///
    /// # Errors
    /// `EBUSY`: requests in flight did not end in time, or another house takes over; the disk is as
    /// it was. Any other comes from the disk.
    pub(crate) async fn shrink(&self, device: &str, size: u64) -> Result<u64, Errno> {
        let (done, is_done) = oneshot::channel();
        let front = {
            let fronts = self.fronts.lock().unwrap_or_else(PoisonError::into_inner);
            fronts.get(device).cloned()
        };
        let asked = front.map(|front| front.try_send(Asked::Shrink { size, done }));
        if !matches!(asked, Some(Ok(()))) {
            return Err(Errno::BUSY);
        }
        is_done.await.unwrap_or(Err(Errno::BUSY))
    }

    fn fronts(&self) -> Vec<mpsc::Sender<Asked>> {
        let fronts = self.fronts.lock().unwrap_or_else(PoisonError::into_inner);
        fronts.values().filter(|asks| !asks.is_closed()).cloned().collect()
    }

    fn successor(&self) -> MutexGuard<'_, Option<Arc<Channel>>> {
        self.successor.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_paused(&self) -> bool {
        *self.pauses.borrow()
    }

    /// Has the room of a domain killed, if there is one, because another house gets what it has.
    /// Returns when its process is gone.
    ///
    /// # Errors
    /// The kernel does not end it. It has all that it was given, then.
    pub(crate) async fn end_one(&self, domain: &str, reason: &str) -> Result<(), String> {
        let room = self.lock().get(domain).map(|kept| kept.room.clone());
        let Some(room) = room else { return Ok(()) };
        room.leave(reason);
        room.ended_or_held().await;
        match room.state() {
            State::Held => Err(format!("the kernel does not end the room {domain}")),
            _ => Ok(()),
        }
    }

    /// The notes and descriptors that the house keeps of the front-ends of a domain's room.
    fn estates_of(&self, domain: &str) -> Vec<Arc<Estates>> {
        self.lock().get(domain).map(|kept| kept.room.all_estates()).unwrap_or_default()
    }

    /// Ends all rooms: one that a guest has taken over may outlive the end of its channel.
    pub(crate) async fn end(&self) {
        let rooms: Vec<_> = self.lock().values().map(|kept| kept.room.clone()).collect();
        let all: JoinSet<_> = rooms
            .into_iter()
            .map(|room| async move { room.make_way("the daemon ends").await })
            .collect();
        let _ = tokio::time::timeout(COUNT_PATIENCE, all.join_all()).await;
    }

    /// Waits, but not once another house takes over.
    async fn unless_paused(&self, waits: impl Future<Output = ()>) {
        tokio::select! {
            () = waits => {}
            () = self.paused() => {}
        }
    }

    /// A change begins. If another house takes over, this returns when that has failed, or never.
    pub(crate) async fn change(&self) -> OwnedRwLockReadGuard<()> {
        self.changes.clone().read_owned().await
    }

    /// As [`Self::change`]; `None`: another house takes over.
    pub(crate) fn change_now(&self) -> Option<OwnedRwLockReadGuard<()>> {
        self.changes.clone().try_read_owned().ok()
    }

    /// Returns when no room is to be started.
    async fn paused(&self) {
        let _ = self.pauses.subscribe().wait_for(|pauses| *pauses).await;
    }

    /// Returns when rooms may be started.
    async fn go_on(&self) {
        let _ = self.pauses.subscribe().wait_for(|pauses| !pauses).await;
    }

    /// A device has this limit from now on.
    pub(crate) fn limit(&self, device: &str, limit: &LimitPlan) {
        self.limits.send_if_modified(|limits| Arc::make_mut(limits).set(device, limit));
    }

    /// The groups of limits are these from now on.
    pub(crate) fn follow_groups(&self, groups: &[GroupPlan]) {
        self.limits.send_if_modified(|limits| Arc::make_mut(limits).follow(groups));
    }

    fn limits(&self) -> watch::Receiver<Arc<Limits>> {
        self.limits.subscribe()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Kept>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The room of a domain, which is started if it does not run. Waits for the end of the one
    /// before it, as long as the kernel takes. `None`: no room is started now.
    async fn of(&self, domain: &str) -> Option<Arc<Room>> {
        loop {
            let of = |kept: &Kept| (kept.room.clone(), kept.started, kept.pause);
            let before = self.lock().get(domain).map(of);
            let mut pause = START_PAUSE;
            let mut kin = None;
            if let Some((room, started, paused)) = before {
                if room.serves() {
                    return Some(room);
                }
                self.unless_paused(room.ended()).await;
                self.unless_paused(room.kin().janitor.idle()).await;
                kin = Some(room.kin().clone());
                if !room.made_way() {
                    if started.elapsed() < BRIEF {
                        pause = (paused * 2).min(START_PAUSE_MAX);
                    }
                    self.unless_paused(tokio::time::sleep_until(started + paused)).await;
                }
            }
            if self.is_paused() {
                return None;
            }
            // Another device of the domain may have been faster.
            let mut kept = self.lock();
            let starts = kept.get(domain).map_or(0, |kept| kept.starts);
            if kept.get(domain).is_some_and(|kept| kept.room.state() != State::Ended) {
                continue;
            }
            let kin = kin.unwrap_or_else(|| Kin::of(domain));
            let is_xen = |domain: &str| domain.starts_with(XEN);
            let arguments = if is_xen(domain) { &self.xen_arguments } else { &self.arguments };
            let room = Room::start(domain, arguments.clone(), kin);
            let (started, starts) = (Instant::now(), starts + 1);
            // Each boot of a guest is a domain of a new number.
            kept.retain(|name, kept| {
                let is_over = kept.room.state() == State::Ended && kept.started.elapsed() > GONE;
                !(is_xen(name) && is_over)
            });
            kept.insert(domain.to_owned(), Kept { room, started, starts, pause });
        }
    }

    /// Has every room tell its counters. One that does not answer in time is shown as such, and its
    /// devices with what it has said before.
    pub(crate) async fn count(&self) {
        let rooms: Vec<_> = self.lock().values().map(|kept| kept.room.clone()).collect();
        let until = Instant::now() + COUNT_PATIENCE;
        let asked: Vec<_> =
            rooms.into_iter().filter_map(|room| Some((room.ask()?, room))).collect();
        for (question, room) in asked {
            let answers = tokio::time::timeout_at(until, room.answered(question)).await.is_ok();
            room.note_answer(answers);
            let counts: Vec<Arc<Counts>> = room.counts();
            // The file is the house's own: it is read beside the control thread all the same.
            aside(move || counts.iter().for_each(|counts| counts.read())).await;
        }
    }

    /// The workers of the rooms that have a process, as these have said when they were last asked.
    pub(crate) fn workers(&self) -> Workers {
        let rooms: Vec<_> = self.lock().values().map(|kept| kept.room.clone()).collect();
        let mut all = Workers::default();
        for room in rooms.iter().filter(|room| room.pid() != 0) {
            let Workers { workers, held } = room.threads();
            all.workers.extend(workers);
            all.held.extend(held);
        }
        all
    }

    /// The domain of a device which may be that of whoever connects: of its room, if it is in one.
    pub(crate) fn now_of(&self, device: &str, domain: String) -> String {
        if domain != ANY_USER {
            return domain;
        }
        let kept = self.lock();
        let found = kept.iter().find(|(_, kept)| kept.room.has(device));
        found.map_or(domain, |(name, _)| name.clone())
    }

    /// The state of every room, as the API shows it.
    pub(crate) fn all(&self) -> Vec<RoomInfo> {
        let info = |(name, kept): (&String, &Kept)| {
            let used = kept.room.threads.used();
            RoomInfo {
                room: name.clone(),
                state: kept.room.state().name(),
                pid: kept.room.pid(),
                devices: kept.room.devices(),
                starts: kept.starts,
                answers: kept.room.answers(),
                resident_bytes: used.resident_bytes,
                cpu_ns: used.cpu_ns,
            }
        };
        self.lock().iter().map(info).collect()
    }
}
