//! Restarts: the back-end under load, a guest that reboots, and a guest that is destroyed beside
//! another one.

use crate::xen::rig::{Rig, U, V};
use crate::xen::serve;
use crate::{Outcome, check};

/// How often a back-end is ended under load.
const ENDS: u32 = 8;

/// A load that verifies until `/tmp/stop` is there, and then says how it went.
const LOAD: &str = r#"
rm -f /tmp/stop /tmp/ended /tmp/rounds
(
    while [ ! -e /tmp/stop ]; do
        verifies /dev/xvda --size=3m --numjobs=4 --thread --offset_increment=16m
        echo round >>/tmp/rounds
    done
    echo fine >/tmp/ended
) >/tmp/load 2>&1 || cat /tmp/load >/tmp/ended &
"#;

const END: &str = r#"
touch /tmp/stop
until_is [ -e /tmp/ended ]
is "the load" "$(cat /tmp/ended)" fine
wc -l </tmp/rounds
"#;

/// Ends the daemon under load and starts it again, eight times: nobody loses a request.
fn ended_under_load(rig: &mut Rig, signal: &str) -> Outcome {
    rig.inside(&U, LOAD)?;
    for _ in 0..ENDS {
        serve::has_served(&mut rig.machine, 50)?;
        rig.dom0(&format!(
            "pid=$(cat /tmp/manyring.pid)\nmust kill -{signal} $pid\nuntil_is gone $pid"
        ))?;
        rig.server.start(&mut rig.machine)?;
    }
    serve::has_served(&mut rig.machine, 50)?;
    rig.inside(&U, END).map(|_| ())
}

pub(super) fn sigterm(rig: &mut Rig) -> Outcome {
    ended_under_load(rig, "TERM")
}

pub(super) fn sigkill(rig: &mut Rig) -> Outcome {
    ended_under_load(rig, "KILL")
}

/// A device process takes the guest's disk over under load, is killed and followed by the next one,
/// and the daemon itself takes the disk back: nobody loses a request.
pub(super) fn process_killed(rig: &mut Rig) -> Outcome {
    const ENDED: &str = "pid=$(cat /tmp/manyring.pid)\nmust kill -TERM $pid\nuntil_is gone $pid";
    // The process that waits to become the next device process has the same name.
    const KILLED: &str =
        "pids=$(pidof manyring-device) || fail 'no device process'\nmust kill -KILL $pids";
    rig.inside(&U, LOAD)?;
    serve::has_served(&mut rig.machine, 50)?;
    rig.dom0(ENDED)?;
    serve::start_manyring(&mut rig.machine, "--isolate")?;
    for _ in 0..2 {
        serve::has_served(&mut rig.machine, 50)?;
        rig.dom0(KILLED)?;
    }
    serve::has_served(&mut rig.machine, 50)?;
    // Four queues in three device processes.
    rig.dom0("must [ $(grep -c 'process=.*took a ring over' /host/manyring.log) -ge 12 ]")?;
    rig.dom0(ENDED)?;
    rig.server.start(&mut rig.machine)?;
    serve::has_served(&mut rig.machine, 50)?;
    rig.inside(&U, END).map(|_| ())
}

/// A guest that reboots finds its disk and what it wrote.
pub(super) fn reboot(rig: &mut Rig) -> Outcome {
    let before = rig.inside(&U, "pattern /dev/xvda; sum /dev/xvda 64 48")?;
    let domain = rig.dom0("xl domid u")?;
    rig.begin(&U, "sync; reboot -f")?;
    rig.dom0(&format!(
        "another() {{ now=$(xl domid u) && [ $now != {} ]; }}\nuntil_is another\nconsole u",
        domain.trim()
    ))?;
    rig.is_up(&U, 2)?;
    let after = rig.inside(&U, "until_is [ -b /dev/xvda ]; sum /dev/xvda 64 48")?;
    check(before.trim() == after.trim(), || format!("{before:?} became {after:?}"))?;
    rig.inside(&U, "pattern /dev/xvda").map(|_| ())
}

/// A PVH guest has all of this as well.
pub(super) fn pvh(rig: &mut Rig) -> Outcome {
    let queues = if rig.server == serve::Server::Qdisk { 1 } else { 2 };
    rig.inside(
        &V,
        &format!(
            "is queues \"$(ls /sys/block/xvda/mq | wc -l)\" {queues}\n\
             pattern /dev/xvda\n\
             must mkfs.ext4 -q -F /dev/xvda\n\
             must mount -t ext4 /dev/xvda /mnt\n\
             must dd if=/dev/urandom of=/mnt/file bs=64k count=16 2>/dev/null\n\
             before=$(md5sum </mnt/file)\n\
             must umount /mnt\n\
             forget /dev/xvda\n\
             must mount -t ext4 /dev/xvda /mnt\n\
             is \"the file\" \"$(md5sum </mnt/file)\" \"$before\"\n\
             must umount /mnt\n\
             verifies /dev/xvda --size=4m --numjobs=2 --thread --offset_increment=16m"
        ),
    )
    .map(|_| ())
}

/// A guest is destroyed in the middle of its requests; the other one notices nothing.
pub(super) fn destroyed_under_load(rig: &mut Rig) -> Outcome {
    rig.inside(&U, LOAD)?;
    rig.inside(&V, LOAD)?;
    rig.inside(&V, "until_is [ -s /tmp/rounds ]")?;
    let back = rig.back(&U, 51712)?;
    rig.inside(&U, "absent [ -e /tmp/ended ] || fail \"$(cat /tmp/ended)\"")?;
    rig.destroy(&U)?;
    rig.dom0(&format!("until_is absent xenstore-exists {back}"))?;
    rig.inside(
        &V,
        "rounds=$(wc -l </tmp/rounds)\n\
         more() { [ $(wc -l </tmp/rounds) -gt $rounds ]; }\n\
         until_is more",
    )?;
    rig.inside(&V, END).map(|_| ())
}
