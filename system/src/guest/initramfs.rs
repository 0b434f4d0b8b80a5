//! The guest's whole userland: one archive of Debian's own programs and their libraries.

use super::cpio::Archive;
use crate::command::{command, find, text};
use crate::{Context, Outcome, check};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::BufWriter;
use std::path::{Path, PathBuf};

/// Where a system has its libraries, from its root.
pub(crate) const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";

const INIT: &str = include_str!("init.sh");

/// Programs every guest has beside busybox.
const PROGRAMS: [&str; 5] = ["mkfs.ext4", "e2fsck", "blkdiscard", "blockdev", "fallocate"];

/// Writes the initramfs of a guest to `path`: `more` programs, the kernel's `modules`, `script`.
/// Libraries that lie in the tree `root` are taken before the system's.
pub(crate) fn write(
    path: &Path,
    modules: &[PathBuf],
    more: &[&str],
    root: Option<&Path>,
    script: &str,
) -> Outcome {
    let what = || format!("initramfs {}", path.display());
    let programs: Vec<_> = PROGRAMS
        .iter()
        .chain(more)
        .map(|name| Ok((*name, find(name).ok_or(format!("{name} is not installed"))?)))
        .collect::<Outcome<_>>()?;
    let busybox = find("busybox").ok_or("busybox is not installed")?;
    let libraries = libraries(programs.iter().map(|(_, path)| path.as_path()), root)?;
    let file = File::create(path).context(what())?;
    let fill = || -> std::io::Result<()> {
        let mut archive = Archive::new(BufWriter::new(file));
        for folder in ["dev", "proc", "sys", "tmp", "mnt", "root", "modules"] {
            archive.folder(folder)?;
        }
        archive.file("etc/passwd", 0o644, b"root:x:0:0:root:/root:/bin/sh\n")?;
        archive.file("etc/mtab", 0o644, b"")?;
        archive.copy("bin/busybox", &busybox)?;
        for (name, path) in &programs {
            // The last part, where a program was named by its path.
            let name = name.rsplit('/').next().unwrap_or(name);
            archive.copy(&format!("bin/{name}"), path)?;
        }
        for (to, library) in &libraries {
            archive.copy(to, library)?;
        }
        for (index, module) in modules.iter().enumerate() {
            let name = module.file_name().unwrap_or_default().to_string_lossy();
            archive.copy(&format!("modules/{index:02}-{name}"), module)?;
        }
        archive.file("init", 0o755, INIT.as_bytes())?;
        archive.file("run.sh", 0o644, script.as_bytes())?;
        archive.finish()
    };
    fill().context(what())
}

/// The shared libraries of programs, the loader included: where each belongs, without the leading
/// slash, and where it is. Those in the tree `root` are taken before the system's.
pub(crate) fn libraries<'a>(
    programs: impl Iterator<Item = &'a Path>,
    root: Option<&Path>,
) -> Outcome<BTreeMap<String, PathBuf>> {
    let mut libraries = BTreeMap::new();
    for program in programs {
        let mut ldd = command("ldd");
        if let Some(root) = root {
            ldd.env("LD_LIBRARY_PATH", root.join(LIBRARIES));
        }
        let said = text(ldd.arg(program))?;
        let missing = said.lines().find(|line| line.ends_with("not found"));
        let missing = missing.map(str::trim).unwrap_or_default();
        check(missing.is_empty(), || format!("{}: {missing}", program.display()))?;
        for library in parse_ldd(&said) {
            let inside = root.and_then(|root| library.strip_prefix(root).ok());
            let to = inside.or_else(|| library.strip_prefix("/").ok()).unwrap_or(&library);
            libraries.insert(to.to_string_lossy().into_owned(), library.clone());
        }
    }
    Ok(libraries)
}

/// `name => /path (address)` or `/path (address)`; the kernel's own object has no path.
fn parse_ldd(text: &str) -> impl Iterator<Item = PathBuf> {
    text.lines().filter_map(|line| {
        let line = line.trim();
        let path = line.split_once("=> ").map_or(line, |(_, path)| path);
        path.starts_with('/').then(|| PathBuf::from(path.split(" (").next().unwrap_or(path)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ldd_gives_libraries_and_the_loader_but_not_the_vdso() {
        let text = "\tlinux-vdso.so.1 (0x00007ffd)\n\
            \tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f5b)\n\
            \t/lib64/ld-linux-x86-64.so.2 (0x00007f5b)\n";
        let expected = ["/lib/x86_64-linux-gnu/libc.so.6", "/lib64/ld-linux-x86-64.so.2"];
        assert!(parse_ldd(text).eq(expected.map(PathBuf::from)));
        assert_eq!(parse_ldd("\tstatically linked\n").count(), 0);
    }
}
