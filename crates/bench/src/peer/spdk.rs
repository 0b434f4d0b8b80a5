//! SPDK's `vhost`: a back-end with one reactor, a thread that polls all the time. It is started
//! once and stopped (SIGSTOP) while other parties run, since it would take a CPU from them.

use super::{PeerError, Server};
use crate::measure::Affinity;
use serde_json::{Value, json};
use std::cell::RefCell;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Name of the socket that SPDK makes in the folder that we give it.
const SOCKET: &str = "socket";
/// Memory that SPDK allocates for itself, in MiB: pages of 4 KiB, so that no huge pages are needed.
const MEMORY_MIB: u32 = 512;
/// Size of the null disk in blocks of 512 bytes: 64 GiB, like the null disks of other parties.
const NULL_BLOCKS: u64 = 64 << 21;
/// How long SPDK runs on after its client has ended, so that it sees the end before it is stopped.
const FAREWELL: Duration = Duration::from_millis(20);

/// The disk that SPDK serves.
#[derive(Debug)]
pub(crate) enum SpdkDisk {
    /// A null disk, whose reads touch no data.
    Null,
    /// A file, by io_uring; always with O_DIRECT.
    Uring(PathBuf),
    /// A file, by the kernel's older asynchronous I/O; always with O_DIRECT.
    Aio(PathBuf),
}

impl SpdkDisk {
    /// The call of SPDK's configuration that makes the disk.
    fn create(&self) -> Value {
        let file = |method, path: &Path| {
            json!({"method": method,
                   "params": {"name": "disk", "filename": path, "block_size": 512}})
        };
        match self {
            Self::Null => json!({"method": "bdev_null_create",
                "params": {"name": "disk", "num_blocks": NULL_BLOCKS, "block_size": 512}}),
            Self::Uring(path) => file("bdev_uring_create", path),
            Self::Aio(path) => file("bdev_aio_create", path),
        }
    }

    /// SPDK's configuration: the disk, and a vhost-user controller for it.
    fn config(&self) -> Value {
        let controller = json!({"method": "vhost_create_blk_controller",
                                "params": {"ctrlr": SOCKET, "dev_name": "disk"}});
        json!({"subsystems": [
            {"subsystem": "bdev", "config": [self.create()]},
            {"subsystem": "vhost_blk", "config": [controller]},
        ]})
    }
}

/// SPDK's arguments: its files lie in `folder`, and its one reactor runs on `cpu`.
fn arguments(folder: &Path, cpu: usize) -> Vec<OsString> {
    let mut all: Vec<OsString> = vec!["-c".into(), folder.join("config.json").into()];
    all.extend(["-S".into(), folder.into()]);
    // By default all SPDKs of a machine share one path for the command socket.
    all.extend(["-r".into(), folder.join("rpc").into()]);
    all.extend(["-m".into(), format!("[{cpu}]").into()]);
    // The lock of a stopped SPDK, or of one that the user runs, would keep this one from its CPU.
    all.push("--disable-cpumask-locks".into());
    all.extend(["--no-pci", "--no-huge", "-s"].map(OsString::from));
    all.push(MEMORY_MIB.to_string().into());
    // Errors only: nobody reads its standard error while it runs, and some lines for each message
    // of each client would fill the pipe within a cell, and block it.
    all.push("--silence-noticelog".into());
    all.extend(["--env-context", "--log-level=lib.vhost.*:4"].map(OsString::from));
    all
}

/// SPDK with a disk; started when it is first needed, killed when this is dropped.
#[derive(Debug)]
pub(crate) struct Spdk {
    program: PathBuf,
    disk: SpdkDisk,
    running: RefCell<Option<Running>>,
}

#[derive(Debug)]
struct Running {
    server: Server,
    folder: tempfile::TempDir,
}

impl Spdk {
    pub(crate) fn new(program: PathBuf, disk: SpdkDisk) -> Self {
        Self { program, disk, running: RefCell::new(None) }
    }

    /// Lets the server run, calls `work` with the server and its socket, and stops the server
    /// again. If `work` fails, the server is killed, and the next call starts a new one.
    pub(crate) fn awake<T>(
        &self,
        cpu: usize,
        work: impl FnOnce(&Server, &Path) -> Result<T, String>,
    ) -> Result<T, String> {
        let running = match self.running.take() {
            Some(running) => running,
            None => self.start(cpu)?,
        };
        running.server.go_on();
        let result = work(&running.server, &running.folder.path().join(SOCKET))?;
        std::thread::sleep(FAREWELL);
        running.server.pause();
        self.running.replace(Some(running));
        Ok(result)
    }

