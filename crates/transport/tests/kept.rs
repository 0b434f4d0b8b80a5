//! A session whose process dies at each step of its notes: the next process goes on, each request
//! has one answer, and the rings run as they did.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where it fails")]
#![allow(
    clippy::disallowed_methods,
    reason = "the processes have threads, the front-end the test's"
)]

mod front;

use front::{Asked, REGION, Recorder, TIMEOUT, VERSION_1, doorbell, id_of, memory, region, send};
use manyring_device::PendingResult;
use manyring_engine::{Pool, PoolOptions};
use manyring_transport::vhost_user::{
    AnswerState, Client, Endpoint, Entry, JournalUpdate, SavedEntry, SavedSession, ServeOptions,
    SessionJournal, serve,
};
use manyring_wire::vhost_user::{
    F_PROTOCOL_FEATURES, FLAG_NEED_REPLY, HEADER_SIZE, Header, InflightArea,
};
use manyring_wire::virtio::VIRTIO_ID_BLOCK;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::net::RecvFlags;
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Instant;
use tokio::sync::{Notify, mpsc, watch};
use zerocopy::IntoBytes;

/// The state that outlives the processes, and the moment at which the first of them dies.
#[derive(Debug)]
struct Store {
    state: Mutex<State>,
    dies: Notify,
}

#[derive(Debug, Default)]
struct State {
    entries: BTreeMap<u32, SavedEntry>,
    answering: Option<Vec<u8>>,
    journal_writer: usize,
    /// The process dies at this note, when it is kept or before.
    dies_at: Option<(usize, bool)>,
    has_died: bool,
    /// It died when an answer was under way, and had not sent it.
    in_answer: bool,
    is_forgotten: bool,
    /// The process stops for another one.
    quiesces: bool,
}

impl Store {
    fn new(dies_at: Option<(usize, bool)>) -> Arc<Self> {
        let state = Mutex::new(State { dies_at, ..State::default() });
        Arc::new(Self { state, dies: Notify::new() })
    }

    /// Keeps a note. True if the process dies.
    fn keep(&self, note: JournalUpdate, fds: &[BorrowedFd<'_>]) -> bool {
        let state = &mut *self.state.lock().unwrap();
        let dies = state.dies_at.filter(|(at, _)| *at == state.journal_writer && !state.has_died);
        state.journal_writer += 1;
        state.has_died |= dies.is_some();
        if dies.is_some_and(|(_, is_kept)| !is_kept) {
            return true;
        }
        state.in_answer = dies.is_some() && matches!(note.answer, AnswerState::UnderWay(_));
        for key in note.drops {
            state.entries.remove(&key);
        }
        let mut fds: Vec<_> = fds.iter().map(|fd| fd.try_clone_to_owned().unwrap()).collect();
        for entry in note.puts {
            state.entries.insert(entry.key, SavedEntry { entry, fds: std::mem::take(&mut fds) });
        }
        match note.answer {
            AnswerState::Unchanged => {}
            AnswerState::UnderWay(message) => state.answering = Some(message),
            AnswerState::Sent => state.answering = None,
        }
        dies.is_some()
    }

    fn saved_session(&self) -> SavedSession {
        let state = &mut *self.state.lock().unwrap();
        let copy = |fd: &OwnedFd| fd.try_clone().unwrap();
        let copied = |kept: &SavedEntry| SavedEntry {
            entry: kept.entry.clone(),
            fds: kept.fds.iter().map(copy).collect(),
        };
        let entries = state.entries.values().map(copied).collect();
        SavedSession { entries, answering: state.answering.clone() }
    }
}

#[derive(Debug)]
struct Keeps(Arc<Store>);

impl SessionJournal for Keeps {
    fn update<'a>(
        &'a self,
        note: JournalUpdate,
        fds: Vec<BorrowedFd<'a>>,
    ) -> PendingResult<'a, ()> {
        Box::pin(async move {
            if self.0.keep(note, &fds) {
                self.0.dies.notify_one();
                std::future::pending::<()>().await;
            }
        })
    }

    fn forget(&self) {
        self.0.state.lock().unwrap().is_forgotten = true;
    }

    fn quiesces(&self) -> bool {
        self.0.state.lock().unwrap().quiesces
    }
}

