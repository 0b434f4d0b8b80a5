//! `Helper`: runs qemu-storage-daemon as a child process, which reads an image in a format that
//! this program does not know. Our own NBD client connects to the child.
//!
//! ```text
//! socket      bound here, in a folder that only this user may look into, and passed to each child
//!             as its standard input: a client that connects while no child runs waits in the
//!             backlog
//! monitor     the child's QMP, by which its image is resized (`qmp_monitor.rs`)
//! sandbox     the child can open only the image and the files that it names (`helper_walls.rs`)
//! thread      starts the child, reads its messages, waits for its end; starts the next one, after
//!             a pause that grows while children do not live long
//! ```
//! The thread is the parent of its children and outlives each of them. The kernel sends a child
//! SIGTERM when its parent thread ends. So a child ends when this process ends, for whatever
//! reason, and not before.

use super::helper_walls::{self, ImageFiles};
use super::qmp_monitor::{Monitor, MonitorError};
use crate::byte_stream::{self, ByteStream};
use crate::reaper::reap;
use crate::times::{HELPER_BACKOFF, HELPER_END, HELPER_LASTS, HELPER_NEXT, HELPER_START_STEP};
use manyring_backend::blk::{Connection, Disk, DiskQueue, Geometry};
use manyring_engine::Janitor;
use manyring_nbd::{Host, JoinError, Uri};
use manyring_transport::vhost_user::{ListenError, SocketName, check_path};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::fs::FlockOperation;
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use serde_json::{Value, json};
use std::fs::{DirBuilder, Permissions};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

const PROGRAM: &str = "qemu-storage-daemon";
/// Runs the program so that the kernel sends it SIGTERM when the thread that started it ends. That
/// thread may end before the program has asked the kernel for this: so the shell exits if its
/// parent is no longer this process.
const WRAPPER: [&str; 8] = [
    "setpriv",
    "--pdeathsig",
    "TERM",
    "--no-new-privs",
    "--inh-caps=-all",
    "sh",
    "-c",
    r#"[ "$PPID" = "$0" ] || exit 1; exec "$@""#,
];
/// The first bytes that an NBD server sends.
const GREETING: [u8; 8] = *b"NBDMAGIC";
const STEPS: usize = 100;
/// Bytes of a child's last message that are reported as the reason of its end.
const SAID_MAX: usize = 1024;
/// Bytes that a child can write to its standard error before its writes block.
const STDERR_SIZE: usize = 128 << 10;

const UNMEASURED: &str = "the size of the image is not known: once qemu-storage-daemon serves \
                          again, have it measured with \"manyring resize DEVICE --shrink\"";

/// The image of a helper, and how the helper opens it.
#[derive(Clone, Debug)]
pub(super) struct HelperOptions {
    /// The device's name, which is also the name of the NBD export.
    pub(super) name: String,
    /// The folder of the NBD socket.
    pub(super) folder: PathBuf,
    /// QEMU's block driver for the image.
    pub(super) format: &'static str,
    /// The path of the image.
    pub(super) image: PathBuf,
    /// True if the helper opens the image with `O_DIRECT`.
    pub(super) direct: bool,
    /// True if the image is opened read-only.
    pub(super) read_only: bool,
}

/// Why a helper's disk cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum HelperError {
    /// A system call failed: the socket, the thread or the child could not be made.
    #[error("{what}: {source}")]
    System { what: String, source: io::Error },
    /// The child has ended; the text is its last message.
    #[error("{PROGRAM} exited: {0}")]
    Ended(String),
    /// The child did not send an NBD greeting in time.
    #[error("{PROGRAM} did not start to serve in time")]
    Silent,
    /// The NBD client cannot use the export of the child.
    #[error("{PROGRAM} {0}")]
    Join(#[from] JoinError),
}

impl HelperError {
    /// True if another process holds the image or the socket's name, or if the child has not served
    /// yet: a later attempt may succeed.
    pub(crate) fn is_held(&self) -> bool {
        match self {
            Self::Ended(said) => said.contains(" lock"),
            Self::Silent => true,
            Self::System { source, .. } => source.kind() == io::ErrorKind::AddrInUse,
            Self::Join(_) => false,
        }
    }
}

