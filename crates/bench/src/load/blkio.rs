//! The load generator on libblkio, a vhost-user-blk client that is not ours.
#![allow(unsafe_code, reason = "allow-listed: libblkio fills completions as `MaybeUninit`")]

use super::lane::timed;
use super::{LoadError, LoadOptions, LoadResult, Rw, STUCK};
use crate::measure::{Latencies, Random, now, pin};
use blkio::{Blkio, Blkioq, Completion, ReqFlags};
use manyring_driver::FrontEnd;
use manyring_wire::virtio::{VIRTIO_F_EVENT_IDX, VIRTIO_F_VERSION_1};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{BorrowedFd, OwnedFd};
use rustix::io::Errno;
use std::mem::MaybeUninit;
use std::time::Instant;

/// Number of turns without an answer after which a polling client reads the clock.
const IDLE_TURNS: u32 = 1024;

/// Puts load on the back-end at the socket of `options`.
///
/// # Errors
/// [`LoadError`] if the client cannot connect, or if a request fails or does not come back.
pub(crate) fn run(options: &LoadOptions) -> Result<LoadResult, LoadError> {
    options.check()?;
    if let Some(cpu) = options.cpu {
        pin(cpu).map_err(|errno| LoadError::Cpu { cpu, errno })?;
    }
    options.await_socket();
    let (client, lanes) = connect(options)?;
    let result = timed(options, lanes, |lanes, end| ClientState::new(lanes, options, end)?.run());
    drop(client);
    result
}

/// Connects, starts the queues, and gives each queue a part of one memory region.
fn connect(options: &LoadOptions) -> Result<(Blkio, Vec<Lane>), LoadError> {
    let failed = |step| {
        move |error: blkio::Error| LoadError::Client { step, problem: error.message().to_owned() }
    };
    let number = |n: usize| i32::try_from(n).unwrap_or(i32::MAX);
    let mut client = Blkio::new("virtio-blk-vhost-user").map_err(failed("libblkio"))?;
    client.set_str("path", &options.socket.to_string_lossy()).map_err(failed("path"))?;
    // libblkio takes event indexes if they are offered, and does not say whether it has: without
    // them the load would measure another ring.
    let offered = FrontEnd::offered(&options.socket, STUCK)
        .map_err(|error| LoadError::Client { step: "features", problem: error.to_string() })?;
    let missing = (VIRTIO_F_VERSION_1 | VIRTIO_F_EVENT_IDX) & !offered;
    if missing != 0 {
        let problem = format!("{missing:#x} are not offered");
        return Err(LoadError::Client { step: "features", problem });
    }
    client.connect().map_err(failed("connect"))?;
    // A request takes three descriptors: its header, the data, the status.
    let ring = (options.depth * 3).next_power_of_two().max(64);
    client.set_i32("queue-size", number(ring)).map_err(failed("queue-size"))?;
    let (sleeping, polling) = if options.poll { (0, options.queues) } else { (options.queues, 0) };
    client.set_i32("num-queues", number(sleeping)).map_err(failed("num-queues"))?;
    client.set_i32("num-poll-queues", number(polling)).map_err(failed("num-poll-queues"))?;
    let capacity = client.get_u64("capacity").map_err(failed("capacity"))?;
    let started = client.start().map_err(failed("start"))?;
    let share = (options.depth * options.size).next_multiple_of(4096);
    let region = client.alloc_mem_region(share * options.queues).map_err(failed("memory"))?;
    client.map_mem_region(&region).map_err(failed("memory region"))?;
    let blocks = capacity / options.size as u64;
    if blocks == 0 {
        return Err(LoadError::Options("the disk is smaller than one request"));
    }
    let queues = started.queues.into_iter().chain(started.poll_queues);
    let lanes = queues
        .enumerate()
        .map(|(index, queue)| Lane {
            queue,
            memory: region.addr + index * share,
            blocks,
            random: Random::new(options.seed.wrapping_add(index as u64)),
            in_flight: 0,
        })
        .collect();
    Ok((client, lanes))
}

/// A queue of the client, with its memory.
struct Lane {
    queue: Blkioq,
    /// Address of the queue's part of the memory region.
    memory: usize,
    /// Size of the disk in blocks, each as large as a request.
    blocks: u64,
    random: Random,
    in_flight: usize,
}

impl Lane {
    #[inline]
    fn submit(&mut self, token: usize, options: &LoadOptions) {
        let offset = self.random.below(self.blocks) * options.size as u64;
        let buffer = std::ptr::without_provenance_mut::<u8>(self.memory + token * options.size);
        match options.rw {
            Rw::Read => {
                self.queue.read(offset, buffer, options.size, token, ReqFlags::empty());
            }
            Rw::Write => {
                self.queue.write(offset, buffer, options.size, token, ReqFlags::empty());
            }
        }
        self.in_flight += 1;
    }
}

/// The state of one client thread: its queues, and the times of their requests.
struct ClientState<'a> {
    lanes: Vec<Lane>,
    /// Completion descriptors of the lanes, for a client that sleeps on several of them.
    fds: Vec<OwnedFd>,
    options: &'a LoadOptions,
    end: Instant,
    latencies: Latencies,
    /// When each request was submitted, by lane and token.
    submitted: Vec<Instant>,
    failed: Option<(u64, Errno)>,
}

