//! Stands in for the libraries of fio's engines that no guest uses (rbd, glusterfs, nbd, RDMA,
//! persistent memory). With what those need they have 80 MiB, which every guest would unpack under
//! emulation: seconds of each boot.

use super::initramfs::LIBRARIES;
use crate::command::{command, output, text};
use crate::{Context, Outcome};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The libraries that fio really runs on.
const USED: [&str; 5] = ["libaio.so", "libc.so", "libm.so", "libnuma.so", "libz.so"];

/// Builds one library with every function that fio wants of the unused ones, and puts it in the
/// place of each of them below `root`.
pub(crate) fn stand_ins(fio: &Path, root: &Path) -> Outcome {
    let folder = root.join(LIBRARIES);
    std::fs::create_dir_all(&folder).context(folder.display())?;
    let symbols = text(command("nm").args(["-D", "--undefined-only"]).arg(fio))?;
    let wanted: BTreeSet<_> = parse_symbols(&symbols).collect();
    let names: BTreeSet<_> = wanted.iter().map(|(name, _)| *name).collect();
    let source: String = names.iter().map(|name| format!("void {name}(void) {{}}\n")).collect();
    let files = [("stand_in.c", source), ("stand_in.map", versions(&wanted))];
    for (name, content) in files {
        std::fs::write(root.join(name), content).context(name)?;
    }
    let library = root.join("stand_in.so");
    let script = format!("-Wl,--version-script={}", root.join("stand_in.map").display());
    let mut gcc = command("gcc");
    gcc.args(["-w", "-fno-builtin", "-shared", "-fPIC", &script, "-o"]);
    output(gcc.args([&library, &root.join("stand_in.c")]))?;
    let needed = text(command("readelf").arg("-d").arg(fio))?;
    for name in parse_needed(&needed) {
        std::fs::copy(&library, folder.join(name)).context(name)?;
    }
    Ok(())
}

/// Functions that a program wants of other libraries than the C library, with their versions:
/// `U name`, or `U name@VERSION`.
fn parse_symbols(text: &str) -> impl Iterator<Item = (&str, Option<&str>)> {
    let symbols = text.lines().filter_map(|line| line.trim().strip_prefix("U "));
    let versioned = symbols.map(|symbol| match symbol.split_once('@') {
        Some((name, version)) => (name, Some(version.trim_start_matches('@'))),
        None => (symbol, None),
    });
    versioned.filter(|(_, version)| !version.is_some_and(|v| v.starts_with("GLIBC")))
}

/// The linker's version script: the functions of each version.
fn versions(wanted: &BTreeSet<(&str, Option<&str>)>) -> String {
    let mut nodes: BTreeMap<&str, String> = BTreeMap::new();
    for (name, version) in wanted {
        if let Some(version) = version {
            nodes.entry(version).or_default().push_str(&format!(" {name};"));
        }
    }
    nodes.iter().map(|(version, names)| format!("{version} {{{names} }};\n")).collect()
}

/// The libraries in place of which the stand-in goes: `(NEEDED) Shared library: [name]`.
fn parse_needed(text: &str) -> impl Iterator<Item = &str> {
    let lines = text.lines().filter(|line| line.contains("(NEEDED)"));
    let names = lines.filter_map(|line| line.split_once('[')?.1.strip_suffix(']'));
    names.filter(|name| !USED.iter().any(|used| name.starts_with(used)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_of_the_c_library_are_its_own_and_the_others_keep_their_versions() {
        let text = "         U rados_create\n         U nbd_pread@LIBNBD_1.0\n\
            \x20        U read@GLIBC_2.2.5\n         w __gmon_start__\n";
        let wanted: BTreeSet<_> = parse_symbols(text).collect();
        let expected = [("nbd_pread", Some("LIBNBD_1.0")), ("rados_create", None)];
        assert!(wanted.iter().copied().eq(expected), "{wanted:?}");
        assert_eq!(versions(&wanted), "LIBNBD_1.0 { nbd_pread; };\n");
    }

    #[test]
    fn libraries_that_fio_runs_on_are_not_replaced() {
        let text = " 0x1 (NEEDED)  Shared library: [libaio.so.1]\n\
            \x200x1 (NEEDED)  Shared library: [librbd.so.1]\n 0xe (SONAME) [libx.so.1]\n";
        assert!(parse_needed(text).eq(["librbd.so.1"]));
    }
}
