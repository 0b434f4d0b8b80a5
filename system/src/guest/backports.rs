//! The backports of Debian's next release: the newest kernel and QEMU, unpacked and not installed.
//!
//! The mirror is the one that apt fetches the system's own packages from. The package lists are
//! kept apart from the system's, whose apt goes on knowing nothing of them.

use crate::cleanup::Folder;
use crate::command::{command, text};
use crate::{Context, Outcome, packages};
use std::path::Path;

/// The release whose packages and backports are fetched.
const RELEASE: &str = "trixie";
/// Its backports.
const BACKPORTS: &str = "trixie-backports";
/// The key that both are signed with; of the package `debian-archive-keyring`.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// The package lists, and how apt is told to use them.
pub(super) struct Backports {
    folder: Folder,
}

impl Backports {
    /// Fetches the package lists.
    ///
    /// # Errors
    /// The machine's apt has no mirror of Debian, or that one does not answer.
    pub(super) fn fetch() -> Outcome<Self> {
        let folder = Folder::new()?;
        let lists = folder.path();
        for name in ["lists/partial", "cache/archives/partial"] {
            std::fs::create_dir_all(lists.join(name)).context(lists.display())?;
        }
        std::fs::write(lists.join("sources.list"), sources(&mirror()?)).context(lists.display())?;
        // The system's packages are of another release, and none of them counts here.
        std::fs::write(lists.join("status"), "").context(lists.display())?;
        let backports = Self { folder };
        backports.ask("apt-get", &["update", "-q"])?;
        Ok(backports)
    }

    /// What apt-cache says.
    ///
    /// # Errors
    /// It fails.
    pub(super) fn cache(&self, words: &[&str]) -> Outcome<String> {
        self.ask("apt-cache", words)
    }

    /// These packages and all that they depend on: a system of this release that has nothing yet
    /// would install them.
    ///
    /// # Errors
    /// apt cannot satisfy them.
    pub(super) fn with_dependencies(&self, names: &[&str]) -> Outcome<Vec<String>> {
        let words = ["install", "--simulate", "--no-install-recommends"];
        let said = self.ask("apt-get", &[&words, names].concat())?;
        Ok(parse_installs(&said).map(str::to_owned).collect())
    }

    /// Unpacks packages, as [`packages::unpack`] does.
    ///
    /// # Errors
    /// As there.
    pub(super) fn unpack(
        &self,
        folder: &Path,
        names: &[String],
        finish: impl FnOnce(&Path) -> Outcome,
    ) -> Outcome {
        packages::unpack_with(folder, &self.apt("apt-get"), names, finish)
    }

    fn ask(&self, program: &str, words: &[&str]) -> Outcome<String> {
        let apt = self.apt(program);
        text(command(&apt[0]).args(&apt[1..]).args(words))
    }

    /// A program of apt's, and the options by which it knows these lists alone.
    fn apt(&self, program: &str) -> Vec<String> {
        let lists = self.folder.path();
        let place = |key: &str, value: &Path| format!("-o{key}={}", value.display());
        vec![
            program.to_owned(),
            place("Dir::Etc::SourceList", &lists.join("sources.list")),
            place("Dir::Etc::SourceParts", Path::new("/dev/null")),
            place("Dir::State::Lists", &lists.join("lists")),
            place("Dir::State::Status", &lists.join("status")),
            place("Dir::Cache", &lists.join("cache")),
            format!("-oAPT::Default-Release={BACKPORTS}"),
        ]
    }
}

fn sources(mirror: &str) -> String {
    let line = |suite| format!("deb [signed-by={KEYRING}] {mirror} {suite} main\n");
    [RELEASE, BACKPORTS].map(line).concat()
}

/// The packages that a simulated installation names.
fn parse_installs(said: &str) -> impl Iterator<Item = &str> {
    said.lines().filter_map(|line| line.strip_prefix("Inst ")?.split(' ').next())
}