/// Serves a client until the process is told to quiesce, and has stopped.
fn process_that_quiesces(
    device: &Arc<Recorder>,
    socket: &UnixStream,
    store: &Arc<Store>,
    told: &mpsc::Sender<()>,
) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (stop, stopped) = watch::channel(false);
    let socket = socket.try_clone().unwrap();
    socket.set_nonblocking(true).unwrap();
    let kept: (Arc<dyn SessionJournal>, _) =
        (Arc::new(Keeps(store.clone())), store.saved_session());
    runtime.block_on(async {
        let (clients, handed) = mpsc::channel(1);
        let stream = tokio::net::UnixStream::from_std(socket).unwrap();
        clients.send(Client { stream, kept: Some(kept) }).await.unwrap();
        let connected = watch::Sender::new(false);
        let options = ServeOptions::default();
        let endpoint = Endpoint::Handed(handed);
        let served = serve(device.clone(), endpoint, options, connected, stopped);
        let quiesces = async {
            told.closed().await;
            store.state.lock().unwrap().quiesces = true;
            stop.send_replace(true);
        };
        tokio::join!(served, quiesces).0.unwrap();
    });
    drop(runtime);
    store.state.lock().unwrap().quiesces = false;
}

/// Serves a client until its session ends, or until the process dies: then nothing of it is
/// dropped, as nothing of a killed process is. True if it has died.
fn process(device: Arc<Recorder>, socket: &UnixStream, store: &Arc<Store>) -> bool {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (stop, stopped) = watch::channel(false);
    let socket = socket.try_clone().unwrap();
    socket.set_nonblocking(true).unwrap();
    let kept: (Arc<dyn SessionJournal>, _) =
        (Arc::new(Keeps(store.clone())), store.saved_session());
    let has_died = runtime.block_on(async {
        let (clients, handed) = mpsc::channel(1);
        let stream = tokio::net::UnixStream::from_std(socket).unwrap();
        clients.send(Client { stream, kept: Some(kept) }).await.unwrap();
        let options = ServeOptions { one_off: true, ..ServeOptions::default() };
        let connected = watch::Sender::new(false);
        let mut served =
            Box::pin(serve(device, Endpoint::Handed(handed), options, connected, stopped));
        let has_died = tokio::select! {
            ended = &mut served => { ended.unwrap(); false }
            () = store.dies.notified() => true,
        };
        if has_died {
            std::mem::forget((served, clients, stop));
        }
        has_died
    });
    if has_died {
        std::mem::forget(runtime);
    }
    has_died
}

/// A front-end, until its connection ends.
struct FrontEnd(UnixStream);