/// The disk that a helper serves.
#[derive(Debug)]
pub(super) struct HelperDisk {
    // Field order matters: the NBD client is dropped before its server.
    disk: Arc<dyn Disk>,
    helper: Helper,
}

impl HelperDisk {
    /// Starts the child, and connects to it: `serve` opens the NBD disk at the given URI, and its
    /// second result is returned, too. May block for some seconds.
    ///
    /// # Errors
    /// [`HelperError`].
    pub(super) fn open<T>(
        options: HelperOptions,
        serve: impl FnOnce(&Uri) -> Result<(Arc<dyn Disk>, T), JoinError>,
    ) -> Result<(Self, T), HelperError> {
        let name = options.name.clone();
        let helper = Helper::open(options)?;
        let uri = Uri {
            host: Host::Unix(helper.socket.display().to_string()),
            export: name,
            tls: false,
            certificates: None,
            hostname: None,
        };
        let (disk, more) = serve(&uri)?;
        Ok((Self { disk, helper }, more))
    }
}

impl Disk for HelperDisk {
    fn geometry(&self) -> Geometry {
        self.disk.geometry()
    }

    fn open_queue(&self, has_ring: bool) -> Result<Box<dyn DiskQueue>, Errno> {
        self.disk.open_queue(has_ring)
    }

    fn queues_max(&self) -> usize {
        self.disk.queues_max()
    }

    fn connections(&self) -> Vec<Connection> {
        self.disk.connections()
    }

    fn resize(&self, size: Option<u64>) -> Result<Geometry, Errno> {
        let Some(size) = size else { return self.disk.resize(None) };
        let before = self.disk.geometry().size;
        let resized = self.helper.resize(size)?;
        // Measure also after a resize that failed: the guest and the NBD client must not keep a
        // size that the image no longer has.
        self.helper.until_it_has_a_monitor();
        let geometry = self.disk.resize(None).inspect_err(|_| {
            let device = &self.helper.options.name;
            tracing::warn!(device, "{UNMEASURED}");
        })?;
        let is_resized = matches!(resized, Resized::Done) || geometry.size != before;
        if is_resized { Ok(geometry) } else { Err(Errno::IO) }
    }

    fn measure(&self) -> Result<u64, Errno> {
        self.disk.measure()
    }

    fn kind(&self) -> &'static str {
        "helper"
    }
}

/// The socket and the thread of a helper. Dropping it removes the socket's name and tells the
/// thread to stop: the thread asks the child to end, waits for the child, and ends. No other thread
/// waits for that.
#[derive(Debug)]
struct Helper {
    socket: PathBuf,
    _name: SocketName,
    /// Write end of a pipe: closing it tells the helper's thread to stop.
    _stop: OwnedFd,
    ended: Arc<Ended>,
    options: HelperOptions,
    monitor: Arc<Monitored>,
}

/// The reason of the last child's end; `None` while no child has ended.
type Ended = Mutex<Option<String>>;

/// The QMP monitor of the running child, and a signal for the next child's.
#[derive(Debug, Default)]
struct Monitored {
    monitor: Mutex<Option<Monitor>>,
    /// Notified when a new child has started and its monitor is set.
    is_new: Condvar,
}

impl Monitored {
    fn lock(&self) -> MutexGuard<'_, Option<Monitor>> {
        self.monitor.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The result of a resize by the child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Resized {
    Done,
    /// The child has not answered: the image has the old or the new size.
    Unknown,
}

impl Helper {
    fn open(options: HelperOptions) -> Result<Self, HelperError> {
        let socket = options.folder.join(format!("{}.sock", options.name));
        let failed = |source| HelperError::System { what: socket.display().to_string(), source };
        let (listener, name) = listen(&options.folder, &socket).map_err(failed)?;
        let (stopped, stop) =
            pipe_with(PipeFlags::CLOEXEC).map_err(|errno| failed(errno.into()))?;
        let ended = Arc::<Ended>::default();
        let monitor = Arc::<Monitored>::default();
        let janitor = Arc::new(Janitor::of(&options.name));
        let watch = Watch {
            options: options.clone(),
            listener,
            stopped,
            ended: ended.clone(),
            monitor: monitor.clone(),
            janitor,
        };
        let thread = std::thread::Builder::new().name("disk-helper".to_owned());
        thread.spawn(move || watch.run()).map_err(failed)?;
        let helper = Self { socket, _name: name, _stop: stop, ended, options, monitor };
        helper.until_it_serves()?;
        Ok(helper)
    }

