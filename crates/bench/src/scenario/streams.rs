//! Streams over several ways that take turns of a fraction of a second: for loads that differ more
//! from one second to the next than the ways differ from each other.
//!
//! ```text
//! make:   every way is made, with its daemon, its driver half and its streams; all of them rest
//!         this many times:  each way has a turn, another one first each time
//!         what a way has sent in all its turns, and taken for it, is its sample
//! turn:   note the CPU time of daemon and driver half, which rest
//!         daemon and driver half are put on different CPUs, the other way round each time
//!         the streams run; after a moment for windows to grow, all may run everywhere, and
//!         bytes and clock are noted
//!         the streams rest; what is under way arrives; note bytes and CPU time again
//! ```
//! 1. Throughput is that of the middle of a turn. CPU time is that of the whole turn, for all bytes
//!    of the turn: it is read while nobody runs, so that no clock tick decides what is counted.
//! 2. Turns of all ways that other programs have disturbed are taken again: half a second, and not
//!    a whole round.
//! 3. The programs of the guest, those of the host, the driver half and the daemon have a
//!    scheduling group each, however many streams and queue pairs there are: how the CPUs are
//!    divided among them is the same for all ways.
//! 4. Linux keeps a thread where it was. Where daemon and driver half happen to share a CPU, the
//!    streams are slower by a quarter, and would stay so for all turns: two ways of the same kind
//!    would differ by more than four queue pairs and one do. So every turn begins with the two
//!    apart; afterwards the system may move them.
//! 5. Other properties of a connection, such as the queue of its flow, change when the ways are
//!    made anew: that is done [`MAKES`] times a round, and each gives a sample.

use super::net::{Beside, NamespaceJoin, NetBench, Road};
use crate::load::stream::{Page, STREAMS_MAX};
use crate::measure::{Affinity, busy_seconds, now};
use crate::netns::address;
use crate::own_load::own_load;
use crate::peer;
use crate::progress;
use crate::report::Party;
use crate::report::net::{Compare, NetCell, NetSample};
use std::time::Duration;

/// How long streams run before they are measured, and then until they rest.
const GROW: Duration = Duration::from_millis(30);
const TURN: Duration = Duration::from_millis(120);
/// If nothing arrives for this long, all streams rest; and the longest wait for that.
const REST: Duration = Duration::from_millis(10);
const REST_MAX: Duration = Duration::from_millis(500);
/// Longest time until all streams of a way have begun.
const START: Duration = Duration::from_secs(5);
/// Times that a round makes all ways.
const MAKES: usize = 2;
/// Turns of a way for each second that a run is asked to last.
const TURNS_PER_SECOND: f64 = 8.0;
/// Longest time of a round by the tools that run beside it.
const ROUND_SECONDS: u32 = 60;
/// Share of all CPUs that other programs may take while each way has a turn.
const OTHERS_MAX: f64 = 0.1;
/// Bytes of a message where the load leaves that open, as iperf3 has it.
const MESSAGE: usize = 128 << 10;

/// The TCP streams of a load.
#[derive(Clone, Copy, Debug)]
pub(super) struct TcpLoad {
    /// From the host's side to the guest's.
    pub(super) to_guest: bool,
    /// Connections.
    pub(super) sessions: usize,
    /// Bytes of each write of the sender; `None`: [`MESSAGE`].
    pub(super) message: Option<usize>,
}

/// One of the ways, while its streams are there.
struct Lane {
    road: Road,
    page: Page,
    /// The side that sends, and the other one.
    sender: Beside,
    receiver: Beside,
    sums: Sums,
    /// Where its programs may run.
    cpus: Affinity,
}

/// The sums over all turns of a way.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    /// Bytes that arrived in the middle of turns, and how long that was.
    measured: u64,
    seconds: f64,
    /// Bytes that arrived in whole turns, and CPU seconds of daemon and driver half in these.
    bytes: u64,
    backend_seconds: f64,
    joiner_seconds: f64,
}

impl Sums {
    /// Mbit/s, and the per cent of a CPU that this rate takes: of the daemon, of the driver half.
    #[allow(clippy::cast_precision_loss, reason = "bytes of one round")]
    fn rates(&self) -> (f64, f64, f64) {
        let rate = self.measured as f64 / self.seconds.max(f64::MIN_POSITIVE);
        let percent = |seconds: f64| seconds / self.bytes.max(1) as f64 * rate * 100.0;
        (rate * 8.0 / 1e6, percent(self.backend_seconds), percent(self.joiner_seconds))
    }
}

