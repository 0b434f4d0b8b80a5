//! `Measuring`: asks an NBD server for the size and flags of an export. The supervisor connects,
//! but parses no byte of the server: it starts a process with the rights of a device process and
//! hands it the socket. The process negotiates with the server, reports the export, and is killed.
//!
//! The process reads what a hostile server may send, so it counts as compromised. It may send two
//! reports: that it is ready, and its answer. After any other report, or an unexpected descriptor,
//! the supervisor kills it. A janitor thread closes the descriptors that the process sent, since it
//! can make a close take long. The next process of the same disk starts when these are closed and
//! this process has ended.

use super::spawner::{self, Spawned};
use super::stderr_relay::StderrRelay;
use manyring_engine::{Janitor, aside};
use manyring_nbd::Connected;
use manyring_protocol::message::{self, Command, Report};
use manyring_protocol::nbd::{ExportSpec, NbdFailure, NbdFound, NbdTarget};
use manyring_serve::assemble::nbd_host::Measurer;
use manyring_serve::byte_stream::ByteStream;
use manyring_serve::channel::{Channel, watched};
use manyring_serve::credentials;
use manyring_serve::reaper::reap;
use manyring_serve::times::{NBD_CONNECT, NBD_MEASURE, PROCESS_END};
use rustix::fd::OwnedFd;
use rustix::process::{Signal, pidfd_send_signal};
use std::collections::HashMap;
use std::ffi::OsString;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::io::Interest;
use tokio::runtime::Handle;
use tokio::time::timeout;

/// The most disks whose state is kept after their measurement.
const DISKS_MAX: usize = 4096;

/// Starts a process for each measurement.
#[derive(Debug)]
pub(crate) struct Measuring {
    /// The options of the process.
    arguments: Arc<[OsString]>,
    runtime: Handle,
    disks: Mutex<HashMap<String, Arc<Measured>>>,
}

/// The state that all measuring processes of a disk share, one after another.
#[derive(Debug)]
struct Measured {
    /// The name of each measuring process of the disk: `measure:DEVICE`.
    name: String,
    /// Closes the descriptors that the processes have sent.
    janitor: Arc<Janitor>,
    /// Bounds how much these processes log, together.
    stderr_relay: Arc<StderrRelay>,
    /// Held from the start of a process to its end.
    turn: tokio::sync::Mutex<()>,
}

impl Measured {
    fn of(device: &str) -> Self {
        let name = format!("measure:{device}");
        let (janitor, stderr_relay) = (Arc::new(Janitor::of(&name)), StderrRelay::new());
        Self { name, janitor, stderr_relay, turn: tokio::sync::Mutex::default() }
    }
}

impl Measuring {
    /// Must be called in a tokio runtime, whose tasks will serve the measuring processes.
    pub(crate) fn new(arguments: Vec<OsString>) -> Self {
        let disks = Mutex::default();
        Self { arguments: arguments.into(), runtime: Handle::current(), disks }
    }

    fn disk(&self, device: &str) -> Arc<Measured> {
        let mut disks = self.disks.lock().unwrap_or_else(PoisonError::into_inner);
        if disks.len() >= DISKS_MAX {
            disks.retain(|_, disk| Arc::strong_count(disk) > 1);
        }
        let disk = disks.entry(device.to_owned());
        disk.or_insert_with(|| Arc::new(Measured::of(device))).clone()
    }
}

impl Measurer for Measuring {
    fn measure(
        &self,
        device: &str,
        connected: Connected,
        target: NbdTarget,
    ) -> Result<ExportSpec, NbdFailure> {
        let (tells, told) = sync_channel(1);
        let fds = credentials::given(connected).map_err(|errno| failed(errno.to_string()))?;
        let (arguments, disk) = (self.arguments.clone(), self.disk(device));
        self.runtime.spawn(async move {
            let found = disk.found(arguments, target, fds, |found| drop(tells.send(found)));
            found.await;
        });
        // `recv` fails if the runtime ends, which drops the task.
        match told.recv() {
            Ok(Ok(NbdFound::Export(export))) => Ok(export),
            Ok(Ok(NbdFound::Failed(failure))) => Err(failure),
            Ok(Err(problem)) => Err(failed(problem)),
            Err(_) => Err(failed("internal error".to_owned())),
        }
    }
}

