//! The QEMU that runs a guest: the system's, or Debian's newest, unpacked beside it.
//!
//! The newest one needs neither a chroot nor root: the dynamic loader that it was built with starts
//! it on the libraries in its own tree, and nothing is mounted that could be left behind.

use super::backports::Backports;
use super::kernel::cache;
use crate::command::{command, text};
use crate::{Outcome, packages};
use std::path::Path;
use std::sync::{LazyLock, Mutex, PoisonError};

/// The program that is an emulated machine.
const PROGRAM: &str = "qemu-system-x86_64";
/// The packages of the newest QEMU.
const PACKAGES: [&str; 2] = ["qemu-system-x86", "qemu-utils"];
/// The folders with firmware in its tree.
const FIRMWARE: [&str; 3] = ["usr/share/qemu", "usr/share/seabios", "usr/lib/ipxe/qemu"];

/// A QEMU, and how it is started.
#[derive(Clone, Debug)]
pub struct Emulator {
    words: Vec<String>,
    version: (u32, u32),
}

impl Emulator {
    /// The system's, which is asked for its version once.
    ///
    /// # Errors
    /// It cannot be installed, or does not run.
    pub fn of_system() -> Outcome<&'static Self> {
        static SYSTEMS: LazyLock<Outcome<Emulator>> = LazyLock::new(|| {
            packages::need("a QEMU guest", &["qemu-system-x86"])?;
            Emulator::new(vec![PROGRAM.to_owned()])
        });
        SYSTEMS.as_ref().map_err(Clone::clone)
    }

    /// Debian's newest: fetched into the cache the first time (some 190 MB).
    ///
    /// # Errors
    /// It cannot be fetched, or does not run.
    pub fn newest() -> Outcome<Self> {
        static ALONE: Mutex<()> = Mutex::new(());
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let root = cache()?.join("qemu-newest");
        if !root.is_dir() {
            let backports = Backports::fetch()?;
            let names = backports.with_dependencies(&PACKAGES)?;
            backports.unpack(&root, &names, |part| Self::new(started_in(part)).map(drop))?;
        }
        Self::new(started_in(&root))
    }

    fn new(words: Vec<String>) -> Outcome<Self> {
        let said = text(command(&words[0]).args(&words[1..]).arg("--version"))?;
        let version = version(&said).ok_or_else(|| format!("no version of QEMU: {said}"))?;
        Ok(Self { words, version })
    }

    /// The program, with the words that precede a machine's own.
    #[must_use]
    pub fn words(&self) -> &[String] {
        &self.words
    }

    /// Its version, as `manyring snippet qemu --qemu-version` takes it.
    #[must_use]
    pub fn version(&self) -> String {
        format!("{}.{}", self.version.0, self.version.1)
    }

    /// The property by which a socket's chardev connects again after a second.
    #[must_use]
    pub fn reconnect(&self) -> &'static str {
        // QEMU 9.2 brought milliseconds, and 10.2 dropped seconds.
        if self.version >= (9, 2) { "reconnect-ms=1000" } else { "reconnect=1" }
    }

    /// True if a network card with MSI-X works under emulation: Debian 12's QEMU itself crashes.
    pub(super) fn has_msi_x(&self) -> bool {
        self.version >= (8, 0)
    }
}

/// The words that start the QEMU of the tree at `root`.
fn started_in(root: &Path) -> Vec<String> {
    let path = |name: &str| root.join(name).display().to_string();
    let loader = path("usr/lib64/ld-linux-x86-64.so.2");
    let mut words = vec![loader, "--library-path".to_owned(), path("usr/lib/x86_64-linux-gnu")];
    words.push(path(&format!("usr/bin/{PROGRAM}")));
    words.extend(FIRMWARE.iter().flat_map(|folder| ["-L".to_owned(), path(folder)]));
    words
}

/// The first two numbers of what `--version` says.
fn version(said: &str) -> Option<(u32, u32)> {
    let numbers = said.strip_prefix("QEMU emulator version ")?.split_whitespace().next()?;
    let mut numbers = numbers.split('.').map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_property_to_connect_again_is_that_of_the_version() {
        let of = |said: &str| {
            let version = version(said).unwrap();
            Emulator { words: Vec::new(), version }.reconnect()
        };
        assert_eq!(of("QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7)\nx"), "reconnect=1");
        assert_eq!(of("QEMU emulator version 9.1.0"), "reconnect=1");
        assert_eq!(of("QEMU emulator version 9.2.0"), "reconnect-ms=1000");
        assert_eq!(of("QEMU emulator version 11.1.3 (Debian)"), "reconnect-ms=1000");
        assert_eq!(version("sh: not found"), None);
    }
}
