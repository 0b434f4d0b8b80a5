//! Instructions of a running queue for each request or frame: whole turns, without a thread.
//!
//! `cargo bench -p manyring-device --features bench --bench turn` prints instructions per request
//! or frame; it starts itself under valgrind once for each row with `--once ROW` and collects in
//! `serve` only, after some rounds that warm up. The gate compares these with `turn.baseline`,
//! which `cargo xtask bench-smoke --renew` writes.
//!
//! In each round the driver half makes B chains available and asks for a call, then the queue takes
//! one turn: that is what a row `NAME/B` counts. It contains everything between the worker's call
//! of `turn` and its return: pop, walk and translate, parse, the disk or port, push, publish, the
//! counters, one clock read of a block queue, and one write to the eventfd of the call. A turn
//! serves the B chains of its round, so what it does once is divided by B; a receiveq also looks in
//! vain for another buffer. `blk-null/qd1` is a kick and its one request: the event of the kick,
//! the turn that serves it, the turn that finds nothing, and the settling of the queue until it
//! waits for the next kick; not the sleep.
//!
//! `vm/32` and `vmref/32` are frames of 64 and 1500 bytes from one guest to another on a switch: a
//! turn of the transmitq and one of the receiveq, and for lent frames another turn of the
//! transmitq, which returns them. In the rows `beside-..` the sender sends `B` more frames to a
//! third guest, who receives them or is a bad receiver: its own turns are not counted. Beside a bad
//! receiver a frame of the two others may cost a little more than beside a good one.
//!
//! A count contains what the C library does: its `memcpy` in `blk-memory/32`, half of that row, and
//! the way to the clock, which is a system call under valgrind. It contains nothing of the kernel,
//! of the driver half, and of the worker around the queue: its list of hot queues, the guests'
//! shares, its io_uring.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a bench ends where it fails")]

#[path = "../../queue/benches/callgrind/mod.rs"]
mod callgrind;
#[path = "../../queue/benches/guest/mod.rs"]
mod guest;
mod switch;
mod xen;

use guest::guest;
use manyring_backend::blk::Disk;
use manyring_backend::blk::memory::MemoryDisk;
use manyring_backend::blk::null::NullDisk;
use manyring_backend::net::null::NullPort;
use manyring_backend::net::tap::{QueueLength, TapOptions, TapPort, TapSource};
use manyring_device::bench::SoloRunning;
use manyring_device::blk::blkif::Attachment;
use manyring_engine::{Activation, Call, Event, Kick};
use manyring_memory::{GuestMemory, Mapping};
use manyring_queue::{DeviceQueue, DriverQueue, QueueConfig};
use manyring_wire::xen::blkif::Abi;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::thread::UnshareFlags;
use std::hint::black_box;
use std::sync::Arc;
use switch::Third;
use tokio::sync::mpsc;

/// Requests or frames of a run that are counted, and those before them.
const ITEMS: usize = 4096;
const WARM_ITEMS: usize = 1024;
/// Where headers, status bytes and data of the chains lie, and how much data each has.
const HEADERS: u64 = 0x8000;
const STATUS: u64 = 0xc000;
const DATA: u64 = 0x10_0000;
const BLOCK: u32 = 4096;
const DISK_SIZE: u64 = 1 << 20;
/// Bytes of a frame, of the header before it, and of a receive buffer.
const FRAME: u32 = 64;
const HEADER: u32 = 12;
const BUFFER: u32 = 2048;

/// The backend that serves the queue, and the load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Reads of 4 KiB from a disk that does nothing.
    BlkNull,
    /// Reads of 4 KiB from a disk that copies from memory.
    BlkMemory,
    /// Reads of 4 KiB from a disk that does nothing, through a Xen ring that has a journal, into
    /// pages whose grants stay mapped.
    BlkifNull,
    /// Frames of 64 bytes to a port that forgets them.
    Tx,
    /// Datagrams of 64 bytes of one flow, through a tap, which get there as one.
    TxMerged,
    /// Frames of 64 bytes from a port that always has one.
    Rx,
}

