//! A daemon that comes after a killed one, where not all is as that one left it.

use crate::between::Between;
use crate::processes;
use crate::support::process::{TIMEOUT, wait_until};
use crate::support::program::http;
use crate::takeover::{begin, finish};
use crate::world::{World, XVDA, connect, options};
use manyring_driver::{Blkfront, BlkfrontOptions, XenDisk, XenOp};
use rustix::process::Signal;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::time::Duration;

/// A guest whose daemon was killed, and which has requests in its rings; and the file of its disk.
pub(crate) fn killed(world: &mut World, options: &BlkfrontOptions) -> (Blkfront, PathBuf) {
    let mut daemon = world.daemon(&["--num-queues", "2"]);
    let (domain, image) = (world.domain(7), world.image("disk"));
    let disk = world.announce(7, XVDA, &image);
    let mut front = Blkfront::connect(&domain, &disk.folder(), options).unwrap();
    world.kill(&mut daemon);
    begin(&mut front, 1);
    (front, image)
}

#[test]
fn daemon_that_ends_before_xenstore_has_answered_leaves_the_journals_to_the_next_one() {
    let mut world = World::new();
    let (mut front, _) = killed(&mut world, &options(2));
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
    let (_, _, mut front) = world.guest(7, "disk", 2);
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
    let large = BlkfrontOptions { ring_page_order: 2, ..options(2) };
    let (mut front, _) = killed(&mut world, &large);
    let daemon = world.run(
        "[daemon]\ncontrol = '@/control'\n[[xen_blk]]\nkinds = ['vbd', 'manyring']\n\
         num_queues = 1\nring_page_order_max = 0\nindirect_segments_max = 0\npersistent = false\n\
         discard = false\nsimulated = '@/xenstored'\nstate_dir = '@/state'\n",
    );
    finish(&mut front, 1);
    let data = vec![7; 64 << 10];
    front.queues[1].write(0, &data).unwrap();
    // The queue beyond those that it offers is shown as the others are.
    let stats = world.stats();
    let queues = stats["devices"][0]["queues"].as_array().unwrap();
    let counts: Vec<_> =
        queues.iter().map(|queue| queue["counters"]["requests"].as_u64()).collect();
    assert_eq!((counts.len(), counts[1] > Some(24)), (2, true), "{counts:?}");
    let (_, _, metrics) = http(&world.path("control"), "GET", "/metrics", "");
    assert!(metrics.contains("device=\"xen-vbd-7-51712\",queue=\"1\""), "{metrics}");
    assert!(daemon.terminate().success());
}

#[test]
fn daemon_of_other_logical_blocks_serves_a_connected_guest_by_those_that_it_was_told() {
    let mut world = World::new();
    let mut daemon = world.daemon(&["--num-queues", "2"]);
    let (_, disk, mut front) = world.guest(7, "disk", 2);
    world.await_node(&disk, "sector-size", "512");
    world.kill(&mut daemon);
    begin(&mut front, 1);
    let successor = world.daemon(&["--num-queues", "2", "--logical-block-size", "4096"]);
    finish(&mut front, 1);
    front.queues[0].write(3, &[5; 512]).unwrap();
    world.resize("xen-vbd-7-51712", "16M");
    world.await_node(&disk, "sectors", "32768");
    world.await_node(&disk, "sector-size", "512");
    assert!(successor.terminate().success());
    // Nobody was told of a new guest's disk before.
    let daemon = world.daemon(&["--logical-block-size", "4096"]);
    let (_, fresh, _front) = world.guest(8, "other", 1);
    world.await_node(&fresh, "sector-size", "4096");
    world.await_node(&fresh, "physical-sector-size", "4096");
    assert!(wait_until(|| daemon.log().contains("logical_block_size=4096")));
}

#[test]
fn guest_whose_file_is_not_there_when_the_next_daemon_starts_waits_for_it() {
    let mut world = World::new();
    let (mut front, image) = killed(&mut world, &options(2));
    let away = world.path("away");
    std::fs::rename(&image, &away).unwrap();
    let daemon = world.daemon(&["--num-queues", "2"]);
    assert!(wait_until(|| daemon.log().contains("cannot open")));
    std::fs::rename(&away, &image).unwrap();
    finish(&mut front, 1);
}

#[test]
fn guest_is_served_while_a_xenstored_that_is_there_again_does_not_answer_yet() {
    let mut world = World::new();
    let mut between = Between::new(&world, "between");
    let configuration = "[daemon]\ncontrol = '@/control'\n[[xen_blk]]\n\
        kinds = ['vbd']\nsimulated = '@/between'\nstate_dir = '@/state'\n";
    let daemon = world.run(configuration);
    let first = between.accept();
    between.hand_on(first);
    let (_, _, mut front) = world.guest(7, "disk", 2);
    between.cut();
    let mut second = between.accept();
    // It has asked something, and is not answered.
    second.read_exact(&mut [0]).unwrap();
    for _ in 0..50 {
        front.queues[1].write(0, &[1; 512]).unwrap();
        std::thread::sleep(Duration::from_millis(10));
    }
    drop(second);
    let third = between.accept();
    between.hand_on(third);
    assert!(wait_until(|| daemon.log().contains("took a ring over")));
    front.queues[1].write(0, &[1; 512]).unwrap();
    assert!(daemon.terminate().success());
}