/// Runs one cell of these parties, unless it was not asked for.
pub(super) fn cell(
    bench: &NetBench<'_>,
    (name, unit): (String, &'static str),
    parties: &[(String, NamespaceJoin)],
    load: TcpLoad,
    compare: Compare,
) -> Result<Option<NetCell>, String> {
    if !bench.wants(&name) {
        return Ok(None);
    }
    progress::cell(&name);
    let mut found: Vec<Party<NetSample>> = Vec::new();
    found.extend(parties.iter().map(|(name, _)| Party { name: name.clone(), samples: vec![] }));
    let ways: Vec<&NamespaceJoin> = parties.iter().map(|(_, way)| way).collect();
    let makes = if bench.args.smoke { 1 } else { MAKES };
    for number in 0..bench.args.rounds() * makes {
        let samples =
            make(bench, &ways, load, number).map_err(|error| format!("{name}: {error}"))?;
        if samples.iter().any(|sample| sample.throughput <= 0.0) {
            return Err(format!("{name}: nothing came through"));
        }
        found.iter_mut().zip(samples).for_each(|(party, sample)| party.samples.push(sample));
    }
    Ok(Some(NetCell::new((name, load.sessions, unit), found, compare)))
}

/// Makes all ways, for the `number`th time: a sample of each.
fn make(
    bench: &NetBench<'_>,
    ways: &[&NamespaceJoin],
    load: TcpLoad,
    number: usize,
) -> Result<Vec<NetSample>, String> {
    let mut lanes = Vec::new();
    for way in ways {
        lanes.push(Lane::start(bench, way, load)?);
    }
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "1 to 8")]
    let turns = (TURNS_PER_SECOND * bench.args.seconds()).ceil() as usize;
    let (mut spare, mut disturbed) = (if bench.args.smoke { 0 } else { turns }, false);
    for turn in 0..turns {
        let before: Vec<Sums> = lanes.iter().map(|lane| lane.sums).collect();
        // The first way of a round has a little less: over all makes, each is first as often.
        while take_turns(&mut lanes, number * turns + turn)? {
            if spare == 0 || progress::is_late() {
                disturbed = true;
                break;
            }
            spare -= 1;
            lanes.iter_mut().zip(&before).for_each(|(lane, sums)| lane.sums = *sums);
        }
    }
    let finish = |lane: Lane| Ok(NetSample { disturbed, ..lane.finish()? });
    lanes.into_iter().map(finish).collect()
}

/// One turn of each lane, beginning with another lane each time. True: other programs took too much
/// of the CPUs during the turns.
fn take_turns(lanes: &mut [Lane], turn: usize) -> Result<bool, String> {
    let (before, start) = (others(lanes), now());
    let count = lanes.len();
    for step in 0..count {
        lanes[(turn + step) % count].turn(turn)?;
    }
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let all = start.elapsed() * u32::try_from(cpus).unwrap_or(1);
    Ok(others(lanes) - before > all.as_secs_f64() * OTHERS_MAX)
}

/// CPU seconds so far of everybody but the lanes, and what has run for them and ended.
fn others(lanes: &[Lane]) -> f64 {
    let ours: f64 = lanes.iter().map(Lane::cpu_seconds).sum();
    busy_seconds() - ours - peer::ended_cpu_seconds()
}

impl Lane {
    fn start(bench: &NetBench<'_>, way: &NamespaceJoin, load: TcpLoad) -> Result<Self, String> {
        let road = Road::new(bench, way, (&bench.everywhere, &bench.everywhere), ROUND_SECONDS)?;
        let path = bench.own_file("page");
        let page = Page::create(&path).map_err(|e| e.to_string())?;
        let streams = u16::try_from(load.sessions).unwrap_or(u16::MAX).min(STREAMS_MAX);
        let common = [format!("--page={}", path.display()), format!("--streams={streams}")];
        let host = address(super::net::HOST);
        let begin = |space, place: String, sends: bool| {
            let message = format!("--send={}", load.message.unwrap_or(MESSAGE));
            let mut command = own_load(Some(space), &["stream", &place])?;
            command.args(&common).args(sends.then_some(message));
            Beside::start(&mut command, &bench.everywhere)
        };
        let host_side = begin(&road.host, format!("--listen={host}"), load.to_guest)?;
        let guest_side = begin(&road.guest, format!("--connect={host}"), !load.to_guest)?;
        let (sender, receiver) =
            if load.to_guest { (host_side, guest_side) } else { (guest_side, host_side) };
        let (sums, cpus) = (Sums::default(), bench.everywhere.clone());
        let mut lane = Self { road, page, sender, receiver, sums, cpus };
        lane.await_streams(streams)?;
        Ok(lane)
    }

