//! A back-end whose process ends under load, and the next one, which takes its ring over.

mod full_host;

use crate::guest::{ENTRIES, SECTORS, TIMEOUT, World, memory, pattern, until, usual};
use manyring_backend::blk::fault::{FaultDisk, FaultPlan};
use manyring_backend::blk::file::FileDisk;
use manyring_backend::blk::uring::UringDisk;
use manyring_backend::blk::{Disk, Image, ImageOptions};
use manyring_device::StartError;
use manyring_device::blk::blkif::{Attachment, XenBlkDevice};
use manyring_driver::wire::xen::blkif::BlkifStatus;
use manyring_driver::{BlkfrontOptions, BlkfrontQueue, SimXen, XenCalls, XenDomain, XenOp};
use manyring_engine::{Call, Kick, Polling, Pool, PoolOptions, QueueHandle};
use manyring_memory::GrantMapper;
use manyring_queue::QueueError;
use manyring_queue::blkif::JournalError;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;
use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use tokio::sync::mpsc;

/// A guest whose back-ends come and go.
struct Guest {
    queue: BlkfrontQueue,
    front: BlkfrontOptions,
    mapper: GrantMapper,
    /// The event channel, whose ends outlive a back-end.
    kick: OwnedFd,
    call: OwnedFd,
    journal: File,
}

/// A back-end that serves a guest. Its workers end with it, whatever they have in flight.
struct Back {
    device: XenBlkDevice,
    pool: Arc<Pool>,
    handle: Option<QueueHandle>,
}

fn journal_at(path: &Path) -> File {
    File::options().read(true).write(true).create(true).truncate(false).open(path).unwrap()
}

impl Guest {
    fn new(world: &World) -> Self {
        let front = BlkfrontOptions::default();
        let pages = BlkfrontQueue::pages(&front) + 64;
        let domain = XenDomain::create(world.xen.socket(), 1, pages, ENTRIES).unwrap();
        let queue = BlkfrontQueue::new(&Arc::new(domain), 0, &front).unwrap();
        let channel = world.calls.bind(1, queue.nodes().event_channel).unwrap();
        let (kick, call) = channel.into_fds();
        let mapper = GrantMapper::Simulated(Arc::new(world.calls.attach(1).unwrap()));
        let journal = tempfile::tempfile().unwrap();
        Self { queue, front, mapper, kick, call, journal }
    }

    fn attachment(&self, takeover: bool) -> Attachment {
        Attachment {
            index: 0,
            abi: self.front.abi,
            ring_refs: self.queue.nodes().ring_refs,
            persistent: self.front.persistent,
            indirect_segments_max: 256,
            journal: Some(self.journal.try_clone().unwrap().into()),
            takeover,
            mapper: self.mapper.clone(),
            kick: Kick::new(self.kick.try_clone().unwrap()).unwrap(),
            call: Arc::new(Call::new(self.call.try_clone().unwrap()).unwrap()),
            events: mpsc::channel(8).0,
        }
    }
}

impl Back {
    fn start(disk: Arc<dyn Disk>, attachment: Attachment) -> Result<Self, StartError> {
        let options = PoolOptions { workers_max: 1, polling: Polling::NEVER, uring: false };
        let pool = Pool::new(options);
        let device = XenBlkDevice::new(usual(), disk, pool.clone());
        let handle = Some(device.start(attachment)?);
        Ok(Self { device, pool, handle })
    }

    fn end(&mut self) {
        self.pool.quit();
        let stats = self.device.stats(0).unwrap();
        until("the worker has ended", || stats.running.value() == 0);
        self.handle = None;
    }
}

impl Drop for Back {
    fn drop(&mut self) {
        self.pool.quit();
    }
}

/// An eventfd that nobody else has.
fn nobodys() -> OwnedFd {
    eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).unwrap()
}

/// A disk that never answers every n-th request, on another one.
fn never_answering(every: u64, disk: Arc<dyn Disk>) -> Arc<dyn Disk> {
    Arc::new(FaultDisk::new(disk, FaultPlan { hold_every: every, ..FaultPlan::default() }))
}

