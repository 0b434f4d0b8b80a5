//! The tap is deleted under iperf3, and made again under its name: the guest's link goes down and
//! up, and traffic goes on.

use super::{Behaviour, Scene};
use crate::command::wait_for;
use crate::daemon::Daemon;
use crate::guest::{GuestOptions, Kind};
use crate::net::{Far, Flow, Namespace};
use crate::{Outcome, check};
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "uml_tap_made_again", run };

const SCRIPT: &str = r#"
network
must ethtool -L eth0 combined 2
pings $HOST
agrees $HOST 256 "the first tap"
await before
# Ended below; a server of its own, since the host may still think that it is connected.
iperf3 -c $HOST -p 5202 -t 600 > /dev/null 2>&1 &
load=$!
await loaded
becomes /sys/class/net/eth0/carrier 0
await down
becomes /sys/class/net/eth0/carrier 1
kill $load
pings $HOST
pings $HOST6
agrees $HOST 256 "the second tap"
agrees $HOST6 256 "the second tap"
flow to-host $HOST -t 1
flow to-guest $HOST -t 1 -R
await again
"#;

const TAP: &str = "tap0";
const PAIRS: u32 = 2;
/// How the daemon tells the operator.
const GONE: &str = "the host's interface is gone";
/// The load has begun.
const BYTES_MIN: u64 = 1 << 20;
const LIMIT: Duration = Duration::from_secs(180);

fn run(scene: &Scene<'_>) -> Outcome {
    let namespace = Namespace::new()?;
    namespace.lasting_tap(TAP)?;
    let arguments = ["--tap", TAP, "--must-exist", "--queue-pairs", "2"];
    let daemon = scene.serve_net(&namespace, &arguments)?;
    let _far = Far::start(&namespace, scene.folder.path())?;
    let (programs, script) = (["ethtool", "iperf3"].as_slice(), SCRIPT);
    let options = GuestOptions { programs, script, ..Default::default() };
    let mut guest = scene.boot_net(Kind::Uml, &daemon, options)?;
    guest.reach("before", LIMIT)?;
    let quiet: u64 = of_queues(&daemon, "bytes_passed")?.iter().sum();
    guest.proceed()?;
    guest.reach("loaded", LIMIT)?;
    wait_for("the load", LIMIT, || {
        let now: u64 = of_queues(&daemon, "bytes_passed")?.iter().sum();
        Ok((now - quiet > BYTES_MIN).then_some(()))
    })?;
    let before = of_queues(&daemon, "packets")?;
    namespace.run(&format!("ip link del {TAP}"))?;
    guest.proceed()?;
    guest.reach("down", LIMIT)?;
    check(!namespace.has(TAP), || "the tap was made by somebody else than this test".into())?;
    let warnings = warnings(&daemon)?;
    check(warnings == 1, || format!("{warnings} warnings of the log say {GONE:?}"))?;
    let down = of_queues(&daemon, "packets")?;
    namespace.lasting_tap(TAP)?;
    guest.proceed()?;
    guest.reach("again", LIMIT)?;
    namespace.until_attached(TAP, PAIRS.into())?;
    let after = of_queues(&daemon, "packets")?;
    let what = || format!("packets of each queue: {before:?}, {down:?}, then {after:?}");
    let are_kept = |old: &[u64], new: &[u64]| old.iter().zip(new).all(|(old, new)| old <= new);
    check(are_kept(&before, &down) && are_kept(&down, &after), what)?;
    let (sums, was) = (ways(&after), ways(&down));
    check(sums.iter().zip(was).all(|(now, then)| *now > then), what)?;
    guest.proceed()?;
    let said = guest.finish(LIMIT)?;
    Flow::arrived(&said, "to-host")?;
    Flow::arrived(&said, "to-guest")?;
    daemon.stop()?;
    namespace.holds_only(&[TAP])
}

/// A counter of rx and tx of each pair, in the order of the device's queues.
fn of_queues(daemon: &Daemon, counter: &str) -> Outcome<Vec<u64>> {
    let queues = daemon.queues()?;
    queues.iter().take(2 * PAIRS as usize).map(|queue| queue.value(counter)).collect()
}

/// The sums of all pairs: received, and sent.
fn ways(counts: &[u64]) -> [u64; 2] {
    [0, 1].map(|first| counts.iter().skip(first).step_by(2).sum())
}

fn warnings(daemon: &Daemon) -> Outcome<usize> {
    let log = daemon.log()?;
    Ok(log.lines().filter(|line| line.contains("WARN") && line.contains(GONE)).count())
}
