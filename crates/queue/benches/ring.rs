//! The device half's cost of a chain, by shape and batch: pop, walk, push, publish, ask.
//!
//! `cargo bench -p manyring-queue --bench ring` prints ns per chain: median of the rounds, and the
//! spread from the first to the third quartile. `-- --callgrind` prints instructions per chain
//! instead, which are the same on every run: it starts itself under valgrind once for each row
//! `SHAPE/BATCH` with `--once SHAPE BATCH ROUNDS` and collects in `serve` only. The gate compares
//! these with `ring.baseline`, which `cargo xtask bench-smoke --renew` writes.
//!
//! `-- --apart` prints ns per chain with each half on a thread of its own, which both look for work
//! all the time: the cost of the cache lines that go to and fro between two CPUs. It wants two idle
//! CPUs. The driver half keeps the row's number of chains of two descriptors in flight; with one, a
//! row is the way there and back.
//!
//! A count contains the device half, from pop to the question whether the driver wants a call, and
//! nothing of the driver half. Of the C library it has copies of a few bytes at most.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a bench ends where it fails")]
#![cfg(not(loom))]

mod callgrind;
mod guest;

use guest::{RING_SIZE, guest};
use manyring_memory::GuestMemory;
use manyring_queue::Base;
use manyring_queue::{Batch, Chains, DriverQueue, IndirectTable, QueueConfig, packed, split};
use manyring_wire::virtqueue::DESC_ALIGN;
use std::hint::black_box;
use std::time::Instant;

const BATCHES: [usize; 4] = [1, 8, 32, 64];
const ROUNDS: usize = 400;
/// Where the buffers of a chain lie, and the indirect tables.
const BUFFERS: u64 = 0x8000;
const TABLES: u64 = 0x10_0000;

/// The descriptors of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
    /// Header and data.
    Two,
    /// Header, data, status.
    Three,
    /// Header, data, status in an indirect table.
    Indirect,
}

impl Shape {
    const ALL: [(Self, &str); 3] =
        [(Self::Two, "two"), (Self::Three, "three"), (Self::Indirect, "indirect")];

    /// Chains that fill the ring.
    fn chains(self) -> usize {
        usize::from(RING_SIZE)
            / match self {
                Self::Two => 2,
                Self::Three => 3,
                Self::Indirect => 1,
            }
    }
}

struct Pair<D> {
    /// None once a thread of its own has it.
    driver: Option<DriverQueue>,
    device: D,
    tables: Vec<IndirectTable>,
    batch: Batch,
}

/// Opens a ring of either format, once: the counted code is compiled for one format.
fn serve_rounds(is_packed: bool, mut round: impl FnMut(&mut dyn Serves)) {
    let (_, memory, mut config) = guest();
    config.features.packed = is_packed;
    let device = memory.clone();
    if is_packed {
        config.base = Base::packed_start();
        let device = packed::PackedDeviceHalf::new(config, device).unwrap();
        round(&mut Pair::new(config, &memory, device));
    } else {
        let device = split::SplitDeviceHalf::new(config, device).unwrap();
        round(&mut Pair::new(config, &memory, device));
    }
}

/// A pair whose ring is of either format.
trait Serves {
    fn fill(&mut self, shape: Shape);
    fn serve(&mut self, batch: usize) -> usize;
    /// The driver half, which a thread of its own may take.
    fn take_driver(&mut self) -> DriverQueue;
}

impl<D: Chains> Serves for Pair<D> {
    fn fill(&mut self, shape: Shape) {
        self.fill_ring(shape);
    }

    fn serve(&mut self, batch: usize) -> usize {
        self.serve_ring(batch)
    }

    fn take_driver(&mut self) -> DriverQueue {
        self.driver.take().expect("it is here")
    }
}

impl<D: Chains> Pair<D> {
    fn new(config: QueueConfig, memory: &GuestMemory, device: D) -> Self {
        let table = |n: u64| {
            let addr = TABLES + n * 48;
            IndirectTable { addr, words: memory.words(addr, 48, DESC_ALIGN).unwrap() }
        };
        Self {
            driver: Some(DriverQueue::new(config, memory).unwrap()),
            device,
            tables: (0..u64::from(RING_SIZE)).map(table).collect(),
            batch: Batch::new(),
        }
    }

    /// The driver's part: takes the used chains, fills the ring.
    fn fill_ring(&mut self, shape: Shape) {
        let driver = self.driver.as_mut().expect("it is here");
        while driver.take_used().is_some() {}
        for n in 0..shape.chains() {
            let at = BUFFERS + 0x1000 * (n as u64 % 64);
            let (header, data, status) = ((at, 16), (at + 0x200, 0x800), (at + 0x100, 1));
            let head = match shape {
                Shape::Two => driver.add(&[header], &[data]),
                Shape::Three => driver.add(&[header], &[data, status]),
                Shape::Indirect => driver.add_indirect(&[header], &[data, status], &self.tables[n]),
            };
            head.expect("the ring is full");
        }
        driver.publish();
    }

    /// The device's part, the measured one.
    #[inline(never)]
    fn serve_ring(&mut self, batch: usize) -> usize {
        let mut served = 0;
        loop {
            let popped = self.device.pop_batch(&mut self.batch, batch);
            if popped == 0 {
                return served;
            }
            for index in 0..popped {
                if let Some((chain, readable, writable)) = self.batch.take(index) {
                    let written = writable.iter().map(|slice| slice.len()).sum::<usize>();
                    black_box(readable);
                    self.device.push_used(chain, u32::try_from(written).unwrap_or(0));
                }
            }
            self.device.publish();
            black_box(self.device.needs_notification());
            served += popped;
        }
    }
}