#[test]
fn requests_of_a_back_end_that_ended_are_served_by_the_next_one_and_a_barrier_after_them() {
    let world = World::new();
    let (disk, mut guest) = (memory(), Guest::new(&world));
    let mut first = Back::start(never_answering(3, disk.clone()), guest.attachment(false)).unwrap();
    // The last but two need a page of segments each.
    let data: Vec<_> = (0..8).map(|n| pattern(if n < 6 { 4096 } else { 60 << 10 }, n)).collect();
    for (n, data) in data.iter().enumerate() {
        let sector = n as u64 * 128;
        guest.queue.submit(XenOp::Write { sector, data }).unwrap().unwrap();
    }
    // It waits for those that are never answered, the third among them, which it overwrites.
    let last = pattern(2048, 99);
    guest.queue.submit(XenOp::Barrier { sector: 256, data: &last }).unwrap().unwrap();
    guest.queue.submit(XenOp::Discard { sector: 0, count: 8, secure: false }).unwrap().unwrap();
    guest.queue.publish();
    for _ in 0..6 {
        assert_eq!(guest.queue.wait(TIMEOUT).unwrap().status, BlkifStatus::Okay);
    }
    let stats = first.device.stats(0).unwrap();
    until("two writes and the barrier are in flight", || stats.in_flight.value() == 3);
    first.end();
    let mut next = Back::start(disk.clone(), guest.attachment(true)).unwrap();
    for _ in 0..4 {
        assert_eq!(guest.queue.wait(TIMEOUT).unwrap().status, BlkifStatus::Okay);
    }
    let stats = next.device.stats(0).unwrap();
    assert_eq!((stats.writes.value(), stats.discards.value()), (3, 1), "and no other again");
    for (n, data) in data.iter().enumerate() {
        let mut read = vec![0; data.len()];
        guest.queue.read(n as u64 * 128, &mut read).unwrap();
        let mut expected = data.clone();
        match n {
            0 => expected[..4096].fill(0),
            2 => expected[..2048].copy_from_slice(&last),
            _ => {}
        }
        assert!(read == expected, "write {n}");
    }
    next.end();
}

#[test]
fn a_front_end_that_missed_its_notification_or_whose_kick_was_lost_is_served() {
    let world = World::new();
    let (disk, mut guest) = (memory(), Guest::new(&world));
    let mut attachment = guest.attachment(false);
    attachment.call = Arc::new(Call::new(nobodys()).unwrap());
    let mut first = Back::start(disk.clone(), attachment).unwrap();
    guest.queue.submit(XenOp::Read { sector: 0, len: 512 }).unwrap();
    guest.queue.publish();
    let stats = first.device.stats(0).unwrap();
    until("a notification that nobody hears", || stats.calls.value() == 1);
    first.end();
    assert_eq!(guest.queue.in_flight(), 1);
    let mut next = Back::start(disk.clone(), guest.attachment(true)).unwrap();
    guest.queue.channel().wait(TIMEOUT).expect("a notification");
    assert_eq!(guest.queue.take().unwrap().unwrap().status, BlkifStatus::Okay);
    next.end();
    // A request that is published and kicked while no process serves the ring is found later.
    guest.queue.submit(XenOp::Read { sector: 0, len: 512 }).unwrap();
    guest.queue.publish();
    let mut attachment = guest.attachment(true);
    attachment.kick = Kick::new(nobodys()).unwrap();
    let mut last = Back::start(disk, attachment).unwrap();
    assert_eq!(guest.queue.wait(TIMEOUT).unwrap().status, BlkifStatus::Okay);
    last.end();
}

#[test]
fn a_ring_whose_requests_are_not_written_down_is_not_taken_over_and_one_without_any_is() {
    let world = World::new();
    let (disk, mut guest) = (memory(), Guest::new(&world));
    let held = never_answering(2, disk.clone());
    let mut first = Back::start(held, guest.attachment(false)).unwrap();
    for sector in 0..2 {
        guest.queue.submit(XenOp::Read { sector, len: 512 }).unwrap();
    }
    guest.queue.publish();
    guest.queue.wait(TIMEOUT).unwrap();
    first.end();
    let refused = |attachment| match Back::start(disk.clone(), attachment).map(drop) {
        Err(StartError::Queue(QueueError::Journal(error))) => error,
        other => panic!("{other:?}"),
    };
    let without = Attachment { journal: None, ..guest.attachment(true) };
    assert_eq!(refused(without), JournalError::Missing);
    let mut head = [0; 4];
    guest.journal.read_exact_at(&mut head, 0).unwrap();
    guest.journal.write_all_at(b"else", 0).unwrap();
    assert_eq!(refused(guest.attachment(true)), JournalError::Foreign);
    guest.journal.write_all_at(&head, 0).unwrap();
    // Whole again.
    let mut next = Back::start(disk.clone(), guest.attachment(true)).unwrap();
    assert_eq!(guest.queue.wait(TIMEOUT).unwrap().status, BlkifStatus::Okay);
    next.end();
    // Cut off, and nothing is left to be answered.
    guest.journal.set_len(100).unwrap();
    let mut last = Back::start(disk.clone(), guest.attachment(true)).unwrap();
    guest.queue.read(0, &mut [0; 512]).unwrap();
    last.end();
}