    /// Lets all streams begin, and rest.
    fn await_streams(&mut self, streams: u16) -> Result<(), String> {
        let start = now();
        self.run()?;
        while !self.page.all_received(streams) {
            if start.elapsed() > START {
                return Err("a stream has not begun".to_owned());
            }
            std::thread::sleep(REST);
        }
        std::thread::sleep(TURN);
        self.rest();
        Ok(())
    }

    fn run(&mut self) -> Result<(), String> {
        self.page.set_running(true);
        self.sender.tell(b"r")
    }

    /// Lets the streams rest, and waits until they do.
    fn rest(&self) {
        self.page.set_running(false);
        let (start, mut seen) = (now(), None);
        while start.elapsed() < REST_MAX {
            let received = self.page.received();
            if seen.replace(received) == Some(received) {
                return;
            }
            std::thread::sleep(REST);
        }
    }

    /// The turn of this number: its parity says on which CPU the daemon begins.
    fn turn(&mut self, number: usize) -> Result<(), String> {
        let (bytes, ran) = (self.page.received(), self.road.ran_seconds());
        self.road.put_apart(&self.cpus, number);
        self.run()?;
        std::thread::sleep(GROW);
        self.road.let_go(&self.cpus);
        let (first, start) = (self.page.received(), now());
        std::thread::sleep(TURN);
        let (last, elapsed) = (self.page.received(), start.elapsed());
        self.rest();
        let after = self.road.ran_seconds();
        self.sums.measured += last - first;
        self.sums.seconds += elapsed.as_secs_f64();
        self.sums.bytes += self.page.received() - bytes;
        self.sums.backend_seconds += after.0 - ran.0;
        self.sums.joiner_seconds += after.1 - ran.1;
        Ok(())
    }

    /// CPU seconds of all its programs.
    fn cpu_seconds(&self) -> f64 {
        self.road.cpu_seconds() + self.sender.cpu_seconds() + self.receiver.cpu_seconds()
    }

    fn finish(self) -> Result<NetSample, String> {
        let Self { road, page, sender, receiver, sums, .. } = self;
        drop((sender, receiver));
        let [p50_us, p99_us] = [50, 99].map(|percent| percentile_us(&page.times(), percent));
        let (throughput, backend_cpu, joiner_cpu) = sums.rates();
        let costs = road.finish(sums.seconds, &[])?;
        let cpu = backend_cpu + joiner_cpu;
        Ok(NetSample { throughput, cpu, backend_cpu, p50_us, p99_us, ..costs })
    }
}

/// Microseconds that so many per cent of these sorted nanoseconds do not exceed; 0 of none.
fn percentile_us(times_ns: &[u64], percent: usize) -> f64 {
    let at = (times_ns.len() * percent).div_ceil(100).saturating_sub(1);
    times_ns.get(at).map_or(0.0, |ns| Duration::from_nanos(*ns).as_secs_f64() * 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_those_of_what_was_timed() {
        let times: Vec<u64> = (1..=200).map(|ms| ms * 1000).collect();
        assert_eq!([50, 99].map(|percent| percentile_us(&times, percent)), [100.0, 198.0]);
        assert_eq!((percentile_us(&[7000], 99), percentile_us(&[], 50)), (7.0, 0.0));
    }

    #[test]
    fn cpu_is_that_of_all_bytes_at_the_rate_of_the_middle_of_turns() {
        // 1 MB in the middle of 0.1 s; 2 MB in all, for 30 ms and 20 ms.
        let sums = Sums {
            measured: 1_000_000,
            seconds: 0.1,
            bytes: 2_000_000,
            backend_seconds: 0.03,
            joiner_seconds: 0.02,
        };
        let (rate, backend, joiner) = sums.rates();
        let is = |value: f64, expected: f64| (value - expected).abs() < 1e-6;
        assert!(
            is(rate, 80.0) && is(backend, 15.0) && is(joiner, 10.0),
            "{rate} {backend} {joiner}"
        );
        assert_eq!(Sums::default().rates().1, 0.0);
    }
}