/// A row's subject: the format of the ring, and the shape of its chains.
#[derive(Clone, Copy, Debug)]
struct Kind {
    is_packed: bool,
    shape: Shape,
}

impl Kind {
    fn all() -> impl Iterator<Item = (Self, String)> {
        [(false, ""), (true, "packed-")].into_iter().flat_map(|(is_packed, prefix)| {
            Shape::ALL
                .into_iter()
                .map(move |(shape, name)| (Self { is_packed, shape }, format!("{prefix}{name}")))
        })
    }
}

#[allow(clippy::disallowed_methods, reason = "a bench measures time")]
fn measure(kind: Kind, batch: usize) -> [f64; 3] {
    let mut rounds = Vec::new();
    serve_rounds(kind.is_packed, |pair| {
        for _ in 0..ROUNDS {
            pair.fill(kind.shape);
            let start = Instant::now();
            let served = pair.serve(batch);
            let ns = start.elapsed().as_nanos();
            assert_eq!(served, kind.shape.chains());
            rounds.push(ns as f64 / served as f64);
        }
    });
    rounds.sort_by(f64::total_cmp);
    [ROUNDS / 4, ROUNDS / 2, ROUNDS * 3 / 4].map(|at| rounds[at])
}

/// Serves `rounds` full rings and does nothing else.
fn once(kind: Kind, batch: usize, rounds: usize) {
    serve_rounds(kind.is_packed, |pair| {
        for _ in 0..rounds {
            pair.fill(kind.shape);
            assert_eq!(pair.serve(batch), kind.shape.chains());
        }
    });
}

/// Instructions per chain, counted by valgrind.
fn count(kind: Kind, name: &str, batch: usize) -> f64 {
    let rounds = 20;
    let arguments = ["--once", name, &batch.to_string(), &rounds.to_string()];
    callgrind::count("*Pair*serve_ring*", &arguments) / (kind.shape.chains() * rounds) as f64
}

/// Chains of two descriptors that a round of [`apart`] passes.
const PASSED: usize = 1 << 13;
/// Rounds of [`apart`] for each format and depth, in turns.
const TURNS: usize = 101;

/// ns per chain, with the device half on this thread and the driver half, which keeps `depth`
/// chains in flight, on another.
#[allow(clippy::disallowed_methods, reason = "a bench measures time")]
fn apart(is_packed: bool, depth: usize) -> f64 {
    let mut ns = 0.0;
    serve_rounds(is_packed, |pair| {
        let mut driver = pair.take_driver();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let at = BUFFERS;
                let (mut added, mut taken) = (0, 0);
                while taken < PASSED {
                    while added < PASSED && added - taken < depth {
                        driver.add(&[(at, 16)], &[(at + 0x200, 0x800)]).unwrap();
                        added += 1;
                    }
                    driver.publish();
                    while driver.take_used().is_some() {
                        taken += 1;
                    }
                }
            });
            let mut served = 0;
            while served == 0 {
                served += pair.serve(depth);
            }
            // From here on the thread runs.
            let (start, before) = (Instant::now(), served);
            while served < PASSED {
                served += pair.serve(depth);
            }
            ns = start.elapsed().as_nanos() as f64 / (PASSED - before) as f64;
        });
    });
    ns
}

fn print_apart() {
    println!("both halves on two CPUs: ns per chain, median (quartiles) of {TURNS}; split/packed");
    for depth in [1, 4, 16, 32, 64] {
        let mut all = [Vec::new(), Vec::new()];
        for turn in 0..2 * TURNS {
            all[turn % 2].push(apart(turn % 2 == 1, depth));
        }
        let quartiles = all.map(|mut times: Vec<f64>| {
            times.sort_by(f64::total_cmp);
            [TURNS / 4, TURNS / 2, TURNS * 3 / 4].map(|at| times[at])
        });
        let [[_, split, _], [_, packed, _]] = quartiles;
        for ([low, middle, high], name) in quartiles.into_iter().zip(["split", "packed"]) {
            println!("{name:16} {depth:3} {middle:6.1} ({low:.1}, {high:.1})");
        }
        println!("{:16} {depth:3} {:6.2}", "ratio", split / packed);
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let kind_of = |name: &str| Kind::all().find(|(_, n)| *n == name).map(|(kind, _)| kind);
    match words[..] {
        ["--once", name, batch, rounds] => {
            let kind = kind_of(name).expect("a shape: two, three or indirect, or packed-two ..");
            once(kind, batch.parse().expect("BATCH"), rounds.parse().expect("ROUNDS"));
        }
        ["--apart"] => print_apart(),
        ["--callgrind"] => {
            println!("# device half, split and packed rings: instructions per chain");
            for (kind, name) in Kind::all() {
                for batch in BATCHES {
                    let row = format!("{name}/{batch}");
                    println!("{row:20} {:8.1}", count(kind, &name, batch));
                }
            }
        }
        _ => {
            println!("device half, split and packed rings: ns per chain, median (quartiles)");
            for (kind, name) in Kind::all() {
                for batch in BATCHES {
                    let [low, middle, high] = measure(kind, batch);
                    println!("{name:16} {batch:3} {middle:6.1} ({low:.1}, {high:.1})");
                }
            }
        }
    }
}
