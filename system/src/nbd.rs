//! Servers of NBD as child processes, and a guest on a disk while what serves it is killed.

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
        // A killed server has left its socket there, where the next one must listen.
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

/// The store of a guest's disk, which is killed while the guest uses the disk.
pub(crate) trait Store {
    /// How the daemon serves the disk.
    fn options(&self, trial: &Trial<'_>) -> DaemonOptions;

    /// Kills it and starts it again. Returns when the guest's requests have met the new one. This
    /// is kill number `kill`, from 1; the daemon serves the guest.
    ///
    /// # Errors
    /// It does not start again, or the guest does not go on.
    fn kill(&mut self, kill: u32, daemon: &Daemon) -> Outcome;

    /// Checks how often the daemon has lost a connection.
    ///
    /// # Errors
    /// `losses` connections are not what this number of kills costs.
    fn check(&self, kills: u32, losses: u64) -> Outcome;
}

/// Servers that serve one image in turn: the next one is another program.
#[derive(Debug)]
pub(crate) struct Turns {
    engines: Vec<Engine>,
    place: Place,
    log: PathBuf,
    server: Option<Server>,
}

impl Turns {
    /// Starts the first of `engines` at a place in `folder`. Their logs go to the folder `logs`.
    ///
    /// # Errors
    /// It cannot be started.
    pub(crate) fn start(
        engines: &[Engine],
        folder: &Path,
        logs: &Path,
        tls: bool,
    ) -> Outcome<Self> {
        packages::need("the test of killed servers", &PACKAGES)?;
        let (place, log) = (Place::new(folder, tls)?, logs.join("nbd.log"));
        let server = Some(Server::start(engines[0], &place, &log)?);
        Ok(Self { engines: engines.to_vec(), place, log, server })
    }
}

impl Store for Turns {
    fn options(&self, trial: &Trial<'_>) -> DaemonOptions {
        trial.over_nbd(&self.place.uri())
    }

    fn kill(&mut self, kill: u32, daemon: &Daemon) -> Outcome {
        self.server = None;
        let next = self.engines[kill as usize % self.engines.len()];
        self.server = Some(Server::start(next, &self.place, &self.log)?);
        // The guest is idle for moments: its next request finds out.
        wait_for("the guest's next request", Duration::from_secs(60), || {
            Ok((daemon.losses()? >= kill.into()).then_some(()))
        })
    }

    fn check(&self, kills: u32, losses: u64) -> Outcome {
        check(losses >= kills.into(), || format!("{losses} connections were lost of {kills}"))
    }
}

/// How what serves a disk is killed under a guest.
pub(crate) struct Trial<'a> {
    /// The daemon.
    pub(crate) binary: &'a Path,
    /// Where sockets lie.
    pub(crate) folder: &'a Path,
    /// Where logs go.
    pub(crate) logs: &'a Path,
    /// The guest.
    pub(crate) kernel: &'a Kernel,
    /// Queues of its disk, and connections to the server.
    pub(crate) queues: u32,
    /// How often it is killed.
    pub(crate) kills: u32,
    /// The pause before each kill.
    pub(crate) pause: &'a mut dyn FnMut() -> Duration,
}

/// The results of a guest whose server was killed.
pub(crate) struct Survived {
    /// Runs of fio that compared all that they had read.
    pub(crate) runs: String,
    /// Times that connections were lost.
    pub(crate) losses: u64,
}

/// The size of the disk.
pub(crate) const IMAGE_MIB: u64 = 64;

impl Trial<'_> {
    /// A daemon that serves the disk of the NBD server at `uri`.
    pub(crate) fn over_nbd(&self, uri: &str) -> DaemonOptions {
        let queues = self.queues.to_string();
        let more = ["--nbd", uri, "--num-queues", &queues];
        DaemonOptions::blk_of(self.binary, self.folder, &self.logs.join("manyring.log"), &more)
    }

    /// A guest whose fio compares all that it reads, on the disk of a store that is killed.
    ///
    /// # Errors
    /// The guest had an error, read what it had not written, or compared nothing.
    pub(crate) fn run(self, store: &mut dyn Store) -> Outcome<Survived> {
        packages::need("a guest with fio", &["fio", "gcc", "binutils"])?;
        let root = self.folder.join("root");
        fio::stand_ins(&find("fio").ok_or("fio is not installed")?, &root)?;
        let options = store.options(&self);
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
        for kill in 1..=self.kills {
            std::thread::sleep((self.pause)());
            store.kill(kill, &daemon)?;
        }
        guest.proceed()?;
        let said = guest.finish(Duration::from_secs(300))?;
        let runs = said.lines().find_map(|line| line.strip_prefix("GUEST_MARK runs "));
        let runs = runs.unwrap_or("0").trim().to_owned();
        check(runs != "0", || "nothing was compared".into())?;
        let losses = daemon.losses()?;
        store.check(self.kills, losses)?;
        for queue in daemon.queues()? {
            let errors = queue.value("errors")?;
            check(errors == 0, || format!("{errors} requests of the guest failed"))?;
        }
        daemon.stop()?;
        Ok(Survived { runs, losses })
    }
}
