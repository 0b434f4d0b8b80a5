//! Messages of the daemon to a service manager, and the sockets that it takes from it and leaves
//! with it: the manager is a socket of the test.

use crate::support::process::{Daemon, Running, TIMEOUT, end_of, is_root_or_left_out, wait_until};
use crate::support::program::{self, manyring};
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use rustix::process::Signal;
use std::io::{IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use tempfile::TempDir;

/// A service manager, as far as it listens.
struct Manager {
    socket: UnixDatagram,
    folder: TempDir,
}

impl Manager {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let socket = UnixDatagram::bind(folder.path().join("notify")).unwrap();
        socket.set_read_timeout(Some(TIMEOUT)).unwrap();
        Self { socket, folder }
    }

    /// The next message, and the descriptor that came with it. That descriptor is open in programs
    /// that the test starts, as the manager's are.
    fn hear(&self) -> (String, Option<OwnedFd>) {
        let mut bytes = [0; 4096];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut into = [IoSliceMut::new(&mut bytes)];
        let got = recvmsg(&self.socket, &mut into, &mut control, RecvFlags::empty()).unwrap();
        let mut descriptors = control.drain().flat_map(|message| match message {
            RecvAncillaryMessage::ScmRights(descriptors) => descriptors.collect::<Vec<_>>(),
            _ => Vec::new(),
        });
        let descriptor = descriptors.next();
        drop(descriptors);
        (String::from_utf8(bytes[..got.bytes].to_vec()).unwrap(), descriptor)
    }

    /// Passes messages over until one begins so.
    fn hears(&self, begins: &str) -> String {
        loop {
            let (text, _) = self.hear();
            if text.starts_with(begins) {
                return text;
            }
        }
    }

    /// The program as a service, with a configuration of two disks; `@` is the manager's folder.
    /// It is bash that starts it: other shells know no descriptors above 9.
    fn service(&self, how: &str) -> Command {
        let folder = self.folder.path().to_str().unwrap();
        let config = "[daemon]\ncontrol = '@/control'\n\
            [[blk]]\nname = 'a'\nsocket_path = '@/a'\nnull = '1G'\n\
            [[blk]]\nname = 'b'\nsocket_path = '@/b'\nnull = '1G'\n";
        let file = self.folder.path().join("manyring.toml");
        std::fs::write(&file, config.replace('@', folder)).unwrap();
        let mut command = Command::new("bash");
        command.arg("-c").arg(format!("{how} exec \"$0\" \"$@\""));
        command.arg(env!("CARGO_BIN_EXE_manyring")).arg("run").arg("--config").arg(file);
        command.env("NOTIFY_SOCKET", self.folder.path().join("notify"));
        command
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn start(&self, how: &str) -> Daemon {
        let control = self.path("control");
        Daemon::start(self.service(how), tempfile::tempdir().unwrap(), &[control])
    }
}

/// Asks for the features of a device; the answer comes when somebody serves its socket.
fn ask(socket: &Path) -> UnixStream {
    let mut front = UnixStream::connect(socket).unwrap();
    front.set_read_timeout(Some(TIMEOUT)).unwrap();
    front.write_all(&[1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]).unwrap();
    front
}

fn is_answered(front: &mut UnixStream) {
    let mut answer = [0; 20];
    front.read_exact(&mut answer).unwrap();
    assert_eq!(answer[..4], [1, 0, 0, 0]);
}

/// Lines of sh that give descriptors to a program as a service manager does.
fn handing_in(sockets: &[(String, OwnedFd)]) -> String {
    let mut lines = String::new();
    for (index, (_, socket)) in sockets.iter().enumerate() {
        lines += &format!("exec {}<&{}; ", 3 + index, socket.as_raw_fd());
    }
    let names: Vec<_> = sockets.iter().map(|(name, _)| name.as_str()).collect();
    let count = sockets.len();
    lines + &format!("LISTEN_PID=$$ LISTEN_FDS={count} LISTEN_FDNAMES={} ", names.join(":"))
}

/// Copies of the descriptors with numbers from 20 on: 3 to 9 are free for those handed in.
fn out_of_the_way(sockets: Vec<(String, OwnedFd)>) -> Vec<(String, OwnedFd)> {
    let far = |(name, socket): (String, OwnedFd)| {
        let copy = rustix::io::fcntl_dupfd_cloexec(&socket, 20).unwrap();
        rustix::io::fcntl_setfd(&copy, rustix::io::FdFlags::empty()).unwrap();
        (name, copy)
    };
    sockets.into_iter().map(far).collect()
}

#[test]
fn manager_hears_when_all_sockets_listen_of_each_reload_and_of_the_end() {
    let manager = Manager::new();
    let daemon = manager.start("");
    assert_eq!(manager.hear().0, "READY=1\nSTATUS=serving 2 devices\n");
    assert!(manager.path("a").exists() && manager.path("b").exists());
    daemon.send(Signal::HUP);
    assert!(manager.hear().0.starts_with("RELOADING=1\nMONOTONIC_USEC="));
    assert_eq!(manager.hear().0, "READY=1\nSTATUS=serving 2 devices\n");
    std::fs::write(manager.path("manyring.toml"), "[[blk]]\nname = 1\n").unwrap();
    daemon.send(Signal::HUP);
    manager.hears("RELOADING=1");
    assert!(manager.hear().0.starts_with("READY=1\nSTATUS=reloading the configuration failed: "));
    assert!(daemon.terminate().success());
    assert_eq!(manager.hear().0, "STOPPING=1\nSTATUS=stopping\n");
    // It keeps no sockets for us: their names go with us.
    assert!(!manager.path("a").exists() && !manager.path("control").exists());
}

#[test]
fn clients_that_come_between_two_daemons_are_served_by_the_next_one() {
    let manager = Manager::new();
    let mut daemon = manager.start("FDSTORE=10");
    let mut kept = Vec::new();
    while kept.len() < 3 {
        let (text, socket) = manager.hear();
        if let Some(name) = text.strip_prefix("FDSTORE=1\nFDNAME=") {
            kept.push((name.trim_end().to_owned(), socket.unwrap()));
        }
    }
    kept = out_of_the_way(kept);
    manager.hears("READY=1");
    let (status, _) = daemon.stop();
    assert!(status.success(), "{}", daemon.log());
    // Nobody runs, and nobody is refused.
    let mut early = [ask(&manager.path("a")), ask(&manager.path("b"))];
    let told = format!("{}FDSTORE=10 ", handing_in(&kept));
    let daemon = manager.start(&told);
    early.iter_mut().for_each(is_answered);
    drop(early);
    assert!(wait_until(|| daemon.log().contains("took over 3 sockets")), "{}", daemon.log());
    // A daemon that was killed leaves its clients to the next one too; and a device that is not in
    // the configuration any more leaves the manager nothing to keep.
    daemon.send(Signal::KILL);
    drop(daemon);
    let mut early = ask(&manager.path("a"));
    while manager.hear().0 != "STOPPING=1\nSTATUS=stopping\n" {}
    let told = told.replace("c.control.", "c.other.");
    let daemon = manager.start(&format!("rm {}; {told}", manager.path("control").display()));
    is_answered(&mut early);
    assert!(manager.hears("FDSTOREREMOVE=1").contains("FDNAME=c.other."));
    assert!(daemon.terminate().success());
}

/// The device left the configuration while no daemon ran.
#[test]
fn the_socket_of_a_device_that_is_not_configured_any_more_is_closed_and_its_name_removed() {
    if !is_root_or_left_out() {
        return;
    }
    let manager = Manager::new();
    let bind = |name: &str| OwnedFd::from(UnixListener::bind(manager.path(name)).unwrap());
    // One was bound by another name, as a daemon does it, and one by the manager, for somebody.
    let (gone, others) = (bind("own"), bind("others"));
    std::fs::rename(manager.path("own"), manager.path("gone")).unwrap();
    let found = std::fs::symlink_metadata(manager.path("gone")).unwrap();
    let name = format!("s.gone.{:x}-{:x}", found.dev(), found.ino());
    // This one was replaced meanwhile.
    let replaced = (name.replace("gone", "replaced"), bind("replaced"));
    let kept = out_of_the_way(vec![(name, gone), ("x".into(), others), replaced]);
    let daemon = manager.start(&handing_in(&kept));
    manager.hears("READY=1");
    assert!(!manager.path("gone").exists(), "{}", daemon.log());
    assert!(manager.path("others").exists() && manager.path("replaced").exists());
    assert!(daemon.terminate().success());
}

#[test]
fn sockets_that_are_handed_in_serve_the_device_of_their_name_or_of_their_path() {
    let manager = Manager::new();
    let elsewhere = manager.path("elsewhere");
    let (named, bound) = (UnixListener::bind(&elsewhere), UnixListener::bind(manager.path("b")));
    let of = |name: &str, socket: UnixListener| (name.to_owned(), OwnedFd::from(socket));
    let sockets = vec![of("a", named.unwrap()), of("", bound.unwrap())];
    let sockets = out_of_the_way(sockets);
    let mut early = [ask(&elsewhere), ask(&manager.path("b"))];
    let daemon = manager.start(&handing_in(&sockets));
    early.iter_mut().for_each(is_answered);
    drop(sockets);
    assert!(daemon.terminate().success());
    // Their names are the manager's.
    assert!(elsewhere.exists() && manager.path("b").exists());
}

#[test]
fn lines_for_the_journal_have_priorities_and_no_time() {
    let manager = Manager::new();
    let said = |journal: &str| {
        // Standard error is a socket. JOURNAL_STREAM has its numbers unless `journal` has others.
        let (ours, theirs) = UnixStream::pair().unwrap();
        let found = rustix::fs::fstat(&theirs).unwrap();
        let stream = format!("{}:{}", found.st_dev, found.st_ino);
        let mut command = manager.service("");
        command.env("JOURNAL_STREAM", if journal.is_empty() { &stream } else { journal });
        let mut child = Running::start(command.stderr(OwnedFd::from(theirs)).stdin(Stdio::null()));
        drop(command);
        manager.hears("READY=1");
        let process = rustix::process::Pid::from_child(&child);
        rustix::process::kill_process(process, Signal::TERM).unwrap();
        assert!(end_of(&mut child).success());
        let mut text = String::new();
        (&ours).read_to_string(&mut text).unwrap();
        text
    };
    let text = said("");
    assert!(text.lines().all(|line| line.starts_with("<6> INFO ")), "{text}");
    assert!(text.contains("listening device=\"a\""), "{text}");
    // A stream that is not the journal's has times.
    let text = said("1:2");
    assert!(text.lines().all(|line| line.starts_with("20")), "{text}");
    // So have errors that end the program.
    let (ours, theirs) = UnixStream::pair().unwrap();
    let found = rustix::fs::fstat(&theirs).unwrap();
    let mut command = manyring();
    command.args(["run", "--config", "/no/such/file"]).stderr(OwnedFd::from(theirs));
    command.env("JOURNAL_STREAM", format!("{}:{}", found.st_dev, found.st_ino));
    assert!(!command.status().unwrap().success());
    drop(command);
    let mut text = String::new();
    (&ours).read_to_string(&mut text).unwrap();
    assert!(text.starts_with("<3>manyring: "), "{text}");
}

#[test]
fn manager_that_does_not_read_holds_nobody_up() {
    let manager = Manager::new();
    let filler = UnixDatagram::unbound().unwrap();
    filler.connect(manager.path("notify")).unwrap();
    filler.set_nonblocking(true).unwrap();
    while filler.send(b"STATUS=full").is_ok() {}
    let daemon = manager.start("FDSTORE=10 WATCHDOG_USEC=4000");
    let devices = program::shown(&manager.path("control"), "/v1/devices");
    assert_eq!(devices["devices"].as_array().unwrap().len(), 2, "{devices}");
    is_answered(&mut ask(&manager.path("a")));
    assert!(daemon.terminate().success());
}

/// A number of the manager's message that begins so.
fn number(text: &str, begins: &str) -> i32 {
    text.strip_prefix(begins).and_then(|number| number.trim_end().parse().ok()).unwrap()
}

#[test]
fn at_sigusr2_the_next_process_takes_over_and_the_manager_hears_it_after_this_one() {
    let manager = Manager::new();
    let mut command = manager.service("FDSTORE=10");
    let file = manager.path("manyring.toml");
    let config = std::fs::read_to_string(&file).unwrap();
    let apart = config.replacen("[daemon]\n", "[daemon]\ndomains = 'device'\n", 1);
    std::fs::write(&file, &apart).unwrap();
    let sockets = [manager.path("control"), manager.path("a")];
    command.env("WATCHDOG_USEC", "60000000");
    let mut daemon = Daemon::start(command, tempfile::tempdir().unwrap(), &sockets);
    manager.hears("READY=1");
    let mut front = ask(&manager.path("a"));
    is_answered(&mut front);
    // The manager would end a process that this one has not started.
    let mut other = manyring();
    other.arg("run").arg("--config").arg(&file);
    let other = other.arg("--takeover").arg(manager.path("control")).output().unwrap();
    assert!(!other.status.success());
    assert!(wait_until(|| daemon.log().contains("SIGUSR2")), "{}", daemon.log());
    daemon.send(Signal::USR2);
    // Nothing of the next one comes before the manager knows it.
    let main = manager.hear().0;
    let next = number(&main, "MAINPID=");
    assert_ne!(next, i32::try_from(daemon.pid()).unwrap());
    assert!(manager.hear().0.starts_with("FDSTORE=1"));
    assert_eq!(manager.hears("READY=1"), "READY=1\nSTATUS=serving 2 devices\n");
    assert!(daemon.wait().success(), "{}", daemon.log());
    // The connection is the same, and the process another one.
    front.write_all(&[1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]).unwrap();
    is_answered(&mut front);
    let next = rustix::process::Pid::from_raw(next).unwrap();
    rustix::process::kill_process(next, Signal::TERM).unwrap();
    manager.hears("STOPPING=1");
}

#[test]
fn a_next_process_that_cannot_take_over_is_told_to_the_manager_and_the_daemon_goes_on() {
    let manager = Manager::new();
    let command = manager.service("");
    let file = manager.path("manyring.toml");
    let config = std::fs::read_to_string(&file).unwrap();
    let one = config.replacen("[daemon]\n", "[daemon]\ndomains = 'one'\n", 1);
    std::fs::write(&file, one).unwrap();
    let control = [manager.path("control")];
    let daemon = Daemon::start(command, tempfile::tempdir().unwrap(), &control);
    manager.hears("READY=1");
    daemon.send(Signal::USR2);
    // Its devices are served by no device process.
    let said = manager.hear().0;
    assert!(said.starts_with("STATUS=takeover failed: process "), "{said}");
    assert!(said.ends_with(": exit status: 1\n"), "{said}");
    assert!(daemon.log().contains("not served by a device process"), "{}", daemon.log());
    is_answered(&mut ask(&manager.path("a")));
    assert!(daemon.terminate().success());
}