#[test]
fn a_journal_that_cannot_be_one_is_gone_without_unless_requests_wait_for_a_takeover() {
    let world = World::new();
    let mut guest = Guest::new(&world);
    let no_journal = || Some(File::open("/dev/null").unwrap().into());
    for takeover in [false, true] {
        let attachment = Attachment { journal: no_journal(), ..guest.attachment(takeover) };
        let mut served = Back::start(memory(), attachment).unwrap();
        guest.queue.read(0, &mut [0; 512]).unwrap();
        served.end();
    }
    guest.queue.submit(XenOp::Read { sector: 0, len: 512 }).unwrap().unwrap();
    guest.queue.publish();
    let attachment = Attachment { journal: no_journal(), ..guest.attachment(true) };
    let refused = Back::start(memory(), attachment).map(drop);
    assert!(matches!(refused, Err(StartError::JournalSpace(_))), "{refused:?}");
}

/// Names to the process that is the back-end of a test where its guest and its files are.
const SOCKET: &str = "MANYRING_TEST_XEN";
const FOLDER: &str = "MANYRING_TEST_FOLDER";
const RING: &str = "MANYRING_TEST_RING";
const KIND: &str = "MANYRING_TEST_KIND";

/// How the guest of a round drives, and on which disk.
#[derive(Clone, Copy)]
struct Round {
    persistent: bool,
    uring: bool,
    direct: bool,
}

const ROUNDS: [Round; 3] = [
    Round { persistent: true, uring: true, direct: false },
    Round { persistent: false, uring: true, direct: true },
    Round { persistent: false, uring: false, direct: false },
];

/// The back-end of the test below, as a process of its own: serves until it is killed.
fn serve() {
    let variable = |name| std::env::var(name).unwrap();
    let (socket, folder) = (variable(SOCKET), variable(FOLDER));
    let (socket, folder) = (Path::new(&socket), Path::new(&folder));
    let (ring, kind) = (variable(RING), variable(KIND));
    let numbers: Vec<u32> = ring.split(' ').map(|number| number.parse().unwrap()).collect();
    let (port, ring_refs) = numbers.split_first().unwrap();
    let round = ROUNDS[kind.parse::<usize>().unwrap()];
    let calls = XenCalls::connect(socket).unwrap();
    // The server may not have heard yet that the former process is gone.
    let mut channel = None;
    until("the port is free", || {
        channel = calls.bind(1, *port).ok();
        channel.is_some()
    });
    let (kick, call) = channel.unwrap().into_fds();
    let options = ImageOptions { direct: round.direct, ..ImageOptions::default() };
    // The kernel closes what the former process's io_uring held some time after its end.
    let mut image = None;
    until("the image is free", || {
        image = Image::open(&folder.join("disk"), options).ok();
        image.is_some()
    });
    let image = image.unwrap();
    let disk: Arc<dyn Disk> = if round.uring {
        Arc::new(UringDisk::new(image).unwrap())
    } else {
        Arc::new(FileDisk::new(image))
    };
    let options = PoolOptions { workers_max: 1, polling: Polling::NEVER, uring: round.uring };
    let device = XenBlkDevice::new(usual(), disk, Pool::new(options));
    let attachment = Attachment {
        index: 0,
        abi: BlkfrontOptions::default().abi,
        ring_refs: ring_refs.to_vec(),
        persistent: round.persistent,
        indirect_segments_max: 256,
        // The first one finds a ring that nobody has served.
        journal: Some(journal_at(&folder.join("journal")).into()),
        takeover: true,
        mapper: GrantMapper::Simulated(Arc::new(calls.attach(1).unwrap())),
        kick: Kick::new(kick).unwrap(),
        call: Arc::new(Call::new(call).unwrap()),
        events: mpsc::channel(8).0,
    };
    let _handle = device.start(attachment).unwrap();
    loop {
        std::thread::park();
    }
}

/// A process that is killed when it is dropped.
struct Process(Child);

