//! User Mode Linux with our disk and our network: echoes, iperf3 both ways, and data unchanged.

use super::{Behaviour, Scene};
use crate::daemon::{Counters, Daemon};
use crate::guest::{Guest, GuestOptions, Kind, Net};
use crate::net::{Far, Flow, Namespace, WORDS};
use crate::{Outcome, check};
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "uml_net_ping_and_iperf3", run };

const SCRIPT: &str = r#"
network
pings $HOST
pings $HOST -s 1472
pings $HOST -s 20000
pings $HOST6
must mkfs.ext4 -q $DISK
must mount -t ext4 $DISK /mnt
flow tcp-to-host $HOST -n 32M
flow tcp-to-guest $HOST -n 32M -R
flow udp-to-host $HOST -u -b 5M -t 2
flow udp-to-guest $HOST -u -b 5M -t 2 -R
flow tcp6-to-host $HOST6 -n 8M
flow tcp6-to-guest $HOST6 -n 8M -R
agrees $HOST 1024 "IPv4"
agrees $HOST6 1024 "IPv6"
# The disk and the network at the same time.
timeout 20 nc $HOST 7002 < /dev/null > /mnt/file
must umount /mnt
must mount -t ext4 $DISK /mnt
is "the file" "$(sha256sum < /mnt/file)" "$(sha256sum < /tmp/received)"
must umount /mnt
await done
"#;

/// iperf3 moves these with TCP in each direction. No frame is longer than 64 KiB, so that they are
/// more than 500 frames.
const BYTES_MIN: u64 = 40 << 20;
/// Frames that are lost by right: before the host's end is up, not asked for, in a queue that the
/// guest has just given up.
const DUE: [&str; 3] = ["dropped_port_down", "dropped_filtered", "dropped_disabled"];
const LIMIT: Duration = Duration::from_secs(240);

fn run(scene: &Scene<'_>) -> Outcome {
    let image = scene.image(64)?;
    let disk = scene.serve(&image, &[])?;
    let namespace = Namespace::new()?;
    let network = scene.serve_net(&namespace, &["--tap", "tap0"])?;
    namespace.address("tap0")?;
    let _far = Far::start(&namespace, scene.folder.path())?;
    let (disk_socket, socket) = (disk.socket(), network.socket());
    let options = GuestOptions {
        socket: Some(&disk_socket),
        net: Some(Net { socket: &socket, pairs: 1 }),
        programs: &["iperf3"],
        script: &format!("{WORDS}{SCRIPT}"),
        ..Default::default()
    };
    let mut guest = Guest::boot(scene.kernel(Kind::Uml)?, &options, &scene.log("guest.log"))?;
    guest.reach("done", LIMIT)?;
    are_plausible(&network)?;
    guest.proceed()?;
    let said = guest.finish(LIMIT)?;
    for name in ["tcp-to-host", "tcp-to-guest", "tcp6-to-host", "tcp6-to-guest"] {
        Flow::arrived(&said, name)?;
    }
    for name in ["udp-to-host", "udp-to-guest"] {
        Flow::arrived(&said, name)?;
    }
    network.stop()?;
    disk.stop()?;
    namespace.holds_only(&[])
}

/// Both queues of the pair have moved frames, long ones among them, and lost none of their own.
fn are_plausible(daemon: &Daemon) -> Outcome {
    let queues = daemon.queues()?;
    for (name, queue) in ["rx", "tx"].iter().zip(&queues) {
        let (packets, bytes) = (queue.value("packets")?, queue.value("bytes_passed")?);
        let (gso, calls) = (queue.value("gso_packets")?, queue.value("calls")?);
        check(bytes > BYTES_MIN && packets > 500, || format!("{name}: {packets}, {bytes} bytes"))?;
        check(bytes / packets >= 60, || format!("{name}: frames of {} bytes", bytes / packets))?;
        check(gso > 100 && gso < packets, || format!("{name}: {gso} of {packets} are GSO"))?;
        check(calls > 0 && calls <= packets, || format!("{name}: {calls} calls"))?;
    }
    let kicks = queues.get(1).ok_or("no tx queue")?.value("kicks")?;
    check(kicks > 0, || "the tx queue was never kicked".into())?;
    lost_nothing(&queues)
}

/// Fails if a queue broke, or frames were dropped that the guest, or the host, had made wrong.
pub(super) fn lost_nothing(queues: &[Counters]) -> Outcome {
    for (index, queue) in queues.iter().enumerate() {
        let faults = queue.value("faults")?;
        check(faults == 0, || format!("queue {index}: {faults} faults"))?;
        for (name, count) in queue.starting_with("dropped_") {
            let is_due = DUE.contains(&name.as_str());
            check(is_due || count == 0, || format!("queue {index}: {name} is {count}"))?;
        }
    }
    Ok(())
}
