//! Very many disks that come and go at once.

use crate::support::process::{Daemon, wait_until};
use crate::support::program::shown;
use crate::world::{World, is_alone, small};
use manyring_driver::{Blkfront, BlkfrontQueue, XenDisk, XenDomain};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Guests of a storm, and the disks of each.
const GUESTS: u16 = 8;
const DISKS: u32 = 25;

/// Guests `first..` have `DISKS` disks each, numbered from `device` on, which are all announced
/// before anybody connects; every guest uses each of its disks, and all of them go at once.
fn storm(world: &mut World, first: u16, device: u32) {
    let guests = first..first + GUESTS;
    let domains = guests.clone().map(|number| {
        let pages = DISKS * BlkfrontQueue::pages(&small()) + 64;
        world.domain_of(number, pages)
    });
    let domains: Vec<_> = domains.collect();
    let disk = |guest, index| XenDisk::new("vbd", guest, device + 16 * index, "memory:1M");
    let disks: Vec<Vec<_>> =
        guests.map(|guest| (0..DISKS).map(|index| disk(guest, index)).collect()).collect();
    for disk in disks.iter().flatten() {
        disk.announce(&mut world.toolstack).unwrap();
    }
    let mut fronts = std::thread::scope(|scope| {
        let guests = domains.iter().zip(&disks);
        let guests = guests.map(|(domain, disks)| scope.spawn(move || used(domain, disks)));
        let guests: Vec<_> = guests.collect();
        guests.into_iter().map(|guest| guest.join().unwrap()).collect::<Vec<_>>()
    });
    // One guest of two lets go as it is asked to, the nodes of the others are removed.
    for disk in disks.iter().step_by(2).flatten() {
        disk.detach(&mut world.toolstack).unwrap();
    }
    for disk in disks.iter().skip(1).step_by(2).flatten() {
        disk.remove(&mut world.toolstack).unwrap();
    }
    for front in fronts.iter_mut().step_by(2).flatten() {
        assert_eq!(front.close().unwrap(), 0, "pages stay mapped");
    }
    for disk in disks.iter().step_by(2).flatten() {
        disk.remove(&mut world.toolstack).unwrap();
    }
    assert!(wait_until(|| is_alone(world)));
}

/// Connects a guest to its disks, and uses each.
fn used(domain: &Arc<XenDomain>, disks: &[XenDisk]) -> Vec<Blkfront> {
    let connect = |(index, disk): (usize, &XenDisk)| {
        let mut front = Blkfront::connect(domain, &disk.folder(), &small()).unwrap();
        let data = [index as u8; 512];
        front.queues[0].write(8, &data).unwrap();
        let mut read = [0; 512];
        front.queues[0].read(8, &mut read).unwrap();
        assert_eq!(read, data, "{disk:?}");
        front
    };
    disks.iter().enumerate().map(connect).collect()
}

/// Pages of memory that the daemon has touched.
fn resident(daemon: &Daemon) -> u64 {
    let statm = std::fs::read_to_string(format!("/proc/{}/statm", daemon.pid())).unwrap();
    statm.split(' ').nth(1).unwrap().parse().unwrap()
}

/// Ends threads of a test, also of one that fails.
pub(crate) struct AtEnd<'a>(pub(crate) &'a AtomicBool);

impl Drop for AtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn two_hundred_disks_that_come_and_go_at_once_are_all_served_and_leave_nothing() {
    let mut world = World::new();
    let daemon = world.daemon_of(&["--num-queues", "2"]);
    let (_, _, mut front) = world.guest(3, "kept", 2);
    let control = world.path("control");
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let end = AtEnd(&is_over);
        let neighbour = scope.spawn(|| {
            let mut longest = Duration::ZERO;
            while !is_over.load(Ordering::Relaxed) {
                let start = Instant::now();
                front.queues[0].write(0, &[1; 4096]).unwrap();
                front.queues[1].read(0, &mut [0; 4096]).unwrap();
                longest = longest.max(start.elapsed());
                std::thread::sleep(Duration::from_millis(5));
            }
            longest
        });
        let operator = scope.spawn(|| {
            let mut longest = Duration::ZERO;
            while !is_over.load(Ordering::Relaxed) {
                let start = Instant::now();
                shown(&control, "/v1/devices");
                longest = longest.max(start.elapsed());
                std::thread::sleep(Duration::from_millis(50));
            }
            longest
        });
        let holdings = || (daemon.holdings().fds, daemon.holdings().threads);
        storm(&mut world, 100, 100_000);
        let (before, touched) = (holdings(), resident(&daemon));
        storm(&mut world, 100, 200_000);
        // A worker that has had no queue for a minute ends, and then the daemon holds less.
        let holds_no_more = || holdings().0 <= before.0 && holdings().1 <= before.1;
        assert!(wait_until(holds_no_more), "{:?}, before {before:?}", holdings());
        drop(end);
        let grown = resident(&daemon).saturating_sub(touched);
        assert!(grown < 4096, "{grown} pages of memory are not given back");
        // A hundred times what it takes.
        for waited in [neighbour.join().unwrap(), operator.join().unwrap()] {
            assert!(waited < Duration::from_secs(20), "{waited:?}");
        }
    });
    assert!(daemon.terminate().success());
}