    /// Has the child resize the image. May block for some seconds.
    ///
    /// # Errors
    /// The image keeps its size. `EROFS`: it is read-only. `EINVAL`: the size is 0, or no multiple
    /// of 512 bytes. `EAGAIN`: no child runs. Other errors are the child's.
    fn resize(&self, size: u64) -> Result<Resized, Errno> {
        if self.options.read_only {
            return Err(Errno::ROFS);
        }
        if size == 0 || !size.is_multiple_of(512) {
            return Err(Errno::INVAL);
        }
        let mut monitor = self.monitor.lock();
        // No monitor, or a lost one: the next child is about to start.
        let ready = monitor.as_mut().filter(|monitor| !monitor.is_lost()).ok_or(Errno::AGAIN)?;
        let Err(error) = ready.resize(&export(&self.options), size) else {
            return Ok(Resized::Done);
        };
        let device = &self.options.name;
        tracing::warn!(device, %error, "resizing the image by {PROGRAM} failed");
        match error {
            MonitorError::Silent(_) => Ok(Resized::Unknown),
            MonitorError::Refused(_) => Err(error.errno()),
        }
    }

    /// If the present child was asked to end, waits for the next one, [`HELPER_NEXT`] at most.
    fn until_it_has_a_monitor(&self) {
        let is_lost =
            |monitor: &mut Option<Monitor>| monitor.as_ref().is_some_and(Monitor::is_lost);
        let Monitored { is_new, .. } = &*self.monitor;
        drop(is_new.wait_timeout_while(self.monitor.lock(), HELPER_NEXT, is_lost));
    }

    /// Returns when a child has sent the greeting of an NBD server on the socket.
    ///
    /// # Errors
    /// [`HelperError`]: no child served in time.
    fn until_it_serves(&self) -> Result<(), HelperError> {
        let failed =
            |source| HelperError::System { what: self.socket.display().to_string(), source };
        let mut stream = UnixStream::connect(&self.socket).map_err(failed)?;
        stream.set_read_timeout(Some(HELPER_START_STEP)).map_err(failed)?;
        for _ in 0..STEPS {
            let mut bytes = [0; GREETING.len()];
            if stream.read_exact(&mut bytes).is_ok() && bytes == GREETING {
                return Ok(());
            }
            if let Some(reason) = lock(&self.ended).clone() {
                return Err(HelperError::Ended(reason));
            }
        }
        Err(HelperError::Silent)
    }
}

fn lock(ended: &Ended) -> MutexGuard<'_, Option<String>> {
    ended.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Binds a socket to which only this user may connect, and returns it with its name.
///
/// # Errors
/// `AddrInUse`: another helper listens there, of another process or of a device that this process
/// has just removed.
fn listen(folder: &Path, socket: &Path) -> io::Result<(UnixListener, SocketName)> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    std::fs::set_permissions(folder, Permissions::from_mode(0o700))?;
    // The lock keeps other processes from creating a socket here between the check and the
    // removal.
    let alone = std::fs::File::open(folder)?;
    rustix::fs::flock(&alone, FlockOperation::LockExclusive)?;
    match check_path(socket) {
        Err(ListenError::Taken { .. }) => return Err(io::ErrorKind::AddrInUse.into()),
        checked => checked.map_err(io::Error::other)?,
    }
    // A process that was killed did not remove its socket's name.
    match std::fs::remove_file(socket) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(socket)?;
    let name = SocketName::at(socket.to_owned())?;
    std::fs::set_permissions(socket, Permissions::from_mode(0o600))?;
    Ok((listener, name))
}

