//! DPDK's testpmd as front-end: what it sends and receives is what we, and the host, count.

use super::{Behaviour, Scene};
use crate::command::wait_for;
use crate::daemon::Daemon;
use crate::net::testpmd::{Counts, Options, Rings, Testpmd};
use crate::net::{Capture, Frames, Namespace};
use crate::{Context, Outcome, check};
use std::collections::HashMap;
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "testpmd_client", run };

/// Descriptors of testpmd's rings.
const RING: u64 = 1024;
const PINGS: usize = 50;
/// Bytes in each echo.
const DATA: usize = 1300;
const TAP: &str = "tap0";
const SETTLED: Duration = Duration::from_secs(30);
/// testpmd forwards this long, again and again until it has moved enough.
const A_WHILE: Duration = Duration::from_millis(300);
const TRIES: usize = 60;

fn run(scene: &Scene<'_>) -> Outcome {
    let namespace = Namespace::new()?;
    for (pairs, rings, is_mergeable, in_order) in [
        (1, Rings::Split, true, true),
        (1, Rings::Split, false, true),
        (2, Rings::Split, true, false),
        (1, Rings::Packed, false, false),
        (2, Rings::Packed, true, true),
        (1, Rings::Vectorised, false, true),
    ] {
        let case = Case { scene, namespace: &namespace, pairs, rings, is_mergeable, in_order };
        let name =
            format!("{pairs} pairs, {rings:?}, mergeable {is_mergeable}, in order {in_order}");
        case.txonly_to_null().context(format!("{name}: txonly to null"))?;
        case.rxonly_from_generator().context(format!("{name}: rxonly from the generator"))?;
        case.txonly_to_tap().context(format!("{name}: txonly to a tap"))?;
        case.echoes_over_tap().context(format!("{name}: a loop over a tap"))?;
    }
    namespace.holds_only(&[])
}

/// One way to connect.
struct Case<'a> {
    scene: &'a Scene<'a>,
    namespace: &'a Namespace,
    pairs: u32,
    rings: Rings,
    is_mergeable: bool,
    in_order: bool,
}

impl Case<'_> {
    fn serve(&self, port: &[&str]) -> Outcome<Daemon> {
        let pairs = self.pairs.to_string();
        self.scene.serve_net(self.namespace, &[port, &["--queue-pairs", &pairs]].concat())
    }

    /// On a tap that is silent of itself: what the host sends while testpmd sets up would be lost.
    fn serve_tap(&self) -> Outcome<Daemon> {
        let daemon = self.serve(&["--tap", TAP])?;
        for words in [
            format!("busybox sysctl -w net.ipv6.conf.{TAP}.disable_ipv6=1"),
            format!("ip address add 192.0.2.1/24 dev {TAP}"),
            format!("ip link set {TAP} up"),
        ] {
            self.namespace.run(&words)?;
        }
        Ok(daemon)
    }

    fn connect(&self, daemon: &Daemon, mode: &str, frame_size: u32) -> Outcome<Testpmd> {
        let Self { pairs, rings, is_mergeable, in_order, .. } = *self;
        let (socket, devices) = (&daemon.socket(), &[]);
        let options = Options {
            socket,
            second_socket: None,
            pairs,
            rings,
            is_mergeable,
            in_order,
            mode,
            frame_size,
            devices,
            more: &[],
        };
        Testpmd::start(&options, self.scene.folder.path(), &self.scene.log("testpmd.log"))
    }

    fn txonly_to_null(&self) -> Outcome {
        let daemon = self.serve(&["--null"])?;
        let mut testpmd = self.connect(&daemon, "txonly", 64)?;
        let sent = forward_until(&mut testpmd, 1000, |counts| counts.tx)?;
        check(sent > 1000, || format!("testpmd sent only {sent}"))?;
        until_counted(&daemon, 1, "packets", sent)?;
        until_counted(&daemon, 1, "bytes_passed", sent * 64)?;
        testpmd.quit()?;
        daemon.stop()
    }

    /// The frames passed are those received, except for frames in the rings before and after.
    fn rxonly_from_generator(&self) -> Outcome {
        let daemon = self.serve(&["--null", "--generate", "1000"])?;
        let mut testpmd = self.connect(&daemon, "rxonly", 64)?;
        let full = settled(&daemon)?;
        let before = testpmd.counts()?.rx;
        let received = forward_until(&mut testpmd, before + 1000, |counts| counts.rx)? - before;
        let passed = settled(&daemon)? - full;
        check(received > 1000, || format!("testpmd received only {received}"))?;
        let unseen = u64::from(self.pairs) * RING;
        check(passed.abs_diff(received) <= unseen, || {
            format!("{passed} were passed on, testpmd received {received}")
        })?;
        testpmd.quit()?;
        daemon.stop()
    }

    fn txonly_to_tap(&self) -> Outcome {
        let daemon = self.serve_tap()?;
        let mut testpmd = self.connect(&daemon, "txonly", 200)?;
        let file = self.scene.log("txonly.pcap");
        let before = self.host_received()?;
        let capture = Capture::start(self.namespace, TAP, "inbound and udp", &file)?;
        testpmd.forward()?;
        std::thread::sleep(Duration::from_millis(50));
        testpmd.pause()?;
        let sent = testpmd.counts()?.tx;
        until_counted(&daemon, 1, "packets", sent)?;
        let host = self.host_received()? - before;
        check(host == sent, || format!("testpmd sent {sent}, the tap received {host}"))?;
        // The kernel holds far more than the first thousand frames for a capture that comes late.
        let enough = usize::try_from(sent.min(1000)).unwrap_or(usize::MAX);
        let frames = capture.stop(enough)?;
        testpmd.quit()?;
        daemon.stop()?;
        frames.are_right("txonly", "frame.len == 200 && ip.checksum.status == 1", enough)
    }

    /// Frames the host's interface has received, also those it had no use for.
    fn host_received(&self) -> Outcome<u64> {
        let path = format!("cat /sys/class/net/{TAP}/statistics/rx_packets");
        self.namespace.run(&path)?.trim().parse().context("the tap's counter")
    }

    /// The host's echo requests come back from testpmd with the data they had.
    fn echoes_over_tap(&self) -> Outcome {
        let daemon = self.serve_tap()?;
        let mut testpmd = self.connect(&daemon, "icmpecho", 64)?;
        testpmd.forward()?;
        let file = self.scene.log("echo.pcap");
        let capture = Capture::start(self.namespace, TAP, "icmp", &file)?;
        ping(self.namespace, PINGS)?;
        let frames = capture.stop(2 * PINGS)?;
        testpmd.pause()?;
        let counts = testpmd.counts()?;
        check(counts.tx >= PINGS as u64, || format!("testpmd answered {} times", counts.tx))?;
        until_counted(&daemon, 0, "packets", counts.rx)?;
        until_counted(&daemon, 1, "packets", counts.tx)?;
        testpmd.quit()?;
        daemon.stop()?;
        echoes_agree(&frames, PINGS)
    }
}

