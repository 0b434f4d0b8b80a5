//! DPDK's testpmd as both guests of one switch, in every ring format: frames go round between its
//! two ports, and what it counts is what we count.

use super::{Behaviour, Scene};
use crate::command::wait_for;
use crate::daemon::{Daemon, DaemonOptions};
use crate::net::Namespace;
use crate::net::testpmd::{Options, Rings, Testpmd};
use crate::{Context, Outcome, check};
use serde_json::Value;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "testpmd_switch", run };

const NAMES: [&str; 2] = ["left", "right"];
const MACS: [&str; 2] = ["52:54:00:00:00:01", "52:54:00:00:00:02"];
/// Bursts of 32 frames that each port sends first.
const BURSTS: u32 = 16;
/// Frames that each port must have received in the end.
const ENOUGH: u64 = 5_000;
const A_WHILE: Duration = Duration::from_millis(300);
const TRIES: usize = 60;
const SETTLED: Duration = Duration::from_secs(30);

fn run(scene: &Scene<'_>) -> Outcome {
    let namespace = Namespace::new()?;
    for (rings, is_mergeable, in_order) in [
        (Rings::Split, true, false),
        (Rings::Split, false, true),
        (Rings::Packed, true, false),
        (Rings::Packed, true, true),
        (Rings::Vectorised, false, true),
    ] {
        let what = format!("{rings:?}, mergeable {is_mergeable}, in order {in_order}");
        let case = Case { scene, namespace: &namespace, rings, is_mergeable, in_order };
        for frame_size in [64, 1518] {
            case.goes_round(frame_size).context(format!("{what}, {frame_size} bytes"))?;
        }
    }
    namespace.holds_only(&[])
}

/// One way to connect.
struct Case<'a> {
    scene: &'a Scene<'a>,
    namespace: &'a Namespace,
    rings: Rings,
    is_mergeable: bool,
    in_order: bool,
}

impl Case<'_> {
    fn goes_round(&self, frame_size: u32) -> Outcome {
        let (daemon, sockets) = self.serve()?;
        let Self { rings, is_mergeable, in_order, .. } = *self;
        let peers = [format!("--eth-peer=0,{}", MACS[1]), format!("--eth-peer=1,{}", MACS[0])];
        let options = Options {
            socket: &sockets[0],
            second_socket: Some(&sockets[1]),
            pairs: 1,
            rings,
            is_mergeable,
            in_order,
            mode: "mac",
            frame_size,
            devices: &[],
            more: &peers.each_ref().map(String::as_str),
        };
        let log = self.scene.log("testpmd.log");
        let mut testpmd = Testpmd::start(&options, self.scene.folder.path(), &log)?;
        let mut received = [0; 2];
        for _ in 0..TRIES {
            // Further frames each time: those that were dropped go round no more.
            testpmd.forward_first(BURSTS)?;
            std::thread::sleep(A_WHILE);
            testpmd.pause()?;
            received = [testpmd.counts_of(0)?.rx, testpmd.counts_of(1)?.rx];
            if received.iter().all(|count| *count >= ENOUGH) {
                break;
            }
        }
        check(received.iter().all(|count| *count >= ENOUGH), || {
            format!("testpmd's ports received {received:?} frames")
        })?;
        // In this mode testpmd takes the frames that still lie in the rings and drops them, until
        // none is on its way.
        testpmd.set_mode("rxonly")?;
        testpmd.forward()?;
        let last = agree(&mut testpmd, &daemon)?;
        for (port, queue) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            let faults = counter(&last, port, queue, "faults");
            check(faults == Some(0), || format!("port {port}, queue {queue}: {faults:?} faults"))?;
        }
        testpmd.quit()?;
        daemon.stop()
    }

    fn serve(&self) -> Outcome<(Daemon, [PathBuf; 2])> {
        let sockets = NAMES.map(|name| self.scene.file(&format!("{name}.sock")));
        let config = self.scene.file("manyring.toml");
        let control = self.scene.file("run-control.sock");
        let mut text = format!("[daemon]\ncontrol = '{}'\n", control.display());
        text += "[[switch]]\nname = 's0'\n";
        for (name, socket) in NAMES.iter().zip(&sockets) {
            let socket = socket.display();
            let _ =
                write!(text, "[[net]]\nname = '{name}'\nsocket_path = '{socket}'\nswitch = 's0'\n");
        }
        std::fs::write(&config, text).context(config.display())?;
        let options = DaemonOptions {
            arguments: ["run".into(), "--config".into(), config.display().to_string()].into(),
            is_controlled: false,
            ..self.scene.net_options(self.namespace, &[])
        };
        Ok((Daemon::start(options, &control)?, sockets))
    }
}

/// Waits until testpmd and the daemon count the same frames; gives the daemon's counters. Each
/// frame that testpmd sent on one port was received on the other, or was dropped and counted.
fn agree(testpmd: &mut Testpmd, daemon: &Daemon) -> Outcome<Value> {
    let mut seen = None;
    let agreed = wait_for("the counters", SETTLED, || {
        let counted = [testpmd.counts_of(0)?, testpmd.counts_of(1)?];
        let stats = daemon.stats()?;
        let is_so = (0..2).all(|port| {
            let (own, other) = (counted[port], counted[1 - port]);
            let [rx, tx] = [0, 1].map(|queue| counter(&stats, port, queue, "packets"));
            rx == Some(own.rx)
                && tx == Some(own.tx)
                && own.rx + lost(&stats, 1 - port, port) == other.tx
        });
        let switch = |port: usize| stats.pointer(&format!("/devices/{port}/switch")).cloned();
        seen = Some((counted, switch(0), switch(1)));
        Ok(is_so.then_some(stats))
    });
    agreed.map_err(|error| format!("{error}; testpmd and the daemon count {seen:?}"))
}

/// A counter of a queue (0 receives, 1 sends) of a device.
fn counter(stats: &Value, device: usize, queue: usize, name: &str) -> Option<u64> {
    let queue = stats.get("devices")?.get(device)?.get("queues")?.get(queue)?;
    queue.get("counters").unwrap_or(queue).get(name)?.as_u64()
}

/// Frames from one port of the switch to the other that were dropped: the port that sent them
/// counts those for which it had no credit, the other one those for which it had no room.
fn lost(stats: &Value, from: usize, to: usize) -> u64 {
    let dropped = |port: usize, name: &str| {
        stats.pointer(&format!("/devices/{port}/switch/{name}")).and_then(Value::as_u64)
    };
    dropped(from, "dropped_credit").unwrap_or(0) + dropped(to, "dropped_full").unwrap_or(0)
}
