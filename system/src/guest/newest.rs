//! Debian's newest cloud kernel: of the backports for its next release, unpacked.

use super::backports::Backports;
use super::kernel::{cache, modules};
use crate::command::{command, output};
use crate::{Context, Outcome, check, packages};
use std::path::{Path, PathBuf};

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
        let backports = Backports::fetch()?;
        let names = newest_packages(&backports)?;
        backports.unpack(&folder, &names, |part| {
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

/// The names of the newest kernel's packages: its image and its modules.
fn newest_packages(backports: &Backports) -> Outcome<Vec<String>> {
    let said = backports.cache(&["search", "-n", "linux-binary-.*-cloud-amd64"])?;
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
