//! QEMU's machine `microvm`. Its virtio-mmio lets the guest's driver take rings of 1024 entries,
//! while QEMU asks for a record of requests in flight for the `queue-size` of the device, 128
//! unless said: such a disk is served without a record, and one with `queue-size=1024` has it.

use super::{Behaviour, Scene};
use crate::daemon::{Daemon, DaemonOptions};
use crate::guest::{Emulator, Guest, Kind, initramfs};
use crate::{Context, Outcome, check};
use std::path::Path;
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "qemu_microvm", run };

const SCRIPT: &str = r#"
head -c 4194304 /dev/urandom > /tmp/data
for disk in vda vdb; do
    tags=$(cat /sys/block/$disk/mq/0/nr_tags)
    [ "$tags" = 1024 ] || fail "the ring of $disk has $tags entries"
    must dd if=/tmp/data of=/dev/$disk bs=64k oflag=direct 2> /dev/null
done
await written
for disk in vda vdb; do
    must dd if=/dev/$disk of=/tmp/again bs=64k count=64 iflag=direct 2> /dev/null
    must cmp /tmp/data /tmp/again
done
await read
"#;

/// What the log says of a ring without a record.
const ADVICE: &str = "Set queue-size=1024 for this device in the VMM";
const LIMIT: Duration = Duration::from_secs(180);

fn run(scene: &Scene<'_>) -> Outcome {
    let mut daemons = [serve(scene, "default")?, serve(scene, "advised")?];
    let sockets = daemons.each_ref().map(Daemon::socket);
    let initrd = scene.file("initramfs");
    initramfs::write(&initrd, scene.kernel(Kind::Qemu)?.modules(), &[], None, SCRIPT)?;
    let reconnect = Emulator::of_system()?.reconnect();
    let mut machine = machine(scene, &initrd)?;
    for (disk, (socket, properties)) in sockets.iter().zip(["", ",queue-size=1024"]).enumerate() {
        let chardev = format!("socket,id=c{disk},path={},{reconnect}", socket.display());
        let device = format!("vhost-user-blk,chardev=c{disk}{properties}");
        machine.extend(["-chardev".into(), chardev, "-device".into(), device]);
    }
    let mut guest = Guest::by_firmware("qemu-system-x86_64", &machine, &scene.log("guest.log"))?;
    guest.reach("written", LIMIT)?;
    let advised = |daemon: &Daemon| Ok::<_, String>(daemon.log()?.matches(ADVICE).count());
    for (daemon, expected) in daemons.iter().zip([1, 0]) {
        is_served(daemon)?;
        let found = advised(daemon)?;
        check(found == expected, || format!("advice to set queue-size: {found}, not {expected}"))?;
    }
    // Nothing is in flight now: neither disk needs a record.
    daemons = {
        let [default, advised] = daemons;
        [again(default)?, again(advised)?]
    };
    guest.proceed()?;
    guest.reach("read", LIMIT)?;
    for (daemon, expected) in daemons.iter().zip([2, 0]) {
        is_served(daemon)?;
        let found = advised(daemon)?;
        check(found == expected, || format!("after a kill, advice: {found}, not {expected}"))?;
    }
    guest.proceed()?;
    guest.finish(LIMIT)?;
    daemons.into_iter().try_for_each(Daemon::stop)
}

/// A daemon with a disk of its own.
fn serve(scene: &Scene<'_>, name: &str) -> Outcome<Daemon> {
    let folder = scene.file(name);
    std::fs::create_dir(&folder).context(folder.display())?;
    let image = folder.join("disk.img");
    let made = std::fs::File::create(&image).and_then(|file| file.set_len(8 << 20));
    made.context(image.display())?;
    let log = scene.log(&format!("manyring-{name}.log"));
    let options = DaemonOptions::blk(&scene.stage.binary, &folder, &log, &image, &[]);
    let socket = options.socket();
    Daemon::start(options, &socket)
}

/// The next daemon, after this one was killed.
fn again(daemon: Daemon) -> Outcome<Daemon> {
    let options = daemon.crash()?;
    let socket = options.socket();
    Daemon::start(options, &socket)
}

fn is_served(daemon: &Daemon) -> Outcome {
    let queues = daemon.queues()?;
    let requests = queues.iter().map(|queue| queue.value("requests")).sum::<Outcome<u64>>()?;
    let log = daemon.log()?;
    let is_fine = requests >= 64 && !log.contains("queue stopped: ");
    check(is_fine, || format!("{requests} requests were served: {log}"))
}

/// The words of QEMU, without the disks.
fn machine(scene: &Scene<'_>, initrd: &Path) -> Outcome<Vec<String>> {
    let kernel = scene.kernel(Kind::Qemu)?;
    // The firmware that this machine has unless said keeps its ROM outside of the memory that is
    // shared. Under emulation Linux finds no clock to measure its own by.
    let (accel, clock) = match kernel.is_kvm() {
        true => ("-accel kvm -cpu host", ""),
        false => ("-accel tcg -cpu max", "tsc_early_khz=2000000 lpj=4000000"),
    };
    let words = format!(
        "{accel} -machine microvm,memory-backend=m0 -bios qboot.rom -m 256M \
         -object memory-backend-memfd,id=m0,size=256M,share=on -nodefaults -no-user-config \
         -no-reboot -display none -serial stdio -kernel {} -initrd {}",
        kernel.image().display(),
        initrd.display()
    );
    let mut words: Vec<_> = words.split_whitespace().map(str::to_owned).collect();
    words.push("-append".to_owned());
    words.push(format!("console=ttyS0 quiet panic=-1 no_timer_check disk=yes net=no {clock}"));
    Ok(words)
}