impl FrontEnd {
    /// `None`: the connection has ended.
    fn tell(&self, name: &str, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Option<()> {
        send(&self.0, (name, 0), payload, fds).ok()
    }

    /// The payload of the one answer to a request; `None`: the connection has ended.
    fn ask(&mut self, name: &str, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Option<Vec<u8>> {
        let flags = if name.starts_with("GET") { 0 } else { FLAG_NEED_REPLY };
        send(&self.0, (name, flags), payload, fds).ok()?;
        let mut header = [0; HEADER_SIZE];
        self.0.read_exact(&mut header).ok()?;
        let header = Header::parse(&header).unwrap();
        assert_eq!(header.request, id_of(name), "an answer to something else");
        let mut payload = vec![0; header.size as usize];
        self.0.read_exact(&mut payload).ok()?;
        Some(payload)
    }

    fn set(&mut self, name: &str, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Option<()> {
        assert_eq!(self.ask(name, payload, fds)?, 0_u64.as_bytes(), "{name}");
        Some(())
    }

    /// A session with all kinds of messages that set something.
    fn run(&mut self) -> Option<()> {
        self.ask("GET_FEATURES", &[], &[])?;
        self.tell("SET_FEATURES", (VERSION_1 | F_PROTOCOL_FEATURES).as_bytes(), &[])?;
        let offered = self.ask("GET_PROTOCOL_FEATURES", &[], &[])?;
        self.tell("SET_PROTOCOL_FEATURES", &offered, &[])?;
        self.set("SET_OWNER", &[], &[])?;
        let [guest, other] = [memory(REGION.size), memory(REGION.size)];
        self.set("ADD_MEM_REG", &region(REGION), &[guest.as_fd()])?;
        let second =
            manyring_wire::vhost_user::Region { guest_addr: 1 << 30, user_addr: 1 << 40, ..REGION };
        self.set("ADD_MEM_REG", &region(second), &[other.as_fd()])?;
        for index in 0..2 {
            self.describe(index, 0)?;
            self.tell("SET_VRING_KICK", u64::from(index).as_bytes(), &[doorbell().as_fd()])?;
        }
        self.set("SET_CONFIG", &[[4u32, 2, 0].as_bytes(), &[8, 9]].concat(), &[])?;
        // As a guest that masks its interrupt, and one that stops its ring and starts it again.
        self.tell("SET_VRING_CALL", 1_u64.as_bytes(), &[doorbell().as_fd()])?;
        let base = self.ask("GET_VRING_BASE", [0u32, 0].as_bytes(), &[])?;
        assert_eq!(base, [0u32, 0].as_bytes());
        self.describe(0, 0)?;
        self.set("SET_VRING_KICK", 0_u64.as_bytes(), &[doorbell().as_fd()])?;
        self.set("REM_MEM_REG", &region(second), &[])?;
        // UML begins a ring anew without stopping it.
        self.describe(1, 0)?;
        self.set("SET_VRING_KICK", 1_u64.as_bytes(), &[doorbell().as_fd()])?;
        let config = [[20u32, 3, 0].as_bytes(), &[0; 3]].concat();
        assert_eq!(self.ask("GET_CONFIG", &config, &[])?[12..], [20, 21, 22]);
        Some(())
    }

    fn describe(&mut self, index: u32, base: u32) -> Option<()> {
        let at = REGION.user_addr + u64::from(index) * 0x4000;
        let mut addr = [index, 0].as_bytes().to_vec();
        addr.extend([at, at + 0x2000, at + 0x1000, 0].as_bytes());
        self.set("SET_VRING_NUM", [index, 128].as_bytes(), &[])?;
        self.tell("SET_VRING_BASE", [index, base].as_bytes(), &[])?;
        self.set("SET_VRING_ADDR", &addr, &[])?;
        self.tell("SET_VRING_ENABLE", [index, 1].as_bytes(), &[])?;
        self.set("SET_VRING_CALL", u64::from(index).as_bytes(), &[doorbell().as_fd()])
    }
}

/// The result of a session whose first process dies at a note.
struct Outcome {
    is_done: bool,
    processes: usize,
    journal_writer: usize,
    /// It died between the note that an answer is under way and the answer.
    in_answer: bool,
    started: [Option<Asked>; 2],
    entries: Vec<u32>,
}

fn run(dies_at: Option<(usize, bool)>) -> Outcome {
    let pool = Pool::new(PoolOptions { workers_max: 1, ..PoolOptions::default() });
    let device = Arc::new(Recorder::new(VIRTIO_ID_BLOCK, true, Some(pool)));
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_read_timeout(Some(TIMEOUT)).unwrap();
    let store = Store::new(dies_at);
    std::thread::scope(|scope| {
        let processes = scope.spawn(|| {
            let mut processes = 1;
            while process(device.clone(), &theirs, &store) {
                processes += 1;
            }
            processes
        });
        let mut front = FrontEnd(ours);
        let is_done = front.run().is_some();
        let entries = store.state.lock().unwrap().entries.keys().copied().collect();
        drop(front);
        let processes = processes.join().unwrap();
        let state = store.state.lock().unwrap();
        assert!(state.is_forgotten, "the supervisor hears of the end");
        let asked = device.asked();
        let last = |ring: usize| {
            let is_start = |asked: &&Asked| matches!(asked, Asked::Start(i, ..) if *i == ring);
            asked.iter().rfind(is_start).cloned()
        };
        let started = [last(0), last(1)];
        let (journal_writer, in_answer) = (state.journal_writer, state.in_answer);
        Outcome { is_done, processes, journal_writer, in_answer, started, entries }
    })
}

#[test]
fn a_session_goes_on_wherever_its_process_dies() {
    let whole = run(None);
    assert!(whole.is_done && whole.processes == 1);
    let runs = |ring: usize| Some(Asked::Start(ring, 128, 0.into(), true, [true, true, false]));
    assert_eq!(whole.started, [runs(0), runs(1)]);
    let mut answers = 0;
    for at in 0..whole.journal_writer {
        for is_kept in [false, true] {
            let Outcome { is_done, processes, in_answer, started, entries, .. } =
                run(Some((at, is_kept)));
            assert_eq!(processes, 2, "note {at}, kept: {is_kept}");
            // Whether the front-end has its answer is not known there: it connects again.
            assert_eq!(is_done, !in_answer, "note {at}, kept: {is_kept}");
            answers += usize::from(in_answer);
            if is_done {
                assert_eq!(started, whole.started, "note {at}, kept: {is_kept}");
                assert_eq!(entries, whole.entries, "note {at}, kept: {is_kept}");
            }
        }
    }
    assert!(answers > 10 && answers < whole.journal_writer);
}

/// Whoever dies next must not be taken for the process that had the answer under way: a front-end
/// may send the same message again.
#[test]
fn a_session_whose_answer_was_sent_before_a_death_has_none_under_way_any_more() {
    let device = Arc::new(Recorder::new(VIRTIO_ID_BLOCK, true, None));
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_read_timeout(Some(TIMEOUT)).unwrap();
    // Note 0: the answer is under way. Note 1: it was sent, before which the process dies.
    let store = Store::new(Some((1, false)));
    let mut front = FrontEnd(ours);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| process(device.clone(), &theirs, &store));
        front.ask("GET_FEATURES", &[], &[]).unwrap();
        assert!(first.join().unwrap(), "it has died");
        assert!(store.state.lock().unwrap().answering.is_some());
        let next = scope.spawn(|| process(device.clone(), &theirs, &store));
        let began = Instant::now();
        while store.state.lock().unwrap().answering.is_some() {
            assert!(began.elapsed() < TIMEOUT, "the next process has not noted that it was sent");
            std::thread::yield_now();
        }
        front.0.shutdown(std::net::Shutdown::Both).unwrap();
        assert!(!next.join().unwrap());
    });
}