/// A row: its name, what serves the queue, how many chains a turn finds, and whether it then
/// settles until the next kick.
type Row = (&'static str, Kind, usize, bool);

const ROWS: [Row; 13] = [
    ("blk-null/1", Kind::BlkNull, 1, false),
    ("blk-null/8", Kind::BlkNull, 8, false),
    ("blk-null/32", Kind::BlkNull, 32, false),
    ("blk-null/qd1", Kind::BlkNull, 1, true),
    ("blk-memory/32", Kind::BlkMemory, 32, false),
    ("blkif-null/1", Kind::BlkifNull, 1, false),
    ("blkif-null/8", Kind::BlkifNull, 8, false),
    ("blkif-null/32", Kind::BlkifNull, 32, false),
    ("tx/1", Kind::Tx, 1, false),
    ("tx/32", Kind::Tx, 32, false),
    ("tx-merged/64", Kind::TxMerged, 64, false),
    ("rx/1", Kind::Rx, 1, false),
    ("rx/32", Kind::Rx, 32, false),
];

/// The guest's half.
enum Guest {
    Virtio(DriverQueue),
    Xen(xen::Front),
}

struct Pair {
    kind: Kind,
    guest: Guest,
    running: SoloRunning,
    kick: OwnedFd,
    _events: mpsc::Receiver<Event>,
}

fn doorbell() -> OwnedFd {
    eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).unwrap()
}

/// A ring of the guest's, as its device gets it, and what happens there.
fn activation(
    config: QueueConfig,
    memory: Arc<GuestMemory>,
    kick: &OwnedFd,
) -> (Activation, mpsc::Receiver<Event>) {
    let (sender, events) = mpsc::channel(1);
    let activation = Activation {
        index: 0,
        queue: DeviceQueue::new(config, memory).unwrap(),
        addresses: config.addresses,
        kick: Some(Kick::new(kick.try_clone().unwrap()).unwrap()),
        call: Some(Arc::new(Call::new(doorbell()).unwrap())),
        err: None,
        enabled: true,
        features: 0,
        events: sender,
    };
    (activation, events)
}

