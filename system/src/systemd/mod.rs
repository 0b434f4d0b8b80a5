//! systemd as PID 1 of a container (systemd-nspawn): a root of a few files, with the host's `/usr`.

use crate::command::{child, command, find, output, text, wait_for};
use crate::net::Namespace;
use crate::packages::need;
use crate::{Context, Outcome, check, cleanup};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
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

    /// Puts the units in, with this drop-in for `manyring.service`.
    pub(crate) fn install_units(&self, drop_in: &str) -> Outcome {
        let units = Path::new(env!("CARGO_MANIFEST_DIR")).join("../contrib/systemd");
        for unit in ["manyring.service", "manyring@.service", "manyring@.socket"] {
            let text = fs::read_to_string(units.join(unit)).context(unit)?;
            self.write(&format!("etc/systemd/system/{unit}"), &text)?;
        }
        fs::create_dir(self.at("etc/systemd/system/manyring.service.d")).context("drop-in")?;
        self.write("etc/systemd/system/manyring.service.d/quick.conf", drop_in)
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

    /// Starts systemd-nspawn, by `unshare` or what starts that, with further words for it.
    fn start(&self, mut unshare: Command, more: &[String], log: &Path) -> Outcome<Child> {
        let programs = self.folder.with_file_name("programs");
        let log = fs::File::create(log).context(log.display())?;
        // systemd-nspawn that is killed leaves its container running; the end of a PID namespace
        // ends both.
        unshare.args(["--fork", "--pid", "--kill-child", "--mount-proc", "--"]);
        unshare.arg(find("systemd-nspawn").ok_or("no systemd-nspawn")?);
        unshare.arg("-q").arg("-D").arg(&self.folder);
        let overlay = if self.is_writable { "--overlay" } else { "--overlay-ro" };
        unshare.arg(format!("{overlay}=/usr:{}:/usr", programs.display()));
        unshare.args(["--bind=/dev/net/tun", "--capability=CAP_NET_ADMIN"]);
        // systemd-nspawn of Debian 12 knows no call of landlock.
        let landlock = "landlock_create_ruleset landlock_add_rule landlock_restrict_self";
        unshare.arg(format!("--system-call-filter={landlock}"));
        unshare.args(["--register=no", "--keep-unit", "-b"]).args(more);
        unshare.stdin(Stdio::null()).stderr(log.try_clone().context("the log")?).stdout(log);
        let container = unshare.spawn().context("systemd-nspawn")?;
        cleanup::adopt(container.id());
        Ok(container)
    }

    /// Boots it in the network of a namespace, with folders of the host at other paths; returns
    /// when systemd can be asked.
    pub(crate) fn boot(
        &self,
        namespace: &Namespace,
        folders: &[(&Path, &str)],
        log: &Path,
    ) -> Outcome<Booted> {
        let bind = |(host, inside): &(&Path, &str)| format!("--bind={}:{inside}", host.display());
        let mut more: Vec<_> = folders.iter().map(bind).collect();
        more.push("systemd.unit=basic.target".to_owned());
        // The namespace's own mounts hide the control groups.
        let wrapper: Vec<_> =
            namespace.wrapper().into_iter().filter(|word| word != "--mount").collect();
        let mut unshare = child(&wrapper[0]);
        unshare.args(&wrapper[1..]).arg("unshare");
        // With the older control groups systemd is not told reliably, in a container, that the last
        // process of a service is gone, and waits for it for a minute and a half.
        unshare.env("SYSTEMD_NSPAWN_UNIFIED_HIERARCHY", "1");
        let mut booted = Booted { container: self.start(unshare, &more, log)?, leader: 0 };
        booted.leader = wait_for("systemd in a container", LIMIT, || {
            let ended = booted.container.try_wait().context("systemd-nspawn")?;
            check(ended.is_none(), || "systemd-nspawn has ended: its log says why".to_owned())?;
            Ok(leader_below(booted.container.id()))
        })?;
        wait_for("the end of its start", LIMIT, || {
            Ok(booted.run(&["systemctl", "-q", "is-active", "basic.target"]).ok())
        })?;
        Ok(booted)
    }

    /// Boots it, runs `script`, waits for its end, and gives what the script has said.
    pub(crate) fn run(&self, script: &str, log: &Path) -> Outcome<String> {
        self.write("day/script", &format!("{WORDS}{script}"))?;
        let more = ["--private-network", "systemd.unit=script.service"].map(str::to_owned);
        let mut container = self.start(child("unshare"), &more, log)?;
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

/// A container that runs until it is dropped.
#[derive(Debug)]
pub(crate) struct Booted {
    container: Child,
    /// Its systemd, by the number that it has here.
    leader: u32,
}

impl Booted {
    /// Runs a program in it, as root, to its end; gives what it said.
    pub(crate) fn run(&self, words: &[&str]) -> Outcome<String> {
        let leader = self.leader.to_string();
        let mut nsenter = command("nsenter");
        nsenter.args(["--target", &leader, "--mount", "--uts", "--ipc", "--net", "--pid"]);
        nsenter.args(["--root", "--wd=/", "--"]).args(words);
        text(&mut nsenter)
    }
}

impl Drop for Booted {
    fn drop(&mut self) {
        let _ = self.container.kill();
        let _ = self.container.wait();
        cleanup::forget(self.container.id());
    }
}

/// The systemd that a process, or one that it has started, has made the first one of a namespace.
fn leader_below(ancestor: u32) -> Option<u32> {
    let names = fs::read_dir("/proc").ok()?.flatten().map(|entry| entry.file_name());
    let pids = names.filter_map(|name| name.to_str()?.parse::<u32>().ok());
    let of = |pid: u32, key: &str| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        status.lines().find_map(|line| Some(line.strip_prefix(key)?.trim().to_owned()))
    };
    let is_below = |pid: u32| {
        let parent = |pid: &u32| of(*pid, "PPid:")?.parse().ok();
        std::iter::successors(Some(pid), parent).any(|pid| pid == ancestor)
    };
    let is_first = |pid: &u32| {
        of(*pid, "Name:").is_some_and(|name| name == "systemd")
            && of(*pid, "NSpid:").is_some_and(|numbers| numbers.ends_with("\t1"))
    };
    pids.filter(is_first).find(|pid| is_below(*pid))
}

/// Checks that each promise of a script holds, and that `count` promises were tried.
pub(crate) fn kept(said: &str, count: usize) -> Outcome {
    let promises: Vec<_> = said.lines().filter(|line| line.starts_with("must ")).collect();
    let broken = promises.iter().any(|line| !line.ends_with(": yes"));
    check(!broken && promises.len() == count, || {
        format!("{} of {count} promises were tried:\n{said}", promises.len())
    })
}