impl Process {
    fn start(folder: &Path, xen: &SimXen, queue: &BlkfrontQueue, kind: usize) -> Self {
        let nodes = queue.nodes();
        let numbers = std::iter::once(nodes.event_channel).chain(nodes.ring_refs);
        let numbers: Vec<String> = numbers.map(|number| number.to_string()).collect();
        let mut child = Command::new(std::env::current_exe().unwrap());
        let name = "takeover::a_back_end_that_is_killed_under_load_loses_and_doubles_nothing";
        child.args(["--exact", name, "--nocapture"]);
        child.env(SOCKET, xen.socket()).env(FOLDER, folder);
        child.env(RING, numbers.join(" ")).env(KIND, kind.to_string());
        Self(child.stdout(Stdio::null()).spawn().unwrap())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Sectors that one request of the load at a time writes and reads.
const AREA: u64 = 32;
const AREAS: u64 = SECTORS / AREA;

/// The request of the guest for an area that is in flight.
#[derive(Clone)]
enum Asked {
    Read(usize),
    Write(Vec<u8>),
    Other,
}

/// A load that knows what it must read.
struct Load {
    queue: BlkfrontQueue,
    /// By area: what it holds.
    holds: Vec<Vec<u8>>,
    in_flight: HashMap<u16, (u64, Asked)>,
    next: u64,
}

impl Load {
    fn new(queue: BlkfrontQueue) -> Self {
        let holds = vec![vec![0; AREA as usize * 512]; AREAS as usize];
        Self { queue, holds, in_flight: HashMap::new(), next: 0 }
    }

    /// Asks for as much as the ring holds, but for some places.
    fn submit(&mut self) {
        while self.in_flight.len() < 28 {
            self.next += 1;
            let (n, is_taken) =
                (self.next, |area| self.in_flight.values().any(|(taken, _)| *taken == area));
            let area = n * 37 % AREAS;
            if is_taken(area) {
                continue;
            }
            // In each area from its start on: short requests, and some of all of it, whose
            // segments lie in a page.
            let len = if n % 3 == 0 { AREA as usize * 512 } else { 512 * (1 + n as usize % 24) };
            let (sector, data) = (area * AREA, pattern(len, n as u8));
            let (op, asked) = match n % 16 {
                0 => (XenOp::Flush, Asked::Other),
                1 => (
                    XenOp::Barrier { sector, data: &data[..512] },
                    Asked::Write(data[..512].into()),
                ),
                2 => {
                    let zeroes = Asked::Write(vec![0; 4096]);
                    (XenOp::Discard { sector, count: 8, secure: false }, zeroes)
                }
                3 => (
                    XenOp::FlushWrite { sector, data: &data[..512] },
                    Asked::Write(data[..512].into()),
                ),
                4..10 => (XenOp::Write { sector, data: &data }, Asked::Write(data.clone())),
                _ => (XenOp::Read { sector, len }, Asked::Read(len)),
            };
            let Some(tag) = self.queue.submit(op).unwrap() else { break };
            self.in_flight.insert(tag, (area, asked));
        }
        self.queue.publish();
    }

    fn take(&mut self) {
        let done = self.queue.wait(TIMEOUT).unwrap();
        let (area, asked) = self.in_flight.remove(&done.tag).unwrap();
        assert_eq!(done.status, BlkifStatus::Okay);
        let holds = &mut self.holds[area as usize];
        match asked {
            Asked::Write(data) => holds[..data.len()].copy_from_slice(&data),
            Asked::Read(len) => {
                let mut read = vec![0; len];
                self.queue.read_data(done.tag, &mut read).unwrap();
                assert!(read == holds[..len], "area {area}");
            }
            Asked::Other => {}
        }
    }

    fn finish(&mut self) {
        while !self.in_flight.is_empty() {
            self.take();
        }
        for (area, holds) in self.holds.iter().enumerate() {
            let mut read = vec![0; holds.len()];
            self.queue.read(area as u64 * AREA, &mut read).unwrap();
            assert!(read == *holds, "area {area}");
        }
    }
}

/// Requests that are taken and not answered, as the head of the journal says.
fn owed(folder: &Path) -> u64 {
    let bytes = std::fs::read(folder.join("journal")).unwrap_or_default();
    let count =
        |at| bytes.get(at..at + 8).map(|count| u64::from_le_bytes(count.try_into().unwrap()));
    count(24).zip(count(32)).map_or(0, |(taken, published)| taken.saturating_sub(published))
}

#[test]
fn a_back_end_that_is_killed_under_load_loses_and_doubles_nothing() {
    if std::env::var_os(SOCKET).is_some() {
        return serve();
    }
    for (kind, round) in ROUNDS.into_iter().enumerate() {
        let folder = tempfile::tempdir().unwrap();
        let xen = SimXen::start(&folder.path().join("xenstored")).unwrap();
        File::create(folder.path().join("disk")).unwrap().set_len(SECTORS * 512).unwrap();
        let front = BlkfrontOptions { persistent: round.persistent, ..Default::default() };
        let pages = BlkfrontQueue::pages(&front) + 64;
        let domain = Arc::new(XenDomain::create(xen.socket(), 1, pages, ENTRIES).unwrap());
        let mut load = Load::new(BlkfrontQueue::new(&domain, 0, &front).unwrap());
        let mut left_behind = 0;
        for kill in 0..6_u64 {
            let back = Process::start(folder.path(), &xen, &load.queue, kind);
            for _ in 0..20 + kill * 23 {
                load.submit();
                load.take();
            }
            load.submit();
            drop(back);
            left_behind += owed(folder.path());
        }
        let back = Process::start(folder.path(), &xen, &load.queue, kind);
        load.finish();
        drop(back);
        assert!(left_behind > 0, "each was killed without a request");
        until("nothing of it is mapped", || load.queue.end_grants() == 0);
    }
}
