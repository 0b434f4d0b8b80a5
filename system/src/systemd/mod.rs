//! systemd as PID 1 of a container (systemd-nspawn): a root of a few files, with the host's `/usr`.

use crate::command::{child, output, wait_for};
use crate::packages::need;
use crate::{Context, Outcome, check, cleanup};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

/// The script of the service's test.
pub(crate) const SERVICE: &str = include_str!("service.sh");
/// An operator's day with the package.
pub(crate) const PACKAGE: &str = include_str!("package.sh");
/// Words of both.
const WORDS: &str = include_str!("words.sh");

/// Longest time from the start to the end of a container.
const LIMIT: Duration = Duration::from_secs(600);

/// Runs a script, and ends the container.
const SCRIPT: &str = "[Unit]
After=basic.target
[Service]
Type=oneshot
StandardOutput=append:/day/out
StandardError=inherit
ExecStart=/bin/sh /day/script
ExecStopPost=/bin/systemctl poweroff --no-block
";

/// A folder that becomes the root of a container.
#[derive(Debug)]
pub(crate) struct Root {
    folder: PathBuf,
    /// Writes to its `/usr` are kept in the folder of the programs.
    is_writable: bool,
}

impl Root {
    /// Users, units' folders and links; programs of the host.
    ///
    /// # Errors
    /// The system's; or systemd-nspawn is missing and cannot be installed.
    pub(crate) fn new(folder: &Path) -> Outcome<Self> {
        need("a container with systemd", &["systemd-container"])?;
        let root = Self { folder: folder.join("root"), is_writable: false };
        let made = ["etc/systemd/system", "etc/manyring", "var/log/journal", "run", "tmp", "day"];
        for name in made.into_iter().chain(["proc", "sys", "dev", "usr"]) {
            fs::create_dir_all(root.at(name)).context(name)?;
        }
        fs::create_dir_all(folder.join("programs/bin")).context("programs")?;
        for name in ["bin", "sbin", "lib", "lib64"] {
            symlink(Path::new("usr").join(name), root.at(name)).context(name)?;
        }
        root.write("etc/machine-id", "")?;
        root.write("etc/os-release", "ID=manyring-test\n")?;
        let users = "root:x:0:0::/:/bin/sh\nmanyring:x:990:990::/:/usr/sbin/nologin\n";
        root.write("etc/passwd", users)?;
        root.write("etc/group", "root:x:0:\nmanyring:x:990:\n")?;
        root.write("etc/systemd/system/script.service", SCRIPT)?;
        Ok(root)
    }

    /// As [`Self::new`], with the packages of this host installed, so that others can be installed;
    /// without a user for the service.
    pub(crate) fn with_packages(folder: &Path) -> Outcome<Self> {
        let root = Self { is_writable: true, ..Self::new(folder)? };
        root.write("etc/passwd", "root:x:0:0::/:/bin/sh\n")?;
        root.write("etc/group", "root:x:0:\n")?;
        fs::remove_dir(root.at("etc/manyring")).context("etc/manyring")?;
        fs::create_dir_all(root.at("var/lib")).context("var/lib")?;
        output(child("cp").args(["-a", "/var/lib/dpkg"]).arg(root.at("var/lib")))?;
        // It names users of this host.
        root.write("var/lib/dpkg/statoverride", "")?;
        Ok(root)
    }

    /// A path in it.
    pub(crate) fn at(&self, path: &str) -> PathBuf {
        self.folder.join(path)
    }

    /// Writes a file.
    pub(crate) fn write(&self, path: &str, text: &str) -> Outcome {
        fs::write(self.at(path), text).context(path)
    }

    /// Puts a program into its `/usr/bin`.
    pub(crate) fn install(&self, program: &Path, name: &str) -> Outcome {
        let to = self.folder.with_file_name("programs").join("bin").join(name);
        fs::copy(program, to).context(program.display()).map(drop)
    }

    /// Boots it, runs `script`, waits for its end, and gives what the script has said.
    pub(crate) fn run(&self, script: &str, log: &Path) -> Outcome<String> {
        self.write("day/script", &format!("{WORDS}{script}"))?;
        let programs = self.folder.with_file_name("programs");
        let log = fs::File::create(log).context(log.display())?;
        // systemd-nspawn that is killed leaves its container running; the end of a PID namespace
        // ends both.
        let mut nspawn = child("unshare");
        nspawn.args(["--fork", "--pid", "--kill-child", "--mount-proc", "--"]);
        nspawn.arg(crate::command::find("systemd-nspawn").ok_or("no systemd-nspawn")?);
        nspawn.arg("-q").arg("-D").arg(&self.folder);
        let overlay = if self.is_writable { "--overlay" } else { "--overlay-ro" };
        nspawn.arg(format!("{overlay}=/usr:{}:/usr", programs.display()));
        nspawn.args(["--bind=/dev/net/tun", "--capability=CAP_NET_ADMIN", "--private-network"]);
        nspawn.args(["--register=no", "--keep-unit", "-b", "systemd.unit=script.service"]);
        nspawn.stdin(Stdio::null()).stderr(log.try_clone().context("the log")?).stdout(log);
        let mut container = nspawn.spawn().context("systemd-nspawn")?;
        cleanup::adopt(container.id());
        let ended = wait_for("the end of the container", LIMIT, || {
            container.try_wait().context("systemd-nspawn")
        });
        let _ = container.kill();
        let _ = container.wait();
        cleanup::forget(container.id());
        let said = fs::read_to_string(self.at("day/out")).unwrap_or_default();
        ended.map_err(|error| format!("{error}; it has said:\n{said}"))?;
        Ok(said)
    }
}

/// Checks that each promise of a script holds, and that `count` promises were tried.
pub(crate) fn kept(said: &str, count: usize) -> Outcome {
    let promises: Vec<_> = said.lines().filter(|line| line.starts_with("must ")).collect();
    let broken = promises.iter().any(|line| !line.ends_with(": yes"));
    check(!broken && promises.len() == count, || {
        format!("{} of {count} promises were tried:\n{said}", promises.len())
    })
}