/// Runs a session in a process that quiesces while the front-end has sent `rest` and no more; then
/// `goes_on` with it.
fn quiesced(rest: &[u8], goes_on: impl FnOnce(&mut FrontEnd, &UnixStream, &Arc<Store>)) {
    quiesced_after(|_| (), rest, goes_on);
}

/// As [`quiesced`], of a front-end that has done what `first` does before.
fn quiesced_after(
    first: impl FnOnce(&mut FrontEnd),
    rest: &[u8],
    goes_on: impl FnOnce(&mut FrontEnd, &UnixStream, &Arc<Store>),
) {
    let pool = Pool::new(PoolOptions { workers_max: 1, ..PoolOptions::default() });
    let device = Arc::new(Recorder::new(VIRTIO_ID_BLOCK, true, Some(pool)));
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_read_timeout(Some(TIMEOUT)).unwrap();
    let store = Store::new(None);
    let mut front = FrontEnd(ours);
    std::thread::scope(|scope| {
        let (told, tell) = mpsc::channel(1);
        let process = scope.spawn({
            let (device, theirs, store) = (device.clone(), &theirs, store.clone());
            move || process_that_quiesces(&device, theirs, &store, &told)
        });
        first(&mut front);
        front.run().unwrap();
        front.0.write_all(rest).unwrap();
        // Until the process has read it.
        let mut left = [0; 1];
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        let began = Instant::now();
        while rustix::net::recv(&theirs, &mut left, flags).is_ok() {
            assert!(began.elapsed() < TIMEOUT, "the process does not read it");
            std::thread::yield_now();
        }
        let stops = device.stops.load(Ordering::Relaxed);
        drop(tell);
        process.join().unwrap();
        assert_eq!(device.stops.load(Ordering::Relaxed), stops + 2, "both queues have stopped");
    });
    goes_on(&mut front, &theirs, &store);
}

#[test]
fn a_parked_session_stays_connected_and_another_process_goes_on_with_it() {
    quiesced(&[], |front, theirs, store| {
        assert!(!store.state.lock().unwrap().is_forgotten);
        let pool = Pool::new(PoolOptions { workers_max: 1, ..PoolOptions::default() });
        let device = Arc::new(Recorder::new(VIRTIO_ID_BLOCK, true, Some(pool)));
        let config = [[20u32, 3, 0].as_bytes(), &[0; 3]].concat();
        std::thread::scope(|scope| {
            let next = scope.spawn(|| process(device.clone(), theirs, store));
            assert_eq!(front.ask("GET_CONFIG", &config, &[]).unwrap()[12..], [20, 21, 22]);
            front.0.shutdown(std::net::Shutdown::Both).unwrap();
            assert!(!next.join().unwrap());
        });
        let runs = |ring| Asked::Start(ring, 128, 0.into(), true, [true, true, false]);
        let asked = device.asked();
        assert!(asked.contains(&runs(0)) && asked.contains(&runs(1)), "{asked:?}");
        assert!(store.state.lock().unwrap().is_forgotten);
    });
}

