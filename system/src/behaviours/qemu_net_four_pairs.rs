//! Four CPUs, four queue pairs: all carry packets, one flow keeps to one pair, both ways, and a
//! connection outlives a change of their number.

use super::uml_net_ping_and_iperf3::lost_nothing;
use super::{Behaviour, Scene};
use crate::daemon::Daemon;
use crate::guest::{Guest, GuestOptions, Kind, Net};
use crate::net::{Far, Flow, Namespace};
use crate::{Outcome, check};
use std::path::Path;
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "qemu_net_four_pairs", run };

const SCRIPT: &str = r#"
# eight NAME MORE..: two flows from each CPU, since iperf3 is one thread.
eight() {
    name=$1
    shift
    all=
    for cpu in 0 1 2 3; do
        timeout 60 taskset $((1 << cpu)) iperf3 -c $HOST -p 520$((cpu + 1)) -f m -P 2 -t 4 "$@" \
            > /tmp/$name-$cpu 2>&1 &
        all="$all $!"
    done
    for one in $all; do
        wait $one || { cat /tmp/$name-*; fail "iperf3 $name"; }
    done
    for cpu in 0 1 2 3; do
        grep receiver /tmp/$name-$cpu | tail -n 1 | sed "s/^/FLOW $name-$cpu /"
    done
}
network
is "pairs" "$(ethtool -l eth0 | awk '/^Combined/{print $2}' | tail -n 1)" 4
pings $HOST
pings $HOST6
agrees $HOST 1024 "four pairs"
await start
eight to-host
eight to-guest -R
await eight
# Linux picks the queue of a frame by CPU: one that stays.
PIN="taskset 4"
# once_more NAME MORE..: a flow, and again as long as the host answers with the next number.
once_more() {
    round=1
    while [ -n "$round" ]; do
        flow $1 $HOST -t 3 $2
        mark $1-round-$round
        read -r round
    done
}
once_more one
once_more one-back -R
timeout 60 iperf3 -c $HOST -p 5202 -f m -P 4 -t 10 > /tmp/load 2>&1 &
load=$!
sleep 2
must ethtool -L eth0 combined 1
await one-pair
sleep 2
must ethtool -L eth0 combined 4
await four-pairs
wait $load || { cat /tmp/load; fail "a connection was lost"; }
grep receiver /tmp/load | tail -n 1 | sed "s/^/FLOW load /"
"#;

const PAIRS: u32 = 4;
/// How often one flow may go on before it keeps to one pair.
const ROUNDS: u32 = 4;
/// Flows with data until then: two from each CPU, to the host and to the guest, and two that stay.
const FLOWS: u64 = 18;
const LIMIT: Duration = Duration::from_secs(180);

fn run(scene: &Scene<'_>) -> Outcome {
    let namespace = Namespace::new()?;
    let daemon = scene.serve_net(&namespace, &["--tap", "tap0", "--queue-pairs", "4"])?;
    namespace.address("tap0")?;
    let _far = Far::start(&namespace, scene.folder.path())?;
    let options = GuestOptions {
        net: Some(Net { socket: Path::new(""), pairs: PAIRS }),
        cpus: PAIRS,
        programs: &["iperf3", "ethtool"],
        script: SCRIPT,
        ..Default::default()
    };
    let mut guest = scene.boot_net(Kind::Qemu, &daemon, options)?;
    guest.reach("start", LIMIT)?;
    namespace.until_attached("tap0", PAIRS.into())?;
    let before = moved(&daemon, "packets")?;
    guest.proceed()?;
    guest.reach("eight", LIMIT)?;
    for (index, (then, now)) in before.iter().zip(moved(&daemon, "packets")?).enumerate() {
        let name = if index % 2 == 0 { "rx" } else { "tx" };
        let what = || format!("{name} queue of pair {}: {} packets", index / 2, now - then);
        check(now - then > 100, what)?;
    }
    for (mark, direction) in [("one", 1), ("one-back", 0)] {
        let of_queues = one_flow(&daemon, &mut guest, mark, direction)?;
        let of_direction = |first: usize| of_queues.iter().copied().skip(first).step_by(2);
        let pair = |first: usize| of_direction(first).enumerate().max_by_key(|(_, n)| *n);
        let ways = [pair(0), pair(1)].map(|most| most.map(|(pair, _)| pair));
        let what = || format!("{mark}: received and sent by pairs {ways:?}: {of_queues:?}");
        check(ways[0] == ways[1], what)?;
    }
    let steered: u64 = moved(&daemon, "steered_flows")?.iter().sum();
    check(steered >= FLOWS, || format!("{steered} flows were steered to their pairs"))?;
    for (mark, attached) in [("one-pair", 1), ("four-pairs", PAIRS.into())] {
        guest.proceed()?;
        guest.reach(mark, LIMIT)?;
        namespace.until_attached("tap0", attached)?;
    }
    guest.proceed()?;
    let said = guest.finish(LIMIT)?;
    for name in ["one", "one-back", "load"] {
        Flow::arrived(&said, name)?;
    }
    for cpu in 0..PAIRS {
        Flow::arrived(&said, &format!("to-host-{cpu}"))?;
        Flow::arrived(&said, &format!("to-guest-{cpu}"))?;
    }
    lost_nothing(&daemon.queues()?)?;
    daemon.stop()
}

/// A counter of rx and tx of each pair, in the order of the device's queues.
fn moved(daemon: &Daemon, counter: &str) -> Outcome<Vec<u64>> {
    let queues = daemon.queues()?;
    let of_pairs = queues.iter().take(2 * PAIRS as usize);
    of_pairs.map(|queue| queue.value(counter)).collect()
}

/// Runs one flow, and returns the bytes that each queue passed. If a busy host kept a CPU from the
/// guest, its other CPUs have sent for the flow, and the flow is run again.
fn one_flow(daemon: &Daemon, guest: &mut Guest, mark: &str, direction: usize) -> Outcome<Vec<u64>> {
    let mut round = 1;
    let mut before = moved(daemon, "bytes_passed")?;
    guest.proceed()?;
    loop {
        guest.reach(&format!("{mark}-round-{round}"), LIMIT)?;
        let now = moved(daemon, "bytes_passed")?;
        let of_queues: Vec<_> = before.iter().zip(&now).map(|(then, now)| now - then).collect();
        let of_direction: Vec<_> = of_queues.iter().copied().skip(direction).step_by(2).collect();
        let kept = keeps_to_one(mark, &of_direction);
        if kept.is_ok() || round == ROUNDS {
            return kept.map(|()| of_queues);
        }
        round += 1;
        before = now;
        guest.answer(&round.to_string())?;
    }
}

/// Nearly all bytes of one direction went through one queue.
fn keeps_to_one(name: &str, bytes: &[u64]) -> Outcome {
    let (most, all) = (bytes.iter().max().copied().unwrap_or(0), bytes.iter().sum::<u64>());
    check(all > 1 << 20, || format!("{name}: only {all} bytes"))?;
    check(most * 100 >= all * 95, || format!("{name}: one flow on several queues: {bytes:?}"))
}
