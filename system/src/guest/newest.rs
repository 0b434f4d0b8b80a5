//! Debian's newest cloud kernel: of the backports for its next release, unpacked.
//!
//! The package lists of those backports are kept apart from the system's, whose apt goes on knowing
//! nothing of them.

use super::kernel::{cache, modules};
use crate::command::{command, output, text};
use crate::{Context, Outcome, check, packages};
use std::path::{Path, PathBuf};

/// Where the packages come from.
const SOURCE: &str = "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] \
    http://deb.debian.org/debian trixie-backports main\n";
/// virtio_pci and af_packet are built in.
const MODULES: [&str; 1] = ["virtio_net"];

/// The kernel's image, and its modules in the order of loading.
///
/// # Errors
/// It cannot be had.
pub(crate) fn newest_kernel() -> Outcome<(PathBuf, Vec<PathBuf>)> {
    packages::need("the newest kernel", &["kmod", "xz-utils"])?;
    let folder = cache()?.join("linux-newest-cloud-amd64");
    if !folder.is_dir() {
        let lists = cache()?.join("newest-lists");
        let names = newest_packages(&lists)?;
        packages::unpack_with(&folder, &apt("apt-get", &lists), &names, |part| {
            let release = release(&part.join("usr"))?;
            output(command("depmod").arg("-b").arg(part.join("usr")).arg(release)).map(drop)
        })?;
    }
    let root = folder.join("usr");
    let image = root.join("lib/modules").join(release(&root)?).join("vmlinuz");
    // An older kmod reads no compressed modules of a kernel that unpacks them by itself.
    let unpacked = modules(&root, &MODULES)?.into_iter().map(|module| plain(&module));
    Ok((image, unpacked.collect::<Outcome<_>>()?))
}

fn release(root: &Path) -> Outcome<String> {
    let found = super::kernel::only(&root.join("lib/modules"), "")?;
    Ok(found.file_name().unwrap_or_default().to_string_lossy().into_owned())
}

/// The module without its compression, beside it.
fn plain(module: &Path) -> Outcome<PathBuf> {
    if module.extension().is_none_or(|ending| ending != "xz") {
        return Ok(module.to_owned());
    }
    let plain = module.with_extension("");
    if !plain.is_file() {
        let bytes = output(command("xz").arg("-dc").arg(module))?;
        std::fs::write(&plain, bytes).context(plain.display())?;
    }
    Ok(plain)
}

/// A program of apt's, and the options by which it knows that source alone.
fn apt(program: &str, lists: &Path) -> Vec<String> {
    let place = |key: &str, value: &Path| format!("-o{key}={}", value.display());
    vec![
        program.to_owned(),
        place("Dir::Etc::SourceList", &lists.join("sources.list")),
        place("Dir::Etc::SourceParts", Path::new("/dev/null")),
        place("Dir::State::Lists", &lists.join("lists")),
        place("Dir::Cache", &lists.join("cache")),
    ]
}

/// The names of the newest kernel's packages: its image and its modules.
fn newest_packages(lists: &Path) -> Outcome<Vec<String>> {
    for folder in ["lists/partial", "cache/archives/partial"] {
        std::fs::create_dir_all(lists.join(folder)).context(lists.display())?;
    }
    std::fs::write(lists.join("sources.list"), SOURCE).context(lists.display())?;
    let run = |program: &str, words: &[&str]| {
        let apt = apt(program, lists);
        text(command(&apt[0]).args(&apt[1..]).args(words))
    };
    run("apt-get", &["update", "-q"])?;
    let said = run("apt-cache", &["search", "-n", "linux-binary-.*-cloud-amd64"])?;
    let newest = said.lines().filter_map(version).max();
    let (_, release) = newest.ok_or("apt offers no kernel of that name")?;
    check(!release.is_empty(), || said.clone())?;
    Ok(["binary", "modules"].map(|part| format!("linux-{part}-{release}")).into())
}

/// The version in a line that names the package of a kernel, as numbers and as it is written.
fn version(line: &str) -> Option<(Vec<u32>, &str)> {
    let release = line.split(' ').next()?.strip_prefix("linux-binary-")?;
    let (numbers, _) = release.split_once('+')?;
    let numbers = numbers.split('.').map(|number| number.parse().ok());
    Some((numbers.collect::<Option<_>>()?, release))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_version_is_that_with_the_highest_numbers() {
        let said = "linux-binary-6.19.14+deb13-cloud-amd64 - Binary\n\
            linux-binary-7.2.12+deb13-cloud-amd64 - x\nlinux-binary-7.2.9+deb13-cloud-amd64 - x\n\
            linux-binary-cloud-amd64 - meta\n";
        let newest = said.lines().filter_map(version).max();
        assert_eq!(newest.map(|(_, name)| name), Some("7.2.12+deb13-cloud-amd64"));
    }
}