/// Makes the error for a failure of this host, not of the server.
fn failed(problem: String) -> NbdFailure {
    let text = format!("was not asked for its export: {problem}");
    NbdFailure { text, is_limit: false, passes: true }
}

impl Measured {
    /// Starts a process, passes its answer to `tell`, kills the process, and returns when it has
    /// ended.
    async fn found(
        &self,
        arguments: Arc<[OsString]>,
        target: NbdTarget,
        fds: Vec<OwnedFd>,
        tell: impl FnOnce(Result<NbdFound, String>),
    ) {
        let free = timeout(NBD_MEASURE, async {
            let turn = self.turn.lock().await;
            self.janitor.idle().await;
            turn
        });
        let Ok(_turn) = free.await else {
            return tell(Err("the process that asked before has not ended".to_owned()));
        };
        match spawner::spawned(arguments).await {
            Ok(spawned) => self.attend(spawned, target, fds, tell).await,
            Err(error) => tell(Err(error.to_string())),
        }
    }

    async fn attend(
        &self,
        Spawned { child, socket, pidfd, stderr }: Spawned,
        target: NbdTarget,
        fds: Vec<OwnedFd>,
        tell: impl FnOnce(Result<NbdFound, String>),
    ) {
        let stderr = ByteStream::new(stderr, self.janitor.clone());
        let relay = self.stderr_relay.follow(stderr, self.name.clone());
        let channel = Channel::new(socket, self.janitor.clone());
        let found = match &channel {
            Ok(channel) => {
                let answered = timeout(NBD_MEASURE, answer(channel, target, fds)).await;
                answered.unwrap_or_else(|_| Err("no answer in time".to_owned()))
            }
            Err(error) => Err(error.to_string()),
        };
        let _ = pidfd_send_signal(&pidfd, Signal::KILL);
        // The kernel closes the descriptors of unread messages with the socket.
        if let Ok(channel) = channel {
            self.janitor.dispose(channel.into_socket());
        }
        // The caller does not wait for the end of the process, which may take the kernel long.
        tell(found);
        let ended = watched(pidfd, Interest::READABLE);
        if let Ok(ended) = &ended
            && timeout(PROCESS_END, ended.readable()).await.is_err()
        {
            let (process, pid) = (&self.name, child.id());
            tracing::error!(
                process,
                pid,
                "the process was killed, but the kernel has not ended it; its disk waits until then"
            );
            let _ = ended.readable().await;
        }
        reap(child);
        relay.end().await;
    }
}

