//! Few file descriptors, few threads: a disk that finds none is refused with the reason, or waits.

use crate::between::Between;
use crate::processes;
use crate::successors::killed;
use crate::support::process::{Daemon, wait_until};
use crate::support::program::program_for_all;
use crate::takeover::finish;
use crate::world::{World, XVDA, connect, is_alone, options};
use manyring_driver::{Blkfront, XenDisk};
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, prlimit};
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

/// Lets the daemon have `more` file descriptors than it has now; `None`: up to the hard limit.
fn limit(daemon: &Daemon, more: Option<usize>) {
    limit_to(daemon, more.map(|more| daemon.holdings().fds + more));
}

/// Lets the daemon have this many file descriptors; `None`: up to the hard limit.
fn limit_to(daemon: &Daemon, fds: Option<usize>) {
    let pid = Pid::from_raw(i32::try_from(daemon.pid()).unwrap());
    let maximum = getrlimit(Resource::Nofile).maximum;
    let current = fds.map_or(maximum, |fds| Some(fds as u64));
    prlimit(pid, Resource::Nofile, Rlimit { current, maximum }).unwrap();
}

#[test]
fn disk_that_finds_no_file_descriptors_is_refused_with_the_reason_and_can_come_back() {
    let mut world = World::new();
    let daemon = world.daemon(&["--num-queues", "4"]);
    let (_, _, mut front) = world.guest(3, "kept", 2);
    let image = world.image("disk");
    // The daemon may have one file descriptor more each time, until it can serve the disk.
    for more in 0_u16.. {
        let domain = world.domain(100 + more);
        limit(&daemon, Some(more.into()));
        let disk = world.announce(100 + more, XVDA, &image);
        // The front-end of a disk that is refused waits for the back-end for ever.
        let folder = disk.folder();
        std::thread::spawn(move || Blkfront::connect(&domain, &folder, &options(4)));
        let (mut state, node) = (Vec::new(), format!("{}/state", disk.back()));
        assert!(wait_until(|| {
            state = world.toolstack.read(&node).unwrap().unwrap();
            state == b"4" || state == b"6"
        }));
        let (is_served, error) = (state == b"4", world.error_of(&disk));
        assert!(is_served || error.contains("Too many open files"), "{more} more: {error:?}");
        front.queues[0].write(0, &[1; 512]).unwrap();
        limit(&daemon, None);
        disk.remove(&mut world.toolstack).unwrap();
        assert!(wait_until(|| is_alone(&world)));
        let domain = world.domain(200 + more);
        let disk = world.announce(200 + more, XVDA, &image);
        connect(&domain, &disk, 4).queues[3].write(0, &[1; 512]).unwrap();
        disk.remove(&mut world.toolstack).unwrap();
        assert!(wait_until(|| is_alone(&world)));
        if is_served {
            break;
        }
    }
}

#[test]
fn guest_whose_next_daemon_finds_no_file_descriptors_waits_for_them() {
    let mut held = None;
    // The first daemon may have what it needs: no other holds more in the end. Then there is one
    // file descriptor more each time, until the daemon can serve the disk.
    for more in std::iter::once(None).chain((0..).map(Some)) {
        let mut world = World::new();
        let (mut front, _) = killed(&mut world, &options(2));
        let mut between = Between::new(&world, "between");
        // The process that waits to become a device process holds descriptors too, once it is
        // there.
        let daemon = world.run(
            "[daemon]\ncontrol = '@/control'\ndomains = 'one'\n[[xen_blk]]\n\
             kinds = ['vbd']\nnum_queues = 2\nsimulated = '@/between'\nstate_dir = '@/state'\n",
        );
        let xenstored = between.accept();
        limit(&daemon, more);
        between.hand_on(xenstored);
        let says = |words| daemon.log().contains(words);
        assert!(wait_until(|| says("retrying") || says("took a ring over") || says("closed")));
        let waits = says("retrying");
        assert!(!waits || says("Too many open files"), "{more:?} more: {}", daemon.log());
        limit(&daemon, None);
        finish(&mut front, 1);
        assert!(!says("device closed"), "{more:?} more: {}", daemon.log());
        // Descriptors that were opened for a start that then failed are closed again.
        let fds = *held.get_or_insert(daemon.holdings().fds);
        assert!(wait_until(|| daemon.holdings().fds <= fds), "{:?}, not {fds}", daemon.holdings());
        if more.is_some() && !waits {
            break;
        }
    }
}

