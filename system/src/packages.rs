//! Debian packages a step needs: missing ones are installed, or only unpacked into the cache, and
//! a line says so.

use crate::command::{command, find, output, text};
use crate::{Context, Outcome, check};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

/// Makes sure that all of `packages` are installed.
///
/// # Errors
/// They are missing and cannot be installed; the sentence names them.
pub fn need(step: &str, packages: &[&str]) -> Outcome {
    let missing: Vec<_> = packages.iter().copied().filter(|p| !is_installed(p)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let names = missing.join(" ");
    eprintln!("xtask: {step} needs Debian packages that are missing, installing: {names}");
    let install = ["install", "-y", "--no-install-recommends"];
    let installed = apt_get(&["update"]).and_then(|()| {
        let arguments: Vec<_> = install.iter().chain(&missing).copied().collect();
        apt_get(&arguments)
    });
    installed.context(format!("{step} needs these Debian packages: {names}"))?;
    let missing: Vec<_> = missing.into_iter().filter(|p| !is_installed(p)).collect();
    check(missing.is_empty(), || format!("{step}: still missing: {}", missing.join(" ")))
}

/// Updates the package lists if they do not know `package` yet.
///
/// # Errors
/// They cannot be updated.
pub(crate) fn need_lists(package: &str) -> Outcome {
    let known = text(command("apt-cache").args(["show", "--no-all-versions", package]));
    if known.is_ok_and(|text| text.contains("Filename:")) {
        return Ok(());
    }
    update_lists(&format!("to find {package}"))
}

/// Updates the package lists, and says why.
///
/// # Errors
/// They cannot be updated.
pub(crate) fn update_lists(why: &str) -> Outcome {
    eprintln!("xtask: updating the package lists, {why}");
    apt_get(&["update"])
}

/// The packages that `package` depends on.
///
/// # Errors
/// The package lists do not know it and cannot be updated.
pub(crate) fn depends(package: &str) -> Outcome<Vec<String>> {
    need_lists(package)?;
    let said = text(command("apt-cache").args(["depends", package]))?;
    Ok(parse_depends(&said).map(str::to_owned).collect())
}

fn parse_depends(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter_map(|line| line.trim().strip_prefix("Depends: "))
}

/// Downloads `packages` and unpacks them into `folder`, without installing them. `finish` does what
/// remains to be done there. The folder appears when all of it is complete.
///
/// # Errors
/// A package cannot be downloaded or unpacked, or `finish` failed.
pub(crate) fn unpack(
    folder: &Path,
    packages: &[String],
    finish: impl FnOnce(&Path) -> Outcome,
) -> Outcome {
    unpack_with(folder, &["apt-get".to_owned()], packages, finish)
}

/// Does what [`unpack`] does with another `apt-get`, given as its name and options.
///
/// # Errors
/// As for [`unpack`].
pub(crate) fn unpack_with(
    folder: &Path,
    apt_get: &[String],
    packages: &[String],
    finish: impl FnOnce(&Path) -> Outcome,
) -> Outcome {
    let names = packages.join(" ");
    eprintln!("xtask: fetching {names} into {} (unpacked, not installed)", folder.display());
    let part = folder.with_extension(format!("part-{}", std::process::id()));
    let unpack = || -> Outcome {
        let debs = part.join("debs");
        std::fs::create_dir_all(&debs).context(debs.display())?;
        let mut download = command(&apt_get[0]);
        download.args(&apt_get[1..]).args(["download", "-q"]).args(packages);
        output(download.current_dir(&debs))?;
        for deb in std::fs::read_dir(&debs).context(debs.display())? {
            let deb = deb.context(debs.display())?.path();
            output(command("dpkg").arg("-x").args([&deb, &part]))?;
        }
        std::fs::remove_dir_all(&debs).context(debs.display())?;
        finish(&part)?;
        match std::fs::rename(&part, folder) {
            // Another process was faster: its folder is complete.
            Err(_) if folder.is_dir() => std::fs::remove_dir_all(&part).context(part.display()),
            renamed => renamed.context(folder.display()),
        }
    };
    unpack().inspect_err(|_| {
        let _ = std::fs::remove_dir_all(&part);
    })
}

fn is_installed(package: &str) -> bool {
    let status = text(command("dpkg-query").args(["-W", "-f", "${db:Status-Status}", package]));
    status.is_ok_and(|status| says_installed(&status))
}

fn says_installed(status: &str) -> bool {
    status == "installed"
}

/// Behaviours run beside each other, and the package lists have a lock that apt does not wait for.
static APT: Mutex<()> = Mutex::new(());

fn apt_get(arguments: &[&str]) -> Outcome {
    let _alone = APT.lock().unwrap_or_else(PoisonError::into_inner);
    check(find("apt-get").is_some(), || "this is no Debian: apt-get is missing".into())?;
    let mut command = if rustix::process::geteuid().is_root() {
        Command::new("apt-get")
    } else {
        check(find("sudo").is_some(), || "neither root nor sudo".into())?;
        let mut sudo = Command::new("sudo");
        sudo.arg("apt-get");
        sudo
    };
    command.args(arguments).args(["-q", "-o", "DPkg::Lock::Timeout=300"]);
    command.env("DEBIAN_FRONTEND", "noninteractive").stdin(Stdio::null());
    let status = command.status().context("apt-get")?;
    check(status.success(), || format!("apt-get {}: {status}", arguments.join(" ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_package_depends_on_what_the_lists_say_and_not_on_what_they_recommend() {
        let text = "linux-image-cloud-amd64\n  Depends: linux-image-6.1.0-1-cloud-amd64\n  \
            Recommends: grub\n";
        assert!(parse_depends(text).eq(["linux-image-6.1.0-1-cloud-amd64"]));
        assert_eq!(parse_depends("x\n  Breaks: libc6\n").count(), 0);
    }

    #[test]
    fn only_a_whole_package_is_installed() {
        assert!(says_installed("installed"));
        for status in ["", "config-files", "not-installed", "half-installed"] {
            assert!(!says_installed(status), "{status}");
        }
    }
}
