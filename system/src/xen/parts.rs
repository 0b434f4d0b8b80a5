//! The parts of Xen: Debian's hypervisor, tool stack, kernel and its own QEMU, unpacked into the
//! cache. None of them is installed.

use crate::command::{command, output};
use crate::guest::{cache, kernel};
use crate::{Context, Outcome, check, packages};
use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};

/// Packages for making the images and for running them.
const TOOLS: [&str; 10] = [
    "binutils",
    "busybox-static",
    "e2fsprogs",
    "fio",
    "gcc",
    "kmod",
    "libc6-dev",
    "qemu-system-x86",
    "util-linux",
    "xz-utils",
];
/// Packages that Xen's QEMU needs beside the unpacked ones.
const QDISK: [&str; 5] =
    ["libglib2.0-0", "libjpeg62-turbo", "libspice-server1", "libusb-1.0-0", "qemu-system-data"];

/// Unpacked parts of Xen.
#[derive(Debug)]
pub(super) struct Parts {
    /// The tool stack, as it would lie in `/`.
    pub(super) tools: PathBuf,
    /// Xen's version, as in `/usr/lib/xen-4.17`.
    pub(super) version: String,
    /// The kernel's packages, as they would lie in `/`.
    pub(super) kernel: PathBuf,
}

impl Parts {
    /// Gets them ready: downloads and unpacks what is not there.
    pub(super) fn prepare() -> Outcome<Self> {
        packages::need("a Xen guest", &TOOLS)?;
        let kernel = kernel::unpacked("amd64")?;
        let image = kernel.join("vmlinux");
        if !image.is_file() {
            let packed = kernel::only(&kernel.join("boot"), "vmlinuz-")?;
            let bytes = std::fs::read(&packed).context(packed.display())?;
            let payload = payload(&bytes).ok_or(format!("{}: no bzImage", packed.display()))?;
            extract(payload, &image)?;
        }
        let tools = cache()?.join("xen-amd64");
        if !tools.is_dir() {
            packages::unpack(&tools, &xen_packages()?, |part| {
                let packed = packed_xen(part)?;
                let bytes = std::fs::read(&packed).context(packed.display())?;
                extract(&bytes, &part.join("xen"))
            })?;
        }
        let folder = packed_xen(&tools)?;
        let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let version = name.strip_prefix("xen-").and_then(|name| name.strip_suffix("-amd64.gz"));
        let version = version.ok_or(format!("{name} says no version"))?.to_owned();
        Ok(Self { tools, version, kernel })
    }

    /// Makes sure of the libraries of QEMU's qdisk.
    pub(super) fn need_qdisk() -> Outcome {
        packages::need("QEMU's qdisk", &QDISK)
    }

    /// The hypervisor, unpacked.
    pub(super) fn xen(&self) -> PathBuf {
        self.tools.join("xen")
    }

    /// The kernel of dom0 and of guests. It is unpacked, since a guest that unpacks it under
    /// emulation takes ten seconds longer.
    pub(super) fn image(&self) -> PathBuf {
        self.kernel.join("vmlinux")
    }

    /// The kernel's own back-end. Nothing that it needs is a module.
    pub(super) fn xen_blkback(&self) -> Outcome<PathBuf> {
        let modules = self.modules(&["xen-blkback"])?;
        modules.into_iter().next_back().ok_or("this kernel has no module xen-blkback".into())
    }

    /// The files of these modules and of what they need, in the order of loading.
    pub(super) fn modules(&self, names: &[&str]) -> Outcome<Vec<PathBuf>> {
        kernel::modules(&self.kernel, names)
    }
}