/// The mirror of Debian that apt fetches this system's packages from.
fn mirror() -> Outcome<String> {
    if let Some(mirror) = first_mirror(&[])? {
        return Ok(mirror);
    }
    // apt knows whose packages a source has once it has fetched the source's lists.
    packages::update_lists("to find a mirror of Debian")?;
    first_mirror(&[])?.ok_or_else(|| {
        "apt has no mirror of Debian among its sources (/etc/apt/sources.list and the files in \
         /etc/apt/sources.list.d): add one, and run apt-get update"
            .to_owned()
    })
}

/// The first of apt's sources that is signed as Debian's own, in either form of its files; with
/// these options of apt's.
fn first_mirror(options: &[String]) -> Outcome<Option<String>> {
    let mut ask = command("apt-get");
    ask.args(options).args(["indextargets", "--format", "$(REPO_URI)"]);
    ask.args(["Created-By: Packages", "Origin: Debian", "Label: Debian", "Component: main"]);
    Ok(text(&mut ask)?.lines().next().map(str::to_owned))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A source of each form of apt's files.
    const DEB822: &str = "Types: deb deb-src\nURIs: http://first.invalid/debian\n\
        Suites: bookworm bookworm-updates\nComponents: main\n";
    const ONE_LINE: &str = "deb http://second.invalid/debian/ bookworm main\n";

    /// A machine whose apt has these files of sources, and has fetched the lists of each.
    fn mirror_of(files: &[(&str, &str)]) -> Option<String> {
        let folder = Folder::new().unwrap();
        let path = |name: &str| folder.path().join(name);
        for name in ["parts", "lists/partial"] {
            std::fs::create_dir_all(path(name)).unwrap();
        }
        for (name, text) in files {
            std::fs::write(path("parts").join(name), text).unwrap();
        }
        for (list, origin, label) in [
            ("first.invalid_debian", "Debian", "Debian"),
            ("second.invalid_debian", "Debian", "Debian"),
            ("fixes.invalid_debian", "Debian", "Debian-Security"),
            ("other.invalid_apt", "Somebody", "Debian"),
        ] {
            let start = format!("{list}_dists_bookworm");
            let release =
                format!("Origin: {origin}\nLabel: {label}\nCodename: bookworm\nComponents: main\n");
            std::fs::write(path("lists").join(format!("{start}_Release")), release).unwrap();
            let packages = format!("{start}_main_binary-amd64_Packages");
            std::fs::write(path("lists").join(packages), "").unwrap();
        }
        let place = |key: &str, name: &str| format!("-o{key}={}", path(name).display());
        first_mirror(&[
            "-oDir::Etc::SourceList=/dev/null".to_owned(),
            "-oAPT::Architecture=amd64".to_owned(),
            place("Dir::Etc::SourceParts", "parts"),
            place("Dir::State::Lists", "lists"),
        ])
        .unwrap()
    }

    #[test]
    fn the_mirror_is_that_of_the_machines_own_sources_in_either_form() {
        let first = Some("http://first.invalid/debian/".to_owned());
        assert_eq!(mirror_of(&[("a.sources", DEB822), ("b.list", ONE_LINE)]), first);
        let second = Some("http://second.invalid/debian/".to_owned());
        assert_eq!(mirror_of(&[("b.list", ONE_LINE)]), second);
        let off = format!("{DEB822}Enabled: no\n");
        assert_eq!(mirror_of(&[("a.sources", &off), ("b.list", ONE_LINE)]), second);
    }

    #[test]
    fn a_package_comes_with_what_it_depends_on() {
        let said = "Reading package lists...\nInst libc6 (2.41 Debian:13 [amd64])\n\
            Inst qemu-utils (1:11.1 Debian [amd64]) []\nConf libc6 (2.41 Debian:13 [amd64])\n";
        assert!(parse_installs(said).eq(["libc6", "qemu-utils"]));
    }

    #[test]
    fn neither_security_updates_nor_somebody_elses_packages_are_a_mirror_of_debian() {
        let others = "deb http://other.invalid/apt bookworm main\n\
            deb http://fixes.invalid/debian bookworm main\n\
            # deb http://first.invalid/debian bookworm main\n";
        assert_eq!(mirror_of(&[("a.list", others)]), None);
        let second = Some("http://second.invalid/debian/".to_owned());
        assert_eq!(mirror_of(&[("a.list", others), ("b.list", ONE_LINE)]), second);
    }
}
