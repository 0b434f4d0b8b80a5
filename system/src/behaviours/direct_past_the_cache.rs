//! A disk with `direct` loses nothing that it has acknowledged, whatever memory the guest uses and
//! whatever units the host writes: on block devices of 512 and 4096 bytes, ext4, XFS, a clone on
//! XFS, and btrfs; through io_uring and without; with one queue and with four on two workers.

use super::{Behaviour, Scene};
use crate::host_fs::{HostFs, LoopDevice};
use crate::{Context, Outcome, check, packages};
use manyring_driver::wire::blk::{VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_WRITE_ZEROES};
use manyring_driver::{BlkDriver, BlkDriverOptions, BlkDriverQueue, DriverOp};
use std::path::{Path, PathBuf};
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "direct_past_the_cache", run };

const LIMIT: Duration = Duration::from_secs(30);
const MIB: u64 = 8;
/// The sectors that are written, from the first on: 64 pages of eight.
const SECTORS: u64 = 512;
const SECTOR: usize = 512;
const ROUNDS: u64 = 60;

fn run(scene: &Scene<'_>) -> Outcome {
    packages::need("the test of direct disks", &["btrfs-progs", "e2fsprogs", "xfsprogs"])?;
    let folder = scene.folder.path();
    let [small, large] =
        [512, 4096].map(|sector| LoopDevice::new(folder, &format!("device{sector}"), MIB, sector));
    let (small, large) = (small?, large?);
    let systems = [
        HostFs::new(folder, "ext4", 64, &["mkfs.ext4", "-q"])?,
        HostFs::new(folder, "xfs", 400, &["mkfs.xfs", "-q", "-f"])?,
        HostFs::new(folder, "btrfs", 256, &["mkfs.btrfs", "-q"])?,
    ];
    let mut images = vec![small.path().to_owned(), large.path().to_owned()];
    for host in &systems {
        images.push(host.folder().join("image"));
        let image = images.last().ok_or("no image")?;
        std::fs::write(image, vec![0; 8 << 20]).context(image.display())?;
    }
    let clone = systems[1].folder().join("clone");
    let copy = ["--reflink=always".into(), images[3].clone(), clone.clone()];
    crate::command::output(crate::command::command("cp").args(copy))?;
    images.push(clone);
    for image in &images {
        for (queues, more) in [(1, &[][..]), (4, &["--workers=2"]), (4, &["--no-io-uring"])] {
            // Odd addresses; odd pieces; and requests that are aligned beside others that are not.
            let (skew, segment) = if queues == 1 { (3, 700) } else { (16, 65_536) };
            let what = format!("{} {queues} {more:?}", image.display());
            keeps_all(scene, image, (queues, more), (skew, segment)).context(what)?;
        }
    }
    Ok(())
}

/// The stamp with which each sector was written last; 0: zeroes.
type Stamps = Vec<u64>;

fn keeps_all(
    scene: &Scene<'_>,
    image: &Path,
    (queues, more): (u16, &[&str]),
    (skew, segment_size): (u64, u32),
) -> Outcome {
    let count = queues.to_string();
    let arguments = [&["--direct", "--num-queues", &count], more].concat();
    let defaults = BlkDriverOptions::default();
    let options = BlkDriverOptions {
        queues,
        queue_size: 64,
        features: defaults.features | VIRTIO_BLK_F_WRITE_ZEROES | VIRTIO_BLK_F_DISCARD,
        buffer_size: 8192,
        segment_size,
        skew,
        ..defaults
    };
    let mut stamps = vec![0; usize::try_from(SECTORS).unwrap_or(0)];
    for is_killed in [false, true] {
        let daemon = scene.serve(image, &arguments)?;
        let mut driver = BlkDriver::connect(&daemon.socket(), &options).context("the session")?;
        zero_all(&mut driver.queues[0], &mut stamps)?;
        for round in 1..=ROUNDS {
            write_round(&mut driver.queues, round, &mut stamps)?;
        }
        compare(&mut driver.queues[0], &stamps, "before a flush")?;
        driver.queues[0].flush().context("flush")?;
        compare(&mut driver.queues[0], &stamps, "after a flush")?;
        drop(driver);
        if is_killed {
            drop(daemon.crash()?);
        } else {
            daemon.stop()?;
        }
        compare_cold(image, &stamps)?;
    }
    Ok(())
}

/// Zeroes all sectors by requests whose ends are inside a unit of the host; discards some.
fn zero_all(queue: &mut BlkDriverQueue, stamps: &mut Stamps) -> Outcome {
    for (sector, count) in [(0, 3), (3, 250), (253, 259)] {
        let op = DriverOp::WriteZeroes { sector, count, unmap: sector == 3 };
        queue.run(op).context(format!("zeroes at {sector}"))?;
    }
    stamps.fill(0);
    let discard = DriverOp::Discard { sector: SECTORS + 1, count: 37 };
    queue.run(discard).map(|_| ()).context("discard")
}

