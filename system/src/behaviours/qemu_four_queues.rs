//! Four CPUs, four queues: fio verifies random writes of mixed sizes, and the host has the data.

use super::{Behaviour, Scene};
use crate::guest::{GuestOptions, Kind};
use crate::{Context, Outcome, check};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "qemu_four_queues", run };

const IMAGE_MIB: u64 = 256;
const PATTERN: &str = "Manyring was here\n";
const PATTERN_OFFSET: u64 = 224 << 20;
const PATTERN_COUNT: usize = 10_000;

/// Each job has its own CPU, so its own queue. The pattern lies above the jobs' 4 x 48 MiB.
const SCRIPT: &str = r#"
[ "$(ls /sys/block/vda/mq | wc -l)" = 4 ] || fail "not four queues"
must fio --name=verify --filename=$DISK --size=48M --offset_increment=48M --numjobs=4 \
    --rw=randrw --rwmixread=30 --bsrange=512-64k --blockalign=512 --verify=crc32c \
    --verify_fatal=1 --do_verify=1 --ioengine=libaio --iodepth=16 --direct=1 --thread \
    --cpus_allowed=0-3 --cpus_allowed_policy=split --group_reporting --eta=never
n=0
while [ $n -lt 10000 ]; do echo "Manyring was here"; n=$((n + 1)); done > /tmp/pattern
must dd if=/tmp/pattern of=$DISK bs=4k seek=$((224 * 256)) conv=fsync,notrunc 2>/dev/null
await written
"#;

fn run(scene: &Scene<'_>) -> Outcome {
    let image = scene.image(IMAGE_MIB)?;
    let daemon = scene.serve(&image, &["--num-queues", "4"])?;
    let (queues, cpus, programs) = (4, 4, ["fio"].as_slice());
    let options = GuestOptions { queues, cpus, programs, script: SCRIPT, ..Default::default() };
    let mut guest = scene.boot(Kind::Qemu, &daemon, options)?;
    guest.reach("written", Duration::from_secs(420))?;
    let counters = daemon.queues()?;
    check(counters.len() == 4, || format!("4 queues expected, not {}", counters.len()))?;
    let (mut errors, mut flushes) = (0, 0);
    for (index, queue) in counters.iter().enumerate() {
        let requests = queue.value("requests")?;
        check(requests > 100, || format!("queue {index} served only {requests} requests"))?;
        errors += queue.value("errors")?;
        flushes += queue.value("flushes")?;
    }
    check(errors == 0, || format!("{errors} requests were answered with an error"))?;
    check(flushes > 0, || "no flush arrived".into())?;
    guest.proceed()?;
    let said = guest.finish(Duration::from_secs(180))?;
    check(said.contains("err= 0"), || "fio does not report success".into())?;
    daemon.stop()?;
    let mut found = vec![0; PATTERN.len() * PATTERN_COUNT];
    let file = File::open(&image).context(image.display())?;
    file.read_exact_at(&mut found, PATTERN_OFFSET).context(image.display())?;
    let is_there = found == PATTERN.repeat(PATTERN_COUNT).as_bytes();
    check(is_there, || "the host file does not hold what the guest wrote".into())
}
