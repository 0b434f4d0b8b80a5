//! How disks come, change and go while their guest runs.

use crate::xen::rig::{Rig, U, XVDB};
use crate::{Outcome, check};

/// dom0's own front-end is served by the same dom0: no guest is needed.
pub(super) fn own_guest(rig: &mut Rig) -> Outcome {
    rig.dom0(
        "must truncate -s 64M /tmp/disk-0\n\
         offer Domain-0 manyring 51728 /tmp/disk-0 w\n\
         until_is [ -b /dev/xvdb ]\n\
         pattern /dev/xvdb\n\
         withdraw Domain-0 manyring 51728\n\
         until_is absent [ -b /dev/xvdb ]\n\
         rm /tmp/disk-0",
    )
    .map(|_| ())
}

/// A disk that is offered to be read cannot be written.
pub(super) fn read_only(rig: &mut Rig) -> Outcome {
    rig.dom0("head -c 67108864 /dev/urandom >/tmp/disk-b; md5sum </tmp/disk-b >/tmp/before")?;
    rig.attach(&U, "ro")?;
    let seen = rig.inside(
        &U,
        r#"
is "read-only" "$(blockdev --getro /dev/xvdb)" 1
dd if=/dev/zero of=/dev/xvdb bs=4k count=1 oflag=direct 2>/dev/null && fail "it was written"
dd if=/dev/xvdb bs=1M 2>/dev/null | md5sum
"#,
    )?;
    let before =
        rig.dom0("md5sum </tmp/disk-b >/tmp/now; cmp /tmp/before /tmp/now; cat /tmp/now")?;
    let sum = |said: &str| said.split_whitespace().next().unwrap_or_default().to_owned();
    check(sum(&seen) == sum(&before), || format!("read {seen:?}, the file has {before:?}"))?;
    rig.detach(&U)
}

/// A guest sees a disk that grows, and uses the new part.
pub(super) fn resize(rig: &mut Rig) -> Outcome {
    rig.attach(&U, "rw")?;
    let name = rig.device(&U, XVDB)?;
    let name = name.get("name").and_then(|name| name.as_str()).unwrap_or_default();
    let size = 96u64 << 20;
    rig.dom0(&format!("must /tmp/manyring resize --control /tmp/control {name} {size}"))?;
    rig.inside(
        &U,
        &format!(
            "grown() {{ [ $(blockdev --getsize64 /dev/xvdb) = {size} ]; }}\n\
             until_is grown\n\
             verifies /dev/xvdb --offset=64m --size=16m"
        ),
    )?;
    rig.detach(&U)
}

/// A guest gets disks and loses them, again and again.
pub(super) fn attach_and_detach(rig: &mut Rig) -> Outcome {
    for _ in 0..3 {
        rig.attach(&U, "rw")?;
        rig.inside(&U, "pattern /dev/xvdb")?;
        rig.detach(&U)?;
    }
    Ok(())
}

/// A disk of our own kind needs no tool stack, beside one that has come from it.
pub(super) fn plain_nodes(rig: &mut Rig) -> Outcome {
    rig.need(&U)?;
    for _ in 0..2 {
        rig.dom0("must truncate -s 64M /tmp/disk-c; offer u manyring 51744 /tmp/disk-c w")?;
        rig.inside(
            &U,
            "until_is [ -b /dev/xvdc ]\n\
             is queues \"$(ls /sys/block/xvdc/mq | wc -l)\" 4\n\
             pattern /dev/xvdc\npattern /dev/xvda",
        )?;
        rig.dom0("withdraw u manyring 51744; rm /tmp/disk-c")?;
        rig.inside(&U, "until_is absent [ -b /dev/xvdc ]")?;
    }
    Ok(())
}

/// A tool stack without our script, such as libvirt's, uses its own script for a block device.
pub(super) fn own_script(rig: &mut Rig) -> Outcome {
    rig.need(&U)?;
    rig.dom0(
        "must truncate -s 64M /tmp/disk-d\n\
         must losetup /dev/loop5 /tmp/disk-d\n\
         must xl block-attach u 'format=raw,vdev=xvdd,access=rw,target=/dev/loop5'",
    )?;
    rig.inside(&U, "until_is [ -b /dev/xvdd ]; pattern /dev/xvdd")?;
    let back = rig.back(&U, 51760)?;
    rig.dom0(&format!("detach u xvdd {back}"))?;
    rig.inside(&U, "until_is absent [ -b /dev/xvdd ]")?;
    rig.dom0("until_is losetup -d /dev/loop5; rm /tmp/disk-d").map(|_| ())
}
