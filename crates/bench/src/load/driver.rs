//! The load generator on our own driver half: nothing between the figures and the ring, and
//! features that the other client does not know.

use super::{LoadError, LoadOptions, LoadResult, Rw, STUCK};
use crate::measure::{Latencies, Random, now, own_cpu_seconds, pin};
use manyring_driver::{BlkDriver, BlkOptions, BlkQueue, Op};
use std::time::Instant;

/// A polling client that finds nothing looks at the clock once in so many turns.
const IDLE_TURNS: u32 = 1024;

/// Drives the back-end behind the options' socket.
///
/// # Errors
/// [`LoadError`] if the client cannot connect, or if a request fails or does not come back.
pub(crate) fn run(options: &LoadOptions) -> Result<LoadResult, LoadError> {
    options.check()?;
    if !options.poll && options.threads.is_some_and(|threads| threads < options.queues) {
        return Err(LoadError::Options("one thread cannot sleep on several queues of this client"));
    }
    if let Some(cpu) = options.cpu {
        pin(cpu).map_err(|errno| LoadError::Cpu { cpu, errno })?;
    }
    let mut driver = connect(options)?;
    let blocks = driver.capacity() / options.size as u64;
    if blocks == 0 {
        return Err(LoadError::Options("the disk is smaller than one request"));
    }
    let queues = std::mem::take(&mut driver.queues);
    let (cpu, start) = (own_cpu_seconds(), now());
    let end = start + options.duration;
    let lanes = queues.into_iter().zip(0..).map(|(queue, index)| Lane {
        queue,
        random: Random::new(options.seed.wrapping_add(index)),
        blocks,
        submitted: vec![start; RING_MAX],
    });
    let outcome = super::run_parties(options.deal(lanes), |lanes| drive(lanes, options, end))?;
    let (seconds, cpu) = (start.elapsed().as_secs_f64(), own_cpu_seconds() - cpu);
    let seconds = seconds.min(options.duration.as_secs_f64());
    Ok(LoadResult::new(&outcome, seconds, cpu, options.seed))
}

/// Entries of the largest ring that is used here.
const RING_MAX: usize = 1024;

fn connect(options: &LoadOptions) -> Result<BlkDriver, LoadError> {
    let failed = |problem| LoadError::Client { step: "connect", problem };
    let number = |n: usize| u16::try_from(n).map_err(|_| LoadError::Options("too many queues"));
    // With indirect tables a request takes one entry, without them three.
    let ring = (options.depth * 3).next_power_of_two().clamp(64, RING_MAX);
    if options.depth > ring {
        return Err(LoadError::Options("depth must not exceed 1024"));
    }
    let size = u32::try_from(options.size).map_err(|_| LoadError::Options("size is too large"))?;
    let blk = BlkOptions {
        queues: number(options.queues)?,
        queue_size: number(ring)?,
        buffer_size: size,
        segment_size: size,
        ..BlkOptions::default()
    };
    BlkDriver::connect(&options.socket, &blk).map_err(|error| failed(error.to_string()))
}

/// A queue and what belongs to it.
struct Lane {
    queue: BlkQueue,
    random: Random,
    blocks: u64,
    /// When each request was submitted, by tag.
    submitted: Vec<Instant>,
}

impl Lane {
    #[inline]
    fn submit(&mut self, options: &LoadOptions, at: Instant) -> Result<(), LoadError> {
        let sector = self.random.below(self.blocks) * (options.size as u64 / 512);
        let op = match options.rw {
            Rw::Read => Op::Read { sector, len: options.size },
            Rw::Write => Op::WriteAny { sector, len: options.size },
        };
        match self.queue.submit(op).map_err(failed)? {
            Some(tag) => self.submitted[usize::from(tag)] = at,
            None => return Err(LoadError::Options("depth exceeds what the ring can hold")),
        }
        Ok(())
    }
}

fn failed(error: manyring_driver::DriverError) -> LoadError {
    LoadError::Client { step: "request", problem: error.to_string() }
}