/// The state of the thread that runs a helper's children, one after the other.
struct Watch {
    options: HelperOptions,
    listener: UnixListener,
    /// Read end of a pipe, whose write end is closed when the helper is dropped.
    stopped: OwnedFd,
    ended: Arc<Ended>,
    monitor: Arc<Monitored>,
    /// Closes the descriptors that children have sent with their messages.
    janitor: Arc<Janitor>,
}

impl Watch {
    fn run(self) {
        let HelperOptions { name: device, image, format, read_only, .. } = &self.options;
        // Restrict this thread before it starts children, which inherit its rights.
        if let Err(lacks) = helper_walls::enter(&ImageFiles::of(image, format), *read_only) {
            tracing::warn!(device, lacks, "sandbox of {PROGRAM} incomplete: refused by the kernel");
        }
        let mut pause = HELPER_BACKOFF.0;
        loop {
            let (is_lasting, reason) = match self.start() {
                Ok((child, stderr)) => match self.follow(child, stderr) {
                    Some(end) => end,
                    None => break,
                },
                Err(error) => (false, error.to_string()),
            };
            let device = &self.options.name;
            tracing::warn!(device, reason, "{PROGRAM} exited; restarting it");
            *lock(&self.ended) = Some(reason);
            pause = if is_lasting { HELPER_BACKOFF.0 } else { (pause * 2).min(HELPER_BACKOFF.1) };
            if has_ended(&[&self.stopped], Some(pause)) {
                break;
            }
        }
    }

    fn start(&self) -> io::Result<(Child, ByteStream)> {
        let mut command = Command::new(WRAPPER[0]);
        if rustix::process::geteuid().is_root() {
            // The kernel gives a program that root starts every capability of the bounding set: so
            // empty that set.
            command.arg("--bounding-set=-all");
        }
        command.args(&WRAPPER[1..]).arg(std::process::id().to_string()).arg(PROGRAM);
        command.args(arguments(&self.options));
        command.stdin(OwnedFd::from(self.listener.try_clone()?));
        let (ours, of_child) = UnixStream::pair()?;
        let (stderr, writes) = byte_stream::pair(STDERR_SIZE)?;
        command.stdout(OwnedFd::from(of_child)).stderr(writes);
        let child = command.spawn()?;
        *self.monitor.lock() = Some(Monitor::new(ours));
        self.monitor.is_new.notify_all();
        Ok((child, ByteStream::new(stderr, self.janitor.clone())))
    }

    /// Waits for the end of a child. Returns true if the child lived for long, and the reason of
    /// its end; `None`: the helper was dropped, and the child has ended because this thread asked
    /// it to.
    fn follow(&self, mut child: Child, stderr: ByteStream) -> Option<(bool, String)> {
        let stderr = Arc::new(stderr);
        let heard = hear(stderr.clone());
        let pid = Pid::from_child(&child);
        // The child has not been reaped yet, so its process ID cannot belong to another process.
        let Ok(ends) = pidfd_open(pid, PidfdFlags::empty()) else {
            let _ = child.kill();
            let _ = child.wait();
            return Some((false, "its process cannot be watched".to_owned()));
        };
        let is_lasting = !has_ended(&[&ends, &self.stopped], Some(HELPER_LASTS));
        if is_lasting {
            has_ended(&[&ends, &self.stopped], None);
        }
        let is_stopped = has_ended(&[&self.stopped], Some(Duration::ZERO));
        if is_stopped {
            let _ = kill_process(pid, Signal::TERM);
            if !has_ended(&[&ends], Some(HELPER_END)) {
                let _ = child.kill();
                has_ended(&[&ends], None);
            }
        }
        let status = reap(child);
        // A process that the child started may still hold the other end: shutting the stream down
        // ends the read in `hear`.
        stderr.finish();
        let said = heard.ok().and_then(|heard| heard.join().ok()).unwrap_or_default();
        if is_stopped {
            return None;
        }
        let status = status.in_words();
        let last = said.lines().last().unwrap_or_default();
        Some((is_lasting, if last.is_empty() { status } else { format!("{last} ({status})") }))
    }
}

