//! A daemon that comes after a killed one, where not all is as that one left it.

use crate::process::wait_until;
use crate::takeover::{begin, finish};
use crate::world::{World, XVDA, connect, options};
use manyring_driver::{Blkfront, BlkfrontOptions};
use rustix::process::Signal;
use std::os::unix::net::UnixListener;

#[test]
fn daemon_that_ends_before_xenstore_has_answered_leaves_the_journals_to_the_next_one() {
    let mut world = World::new();
    let mut daemon = world.daemon(&["--num-queues", "2"]);
    let (domain, image) = (world.domain(7), world.image("disk"));
    let disk = world.announce(7, XVDA, &image);
    let mut front = connect(&domain, &disk, 2);
    world.kill(&mut daemon);
    begin(&mut front, 1);
    // A xenstored that is stopped: connections are made, and nothing is answered.
    let silent = world.path("silent");
    let _silent = ["", ".hypercall"]
        .map(|end| UnixListener::bind(format!("{}{end}", silent.display())).unwrap());
    let configuration = "[daemon]\ncontrol = '@/control'\n[[xen_blk]]\n\
        kinds = ['vbd', 'manyring']\nsimulated = '@/silent'\nstate_dir = '@/state'\n";
    assert!(world.run(configuration).terminate().success());
    let _daemon = world.daemon(&["--num-queues", "2"]);
    finish(&mut front, 1);
}

#[test]
fn daemon_of_other_disks_that_ends_leaves_the_journals_of_its_neighbour() {
    let mut world = World::new();
    let of_kind = |kind: &str| {
        format!(
            "[daemon]\ncontrol = '@/{kind}'\n[[xen_blk]]\nkinds = ['{kind}']\n\
            num_queues = 2\nsimulated = '@/xenstored'\nstate_dir = '@/state'\n"
        )
    };
    let mut daemon = world.run_at(&of_kind("vbd"), "vbd");
    let neighbour = world.run_at(&of_kind("manyring"), "manyring");
    let (domain, image) = (world.domain(7), world.image("disk"));
    let disk = world.announce(7, XVDA, &image);
    let mut front = connect(&domain, &disk, 2);
    assert!(neighbour.terminate().success());
    daemon.send(Signal::KILL);
    daemon.wait();
    begin(&mut front, 1);
    std::fs::remove_file(world.path("vbd")).unwrap();
    let _daemon = world.run_at(&of_kind("vbd"), "vbd");
    finish(&mut front, 1);
}

#[test]
fn daemon_that_offers_less_than_a_killed_one_serves_on_what_was_negotiated() {
    let mut world = World::new();
    let mut daemon = world.daemon(&["--num-queues", "2"]);
    let (domain, image) = (world.domain(7), world.image("disk"));
    let disk = world.announce(7, XVDA, &image);
    let large = BlkfrontOptions { ring_page_order: 2, ..options(2) };
    let mut front = Blkfront::connect(&domain, &disk.folder(), &large).unwrap();
    world.kill(&mut daemon);
    begin(&mut front, 1);
    let daemon = world.run(
        "[daemon]\ncontrol = '@/control'\n[[xen_blk]]\nkinds = ['vbd', 'manyring']\n\
         num_queues = 1\nring_page_order_max = 0\nindirect_segments_max = 0\npersistent = false\n\
         discard = false\nsimulated = '@/xenstored'\nstate_dir = '@/state'\n",
    );
    finish(&mut front, 1);
    let data = vec![7; 64 << 10];
    front.queues[1].write(0, &data).unwrap();
    assert!(daemon.terminate().success());
}

#[test]
fn guest_whose_file_is_not_there_when_the_next_daemon_starts_waits_for_it() {
    let mut world = World::new();
    let mut daemon = world.daemon(&["--num-queues", "2"]);
    let (domain, image) = (world.domain(7), world.image("disk"));
    let disk = world.announce(7, XVDA, &image);
    let mut front = connect(&domain, &disk, 2);
    world.kill(&mut daemon);
    begin(&mut front, 1);
    let away = world.path("away");
    std::fs::rename(&image, &away).unwrap();
    let daemon = world.daemon(&["--num-queues", "2"]);
    assert!(wait_until(|| daemon.log().contains("cannot open")));
    std::fs::rename(&away, &image).unwrap();
    finish(&mut front, 1);
}
