//! Disks that appear, are used, change their size and go.

use crate::support::process::{only_in_default_form, wait_until};
use crate::world::{DISK_SIZE, World, XVDA, connect, is_alone};
use manyring_driver::XenDisk;

/// The contents that writer `who` gives to `sector` and those behind it, 4096 bytes.
fn pattern(sector: u64, who: u8) -> Vec<u8> {
    (0..4096_u64).map(|i| (i * 7 + sector * 13) as u8 ^ who).collect()
}

#[test]
fn queues_of_a_guests_disk_serve_its_file_and_are_counted() {
    let mut world = World::new();
    let daemon = world.daemon(&["--num-queues", "4"]);
    let (domain, image) = (world.domain(7), world.image("disk"));
    let disk = world.announce(7, XVDA, &image);
    let mut front = connect(&domain, &disk, 8);
    assert_eq!((front.queues.len(), front.disk.sectors), (4, DISK_SIZE / 512));
    for (index, queue) in front.queues.iter_mut().enumerate() {
        let sector = 8 * index as u64;
        queue.write(sector, &pattern(sector, 1)).unwrap();
        queue.flush().unwrap();
        let mut read = vec![0; 4096];
        queue.read(sector, &mut read).unwrap();
        assert!(read == pattern(sector, 1), "queue {index}");
    }
    let written = std::fs::read(&image).unwrap();
    assert!(written[8 * 512..][..4096] == pattern(8, 1));
    let stats = world.stats();
    let device = &stats["devices"][0];
    assert_eq!((&device["name"], &device["kind"]), (&"xen-vbd-7-51712".into(), &"xen-blk".into()));
    assert_eq!(device["connected"], true);
    let count = |index: usize, name: &str| device["queues"][index]["counters"][name].as_u64();
    for index in 0..4 {
        assert_eq!((count(index, "running"), count(index, "requests")), (Some(1), Some(3)));
    }
    assert_eq!(front.close().unwrap(), 0, "pages stay mapped");
    world.await_node(&disk, "state", "6");
    assert_eq!(world.stats()["devices"][0]["connected"], false);
    assert!(daemon.terminate().success());
}

#[test]
fn disk_that_only_reads_is_offered_as_such_and_refuses_writes() {
    let mut world = World::new();
    let _daemon = world.daemon(&[]);
    let (domain, image) = (world.domain(7), world.image("disk"));
    let disk = XenDisk::new("manyring", 7, XVDA, image.to_str().unwrap());
    let disk = XenDisk { writable: false, ..disk };
    disk.announce(&mut world.toolstack).unwrap();
    let mut front = connect(&domain, &disk, 1);
    assert_eq!(front.disk.info & 4, 4, "VDISK_READONLY");
    front.queues[0].read(0, &mut [0; 512]).unwrap();
    assert!(front.queues[0].write(0, &[1; 512]).is_err());
    assert!(std::fs::read(&image).unwrap().iter().all(|byte| *byte == 0));
}

#[test]
fn size_that_the_operator_changes_is_told_to_the_guest_while_it_is_connected() {
    let mut world = World::new();
    let _daemon = world.daemon(&[]);
    let (domain, image) = (world.domain(7), world.image("disk"));
    let disk = world.announce(7, XVDA, &image);
    let mut front = connect(&domain, &disk, 1);
    world.resize("xen-vbd-7-51712", "16M");
    world.await_node(&disk, "sectors", "32768");
    assert_eq!(front.look_at_disk().unwrap().sectors, 32_768);
    front.queues[0].write(32_760, &pattern(0, 2)).unwrap();
    assert_eq!(std::fs::metadata(&image).unwrap().len(), 16 << 20);
}

#[test]
fn disks_of_several_guests_come_and_go_while_others_are_used() {
    // A device process stays for a minute when its guest has gone, and holds what it has until
    // then.
    if !only_in_default_form() {
        return;
    }
    let mut world = World::new();
    let daemon = world.daemon(&[]);
    let stays = world.domain(3);
    let kept = world.image("kept");
    let disk = world.announce(3, XVDA, &kept);
    let mut front = connect(&stays, &disk, 2);
    let image = world.image("other");
    let mapped = || daemon.mappings().others.values().sum::<usize>();
    let holdings = || (daemon.holdings().fds, mapped());
    let mut before = (0, 0);
    for round in 0..24_u8 {
        if round == 3 {
            // Each way to go was used once.
            wait_until(|| is_alone(&world));
            before = holdings();
        }
        let goes = world.domain(100 + u16::from(round));
        let other = world.announce(100 + u16::from(round), XVDA + 16, &image);
        let mut guest = connect(&goes, &other, 2);
        guest.queues[1].write(64, &pattern(64, round)).unwrap();
        front.queues[0].write(u64::from(round % 8) * 8, &pattern(0, round)).unwrap();
        match round % 3 {
            // The guest releases it.
            0 => {
                other.detach(&mut world.toolstack).unwrap();
                assert_eq!(guest.close().unwrap(), 0);
                world.await_node(&other, "state", "6");
            }
            // The guest is destroyed; its nodes go later.
            1 => drop((guest, goes)),
            // The nodes go while it is connected.
            _ => {}
        }
        // The next guest takes the file at once.
        other.remove(&mut world.toolstack).unwrap();
    }
    assert!(wait_until(|| is_alone(&world)));
    // Not more than after three rounds. Holdings that those left may have been closed since.
    let is_freed = || holdings().0 <= before.0 && holdings().1 <= before.1;
    assert!(wait_until(is_freed), "{:?}\n{before:?}", holdings());
    for place in 0..8_u8 {
        let mut read = vec![0; 4096];
        front.queues[1].read(u64::from(place) * 8, &mut read).unwrap();
        assert!(read == pattern(0, 16 + place), "{place}");
    }
    assert!(daemon.terminate().success());
}

#[test]
fn disks_that_keep_nothing_or_lie_in_memory_need_no_file() {
    let mut world = World::new();
    let _daemon = world.daemon(&[]);
    let domain = world.domain(7);
    for (device, params, keeps) in [(XVDA, "null:1G", false), (XVDA + 16, "memory:1M", true)] {
        let disk = XenDisk::new("manyring", 7, device, params);
        disk.announce(&mut world.toolstack).unwrap();
        let mut front = connect(&domain, &disk, 1);
        front.queues[0].write(0, &[7; 512]).unwrap();
        let mut read = [1; 512];
        front.queues[0].read(0, &mut read).unwrap();
        assert!(!keeps || read == [7; 512], "{params}");
    }
}
