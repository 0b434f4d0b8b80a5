//! `domains = "user"`: who connects decides which process serves, and a key overrules. Needs root.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where it fails")]
#![allow(clippy::disallowed_methods, reason = "a guest of a test has a thread of its own")]

mod domain;
mod foreign;
mod process;
mod program;

use domain::{disk, pid, room, serve};
use manyring_driver::{BlkDriver, BlkOptions};
use process::{Daemon, wait_until};
use rustix::process::Uid;
use std::os::unix::fs::PermissionsExt;

const NOBODY: u32 = 65534;

/// A connection of this user: the kernel notes who connects, of each thread.
fn connect_as(daemon: &Daemon, name: &str, uid: u32) -> BlkDriver {
    let socket = daemon.socket_of(name);
    let connect = move || {
        let user = Uid::from_raw(uid);
        rustix::thread::set_thread_res_uid(user, user, user).unwrap();
        let options = BlkOptions { queues: 1, ..BlkOptions::default() };
        BlkDriver::connect(&socket, &options).unwrap()
    };
    std::thread::spawn(connect).join().unwrap()
}

fn start(devices: &[String]) -> Daemon {
    let daemon = serve("domains = 'user'", &devices.concat(), &["a", "b", "c"]);
    std::fs::set_permissions(daemon.folder(), PermissionsExt::from_mode(0o755)).unwrap();
    daemon
}

#[test]
fn a_device_is_served_for_the_user_who_connects_and_moves_when_he_has_left() {
    let open = "socket_mode = '0666'\n";
    let daemon = start(&[
        disk("a", &format!("file = '@/a.img'\n{open}")),
        disk("b", &format!("memory = '1M'\n{open}")),
        disk("c", &format!("memory = '1M'\ndomain = 'mine'\n{open}")),
    ]);
    let mut roots = connect_as(&daemon, "a", 0);
    roots.queues[0].write(0, &[7; 512]).unwrap();
    let mut others = connect_as(&daemon, "b", NOBODY);
    others.queues[0].write(0, &[8; 512]).unwrap();
    let own = connect_as(&daemon, "c", NOBODY);
    let devices = |name: &str| room(&daemon, name)["devices"].clone();
    assert_eq!(devices("user:0"), serde_json::json!(["a"]));
    assert_eq!(devices("user:65534"), serde_json::json!(["b"]));
    assert_eq!(devices("mine"), serde_json::json!(["c"]));
    assert!(pid(&daemon, "user:0") != pid(&daemon, "user:65534"));
    // One at a time: the other user waits until the first one has left, then has the same disk.
    std::thread::scope(|scope| {
        let next = scope.spawn(|| connect_as(&daemon, "a", NOBODY));
        roots.queues[0].write(512 / 512, &[9; 512]).unwrap();
        assert!(!next.is_finished());
        drop(roots);
        let mut driver = next.join().unwrap();
        let mut bytes = [0; 1024];
        driver.queues[0].read(0, &mut bytes).unwrap();
        assert_eq!((bytes[0], bytes[1023]), (7, 9));
        assert_eq!(devices("user:0"), serde_json::json!([]));
        // Whatever the first room says: its end alone takes away what it was given.
        assert_eq!(room(&daemon, "user:0")["state"], "ended");
        assert_eq!(devices("user:65534"), serde_json::json!(["a", "b"]));
        let written = || domain::counted(&daemon, "a", "writes") == 2;
        assert!(wait_until(written), "what the first room counted is kept");
    });
    drop((others, own));
    // A disk in memory keeps its bytes when it moves.
    let mut bytes = [0; 512];
    connect_as(&daemon, "b", 0).queues[0].read(0, &mut bytes).unwrap();
    assert_eq!(bytes, [8; 512]);
    assert!(daemon.terminate().success());
}