/// Writes one page and a half of sectors, all in flight together, a request for each sector or two;
/// then a request of whole pages beside one of a part of it.
fn write_round(queues: &mut [BlkDriverQueue], round: u64, stamps: &mut Stamps) -> Outcome {
    let first = round * 13 % (SECTORS - 24) / 4 * 4;
    let mut expected = vec![0; queues.len()];
    let mut sector = first;
    while sector < first + 12 {
        let len = 1 + (sector + round) % 2;
        let at = usize::try_from(sector).unwrap_or(0) % queues.len();
        let data = bytes(sector, len, round);
        queues[at]
            .submit(DriverOp::Write { sector, data: &data })
            .context("submit")?
            .ok_or("full")?;
        expected[at] += 1;
        (sector..sector + len).for_each(|s| stamps[usize::try_from(s).unwrap_or(0)] = round);
        sector += len;
    }
    finish(queues, &expected)?;
    // Whoever is last has sector `page + 3`; both write it alike.
    let page = first.next_multiple_of(8);
    expected.fill(0);
    for (at, sector, len) in [(0, page, 16), (queues.len() - 1, page + 3, 1)] {
        let data = bytes(sector, len, round);
        queues[at]
            .submit(DriverOp::Write { sector, data: &data })
            .context("submit")?
            .ok_or("full")?;
        expected[at] += 1;
        (sector..sector + len).for_each(|s| stamps[usize::try_from(s).unwrap_or(0)] = round);
    }
    finish(queues, &expected)
}

fn finish(queues: &mut [BlkDriverQueue], expected: &[usize]) -> Outcome {
    for queue in queues.iter_mut() {
        queue.publish().context("publish")?;
    }
    for (queue, count) in queues.iter_mut().zip(expected) {
        for _ in 0..*count {
            let done = queue.wait(LIMIT).context("an answer")?;
            check(done.status == 0, || format!("status {}", done.status))?;
        }
    }
    Ok(())
}

/// The content of sectors that were written in a round.
fn bytes(sector: u64, len: u64, round: u64) -> Vec<u8> {
    let one = |sector: u64| {
        let stamp = if round == 0 { [0; 16] } else { both(sector, round) };
        stamp.repeat(SECTOR / 16)
    };
    (sector..sector + len).flat_map(one).collect()
}

fn both(sector: u64, round: u64) -> [u8; 16] {
    let mut stamp = [0; 16];
    stamp[..8].copy_from_slice(&sector.to_le_bytes());
    stamp[8..].copy_from_slice(&round.to_le_bytes());
    stamp
}

/// Compares all sectors through the daemon.
fn compare(queue: &mut BlkDriverQueue, stamps: &Stamps, when: &str) -> Outcome {
    for sector in (0..SECTORS).step_by(8) {
        let mut found = vec![0; 8 * SECTOR];
        queue.read(sector, &mut found).context(format!("read {sector} {when}"))?;
        compare_page(&found, sector, stamps, when)?;
    }
    Ok(())
}

fn compare_page(found: &[u8], sector: u64, stamps: &Stamps, when: &str) -> Outcome {
    for (sector, found) in (sector..).zip(found.chunks(SECTOR)) {
        let round = stamps[usize::try_from(sector).unwrap_or(0)];
        check(found == bytes(sector, 1, round), || {
            format!("sector {sector} is not that of round {round} {when}: {:?}", &found[..16])
        })?;
    }
    Ok(())
}

/// Compares all sectors with what the host reads from the disk itself, past its page cache.
fn compare_cold(image: &Path, stamps: &Stamps) -> Outcome {
    let whole = cold_copy(image)?;
    for sector in (0..SECTORS).step_by(8) {
        let at = usize::try_from(sector).unwrap_or(0) * SECTOR;
        compare_page(&whole[at..at + 8 * SECTOR], sector, stamps, "cold")?;
    }
    Ok(())
}

fn cold_copy(image: &Path) -> Outcome<Vec<u8>> {
    let copy: PathBuf = std::env::temp_dir().join(format!("manyring-cold-{}", std::process::id()));
    let (from, to) = (format!("if={}", image.display()), format!("of={}", copy.display()));
    let mut dd = crate::command::command("dd");
    crate::command::output(dd.args([&from, &to]).args(["bs=1M", "count=1", "iflag=direct"]))?;
    let bytes = std::fs::read(&copy).context(copy.display())?;
    let _ = std::fs::remove_file(&copy);
    Ok(bytes)
}
