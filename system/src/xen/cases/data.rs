//! A guest reads what it has written, through several queues and with each operation.

use crate::xen::rig::{Rig, U, XVDB};
use crate::{Outcome, check};

/// The number of `xvda`.
const XVDA: u32 = 51712;

/// Four CPUs of a guest have four queues, and each of these carries requests.
pub(super) fn several_queues(rig: &mut Rig) -> Outcome {
    rig.inside(
        &U,
        r#"
is "the queues" "$(ls /sys/block/xvda/mq | wc -l)" 4
for mask in 1 2 4 8; do
    must taskset $mask dd if=/dev/xvda of=/dev/null bs=4k count=16 iflag=direct 2>/dev/null
done
dmesg | grep -q 'xvda:.*persistent grants: enabled' || fail "$(dmesg | grep xvda:)"
"#,
    )?;
    let (front, back) = (rig.front(&U, XVDA)?, rig.back(&U, XVDA)?);
    rig.dom0(&format!(
        "is queues \"$(node {front}/multi-queue-num-queues)\" 4\n\
         must xenstore-exists {front}/queue-3/ring-ref {front}/queue-3/event-channel\n\
         is persistent \"$(node {front}/feature-persistent)\" 1\n\
         is state \"$(node {back}/state)\" 4"
    ))?;
    if rig.is_manyring() {
        let queues = rig.queues(&U, XVDA)?;
        check(queues.len() == 4, || format!("Manyring counts {} queues", queues.len()))?;
        for (index, queue) in queues.iter().enumerate() {
            let reads = queue.value("reads")?;
            check(reads >= 16, || format!("queue {index}: {reads} reads"))?;
        }
    }
    Ok(())
}

/// A file system keeps what was written, past its next mount.
pub(super) fn ext4(rig: &mut Rig) -> Outcome {
    rig.inside(
        &U,
        r#"
must mkfs.ext4 -q -F /dev/xvda
must mount -t ext4 /dev/xvda /mnt
for n in 1 2 3 4 5 6; do
    must dd if=/dev/urandom of=/mnt/file$n bs=64k count=$((n * 3)) 2>/dev/null
done
(cd /mnt && sha256sum file*) >/tmp/sums
must umount /mnt
forget /dev/xvda
must mount -t ext4 /dev/xvda /mnt
(cd /mnt && sha256sum -c /tmp/sums >/tmp/compared) || fail "$(grep FAILED /tmp/compared)"
must umount /mnt
must e2fsck -fn /dev/xvda >/dev/null 2>&1
"#,
    )
    .map(|_| ())
}

/// fio finds what it wrote, from four threads.
pub(super) fn verify(rig: &mut Rig) -> Outcome {
    let script = "verifies /dev/xvda --size=6m --numjobs=4 --thread --offset_increment=16m";
    rig.inside(&U, script).map(|_| ())
}

/// The guest knows of the cache, and its flushes arrive.
pub(super) fn flush(rig: &mut Rig) -> Outcome {
    let before = if rig.is_manyring() { rig.counted(&U, XVDA, "flushes")? } else { 0 };
    rig.inside(
        &U,
        r#"
is "the cache" "$(cat /sys/block/xvda/queue/write_cache)" "write back"
for n in 1 2 3; do
    must dd if=/dev/zero of=/dev/xvda bs=4k count=1 seek=$n conv=fsync,notrunc 2>/dev/null
done
"#,
    )?;
    rig.has_counted(&U, "flushes", before)
}

/// Discarded blocks are freed in the host's file, and the others are not.
pub(super) fn discard(rig: &mut Rig) -> Outcome {
    let before = if rig.is_manyring() { rig.counted(&U, XVDA, "discards")? } else { 0 };
    let blocks = |rig: &mut Rig| -> Outcome<u64> {
        let said = rig.dom0("/bin/stat -c %b /tmp/disk-u")?;
        said.trim().parse().map_err(|_| format!("the blocks of the disk: {said:?}"))
    };
    rig.inside(
        &U,
        "head -c 16777216 /dev/urandom >/tmp/random\n\
         must dd if=/tmp/random of=/dev/xvda bs=1M seek=16 conv=fsync,notrunc 2>/dev/null",
    )?;
    let full = blocks(rig)?;
    rig.inside(
        &U,
        r#"
must blkdiscard -o 16777216 -l 8388608 /dev/xvda
forget /dev/xvda
zeroes=$(head -c 8388608 /dev/zero | md5sum)
is "what was discarded" "$(dd if=/dev/xvda bs=1M skip=16 count=8 2>/dev/null | md5sum)" "$zeroes"
kept=$(tail -c 8388608 /tmp/random | md5sum)
is "what was kept" "$(dd if=/dev/xvda bs=1M skip=24 count=8 2>/dev/null | md5sum)" "$kept"
rm /tmp/random
"#,
    )?;
    let now = blocks(rig)?;
    check(now + 15_000 < full, || format!("the file has {now} blocks, {full} before"))?;
    rig.has_counted(&U, "discards", before)
}

/// A front-end that keeps no grants mapped gets a disk as good.
pub(super) fn without_persistent_grants(rig: &mut Rig) -> Outcome {
    let switch = "/sys/module/xen_blkfront/parameters/feature_persistent";
    rig.inside(&U, &format!("echo N >{switch}"))?;
    rig.attach(&U, "rw")?;
    let front = rig.front(&U, XVDB)?;
    rig.dom0(&format!("is persistent \"$(node {front}/feature-persistent)\" 0"))?;
    rig.inside(
        &U,
        &format!(
            "dmesg | grep -q 'xvdb:.*persistent grants: disabled' || fail persistent\n\
             pattern /dev/xvdb\n\
             verifies /dev/xvdb --size=4m --numjobs=4 --thread --offset_increment=8m\n\
             echo Y >{switch}"
        ),
    )?;
    rig.detach(&U)
}
