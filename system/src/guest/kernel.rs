//! Debian's kernels as guests: User Mode Linux as installed, the cloud kernel unpacked.

use super::newest::newest_kernel;
use crate::cleanup::Folder;
use crate::command::{command, output, text};
use crate::{Context, Outcome, packages};
use std::path::{Path, PathBuf};

/// The program that runs the guest's kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// User Mode Linux: native speed, one CPU, one request queue.
    Uml,
    /// QEMU: many CPUs and queues; under emulation unless KVM boots a guest here.
    Qemu,
}

/// Modules that a guest loads. A kernel may have some built in: these need no file.
const MODULES: [&str; 7] =
    ["virtio_pci", "virtio_blk", "virtio_net", "ext4", "ipv6", "8021q", "af_packet"];

/// A further module of QEMU's machine `microvm`.
const MMIO: &str = "virtio_mmio";

/// Packages for the guest's userland, and for running and watching it.
const USERLAND: [&str; 5] = ["busybox-static", "e2fsprogs", "fio", "kmod", "util-linux"];

/// A kernel and the modules its guests load.
#[derive(Debug)]
pub struct Kernel {
    kind: Kind,
    image: PathBuf,
    modules: Vec<PathBuf>,
    shim: Option<PathBuf>,
    is_kvm: bool,
}

impl Kernel {
    /// Gets a kernel ready: installs packages, downloads and unpacks, as far as it is not there.
    ///
    /// # Errors
    /// Something is missing and cannot be had.
    pub fn prepare(kind: Kind) -> Outcome<Self> {
        packages::need("a guest", &USERLAND)?;
        match kind {
            Kind::Uml => Self::uml(),
            Kind::Qemu => Self::qemu(),
        }
    }

    fn uml() -> Outcome<Self> {
        packages::need("a UML guest", &["user-mode-linux"])?;
        let image = crate::command::find("linux.uml").ok_or("linux.uml is not installed")?;
        // modprobe wants the folder above lib/modules; Debian's UML has no such folder.
        let root = Folder::new()?;
        let lib = root.path().join("lib");
        std::fs::create_dir(&lib).context("a folder for UML's modules")?;
        std::os::unix::fs::symlink("/usr/lib/uml/modules", lib.join("modules"))
            .context("UML's modules")?;
        let modules = modules(root.path(), &MODULES[1..])?;
        let modules = modules
            .iter()
            .map(|module| module.canonicalize().context(module.display()))
            .collect::<Outcome<_>>()?;
        let release = text(command("linux.uml").arg("--version"))?;
        let shim = if needs_shim(&release, &cpu_info()?) { Some(shim()?) } else { None };
        Ok(Self { kind: Kind::Uml, image, modules, shim, is_kvm: false })
    }

    fn qemu() -> Outcome<Self> {
        packages::need("a QEMU guest", &["qemu-system-x86"])?;
        let folder = unpacked("cloud-amd64")?;
        let boot = folder.join("boot");
        let image = only(&boot, "vmlinuz-")?;
        let modules = modules(&folder, &[&MODULES[..], &[MMIO]].concat())?;
        let mut kernel = Self { kind: Kind::Qemu, image, modules, shim: None, is_kvm: false };
        kernel.is_kvm = super::kvm::boots(&kernel)?;
        Ok(kernel)
    }

    /// Debian's newest kernel for QEMU, under emulation. It has no disk.
    ///
    /// # Errors
    /// Something is missing and cannot be had.
    pub fn newest() -> Outcome<Self> {
        packages::need("a guest", &USERLAND)?;
        let (image, modules) = newest_kernel()?;
        Ok(Self { kind: Kind::Qemu, image, modules, shim: None, is_kvm: false })
    }

    /// The program that runs this kernel.
    #[must_use]
    pub fn kind(&self) -> Kind {
        self.kind
    }

    pub(crate) fn image(&self) -> &Path {
        &self.image
    }

    /// In the order of loading.
    pub(crate) fn modules(&self) -> &[PathBuf] {
        &self.modules
    }

    pub(crate) fn shim(&self) -> Option<&Path> {
        self.shim.as_deref()
    }

    pub(crate) fn is_kvm(&self) -> bool {
        self.is_kvm
    }

    pub(super) fn with_kvm(&self) -> Self {
        let (image, modules) = (self.image.clone(), self.modules.clone());
        Self { kind: self.kind, image, modules, shim: None, is_kvm: true }
    }