#[test]
fn disk_in_memory_keeps_its_bytes_while_its_next_device_process_finds_no_file_descriptors() {
    /// A device process that dies gives back fewer file descriptors than this.
    const FEWER: usize = 24;
    let mut waited = 0;
    for more in 0..FEWER {
        let mut world = World::new();
        let daemon = processes::serve(&world, "device");
        let domain = world.domain(7);
        let mut front = processes::in_memory(&mut world, &domain);
        let killed = processes::pid(&world, "xen:xen:7");
        limit_to(&daemon, Some(daemon.holdings().fds - FEWER + more));
        kill_process(killed, Signal::KILL).unwrap();
        let says = |words| daemon.log().contains(words);
        let is_tried = || {
            let could_not =
                ["retrying", "starting the device process failed", "in its device process failed"];
            could_not.into_iter().any(says) || says("took a ring over")
        };
        assert!(wait_until(is_tried), "{more}: {}", daemon.log());
        waited += u32::from(says("retrying"));
        limit(&daemon, None);
        processes::has_bytes(&mut front);
        assert!(daemon.terminate().success());
    }
    assert!(waited > 0, "nothing was tried");
}

/// Who starts the daemon whose threads are counted: a user that has no other processes.
const USER: &str = "--reuid=64322 --regid=64322 --clear-groups";
const UID: u32 = 64322;

/// Lets that daemon's user have at most `threads` threads; `None`: up to the hard limit.
fn limit_threads(daemon: &Daemon, threads: Option<u64>) {
    let most = threads.or(getrlimit(Resource::Nproc).maximum);
    let most = most.map_or("unlimited".to_owned(), |most| most.to_string());
    let (pid, limits) = (daemon.pid().to_string(), format!("--nproc={most}:"));
    let mut command = Command::new("setpriv");
    command.args(USER.split(' ')).args(["prlimit", "--pid", &pid, &limits]);
    assert!(command.status().unwrap().success(), "{command:?}");
}

/// Needs root, to start the daemon as another user.
#[test]
fn disk_that_finds_no_thread_waits_for_one_and_its_neighbour_goes_on() {
    let mut world = World::new();
    let image = world.image("disk");
    let (control, state) = (world.path("control"), world.path("state"));
    std::fs::create_dir(&state).unwrap();
    std::os::unix::fs::chown(&state, Some(UID), Some(UID)).unwrap();
    for path in [&image, &world.path("xenstored"), &world.path("xenstored.hypercall")] {
        std::fs::set_permissions(path, Permissions::from_mode(0o777)).unwrap();
    }
    let mut command = Command::new("setpriv");
    command.args(USER.split(' ')).arg(program_for_all(&world.path("")));
    command.args(["xen-blk", "--kind", "vbd", "--simulated"]).arg(world.path("xenstored"));
    command.arg("--control").arg(&control).arg("--state-dir").arg(&state);
    let daemon = Daemon::start(command, tempfile::tempdir().unwrap(), &[control]);
    let domain = world.domain(3);
    let disk = XenDisk::new("vbd", 3, XVDA, "memory:1M");
    disk.announce(&mut world.toolstack).unwrap();
    let mut front = connect(&domain, &disk, 2);
    limit_threads(&daemon, Some(1));
    let domain = world.domain(7);
    let disk = world.announce(7, XVDA, &image);
    assert!(wait_until(|| daemon.log().contains("no thread")), "{}", daemon.log());
    front.queues[1].write(0, &[1; 512]).unwrap();
    world.await_node(&disk, "state", "1");
    limit_threads(&daemon, None);
    connect(&domain, &disk, 2).queues[1].write(0, &[1; 512]).unwrap();
    assert!(daemon.terminate().success());
}