/// The tool stack's packages: those of today's Xen and the libraries of Xen that they need.
fn xen_packages() -> Outcome<Vec<String>> {
    let system = packages::depends("xen-system-amd64")?;
    let is_versioned = |name: &&String| {
        name.ends_with(|c: char| c.is_ascii_digit()) && name.starts_with("xen-utils-")
    };
    let utils = system.iter().find(is_versioned).ok_or("xen-system-amd64 names no xen-utils")?;
    let is_hypervisor = |name: &&String| name.ends_with("-amd64");
    let xen = system.iter().find(is_hypervisor).ok_or("xen-system-amd64 names no hypervisor")?;
    let first = [xen, utils, "xen-utils-common", "xenstore-utils", "qemu-system-xen"];
    let mut open: Vec<String> = first.map(str::to_owned).to_vec();
    let mut all = BTreeSet::from(["libpixman-1-0".to_owned()]);
    while let Some(package) = open.pop() {
        if all.insert(package.clone()) && package != *xen {
            let needed = packages::depends(&package)?.into_iter();
            open.extend(needed.filter(|n| n.starts_with("libxen") || n.starts_with("libyajl")));
        }
    }
    Ok(all.into_iter().collect())
}

fn packed_xen(root: &Path) -> Outcome<PathBuf> {
    let boot = root.join("boot");
    let entries = std::fs::read_dir(&boot).context(boot.display())?;
    let mut paths = entries.filter_map(Result::ok).map(|entry| entry.path());
    let packed = paths.find(|path| path.extension().is_some_and(|kind| kind == "gz"));
    packed.ok_or(format!("{}: no packed hypervisor", boot.display()))
}

/// The packed kernel in a bzImage (Linux x86 boot protocol 2.08): it begins `payload_offset` behind
/// the setup sectors, and its last four bytes are the size it unpacks to.
fn payload(image: &[u8]) -> Option<&[u8]> {
    let word = |at: usize| {
        let bytes = image.get(at..at + 4)?.try_into().ok()?;
        usize::try_from(u32::from_le_bytes(bytes)).ok()
    };
    // A file that is as old as to say 0 means 4 sectors.
    let setup = match image.get(0x1f1)? {
        0 => 4,
        sectors => usize::from(*sectors),
    };
    let from = (setup + 1) * 512 + word(0x248)?;
    image.get(from..from + word(0x24c)?.checked_sub(4)?)
}

/// Unpacks what one of the kernel's packers made into the file `to`, all or nothing.
fn extract(packed: &[u8], to: &Path) -> Outcome {
    let packers: [(&[u8], &str); 3] =
        [(b"\xfd7zXZ\0", "xz"), (b"\x28\xb5\x2f\xfd", "zstd"), (b"\x1f\x8b", "gzip")];
    let packer = packers.iter().find(|(magic, _)| packed.starts_with(magic));
    let (_, packer) = packer.ok_or(format!("{}: packed in an unknown way", to.display()))?;
    let (from, part) = (to.with_extension("packed"), to.with_extension("part"));
    std::fs::write(&from, packed).context(from.display())?;
    let file = File::create(&part).context(part.display())?;
    let input = File::open(&from).context(from.display())?;
    let status = command(packer).arg("-dc").stdin(input).stdout(file).status().context(packer)?;
    check(status.success(), || format!("{packer}: {status}"))?;
    std::fs::remove_file(&from).context(from.display())?;
    std::fs::rename(&part, to).context(to.display())
}

/// A copy of a program without its debug information, which makes up most of a build for tests.
pub(super) fn stripped(program: &Path, to: &Path) -> Outcome {
    output(command("strip").arg("-o").args([to, program])).map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_payload_of_a_kernel_lies_behind_its_setup_sectors_without_its_size() {
        let mut image = vec![0; 2048];
        image[0x1f1] = 1;
        image[0x248..0x24c].copy_from_slice(&8u32.to_le_bytes());
        image[0x24c..0x250].copy_from_slice(&10u32.to_le_bytes());
        image[1032..1042].copy_from_slice(b"packed\x01\x02\x03\x04");
        assert_eq!(payload(&image), Some(&b"packed"[..]));
        image[0x24c..0x250].copy_from_slice(&9999u32.to_le_bytes());
        assert_eq!(payload(&image), None);
        assert_eq!(payload(&image[..0x240]), None);
    }
}
