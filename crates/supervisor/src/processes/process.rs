//! `DeviceProcess`: one device process, as the supervisor sees it: commands, reports, its end.

mod answers;
mod quiesce;
mod reports;
mod taken_devices;

use super::answer_deadline::AnswerDeadline;
use super::domain_members::{AssignedDevice, DomainMembers, ServedSwitch};
use super::journal_store::{Handing, JournalStore};
use super::process_state::State;
use super::spawner::Spawned;
use manyring_engine::aside;
use manyring_protocol::message::{self, Command, Report};
use manyring_serve::assemble::SwitchHost;
use manyring_serve::byte_stream::ByteStream;
use manyring_serve::channel::{Channel, watched};
use manyring_serve::counts::Counts;
use manyring_serve::lease_ring::Ring;
use manyring_serve::outgoing::{MessageFd, OutgoingMessage, Sending, send, sent};
use manyring_serve::reaper::{has_ended, reap};
use manyring_serve::threads::Threads;
use manyring_serve::times::{PROCESS_ANSWER, PROCESS_END, PROCESS_IDLE};
use manyring_serve::worker_view::Workers;
use quiesce::Quiescing;
use rustix::fd::OwnedFd;
use rustix::process::{Signal, pidfd_send_signal};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use taken_devices::Lost;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, interval_at, sleep, timeout};

/// Most commands that are queued while the process reads none.
const ORDERS_MAX: usize = 64;
/// Most reports that are read of a process that has ended: more than a socket holds.
const LAST_MESSAGES_MAX: usize = 4096;

/// A device process and its channel.
#[derive(Debug)]
pub(super) struct DeviceProcess {
    name: String,
    state: watch::Sender<State>,
    pid: AtomicU32,
    orders: mpsc::Sender<OutgoingMessage>,
    devices: Mutex<BTreeMap<String, Device>>,
    /// The names of devices that the supervisor has taken from the process.
    lost: Lost,
    pub(super) threads: Threads,
    pub(super) ring: Ring,
    /// Number of sessions that have begun in this process.
    sessions: AtomicU64,
    /// Number of reports that the supervisor has read.
    reports: AtomicU64,
    /// The number of the last question that was sent to the process: a ping or a request for
    /// counters (`answers.rs`).
    asked: AtomicU64,
    /// The number of the last request for counters that was sent.
    counts: AtomicU64,
    /// The number of the last question that the process has answered.
    answered: watch::Sender<u64>,
    /// False once the process has not answered a request for counters in time.
    answers: AtomicBool,
    quiescing: Quiescing,
    members: DomainMembers,
    /// The switch whose ports the process serves.
    switch: Option<ServedSwitch>,
}

/// A device that the supervisor has given to the process.
#[derive(Debug)]
struct Device {
    assigned: AssignedDevice,
    /// Completed by the report that the process has stopped the device; `None`: no removal was
    /// requested.
    removed: Option<oneshot::Sender<()>>,
}

/// A command was not queued: the process is ending, or does not read its commands.
#[derive(Clone, Copy, Debug)]
pub(super) struct Unresponsive;

