//! The file of `--pcap` has the frames that passed, and tshark can read it.

use super::testpmd_client::{echoes_agree, ping};
use super::{Behaviour, Scene};
use crate::net::testpmd::{Options, Rings, Testpmd};
use crate::net::{Frames, Namespace};
use crate::{Outcome, check};

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "pcap_opens_in_tshark", run };

const PINGS: usize = 20;

fn run(scene: &Scene<'_>) -> Outcome {
    let namespace = Namespace::new()?;
    let file = scene.file("manyring.pcap");
    let pcap = file.display().to_string();
    let daemon = scene.serve_net(&namespace, &["--tap", "tap0", "--pcap", &pcap])?;
    namespace.address("tap0")?;
    let options = Options {
        socket: &daemon.socket(),
        pairs: 1,
        is_mergeable: true,
        in_order: true,
        rings: Rings::Split,
        mode: "icmpecho",
        frame_size: 64,
        devices: &[],
        second_socket: None,
        more: &[],
    };
    let mut testpmd = Testpmd::start(&options, scene.folder.path(), &scene.log("testpmd.log"))?;
    testpmd.forward()?;
    ping(&namespace, PINGS)?;
    testpmd.pause()?;
    testpmd.quit()?;
    let passed: u64 =
        daemon.queues()?.iter().take(2).map(|queue| queue.value("packets")).sum::<Outcome<_>>()?;
    daemon.stop()?;
    let frames = Frames::of(&file)?;
    echoes_agree(&frames, PINGS)?;
    let written = frames.count("")? as u64;
    check(written == passed, || format!("{written} frames are in the file, {passed} passed"))
}
