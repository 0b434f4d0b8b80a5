//! Who reads the bytes of a frame that leaves by AF_XDP, and when: the sender changes them, and
//! looks what arrives at the other end of the cable.
//!
//! ```text
//! write A; send; write B at once; wait until the port is done; write C; look at what arrived
//!     B   the device has read the memory of the sender, later than the call returned
//!     A   the call has copied it
//!     C   the port said that it was done, and the device read on: must never be
//! ```
//! Then frames of several lengths are sent for their time. On a machine whose clock counts
//! instructions (QEMU, `-icount shift=0,sleep=off`) that is how many instructions a frame takes.

use super::LoadError;
use crate::measure::{now, own_cpu_seconds};
use clap::Args;
use manyring_backend::net::xdp::{XdpOptions, XdpPort};
use manyring_backend::net::{Frames, Port, PortTx, Returned};
use manyring_driver::wire::net::RawNetHeader;
use manyring_memory::{Mapping, SliceList};
use rustix::fd::OwnedFd;
use rustix::net::{AddressFamily, Protocol, RecvFlags, SocketFlags, SocketType, recv, socket_with};
use serde::Serialize;
use std::sync::Arc;
use std::time::Duration;

/// Frames of one burst.
const BURST: usize = 32;
/// Bytes from one frame to the next in memory.
const STEP: usize = 4096;
/// Offset of a frame in its page.
const OFFSET: usize = 64;
/// The protocol of the frames: one that nobody else uses.
const ETHER_TYPE: u16 = 0x88b5;
/// Bytes of a frame whose bytes are changed.
const CHANGED_SIZE: usize = 1500;
/// Longest wait for the sender's pages to be registered, and for a frame to arrive.
const TIMEOUT: Duration = Duration::from_secs(20);

/// `manyring-bench load pages ..`
#[derive(Args, Clone, Debug)]
pub(crate) struct PagesArgs {
    /// The interface that sends.
    #[arg(long, value_name = "NAME")]
    interface: String,
    /// Have the device read the memory of the sender.
    #[arg(long)]
    zero_copy: bool,
    /// Frames whose bytes are changed.
    #[arg(long, default_value_t = 200)]
    changed: u64,
    /// Frames of each length that are counted.
    #[arg(long, default_value_t = 20_000)]
    frames: u64,
}

/// How many frames arrived, and which bytes they had.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct PagesResult {
    /// Frames with the bytes that were written before they were sent.
    before: u64,
    /// Frames with the bytes that were written after the send call had returned.
    behind: u64,
    /// Frames with bytes from before and from after the call.
    mixed: u64,
    /// Frames with bytes that were written after the port had reported them as sent.
    done: u64,
    /// Frames that did not arrive.
    lost: u64,
    /// For each frame size in bytes: the sender's CPU time per frame, in nanoseconds.
    frame_ns: Vec<(usize, u64)>,
}

fn failed(step: &'static str, problem: impl std::fmt::Display) -> LoadError {
    LoadError::Client { step, problem: problem.to_string() }
}

/// A sender on one interface, with the memory of its frames.
struct Sender {
    port: XdpPort,
    tx: Box<dyn PortTx>,
    memory: Arc<Mapping>,
    frames: Frames,
    done: Vec<Returned>,
    /// How many frames the port has not finished.
    out: u64,
}

impl Sender {
    fn new(args: &PagesArgs) -> Result<Self, LoadError> {
        let options = XdpOptions {
            name: args.interface.clone(),
            queue_pairs: 1,
            mtu: None,
            up: Some(true),
            zero_copy: args.zero_copy,
            lends: false,
        };
        let port = XdpPort::open(&options).map_err(|error| failed("open the interface", error))?;
        let tx = port.open_tx(0).map_err(|errno| failed("open its queue", errno))?;
        let memory = Mapping::anonymous_shared((BURST * STEP) as u64);
        let memory = Arc::new(memory.map_err(|error| failed("map memory", error))?);
        let frames = Frames::new().map_err(|error| failed("map memory", error))?;
        Ok(Self { port, tx, memory, frames, done: Vec::new(), out: 0 })
    }

    /// Lays out `count` frames of `len` bytes in the sender's memory.
    fn lay_out(&mut self, count: usize, len: usize) -> Result<(), LoadError> {
        let size = u32::try_from(len).unwrap_or(0);
        let places: Vec<_> = (0..count).map(|n| ((n * STEP + OFFSET) as u64, size)).collect();
        let slices = match self.frames.payload(0) {
            // The frames stay in the snapshot of memory whose pages the port has registered.
            Some(payload) => {
                let mut list = SliceList::new();
                list.restart(payload.memory());
                for (at, len) in places {
                    let at = manyring_memory::GuestAddr(at);
                    list.resolve(at, len, &mut Default::default())
                        .map_err(|error| failed("lay out frames", error))?;
                }
                list
            }
            None => SliceList::of_mapping(&self.memory, &places)
                .map_err(|error| failed("lay out frames", error))?,
        };
        self.frames.clear();
        for n in 0..count {
            let token = u16::try_from(n).unwrap_or(0);
            self.frames.push_as(token, &RawNetHeader::default(), slices.pieces(n..n + 1), 0, len);
            self.fill(n, &frame_of(len, 0));
        }
        Ok(())
    }

