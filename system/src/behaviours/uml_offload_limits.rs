//! Offloads that the operator withholds (`offload` of a network device) are off in the guest, as
//! ethtool shows it, and traffic passes without them.

use super::uml_net_ping_and_iperf3::lost_nothing;
use super::{Behaviour, Scene};
use crate::guest::{GuestOptions, Kind};
use crate::net::{Far, Namespace};
use crate::{Outcome, check};
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "uml_offload_limits", run };

const SCRIPT: &str = r#"
has() {
    ethtool -k eth0 | grep -q "^[[:space:]]*$1: $2" ||
        fail "not $1: $2, but $(ethtool -k eth0 | grep "$1:")"
}
network
has tx-checksum-ip-generic "$CSUM"
has tx-tcp-segmentation "off \[fixed\]"
has tx-tcp6-segmentation "off \[fixed\]"
has tx-udp-segmentation "off \[fixed\]"
agrees $HOST 1024 "$CSUM"
agrees $HOST6 1024 "$CSUM"
"#;

const LIMIT: Duration = Duration::from_secs(180);

fn run(scene: &Scene<'_>) -> Outcome {
    for (number, (offload, csum)) in (0..).zip([("none", r"off \[fixed\]"), ("csum", "on")]) {
        let namespace = Namespace::new()?;
        let arguments = ["--tap", "tap0", "--offload", offload];
        let daemon = scene.serve_net_of(number, &namespace, &arguments)?;
        namespace.address("tap0")?;
        let _far = Far::start(&namespace, scene.folder.path())?;
        let script = format!("CSUM='{csum}'\n{SCRIPT}");
        let programs = ["ethtool"].as_slice();
        let options = GuestOptions { programs, script: &script, ..Default::default() };
        scene.boot_net(Kind::Uml, &daemon, options)?.finish(LIMIT)?;
        let queues = daemon.queues()?;
        lost_nothing(&queues)?;
        for queue in &queues[..2] {
            let cut = ["gso_packets", "merged_packets"].map(|counter| queue.value(counter));
            for (name, count) in ["gso_packets", "merged_packets"].iter().zip(cut) {
                let count = count?;
                check(count == 0, || format!("offload {offload}: {count} {name}"))?;
            }
        }
        daemon.stop()?;
    }
    Ok(())
}
