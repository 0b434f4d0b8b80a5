//! A well-behaved guest with a network: every frame that comes back is whole, and its own.

use super::frame::{self, Note, PORT, Received, Way};
use super::late::{FAR_END, Latencies, Mark, Route};
use super::{Orders, say};
use crate::soak::random::Random;
use crate::{Context, Outcome};
use manyring_driver::wire::net::RawNetHeader;
use manyring_driver::{NetDriver, NetDriverOptions};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::net::UdpSocket;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Queue pairs of the device.
pub(in crate::soak) const PAIRS: u16 = 2;
/// Frames under way at most: fewer than any buffer of the host holds.
const WINDOW: usize = 64;
/// Frames of one burst at most.
const BURST: u64 = 16;
/// A frame that does not come back in this time no longer counts as under way. It is not forgotten:
/// when it comes, it was late.
const LOST: Duration = Duration::from_secs(1);

/// The counts of the far end.
#[derive(Debug, Default)]
struct Far {
    frames: AtomicU64,
    wrong: AtomicU64,
}

struct Guest {
    number: u8,
    driver: NetDriver,
    random: Random,
    next_number: u64,
    under_way: HashMap<u64, (Instant, Rc<Mark>)>,
    lost: HashMap<u64, (Instant, Rc<Mark>)>,
    latencies: Latencies,
    back: u64,
    others: u64,
    wrong: u64,
    first_wrong: String,
    bytes: Vec<u8>,
}

/// Runs until `stop`.
pub(super) fn run(orders: &Orders, stop: &Arc<AtomicBool>) -> Outcome<Value> {
    let socket = UdpSocket::bind((frame::far_address(orders.number), PORT));
    let socket = socket.context("the far end's socket")?;
    let far = Arc::new(Far::default());
    let (counts, stopped, number) = (far.clone(), stop.clone(), orders.number);
    let echo = move || echo(&socket, number, &counts, &stopped);
    let echo = std::thread::Builder::new().name(FAR_END.into()).spawn(echo);
    let echo = echo.context("a thread")?;
    let mut guest = Guest::new(orders)?;
    say(&json!("ready"))?;
    let mut next = Instant::now();
    while !stop.load(Ordering::Relaxed) {
        guest.receive()?;
        let now = Instant::now();
        if now >= next {
            guest.send(now)?;
            next = now + Duration::from_micros(1000 + guest.random.below(8000));
        }
        guest.sleep(next.saturating_duration_since(now))?;
    }
    // Frames that come back from now on are not examined: they wait for this guest, not the daemon.
    echo.join().map_err(|_| "the far end panicked")??;
    Ok(guest.report(&far))
}