    /// This kernel where a container has it, without KVM, whose device the container lacks.
    pub(super) fn inside(&self, image: &Path) -> Self {
        let (image, modules) = (image.to_owned(), self.modules.clone());
        Self { kind: self.kind, image, modules, shim: None, is_kvm: false }
    }
}

/// Where fetched parts are kept between runs: outside the tree.
///
/// # Errors
/// The folder cannot be made.
pub fn cache() -> Outcome<PathBuf> {
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache"));
    let base = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or_else(home);
    let folder = base.ok_or("neither XDG_CACHE_HOME nor HOME is set")?.join("manyring");
    std::fs::create_dir_all(&folder).context(folder.display())?;
    Ok(folder)
}

/// The folder with Debian's kernel of a flavour, `amd64` or `cloud-amd64`: downloaded and unpacked
/// the first time.
pub(crate) fn unpacked(flavour: &str) -> Outcome<PathBuf> {
    let folder = cache()?.join(format!("linux-{flavour}"));
    if folder.is_dir() {
        return Ok(folder);
    }
    let meta = format!("linux-image-{flavour}");
    let package = packages::depends(&meta)?.into_iter().find(|p| p.starts_with("linux-image-"));
    let package = package.ok_or(format!("{meta} depends on no kernel"))?;
    packages::unpack(&folder, &[package], |part| {
        let release = file_name(&only(&part.join("lib/modules"), "")?);
        output(command("depmod").arg("-b").arg(part).arg(release)).map(|_| ())
    })?;
    Ok(folder)
}

/// The files of modules `names` and their dependencies, in the order of loading.
pub(crate) fn modules(root: &Path, names: &[&str]) -> Outcome<Vec<PathBuf>> {
    let release = file_name(&only(&root.join("lib/modules"), "")?);
    let mut modules = Vec::new();
    for name in names {
        let mut command = command("modprobe");
        command.args(["-n", "--show-depends", "-S", &release, name]).arg("-d").arg(root);
        for module in parse_show_depends(&text(&mut command)?) {
            if !modules.contains(&module) {
                modules.push(module);
            }
        }
    }
    Ok(modules)
}

fn parse_show_depends(text: &str) -> impl Iterator<Item = PathBuf> {
    text.lines()
        .filter_map(|line| line.strip_prefix("insmod "))
        .map(|rest| PathBuf::from(rest.split(' ').next().unwrap_or(rest)))
}

/// The one entry of a folder whose name starts so.
pub(crate) fn only(folder: &Path, start: &str) -> Outcome<PathBuf> {
    let entries = std::fs::read_dir(folder).context(folder.display())?;
    let mut found: Vec<_> = entries
        .filter_map(Result::ok)
        .map(|entry| entry.path())
        .filter(|path| file_name(path).starts_with(start))
        .collect();
    found.sort();
    found.pop().ok_or(format!("{}: nothing there starts with {start:?}", folder.display()))
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn cpu_info() -> Outcome<String> {
    std::fs::read_to_string("/proc/cpuinfo").context("/proc/cpuinfo")
}

/// UML before 6.13 cannot save the registers of a CPU with AMX.
fn needs_shim(release: &str, cpu_info: &str) -> bool {
    let mut numbers = release.trim().split('.').map_while(|n| n.parse::<u32>().ok());
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    version < (6, 13) && cpu_info.split_whitespace().any(|flag| flag == "amx_tile")
}

/// Compiles the preloaded library that lets an old UML run on such a CPU.
fn shim() -> Outcome<PathBuf> {
    packages::need("UML on a CPU with AMX", &["gcc", "libc6-dev"])?;
    let folder = cache()?;
    let (source, library) = (folder.join("xsave_shim.c"), folder.join("xsave_shim.so"));
    std::fs::write(&source, include_str!("xsave_shim.c")).context(source.display())?;
    output(command("gcc").args(["-O2", "-shared", "-fPIC", "-o"]).args([&library, &source]))?;
    Ok(library)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_old_uml_on_a_cpu_with_amx_needs_the_shim() {
        let (amx, plain) = ("flags : fpu amx_tile avx\n", "flags : fpu avx\n");
        assert!(needs_shim("6.1.176\n", amx) && needs_shim("5.10.1", amx));
        assert!(!needs_shim("6.1.176", plain));
        assert!(!needs_shim("6.13.0", amx) && !needs_shim("7.2", amx));
    }

    #[test]
    fn built_in_modules_need_no_file() {
        let text = "builtin ext4\ninsmod /m/a.ko \ninsmod /m/b.ko debug=1\n";
        assert!(parse_show_depends(text).eq(["/m/a.ko", "/m/b.ko"].map(PathBuf::from)));
    }
}