/// Starts a thread that reads the messages of a child until the stream ends. The thread returns the
/// last bytes.
fn hear(stderr: Arc<ByteStream>) -> io::Result<JoinHandle<String>> {
    let read = move || {
        let (mut bytes, mut len) = ([0; SAID_MAX], 0);
        loop {
            match stderr.read(&mut bytes) {
                Ok(0) => break,
                Ok(count) => len = count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => stderr.wait(),
                Err(_) => break,
            }
        }
        String::from_utf8_lossy(&bytes[..len]).into_owned()
    };
    std::thread::Builder::new().name("disk-helper".to_owned()).spawn(read)
}

/// Waits until one of `fds` is readable, for `limit` or for ever. Returns false if the time passed
/// before.
fn has_ended(fds: &[&OwnedFd], limit: Option<Duration>) -> bool {
    let mut fds: Vec<_> = fds.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
    let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
    // An interrupted wait begins anew, with the full limit: the limits need not be exact.
    loop {
        match poll(&mut fds, limit.as_ref()) {
            Err(Errno::INTR) => {}
            found => return found.is_ok_and(|count| count > 0),
        }
    }
}

/// Returns the arguments of the program. Names of files are quoted as JSON strings.
fn arguments(options: &HelperOptions) -> Vec<String> {
    let HelperOptions { format, image, direct, read_only, .. } = options;
    let file = json!({
        "driver": "file", "filename": image, "cache": {"direct": direct}, "discard": "unmap",
    });
    let disk = json!({
        "driver": format, "node-name": "disk", "read-only": read_only, "discard": "unmap",
        "file": file,
    });
    // The NBD socket is the child's standard input.
    let server = "addr.type=fd,addr.str=0,max-connections=300";
    // The QMP monitor is the child's standard output.
    let (channel, monitor) = ("socket,id=monitor,fd=1,server=off", "chardev=monitor");
    let (disk, export) = (disk.to_string(), export(options).to_string());
    let words = ["--blockdev", &disk, "--nbd-server", server, "--export", &export];
    let words = words.into_iter().chain(["--chardev", channel, "--monitor", monitor]);
    words.map(str::to_owned).collect()
}

