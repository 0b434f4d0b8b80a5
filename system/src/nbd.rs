//! Servers of NBD as child processes, and a guest on their disk while they are killed.

use crate::command::{child, find, wait_for};
use crate::daemon::{Daemon, DaemonOptions};
use crate::guest::{Guest, GuestOptions, Kernel, fio};
use crate::soak::COMPARE;
use crate::{Context, Outcome, certificates, check, cleanup, packages};
use std::fs::{File, OpenOptions};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

/// The packages of the servers.
pub(crate) const PACKAGES: [&str; 2] = ["nbdkit", "qemu-utils"];

/// Which program serves.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Engine {
    /// nbdkit, which lets each request wait for two milliseconds, so that many are in flight.
    Nbdkit,
    /// qemu-nbd.
    QemuNbd,
}

impl Engine {
    /// They serve the same image in turn.
    pub(crate) const ALL: [Self; 2] = [Self::Nbdkit, Self::QemuNbd];

    fn arguments(self, place: &Place) -> Vec<String> {
        let (socket, image) = (place.socket.display(), place.image.display());
        let tls = match (self, &place.certificates) {
            (_, None) => String::new(),
            (Self::Nbdkit, Some(folder)) => {
                let folder = folder.display();
                format!("--tls=require --tls-certificates={folder} --tls-verify-peer ")
            }
            (Self::QemuNbd, Some(folder)) => format!(
                "--object tls-creds-x509,id=tls,endpoint=server,dir={},verify-peer=yes \
                 --tls-creds tls ",
                folder.display()
            ),
        };
        let words = match self {
            Self::Nbdkit => format!(
                "nbdkit -f -U {socket} -t 16 {tls}--filter=delay file {image} rdelay=2ms wdelay=2ms"
            ),
            Self::QemuNbd => {
                format!("qemu-nbd -k {socket} -t -e 16 {tls}-f raw --cache=writeback {image}")
            }
        };
        words.split(' ').map(str::to_owned).collect()
    }
}

/// An image, and the socket at which the server offers it.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) socket: PathBuf,
    pub(crate) image: PathBuf,
    /// The folder of the certificates of a server that speaks TLS alone.
    pub(crate) certificates: Option<PathBuf>,
}

impl Place {
    /// A socket and an image in `folder`, and certificates if the server speaks `tls`.
    pub(crate) fn new(folder: &Path, tls: bool) -> Outcome<Self> {
        let (socket, image) = (folder.join("nbd.sock"), folder.join("nbd.img"));
        let file = File::create(&image).context(image.display())?;
        file.set_len(IMAGE_MIB << 20).context(image.display())?;
        let certificates = tls.then(|| folder.join("certificates"));
        if let Some(folder) = &certificates {
            std::fs::create_dir_all(folder).context(folder.display())?;
            certificates::write(folder)?;
        }
        Ok(Self { socket, image, certificates })
    }

    /// The URI of what is served here.
    pub(crate) fn uri(&self) -> String {
        let socket = self.socket.display();
        match &self.certificates {
            None => format!("nbd+unix:///?socket={socket}"),
            Some(folder) => format!(
                "nbds+unix:///?socket={socket}&tls-certificates={}&tls-hostname={}",
                folder.display(),
                certificates::HOST
            ),
        }
    }
}

/// A server of an image; dropped, it is killed.
#[derive(Debug)]
pub(crate) struct Server {
    child: Child,
}