/// The far end of the cable: a socket of the host, which sends a new frame for each that comes.
fn echo(socket: &UdpSocket, guest: u8, far: &Far, stop: &AtomicBool) -> Outcome {
    let max_wait = Some(Duration::from_millis(100));
    socket.set_read_timeout(max_wait).context("the far end's socket")?;
    let mut bytes = [0; 2048];
    while !stop.load(Ordering::Relaxed) {
        let Ok((len, from)) = socket.recv_from(&mut bytes) else { continue };
        match Note::parse(&bytes[..len]) {
            Some(note) if note.guest == guest && note.way == Way::Out => {
                far.frames.fetch_add(1, Ordering::Relaxed);
                let back = Note { way: Way::Back, ..note };
                // A full queue of the host loses the frame: it is counted where it is missed.
                let _ = socket.send_to(&back.payload(len.wrapping_mul(7) % 1464), from);
            }
            _ => {
                far.wrong.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
    Ok(())
}

impl Guest {
    fn new(orders: &Orders) -> Outcome<Self> {
        // One guest takes its frames as they are, the other leaves checksums to the host.
        let offloads = if orders.number.is_multiple_of(2) { NetDriverOptions::OFFLOADS } else { 0 };
        let options = NetDriverOptions {
            queue_pairs: PAIRS,
            features: NetDriverOptions::PLAIN | offloads,
            transmit_size: 2048,
            ..NetDriverOptions::default()
        };
        let driver = NetDriver::connect(&orders.socket, &options).context("the session")?;
        Ok(Self {
            number: orders.number,
            driver,
            random: Random::new(orders.seed),
            next_number: 1,
            under_way: HashMap::new(),
            lost: HashMap::new(),
            latencies: Latencies::new(orders.daemon, Route::Net)?,
            back: 0,
            others: 0,
            wrong: 0,
            first_wrong: String::new(),
            bytes: Vec::new(),
        })
    }

    /// Sends a burst through one of the pairs, as far as the window is open.
    fn send(&mut self, now: Instant) -> Outcome {
        let is_old = |(sent, _): &(Instant, Rc<Mark>)| now.duration_since(*sent) > LOST;
        self.lost.extend(self.under_way.extract_if(|_, flight| is_old(flight)));
        let room = WINDOW - self.under_way.len();
        let count = usize::try_from(1 + self.random.below(BURST)).unwrap_or(1).min(room);
        if count == 0 {
            return Ok(());
        }
        let mark = Rc::new(self.latencies.mark());
        let pair = usize::try_from(self.random.below(PAIRS.into())).unwrap_or(0);
        let tx = &mut self.driver.pairs[pair].tx;
        let mut burst = Vec::new();
        for _ in 0..count {
            let note = Note { guest: self.number, way: Way::Out, number: self.next_number };
            let len = usize::try_from(self.random.below(1464)).unwrap_or(0);
            let frame = frame::frame(self.number, &note.payload(len));
            if !tx.send(&RawNetHeader::default(), &frame).context("a frame")? {
                break;
            }
            burst.push(note.number);
            self.next_number += 1;
        }
        let sent = Instant::now();
        tx.publish(0).context("a kick")?;
        self.under_way.extend(burst.into_iter().map(|number| (number, (sent, mark.clone()))));
        Ok(())
    }

    /// Takes all frames that are there, and compares.
    fn receive(&mut self) -> Outcome {
        for pair in 0..self.driver.pairs.len() {
            loop {
                self.bytes.clear();
                let rx = &mut self.driver.pairs[pair].rx;
                if rx.recv(&mut self.bytes).context("a frame")?.is_none() {
                    rx.refill().context("receive buffers")?;
                    break;
                }
                self.look_at_frame();
            }
        }
        Ok(())
    }

    fn look_at_frame(&mut self) {
        let payload = match frame::received(self.number, &self.bytes) {
            Received::Payload(payload) => payload,
            Received::Other => {
                self.others += 1;
                return;
            }
            Received::Foreign => return self.note(|| "a frame for somebody else".into()),
        };
        let Some(note) = Note::parse(payload) else {
            return self.note(|| "a frame with a wrong byte".into());
        };
        if note.guest != self.number || note.way != Way::Back {
            return self.note(|| format!("a frame of guest {}, {:?}", note.guest, note.way));
        }
        let flight = self.under_way.remove(&note.number).or_else(|| self.lost.remove(&note.number));
        let Some((sent, mark)) = flight else {
            return self.note(|| format!("frame {} came twice", note.number));
        };
        self.back += 1;
        let (took, end) = (sent.elapsed(), self.latencies.end(sent));
        let marks = (&*mark, end.as_ref());
        self.latencies.add(sent, took, marks, || format!("frame {}", note.number));
    }

    fn note(&mut self, what: impl FnOnce() -> String) {
        if self.wrong == 0 {
            self.first_wrong = what();
        }
        self.wrong += 1;
    }

    /// Sleeps until a frame is there, at most for `limit`.
    fn sleep(&mut self, limit: Duration) -> Outcome {
        let mut is_there = false;
        for pair in &mut self.driver.pairs {
            is_there |= pair.rx.enable_notifications();
        }
        if !is_there {
            let pairs = self.driver.pairs.iter_mut();
            let vrings: Vec<_> = pairs.map(|pair| &*pair.rx.vring()).collect();
            let mut fds: Vec<_> = vrings
                .iter()
                .map(|vring| PollFd::from_borrowed_fd(vring.call_fd(), PollFlags::IN))
                .collect();
            let limit = Timespec { tv_sec: 0, tv_nsec: limit.subsec_nanos().into() };
            poll(&mut fds, Some(&limit)).context("poll")?;
        }
        for pair in &mut self.driver.pairs {
            pair.rx.vring().clear_call().context("a call")?;
            pair.rx.disable_notifications();
        }
        Ok(())
    }

    fn report(&self, far: &Far) -> Value {
        let sent = self.next_number - 1;
        let missing = sent - self.back;
        // Frames under way at the end are not lost.
        let lost = missing.saturating_sub(self.under_way.len() as u64);
        let mut report = self.latencies.report();
        report["what"] = json!("frames");
        report["count"] = json!(sent);
        report["lost"] = json!(lost);
        report["others"] = json!(self.others);
        report["far"] = json!(far.frames.load(Ordering::Relaxed));
        let far_wrong = far.wrong.load(Ordering::Relaxed);
        report["wrong"] = json!(self.wrong + far_wrong);
        report["first_wrong"] = match (self.first_wrong.as_str(), far_wrong) {
            ("", 1..) => json!("the far end got a frame that is not whole, or not this guest's"),
            (sentence, _) => json!(sentence),
        };
        report
    }
}