impl DeviceProcess {
    /// Starts a process for a domain. Commands are queued until the process has started. `switch`:
    /// the switch whose ports the process serves. `members`: the objects that the processes of the
    /// domain share.
    pub(super) fn start(
        name: &str,
        arguments: Arc<[OsString]>,
        members: DomainMembers,
        switch: Option<Arc<SwitchHost>>,
    ) -> Arc<Self> {
        let (orders, ordered) = mpsc::channel(ORDERS_MAX);
        let process = Arc::new(Self {
            name: name.to_owned(),
            state: watch::Sender::new(State::Starting),
            pid: AtomicU32::new(0),
            orders,
            devices: Mutex::default(),
            lost: Lost::default(),
            threads: Threads::open(),
            ring: Ring::default(),
            sessions: AtomicU64::new(0),
            reports: AtomicU64::new(0),
            asked: AtomicU64::new(0),
            counts: AtomicU64::new(0),
            answered: watch::Sender::new(0),
            answers: AtomicBool::new(true),
            quiescing: Quiescing::new(),
            members,
            switch: switch.map(ServedSwitch::new),
        });
        let threads = process.threads.given().into_iter().map(MessageFd::from).collect();
        let _ = process.tell(Command::Threads {}, threads);
        tokio::spawn(process.clone().run(arguments, ordered));
        process
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Device>> {
        self.devices.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn state(&self) -> State {
        *self.state.borrow()
    }

    /// Returns the domain of the process.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn pid(&self) -> u32 {
        self.pid.load(Ordering::Relaxed)
    }

    pub(super) fn devices(&self) -> Vec<String> {
        self.lock().keys().cloned().collect()
    }

    /// Returns the journal stores of all devices of the process.
    pub(super) fn all_journals(&self) -> Vec<Arc<JournalStore>> {
        self.lock().values().map(|device| device.assigned.journals.clone()).collect()
    }

    /// Returns the counters of the devices for which `is_meant` is true.
    pub(super) fn counts(&self, is_meant: impl Fn(&str) -> bool) -> Vec<Arc<Counts>> {
        let devices = self.lock();
        let meant = devices.iter().filter(|(name, _)| is_meant(name));
        meant.map(|(_, device)| device.assigned.counts.clone()).collect()
    }

    /// Returns the number of reports that the supervisor has read from this process.
    pub(super) fn reports(&self) -> u64 {
        self.reports.load(Ordering::Relaxed)
    }

    /// Returns the workers' state, as the process last wrote it into the file of threads.
    pub(super) fn threads(&self) -> Workers {
        self.threads.read(&self.name, |device| self.has(device))
    }

    /// True while the process accepts commands.
    pub(super) fn serves(&self) -> bool {
        matches!(self.state(), State::Starting | State::Serving)
    }

    /// For tests: sets the state of the process.
    #[cfg(test)]
    pub(super) fn set_state(&self, state: State) {
        self.state.send_replace(state);
    }

    /// Returns when the process has ended.
    pub(super) async fn ended(&self) {
        is(&mut self.state.subscribe(), State::Ended).await;
    }

    /// Returns when the process has ended, or was killed and the kernel does not end it.
    pub(super) async fn ended_or_stuck(&self) {
        let is_over = |state: &State| matches!(state, State::Ended | State::Stuck);
        let _ = self.state.subscribe().wait_for(is_over).await;
    }

    /// Closes the queues of privileged requests of the process's devices, so that the supervisor
    /// serves no further request.
    pub(super) fn closes_asks(&self) {
        let closed = || mpsc::channel(1).0;
        self.lock().values_mut().for_each(|device| device.assigned.asks = closed());
        self.switch.iter().for_each(ServedSwitch::closes_asks);
    }

    pub(super) fn switch(&self) -> Option<&ServedSwitch> {
        self.switch.as_ref()
    }

    pub(super) fn has(&self, device: &str) -> bool {
        self.lock().contains_key(device)
    }

    /// Queues a command, if the queue has room.
    pub(super) fn tell(&self, order: Command, fds: Vec<MessageFd>) -> Result<(), Unresponsive> {
        if !self.serves() {
            return Err(Unresponsive);
        }
        self.orders.try_send((order, fds)).map_err(|_| Unresponsive)
    }

    /// Queues a command as soon as the queue has room; never, if the process ends.
    pub(super) async fn tell_in_turn(&self, order: Command, fds: Vec<MessageFd>) {
        if let Err(unsent) = self.orders.send((order, fds)).await {
            aside(move || drop(unsent)).await;
        }
    }

    /// Waits for room in the queue of commands, and reserves it.
    ///
    /// # Errors
    /// The process ends.
    pub(super) async fn place(&self) -> Result<mpsc::Permit<'_, OutgoingMessage>, Unresponsive> {
        self.orders.reserve().await.map_err(|_| Unresponsive)
    }

    /// Gives the process a device as soon as its queue has room: VMMs of a hundred devices may
    /// connect at once while the process still starts. `more`: the commands about the device that
    /// follow. If the future is dropped before it returns, the process has not got the device.
    ///
    /// # Errors
    /// The process ends.
    pub(super) async fn give(
        &self,
        order: Command,
        fds: Vec<MessageFd>,
        more: Vec<Command>,
        assigned: AssignedDevice,
    ) -> Result<(), Unresponsive> {
        let (Command::Device { device: name, .. } | Command::XenDisk { device: name, .. }) = &order
        else {
            return Err(Unresponsive);
        };
        let name = name.clone();
        let places = self.orders.reserve_many(1 + more.len()).await.map_err(|_| Unresponsive)?;
        if !self.serves() {
            return Err(Unresponsive);
        }
        self.lock().insert(name, Device { assigned, removed: None });
        let more = more.into_iter().map(|command| (command, Vec::new()));
        let orders = [(order, fds)].into_iter().chain(more);
        places.zip(orders).for_each(|(place, order)| place.send(order));
        Ok(())
    }

