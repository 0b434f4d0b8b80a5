//! A file system that does not answer, like one of the network that is gone: it costs the devices
//! whose sockets or images lie there, and no other request and no other device. Needs root, loop
//! devices and FUSE.

use crate::support::changes::{self, EMPTY, Supervisor, is_served};
use crate::support::process::{Daemon, is_root_or_left_out, wait_until};
use crate::support::program::{manyring, names_in, shown};
use manyring_driver::{BlkDriver, BlkDriverOptions};
use serde_json::json;
use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use tempfile::TempDir;

/// A file system that can be frozen: whoever makes, renames or removes a name there waits then.
struct Freezer {
    folder: TempDir,
    mounted: PathBuf,
    thaws: RefCell<Vec<Child>>,
}

fn run(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {said}");
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

impl Freezer {
    /// None: only root can mount one.
    fn new() -> Option<Self> {
        if !is_root_or_left_out() {
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        let (file, mounted) = (folder.path().join("fs"), folder.path().join("mounted"));
        std::fs::File::create(&file).unwrap().set_len(32 << 20).unwrap();
        std::fs::create_dir(&mounted).unwrap();
        run("mkfs.ext4", &["-q", text(&file)]);
        run("mount", &["-o", "loop", text(&file), text(&mounted)]);
        Some(Self { folder, mounted, thaws: RefCell::default() })
    }

    fn freeze(&self) {
        run("fsfreeze", &["-f", text(&self.mounted)]);
        // Should the test fail: the kernel keeps a killed daemon as long as it waits here.
        let thaw = "sleep 90; fsfreeze -u \"$0\" 2>/dev/null";
        let mut thaws = Command::new("sh");
        thaws.args(["-c", thaw]).arg(&self.mounted).stdin(Stdio::null()).stdout(Stdio::null());
        // `sleep` outlives the shell, and whoever reads the test's output waits for its end.
        thaws.stderr(Stdio::null());
        self.thaws.borrow_mut().push(thaws.spawn().unwrap());
    }

    fn thaw(&self) {
        run("fsfreeze", &["-u", text(&self.mounted)]);
    }
}

impl Drop for Freezer {
    fn drop(&mut self) {
        for mut thaws in self.thaws.take() {
            let _ = thaws.kill();
            let _ = thaws.wait();
        }
        let _ = Command::new("fsfreeze").arg("-u").arg(&self.mounted).output();
        let _ = Command::new("umount").arg("-l").arg(&self.mounted).output();
    }
}

/// A file system whose server answers nothing: whoever looks up a name there waits.
struct Silent {
    folder: TempDir,
    mounted: PathBuf,
    server: Option<std::fs::File>,
}

impl Silent {
    /// None: only root can mount one.
    fn new() -> Option<Self> {
        if !is_root_or_left_out() {
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        let mounted = folder.path().join("mounted");
        std::fs::create_dir(&mounted).unwrap();
        let server = std::fs::File::options().read(true).write(true).open("/dev/fuse").unwrap();
        let options = "fd=0,rootmode=40000,user_id=0,group_id=0";
        let mut mount = Command::new("mount");
        mount.args(["-i", "-t", "fuse", "-o", options, "none"]).arg(&mounted);
        assert!(mount.stdin(server.try_clone().unwrap()).status().unwrap().success());
        Some(Self { folder, mounted, server: Some(server) })
    }

    /// Whoever waits for an answer is told that there will be none.
    fn end(&mut self) {
        self.server = None;
    }
}

impl Drop for Silent {
    fn drop(&mut self) {
        self.end();
        let _ = Command::new("umount").arg("-l").arg(&self.mounted).output();
    }
}

/// The devices whose calls of the host do not come back.
fn held(supervisor: &Supervisor) -> Vec<String> {
    let workers = shown(&supervisor.control, "/v1/workers");
    let stuck = workers["stuck"].as_array().unwrap();
    stuck.iter().map(|stuck| stuck["device"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn change_on_a_host_that_does_not_answer_is_refused_and_holds_up_nobody() {
    let Some(freezer) = Freezer::new() else { return };
    let supervisor = Supervisor::run(EMPTY);
    assert_eq!(supervisor.put("good", &supervisor.null("good")).0, 201);
    let slow = |name: &str| {
        let socket = freezer.mounted.join(name);
        json!({ "kind": "blk", "socket_path": socket, "null": "1G", "num_queues": 1 })
    };
    assert_eq!(supervisor.put("there", &slow("there")).0, 201);
    freezer.freeze();
    std::thread::scope(|scope| {
        let asked = scope.spawn(|| supervisor.put("bad", &slow("bad")));
        // The change waits for the host; everybody else is served during that time.
        assert!(wait_until(|| held(&supervisor) == ["bad"]));
        assert!(!asked.is_finished());
        is_served(&supervisor.at("good"));
        is_served(&freezer.mounted.join("there"));
        assert_eq!(supervisor.names(), ["good", "there"]);
        let (status, answer) = asked.join().unwrap();
        let error = answer["error"].as_str().unwrap_or_default();
        assert!(
            status == 500 && error.contains("timed out; the file system does not respond"),
            "{status}: {answer}"
        );
    });
    let log = || supervisor.daemon.log();
    assert!(wait_until(|| log().contains("a host call is blocked")), "{}", log());
    // Its name stays for now.
    assert!(wait_until(|| supervisor.delete("there") == 204));
    assert_eq!(supervisor.names(), ["good"]);
    is_served(&supervisor.at("good"));
    freezer.thaw();
    assert!(wait_until(|| held(&supervisor).is_empty()), "{:?}", held(&supervisor));
    let left = || names_in(&freezer.mounted);
    assert!(wait_until(|| left() == ["lost+found"]), "{:?}", left());
    assert_eq!(supervisor.put("bad", &slow("bad")).0, 201);
    is_served(&freezer.mounted.join("bad"));
}

#[test]
fn start_and_stop_do_not_wait_for_a_host_that_does_not_answer() {
    let Some(freezer) = Freezer::new() else { return };
    let (folder, mounted) = (freezer.folder.path(), &freezer.mounted);
    let (file, control) = (folder.join("manyring.toml"), folder.join("control"));
    let disk = |name: &str, socket: &Path| {
        let socket = socket.display();
        format!("[[blk]]\nname = '{name}'\nsocket_path = '{socket}'\nnull = '1G'\nnum_queues = 1\n")
    };
    let good = folder.join("good");
    let text = format!(
        "[daemon]\ncontrol = '{}'\n{}{}",
        control.display(),
        disk("bad", &mounted.join("bad")),
        disk("good", &good)
    );
    std::fs::write(&file, text).unwrap();
    freezer.freeze();
    let mut command = manyring();
    command.arg("run").arg("--config").arg(&file);
    let sockets = [control.clone(), good.clone()];
    let daemon = Daemon::start(command, tempfile::tempdir().unwrap(), &sockets);
    let mut supervisor = Supervisor { daemon, control };
    is_served(&good);
    let bad = || shown(&supervisor.control, "/v1/devices/bad");
    assert!(wait_until(|| bad()["state"] == "waiting"), "{}", bad());
    let reason = bad()["reason"].as_str().unwrap_or_default().to_owned();
    assert!(reason.contains("the file system does not respond"), "{reason}");
    freezer.thaw();
    assert!(wait_until(|| bad()["state"] == "serving" && mounted.join("bad").exists()));
    is_served(&mounted.join("bad"));
    freezer.freeze();
    supervisor.daemon.send(rustix::process::Signal::TERM);
    let told = "timed out; continuing without it";
    assert!(wait_until(|| supervisor.daemon.log().contains(told)), "{}", supervisor.daemon.log());
    // The kernel keeps the process until the file system answers: it does no more by itself.
    assert!(wait_until(|| std::os::unix::net::UnixStream::connect(&good).is_err()));
    freezer.thaw();
    assert!(supervisor.daemon.wait().success(), "{}", supervisor.daemon.log());
}

#[test]
fn client_whose_name_is_not_found_for_ever_holds_up_nobody() {
    let Some(mut silent) = Silent::new() else { return };
    let folder = silent.folder.path();
    let (file, control, good) =
        (folder.join("manyring.toml"), folder.join("control"), folder.join("good"));
    let text = format!(
        "[daemon]\ncontrol = '{}'\n[[blk]]\nname = 'bad'\nsocket_path = '{}'\nclient = true\n\
         null = '1G'\n[[blk]]\nname = 'good'\nsocket_path = '{}'\nnull = '1G'\n",
        control.display(),
        silent.mounted.join("bad").display(),
        good.display()
    );
    std::fs::write(&file, text).unwrap();
    let mut command = manyring();
    command.arg("run").arg("--config").arg(&file);
    let sockets = [control.clone(), good.clone()];
    let daemon = Daemon::start(command, tempfile::tempdir().unwrap(), &sockets);
    let mut supervisor = Supervisor { daemon, control };
    is_served(&good);
    assert!(wait_until(|| held(&supervisor) == ["bad"]), "{}", supervisor.daemon.log());
    is_served(&good);
    assert_eq!(supervisor.names(), ["bad", "good"]);
    assert!(supervisor.daemon.stop().0.success(), "{}", supervisor.daemon.log());
    silent.end();
}

/// A block device that lies in a file system which can be frozen. Whoever closes it last writes
/// what the page cache has of it.
struct Loop(String);

impl Loop {
    fn new(freezer: &Freezer) -> Self {
        let file = changes::image(&freezer.mounted, "image");
        let output = Command::new("losetup").args(["--show", "-f"]).arg(&file).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        Self(String::from_utf8(output.stdout).unwrap().trim().to_owned())
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["-d", &self.0]).output();
    }
}

#[test]
fn image_that_does_not_close_holds_up_nobody() {
    let Some(freezer) = Freezer::new() else { return };
    let device = Loop::new(&freezer);
    let supervisor = Supervisor::run(EMPTY);
    assert_eq!(supervisor.put("good", &supervisor.null("good")).0, 201);
    let socket = supervisor.at("there");
    let disk = json!({ "kind": "blk", "socket_path": socket, "file": device.0, "num_queues": 1 });
    assert_eq!(supervisor.put("there", &disk).0, 201);
    let mut guest = BlkDriver::connect(&socket, &BlkDriverOptions::default()).unwrap();
    guest.queues[0].write(0, &[1; 4096]).unwrap();
    drop(guest);
    supervisor.is_left("there");
    freezer.freeze();
    std::thread::scope(|scope| {
        let asked = scope.spawn(|| supervisor.delete("there"));
        assert!(wait_until(|| held(&supervisor) == ["there"]), "{}", supervisor.daemon.log());
        is_served(&supervisor.at("good"));
        assert_eq!(supervisor.names(), ["good"]);
        assert_eq!(asked.join().unwrap(), 204, "{}", supervisor.daemon.log());
    });
    freezer.thaw();
    assert!(wait_until(|| held(&supervisor).is_empty()), "{:?}", held(&supervisor));
    // Nobody has it any more.
    assert_eq!(supervisor.put("there", &disk).0, 201);
}
