//! No thread is to be had for a while: what needs one waits for it, and the daemon lives. Needs
//! root, to start the daemon as a user whose threads are counted.

use crate::support::process::{Daemon, wait_until};
use crate::support::program::shown;
use manyring_driver::{BlkDriver, BlkDriverOptions, DriverOp};
use rustix::process::{Resource, getrlimit};
use std::process::Command;

const CONFIG: &str = "[daemon]\ncontrol = '@/control'\ndomains = 'DOMAINS'\n\
    [[blk]]\nname = 'disk'\nsocket_path = '@/disk'\nmemory = '16M'\n";
/// Who starts the daemon, and sets its limits: a user that has no other processes.
const USER: &str = "--reuid=64321 --regid=64321 --clear-groups";

fn daemon(domains: &str) -> Daemon {
    let config = CONFIG.replace("DOMAINS", domains);
    Daemon::run_behind(&format!("exec setpriv {USER}"), &config, &["disk", "control"])
}

/// Lets the daemon's user have at most `threads` threads; `None`: up to the hard limit.
fn limit(daemon: &Daemon, threads: Option<u64>) {
    let most = getrlimit(Resource::Nproc).maximum;
    let threads = threads.or(most).map_or("unlimited".to_owned(), |n| n.to_string());
    let limits = format!("--nproc={threads}:");
    let pid = daemon.pid().to_string();
    let mut command = Command::new("setpriv");
    command.args(USER.split(' ')).args(["prlimit", "--pid", &pid, &limits]);
    assert!(command.status().unwrap().success(), "{command:?}");
}

#[test]
fn a_daemon_that_gets_no_thread_answers_when_it_gets_one() {
    // Without device processes: the session's janitor is one of this process.
    let mut daemon = daemon("one");
    limit(&daemon, Some(1));
    let control = daemon.socket_of("control");
    let disk = daemon.socket_of("disk");
    std::thread::scope(|scope| {
        let asked = scope.spawn(|| shown(&control, "/v1/devices"));
        let guest = scope.spawn(|| {
            let mut guest = BlkDriver::connect(&disk, &BlkDriverOptions::default()).unwrap();
            guest.queues[0].run(DriverOp::Flush).unwrap();
        });
        let says = |line: &str| daemon.log().contains(line);
        let line = "no thread available for the file descriptors of a front-end; its session \
                    waits device=\"disk\"";
        assert!(wait_until(|| says(line)), "{}", daemon.log());
        assert!(wait_until(|| daemon.log().contains("front-end connected")), "{}", daemon.log());
        // The janitor has been asked, and looks again on its own.
        std::thread::sleep(std::time::Duration::from_millis(500));
        assert!(!asked.is_finished() && !guest.is_finished());
        limit(&daemon, None);
        assert!(asked.join().is_ok() && guest.join().is_ok(), "{}", daemon.log());
    });
    assert!(daemon.stop().0.success());
}

#[test]
fn a_daemon_that_gets_no_thread_ends_when_it_is_told_to() {
    for (domains, is_used) in [("one", false), ("user", false), ("user", true)] {
        let mut daemon = daemon(domains);
        let connect =
            || BlkDriver::connect(&daemon.socket_of("disk"), &BlkDriverOptions::default());
        let guest = is_used.then(|| connect().unwrap());
        limit(&daemon, Some(1));
        let (status, took) = daemon.stop();
        assert!(status.success(), "{domains}, {is_used}: {status}: {}", daemon.log());
        assert!(took < std::time::Duration::from_secs(30), "{domains}, {is_used}: {took:?}");
        drop(guest);
    }
}