async fn answer(
    channel: &Channel,
    target: NbdTarget,
    fds: Vec<OwnedFd>,
) -> Result<NbdFound, String> {
    let limit_ms = u32::try_from(NBD_CONNECT.as_millis()).unwrap_or(u32::MAX);
    let command = message::emit(&Command::Export { target, limit_ms });
    let command = command.map_err(|error| error.to_string())?;
    let sent = channel.send(&command, &fds).await.map_err(|error| error.to_string());
    // This may be the last copy of the socket by now, and to close the last one may block.
    aside(move || drop(fds)).await;
    sent?;
    let mut is_ready = false;
    loop {
        let came = channel.receive().await.map_err(|error| error.to_string())?;
        let (bytes, fds) = came.ok_or("the device process has ended")?;
        match message::parse(&bytes).map_err(|error| error.to_string())? {
            // `Ready` carries a descriptor of the process's /proc/self/stat, which is not needed
            // here.
            Report::Ready {} if !is_ready && fds.len() <= 1 => is_ready = true,
            Report::Export { found } if fds.is_empty() => return Ok(found),
            _ => return Err("the device process sent an unexpected message".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use manyring_serve::byte_stream;
    use manyring_serve::channel::pair;
    use rustix::process::{Pid, PidfdFlags, pidfd_open};
    use std::io::ErrorKind::WouldBlock;
    use std::io::Read;
    use std::os::unix::net::UnixStream;
    use std::process::Command as Program;
    use std::sync::mpsc::{Receiver, channel};

    const EXPORT: NbdFound = NbdFound::Export(ExportSpec {
        size: 1 << 20,
        flags: 1,
        block_min: 1,
        block_preferred: 4096,
        block_max: 1 << 20,
        structured: true,
    });

    /// What is found by a process that sends these reports, each with so many descriptors. `last`:
    /// a descriptor of a message that nobody reads.
    async fn found(
        disk: &Measured,
        reports: &[(Report, usize)],
        last: Option<OwnedFd>,
    ) -> Result<NbdFound, String> {
        let (socket, theirs) = pair().unwrap();
        let theirs = Channel::new(theirs, Arc::new(Janitor::of("test"))).unwrap();
        let (stderr, writes) = byte_stream::pair(4096).unwrap();
        let child = Program::new("sleep").arg("600").stderr(writes).spawn().unwrap();
        let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::NONBLOCK).unwrap();
        for (report, fds) in reports {
            let fds: Vec<_> = (0..*fds).map(|_| pidfd.try_clone().unwrap()).collect();
            theirs.send(&message::emit(report).unwrap(), &fds).await.unwrap();
        }
        if let Some(fd) = last {
            theirs.send(b"last", &[fd]).await.unwrap();
        }
        let (target, mut told) = (NbdTarget { export: "a".to_owned(), tls: None }, None);
        let spawned = Spawned { child, socket, pidfd, stderr };
        disk.attend(spawned, target, Vec::new(), |found| told = Some(found)).await;
        told.unwrap()
    }

    fn run(test: impl Future<Output = ()>) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(test);
    }

    #[test]
    fn a_process_that_says_more_than_its_answer_is_not_believed() {
        run(async {
            let disk = Measured::of("a");
            let (ready, answer) = (|| Report::Ready {}, || Report::Export { found: EXPORT });
            for reports in [vec![(ready(), 1), (answer(), 0)], vec![(answer(), 0)]] {
                assert_eq!(found(&disk, &reports, None).await, Ok(EXPORT), "{reports:?}");
            }
            for reports in [
                vec![(ready(), 2), (answer(), 0)],
                vec![(ready(), 1), (ready(), 0), (answer(), 0)],
                vec![(answer(), 1)],
                vec![(Report::Quiesced {}, 0), (answer(), 0)],
            ] {
                let refused = found(&disk, &reports, None).await;
                assert_eq!(
                    refused,
                    Err("the device process sent an unexpected message".to_owned())
                );
            }
        });
    }

    /// Holds the janitor until the sender is dropped.
    struct Held(Receiver<()>);

    impl Drop for Held {
        fn drop(&mut self) {
            let _ = self.0.recv();
        }
    }

    #[test]
    fn what_a_process_leaves_unread_is_closed_on_no_thread_of_the_runtime() {
        run(async {
            let (disk, (fd, mut peer)) = (Measured::of("a"), UnixStream::pair().unwrap());
            let (release, held) = channel();
            disk.janitor.dispose(Held(held));
            let refused = found(&disk, &[(Report::Quiesced {}, 0)], Some(fd.into())).await;
            assert!(refused.is_err());
            peer.set_nonblocking(true).unwrap();
            let is_open = peer.read(&mut [0]).is_err_and(|error| error.kind() == WouldBlock);
            assert!(is_open, "the runtime's thread has closed it");
            drop(release);
            disk.janitor.idle().await;
            assert_eq!(peer.read(&mut [0]).unwrap(), 0);
        });
    }
}
