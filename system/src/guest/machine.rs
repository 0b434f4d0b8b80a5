//! The command lines of User Mode Linux and QEMU.

use super::{Emulator, GuestOptions, Kernel};
use crate::Outcome;
use crate::command::{child, on_cpu};
use std::path::Path;
use std::process::Command;
use std::sync::LazyLock;

pub(super) const MEMORY_MIB: u64 = 512;
const SHM: &str = "/dev/shm";

/// True if User Mode Linux's memory, which is a file, has no room in `/dev/shm` (containers): it
/// then lies beside the guest's other files, perhaps on a disk. Once for all, since the daemons are
/// started with the same answer.
pub(crate) fn is_memory_on_disk() -> bool {
    static ON_DISK: LazyLock<bool> = LazyLock::new(|| {
        let room = rustix::fs::statvfs(SHM).map(|shm| shm.f_bavail * shm.f_frsize);
        room.unwrap_or(0) < MEMORY_MIB << 20
    });
    *ON_DISK
}

/// Where User Mode Linux makes the file that is its memory, beside its `initramfs` at worst.
pub(crate) fn memory_folder(initramfs: &Path) -> &Path {
    let folder = initramfs.parent().unwrap_or(Path::new("/"));
    if is_memory_on_disk() { folder } else { Path::new(SHM) }
}

/// A pid namespace of its own: killing UML alone would leave its traced children behind.
pub(super) fn namespace(options: &GuestOptions<'_>) -> Command {
    let mut command = child("unshare");
    if !rustix::process::geteuid().is_root() {
        command.args(["--user", "--map-current-user"]);
    }
    command.args(["--fork", "--pid", "--kill-child", "--"]);
    command.args(on_cpu(options.host_cpu));
    command
}

pub(super) fn uml(kernel: &Kernel, options: &GuestOptions<'_>, initramfs: &Path) -> Command {
    let folder = initramfs.parent().unwrap_or(Path::new("/"));
    let mut command = namespace(options);
    if let Some(shim) = kernel.shim() {
        command.env("LD_PRELOAD", shim);
    }
    command.env("TMPDIR", memory_folder(initramfs));
    command.arg(kernel.image());
    command.arg(format!("mem={MEMORY_MIB}M")).arg(format!("initrd={}", initramfs.display()));
    command.arg(format!("uml_dir={}/", folder.display()));
    for socket in options.socket.iter().chain(options.more_disks) {
        let virtio_blk = 2;
        command.arg(format!("virtio_uml.device={}:{virtio_blk}", socket.display()));
    }
    for net in options.net.iter().chain(&options.second_net) {
        let virtio_net = 1;
        command.arg(format!("virtio_uml.device={}:{virtio_net}", net.socket.display()));
    }
    command.args(["con=null", "con0=fd:0,fd:1", "ssl=null", "quiet", "noreboot"]);
    command.args(environment(options));
    command
}

/// The devices that the guest waits for, as words that the kernel passes to the first program.
pub(crate) fn environment(options: &GuestOptions<'_>) -> [String; 2] {
    let word = |has: bool| if has { "yes" } else { "no" };
    [
        format!("disk={}", word(options.socket.is_some())),
        format!("net={}", word(options.net.is_some())),
    ]
}

pub(super) fn qemu(
    kernel: &Kernel,
    options: &GuestOptions<'_>,
    initramfs: &Path,
) -> Outcome<Command> {
    let emulator = match options.emulator {
        Some(emulator) => emulator,
        None => Emulator::of_system()?,
    };
    let mut command = namespace(options);
    command.args(emulator.words());
    if kernel.is_kvm() {
        command.args(["-accel", "kvm", "-cpu", "host"]);
    } else {
        command.args(["-accel", "tcg,thread=multi", "-cpu", "max"]);
    }
    let memory = format!("memory-backend-memfd,id=m0,size={MEMORY_MIB}M,share=on");
    command.args(["-machine", "q35,memory-backend=m0", "-object", &memory]);
    command.args(["-smp", &options.cpus.to_string(), "-m", &format!("{MEMORY_MIB}M")]);
    command.args(["-nodefaults", "-no-user-config"]);
    if !options.can_reboot {
        command.arg("-no-reboot");
    }
    command.args(["-display", "none", "-serial", "stdio", "-monitor", "none"]);
    if let Some(monitor) = options.monitor {
        command.arg("-qmp").arg(format!("unix:{},server=on,wait=off", monitor.display()));
        for port in 0..2 {
            let device = format!("pcie-root-port,id=port{port},chassis={}", port + 1);
            command.args(["-device", &device]);
        }
    }
    if options.is_traced {
        command.args(["-trace", "enable=vhost_user_write"]);
    }
    if let Some(incoming) = options.incoming {
        command.arg("-incoming").arg(format!("unix:{}", incoming.display()));
    }
    command.arg("-kernel").arg(kernel.image()).arg("-initrd").arg(initramfs);
    let environment = environment(options).join(" ");
    let append = format!("console=ttyS0 quiet panic=-1 no_timer_check {environment}");
    command.args(["-append", &append]);
    add_devices(&mut command, emulator, options);
    Ok(command)
}

/// Its disks and its network card.
fn add_devices(command: &mut Command, emulator: &Emulator, options: &GuestOptions<'_>) {
    let reconnect = emulator.reconnect();
    for (disk, socket) in options.socket.iter().chain(options.more_disks).enumerate() {
        let chardev = format!("socket,id=disk{disk},path={},{reconnect}", socket.display());
        let packed = if options.is_packed { ",packed=on" } else { "" };
        let queues = options.queues;
        let device = format!("vhost-user-blk-pci,chardev=disk{disk},num-queues={queues}{packed}");
        command.args(["-chardev", &chardev, "-device", &device]);
    }
    if let Some(net) = options.net {
        let chardev = format!("socket,id=c1,path={},{reconnect}", net.socket.display());
        let netdev = format!("vhost-user,id=n0,chardev=c1,queues={}", net.pairs);
        let vectors = if emulator.has_msi_x() { 2 * net.pairs + 2 } else { 0 };
        let device = "virtio-net-pci,netdev=n0,mq=on,romfile=,mac=52:54:00:12:34:56";
        let device = format!("{device},vectors={vectors}{}", options.net_properties);
        command.args(["-chardev", &chardev, "-netdev", &netdev, "-device", &device]);
    }
}
