//! The load generator for Xen disks: a domain of a simulated Xen whose front-end keeps its rings
//! full; and that Xen itself, for a load that is driven by hand.
//!
//! ```text
//! manyring-bench load xen --socket S            the Xen: on a thread that sleeps during a load
//! manyring xen-blk --simulated S ..             the back-end
//! manyring-bench load xenblk --socket S ..      tool stack and guest: announces a disk, uses it
//! ```

use super::lane::{Lane, Seen, timed};
use super::{LoadArgs, LoadError, LoadOptions, LoadResult, Rw, STUCK};
use crate::measure::{Latencies, now, pin};
use clap::{ArgAction, Args};
use manyring_driver::{
    Blkfront, BlkfrontOptions, BlkfrontQueue, DriverError, SimXen, XEN_PAGE_SIZE, XenDisk,
    XenDomain, XenOp, XenStore,
};
use manyring_memory::simgrant::GRANT_ENTRY_SIZE;
use manyring_wire::xen::blkif::{BlkifStatus, RING_PAGE_ORDER_MAX};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::ffi::OsString;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Number of turns without an answer after which a polling client reads the clock.
const IDLE_TURNS: u32 = 1024;
/// Longest wait for the back-end before the load begins.
const TIMEOUT: Duration = Duration::from_secs(10);
/// References below this one are the tool stack's.
const GREFS_RESERVED: u32 = 64;

/// `manyring-bench load xen ..`
#[derive(Args, Clone, Debug)]
pub(crate) struct XenArgs {
    /// Where the xenstore of the simulated Xen listens.
    #[arg(long, value_name = "PATH")]
    socket: PathBuf,
}

/// Simulates a Xen until the standard input ends.
///
/// # Errors
/// [`LoadError`] if the socket's name is taken.
pub(crate) fn xen(args: &XenArgs) -> Result<(), LoadError> {
    let xen = SimXen::start(&args.socket).map_err(failed("simulated Xen"))?;
    let mut out = std::io::stdout();
    let said = writeln!(out, "ready").and_then(|()| out.flush());
    let held = said.and_then(|()| std::io::stdin().read_to_end(&mut Vec::new()));
    drop(xen);
    held.map(drop).map_err(|e| LoadError::Client { step: "ready", problem: e.to_string() })
}

/// `manyring-bench load xenblk ..`
#[derive(Args, Debug)]
pub(crate) struct XenBlkLoadArgs {
    #[command(flatten)]
    load: LoadArgs,
    /// Grant the pages of the buffers once and for good; else for each request.
    #[arg(long, value_name = "BOOL", action = ArgAction::Set, default_value_t = true)]
    persistent: bool,
    /// Most segments of an indirect request; 0: none is sent, and a request has at most 44 KiB.
    #[arg(long, value_name = "N", default_value_t = 32)]
    indirect_segments: u16,
    /// Size of each ring, in log2 of its pages [default: as small as holds the depth].
    #[arg(long, value_name = "N")]
    ring_page_order: Option<u32>,
    /// The disk, as the tool stack names it to the back-end.
    #[arg(long, default_value = "null:64G")]
    params: String,
    /// The kind of back-end that serves it.
    #[arg(long, default_value = "manyring")]
    kind: String,
    /// The number of the guest's domain.
    #[arg(long, value_name = "N", default_value_t = 7)]
    domain: u16,
}

/// The number of xvda.
const XVDA: u32 = 51712;

impl XenBlkLoadArgs {
    /// The arguments of `load xenblk` that give these options again.
    pub(crate) fn of(options: &LoadOptions, persistent: bool) -> Vec<OsString> {
        let mut arguments = LoadArgs::of(options);
        arguments.push(format!("--persistent={persistent}").into());
        arguments
    }

    pub(crate) fn is_json(&self) -> bool {
        self.load.json
    }

    fn front(&self, options: &LoadOptions) -> Result<BlkfrontOptions, LoadError> {
        let queues = u32::try_from(options.queues);
        let size = u32::try_from(options.size);
        let front = BlkfrontOptions {
            queues: queues.map_err(|_| LoadError::Options("too many queues"))?,
            persistent: self.persistent,
            indirect_segments: self.indirect_segments,
            buffer_size: size.map_err(|_| LoadError::Options("size is too large"))?,
            max_wait: TIMEOUT,
            ..BlkfrontOptions::default()
        };
        let holds = |order: &u32| usize::from(front.abi.ring_size(*order)) >= options.depth;
        let mut orders = 0..=self.ring_page_order.unwrap_or(RING_PAGE_ORDER_MAX);
        let order = match self.ring_page_order {
            Some(order) => Some(order).filter(|o| *o <= RING_PAGE_ORDER_MAX).filter(holds),
            None => orders.find(holds),
        };
        let none = LoadError::Options("no ring of that many pages (16 at most) holds the depth");
        Ok(BlkfrontOptions { ring_page_order: order.ok_or(none)?, ..front })
    }
}

/// Announces a disk, connects to it, and drives it.
///
/// # Errors
/// [`LoadError`] if the guest cannot connect, or if a request fails or does not come back.
pub(crate) fn run(args: &XenBlkLoadArgs) -> Result<LoadResult, LoadError> {
    let options = &args.load.options();
    options.check()?;
    if let Some(cpu) = options.cpu {
        pin(cpu).map_err(|errno| LoadError::Cpu { cpu, errno })?;
    }
    let mut toolstack =
        XenStore::connect(&options.socket, TIMEOUT).map_err(failed("simulated Xen"))?;
    let disk = XenDisk::new(&args.kind, args.domain, XVDA, &args.params);
    disk.announce(&mut toolstack).map_err(failed("announce"))?;
    let result = drive_disk(args, options, &disk);
    let removed = disk.remove(&mut toolstack).map_err(failed("remove"));
    result.and_then(|result| removed.map(|()| result))
}

