//! A guest on an interface by AF_XDP, with two queues: the same traffic as on a tap, into a network
//! namespace, over a veth.

use super::{Behaviour, Scene};
use crate::guest::{GuestOptions, Kind};
use crate::net::{Far, Flow, Namespace};
use crate::{Outcome, check};
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "uml_xdp", run };

const SCRIPT: &str = r#"
network
must ethtool -L eth0 combined 2
pings $HOST
pings $HOST -s 1472
pings $HOST -s 20000
pings $HOST6
agrees $HOST 512 "IPv4"
agrees $HOST6 512 "IPv6"
flow to-host $HOST -P 4 -t 2
flow to-guest $HOST -P 4 -t 2 -R
agrees $HOST 512 "after the load"
await done
# The interface is gone, and is there again.
await deleted
await back
pings $HOST
agrees $HOST 256 "joined again"
flow again $HOST -t 1
"#;

const LIMIT: Duration = Duration::from_secs(180);

fn run(scene: &Scene<'_>) -> Outcome {
    let namespace = Namespace::new()?;
    let far = namespace.beside()?;
    let make_cable = || -> Outcome {
        namespace.run(
            "ip link add xdp0 numtxqueues 2 numrxqueues 2 address 02:00:c0:00:02:09 type veth \
             peer name far0 numtxqueues 2 numrxqueues 2 address 02:00:c0:00:02:01",
        )?;
        namespace.run("ip link set xdp0 addrgenmode none")?;
        // Else its kernel leaves checksums to a card that there is not.
        namespace.run("ethtool -K far0 tx off")?;
        far.take_over(&namespace, "far0")?;
        far.address("far0")
    };
    make_cable()?;
    let arguments = ["--xdp", "xdp0", "--queue-pairs", "2", "--up"];
    let daemon = scene.serve_net(&namespace, &arguments)?;
    let _far = Far::start(&far, scene.folder.path())?;
    let programs = ["iperf3", "ethtool"].as_slice();
    let options = GuestOptions { programs, script: SCRIPT, ..Default::default() };
    let mut guest = scene.boot_net(Kind::Uml, &daemon, options)?;
    guest.reach("done", LIMIT)?;
    for (index, queue) in daemon.queues()?.iter().take(4).enumerate() {
        let packets = queue.value("packets")?;
        check(packets > 20, || format!("queue {index} moved {packets} packets"))?;
    }
    guest.proceed()?;
    guest.reach("deleted", LIMIT)?;
    namespace.run("ip link del xdp0")?;
    guest.proceed()?;
    guest.reach("back", LIMIT)?;
    make_cable()?;
    guest.proceed()?;
    let said = guest.finish(LIMIT)?;
    for flow in ["to-host", "to-guest", "again"] {
        Flow::arrived(&said, flow)?;
    }
    daemon.stop()?;
    namespace.holds_only(&["xdp0"])
}
