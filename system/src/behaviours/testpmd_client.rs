//! DPDK's testpmd as front-end: what it sends and receives is what we, and the host, count.

use super::{Behaviour, Scene};
use crate::command::wait_for;
use crate::daemon::Daemon;
use crate::net::testpmd::{Options, Testpmd};
use crate::net::{Capture, Frames, Namespace};
use crate::{Context, Outcome, check};
use std::collections::HashMap;
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "testpmd_client", run };

/// Descriptors of testpmd's rings: what it has not looked at when it stops.
const RING: u64 = 1024;
const PINGS: usize = 50;
const TAP: &str = "tap0";
const SETTLED: Duration = Duration::from_secs(5);
/// testpmd forwards this long.
const A_WHILE: Duration = Duration::from_millis(300);

fn run(scene: &Scene<'_>) -> Outcome {
    let namespace = Namespace::new()?;
    for pairs in [1, 2] {
        for is_mergeable in [true, false] {
            let case = Case { scene, namespace: &namespace, pairs, is_mergeable };
            let name = format!("{pairs} pairs, mergeable {is_mergeable}");
            case.txonly_to_null().context(format!("{name}: txonly to null"))?;
            case.rxonly_from_generator().context(format!("{name}: rxonly from the generator"))?;
            case.txonly_to_tap().context(format!("{name}: txonly to a tap"))?;
            case.echoes_over_tap().context(format!("{name}: a loop over a tap"))?;
        }
    }
    namespace.holds_only(&[])
}

/// One way to connect.
struct Case<'a> {
    scene: &'a Scene<'a>,
    namespace: &'a Namespace,
    pairs: u32,
    is_mergeable: bool,
}

impl Case<'_> {
    fn serve(&self, port: &[&str]) -> Outcome<Daemon> {
        let pairs = self.pairs.to_string();
        self.scene.serve_net(self.namespace, &[port, &["--queue-pairs", &pairs]].concat())
    }

    fn connect(&self, daemon: &Daemon, mode: &str, frame_size: u32) -> Outcome<Testpmd> {
        let (pairs, is_mergeable, socket) = (self.pairs, self.is_mergeable, &daemon.socket());
        let options = Options { socket, pairs, is_mergeable, mode, frame_size, devices: &[] };
        Testpmd::start(&options, self.scene.folder.path(), &self.scene.log("testpmd.log"))
    }

    fn txonly_to_null(&self) -> Outcome {
        let daemon = self.serve(&["--null"])?;
        let mut testpmd = self.connect(&daemon, "txonly", 64)?;
        testpmd.forward()?;
        std::thread::sleep(A_WHILE);
        testpmd.pause()?;
        let sent = testpmd.counts()?.tx;
        check(sent > 1000, || format!("testpmd sent only {sent}"))?;
        until_counted(&daemon, 1, "packets", sent)?;
        until_counted(&daemon, 1, "bytes_passed", sent * 64)?;
        testpmd.quit()?;
        daemon.stop()
    }

    fn rxonly_from_generator(&self) -> Outcome {
        let daemon = self.serve(&["--null", "--generate", "1000"])?;
        let mut testpmd = self.connect(&daemon, "rxonly", 64)?;
        testpmd.forward()?;
        std::thread::sleep(A_WHILE);
        testpmd.pause()?;
        let received = testpmd.counts()?.rx;
        check(received > 1000, || format!("testpmd received only {received}"))?;
        let unseen = u64::from(self.pairs) * RING;
        let passed = sum(&daemon, 0, "packets")?;
        let agrees = (received..=received + unseen).contains(&passed);
        check(agrees, || format!("{passed} were passed on, testpmd received {received}"))?;
        testpmd.quit()?;
        daemon.stop()
    }

    fn txonly_to_tap(&self) -> Outcome {
        let daemon = self.serve(&["--tap", TAP])?;
        self.namespace.address(TAP)?;
        let mut testpmd = self.connect(&daemon, "txonly", 200)?;
        let file = self.scene.file("txonly.pcap");
        let before = self.host_received()?;
        let capture = Capture::start(self.namespace, TAP, "inbound and udp", &file)?;
        testpmd.forward()?;
        std::thread::sleep(Duration::from_millis(50));
        testpmd.pause()?;
        let sent = testpmd.counts()?.tx;
        until_counted(&daemon, 1, "packets", sent)?;
        let host = self.host_received()? - before;
        check(host == sent, || format!("testpmd sent {sent}, the tap received {host}"))?;
        let frames = capture.stop()?;
        let enough = usize::try_from(sent).unwrap_or(usize::MAX);
        frames.are_right("txonly", "frame.len == 200 && ip.checksum.status == 1", enough)?;
        testpmd.quit()?;
        daemon.stop()
    }

    /// Frames the host's interface has received, also those it had no use for.
    fn host_received(&self) -> Outcome<u64> {
        let path = format!("cat /sys/class/net/{TAP}/statistics/rx_packets");
        self.namespace.run(&path)?.trim().parse().context("the tap's counter")
    }

    /// The host's echo requests come back from testpmd with the data they had.
    fn echoes_over_tap(&self) -> Outcome {
        let daemon = self.serve(&["--tap", TAP])?;
        self.namespace.address(TAP)?;
        let mut testpmd = self.connect(&daemon, "icmpecho", 64)?;
        testpmd.forward()?;
        let file = self.scene.file("echo.pcap");
        let capture = Capture::start(self.namespace, TAP, "icmp", &file)?;
        ping(self.namespace, PINGS)?;
        echoes_agree(&capture.stop()?, PINGS)?;
        testpmd.pause()?;
        let counts = testpmd.counts()?;
        check(counts.tx >= PINGS as u64, || format!("testpmd answered {} times", counts.tx))?;
        until_counted(&daemon, 0, "packets", counts.rx)?;
        until_counted(&daemon, 1, "packets", counts.tx)?;
        testpmd.quit()?;
        daemon.stop()
    }
}

