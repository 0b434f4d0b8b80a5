//! `cargo xtask demo`: the main job on real input, from a fresh clone, cleaned up after.

use crate::cargo::build_daemon;
use manyring_system::cleanup::Folder;
use manyring_system::command::{command, output};
use manyring_system::daemon::{Daemon, DaemonOptions};
use manyring_system::guest::{Guest, GuestOptions, Kernel, Kind};
use manyring_system::{Context, Outcome};
use std::fs::File;
use std::time::{Duration, Instant};

const SCRIPT: &str = r#"
must mkfs.ext4 -q $DISK
must mount -t ext4 $DISK /mnt
for n in 1 2 3 4 5 6 7 8; do
    must dd if=/dev/urandom of=/mnt/file$n bs=64k count=$((n * 4)) 2>/dev/null
done
cd /mnt && sha256sum file* > /tmp/sums && cd /
must umount /mnt
echo 3 > /proc/sys/vm/drop_caches
must mount -t ext4 $DISK /mnt
echo "mounted again: are the files as they were written?"
cd /mnt && must sha256sum -c /tmp/sums && cd /
echo "five seconds of fio: random reads and writes, 4 KiB to 64 KiB"
must fio --name=load --filename=/mnt/load --size=64M --rw=randrw --bsrange=4k-64k --direct=1 \
    --ioengine=libaio --iodepth=16 --numjobs=$(grep -c ^processor /proc/cpuinfo) --thread \
    --runtime=5 --time_based --group_reporting --eta=never --output=/tmp/fio
grep -E 'read:|write:|err=' /tmp/fio
must umount /mnt
await finished
"#;

pub(crate) fn run(kind: Kind) -> Outcome {
    let start = Instant::now();
    println!("xtask: building manyring");
    let binary = build_daemon("release")?;
    let kernel = Kernel::prepare(kind)?;
    let folder = Folder::new()?;
    let (image, log) = (folder.path().join("disk.img"), folder.path().join("manyring.log"));
    let file = File::create(&image).context(image.display())?;
    file.set_len(512 << 20).context(image.display())?;
    let (queues, cpus) = if kind == Kind::Qemu { (4, 4) } else { (1, 1) };
    let queues_text = queues.to_string();
    let more = ["--num-queues", &queues_text];
    let options = DaemonOptions::blk(&binary, folder.path(), &log, &image, &more);
    println!("xtask: starting manyring {}", options.arguments.join(" "));
    let socket = options.socket();
    let daemon = Daemon::start(options, &socket)?;
    println!("xtask: booting Linux on this disk");
    let guest = GuestOptions {
        socket: Some(&socket),
        queues,
        cpus,
        programs: &["fio"],
        script: SCRIPT,
        is_shown: true,
        ..Default::default()
    };
    let served = serve(&kernel, &guest, &daemon, &folder);
    if served.is_err() {
        println!("xtask: what manyring logged:\n{}", daemon.log()?);
    }
    served?;
    daemon.stop()?;
    output(command("e2fsck").arg("-fn").arg(&image))?;
    println!("xtask: the host's e2fsck finds the image clean");
    println!("xtask: demo done in {:.0} s, nothing is left behind", start.elapsed().as_secs_f64());
    Ok(())
}

fn serve(kernel: &Kernel, options: &GuestOptions<'_>, daemon: &Daemon, folder: &Folder) -> Outcome {
    let mut guest = Guest::boot(kernel, options, &folder.path().join("console.log"))?;
    guest.reach("finished", Duration::from_secs(120))?;
    println!("xtask: what each queue has done (manyring stats):");
    println!("{}", daemon.stats_text()?.trim_end());
    guest.proceed()?;
    guest.finish(Duration::from_secs(30)).map(|_| ())
}