/// Returns the QMP description of the child's NBD export.
fn export(options: &HelperOptions) -> Value {
    let HelperOptions { name, read_only, .. } = options;
    json!({
        "type": "nbd", "id": "export", "node-name": "disk", "name": name, "writable": !read_only,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use manyring_nbd::{Address, NbdDisk, NbdOptions, Target};
    use std::io::{BufRead, BufReader, Write};
    use std::process::Stdio;

    fn options(folder: &Path) -> HelperOptions {
        HelperOptions {
            name: "vm1".to_owned(),
            folder: folder.to_owned(),
            format: "qcow2",
            image: "/srv/a \"b\",c.qcow2".into(),
            direct: true,
            read_only: false,
        }
    }

    #[test]
    fn what_a_name_holds_adds_no_option() {
        let arguments = arguments(&options(Path::new("/state")));
        let disk: Value = serde_json::from_str(&arguments[1]).unwrap();
        assert_eq!(disk["file"]["filename"], "/srv/a \"b\",c.qcow2");
        assert_eq!(disk["file"]["cache"]["direct"], true);
        assert_eq!(arguments.len(), 10, "{arguments:?}");
    }

    #[test]
    fn only_this_user_reaches_the_socket_and_only_its_last_name_is_removed() {
        let place = tempfile::tempdir().unwrap();
        let (folder, mode) = (place.path().join("helpers"), |path: &Path| {
            std::fs::metadata(path).unwrap().permissions().mode() & 0o777
        });
        let socket = folder.join("vm1.sock");
        // That of a process that was killed is still there.
        std::fs::create_dir(&folder).unwrap();
        drop(UnixListener::bind(&socket).unwrap());
        let (first, name) = listen(&folder, &socket).unwrap();
        assert_eq!((mode(&folder), mode(&socket)), (0o700, 0o600));
        // Nobody takes the name of one that listens, of this process or of another.
        let refused = listen(&folder, &socket).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::AddrInUse);
        assert!(HelperError::System { what: String::new(), source: refused }.is_held());
        UnixStream::connect(&socket).unwrap();
        drop(first);
        // The file stays, so that the next one has another number.
        std::fs::hard_link(&socket, folder.join("first")).unwrap();
        let (_second, last) = listen(&folder, &socket).unwrap();
        drop(name);
        assert!(socket.exists(), "the helper before the last one has removed the socket");
        drop(last);
        assert!(!socket.exists(), "the socket outlives its helper");
    }

    #[test]
    fn of_what_a_child_says_the_end_is_kept() {
        let mut command = Command::new("sh");
        let (stderr, writes) = byte_stream::pair(STDERR_SIZE).unwrap();
        command.args(["-c", "echo first >&2; sleep 0.1; echo last >&2"]).stderr(writes);
        let mut child = command.spawn().unwrap();
        // `command` has a copy of the other end, too.
        drop(command);
        let stderr = ByteStream::new(stderr, Arc::new(Janitor::of("vm1")));
        let said = hear(Arc::new(stderr)).unwrap().join().unwrap();
        child.wait().unwrap();
        assert_eq!(said.lines().last(), Some("last"));
    }

    /// The disk at this place, in this process.
    fn served(uri: &Uri) -> Result<Arc<dyn Disk>, JoinError> {
        Ok(Arc::new(NbdDisk::open(NbdOptions {
            name: "vm1".to_owned(),
            server: Arc::new(Address::of(uri)),
            target: Target::of(uri),
            read_only: false,
            reconnect: None,
            request_timeout: Duration::from_secs(1),
        })?))
    }

    /// A helper whose image has two megabytes, and whose child's answer to `block_resize` is lost.
    fn mute(folder: &Path) -> HelperDisk {
        let image = folder.join("disk.img");
        std::fs::File::create(&image).unwrap().set_len(2 << 20).unwrap();
        let (helpers, direct) = (folder.join("helpers"), false);
        let options = HelperOptions { image, direct, format: "raw", ..options(&helpers) };
        let (disk, ()) = HelperDisk::open(options, |uri| Ok((served(uri)?, ()))).unwrap();
        let (ours, mut relay) = UnixStream::pair().unwrap();
        let child = disk.helper.monitor.lock().replace(Monitor::new(ours)).unwrap().into_stream();
        let (said, mut commands) = (BufReader::new(child.try_clone().unwrap()), child);
        let mut asked = relay.try_clone().unwrap();
        let thread = || std::thread::Builder::new();
        thread().spawn(move || io::copy(&mut asked, &mut commands)).unwrap();
        let pass_on = move || {
            let mut answers = 0;
            for line in said.lines().map_while(Result::ok) {
                answers += usize::from(line.contains("\"return\""));
                if answers == 3 {
                    break;
                }
                relay.write_all(format!("{line}\n").as_bytes()).unwrap();
            }
            let _ = relay.shutdown(std::net::Shutdown::Write);
        };
        thread().spawn(pass_on).unwrap();
        disk
    }

    #[test]
    fn a_disk_that_was_cut_has_its_new_size_though_the_child_did_not_say_so() {
        if Command::new(PROGRAM).arg("--version").stdout(Stdio::null()).status().is_err() {
            println!("not tested: there is no {PROGRAM} here");
            return;
        }
        let place = tempfile::tempdir().unwrap();
        let disk = mute(place.path());
        assert_eq!(disk.resize(Some(1 << 20)).map(|told| told.size), Ok(1 << 20));
        // The NBD client takes that size too: else it would refuse each connection from now on.
        assert_eq!(disk.geometry().size, 1 << 20);
        // The next child has a monitor of its own.
        assert_eq!(disk.resize(Some(3 << 20)).map(|told| told.size), Ok(3 << 20));
    }
}