    /// Hands clients of a device to the process.
    pub(super) async fn connect(&self, handing: Handing) {
        for (command, fds) in handing {
            self.tell_in_turn(command, fds).await;
        }
        // A process that is blocked in the kernel neither exits nor closes its channel. Ping it: a
        // missing answer is the only sign.
        self.ping();
    }

    /// Stops a device; returns when it has stopped. A process that does not stop it is killed.
    pub(super) async fn remove(&self, device: &str) {
        let (removed, is_removed) = oneshot::channel();
        match self.lock().get_mut(device) {
            None => return,
            Some(assigned) => assigned.removed = Some(removed),
        }
        let command = Command::Remove { device: device.to_owned() };
        let stops = async {
            self.tell_in_turn(command, Vec::new()).await;
            let _ = is_removed.await;
        };
        if timeout(PROCESS_ANSWER, stops).await.is_err() {
            self.evict("stopping a device timed out").await;
        }
        self.lost.add(device);
        self.lock().remove(device);
    }

    fn quiescing(&self) -> &Quiescing {
        &self.quiescing
    }

    /// Kills the process for a fault; returns when it has ended.
    pub(super) async fn evict(&self, reason: &str) {
        self.end(reason);
        self.ended().await;
    }

    pub(super) fn members(&self) -> &DomainMembers {
        &self.members
    }

    pub(super) fn end(&self, reason: &str) {
        let ends = self.state.send_if_modified(|state| {
            let ends = matches!(state, State::Starting | State::Serving);
            if ends {
                *state = State::Ending;
            }
            ends
        });
        if ends {
            let (process, pid) = (&self.name, self.pid());
            tracing::info!(process, pid, reason, "device process stops");
        }
    }

    async fn run(
        self: Arc<Self>,
        arguments: Arc<[OsString]>,
        mut orders: mpsc::Receiver<OutgoingMessage>,
    ) {
        match super::spawner::spawned(arguments).await {
            Err(error) => {
                tracing::error!(process = self.name, %error, "starting the device process failed");
                self.end("it was not started");
            }
            Ok(spawned) => self.look_after(spawned, &mut orders).await,
        }
        // Close the descriptors of unsent commands on another thread: a close may block.
        orders.close();
        aside(move || while orders.try_recv().is_ok() {}).await;
        self.switch.iter().for_each(ServedSwitch::closes_asks);
        let gone = std::mem::take(&mut *self.lock());
        // A front-end in the journal store stays connected, and the next process serves it: do not
        // show its device as disconnected.
        for device in gone.values().filter(|device| !device.assigned.journals.is_used()) {
            device.assigned.connected.send_replace(false);
        }
        aside(move || gone.into_values().for_each(|device| device.assigned.counts.end())).await;
        self.threads.end();
        self.pid.store(0, Ordering::Relaxed);
        // Set this last: once the state is `Ended`, the next process starts and gets the counters,
        // which this process must not write any more.
        self.state.send_replace(State::Ended);
    }

