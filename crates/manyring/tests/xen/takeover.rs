//! A daemon that comes after another one goes on with the rings of guests that stayed connected.

use crate::support::process::wait_until;
use crate::world::{World, XVDA, options};
use manyring_driver::{Blkfront, XenOp};
use manyring_wire::xen::blkif::BlkifStatus;
use std::process::Command;
use std::time::Duration;

/// Requests under way on each queue when the daemon ends.
const UNDER_WAY: u64 = 24;

fn pattern(sector: u64, round: u8) -> Vec<u8> {
    (0..4096_u64).map(|i| (i + sector * 31) as u8 ^ round).collect()
}

fn sector(queue: usize, request: u64) -> u64 {
    (queue as u64 * UNDER_WAY + request) * 8
}

/// Writes on every queue, and does not wait.
pub(crate) fn begin(front: &mut Blkfront, round: u8) {
    for (index, queue) in front.queues.iter_mut().enumerate() {
        for request in 0..UNDER_WAY {
            let sector = sector(index, request);
            let data = pattern(sector, round);
            queue
                .submit(XenOp::Write { sector, data: &data })
                .unwrap()
                .expect("device process in the ring");
        }
        if queue.publish() {
            queue.channel().notify();
        }
    }
}

/// Waits for every answer, and reads what was written.
pub(crate) fn finish(front: &mut Blkfront, round: u8) {
    for (index, queue) in front.queues.iter_mut().enumerate() {
        for _ in 0..UNDER_WAY {
            let done = queue.wait(crate::support::process::TIMEOUT).unwrap();
            assert_eq!(done.status, BlkifStatus::Okay, "round {round}, queue {index}: {done:?}");
        }
        assert_eq!(queue.in_flight(), 0, "an answer too many or too few");
        for request in 0..UNDER_WAY {
            let mut read = vec![0; 4096];
            let sector = sector(index, request);
            queue.read(sector, &mut read).unwrap();
            assert!(read == pattern(sector, round), "round {round}, queue {index}: {request}");
        }
    }
}

#[test]
fn guest_whose_daemon_is_killed_goes_on_with_the_next_one_and_misses_no_request() {
    let mut world = World::new();
    let mut daemon = world.daemon(&["--num-queues", "2"]);
    let (_, _, mut front) = world.guest(7, "disk", 2);
    for round in 0..8_u8 {
        begin(&mut front, round);
        if round % 2 == 0 {
            world.kill(&mut daemon);
        } else {
            assert!(daemon.stop().0.success());
        }
        daemon = world.daemon(&["--num-queues", "2"]);
        finish(&mut front, round);
    }
    assert_eq!(front.close().unwrap(), 0, "pages stay mapped");
    assert!(daemon.terminate().success());
    let left: Vec<_> = std::fs::read_dir(world.path("state")).unwrap().flatten().collect();
    assert!(left.iter().all(|file| file.path().extension().unwrap() == "lock"), "{left:?}");
}

#[test]
fn daemon_that_would_serve_the_disks_of_another_one_is_refused_and_changes_nothing() {
    let mut world = World::new();
    let daemon = world.daemon(&[]);
    let (_, disk, mut front) = world.guest(7, "disk", 1);
    for end in ["", ".hypercall"] {
        let [there, link] = ["xenstored", "other-name"].map(|name| format!("{name}{end}"));
        std::os::unix::fs::symlink(world.path(&there), world.path(&link)).unwrap();
    }
    // Neither another folder nor another path of the same xenstore makes them other disks.
    for (socket, state) in [("xenstored", "state"), ("xenstored", "other"), ("other-name", "third")]
    {
        let mut second = Command::new(env!("CARGO_BIN_EXE_manyring"));
        second.args(["xen-blk", "--kind", "vbd", "--simulated"]).arg(world.path(socket));
        let output = second.arg("--state-dir").arg(world.path(state)).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{state}: {said}");
        let words = "--kind: the disks of kind \"vbd\" are in use by ";
        let pid = format!("pid {}, which has locked ", daemon.pid());
        assert!(said.contains(words) && said.contains(&pid), "{state}: {said}");
    }
    front.queues[0].write(0, &[1; 512]).unwrap();
    world.await_node(&disk, "state", "4");
}

#[test]
fn guest_whose_daemon_is_killed_while_it_connects_is_connected_by_the_next_one() {
    let mut world = World::new();
    let mut daemon = world.daemon(&["--num-queues", "4"]);
    let (domain, image) = (world.domain(7), world.image("disk"));
    let disk = world.announce(7, XVDA, &image);
    world.await_node(&disk, "state", "2");
    world.kill(&mut daemon);
    let folder = disk.folder();
    let guest = std::thread::spawn(move || Blkfront::connect(&domain, &folder, &options(4)));
    let front = disk.front();
    let is = |value: &'static [u8]| move |found: Option<&[u8]>| found == Some(value);
    world.toolstack.await_value(&format!("{front}/state"), is(b"3")).unwrap();
    let port = world.toolstack.read(&format!("{front}/queue-3/event-channel")).unwrap().unwrap();
    let port = String::from_utf8(port).unwrap().parse().unwrap();
    // The killed one has not release all that it had.
    let killed = world.calls();
    let bound = killed.bind(7, port).unwrap();
    let daemon = world.daemon(&["--num-queues", "2"]);
    assert!(wait_until(|| world.stats()["devices"].as_array().is_some_and(|all| !all.is_empty())));
    std::thread::sleep(Duration::from_millis(200));
    killed.close(bound).unwrap();
    let mut front = guest.join().unwrap().unwrap();
    assert_eq!(front.queues.len(), 4, "as the killed one offered");
    begin(&mut front, 1);
    finish(&mut front, 1);
    assert!(daemon.terminate().success());
}

#[test]
fn guest_whose_event_channel_somebody_keeps_is_told_so_by_the_next_daemon() {
    let mut world = World::new();
    let mut daemon = world.daemon(&["--num-queues", "2"]);
    let (_, disk, front) = world.guest(7, "disk", 1);
    world.kill(&mut daemon);
    let killed = world.calls();
    let _bound = killed.bind(7, front.queues[0].nodes().event_channel).unwrap();
    let _daemon = world.daemon(&["--num-queues", "2"]);
    world.await_node(&disk, "state", "6");
    let error = world.error_of(&disk);
    assert!(error.contains("cannot bind event channel"), "{error}");
}
