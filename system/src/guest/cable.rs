//! An emulated machine with two network cards on one cable, whose kernel can send by AF_XDP without
//! a copy (virtio-net, since Linux 6.13). It counts its instructions: each takes it a nanosecond.

use super::Guest;
use super::initramfs;
use super::newest::newest_kernel;
use crate::command::{command, output};
use crate::{Outcome, packages};
use std::path::{Path, PathBuf};

/// The packages that the machine needs.
const PACKAGES: [&str; 3] = ["qemu-system-x86", "binutils", "busybox-static"];

/// Boots the machine with these programs in it, each under the name of its file, and with `script`
/// to run. Files of it lie in `folder`, and its console goes to the file `console`. The cards are
/// `eth0` and `eth1`.
///
/// # Errors
/// It cannot be made or started.
pub fn boot_on_cable(
    folder: &Path,
    programs: &[&Path],
    script: &str,
    console: &Path,
) -> Outcome<Guest> {
    packages::need("an emulated machine", &PACKAGES)?;
    let (image, modules) = newest_kernel()?;
    let stripped = programs.iter().map(|program| strip(folder, program));
    let stripped = stripped.collect::<Outcome<Vec<_>>>()?;
    let names: Vec<_> = stripped.iter().map(|path| path.display().to_string()).collect();
    let names: Vec<_> = names.iter().map(String::as_str).collect();
    let initrd = folder.join("initramfs");
    initramfs::write(&initrd, &modules, &names, None, script)?;
    Guest::by_firmware("qemu-system-x86_64", &words(&image, &initrd), console)
}

/// A copy without what debuggers need: with that, programs do not fit the machine.
fn strip(folder: &Path, program: &Path) -> Outcome<PathBuf> {
    let name = program.file_name().ok_or("a program without a name")?;
    let to = folder.join(name);
    output(command("strip").arg("-o").args([to.as_path(), program]))?;
    Ok(to)
}

/// The words of QEMU: one CPU, which counts its instructions, and two cards on a cable.
fn words(image: &Path, initrd: &Path) -> Vec<String> {
    let words = format!(
        "-accel tcg,thread=single -icount shift=0,sleep=off -machine q35 -cpu max -m 1G \
         -nodefaults -no-reboot -display none -serial stdio -kernel {} -initrd {} \
         -netdev hubport,id=a,hubid=1 -netdev hubport,id=b,hubid=1 \
         -device virtio-net-pci,netdev=a,iommu_platform=on,disable-legacy=on,vectors=0,romfile= \
         -device virtio-net-pci,netdev=b,vectors=0,romfile=",
        image.display(),
        initrd.display()
    );
    let mut words: Vec<_> = words.split_whitespace().map(str::to_owned).collect();
    words.push("-append".to_owned());
    words.push("console=ttyS0 quiet panic=-1 no_timer_check disk=no net=no".to_owned());
    words
}
