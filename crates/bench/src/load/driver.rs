//! The load generator on our own driver half: nothing between the figures and the ring, and
//! features that the other client does not know.

use super::lane::{Lane, Seen, timed};
use super::{LoadError, LoadOptions, LoadResult, Rw, STUCK};
use crate::measure::{Latencies, now, pin};
use manyring_driver::{BlkDriver, BlkDriverOptions, BlkDriverQueue, DriverOp};
use std::time::Instant;

/// Number of turns without an answer after which a polling client reads the clock.
const IDLE_TURNS: u32 = 1024;

/// Puts load on the back-end at the socket of `options`.
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
    options.await_socket();
    let mut driver = connect(options)?;
    let queues = std::mem::take(&mut driver.queues);
    let lanes = Lane::all(queues, options, driver.capacity(), RING_MAX)?;
    timed(options, lanes, |lanes, end| drive(lanes, options, end))
}

/// Most entries of a ring.
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
    let blk = BlkDriverOptions {
        queues: number(options.queues)?,
        queue_size: number(ring)?,
        buffer_size: size,
        segment_size: size,
        ..BlkDriverOptions::default()
    };
    BlkDriver::connect(&options.socket, &blk).map_err(|error| failed(error.to_string()))
}

impl Lane<BlkDriverQueue> {
    #[inline]
    fn submit(&mut self, options: &LoadOptions, at: Instant) -> Result<(), LoadError> {
        let sector = self.next_sector(options);
        let op = match options.rw {
            Rw::Read => DriverOp::Read { sector, len: options.size },
            Rw::Write => DriverOp::WriteAny { sector, len: options.size },
        };
        let tag = self.queue.submit(op).map_err(failed)?;
        self.note(tag, at)
    }
}

fn failed(error: manyring_driver::DriverError) -> LoadError {
    LoadError::Client { step: "request", problem: error.to_string() }
}

/// Keeps the lanes full until the end of the load, then waits for the requests in flight.
fn drive(
    mut lanes: Vec<Lane<BlkDriverQueue>>,
    options: &LoadOptions,
    end: Instant,
) -> Result<Latencies, LoadError> {
    let mut seen = Seen::new(end);
    for lane in &mut lanes {
        if options.each_call {
            lane.queue.ask_for_call();
        }
        for _ in 0..options.depth {
            lane.submit(options, seen.last)?;
        }
        lane.queue.publish().map_err(failed)?;
    }
    let mut idle_turns = 0u32;
    while lanes.iter().any(|lane| lane.queue.in_flight() > 0) {
        let mut worked = false;
        for lane in &mut lanes {
            worked |= if options.each_call {
                called_turn(lane, options, &mut seen)?
            } else {
                turn(lane, options, &mut seen)?
            };
        }
        idle_turns = if worked { 0 } else { idle_turns.wrapping_add(1) };
        if idle_turns % IDLE_TURNS == IDLE_TURNS - 1 && seen.last.elapsed() > STUCK {
            let in_flight = lanes.iter().map(|lane| lane.queue.in_flight()).sum();
            return Err(LoadError::Stuck { in_flight, seconds: STUCK.as_secs() });
        }
    }
    seen.result()
}

/// Submits a new request for each answer of one lane. Returns false if there was no answer.
#[inline]
fn turn(
    lane: &mut Lane<BlkDriverQueue>,
    options: &LoadOptions,
    seen: &mut Seen,
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
    // The clock is read once for all answers of a turn.
    seen.last = now();
    let mut next = Some(first);
    while let Some(done) = next {
        seen.answered(lane, done.tag, done.status == 0);
        if seen.goes_on() {
            lane.submit(options, seen.last)?;
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
    lane: &mut Lane<BlkDriverQueue>,
    options: &LoadOptions,
    seen: &mut Seen,
) -> Result<bool, LoadError> {
    let in_flight = lane.queue.in_flight();
    if in_flight == 0 {
        return Ok(false);
    }
    if !lane.queue.wait_call(STUCK).map_err(failed)? && seen.last.elapsed() > STUCK {
        return Err(LoadError::Stuck { in_flight, seconds: STUCK.as_secs() });
    }
    seen.last = now();
    let mut count = 0;
    loop {
        while let Some(done) = lane.queue.take() {
            count += 1;
            seen.answered(lane, done.tag, done.status == 0);
        }
        if !lane.queue.ask_for_call() {
            break;
        }
    }
    if seen.goes_on() {
        for _ in 0..count {
            lane.submit(options, seen.last)?;
        }
        lane.queue.publish().map_err(failed)?;
    }
    Ok(true)
}
