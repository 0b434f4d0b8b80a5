//! The sector size of a guest does not depend on `direct`, nor on a clone that the host makes of
//! its image; where the host's device has sectors of 4096 bytes, the operator may choose.

use super::{Behaviour, Scene};
use crate::command::{command, output, wait_for};
use crate::host_fs::{HostFs, LoopDevice};
use crate::{Context, Outcome, check, packages};
use manyring_driver::FrontEnd;
use std::path::Path;
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "sectors_stay", run };

const LIMIT: Duration = Duration::from_secs(30);
/// `blk_size`, `physical_block_exp` and `min_io_size` of the config space (virtio 1.3 §5.2.4).
const BLK_SIZE: std::ops::Range<usize> = 20..24;
const PHYSICAL_EXP: usize = 24;
const MIN_IO_SIZE: std::ops::Range<usize> = 26..28;

/// The sizes that a guest is told: sector size, log2 of the sectors of a physical block, and the
/// sectors of the smallest suggested write.
type Told = (u32, u8, u16);

fn run(scene: &Scene<'_>) -> Outcome {
    packages::need("the sector test", &["xfsprogs"])?;
    let host = HostFs::new(scene.folder.path(), "xfs", 400, &["mkfs.xfs", "-q", "-f"])?;
    let (image, clone) = (host.folder().join("image"), host.folder().join("clone"));
    std::fs::write(&image, vec![1; 8 << 20]).context(image.display())?;
    let expected = |image: &Path, more: &[&str], expected: Told| -> Outcome {
        let found = told(scene, image, more)?;
        check(found == expected, || format!("{} {more:?}: {found:?}", image.display()))
    };
    for direct in [&[][..], &["--direct"]] {
        expected(&image, direct, (512, 3, 8))?;
    }
    output(command("cp").arg("--reflink=always").args([&image, &clone]))?;
    for file in [&image, &clone] {
        for direct in [&[][..], &["--direct"]] {
            expected(file, direct, (512, 3, 8))?;
        }
    }
    expected(&clone, &["--direct", "--logical-block-size", "4096"], (4096, 0, 1))?;
    drop(host);
    let small = LoopDevice::new(scene.folder.path(), "sectors512", 8, 512)?;
    let large = LoopDevice::new(scene.folder.path(), "sectors4096", 8, 4096)?;
    for direct in ["--direct", "--read-only"] {
        expected(small.path(), &[direct], (512, 0, 1))?;
        expected(large.path(), &[direct], (4096, 0, 1))?;
        expected(large.path(), &[direct, "--logical-block-size", "512"], (512, 3, 8))?;
    }
    Ok(())
}

/// The sizes that a front-end reads. The log must have them, too.
fn told(scene: &Scene<'_>, image: &Path, more: &[&str]) -> Outcome<Told> {
    let daemon = scene.serve(image, more)?;
    let mut front = FrontEnd::connect(&daemon.socket(), LIMIT).context("the front-end")?;
    front.set_owner().context("the front-end")?;
    let config = front.config(0, 60).context("the config space")?;
    drop(front);
    let number = |range: std::ops::Range<usize>| {
        config[range].iter().rev().fold(0, |number, byte| number << 8 | u32::from(*byte))
    };
    let told = (number(BLK_SIZE), config[PHYSICAL_EXP]);
    let line = format!("logical_block_size={}", told.0);
    // A thread of its own writes the log.
    wait_for(&format!("{line} in the log"), LIMIT, || {
        Ok(daemon.log()?.contains(&line).then_some(()))
    })?;
    daemon.stop()?;
    let minimum = u16::try_from(number(MIN_IO_SIZE)).context("16 bits")?;
    Ok((told.0, told.1, minimum))
}
