//! Guests in device processes: a device process that is killed leaves its rings to the next one,
//! and a guest does nothing to a guest in another device process.

use crate::between::Between;
use crate::support::frozen::Freezer;
use crate::support::process::{Daemon, Running, TIMEOUT, copies_of, end_of, wait_until};
use crate::support::program::{http_json, manyring};
use crate::support::view::{View, assert_alike};
use crate::takeover::{begin, finish};
use crate::world::{World, XVDA, break_ring, connect, small};
use manyring_driver::{Blkfront, BlkfrontOptions, XenDisk, XenDomain, XenOp};
use manyring_wire::xen::blkif::BlkifStatus;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Far less than the ten seconds after which the daemon ends a device process that does not answer,
/// and far more than a busy machine keeps a process waiting.
const WAIT_MAX: Duration = Duration::from_secs(3);

/// A daemon whose guests are apart as `domains` says.
pub(crate) fn serve(world: &World, domains: &str) -> Daemon {
    world.run(&config(domains, "xenstored"))
}

/// The configuration of such a daemon; the xenstore is behind this socket.
pub(crate) fn config(domains: &str, xenstored: &str) -> String {
    format!(
        "[daemon]\ncontrol = '@/control'\ndomains = '{domains}'\n[[xen_blk]]\n\
         kinds = ['vbd']\nnum_queues = 2\nsimulated = '@/{xenstored}'\nstate_dir = '@/state'\n"
    )
}

/// The device process of this name as the API shows it.
fn process(world: &World, name: &str) -> Value {
    let (_, processes) = http_json(&world.path("control"), "GET", "/v1/processes", "");
    let processes = processes["processes"].as_array().unwrap();
    processes.iter().find(|process| process["process"] == name).cloned().unwrap_or_default()
}

