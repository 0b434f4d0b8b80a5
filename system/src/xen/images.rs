//! The first file systems of dom0 and of the guests.

use super::machine::MachineOptions;
use super::parts::Parts;
use crate::command::find;
use crate::guest::cpio::Archive;
use crate::guest::fio;
use crate::guest::initramfs::{self, libraries};
use crate::{Context, Outcome};
use std::fs::File;
use std::io::BufWriter;
use std::path::{Path, PathBuf};

const INIT: &str = include_str!("dom0.sh");
const WORDS: &str = include_str!("words.sh");
const DISK: &str = include_str!("disk.sh");
const GUEST: &str = include_str!("guest.sh");

/// Modules that dom0 loads at its start. xen-blkback is loaded later, if it shall serve.
const MODULES: [&str; 9] = [
    "xenfs",
    "xen-evtchn",
    "xen-gntdev",
    "xen-gntalloc",
    "xen-blkfront",
    "loop",
    "virtio_pci",
    "9pnet_virtio",
    "9p",
];
/// The tool stack's programs, below its own folder.
const TOOLS: [&str; 4] = ["xl", "xenstored", "xenconsoled", "xen-init-dom0"];
const XENSTORE: [&str; 7] = ["chmod", "exists", "list", "ls", "read", "rm", "write"];
/// Programs that the scripts, of the tool stack and of these tests, use as Debian packages them.
const PROGRAMS: [&str; 6] = ["bash", "blockdev", "flock", "losetup", "readlink", "stat"];
/// Modules that a guest loads; the last one only if it mounts a file system.
const GUEST_MODULES: [&str; 2] = ["xen-blkfront", "ext4"];

/// Writes the guests' initramfs. `folder` is for files that are made on the way.
pub(super) fn guest(parts: &Parts, mounts: bool, folder: &Path, path: &Path) -> Outcome {
    let root = folder.join("stand-ins");
    fio::stand_ins(&find("fio").ok_or("fio is not installed")?, &root)?;
    let script = format!("{DISK}{GUEST}");
    let modules = if mounts { &GUEST_MODULES[..] } else { &GUEST_MODULES[..1] };
    initramfs::write(path, &parts.modules(modules)?, &["fio"], Some(&root), &script)
}

/// Writes dom0's initramfs, for these options of the machine, with the one of its guests. (In a
/// folder that dom0 shares with the host each page that `xl` reads would be a message.)
pub(super) fn dom0(
    parts: &Parts,
    options: &MachineOptions<'_>,
    guest: &Path,
    path: &Path,
) -> Outcome {
    let programs = programs(parts, options.has_qdisk)?;
    let linked = programs.iter().map(|(_, path)| path.as_path()).chain([options.manyring]);
    let mut libraries = libraries(linked, Some(&parts.tools))?;
    libraries.insert(UNWINDER[1..].to_owned(), UNWINDER.into());
    let (modules, blkback) = (parts.modules(&MODULES)?, parts.xen_blkback()?);
    let file = File::create(path).context(path.display())?;
    let fill = || -> std::io::Result<()> {
        let mut archive = Archive::new(BufWriter::new(file));
        for folder in ["dev", "proc", "sys", "tmp", "run", "root", "host"] {
            archive.folder(folder)?;
        }
        for folder in ["var/lib/xen", "var/log/xen"] {
            archive.folder(folder)?;
        }
        archive.link("var/run", "../run")?;
        archive.link("var/lock", "../run/lock")?;
        archive.file("etc/passwd", 0o644, b"root:x:0:0:root:/root:/bin/sh\n")?;
        archive.copy("bin/busybox", &find("busybox").unwrap_or_default())?;
        for (to, from) in &programs {
            archive.copy(to, from)?;
        }
        archive.link("bin/xl", &format!("/usr/lib/xen-{}/bin/xl", parts.version))?;
        for name in XENSTORE {
            archive.link(&format!("bin/xenstore-{name}"), "xenstore")?;
        }
        for (to, library) in &libraries {
            archive.copy(to, library)?;
        }
        folder_into(&mut archive, "etc/xen", &parts.tools.join("etc/xen"))?;
        if options.has_qdisk {
            folder_into(&mut archive, &KEYMAPS[1..], Path::new(KEYMAPS))?;
        }
        archive.copy("etc/xen/scripts/block-manyring", options.script)?;
        archive.copy("guest/vmlinux", &parts.image())?;
        archive.copy("guest/initramfs", guest)?;
        for (index, module) in modules.iter().enumerate() {
            let name = module.file_name().unwrap_or_default().to_string_lossy();
            archive.copy(&format!("modules/{index:02}-{name}"), module)?;
        }
        archive.copy("later/xen-blkback.ko", &blkback)?;
        let head = format!("XEN=/usr/lib/xen-{}\n", parts.version);
        archive.file("words.sh", 0o644, format!("{head}{DISK}{WORDS}").as_bytes())?;
        let init = INIT.replacen("export PATH", &format!("{head}export PATH"), 1);
        archive.file("init", 0o755, init.as_bytes())?;
        archive.finish()
    };
    fill().context(path.display())
}

/// The programs of dom0: where each goes, and where it is.
fn programs(parts: &Parts, has_qdisk: bool) -> Outcome<Vec<(String, PathBuf)>> {
    let mut programs = Vec::new();
    for name in TOOLS {
        let path = format!("usr/lib/xen-{}/bin/{name}", parts.version);
        programs.push((path.clone(), parts.tools.join(path)));
    }
    programs.push(("bin/xenstore".into(), parts.tools.join("usr/bin/xenstore")));
    if has_qdisk {
        programs.push((QEMU.into(), parts.tools.join(QEMU)));
    }
    for name in PROGRAMS {
        let program = find(name).ok_or(format!("{name} is not installed"))?;
        programs.push((format!("bin/{name}"), program));
    }
    Ok(programs)
}

/// The tool stack's threads are ended with the unwinder, which is opened by name.
const UNWINDER: &str = "/lib/x86_64-linux-gnu/libgcc_s.so.1";
/// The tool stack's own QEMU, which serves disks as qdisk.
const QEMU: &str = "usr/libexec/xen-qemu-system-i386";
/// It reads one at its start, whether or not anybody types.
const KEYMAPS: &str = "/usr/share/qemu/keymaps";

/// A folder with its files and folders.
fn folder_into<W: std::io::Write>(
    archive: &mut Archive<W>,
    to: &str,
    from: &Path,
) -> std::io::Result<()> {
    archive.folder(to)?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let path = format!("{to}/{}", entry.file_name().to_string_lossy());
        if entry.file_type()?.is_dir() {
            folder_into(archive, &path, &entry.path())?;
        } else {
            archive.copy(&path, &entry.path())?;
        }
    }
    Ok(())
}
