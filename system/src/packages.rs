//! Debian packages a step needs: missing ones are installed, and a line says so.

use crate::command::{command, find, text};
use crate::{Context, Outcome, check};
use std::process::{Command, Stdio};

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
    println!("xtask: {step} needs Debian packages that are missing, installing: {names}");
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
    println!("xtask: updating the package lists, to find {package}");
    apt_get(&["update"])
}

fn is_installed(package: &str) -> bool {
    let status = text(command("dpkg-query").args(["-W", "-f", "${db:Status-Status}", package]));
    status.is_ok_and(|status| says_installed(&status))
}

fn says_installed(status: &str) -> bool {
    status == "installed"
}

fn apt_get(arguments: &[&str]) -> Outcome {
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
    fn only_a_whole_package_is_installed() {
        assert!(says_installed("installed"));
        for status in ["", "config-files", "not-installed", "half-installed"] {
            assert!(!says_installed(status), "{status}");
        }
    }
}
