//! A guest whose disk has packed rings: fio finds what it wrote, and the guest outlives daemons
//! that are killed while its requests are in flight.

use super::qemu_survives_sigkills_under_load::{HAS_PACKED, survive};
use super::{Behaviour, Scene};
use crate::guest::{GuestOptions, Kind};
use crate::{Outcome, check};
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "qemu_packed_rings", run };

/// Each job has its own CPU, so its own queue.
const SCRIPT: &str = r#"
must fio --name=verify --filename=$DISK --size=24M --offset_increment=24M --numjobs=2 \
    --rw=randrw --rwmixread=30 --bsrange=512-64k --blockalign=512 --verify=crc32c \
    --verify_fatal=1 --do_verify=1 --ioengine=libaio --iodepth=16 --direct=1 --thread \
    --cpus_allowed=0-1 --cpus_allowed_policy=split --group_reporting --eta=never
await verified
"#;

fn run(scene: &Scene<'_>) -> Outcome {
    verify(scene)?;
    survive(scene, true)
}

fn verify(scene: &Scene<'_>) -> Outcome {
    let image = scene.image(64)?;
    let daemon = scene.serve(&image, &["--num-queues", "2"])?;
    let script = format!("{HAS_PACKED}{SCRIPT}");
    let options = GuestOptions {
        queues: 2,
        cpus: 2,
        is_packed: true,
        programs: &["fio"],
        script: &script,
        ..GuestOptions::default()
    };
    let mut guest = scene.boot(Kind::Qemu, &daemon, options)?;
    guest.reach("verified", Duration::from_secs(180))?;
    for (index, queue) in daemon.queues()?.iter().enumerate() {
        let (requests, errors) = (queue.value("requests")?, queue.value("errors")?);
        check(requests > 100 && errors == 0, || {
            format!("queue {index} served {requests} requests, {errors} with an error")
        })?;
    }
    guest.proceed()?;
    let said = guest.finish(Duration::from_secs(60))?;
    check(said.contains("err= 0"), || "fio does not report success".into())?;
    daemon.stop()
}
