//! A macvtap with two queues on a veth: the same traffic as on a tap.

use super::{Behaviour, Scene};
use crate::guest::{GuestOptions, Kind};
use crate::net::{Far, Flow, Namespace};
use crate::{Outcome, check};
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "macvtap_over_veth", run };

const SCRIPT: &str = r#"
network
must ethtool -L eth0 combined 2
pings $HOST
pings $HOST6
agrees $HOST 512 "IPv4"
agrees $HOST6 512 "IPv6"
flow to-host $HOST -P 8 -t 2
flow to-guest $HOST -P 8 -t 2 -R
agrees $HOST 512 "after the load"
await done
"#;

const LIMIT: Duration = Duration::from_secs(180);
const MAC: &str = "52:54:00:12:34:57";

fn run(scene: &Scene<'_>) -> Outcome {
    let namespace = Namespace::new()?;
    for words in [
        "ip link add under0 type veth peer name far0".to_owned(),
        "ip link set under0 addrgenmode none up".into(),
        format!(
            "ip link add link under0 name macvtap0 address {MAC} numtxqueues 2 numrxqueues 2 \
             type macvtap mode bridge"
        ),
        "ip link set macvtap0 addrgenmode none up".into(),
    ] {
        namespace.run(&words)?;
    }
    namespace.address("far0")?;
    let arguments = ["--macvtap", "macvtap0", "--queue-pairs", "2", "--mac", MAC];
    let daemon = scene.serve_net(&namespace, &arguments)?;
    let _far = Far::start(&namespace, scene.folder.path())?;
    let programs = ["iperf3", "ethtool"].as_slice();
    let options = GuestOptions { programs, script: SCRIPT, ..Default::default() };
    let mut guest = scene.boot_net(Kind::Uml, &daemon, options)?;
    guest.reach("done", LIMIT)?;
    for (index, queue) in daemon.queues()?.iter().take(4).enumerate() {
        let packets = queue.value("packets")?;
        check(packets > 20, || format!("queue {index} moved {packets} packets"))?;
    }
    guest.proceed()?;
    let said = guest.finish(LIMIT)?;
    Flow::arrived(&said, "to-host")?;
    Flow::arrived(&said, "to-guest")?;
    daemon.stop()?;
    namespace.holds_only(&["under0", "far0", "macvtap0"])
}
