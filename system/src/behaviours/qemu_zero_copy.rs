//! A device reads frames in the memory of their sender (AF_XDP, `zero_copy`), in an emulated
//! machine whose kernel and cards can do that: the daemon runs inside of it.
//!
//! The machine has two cards on one cable. A program changes the bytes of frames after the call
//! that has sent them: in the one mode the other card gets them changed, in the other never; and
//! never does it get bytes that were written when the port was done. Then the daemon serves a guest
//! whose frames are in flight while the link goes down, its memory goes, and the daemon is killed.

use super::{Behaviour, Scene};
use crate::guest::boot_on_cable;
use crate::{Context, Outcome, check};
use serde_json::Value;
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "qemu_zero_copy", run };

const SCRIPT: &str = r#"
ip link set lo up
ip link set eth1 up
ip link set eth0 up
sleep 1
# How often the device reads a frame after its bytes have changed is the machine's affair.
tries=0
while :; do
    lent=$(manyring-bench load pages --interface eth0 --frames 3200 --zero-copy)
    case $lent in *'"behind":0,'*) ;; *) break ;; esac
    [ $tries -lt 20 ] || break
    tries=$((tries + 1))
done
echo "LENT $lent"
echo "COPIED $(manyring-bench load pages --interface eth0 --frames 3200)"

serve() {
    rm -f /tmp/s /tmp/c
    manyring net --socket-path /tmp/s --xdp eth0 --zero-copy --control /tmp/c --up > /tmp/log 2>&1 &
    daemon=$!
    tries=0
    while [ ! -S /tmp/s ]; do
        [ $tries -lt 300 ] || { cat /tmp/log; fail "the daemon does not start"; }
        tries=$((tries + 1))
        sleep 0.1
    done
}
arrived() { cat /sys/class/net/eth1/statistics/rx_packets; }
load() { manyring-bench load net --socket /tmp/s --size 1500 --sleep --seconds $1; }
# more WHAT: frames go on arriving.
more() {
    before=$(arrived)
    must load 2
    [ $(arrived) -gt $((before + 50)) ] || { cat /tmp/log; fail "$1: nothing arrives any more"; }
}

serve
more "first"
# Each of these is a guest whose memory is new.
more "another memory"
( sleep 1; ip link set eth0 down; sleep 1; ip link set eth0 up ) &
must load 5
more "the link was down with frames in flight"
( sleep 1; kill -9 $daemon ) &
load 3
serve
more "the daemon was killed with frames in flight"
kill -9 $daemon
sleep 1
dmesg | grep -E 'BUG|WARNING|Oops' && fail "the kernel complains"
echo "ALL THROUGH"
"#;

const LIMIT: Duration = Duration::from_secs(600);

fn run(scene: &Scene<'_>) -> Outcome {
    let programs = [scene.stage.binary.as_path(), &scene.stage.bench];
    let console = scene.log("console.log");
    let guest = boot_on_cable(scene.folder.path(), &programs, SCRIPT, &console)?;
    let said = guest.finish(LIMIT)?;
    check(said.contains("ALL THROUGH"), || "the script did not come to its end".to_owned())?;
    let [lent, copied] = ["LENT ", "COPIED "].map(|word| result(&said, word));
    let (lent, copied) = (lent?, copied?);
    let count = |result: &Value, name: &str| result[name].as_u64().unwrap_or(u64::MAX);
    check(count(&lent, "behind") > 0, || format!("the device reads no pages: {lent}"))?;
    check(count(&copied, "behind") == 0, || format!("frames that were copied: {copied}"))?;
    for result in [&lent, &copied] {
        let late = count(result, "done");
        check(late == 0, || format!("{late} frames were read when they were done: {result}"))?;
        check(count(result, "lost") <= 10, || format!("frames were lost: {result}"))?;
    }
    Ok(())
}

/// The JSON behind a word.
fn result(said: &str, word: &str) -> Outcome<Value> {
    let line = said.lines().find_map(|line| line.trim().strip_prefix(word));
    serde_json::from_str(line.ok_or(format!("no line {word}"))?).context(word)
}