fn drive_disk(
    args: &XenBlkLoadArgs,
    options: &LoadOptions,
    disk: &XenDisk,
) -> Result<LoadResult, LoadError> {
    let front = args.front(options)?;
    let domain = domain(options, args.domain, &front)?;
    let mut guest =
        Blkfront::connect(&domain, &disk.folder(), &front).map_err(failed("connect"))?;
    if guest.queues.len() != options.queues {
        return Err(LoadError::Options("the back-end offers fewer queues"));
    }
    if guest.queues.iter().any(|queue| queue.options().persistent != args.persistent) {
        return Err(LoadError::Options("the back-end keeps no grants mapped"));
    }
    let capacity = guest.disk.sectors * 512;
    let entries = usize::from(front.abi.ring_size(front.ring_page_order));
    let lanes = Lane::all(std::mem::take(&mut guest.queues), options, capacity, entries)?;
    let result = timed(options, lanes, |lanes, end| drive(lanes, options, end))?;
    guest.close().map_err(failed("close"))?;
    Ok(result)
}

/// A domain with memory and grant references for all queues.
fn domain(
    options: &LoadOptions,
    number: u16,
    front: &BlkfrontOptions,
) -> Result<Arc<XenDomain>, LoadError> {
    let of_queues = front.queues.checked_mul(BlkfrontQueue::pages(front));
    let of_queues = of_queues.ok_or(LoadError::Options("too much memory for one domain"))?;
    let entries = of_queues + GREFS_RESERVED;
    let table = (entries as usize * GRANT_ENTRY_SIZE).div_ceil(XEN_PAGE_SIZE);
    let pages = of_queues + u32::try_from(table).unwrap_or(u32::MAX);
    let domain = XenDomain::create(&options.socket, number, pages, entries);
    Ok(Arc::new(domain.map_err(failed("domain"))?))
}

fn failed(step: &'static str) -> impl Fn(DriverError) -> LoadError {
    move |error| LoadError::Client { step, problem: error.to_string() }
}

impl Lane<BlkfrontQueue> {
    #[inline]
    fn submit(&mut self, options: &LoadOptions, at: Instant) -> Result<(), LoadError> {
        let sector = self.next_sector(options);
        let op = match options.rw {
            Rw::Read => XenOp::Read { sector, len: options.size },
            Rw::Write => XenOp::WriteAny { sector, len: options.size },
        };
        let tag = self.queue.submit(op).map_err(failed("request"))?;
        self.note(tag, at)
    }
}

/// Keeps the lanes full until the end of the load, then waits for the requests in flight.
fn drive(
    mut lanes: Vec<Lane<BlkfrontQueue>>,
    options: &LoadOptions,
    end: Instant,
) -> Result<Latencies, LoadError> {
    let mut seen = Seen::new(end);
    for lane in &mut lanes {
        for _ in 0..options.depth {
            lane.submit(options, seen.last)?;
        }
        lane.queue.publish();
    }
    let mut idle_turns = 0_u32;
    while lanes.iter().any(|lane| lane.queue.in_flight() > 0) {
        let mut worked = false;
        for lane in &mut lanes {
            worked |= turn(lane, options, &mut seen)?;
        }
        idle_turns = if worked { 0 } else { idle_turns.wrapping_add(1) };
        let is_stuck = if worked {
            false
        } else if options.poll {
            idle_turns.is_multiple_of(IDLE_TURNS) && seen.last.elapsed() > STUCK
        } else {
            !sleep(&mut lanes) && seen.last.elapsed() > STUCK
        };
        if is_stuck {
            let in_flight = lanes.iter().map(|lane| lane.queue.in_flight()).sum();
            return Err(LoadError::Stuck { in_flight, seconds: STUCK.as_secs() });
        }
    }
    seen.result()
}

/// Submits a new request for each answer of one lane. Returns false if there was no answer.
#[inline]
fn turn(
    lane: &mut Lane<BlkfrontQueue>,
    options: &LoadOptions,
    seen: &mut Seen,
) -> Result<bool, LoadError> {
    let mut next = lane.queue.take().map_err(failed("response"))?;
    if next.is_none() {
        return Ok(false);
    }
    seen.last = now();
    while let Some(done) = next {
        seen.answered(lane, done.tag, done.status == BlkifStatus::Okay);
        if seen.goes_on() {
            lane.submit(options, seen.last)?;
        }
        next = lane.queue.take().map_err(failed("response"))?;
    }
    lane.queue.publish();
    Ok(true)
}

/// Sleeps until any lane has a response. False: no response came in time.
fn sleep(lanes: &mut [Lane<BlkfrontQueue>]) -> bool {
    let mut has_any = false;
    for lane in lanes.iter_mut().filter(|lane| lane.queue.in_flight() > 0) {
        has_any |= lane.queue.ring().enable_notifications();
    }
    if has_any {
        return true;
    }
    let events = lanes.iter().map(|lane| lane.queue.channel().event());
    let events: Vec<_> = events.collect();
    let mut fds: Vec<_> = events.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
    let timeout = Timespec::try_from(STUCK).ok();
    let _ = poll(&mut fds, timeout.as_ref());
    // Events are read before responses are looked for, so that no event of a later response is
    // lost.
    let mut is_ready = false;
    for (fd, event) in fds.iter().zip(&events) {
        if fd.revents().contains(PollFlags::IN) {
            is_ready = true;
            let _ = rustix::io::read(event, &mut [0_u8; 8]);
        }
    }
    is_ready
}