    fn start(&self, cpu: usize) -> Result<Running, String> {
        let folder = tempfile::tempdir().map_err(|e| format!("temporary folder: {e}"))?;
        let config = folder.path().join("config.json");
        std::fs::write(&config, self.disk.config().to_string())
            .map_err(|e| format!("{}: {e}", config.display()))?;
        let arguments = arguments(folder.path(), cpu);
        let socket = folder.path().join(SOCKET);
        let server = Server::start(&self.program, &arguments, &socket, &Affinity::one(cpu))
            .map_err(|error: PeerError| error.to_string())?;
        Ok(Running { server, folder })
    }
}

impl Drop for Running {
    /// It is killed, and has no time to remove what it keeps outside of its folder.
    fn drop(&mut self) {
        let pid = self.server.id();
        let _ = std::fs::remove_dir_all(format!("/run/dpdk/spdk_pid{pid}"));
        let _ = std::fs::remove_file(format!("/dev/shm/vhost_trace.pid{pid}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::time::Instant;

    #[test]
    fn the_configuration_has_the_disk_and_a_controller_for_it() {
        let of = |disk: SpdkDisk| {
            let config = disk.config();
            let [bdev, vhost] =
                ["bdev", "vhost_blk"].map(|name| subsystem(&config, name)[0].clone());
            assert_eq!(vhost["method"], "vhost_create_blk_controller");
            assert_eq!(vhost["params"], json!({"ctrlr": "socket", "dev_name": "disk"}));
            assert_eq!(bdev["params"]["name"], "disk");
            bdev
        };
        let null = of(SpdkDisk::Null);
        assert_eq!(
            (&null["method"], &null["params"]["block_size"]),
            (&json!("bdev_null_create"), &json!(512))
        );
        assert_eq!(null["params"]["num_blocks"], 64_u64 * 1024 * 1024 * 1024 / 512);
        for (disk, method) in [
            (SpdkDisk::Uring("/a b/\"c".into()), "bdev_uring_create"),
            (SpdkDisk::Aio("/a b/\"c".into()), "bdev_aio_create"),
        ] {
            let file = of(disk);
            assert_eq!(file["method"], method);
            assert_eq!(file["params"]["filename"], "/a b/\"c");
        }
    }

    /// The calls of a subsystem, from the text that SPDK reads.
    fn subsystem(config: &Value, name: &str) -> Vec<Value> {
        let config: Value = serde_json::from_str(&config.to_string()).unwrap();
        let all = config["subsystems"].as_array().unwrap();
        let one = all.iter().find(|subsystem| subsystem["subsystem"] == name).unwrap();
        one["config"].as_array().unwrap().clone()
    }

    #[test]
    fn it_has_one_reactor_no_huge_pages_and_all_its_files_in_one_folder() {
        let words = arguments(Path::new("/f"), 3);
        let words: Vec<&str> = words.iter().filter_map(|word| word.to_str()).collect();
        let expected = "-c /f/config.json -S /f -r /f/rpc -m [3] --disable-cpumask-locks \
                        --no-pci --no-huge -s 512 --silence-noticelog \
                        --env-context --log-level=lib.vhost.*:4";
        assert_eq!(words.join(" "), expected);
    }

    #[test]
    fn it_runs_while_it_is_needed_rests_in_between_and_is_gone_in_the_end() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("vhost");
        // Takes `-S FOLDER` as SPDK does, shows a socket there, and turns.
        let script = "#!/bin/sh\nwhile [ \"$1\" != -S ]; do shift; done\n\
                      touch \"$2/socket\"\nwhile :; do :; done\n";
        std::fs::write(&program, script).unwrap();
        std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
        let spdk = Spdk::new(program, SpdkDisk::Null);
        let mut seen = Vec::new();
        for _ in 0..2 {
            let run = spdk.awake(0, |server, socket| {
                assert!(socket.exists());
                await_state(server.id(), 'R');
                Ok(server.id())
            });
            let id = run.unwrap();
            await_state(id, 'T');
            seen.push(id);
        }
        assert_eq!(seen[0], seen[1], "it was started twice");
        let failed: Result<(), String> = spdk.awake(0, |_, _| Err("a client failed".to_owned()));
        assert_eq!(failed.unwrap_err(), "a client failed");
        assert_eq!(state_of(seen[0]), None, "it is there still");
    }

    /// Waits until a process is in this state, as far as its scheduler lets it.
    fn await_state(pid: u32, state: char) {
        let start: Instant = crate::measure::now();
        while state_of(pid) != Some(state) {
            assert!(start.elapsed() < Duration::from_secs(60), "{:?}", state_of(pid));
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The state of a process in `/proc`: R that it can run, T that it is stopped.
    fn state_of(pid: u32) -> Option<char> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        stat.rsplit_once(')')?.1.trim().chars().next()
    }
}