/// Keeps the lanes full until the end, then waits for what is in flight.
fn drive(
    mut lanes: Vec<Lane>,
    options: &LoadOptions,
    end: Instant,
) -> Result<Latencies, LoadError> {
    let mut latencies = Latencies::new();
    let mut last = now();
    for lane in &mut lanes {
        if options.each_call {
            lane.queue.ask_for_call();
        }
        for _ in 0..options.depth {
            lane.submit(options, last)?;
        }
        lane.queue.publish().map_err(failed)?;
    }
    let (mut idle_turns, mut failures) = (0u32, 0);
    while lanes.iter().any(|lane| lane.queue.in_flight() > 0) {
        let mut worked = false;
        for lane in &mut lanes {
            worked |= if options.each_call {
                called_turn(lane, options, end, &mut last, &mut latencies, &mut failures)?
            } else {
                turn(lane, options, end, &mut last, &mut latencies, &mut failures)?
            };
        }
        idle_turns = if worked { 0 } else { idle_turns.wrapping_add(1) };
        if idle_turns % IDLE_TURNS == IDLE_TURNS - 1 && last.elapsed() > STUCK {
            let in_flight = lanes.iter().map(|lane| lane.queue.in_flight()).sum();
            return Err(LoadError::Stuck { in_flight, seconds: STUCK.as_secs() });
        }
    }
    if failures > 0 {
        return Err(LoadError::Requests { failed: failures, errno: rustix::io::Errno::IO });
    }
    Ok(latencies)
}

/// Collects what has come back on one lane and submits as much. False: nothing had.
#[inline]
fn turn(
    lane: &mut Lane,
    options: &LoadOptions,
    end: Instant,
    last: &mut Instant,
    latencies: &mut Latencies,
    failures: &mut u64,
) -> Result<bool, LoadError> {
    if lane.queue.in_flight() == 0 {
        return Ok(false);
    }
    let first = if options.poll {
        match lane.queue.take() {
            Some(done) => done,
            None => return Ok(false),
        }
    } else {
        lane.queue.wait(STUCK).map_err(failed)?
    };
    // The clock is read once for all that came back together.
    *last = now();
    let mut next = Some(first);
    while let Some(done) = next {
        if done.status != 0 {
            *failures += 1;
        } else if *last < end {
            latencies.record(*last - lane.submitted[usize::from(done.tag)]);
        }
        if *last < end && *failures == 0 {
            lane.submit(options, *last)?;
        }
        next = lane.queue.take();
    }
    lane.queue.publish().map_err(failed)?;
    Ok(true)
}

/// A turn of a client that learns of answers only by the device's call, as a guest's kernel learns
/// of them by its interrupt. It collects all answers, asks the device for the next call, and
/// submits new requests after that. It does not look at the ring again before it sleeps: the device
/// calls for every answer that comes after the client has asked. Returns false if no request was in
/// flight.
fn called_turn(
    lane: &mut Lane,
    options: &LoadOptions,
    end: Instant,
    last: &mut Instant,
    latencies: &mut Latencies,
    failures: &mut u64,
) -> Result<bool, LoadError> {
    let in_flight = lane.queue.in_flight();
    if in_flight == 0 {
        return Ok(false);
    }
    if !lane.queue.wait_call(STUCK).map_err(failed)? && last.elapsed() > STUCK {
        return Err(LoadError::Stuck { in_flight, seconds: STUCK.as_secs() });
    }
    *last = now();
    let mut count = 0;
    loop {
        while let Some(done) = lane.queue.take() {
            count += 1;
            if done.status != 0 {
                *failures += 1;
            } else if *last < end {
                latencies.record(*last - lane.submitted[usize::from(done.tag)]);
            }
        }
        if !lane.queue.ask_for_call() {
            break;
        }
    }
    if *last < end && *failures == 0 {
        for _ in 0..count {
            lane.submit(options, *last)?;
        }
        lane.queue.publish().map_err(failed)?;
    }
    Ok(true)
}
