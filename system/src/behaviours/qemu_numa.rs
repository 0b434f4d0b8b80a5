//! Workers follow their guest's memory to its NUMA node, in an emulated machine of two nodes: the
//! daemon runs inside of it.

use super::{Behaviour, Scene};
use crate::guest::boot_with_two_nodes;
use crate::{Outcome, check};
use serde_json::Value;
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "qemu_numa", run };

/// A guest whose memory lies on the node of the CPU that it runs on: it touches its pages first.
const SCRIPT: &str = r#"
ip link set lo up
is "the nodes" "$(cat /sys/devices/system/node/online)" 0-1
manyring net --isolate --workers 1 --socket-path /tmp/s --null --control /tmp/c > /tmp/log 2>&1 &
daemon=$!
tries=0
while [ ! -S /tmp/s ] || [ ! -S /tmp/c ]; do
    [ $tries -lt 300 ] || { cat /tmp/log; fail "the daemon does not start"; }
    tries=$((tries + 1))
    sleep 0.1
done
for node in 1 0; do
    tries=0
    load=
    while :; do
        # It polls: under emulation the daemon may take a slow doorbell for a hostile one.
        if [ -z "$load" ] || ! kill -0 $load 2> /dev/null; then
            taskset $((1 << node)) manyring-bench load net --socket /tmp/s --size 1500 \
                --seconds 20 > /dev/null 2>&1 &
            load=$!
        fi
        manyring stats --json --control /tmp/c > /tmp/stats
        grep -q "\"node\": $node," /tmp/stats && break
        [ $tries -lt 120 ] || { cat /tmp/log /tmp/stats; fail "node $node is not found"; }
        tries=$((tries + 1))
        sleep 0.5
    done
    echo "NODE$node $(tr -d ' \n' < /tmp/stats)"
    kill $load
    wait $load
done
kill $daemon
wait $daemon
echo "ALL THROUGH"
"#;

const LIMIT: Duration = Duration::from_secs(300);

fn run(scene: &Scene<'_>) -> Outcome {
    let programs = [scene.stage.binary.as_path(), &scene.stage.bench];
    let console = scene.log("console.log");
    let guest = boot_with_two_nodes(scene.folder.path(), &programs, SCRIPT, &console)?;
    let said = guest.finish(LIMIT)?;
    check(said.contains("ALL THROUGH"), || "the script did not come to its end".to_owned())?;
    for node in [0, 1] {
        let word = format!("NODE{node} ");
        let shown = said.lines().find_map(|line| line.strip_prefix(&word));
        let shown = shown.ok_or_else(|| format!("nothing is shown of node {node}"))?;
        let shown = serde_json::from_str(shown).map_err(|error| format!("{error}: {shown}"))?;
        follows(&shown, node)?;
    }
    Ok(())
}

/// The workers of the guest's device process run on the CPU of its node, where most pages lie.
fn follows(shown: &Value, node: usize) -> Outcome {
    let workers = shown["workers"].as_array().ok_or_else(|| format!("no workers in {shown}"))?;
    let is_apart = |worker: &&Value| worker["process"] == "device:net0";
    let serving: Vec<_> = workers.iter().filter(is_apart).collect();
    check(!serving.is_empty(), || format!("the device process has no worker: {shown}"))?;
    for worker in serving {
        let is_there = worker["node"] == node && worker["cpus"] == serde_json::json!([node]);
        let pages = |node: usize| worker["guest_pages"][node].as_u64().unwrap_or(0);
        let are_there = pages(node) > 3 * pages(1 - node);
        check(is_there && are_there, || format!("node {node}: {worker}"))?;
    }
    Ok(())
}
