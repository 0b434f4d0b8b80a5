//! Disks that cannot be served, whose fault that is, and the ends of disks.

use crate::support::process::wait_until;
use crate::world::{World, XVDA, break_ring, connect};
use manyring_driver::{Blkfront, XenDisk, XenOp};
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::time::Duration;

#[test]
fn without_a_xen_one_line_says_so_and_the_status_is_1() {
    for (arguments, words) in [
        (&["xen-blk"][..], "--xenstore: Xen or xenstored is not running"),
        (&["xen-blk", "--simulated", "/nowhere/at/all"], "--simulated: cannot open xenstore"),
        (&["xen-blk", "--xenstore", "/nowhere/at/all"], "--xenstore: cannot open xenstore"),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_manyring"));
        let state = tempfile::tempdir().unwrap();
        command.args(arguments).arg("--state-dir").arg(state.path());
        let output = command.output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {said}");
        assert!(said.contains(words) && said.lines().count() == 1, "{arguments:?}: {said}");
    }
}

#[test]
fn state_folder_that_others_may_change_is_refused_by_key_and_value() {
    let world = World::new();
    let folder = |name: &str, mode| {
        let path = world.path(name);
        std::fs::create_dir_all(&path).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    folder("group", 0o770);
    folder("all", 0o1777);
    folder("above", 0o777);
    folder("above/below", 0o700);
    std::os::unix::fs::symlink(world.path("group"), world.path("link")).unwrap();
    for (name, what) in [
        ("group", "writable by others"),
        ("all", "writable by others"),
        ("above/below", "in a folder that others may write to"),
        ("link", "a symlink"),
        ("link/", "a symlink"),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_manyring"));
        command.args(["xen-blk", "--simulated"]).arg(world.path("xenstored"));
        let path = world.path(name);
        let output = command.arg("--state-dir").arg(&path).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{name}: {said}");
        let words = format!("--state-dir: the folder {} is {what}", path.display());
        assert!(said.contains(&words) && said.lines().count() == 1, "{name}: {said}");
    }
    assert!(world.daemon(&[]).terminate().success());
}

#[test]
fn disk_that_cannot_be_opened_is_closed_with_the_reason_in_its_error_node() {
    let mut world = World::new();
    let daemon = world.daemon(&[]);
    let busy = world.image("busy");
    std::fs::write(world.path("odd"), [0; 700]).unwrap();
    for (device, params, words) in [
        (1, "disk.img".to_owned(), "is not an absolute path"),
        (2, world.path("nowhere").display().to_string(), "cannot open"),
        (3, world.path("odd").display().to_string(), "is not whole sectors"),
        (4, "null:1000".to_owned(), "whole sectors"),
    ] {
        let disk = XenDisk::new("vbd", 9, device, &params);
        disk.announce(&mut world.toolstack).unwrap();
        world.await_node(&disk, "state", "6");
        let error = world.error_of(&disk);
        assert!(error.contains("params: ") && error.contains(words), "{params}: {error}");
    }
    // Others are served all the same.
    let domain = world.domain(7);
    let disk = world.announce(7, XVDA, &busy);
    connect(&domain, &disk, 1).queues[0].write(0, &[1; 512]).unwrap();
    assert!(daemon.terminate().success());
}

#[test]
fn front_end_that_breaks_its_ring_is_closed_and_another_guest_goes_on() {
    let mut world = World::new();
    let _daemon = world.daemon(&[]);
    let (good, bad) = (world.domain(3), world.domain(4));
    let (kept, broken) = (world.image("kept"), world.image("broken"));
    let disk = world.announce(3, XVDA, &kept);
    let mut front = connect(&good, &disk, 2);
    let other = world.announce(4, XVDA, &broken);
    let guest = connect(&bad, &other, 2);
    break_ring(&bad, &guest.queues[1]);
    world.await_node(&other, "state", "5");
    let error = world.error_of(&other);
    assert!(error.contains("queue 1"), "{error}");
    for queue in &mut front.queues {
        queue.write(0, &[3; 512]).unwrap();
    }
    let is_told = || world.stats()["devices"][1]["connected"] == false;
    assert!(wait_until(is_told));
}

#[test]
fn nodes_that_are_missing_wrong_or_too_many_close_the_disk_with_the_node_named() {
    let mut world = World::new();
    let _daemon = world.daemon(&["--num-queues", "4"]);
    let (neighbour, kept) = (world.domain(3), world.image("kept"));
    let disk = world.announce(3, XVDA, &kept);
    let mut front = connect(&neighbour, &disk, 2);
    let _domain = world.domain(7);
    let image = world.image("disk");
    let ring = ("ring-ref", "31000");
    let port = ("event-channel", "1");
    for (number, (nodes, words)) in [
        (&[ring, port][..], "queue 0: "),
        (&[port], "ring-ref"),
        (&[ring], "event-channel"),
        (&[("ring-ref", "one"), port], "ring-ref"),
        (&[("ring-ref", "4294967296"), port], "ring-ref"),
        (&[ring, ("event-channel", "")], "event-channel"),
        (&[ring, port, ("protocol", "arm-abi")], "protocol"),
        (&[ring, port, ("ring-page-order", "5")], "ring-page-order"),
        (&[ring, port, ("ring-page-order", "2")], "ring-ref0"),
        (&[ring, port, ("feature-persistent", "yes")], "feature-persistent"),
        (&[ring, port, ("multi-queue-num-queues", "5")], "multi-queue-num-queues"),
        (&[ring, port, ("multi-queue-num-queues", "0")], "multi-queue-num-queues"),
        (&[ring, port, ("multi-queue-num-queues", "2")], "queue-0/ring-ref"),
    ]
    .into_iter()
    .enumerate()
    {
        let disk = world.announce(7, u32::try_from(number).unwrap(), &image);
        world.await_node(&disk, "state", "2");
        for (name, value) in nodes.iter().chain(&[("state", "3")]) {
            world.toolstack.write(&format!("{}/{name}", disk.front()), value).unwrap();
        }
        world.await_node(&disk, "state", "6");
        let error = world.error_of(&disk);
        assert!(error.contains(words), "{nodes:?}: {error}");
        front.queues[number % 2].write(0, &[3; 512]).unwrap();
        disk.remove(&mut world.toolstack).unwrap();
    }
}

#[test]
fn ring_that_a_front_end_changes_while_it_is_served_closes_the_disk() {
    let mut world = World::new();
    let _daemon = world.daemon(&[]);
    let (_, disk, mut front) = world.guest(7, "disk", 2);
    front.queues[0].write(0, &[3; 512]).unwrap();
    let changed = format!("{}/queue-1/ring-ref", disk.front());
    world.toolstack.write(&changed, "31000").unwrap();
    world.await_node(&disk, "state", "5");
    let error = world.error_of(&disk);
    assert!(error.contains("queue-1/ring-ref"), "{error}");
    assert_eq!(front.close().unwrap(), 0, "pages stay mapped");
}

#[test]
fn xenstore_that_is_lost_is_found_again() {
    let mut world = World::new();
    let daemon = world.daemon(&[]);
    let image = world.image("disk");
    let (domain, disk) = (world.domain(7), world.announce(7, XVDA, &image));
    connect(&domain, &disk, 1).queues[0].write(0, &[1; 512]).unwrap();
    drop(domain);
    let mut world = world.begin_anew();
    let (domain, disk) = (world.domain(7), world.announce(7, XVDA, &image));
    connect(&domain, &disk, 1).queues[0].write(8, &[2; 512]).unwrap();
    assert!(
        daemon.log().contains("xenstore is unavailable; disks keep running"),
        "{}",
        daemon.log()
    );
    assert!(daemon.terminate().success());
}

/// Two Xens' worth of disks: those of kind `vbd` never answer.
pub(crate) const HANGING: &str = "[daemon]\ncontrol = '@/control'\n\
    [[xen_blk]]\nname = 'hung'\nkinds = ['vbd']\nsimulated = '@/xenstored'\nstate_dir = '@/state'\n\
    fault = { hold_every = 1 }\n\
    [[xen_blk]]\nkinds = ['manyring']\nsimulated = '@/xenstored'\nstate_dir = '@/state'\n";

/// Has a request in flight that is never answered.
pub(crate) fn hang(world: &mut World) -> (Blkfront, XenDisk) {
    let (_, disk, mut front) = world.guest(7, "hung", 1);
    let queue = &mut front.queues[0];
    queue.submit(XenOp::Read { sector: 0, len: 512 }).unwrap().unwrap();
    queue.publish();
    queue.channel().notify();
    let is_in_flight = || {
        let stats = world.stats();
        let mut devices = stats["devices"].as_array().unwrap().iter();
        let hung = devices.find(|device| device["name"] == "hung-vbd-7-51712").unwrap();
        hung["queues"][0]["counters"]["in_flight"] == 1
    };
    assert!(wait_until(is_in_flight));
    (front, disk)
}

#[test]
fn disk_that_hangs_is_given_up_when_the_daemon_ends() {
    let mut world = World::new();
    let mut daemon = world.run(HANGING);
    let _hung = hang(&mut world);
    let (status, took) = daemon.stop();
    assert!(status.success() && took < Duration::from_secs(20), "{status} after {took:?}");
    assert!(daemon.log().contains("abandoning them"), "{}", daemon.log());
}

#[test]
fn disk_that_hangs_while_its_guest_goes_holds_no_other_up() {
    let mut world = World::new();
    let _daemon = world.run(HANGING);
    let (front, disk) = hang(&mut world);
    drop(front);
    disk.remove(&mut world.toolstack).unwrap();
    // The next disk of the same number waits; all others do not.
    disk.announce(&mut world.toolstack).unwrap();
    let neighbour = world.domain(3);
    let other = XenDisk::new("manyring", 3, XVDA, "memory:1M");
    other.announce(&mut world.toolstack).unwrap();
    connect(&neighbour, &other, 2).queues[1].write(0, &[1; 512]).unwrap();
}