impl<'a> ClientState<'a> {
    fn new(lanes: Vec<Lane>, options: &'a LoadOptions, end: Instant) -> Result<Self, LoadError> {
        let mut fds = Vec::new();
        if lanes.len() > 1 && !options.poll {
            for lane in &lanes {
                fds.push(completion_fd(&lane.queue)?);
            }
        }
        let submitted = vec![now(); lanes.len() * options.depth];
        let latencies = Latencies::new();
        Ok(Self { lanes, fds, options, end, latencies, submitted, failed: None })
    }

    /// Keeps every lane full until the end of the load, then waits for the requests in flight.
    fn run(mut self) -> Result<Latencies, LoadError> {
        let options = self.options;
        self.submitted.fill(now());
        for lane in &mut self.lanes {
            (0..options.depth).for_each(|token| lane.submit(token, options));
        }
        let mut slots: Vec<_> = (0..options.depth).map(|_| MaybeUninit::uninit()).collect();
        self.ask_for_calls(false);
        let (mut idle_turns, mut last, mut is_called) = (0u32, now(), false);
        while self.lanes.iter().any(|lane| lane.in_flight > 0) {
            let mut worked = false;
            for index in 0..self.lanes.len() {
                worked |= self.turn(index, &mut slots, &mut last)?;
            }
            if worked {
                idle_turns = 0;
                if is_called {
                    is_called = false;
                    self.ask_for_calls(false);
                }
                continue;
            }
            idle_turns = idle_turns.wrapping_add(1);
            if !self.fds.is_empty() {
                // After it has asked for a call, the client looks at each lane once more.
                if is_called {
                    self.sleep(last)?;
                }
                is_called = !is_called;
                self.ask_for_calls(is_called);
            } else if idle_turns.is_multiple_of(IDLE_TURNS) && last.elapsed() > STUCK {
                return Err(self.stuck());
            }
        }
        match self.failed {
            Some((failed, errno)) => Err(LoadError::Requests { failed, errno }),
            None => Ok(self.latencies),
        }
    }

    /// Submits a new request for each answer of one lane. Returns false if there was no answer.
    #[inline]
    fn turn(
        &mut self,
        index: usize,
        slots: &mut [MaybeUninit<Completion>],
        last: &mut Instant,
    ) -> Result<bool, LoadError> {
        let lane = &mut self.lanes[index];
        if lane.in_flight == 0 {
            return Ok(false);
        }
        let sleeps = self.fds.is_empty() && !self.options.poll;
        let mut timeout = STUCK;
        let done =
            lane.queue.do_io(slots, usize::from(sleeps), sleeps.then_some(&mut timeout), None);
        let count = match done {
            Ok(0) => return Ok(false),
            Ok(count) => count,
            Err(error) if error.errno() == blkio::Errno::TIME => return Err(self.stuck()),
            Err(error) => {
                let problem = error.message().to_owned();
                return Err(LoadError::Client { step: "request", problem });
            }
        };
        // The clock is read once for all answers of a turn.
        *last = now();
        let base = index * self.options.depth;
        for slot in &slots[..count] {
            // SAFETY: `do_io` has returned `count`, and has filled this many slots.
            let completion = unsafe { slot.assume_init_ref() };
            let token = completion.user_data;
            lane.in_flight -= 1;
            if completion.ret < 0 {
                let errno = Errno::from_raw_os_error(-completion.ret);
                self.failed = Some((self.failed.map_or(0, |f| f.0) + 1, errno));
            } else if *last < self.end {
                self.latencies.record(*last - self.submitted[base + token]);
            }
            if *last < self.end && self.failed.is_none() {
                self.submitted[base + token] = *last;
                lane.submit(token, self.options);
            }
        }
        Ok(true)
    }

    /// Switches completion calls on or off, for a client that sleeps on several lanes. It asks for
    /// calls only before it sleeps, as a client with a single lane does inside the library.
    fn ask_for_calls(&mut self, is_called: bool) {
        if !self.fds.is_empty() {
            for lane in &mut self.lanes {
                lane.queue.set_completion_fd_enabled(is_called);
            }
        }
    }

    /// Sleeps until any lane has a completion.
    fn sleep(&mut self, last: Instant) -> Result<(), LoadError> {
        let mut fds: Vec<_> = self.fds.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        let timeout = Timespec::try_from(STUCK).ok();
        let _ = poll(&mut fds, timeout.as_ref());
        let mut ready = false;
        for (fd, event) in self.fds.iter().zip(&fds) {
            if event.revents().contains(PollFlags::IN) {
                ready = true;
                let _ = rustix::io::read(fd, &mut [0u8; 8]);
            }
        }
        if !ready && last.elapsed() > STUCK { Err(self.stuck()) } else { Ok(()) }
    }

    fn stuck(&self) -> LoadError {
        let in_flight = self.lanes.iter().map(|lane| lane.in_flight).sum();
        LoadError::Stuck { in_flight, seconds: STUCK.as_secs() }
    }
}

/// A duplicate of the queue's completion fd, which stays open after libblkio closes its own.
fn completion_fd(queue: &Blkioq) -> Result<OwnedFd, LoadError> {
    let failed = |problem| LoadError::Client { step: "completion fd", problem };
    let fd = queue.get_completion_fd().ok_or_else(|| failed("there is none".to_owned()))?;
    // SAFETY: the queue keeps its fd open, and is borrowed.
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    borrowed.try_clone_to_owned().map_err(|error| failed(error.to_string()))
}