/// Pings through the tap; every echo comes back.
pub(super) fn ping(namespace: &Namespace, count: usize) -> Outcome {
    let words = format!("busybox ping -c {count} -i 0.02 -W 2 -s 1300 192.0.2.9");
    let said = namespace.run(&words)?;
    check(said.contains(" 0% packet loss"), || format!("echoes were lost: {said}"))
}

/// Requests and replies of a capture, in pairs with the same data.
pub(super) fn echoes_agree(frames: &Frames, count: usize) -> Outcome {
    frames.are_right("echoes", "icmp.type == 0", count)?;
    let fields = |filter| frames.fields(filter, &["icmp.seq", "data.data"]);
    let requests: HashMap<_, _> =
        fields("icmp.type == 8")?.iter().filter_map(|line| split(line)).collect();
    let replies = fields("icmp.type == 0")?;
    check(requests.len() == count && replies.len() == count, || {
        format!("{} requests and {} replies, {count} pings", requests.len(), replies.len())
    })?;
    for reply in &replies {
        let (number, data) = split(reply).ok_or("a reply without data")?;
        // Hexadecimal; ping writes the time of the request first.
        let is_same = data.len() == 2 * 1300 && requests.get(&number) == Some(&data);
        check(is_same, || format!("reply {number} holds other data than its request"))?;
    }
    Ok(())
}

fn split(line: &str) -> Option<(String, String)> {
    line.split_once('\t').map(|(number, data)| (number.to_owned(), data.to_owned()))
}

/// A counter of all receiving (0) or sending (1) queues.
fn sum(daemon: &Daemon, direction: usize, counter: &str) -> Outcome<u64> {
    let queues = daemon.queues()?;
    // The last is the control queue.
    let pairs = queues.len() / 2 * 2;
    let of_direction = queues.iter().take(pairs).skip(direction).step_by(2);
    of_direction.map(|queue| queue.value(counter)).sum()
}

/// Waits until all queues of a direction have counted so many.
fn until_counted(daemon: &Daemon, direction: usize, counter: &str, expected: u64) -> Outcome {
    let mut last = 0;
    let counted = wait_for("the counters", SETTLED, || {
        last = sum(daemon, direction, counter)?;
        Ok((last == expected).then_some(()))
    });
    counted.map_err(|_| format!("manyring's {counter}: {last}, testpmd's: {expected}"))
}