/// Has testpmd forward until it has counted more than `enough`; what it has counted.
fn forward_until(
    testpmd: &mut Testpmd,
    enough: u64,
    counted: impl Fn(Counts) -> u64,
) -> Outcome<u64> {
    let mut count = 0;
    for _ in 0..TRIES {
        testpmd.forward()?;
        std::thread::sleep(A_WHILE);
        testpmd.pause()?;
        count = counted(testpmd.counts()?);
        if count > enough {
            break;
        }
    }
    Ok(count)
}

/// Pings through the tap; every echo comes back.
pub(super) fn ping(namespace: &Namespace, count: usize) -> Outcome {
    let words = format!("busybox ping -c {count} -i 0.02 -W 20 -s {DATA} 192.0.2.9");
    let said = namespace.run(&words)?;
    check(said.contains(" 0% packet loss"), || format!("echoes were lost: {said}"))
}

/// Requests and replies of a capture, in pairs with the same data.
pub(super) fn echoes_agree(frames: &Frames, count: usize) -> Outcome {
    let names = ["icmp.type", "icmp.checksum.status", "icmp.seq", "icmp.data_time", "data.data"];
    let lines = frames.fields("icmp", &names)?;
    let of_type = |kind: &str| -> HashMap<String, String> {
        let start = format!("{kind}\t1\t");
        lines.iter().filter_map(|line| split(line.strip_prefix(&start)?)).collect()
    };
    let (requests, replies) = (of_type("8"), of_type("0"));
    check(requests.len() == count && replies.len() == count, || {
        format!("{} requests and {} replies, {count} pings", requests.len(), replies.len())
    })?;
    for (number, data) in &replies {
        // In hexadecimal; ping writes the time of the request first. Where the first eight bytes
        // could be a date of today, tshark shows them apart.
        let (time, rest) = data.split_once('\t').unwrap_or_default();
        let len = rest.len() / 2 + if time.is_empty() { 0 } else { 8 };
        let is_same = len == DATA && requests.get(number) == Some(data);
        check(is_same, || format!("reply {number} holds other data than its request"))?;
    }
    Ok(())
}

/// `5 TAB 0123ab..`
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

/// The frames that the receiving queues have passed on, once their rings are full.
fn settled(daemon: &Daemon) -> Outcome<u64> {
    let mut last = 0;
    wait_for("full rings", SETTLED, || {
        let before = std::mem::replace(&mut last, sum(daemon, 0, "packets")?);
        std::thread::sleep(Duration::from_millis(200));
        Ok((before == last && last > 0).then_some(last))
    })
}

/// Waits until all queues of a direction together have counted `expected`.
fn until_counted(daemon: &Daemon, direction: usize, counter: &str, expected: u64) -> Outcome {
    let mut last = 0;
    let counted = wait_for("the counters", SETTLED, || {
        last = sum(daemon, direction, counter)?;
        Ok((last == expected).then_some(()))
    });
    counted.map_err(|_| format!("manyring's {counter}: {last}, testpmd's: {expected}"))
}