    /// Writes the bytes of frame `index`.
    fn fill(&self, index: usize, frame: &[u8]) {
        if let Some(slice) = self.memory.slice(index * STEP + OFFSET, frame.len()) {
            slice.write_from(frame);
        }
    }

    /// Sends the burst. The port may still have its frames when this returns.
    fn send(&mut self) -> Result<(), LoadError> {
        let mut first = 0;
        let began = now();
        while first < self.frames.count() {
            let sent = self.tx.send(&self.frames, first);
            if sent.lost != 0 {
                return Err(failed("send frames", format!("{sent:?}")));
            }
            first += sent.taken;
            self.out += u64::from(sent.later.count_ones());
            if sent.taken == 0 {
                self.reap();
                std::thread::sleep(Duration::from_micros(50));
            }
            if began.elapsed() > TIMEOUT {
                return Err(failed("send frames", "the port takes none"));
            }
        }
        Ok(())
    }

    fn reap(&mut self) {
        self.tx.reap(&mut self.done);
        self.out -= self.done.drain(..).count() as u64;
    }

    /// Waits until the port has finished all frames.
    fn settle(&mut self) -> Result<(), LoadError> {
        let began = now();
        while self.out > 0 {
            self.reap();
            if self.out > 0 {
                std::thread::sleep(Duration::from_micros(50));
            }
            if began.elapsed() > TIMEOUT {
                return Err(failed("wait for frames", format!("{} are out", self.out)));
            }
        }
        Ok(())
    }
}

/// A broadcast frame of `len` bytes whose payload consists of `byte`.
fn frame_of(len: usize, byte: u8) -> Vec<u8> {
    let mut frame = vec![byte; len];
    frame[..14].copy_from_slice(&[0xff; 14]);
    frame[6..12].copy_from_slice(&[2, 0, 0, 0, 0, 1]);
    frame[12..14].copy_from_slice(&ETHER_TYPE.to_be_bytes());
    frame
}

/// A packet socket that sees the frames of all interfaces.
fn listener() -> Result<OwnedFd, LoadError> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let protocol = std::num::NonZeroU32::new(ETHER_TYPE.to_be().into()).map(Protocol::from_raw);
    socket_with(AddressFamily::PACKET, SocketType::RAW, flags, protocol)
        .map_err(|errno| failed("listen", errno))
}

/// Sends frames whose bytes change, then frames that are counted.
pub(crate) fn run(args: &PagesArgs) -> Result<PagesResult, LoadError> {
    let mut sender = Sender::new(args)?;
    let listener = listener()?;
    sender.lay_out(1, CHANGED_SIZE)?;
    if args.zero_copy {
        await_pages(&mut sender)?;
    }
    std::thread::sleep(Duration::from_millis(200));
    let mut bytes = vec![0; 4096];
    while recv(&listener, &mut bytes[..], RecvFlags::DONTWAIT).is_ok() {}
    let mut result = PagesResult::default();
    for _ in 0..args.changed {
        change_one(&mut sender, &listener, &mut result)?;
    }
    for len in [64, 512, 1500] {
        sender.lay_out(BURST, len)?;
        let began = own_cpu_seconds();
        let bursts = args.frames / BURST as u64;
        for _ in 0..bursts {
            sender.send()?;
            sender.settle()?;
        }
        let took = Duration::try_from_secs_f64(own_cpu_seconds() - began).unwrap_or_default();
        let took = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        result.frame_ns.push((len, took / (bursts * BURST as u64).max(1)));
    }
    drop(sender.port);
    Ok(result)
}

/// Sends frames until the port does not copy them any more: its pages are registered then.
fn await_pages(sender: &mut Sender) -> Result<(), LoadError> {
    let (began, mut is_lent) = (now(), false);
    while !is_lent {
        if began.elapsed() > TIMEOUT {
            return Err(failed("have the device read our memory", "the port goes on copying"));
        }
        sender.send()?;
        is_lent = sender.out > 0;
        sender.settle()?;
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// Sends one frame whose bytes change, and looks at what arrives.
fn change_one(
    sender: &mut Sender,
    listener: &OwnedFd,
    result: &mut PagesResult,
) -> Result<(), LoadError> {
    let [before, behind, done] = [0xaa, 0xbb, 0xcc];
    let frames = [before, behind, done].map(|byte| frame_of(CHANGED_SIZE, byte));
    sender.fill(0, &frames[0]);
    sender.send()?;
    sender.fill(0, &frames[1]);
    sender.settle()?;
    sender.fill(0, &frames[2]);
    let (mut bytes, began) = (vec![0; 4096], now());
    let len = loop {
        match recv(listener, &mut bytes[..], RecvFlags::DONTWAIT) {
            Ok((_, len)) => break len,
            Err(_) if began.elapsed() < Duration::from_millis(500) => {}
            Err(_) => {
                result.lost += 1;
                return Ok(());
            }
        }
    };
    let count = |byte: u8| bytes[14..len].iter().filter(|seen| **seen == byte).count();
    let whole = CHANGED_SIZE - 14;
    match (count(before), count(behind), count(done)) {
        (_, _, 1..) => result.done += 1,
        (seen, 0, 0) if seen == whole => result.before += 1,
        (0, seen, 0) if seen == whole => result.behind += 1,
        _ => result.mixed += 1,
    }
    Ok(())
}
