//! A guest of QEMU that attaches an XDP program to its interface: a driver does so only after its
//! device has stopped to give it large segments and unfinished checksums. QEMU keeps the control
//! queue and tells us of no such change. On the line of the snippet, which says so to the driver,
//! the guest is refused cleanly; on the line of the guide that withholds these offloads, the
//! program runs. TCP passes both ways in either case.

use super::uml_net_ping_and_iperf3::lost_nothing;
use super::{Behaviour, Scene};
use crate::command::{command, output};
use crate::guest::{Guest, GuestOptions, Kernel, Net};
use crate::net::{Far, Flow, Namespace, WORDS};
use crate::{Context, Outcome, check, packages};
use std::path::PathBuf;
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "qemu_xdp_program", run };

const SCRIPT: &str = r#"
network
pings $HOST
xdp_pass eth0 > /tmp/xdp &
program=$!
becomes /tmp/xdp "$answer"
flow to-host $HOST -t 1
flow to-guest $HOST -t 1 -R
agrees $HOST 512 "IPv4"
agrees $HOST6 512 "IPv6"
kill -0 $program 2> /dev/null
is "the end of the program (0: it runs)" $? $ended
await done
"#;

/// How a driver is told that its offloads stay as they were negotiated.
const KEPT: &str = ",ctrl_guest_offloads=off";
/// As the guide says.
const WITHHELD: &str = ",guest_csum=off,guest_tso4=off,guest_tso6=off,guest_ecn=off,guest_ufo=off";
const LIMIT: Duration = Duration::from_secs(180);

fn run(scene: &Scene<'_>) -> Outcome {
    let program = program(scene)?;
    let kernel = Kernel::newest()?;
    let refused = "attach: Operation not supported";
    with(scene, &kernel, &program, KEPT, (refused, false))?;
    with(scene, &kernel, &program, WITHHELD, ("attached", true))
}

/// `answer`: what the program says of itself in the guest, and whether it runs.
fn with(
    scene: &Scene<'_>,
    kernel: &Kernel,
    program: &str,
    properties: &str,
    (answer, attaches): (&str, bool),
) -> Outcome {
    let namespace = Namespace::new()?;
    let daemon = scene.serve_net(&namespace, &["--tap", "tap0"])?;
    namespace.address("tap0")?;
    let _far = Far::start(&namespace, scene.folder.path())?;
    let socket = daemon.socket();
    let script =
        format!("answer='{answer}'\nended={}\n{WORDS}{SCRIPT}", if attaches { "0" } else { "1" });
    let options = GuestOptions {
        net: Some(Net { socket: &socket, pairs: 1 }),
        net_properties: properties,
        programs: &["iperf3", program],
        script: &script,
        ..Default::default()
    };
    let boot = || -> Outcome {
        let mut guest = Guest::boot(kernel, &options, &scene.log("guest.log"))?;
        guest.reach("done", LIMIT)?;
        let queues = daemon.queues()?;
        lost_nothing(&queues)?;
        let long = queues[0].value("gso_packets")?;
        check((long == 0) == attaches, || format!("{long} large segments for the guest"))?;
        guest.proceed()?;
        let said = guest.finish(LIMIT)?;
        Flow::arrived(&said, "to-host")?;
        Flow::arrived(&said, "to-guest").map(drop)
    };
    boot().map_err(|error| format!("{properties}: {error}"))?;
    daemon.stop()?;
    namespace.holds_only(&[])
}

/// The program that attaches an XDP program, compiled.
fn program(scene: &Scene<'_>) -> Outcome<String> {
    packages::need("an XDP program", &["gcc", "libc6-dev", "linux-libc-dev", "iperf3"])?;
    let [source, program]: [PathBuf; 2] = ["xdp_pass.c", "xdp_pass"].map(|name| scene.file(name));
    std::fs::write(&source, include_str!("../guest/xdp_pass.c")).context(source.display())?;
    output(command("gcc").args(["-O2", "-o"]).args([&program, &source]))?;
    Ok(program.display().to_string())
}