#[test]
fn disk_in_memory_keeps_its_bytes_when_xenstored_was_lost() {
    for domains in ["device", "one"] {
        let mut world = World::new();
        let mut between = Between::new(&world, "between");
        let daemon = world.run(&processes::config(domains, "between"));
        let first = between.accept();
        between.hand_on(first);
        let domain = world.domain(7);
        let mut front = processes::in_memory(&mut world, &domain);
        between.cut();
        let second = between.accept();
        between.hand_on(second);
        assert!(wait_until(|| daemon.log().contains("took a ring over")), "{}", daemon.log());
        processes::has_bytes(&mut front);
        assert!(daemon.terminate().success());
    }
}

#[test]
fn guest_that_encrypts_its_disk_is_served_by_the_next_daemon() {
    for prefix in ["", "raw:", "aio:"] {
        let mut world = World::new();
        let daemon = world.daemon(&[]);
        let (domain, image) = (world.domain(7), world.image("disk"));
        let disk = XenDisk::new("vbd", 7, XVDA, &format!("{prefix}{}", image.display()));
        disk.announce(&mut world.toolstack).unwrap();
        let mut front = Blkfront::connect(&domain, &disk.folder(), &options(2)).unwrap();
        let header = luks_header();
        front.queues[0].write(0, &header).unwrap();
        assert!(daemon.terminate().success());
        let _daemon = world.daemon(&[]);
        let mut found = [0; 512];
        front.queues[0].read(0, &mut found).unwrap();
        assert_eq!(found, header, "{prefix}");
    }
}

#[test]
fn file_that_is_no_raw_disk_is_served_only_if_the_tool_stack_says_so() {
    let mut world = World::new();
    let _daemon = world.daemon(&[]);
    for (number, prefix) in (7..).zip(["", "phy:", "raw:", "aio:"]) {
        let image = world.image(&format!("disk{number}"));
        let file = std::fs::OpenOptions::new().write(true).open(&image).unwrap();
        file.write_all_at(&luks_header(), 0).unwrap();
        let domain = world.domain(number);
        let disk = XenDisk::new("vbd", number, XVDA, &format!("{prefix}{}", image.display()));
        disk.announce(&mut world.toolstack).unwrap();
        if matches!(prefix, "raw:" | "aio:") {
            let mut front = connect(&domain, &disk, 1);
            let mut found = [0; 512];
            front.queues[0].read(0, &mut found).unwrap();
            assert_eq!(found, luks_header());
        } else {
            assert!(wait_until(|| world.error_of(&disk).contains("is a LUKS image")), "{prefix}");
        }
    }
}

#[test]
fn journals_that_are_removed_or_replaced_are_begun_again_while_the_guest_goes_on() {
    for is_replaced in [false, true] {
        let mut world = World::new();
        let mut daemon = world.daemon(&[]);
        let (_domain, _disk, mut front) = world.guest(3, "img", 2);
        front.queues[1].write(0, &[7; 512]).unwrap();
        let file = world.path("state").join("vbd-3-51712.q1.journal");
        std::fs::remove_file(&file).unwrap();
        if is_replaced {
            std::fs::write(&file, [7; 100]).unwrap();
        }
        let is_whole = || std::fs::metadata(&file).is_ok_and(|found| found.len() > 4096);
        assert!(wait_until(is_whole), "{}", daemon.log());
        let is_told = || daemon.log().contains("the journal is missing; recreating it");
        assert!(wait_until(is_told), "{}", daemon.log());
        // The guest notices nothing, and the next process finds all that it needs.
        front.queues[1].write(0, &[8; 512]).unwrap();
        world.kill(&mut daemon);
        for _ in 0..4 {
            front.queues[1].submit(XenOp::Read { sector: 0, len: 512 }).unwrap();
        }
        front.queues[1].publish();
        front.queues[1].channel().notify();
        let _daemon = world.daemon(&[]);
        for _ in 0..4 {
            assert!(front.queues[1].wait(TIMEOUT).is_ok());
        }
    }
}

#[test]
fn journal_that_is_cut_is_told_of_and_the_guest_goes_on() {
    let mut world = World::new();
    let daemon = world.daemon(&[]);
    let (_domain, _disk, mut front) = world.guest(3, "img", 1);
    front.queues[0].write(0, &[7; 512]).unwrap();
    let file = world.path("state").join("vbd-3-51712.q0.journal");
    std::fs::OpenOptions::new().write(true).open(file).unwrap().set_len(0).unwrap();
    front.queues[0].write(0, &[8; 512]).unwrap();
    assert!(wait_until(|| daemon.log().contains("the journal was truncated")), "{}", daemon.log());
    front.queues[0].write(0, &[8; 512]).unwrap();
}

/// The first sector of an encrypted disk.
fn luks_header() -> [u8; 512] {
    let mut sector = [0; 512];
    sector[..8].copy_from_slice(b"LUKS\xba\xbe\0\x02");
    sector
}
