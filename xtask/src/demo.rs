//! `cargo xtask demo`: the main job on real input, from a fresh clone, cleaned up after.

use crate::cargo::build_daemon;
use manyring_system::cleanup::Folder;
use manyring_system::command::{command, output};
use manyring_system::daemon::{Daemon, DaemonOptions};
use manyring_system::guest::{Guest, GuestOptions, Kernel, Kind, Net};
use manyring_system::net::{Far, Namespace, WORDS};
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
"#;

const NETWORK: &str = r#"
network
echo "the network: echoes from the host, IPv4 and IPv6"
pings $HOST
grep -E 'packets|round-trip' /tmp/ping
pings $HOST6
grep -E 'packets|round-trip' /tmp/ping
echo "random data to the host and back, compared by checksum"
agrees $HOST 4096 "IPv4"
agrees $HOST6 4096 "IPv6"
echo "iperf3 both ways, as the receiver saw it"
flow tcp-to-host $HOST -t 3
flow tcp-to-guest $HOST -t 3 -R
flow udp-to-host $HOST -u -b 20M -t 3
flow udp-to-guest $HOST -u -b 20M -t 3 -R
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
    let namespace = Namespace::new()?;
    let (queues, cpus) = if kind == Kind::Qemu { (4, 4) } else { (1, 1) };
    let queues_text = queues.to_string();
    let disk = start_daemon(DaemonOptions::blk(
        &binary,
        folder.path(),
        &log,
        &image,
        &["--num-queues", &queues_text],
    ))?;
    let network = start_daemon(DaemonOptions::net(
        &binary,
        folder.path(),
        &log,
        &namespace,
        &["--tap", "tap0", "--queue-pairs", &queues_text],
    ))?;
    namespace.address("tap0")?;
    let _far = Far::start(&namespace, folder.path())?;
    println!("xtask: booting Linux on this disk and this network");
    let (disk_socket, socket) = (disk.socket(), network.socket());
    let guest = GuestOptions {
        socket: Some(&disk_socket),
        queues,
        net: Some(Net { socket: &socket, pairs: queues }),
        cpus,
        programs: &["fio", "iperf3"],
        script: &format!("{WORDS}{SCRIPT}{NETWORK}"),
        is_shown: true,
        ..Default::default()
    };
    let served = serve(&kernel, &guest, &[&disk, &network], &folder);
    if served.is_err() {
        println!("xtask: what manyring logged:\n{}", disk.log()?);
    }
    served?;
    network.stop()?;
    disk.stop()?;
    namespace.holds_only(&[])?;
    output(command("e2fsck").arg("-fn").arg(&image))?;
    println!("xtask: the host's e2fsck finds the image clean, and the tap is gone");
    println!("xtask: demo done in {:.0} s, nothing is left behind", start.elapsed().as_secs_f64());
    Ok(())
}

fn start_daemon(options: DaemonOptions) -> Outcome<Daemon> {
    println!("xtask: starting manyring {}", options.arguments.join(" "));
    let socket = options.socket();
    Daemon::start(options, &socket)
}

fn serve(
    kernel: &Kernel,
    options: &GuestOptions<'_>,
    daemons: &[&Daemon],
    folder: &Folder,
) -> Outcome {
    let mut guest = Guest::boot(kernel, options, &folder.path().join("console.log"))?;
    guest.reach("finished", Duration::from_secs(180))?;
    println!("xtask: what each queue has done (manyring stats):");
    for daemon in daemons {
        println!("{}", daemon.stats_text()?.trim_end());
    }
    guest.proceed()?;
    guest.finish(Duration::from_secs(30)).map(|_| ())
}