impl Pair {
    fn new(kind: Kind) -> Self {
        let kick = doorbell();
        if kind == Kind::BlkifNull {
            let (sender, events) = mpsc::channel(1);
            let (front, mapper) = xen::Front::new();
            let attachment = Attachment {
                index: 0,
                abi: Abi::Native,
                ring_refs: vec![xen::RING],
                persistent: true,
                indirect_segments_max: 256,
                journal: Some(memfd_create("journal", MemfdFlags::CLOEXEC).unwrap()),
                takeover: false,
                mapper,
                kick: Kick::new(kick.try_clone().unwrap()).unwrap(),
                call: Arc::new(Call::new(doorbell()).unwrap()),
                events: sender,
            };
            let disk = Arc::new(NullDisk::new(DISK_SIZE));
            let running = SoloRunning::xen_blk(attachment, disk).unwrap();
            return Self { kind, guest: Guest::Xen(front), running, kick, _events: events };
        }
        let (mapping, memory, config) = guest();
        write_headers(&mapping);
        if kind == Kind::TxMerged {
            for n in 0..64 {
                let at = usize::try_from(DATA + n * u64::from(BLOCK)).unwrap();
                mapping.slice(at, 76).unwrap().write_from(&datagram());
            }
        }
        let driver = DriverQueue::new(config, &memory).unwrap();
        let (activation, events) = activation(config, memory, &kick);
        let port = NullPort::new(1, FRAME as usize);
        let running = match kind {
            Kind::BlkNull | Kind::BlkifNull => {
                SoloRunning::blk(activation, Arc::new(NullDisk::new(DISK_SIZE)))
            }
            Kind::BlkMemory => {
                let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new(DISK_SIZE).unwrap());
                SoloRunning::blk(activation, disk)
            }
            Kind::Tx => SoloRunning::tx(activation, &port),
            Kind::TxMerged => SoloRunning::tx(activation, &tap()),
            Kind::Rx => SoloRunning::rx(activation, &port),
        };
        let (running, guest) = (running.unwrap(), Guest::Virtio(driver));
        Self { kind, guest, running, kick, _events: events }
    }

    /// The guest's part: takes what is used, makes `batch` chains available, asks for a call. True
    /// if the device wants a kick.
    fn fill(&mut self, batch: usize) -> bool {
        let driver = match &mut self.guest {
            Guest::Virtio(driver) => driver,
            Guest::Xen(front) => return front.fill(batch as u64),
        };
        driver.enable_notifications();
        for n in 0..batch as u64 {
            let data = DATA + n * u64::from(BLOCK);
            let added = match self.kind {
                Kind::BlkNull | Kind::BlkMemory | Kind::BlkifNull => {
                    let header = (HEADERS + n * 16, 16);
                    driver.add(&[header], &[(data, BLOCK), (STATUS + n, 1)])
                }
                Kind::Tx | Kind::TxMerged => driver.add(&[(data, HEADER + FRAME)], &[]),
                Kind::Rx => driver.add(&[], &[(data, BUFFER)]),
            };
            added.expect("the ring is full");
        }
        driver.publish()
    }

    /// Takes what the device has given back. Returns how many.
    fn take_all(&mut self) -> usize {
        match &mut self.guest {
            Guest::Virtio(driver) => std::iter::from_fn(|| driver.take_used()).count(),
            Guest::Xen(front) => front.take_all(),
        }
    }

    /// The device's part: what is counted.
    #[inline(never)]
    fn serve(&mut self, settles: bool) -> bool {
        self.take_turn(settles)
    }

    /// As [`Self::serve`], under another symbol, which is not counted. `black_box` keeps the
    /// compiler from merging the two functions.
    #[inline(never)]
    fn warm_up(&mut self, settles: bool) -> bool {
        self.take_turn(black_box(settles))
    }

    #[inline(always)]
    fn take_turn(&mut self, settles: bool) -> bool {
        black_box(if settles { self.running.serve_kick() } else { self.running.turn() })
    }

    /// Makes one round of requests, and calls `serve` until the device has served all of them.
    fn round(&mut self, batch: usize, settles: bool, serve: fn(&mut Self, bool) -> bool) {
        let wants_kick = self.fill(batch);
        if settles {
            assert!(wants_kick, "the queue has settled and asks for no kick");
            rustix::io::write(&self.kick, &1u64.to_ne_bytes()).unwrap();
            self.running.sleep();
        }
        let mut used = 0;
        while used < batch {
            assert!(serve(self, settles), "no work, or the queue did not settle");
            used += self.take_all();
        }
        assert_eq!(used, batch, "not every chain was used");
    }
}

/// Headers of virtio-blk in guest memory, each for a read of another block. The headers of frames
/// are zeroes.
fn write_headers(mapping: &Mapping) {
    for n in 0..DISK_SIZE / u64::from(BLOCK) {
        let sector = n * u64::from(BLOCK) / 512;
        let at = usize::try_from(HEADERS + n * 16).unwrap();
        let slice = mapping.slice(at, 16).unwrap();
        slice.write_from(&[&[0; 8][..], &sector.to_le_bytes()].concat());
    }
}

/// Serves the rounds of a row and does nothing else.
fn once((_, kind, batch, settles): Row) {
    let mut pair = Pair::new(kind);
    for _ in 0..WARM_ITEMS / batch {
        pair.round(batch, settles, Pair::warm_up);
    }
    for _ in 0..ITEMS / batch {
        pair.round(batch, settles, Pair::serve);
    }
}