/// Two rings of 128 entries, and a region with a place for one of 64.
#[test]
fn a_ring_that_does_not_fit_the_front_ends_region_goes_on_from_one_of_the_session() {
    let file = memory(4096);
    let gives = |front: &mut FrontEnd| {
        let (size, queue_size) = ((16 + 64 * 16_u64).next_multiple_of(64), 64);
        let area = InflightArea { size, queues: 1, queue_size, ..InflightArea::default() };
        front.tell("SET_INFLIGHT_FD", area.as_bytes(), &[file.as_fd()]).unwrap();
    };
    quiesced_after(gives, &[], |front, theirs, store| {
        let own = |(_, kept): &(&u32, &SavedEntry)| {
            let header = kept.entry.bytes.first_chunk().and_then(|bytes| Header::parse(bytes).ok());
            header.is_some_and(|header| header.request == id_of("SET_INFLIGHT_FD"))
        };
        let regions: Vec<_> = {
            let state = store.state.lock().unwrap();
            let entries = state.entries.iter().filter(own);
            entries.map(|(_, kept)| kept.fds[0].try_clone().unwrap()).collect()
        };
        // The front-end's first. Chain 3 is in flight in each: one of them counts.
        assert_eq!(regions.len(), 2);
        for region in &regions {
            rustix::io::pwrite(region, &[1], 16 + 3 * 16).unwrap();
        }
        // Its queues do not run: nobody serves the chain that is owed.
        let device = Arc::new(Recorder::new(VIRTIO_ID_BLOCK, true, None));
        let config = [[20u32, 3, 0].as_bytes(), &[0; 3]].concat();
        let answer = std::thread::scope(|scope| {
            let next = scope.spawn(|| process(device.clone(), theirs, store));
            let answer = front.ask("GET_CONFIG", &config, &[]);
            front.0.shutdown(std::net::Shutdown::Both).unwrap();
            assert!(!next.join().unwrap());
            answer
        });
        assert_eq!(answer.unwrap()[12..], [20, 21, 22]);
        // Chain 3 is owed, and the ring stands behind it.
        let goes_on =
            |ring, base: u16| Asked::Start(ring, 128, base.into(), true, [true, true, false]);
        let asked = device.asked();
        assert!(asked.contains(&goes_on(0, 1)) && asked.contains(&goes_on(1, 0)), "{asked:?}");
    });
}

#[test]
fn a_session_that_is_parked_in_the_middle_of_a_message_ends() {
    let half = [1, 0, 0, 0, 1];
    quiesced(&half, |front, _, store| {
        assert_eq!(front.0.read(&mut [0; 1]).unwrap(), 0, "its connection has ended");
        let began = Instant::now();
        while !store.state.lock().unwrap().is_forgotten {
            assert!(began.elapsed() < TIMEOUT, "the supervisor does not forget it");
            std::thread::yield_now();
        }
    });
}

/// Without its in-flight region nothing says where a ring stands that was served: the base that is
/// noted is from before that.
#[test]
fn a_session_of_which_the_in_flight_region_is_lost_ends() {
    quiesced(&[], |front, theirs, store| {
        // As notes are if no region could be made, for want of memory or of a descriptor.
        let is_region =
            |entry: &Entry| entry.bytes.starts_with(&id_of("SET_INFLIGHT_FD").to_ne_bytes());
        {
            let entries = &mut store.state.lock().unwrap().entries;
            let count = entries.len();
            entries.retain(|_, kept| !is_region(&kept.entry));
            assert_eq!(entries.len(), count - 1);
        }
        let pool = Pool::new(PoolOptions { workers_max: 1, ..PoolOptions::default() });
        let device = Arc::new(Recorder::new(VIRTIO_ID_BLOCK, true, Some(pool)));
        std::thread::scope(|scope| {
            let next = scope.spawn(|| process(device.clone(), theirs, store));
            let ended = front.0.read(&mut [0; 1]);
            let _ = front.0.shutdown(std::net::Shutdown::Both);
            assert!(!next.join().unwrap());
            assert_eq!(ended.unwrap(), 0, "the front-end connects again");
        });
        let is_start = |asked: &Asked| matches!(asked, Asked::Start(..));
        assert!(!device.asked().iter().any(is_start), "no ring runs at a base that is stale");
    });
}
