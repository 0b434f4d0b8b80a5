//! Devices that somebody has asked for over the control socket come back with the next daemon,
//! whole or not at all if the former one was killed during the request. Another user has a bound
//! of them.

use crate::support::changes::{EMPTY, Supervisor, is_served};
use crate::support::process::{
    Daemon, Running, copy_program, end_of, is_root_or_left_out, wait_until,
};
use crate::support::program::{manyring, names_in, shown};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// A folder for a daemon whose control socket everybody may use, and somebody else's program.
struct Place {
    folder: TempDir,
    program: PathBuf,
}

fn public(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

impl Place {
    /// None: only root can be somebody else too.
    fn new(more: &str) -> Option<Self> {
        if !is_root_or_left_out() {
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        public(folder.path(), 0o755);
        let program = folder.path().join("program");
        copy_program(&program);
        public(&program, 0o755);
        let config = format!(
            "[daemon]\ncontrol = '@/control'\ncontrol_mode = '0666'\nstate_dir = '@/state'\n\
             allow_paths = ['@/vms']\n{more}"
        );
        let config = config.replace('@', folder.path().to_str().unwrap());
        std::fs::write(folder.path().join("manyring.toml"), config).unwrap();
        std::fs::create_dir(folder.path().join("vms")).unwrap();
        Some(Self { folder, program })
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn start(&self) -> Supervisor {
        let control = self.at("control");
        // A process that was killed has left its socket.
        let _ = std::fs::remove_file(&control);
        let mut command = manyring();
        command.arg("run").arg("--config").arg(self.at("manyring.toml"));
        let sockets = [control.clone()];
        let daemon = Daemon::start(command, tempfile::tempdir().unwrap(), &sockets);
        Supervisor { daemon, control }
    }

    /// Somebody else adds a disk; the status of the command, and what it says.
    fn add(&self, name: &str, disk: &[&str]) -> (Option<i32>, String) {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=4711", "--regid=4711", "--clear-groups"]).arg(&self.program);
        command.args(["add", "blk", "--name", name, "--control"]).arg(self.at("control"));
        command.args(disk).arg("--socket-path").arg(self.at("vms/sockets").join(name));
        let output = command.output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    }
}

#[test]
fn kept_device_of_another_user_whose_file_is_missing_waits_for_it() {
    let Some(place) = Place::new("") else { return };
    let (image, sockets) = (place.at("vms/image"), place.at("vms/sockets"));
    std::fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
    std::fs::create_dir(&sockets).unwrap();
    let supervisor = place.start();
    let file = ["--blk-file", image.to_str().unwrap()];
    assert_eq!(place.add("a", &file), (Some(0), String::new()));
    drop(supervisor);
    let away = place.at("away");
    for (missing, key) in [(&image, "file"), (&sockets, "socket_path")] {
        std::fs::rename(missing, &away).unwrap();
        let supervisor = place.start();
        let device = || shown(&supervisor.control, "/v1/devices/a");
        let reason = device()["reason"].as_str().unwrap_or_default().to_owned();
        assert_eq!(device()["state"], "failed", "{}", supervisor.daemon.log());
        assert!(
            reason.contains(&format!("a: {key}: ")) && reason.contains("os error 2"),
            "{reason}"
        );
        std::fs::rename(&away, missing).unwrap();
        assert!(wait_until(|| device()["state"] == "serving"), "{}", supervisor.daemon.log());
        // The process that was killed has left the name of its socket, where nobody listens.
        assert!(wait_until(|| UnixStream::connect(sockets.join("a")).is_ok()));
        is_served(&sockets.join("a"));
    }
    // A file that a link leads to by then is not opened, whoever has asked for it.
    let secret = place.at("secret");
    std::fs::rename(&image, &secret).unwrap();
    std::os::unix::fs::symlink(&secret, &image).unwrap();
    let supervisor = place.start();
    assert_eq!(shown(&supervisor.control, "/v1/devices/a")["state"], "failed");
    assert!(supervisor.delete("a") == 204 && supervisor.names().is_empty());
}

#[test]
fn another_user_has_no_more_devices_than_the_operator_allows() {
    let Some(place) = Place::new("user_devices_max = 2\n") else { return };
    std::fs::create_dir(place.at("vms/sockets")).unwrap();
    let supervisor = place.start();
    let add = |name: &str| place.add(name, &["--null", "1G"]);
    assert_eq!((add("a").0, add("b").0), (Some(0), Some(0)));
    let (status, error) = add("c");
    assert!(status == Some(1) && error.contains("user_devices_max: user 4711"), "{error}");
    assert_eq!(add("a").0, Some(0), "one that is there can be asked for again");
    assert_eq!(supervisor.put("mine", &supervisor.null("mine")).0, 201, "root is not bound");
    assert_eq!(supervisor.delete("a"), 204);
    assert_eq!(add("c").0, Some(0));
    drop(supervisor);
    let supervisor = place.start();
    assert_eq!(supervisor.names(), ["b", "c", "mine"]);
    assert_eq!(add("d").0, Some(1), "they are counted by the next process too");
}

/// A daemon that keeps its devices in `folder`, where a killed one may have left its sockets.
fn started_in(folder: &Path) -> Supervisor {
    let control = folder.join("control");
    for left in ["control", "a"] {
        let _ = std::fs::remove_file(folder.join(left));
    }
    let mut command = manyring();
    command.arg("run").arg("--config").arg(folder.join("manyring.toml"));
    let sockets = [control.clone()];
    let daemon = Daemon::start(command, tempfile::tempdir().unwrap(), &sockets);
    Supervisor { daemon, control }
}

/// Runs a command against the daemon, kills the daemon once `is_seen` or the command has ended, and
/// tells whether the command was told that its change is made.
fn killed_during(supervisor: Supervisor, command: &[&str], is_seen: &dyn Fn() -> bool) -> bool {
    let mut change = supervisor.command(command);
    let mut change = Running::start(change.stderr(std::process::Stdio::null()));
    while !is_seen() && change.try_wait().unwrap().is_none() {}
    // SIGKILL.
    drop(supervisor);
    end_of(&mut change).success()
}

#[test]
fn change_during_which_the_daemon_is_killed_is_there_whole_or_not_at_all() {
    let folder = tempfile::tempdir().unwrap();
    let config = EMPTY.replace('@', folder.path().to_str().unwrap());
    std::fs::write(folder.path().join("manyring.toml"), config).unwrap();
    let (socket, kept) = (folder.path().join("a"), folder.path().join("state/devices/a.json"));
    // Signs of how far a change has come: a folder for its socket, the kept file, its socket.
    let is_prepared = || names_in(folder.path()).iter().any(|name| name.starts_with(".mr-"));
    let (is_kept, is_gone) = (|| kept.exists(), || !kept.exists());
    let is_committed = || socket.exists();
    let moments: [&dyn Fn() -> bool; 3] = [&is_prepared, &is_kept, &is_committed];
    let path = socket.to_str().unwrap();
    let add = ["add", "blk", "--name", "a", "--socket-path", path, "--null", "1G"];
    for round in 0..12 {
        let supervisor = started_in(folder.path());
        assert!(supervisor.names().is_empty());
        let is_seen = moments[round % moments.len()];
        let is_made = killed_during(supervisor, &add, is_seen);
        let must_be_there = is_made || is_kept();
        // Names that the killed process has left are in nobody's way.
        let supervisor = started_in(folder.path());
        let is_there = supervisor.names() == ["a"];
        assert!(
            is_there == must_be_there && (is_there || supervisor.names().is_empty()),
            "{round}"
        );
        if !is_there {
            assert_eq!(supervisor.command(&add).status().unwrap().code(), Some(0), "{round}");
        }
        assert!(wait_until(|| socket.exists()));
        is_served(&socket);
        supervisor.is_left("a");
        let is_removed = killed_during(supervisor, &["remove", "a"], &is_gone);
        let supervisor = started_in(folder.path());
        assert_eq!(supervisor.names().is_empty(), is_removed || is_gone(), "{round}");
        assert_eq!(supervisor.delete("a"), 204);
        drop(supervisor);
        for left in names_in(folder.path()).iter().filter(|name| name.starts_with(".mr-")) {
            std::fs::remove_dir_all(folder.path().join(left)).unwrap();
        }
    }
}