/// Rows of frames from guest to guest: the name, bytes of a frame, and a third guest.
const CABLES: [(&str, u32, Option<Third>); 6] = [
    ("vm/32", 64, None),
    ("vmref/32", 1500, None),
    (BESIDE, 1500, Some(Third::Serves)),
    ("beside-stalls/32", 1500, Some(Third::Stalls)),
    ("beside-lies/32", 1500, Some(Third::Lies)),
    ("beside-killed/32", 1500, Some(Third::IsKilled)),
];
/// The row with which those of bad receivers are compared, and how fast two guests must be beside
/// one of those, by instructions.
const BESIDE: &str = "beside-serves/32";
const LEAST: f64 = 0.97;
/// Frames of a round of these.
const CABLE_BATCH: usize = 32;

/// As [`once`], for frames from guest to guest.
fn once_by_cable(len: u32, third: Option<Third>) {
    let mut cable = switch::Cable::new(len, third);
    // A receiver that takes nothing is found out first.
    (0..2 * WARM_ITEMS / CABLE_BATCH).for_each(|_| cable.round(CABLE_BATCH, false));
    (0..ITEMS / CABLE_BATCH).for_each(|_| cable.round(CABLE_BATCH, true));
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [once_word, name] = &arguments[..]
        && once_word == "--once"
    {
        if let Some((_, len, third)) = CABLES.iter().find(|row| row.0 == name) {
            return once_by_cable(*len, *third);
        }
        let row = ROWS.iter().find(|row| row.0 == name).expect("ROW is one of those printed");
        return once(*row);
    }
    println!("# running queue: instructions per request or frame");
    let row = |name, symbol| {
        let count = callgrind::count(symbol, &["--once", name]);
        println!("{name:16} {:8.1}", count / ITEMS as f64);
        count
    };
    for (name, ..) in ROWS {
        row(name, "*Pair::serve*");
    }
    let counts = CABLES.map(|(name, ..)| row(name, "*Cable::serve*"));
    let served = counts[2];
    for ((name, ..), count) in CABLES.iter().zip(counts).skip(3) {
        let speed = served / count;
        println!("# {name}: {speed:.2} of the speed of {BESIDE}");
        assert!(speed >= LEAST, "{name}: a bad receiver costs its neighbours too much");
    }
}

/// A tap of a network namespace that ends with this process.
#[allow(deprecated, reason = "unsafe only where file descriptors are unshared, which are not")]
fn tap() -> TapPort {
    rustix::thread::unshare(UnshareFlags::NEWNET).expect("this row needs root");
    let source = TapSource::Name { name: "tap0".into(), must_exist: false };
    let options = TapOptions {
        source,
        queue_pairs: 1,
        sndbuf: None,
        txqueuelen: QueueLength::Host,
        merge: true,
        steer: false,
        mtu: None,
        bridge: None,
        up: Some(true),
    };
    TapPort::open(options).expect("a tap")
}

/// Its header, which leaves the checksum to the host, and a datagram over IPv4 to nobody.
fn datagram() -> Vec<u8> {
    let sum = |bytes: &[u8]| {
        let words = bytes.as_chunks::<2>().0.iter().map(|word| u16::from_be_bytes(*word));
        let sum = words.map(u32::from).sum::<u32>();
        u16::try_from((sum & 0xffff) + (sum >> 16)).expect("few words")
    };
    let header = [1, 0, 0, 0, 0, 0, 34, 0, 6, 0, 0, 0];
    let ethernet = [255, 255, 255, 255, 255, 255, 2, 0, 0, 0, 0, 1, 8, 0];
    // 50 bytes, no fragment, 64 hops, UDP, and addresses for documentation.
    let mut ip = [[0x45, 0, 0, 50, 0, 0, 0x40, 0, 64, 17], [0, 0, 192, 0, 2, 1, 192, 0, 2, 2]];
    let checksum = !sum(ip.as_flattened());
    ip[1][..2].copy_from_slice(&checksum.to_be_bytes());
    // The host's part of the checksum is that of the datagram itself; this is that of what IP says.
    let partial = sum(&[&ip[1][2..], &[0, 17, 0, 30]].concat()).to_be_bytes();
    let udp = [&[0, 7, 0, 9, 0, 30][..], &partial, &[0x5a; 22]].concat();
    [&header[..], &ethernet, ip.as_flattened(), &udp].concat()
}
