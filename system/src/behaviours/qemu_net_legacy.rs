//! Linux on a device without VERSION_1 (`disable-modern=on`): its headers have 12 bytes with
//! mergeable buffers, else 10. All that it sends and gets is unchanged.

use super::uml_net_ping_and_iperf3::lost_nothing;
use super::{Behaviour, Scene};
use crate::guest::{GuestOptions, Kind, Net};
use crate::net::{Far, Flow, Namespace};
use crate::{Outcome, check};
use std::path::Path;
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "qemu_net_legacy", run };

const SCRIPT: &str = r#"
# negotiated BIT: 1 or 0, as the driver and the device agreed.
negotiated() { cut -c$(($1 + 1)) < /sys/class/net/eth0/device/features; }
network
is "VERSION_1" "$(negotiated 32)" 0
is "MRG_RXBUF" "$(negotiated 15)" $merges
is "HOST_TSO4" "$(negotiated 11)" 1
is "GUEST_TSO4" "$(negotiated 7)" 1
for pairs in 1 2; do
    must ethtool -L eth0 combined $pairs
    pings $HOST
    pings $HOST -s 1472
    pings $HOST -s 20000
    pings $HOST6
    agrees $HOST 1024 "IPv4, $pairs pairs"
    agrees $HOST6 1024 "IPv6, $pairs pairs"
done
flow to-host $HOST -t 1
flow to-guest $HOST -t 1 -R
must ethtool -K eth0 tso off gso off gro off tx off
agrees $HOST 256 "no offloads"
await done
"#;

/// QEMU's properties, and what the guest then sees of mergeable buffers.
const KINDS: [(&str, u32); 2] =
    [(",disable-modern=on", 1), (",disable-modern=on,mrg_rxbuf=off", 0)];
const PAIRS: u32 = 2;
const LIMIT: Duration = Duration::from_secs(240);

fn run(scene: &Scene<'_>) -> Outcome {
    KINDS.iter().try_for_each(|(properties, merges)| {
        with(scene, properties, *merges).map_err(|error| format!("{properties}: {error}"))
    })
}

fn with(scene: &Scene<'_>, properties: &str, merges: u32) -> Outcome {
    let namespace = Namespace::new()?;
    let daemon = scene.serve_net(&namespace, &["--tap", "tap0", "--queue-pairs", "2"])?;
    namespace.address("tap0")?;
    let _far = Far::start(&namespace, scene.folder.path())?;
    let options = GuestOptions {
        net: Some(Net { socket: Path::new(""), pairs: PAIRS }),
        net_properties: properties,
        cpus: PAIRS,
        programs: &["iperf3", "ethtool"],
        script: &format!("merges={merges}\n{SCRIPT}"),
        ..Default::default()
    };
    let mut guest = scene.boot_net(Kind::Qemu, &daemon, options)?;
    guest.reach("done", LIMIT)?;
    let queues = daemon.queues()?;
    lost_nothing(&queues)?;
    for (name, first) in [("received", 0), ("sent", 1)] {
        let of_way = || queues.iter().take(2 * PAIRS as usize).skip(first).step_by(2);
        let long = of_way().map(|queue| queue.value("gso_packets")).sum::<Outcome<u64>>()?;
        check(long > 0, || format!("no frame that was {name} is longer than the MTU"))?;
    }
    guest.proceed()?;
    let said = guest.finish(LIMIT)?;
    Flow::arrived(&said, "to-host")?;
    Flow::arrived(&said, "to-guest")?;
    daemon.stop()?;
    namespace.holds_only(&[])
}