impl Server {
    /// Starts a server at `place`, and waits until it listens there.
    pub(crate) fn start(engine: Engine, place: &Place, log: &Path) -> Outcome<Self> {
        let socket = &place.socket;
        // What a killed server leaves there would be in the way of the next.
        let _ = std::fs::remove_file(socket);
        let arguments = engine.arguments(place);
        let output = OpenOptions::new().create(true).append(true).open(log).context("the log")?;
        let mut command = child(&arguments[0]);
        command.args(&arguments[1..]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(output);
        let child = command.spawn().context(&arguments[0])?;
        cleanup::adopt(child.id());
        let mut server = Self { child };
        wait_for("the NBD server's socket", Duration::from_secs(30), || {
            if let Some(status) = server.child.try_wait().context("the NBD server")? {
                return Err(format!("{}: {status}, see {}", arguments[0], log.display()));
            }
            Ok(UnixStream::connect(socket).is_ok().then_some(()))
        })?;
        Ok(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        cleanup::forget(self.child.id());
    }
}

/// How servers are killed under a guest.
pub(crate) struct Trial<'a> {
    /// The daemon.
    pub(crate) binary: &'a Path,
    /// Where sockets and the image lie.
    pub(crate) folder: &'a Path,
    /// Where logs go.
    pub(crate) logs: &'a Path,
    /// The guest.
    pub(crate) kernel: &'a Kernel,
    /// Queues of its disk, and connections to the server.
    pub(crate) queues: u32,
    /// How often the server is killed.
    pub(crate) kills: u32,
    /// The servers speak TLS alone.
    pub(crate) tls: bool,
    /// The pause before each kill.
    pub(crate) pause: &'a mut dyn FnMut() -> Duration,
}

/// What a guest has seen whose server was killed.
pub(crate) struct Survived {
    /// Runs of fio that compared all that they had read.
    pub(crate) runs: String,
    /// Times that connections were lost.
    pub(crate) losses: u64,
}

const IMAGE_MIB: u64 = 64;

impl Trial<'_> {
    /// A guest whose fio compares all that it reads, on the disk of servers that are killed: both
    /// engines serve the same image in turn.
    ///
    /// # Errors
    /// The guest had an error, or read what it had not written.
    pub(crate) fn run(self) -> Outcome<Survived> {
        let programs = ["fio", "gcc", "binutils", PACKAGES[0], PACKAGES[1]];
        packages::need("the test of killed servers", &programs)?;
        let place = Place::new(self.folder, self.tls)?;
        let root = self.folder.join("root");
        fio::stand_ins(&find("fio").ok_or("fio is not installed")?, &root)?;
        let log = self.logs.join("nbd.log");
        let mut server = Server::start(Engine::ALL[0], &place, &log)?;
        let queues = self.queues.to_string();
        let more = ["--nbd", &place.uri(), "--num-queues", &queues];
        let daemon_log = self.logs.join("manyring.log");
        let options = DaemonOptions::blk_of(self.binary, self.folder, &daemon_log, &more);
        let of_guest = options.socket();
        let daemon = Daemon::start(options, &of_guest)?;
        let options = GuestOptions {
            socket: Some(&of_guest),
            queues: self.queues,
            cpus: self.queues,
            programs: &["fio"],
            root: Some(&root),
            script: COMPARE,
            ..GuestOptions::default()
        };
        let mut guest = Guest::boot(self.kernel, &options, &self.logs.join("guest.log"))?;
        guest.reach("load", Duration::from_secs(120))?;
        let engines = Engine::ALL.iter().cycle().skip(1);
        for (kills, engine) in (1..=u64::from(self.kills)).zip(engines) {
            std::thread::sleep((self.pause)());
            drop(server);
            server = Server::start(*engine, &place, &log)?;
            // The guest is idle for moments: its next request finds out.
            wait_for("the guest's next request", Duration::from_secs(60), || {
                Ok((daemon.losses()? >= kills).then_some(()))
            })?;
        }
        guest.proceed()?;
        let said = guest.finish(Duration::from_secs(300))?;
        let runs = said.lines().find_map(|line| line.strip_prefix("GUEST_MARK runs "));
        let losses = daemon.losses()?;
        for queue in daemon.queues()? {
            let errors = queue.value("errors")?;
            check(errors == 0, || format!("{errors} requests of the guest failed"))?;
        }
        daemon.stop()?;
        drop(server);
        Ok(Survived { runs: runs.unwrap_or("0").trim().to_owned(), losses })
    }
}