    async fn look_after(
        &self,
        Spawned { mut child, pidfd, socket, stderr }: Spawned,
        orders: &mut mpsc::Receiver<OutgoingMessage>,
    ) {
        self.pid.store(child.id(), Ordering::Relaxed);
        tracing::info!(process = self.name, pid = child.id(), "device process started");
        let watches = pidfd.try_clone().and_then(|pidfd| watched(pidfd, Interest::READABLE));
        let (Ok(pidfd), Ok(channel)) =
            (watches, Channel::new(socket, self.members.janitor.clone()))
        else {
            self.end("no file descriptor available to watch it");
            let _ = child.kill();
            aside(move || has_ended(&pidfd, None)).await;
            reap(child);
            return;
        };
        let members = &self.members;
        let stderr = ByteStream::new(stderr, members.janitor.clone());
        let outgoing = members.stderr_relay.follow(stderr, self.name.clone());
        let reason = self.attend(&channel, &pidfd, orders).await;
        self.end(&reason);
        let _ = pidfd_send_signal(&pidfd, Signal::KILL);
        if timeout(PROCESS_END, pidfd.readable()).await.is_err() {
            let (process, pid) = (&self.name, child.id());
            tracing::error!(
                process,
                pid,
                "the device process was killed, but the kernel has not ended it; its devices wait \
                 until then"
            );
            // No command is read any more: close the queue, so that callers which wait for room
            // return.
            orders.close();
            let _ = pidfd.get_ref().try_clone().map(|child| self.quiescing.hold(child));
            self.state.send_replace(State::Stuck);
            let _ = pidfd.readable().await;
            tracing::info!(process, pid, "device process ended");
        }
        // Handle the session reports that the process sent before its end: they carry descriptors
        // that the next process needs. The rate limit is not applied: the next process would wait.
        for _ in 0..LAST_MESSAGES_MAX {
            let Some((bytes, fds)) = channel.receive_buffered() else { break };
            tokio::task::yield_now().await;
            if let Ok(report @ (Report::SessionFds { .. } | Report::Gone { .. })) =
                message::parse(&bytes)
            {
                let has_fds = !fds.is_empty();
                let _ = self.handle(report, fds);
                // A front-end chose the descriptors, and can make their close take long.
                if has_fds && timeout(PROCESS_ANSWER, self.closes()).await.is_err() {
                    break;
                }
            }
        }
        // Relay the last log lines of the process before anything is logged about its end.
        outgoing.end().await;
        // The kernel closed the process's files before its pidfd became readable, so the next
        // process need not wait until it is reaped.
        reap(child);
        let socket = channel.into_socket();
        aside(move || drop(socket)).await;
    }

    /// Sends commands and handles reports until the process ends; returns why it did. Reports are
    /// read while a command is being sent: otherwise both processes might wait for each other.
    async fn attend(
        &self,
        channel: &Channel,
        pidfd: &AsyncFd<OwnedFd>,
        orders: &mut mpsc::Receiver<OutgoingMessage>,
    ) -> String {
        let begun = sleep(PROCESS_ANSWER);
        tokio::pin!(begun);
        let mut idle = interval_at(Instant::now() + PROCESS_IDLE, PROCESS_IDLE);
        let (mut sessions, mut state) = (0, self.state.subscribe());
        let mut deadline = AnswerDeadline::default();
        let mut sending: Option<Sending<'_>> = None;
        loop {
            tokio::select! {
                Some((order, fds)) = orders.recv(), if sending.is_none() => {
                    deadline.ask(&order);
                    let Ok(bytes) = message::emit(&order) else {
                        return "a command is too long".to_owned();
                    };
                    sending = Some(Box::pin(send(channel, bytes, fds)));
                }
                sent = sent(&mut sending) => {
                    sending = None;
                    if let Err(reason) = sent {
                        return reason;
                    }
                }
                came = channel.receive() => {
                    let (bytes, fds) = match came {
                        Ok(Some(came)) => came,
                        Ok(None) => return "the process has ended".to_owned(),
                        Err(error) => return format!("reading a report failed: {error}"),
                    };
                    let report = message::parse(&bytes).map_err(|error| error.to_string());
                    report.iter().for_each(|report| deadline.handle(report));
                    let has_fds = !fds.is_empty();
                    if let Err(problem) = report.and_then(|report| self.handle(report, fds)) {
                        return format!("invalid report: {problem}");
                    }
                    if has_fds && let Err(reason) = self.closed(pidfd).await {
                        return reason;
                    }
                    self.reports.fetch_add(1, Ordering::Relaxed);
                    tokio::task::yield_now().await;
                    self.members.bucket.pass(bytes.len()).await;
                }
                _ = pidfd.readable() => return "the process has ended".to_owned(),
                () = deadline.max_wait(), if deadline.is_asked() => {
                    if deadline.is_over() {
                        return format!("no answer for {} s", PROCESS_ANSWER.as_secs());
                    }
                }
                () = is(&mut state, State::Ending) => {
                    return "stop requested".to_owned();
                }
                () = &mut begun, if self.state() == State::Starting => {
                    return "it did not start in time".to_owned();
                }
                _ = idle.tick() => {
                    let now = self.sessions.load(Ordering::Relaxed);
                    let is_connected = |device: &Device| *device.assigned.connected.borrow();
                    let is_used = self.lock().values().any(is_connected);
                    if now == sessions && !is_used {
                        return "idle".to_owned();
                    }
                    sessions = now;
                }
            }
        }
    }
}

/// Waits until the state of a process is `awaited`.
async fn is(state: &mut watch::Receiver<State>, awaited: State) {
    let _ = state.wait_for(|state| *state == awaited).await;
}