pub(crate) fn pid(world: &World, name: &str) -> Pid {
    let pid = process(world, name)["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok());
    Pid::from_raw(pid.unwrap()).unwrap()
}

fn signal(world: &World, name: &str, signal: Signal) {
    kill_process(pid(world, name), signal).unwrap();
}

#[test]
fn guest_whose_device_process_is_killed_goes_on_in_the_next_one_and_misses_no_request() {
    let mut world = World::new();
    let daemon = serve(&world, "device");
    let (_, disk, mut front) = world.guest(7, "disk", 2);
    for round in 0..6_u8 {
        let killed = pid(&world, "xen:xen:7");
        // A device process that is stopped has requests in its rings when it is killed; one that
        // runs has taken some of them.
        if round % 2 == 0 {
            signal(&world, "xen:xen:7", Signal::STOP);
        }
        begin(&mut front, round);
        kill_process(killed, Signal::KILL).unwrap();
        finish(&mut front, round);
        assert_ne!(pid(&world, "xen:xen:7"), killed, "{}", daemon.log());
        world.await_node(&disk, "state", "4");
    }
    assert_eq!(world.error_of(&disk), "");
    assert!(daemon.log().matches("took a ring over").count() >= 12, "{}", daemon.log());
    assert_eq!(front.close().unwrap(), 0, "pages stay mapped");
    assert!(daemon.terminate().success());
}

/// Writes a page and waits for the answer.
fn write(front: &mut Blkfront, sector: u64) {
    let queue = &mut front.queues[0];
    queue
        .submit(XenOp::Write { sector, data: &[7; 4096] })
        .unwrap()
        .expect("device process in the ring");
    if queue.publish() {
        queue.channel().notify();
    }
    assert_eq!(queue.wait(TIMEOUT).unwrap().status, BlkifStatus::Okay);
}

/// The longest of some writes, while the device process of the other guest is not well.
fn worst(front: &mut Blkfront) -> Duration {
    let one = |sector: u64| {
        let began = Instant::now();
        write(front, sector % 64 * 8);
        began.elapsed()
    };
    (0..200).map(one).max().unwrap_or_default()
}

#[test]
fn guest_in_a_process_of_its_own_is_served_while_that_of_another_one_is_stopped_or_dies() {
    let mut world = World::new();
    let daemon = serve(&world, "device");
    let (one, bad, mut other) = world.guest(7, "bad", 1);
    let (_two, _good, mut front) = world.guest(8, "good", 1);
    let served = pid(&world, "xen:xen:8");
    write(&mut other, 0);
    signal(&world, "xen:xen:7", Signal::STOP);
    let mut waited = worst(&mut front);
    signal(&world, "xen:xen:7", Signal::KILL);
    waited = waited.max(worst(&mut front));
    write(&mut other, 8);
    assert!(waited < WAIT_MAX, "{waited:?}");
    break_ring(&one, &other.queues[0]);
    world.await_node(&bad, "state", "5");
    write(&mut front, 0);
    assert_eq!(pid(&world, "xen:xen:8"), served);
    assert_eq!(process(&world, "xen:xen:8")["starts"], 1);
    assert!(daemon.terminate().success());
}

#[test]
fn guests_of_one_domain_share_a_device_process_and_outlive_it_together() {
    let mut world = World::new();
    let daemon = serve(&world, "user");
    let (_one, _, mut first) = world.guest(7, "first", 2);
    let (domain, _, mut second) = world.guest(8, "second", 1);
    // A disk in memory lies with the daemon.
    let memory = XenDisk::new("vbd", 8, XVDA + 16, "memory:1M");
    memory.announce(&mut world.toolstack).unwrap();
    let mut third = connect(&domain, &memory, 1);
    third.queues[0].write(8, &[9; 512]).unwrap();
    let devices = process(&world, "xen:xen")["devices"].as_array().map(Vec::len);
    assert_eq!(devices, Some(3));
    for round in 0..3 {
        begin(&mut first, round);
        begin(&mut second, round);
        signal(&world, "xen:xen", Signal::KILL);
        finish(&mut first, round);
        finish(&mut second, round);
        let mut read = [0; 512];
        third.queues[0].read(8, &mut read).unwrap();
        assert_eq!(read, [9; 512], "round {round}");
    }
    assert!(wait_until(|| process(&world, "xen:xen")["state"] == "serving"));
    assert!(daemon.terminate().success());
}

/// Who fills the journal is not the device process here, but a device process has the same file to
/// write to.
#[test]
fn device_process_whose_journal_grows_ends_and_the_journal_is_cut() {
    let mut world = World::new();
    let daemon = serve(&world, "device");
    let (_, disk, mut front) = world.guest(7, "disk", 2);
    let path = world.path("state").join("vbd-7-51712.q1.journal");
    let size = || std::fs::metadata(&path).unwrap().len();
    let before = size();
    for round in 0..3_u8 {
        let ended = pid(&world, "xen:xen:7");
        begin(&mut front, round);
        let journal = std::fs::File::options().write(true).open(&path).unwrap();
        journal.set_len(1 << 40).unwrap();
        assert!(wait_until(|| size() == before), "{}: {}", size(), daemon.log());
        finish(&mut front, round);
        assert_ne!(pid(&world, "xen:xen:7"), ended, "{}", daemon.log());
        world.await_node(&disk, "state", "4");
    }
    assert_eq!(world.error_of(&disk), "");
    let told = "the journal is longer than a ring needs; truncated";
    assert_eq!(daemon.log().matches(told).count(), 3, "{}", daemon.log());
    assert!(daemon.terminate().success());
}

/// Starts a daemon of this configuration that takes over from the one that runs.
fn take_over(world: &World, config: &str) -> Running {
    let log = world.path("next.log");
    let log = std::fs::File::options().append(true).create(true).open(log).unwrap();
    let mut command = manyring();
    command.arg("run").arg("--config").arg(world.path(config));
    command.arg("--takeover").arg(world.path("control"));
    Running::start(command.stderr(Stdio::from(log)))
}

fn next_log(world: &World) -> String {
    std::fs::read_to_string(world.path("next.log")).unwrap_or_default()
}

/// True if a process has ended, though its parent has not waited for it.
fn has_ended(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    stat.is_err() || stat.unwrap().contains(") Z ")
}

/// A second disk of a guest, in memory, with some bytes.
pub(crate) fn in_memory(world: &mut World, domain: &Arc<XenDomain>) -> Blkfront {
    let disk = XenDisk::new("vbd", 7, XVDA + 16, "memory:1M");
    disk.announce(&mut world.toolstack).unwrap();
    let mut front = connect(domain, &disk, 1);
    front.queues[0].write(8, &[9; 512]).unwrap();
    front
}

/// They are still there.
pub(crate) fn has_bytes(front: &mut Blkfront) {
    let mut read = [0; 512];
    front.queues[0].read(8, &mut read).unwrap();
    assert_eq!(read, [9; 512]);
}

#[test]
fn disk_in_memory_that_the_daemon_serves_itself_stays_with_it() {
    let mut world = World::new();
    let _daemon = serve(&world, "one");
    let domain = world.domain(7);
    let mut front = in_memory(&mut world, &domain);
    let mut next = take_over(&world, "manyring.toml");
    assert!(!end_of(&mut next).success());
    let told = "not served by a device process: xen-vbd-7-51728";
    assert!(next_log(&world).contains(told), "{}", next_log(&world));
    has_bytes(&mut front);
}

#[test]
fn nobody_pauses_for_a_takeover_while_the_disks_of_a_xen_cannot_be_handed_on() {
    let mut world = World::new();
    let mut between = Between::new(&world, "between");
    let daemon = world.run(&config("device", "between"));
    let first = between.accept();
    between.hand_on(first);
    let (_, _, mut front) = world.guest(7, "disk", 2);
    let process = pid(&world, "xen:xen:7");
    between.cut();
    // It looks for xenstored now, and nobody answers.
    let _unanswered = between.accept();
    for round in 0..2 {
        begin(&mut front, round);
        let mut next = take_over(&world, "manyring.toml");
        assert!(!end_of(&mut next).success());
        finish(&mut front, round);
    }
    let told = "the xenstore of xen is unavailable; try again later";
    assert_eq!(next_log(&world).matches(told).count(), 2, "{}", next_log(&world));
    assert!(!daemon.log().contains("quiescing the device processes"), "{}", daemon.log());
    assert_eq!(pid(&world, "xen:xen:7"), process);
    assert!(daemon.terminate().success());
}

#[test]
fn a_disk_that_hangs_is_left_to_the_daemon_that_takes_over() {
    let mut world = World::new();
    let config = crate::ends::HANGING
        .replace("control = '@/control'", "control = '@/control'\ndomains = 'device'");
    let daemon = world.run(&config);
    let (_hung, _) = crate::ends::hang(&mut world);
    let domain = world.domain(3);
    let other = XenDisk::new("manyring", 3, XVDA, "memory:1M");
    other.announce(&mut world.toolstack).unwrap();
    let mut front = connect(&domain, &other, 2);
    front.queues[1].write(8, &[9; 512]).unwrap();
    let mut next = take_over(&world, "manyring.toml");
    assert!(wait_until(|| has_ended(daemon.pid())), "{} {}", daemon.log(), next_log(&world));
    has_bytes(&mut front);
    let told = "stopping the disk timed out; killing its device process";
    assert_eq!(daemon.log().matches(told).count(), 1, "{}", daemon.log());
    // The rings of the disk that hangs are taken over as well.
    assert!(wait_until(|| next_log(&world).matches("took a ring over").count() >= 3));
    kill_process(Pid::from_child(&next), Signal::TERM).unwrap();
    assert!(end_of(&mut next).success(), "{}", next_log(&world));
}

/// A read that is under way lands in memory of the guest, which has that in other use once the next
/// device process has answered.
#[test]
fn a_disk_that_is_only_read_waits_in_the_next_daemon_for_what_a_device_process_has_under_way() {
    let mut world = World::new();
    let image = world.image("disk");
    let daemon = serve(&world, "device");
    let domain = world.domain(7);
    let disk = XenDisk { writable: false, ..XenDisk::new("vbd", 7, XVDA, image.to_str().unwrap()) };
    disk.announce(&mut world.toolstack).unwrap();
    let mut front = connect(&domain, &disk, 1);
    front.queues[0].read(0, &mut [0; 512]).unwrap();
    // A request that the kernel has under way keeps a description as this does.
    let under_way = copies_of(pid(&world, "xen:xen:7").as_raw_nonzero().get(), &image);
    assert!(!under_way.is_empty());
    let mut next = take_over(&world, "manyring.toml");
    assert!(wait_until(|| has_ended(daemon.pid())), "{} {}", daemon.log(), next_log(&world));
    let queue = &mut front.queues[0];
    queue.submit(XenOp::Read { sector: 0, len: 512 }).unwrap().unwrap();
    queue.publish();
    queue.channel().notify();
    let waits = || next_log(&world).contains("are still in flight; waiting");
    let serves = || next_log(&world).contains("took a ring over");
    assert!(wait_until(|| waits() || serves()), "{} {}", daemon.log(), next_log(&world));
    assert!(waits() && !serves(), "{} {}", daemon.log(), next_log(&world));
    drop(under_way);
    front.queues[0].wait(TIMEOUT).unwrap();
    // What the device process logs arrives on its own way, later than its answer to the guest.
    assert!(wait_until(serves), "{}", next_log(&world));
    kill_process(Pid::from_child(&next), Signal::TERM).unwrap();
    assert!(end_of(&mut next).success(), "{}", next_log(&world));
}

/// Whoever took over could not bind the event channels of such a device process, and would close
/// its disks.
#[test]
fn a_device_process_that_the_kernel_does_not_end_keeps_its_guest_from_no_disk() {
    let mut world = World::new();
    let freezer = Freezer::new();
    let image = freezer.file("disk.img");
    std::fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
    let daemon = serve(&world, "device");
    let (domain, disk) = (world.domain(7), world.announce(7, XVDA, &image));
    let mut front = connect(&domain, &disk, 1);
    front.queues[0].write(0, &[1; 512]).unwrap();
    let process = pid(&world, "xen:xen:7");
    freezer.freeze();
    let queue = &mut front.queues[0];
    queue.submit(XenOp::Write { sector: 0, data: &[2; 512] }).unwrap().unwrap();
    queue.publish();
    queue.channel().notify();
    assert!(wait_until(|| world.stats()["devices"][0]["queues"][0]["counters"]["in_flight"] == 1));
    let mut next = take_over(&world, "manyring.toml");
    let told = "the kernel has not ended the device process xen:xen:7, whose disk did not stop in \
                time";
    assert!(wait_until(|| daemon.log().contains(told)), "{}", daemon.log());
    assert!(!end_of(&mut next).success());
    assert!(rustix::process::test_kill_process(process).is_ok(), "nothing was tried");
    freezer.thaw();
    front.queues[0].wait(TIMEOUT).unwrap();
    front.queues[0].write(0, &[3; 512]).unwrap();
    let mut next = take_over(&world, "manyring.toml");
    assert!(wait_until(|| has_ended(daemon.pid())), "{} {}", daemon.log(), next_log(&world));
    front.queues[0].write(0, &[4; 512]).unwrap();
    kill_process(Pid::from_child(&next), Signal::TERM).unwrap();
    assert!(end_of(&mut next).success(), "{}", next_log(&world));
}

#[test]
fn guests_go_on_with_the_daemon_that_takes_over_again_and_again() {
    // In device processes, and served by the daemon itself.
    for domains in ["device", "one"] {
        let mut world = World::new();
        let daemon = serve(&world, domains);
        let (domain, disk, mut front) = world.guest(7, "disk", 2);
        let mut in_memory = (domains == "device").then(|| in_memory(&mut world, &domain));
        let (mut before, mut running) = (daemon.pid(), Vec::new());
        for round in 0..4_u8 {
            begin(&mut front, round);
            let next = take_over(&world, "manyring.toml");
            let pid = next.id();
            running.push(next);
            assert!(wait_until(|| has_ended(before)), "{} {}", daemon.log(), next_log(&world));
            before = pid;
            finish(&mut front, round);
            in_memory.iter_mut().for_each(has_bytes);
            world.await_node(&disk, "state", "4");
        }
        assert_eq!(world.error_of(&disk), "");
        assert_eq!(front.close().unwrap(), 0, "pages stay mapped");
        let last = running.last_mut().unwrap();
        kill_process(Pid::from_child(last), Signal::TERM).unwrap();
        assert!(end_of(last).success(), "{}", next_log(&world));
    }
}

#[test]
fn guest_goes_on_with_its_daemon_where_the_next_one_cannot_have_what_it_needs() {
    let mut world = World::new();
    let daemon = serve(&world, "device");
    let (_, disk, mut front) = world.guest(7, "disk", 2);
    let config = std::fs::read_to_string(world.path("manyring.toml")).unwrap();
    std::fs::write(world.path("other.toml"), config.replace("xenstored", "nobody")).unwrap();
    for round in 0..2 {
        begin(&mut front, round);
        let mut next = take_over(&world, "other.toml");
        assert!(!end_of(&mut next).success());
        assert!(next_log(&world).contains("simulated"), "{}", next_log(&world));
        finish(&mut front, round);
        world.await_node(&disk, "state", "4");
    }
    let lock = std::fs::read_to_string(world.path("state").join("vbd.lock")).unwrap();
    assert_eq!(lock, daemon.pid().to_string());
    assert_eq!(world.error_of(&disk), "");
    assert!(daemon.terminate().success());
}

#[test]
fn guest_that_closes_its_disk_while_its_device_process_dies_has_the_disk_again_when_it_connects() {
    let mut world = World::new();
    let daemon = serve(&world, "device");
    let (domain, image) = (world.domain_of(7, 16384), world.image("disk"));
    let disk = world.announce(7, XVDA, &image);
    let options = BlkfrontOptions { queues: 2, ..small() };
    let connect = || Blkfront::connect(&domain, &disk.folder(), &options).unwrap();
    for round in 0..3_u8 {
        let mut front = connect();
        front.queues[1].write(0, &[round; 512]).unwrap();
        let killed = pid(&world, "xen:xen:7");
        // It dies before, or while it is to leave the rings, or about then.
        match round % 3 {
            0 => kill_process(killed, Signal::KILL).unwrap(),
            1 => kill_process(killed, Signal::STOP).unwrap(),
            _ => {}
        }
        std::thread::scope(|scope| {
            let closes = scope.spawn(|| front.close().unwrap());
            let folder = disk.front();
            let is_closing = |found: Option<&[u8]>| found != Some(b"4");
            world.toolstack.await_value(&format!("{folder}/state"), is_closing).unwrap();
            let _ = kill_process(killed, Signal::KILL);
            assert_eq!(closes.join().unwrap(), 0, "pages stay mapped");
        });
        world.await_node(&disk, "state", "6");
        let mut front = connect();
        let mut read = [9; 512];
        front.queues[0].read(0, &mut read).unwrap();
        assert_eq!(read, [round; 512]);
        assert_eq!(front.close().unwrap(), 0, "pages stay mapped");
        world.await_node(&disk, "state", "6");
    }
    let left = std::fs::read_dir(world.path("state")).unwrap().flatten();
    let left: Vec<_> = left.filter(|file| file.path().extension().unwrap() != "lock").collect();
    assert!(left.is_empty(), "{left:?}");
    assert!(daemon.terminate().success());
}

#[test]
fn guests_disk_is_shown_alike_in_the_daemon_and_in_a_device_process() {
    let [here, apart] = ["one", "device"].map(|domains| {
        let mut world = World::new();
        let daemon = serve(&world, domains);
        let view = |world: &World, requests| {
            View::after(requests, (&world.path("control"), &world.path("")))
        };
        let (domain, image) = (world.domain(7), world.image("disk"));
        let disk = world.announce(7, XVDA, &image);
        world.await_node(&disk, "state", "2");
        let idle = view(&world, 0);
        world.resize("xen-vbd-7-51712", "16M");
        let mut front = connect(&domain, &disk, 2);
        assert_eq!(front.disk.sectors, 32_768);
        for _ in 0..2 {
            write(&mut front, 0);
        }
        let connected = view(&world, 2);
        assert_eq!(front.close().unwrap(), 0, "pages stay mapped");
        world.await_node(&disk, "state", "6");
        let left = view(&world, 2);
        assert!(daemon.terminate().success());
        [idle, connected, left]
    });
    for (at, when) in ["idle", "connected", "left"].into_iter().enumerate() {
        assert_alike(&here[at], &apart[at], when);
    }
    let [idle, connected, left] = here.map(|view| view.devices[0].clone());
    let of = |view: &Value| (view["size"].clone(), view["connected"].clone());
    assert_eq!(of(&idle), ((8 << 20).into(), false.into()));
    assert_eq!(of(&connected), ((16 << 20).into(), true.into()));
    assert_eq!(of(&left), ((16 << 20).into(), false.into()));
    assert_eq!(connected["queues"][0]["counters"]["requests"], 2);
}
