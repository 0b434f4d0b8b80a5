//! A network namespace of a test's own, and its interfaces; for the tests of the daemon too.

use manyring_backend::net::tap::{QueueLength, TapError, TapOptions, TapSource};
use manyring_backend::sys::link::{InterfaceInfo, Links};
use rustix::fd::AsFd;
use rustix::thread::{UnshareFlags, move_into_link_name_space};
use std::fs::File;
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

/// Patience with the kernel.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(5);

/// Runs `test` on a thread in network and mount namespaces of its own, which end with it; so are
/// the programs that it starts.
pub(crate) fn in_own_space(test: impl FnOnce() + Send) {
    on_a_thread(|| {
        enter_own_space();
        test();
    });
}

/// Runs a test in namespaces that all such tests of this program share, so that each interface
/// needs a name of its own. Making and ending namespaces takes the host's network lock, and takes
/// long if other programs do so too.
#[allow(dead_code, reason = "not every test program shares one")]
pub(crate) fn in_shared_space(test: impl FnOnce() + Send) {
    static SPACE: OnceLock<[File; 2]> = OnceLock::new();
    let space = SPACE.get_or_init(|| {
        on_a_thread(|| {
            enter_own_space();
            ["net", "mnt"].map(|kind| File::open(format!("/proc/thread-self/ns/{kind}")).unwrap())
        })
    });
    on_a_thread(|| {
        // A thread that shares its folder with others cannot go elsewhere.
        unshare(UnshareFlags::FS);
        space.iter().for_each(|file| move_into_link_name_space(file.as_fd(), None).unwrap());
        test();
    });
}

fn on_a_thread<T: Send>(act: impl FnOnce() -> T + Send) -> T {
    let result = std::thread::scope(|scope| scope.spawn(act).join());
    result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

#[allow(deprecated, reason = "unsafe only where file descriptors are unshared, which are not")]
fn unshare(flags: UnshareFlags) {
    rustix::thread::unshare(flags).expect("these tests need root");
}

fn enter_own_space() {
    unshare(UnshareFlags::NEWNET | UnshareFlags::NEWNS);
    run("mount --make-rprivate /");
    // Interfaces of this namespace, not of the first.
    run("mount -t sysfs sysfs /sys");
    run("ip link set lo up");
}

/// Runs a command, words split at spaces, in the calling thread's namespaces.
pub(crate) fn run(command: &str) -> String {
    let words: Vec<_> = command.split(' ').collect();
    // There may be no /dev/null.
    let output = Command::new(words[0]).args(&words[1..]).stdin(Stdio::inherit()).output();
    let output = output.expect(command);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command}: {error}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The kernel's report of interface `name`; `None`: there is no such interface.
pub(crate) fn link(name: &str) -> Option<InterfaceInfo> {
    Links::open().unwrap().find(name).unwrap()
}

/// Queues of tap `name` that the host uses, and others that are open.
pub(crate) fn queues(name: &str) -> (u32, u32) {
    let tap = link(name).unwrap().tap.unwrap();
    (tap.attached, tap.detached)
}

/// Waits until there is no interface `name`. A command that another test starts has copies of all
/// file descriptors for a moment, which keep a tap alive.
pub(crate) fn wait_until_gone(name: &str) {
    for _ in 0..TIMEOUT.as_millis() {
        if link(name).is_none() {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("{name} is still there");
}

/// Opens an interface whose last user has just closed it. A command that another test starts has
/// copies of that user's file descriptors for a moment, and keeps the interface busy.
#[allow(dead_code, reason = "the daemon's tests open none")]
pub(crate) fn opened_again<T>(open: impl Fn() -> Result<T, TapError>) -> T {
    for _ in 0..TIMEOUT.as_millis() {
        match open() {
            Err(TapError::Busy(_)) => std::thread::sleep(Duration::from_millis(1)),
            other => return other.unwrap(),
        }
    }
    panic!("the interface stays busy");
}

/// A tap to create or join by name.
pub(crate) fn named(name: &str, queue_pairs: usize) -> TapOptions {
    let source = TapSource::Name { name: name.into(), must_exist: false };
    TapOptions {
        source,
        queue_pairs,
        sndbuf: None,
        txqueuelen: QueueLength::Host,
        merge: true,
        steer: true,
        mtu: None,
        bridge: None,
        up: Some(true),
    }
}
