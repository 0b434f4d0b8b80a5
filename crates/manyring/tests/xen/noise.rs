//! Guests and tool stacks that write without end, and daemons that are killed again and again,
//! while others come and go.

use crate::storm::AtEnd;
use crate::support::process::{TIMEOUT, wait_until};
use crate::support::program::shown;
use crate::world::{World, XVDA, connect, small};
use manyring_backend::blk::{Image, ImageOptions};
use manyring_driver::{Blkfront, XenDisk, XenDomain, XenStore};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long other disks may wait: thirty times what they wait alone.
const BOUND: Duration = Duration::from_secs(15);

/// Numbers that look random, the same in each run.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) % end
    }

    fn pause(&mut self, longest_ms: u64) {
        std::thread::sleep(Duration::from_millis(self.below(longest_ms)));
    }
}

/// A disk of each of these domains, not announced.
fn disks_of(domains: Range<u16>) -> Vec<XenDisk> {
    domains.map(|number| XenDisk::new("vbd", number, XVDA, "memory:1M")).collect()
}

/// Names the largest number of rings that a front-end may, then others, until its folder is gone.
pub(crate) fn rewrite(domain: &Arc<XenDomain>, disk: &XenDisk, is_over: &AtomicBool) {
    let mut store = XenStore::new(domain.store().try_clone().unwrap(), TIMEOUT);
    let folder = disk.folder();
    store.write(&format!("{folder}/multi-queue-num-queues"), 8).unwrap();
    store.write(&format!("{folder}/ring-page-order"), 4).unwrap();
    let states = [1, 3, 4, 5, 6];
    for (round, state) in states.iter().cycle().enumerate() {
        for queue in 0..8 {
            let node = format!("{folder}/queue-{queue}/ring-ref0");
            if is_over.load(Ordering::Relaxed) || store.write(&node, round).is_err() {
                return;
            }
        }
        let _ = store.write(&format!("{folder}/state"), state);
    }
}

#[test]
fn guests_that_rewrite_their_nodes_without_end_do_not_keep_others_from_their_disks() {
    let mut world = World::new();
    let daemon = world.daemon(&[]);
    let control = world.path("control");
    let noisy: Vec<_> = (100..106).map(|number| world.domain(number)).collect();
    let disks = disks_of(100..106);
    disks.iter().for_each(|disk| disk.announce(&mut world.toolstack).unwrap());
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _end = AtEnd(&is_over);
        for (domain, disk) in noisy.iter().zip(&disks) {
            scope.spawn(|| rewrite(domain, disk, &is_over));
        }
        for disk in disks_of(10..20) {
            let (domain, start) = (world.domain(disk.domain), Instant::now());
            disk.announce(&mut world.toolstack).unwrap();
            connect(&domain, &disk, 4).queues[3].write(0, &[1; 512]).unwrap();
            shown(&control, "/v1/devices");
            assert!(start.elapsed() < BOUND, "{:?}", start.elapsed());
            disk.remove(&mut world.toolstack).unwrap();
        }
        // Their own disks can be taken away all the same.
        disks.iter().for_each(|disk| disk.remove(&mut world.toolstack).unwrap());
        let is_empty = || shown(&control, "/v1/devices")["devices"].as_array().unwrap().is_empty();
        assert!(wait_until(is_empty));
    });
    assert!(daemon.terminate().success());
}

#[test]
fn hundred_disks_that_cannot_be_opened_soon_or_at_all_hold_nobody_up() {
    let mut world = World::new();
    let _daemon = world.daemon(&[]);
    let (fifo, locked) = (world.path("fifo"), world.image("locked"));
    mknodat(CWD, &fifo, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    // Whoever opens it waits for its lock, for ten seconds.
    let _lock = Image::open(&locked, ImageOptions::default()).unwrap();
    let params = [fifo, world.path(""), "/dev/tty".into(), "/dev/zero".into(), locked];
    let params = params.map(|path| path.display().to_string());
    let disk = |n| XenDisk::new("vbd", 9, n, &params[n as usize % params.len()]);
    let disks: Vec<_> = (1..=100).map(disk).collect();
    disks.iter().for_each(|disk| disk.announce(&mut world.toolstack).unwrap());
    let is_waiting = |disk: &&XenDisk| disk.params.ends_with("locked");
    let waiting: Vec<_> = disks.iter().filter(is_waiting).collect();
    let (domain, kept) = (world.domain(3), world.image("kept"));
    let disk = world.announce(3, XVDA, &kept);
    connect(&domain, &disk, 2).queues[1].write(0, &[1; 512]).unwrap();
    shown(&world.path("control"), "/v1/devices");
    for disk in waiting {
        let state = world.toolstack.read(&format!("{}/state", disk.back())).unwrap();
        assert_eq!(state.as_deref(), Some(&b"1"[..]), "it waits longer than its neighbour");
    }
    for disk in &disks {
        world.await_node(disk, "state", "6");
        let error = world.error_of(disk);
        let words = if is_waiting(&disk) { "is in use" } else { "is neither a file nor a block" };
        assert!(error.contains(words), "{disk:?}: {error}");
    }
}

#[test]
fn disk_that_comes_and_goes_faster_than_it_is_looked_at_is_served_when_it_stays() {
    let mut world = World::new();
    let daemon = world.daemon(&[]);
    let domains: Vec<_> = (20..24).map(|number| world.domain(number)).collect();
    let (disks, mut random) = (disks_of(20..24), Random(7));
    for round in 0..4 {
        for _ in 0..40 {
            let disk = &disks[random.below(4) as usize];
            match random.below(2) {
                0 => disk.announce(&mut world.toolstack).unwrap(),
                _ => disk.remove(&mut world.toolstack).unwrap(),
            }
            random.pause(16);
        }
        for disk in &disks {
            disk.remove(&mut world.toolstack).unwrap();
            disk.announce(&mut world.toolstack).unwrap();
        }
        for (domain, disk) in domains.iter().zip(&disks) {
            let front = Blkfront::connect(domain, &disk.folder(), &small());
            let mut front = front.unwrap_or_else(|error| panic!("{round}, {disk:?}: {error}"));
            front.queues[0].write(0, &[1; 512]).unwrap();
        }
    }
    assert!(daemon.terminate().success());
}

#[test]
fn guests_that_come_and_go_while_daemons_are_killed_are_all_served() {
    let mut world = World::new();
    let mut daemon = world.daemon(&[]);
    let domains: Vec<_> = (20..24).map(|number| world.domain_of(number, 8000)).collect();
    let disks = disks_of(20..24);
    disks.iter().for_each(|disk| disk.announce(&mut world.toolstack).unwrap());
    let is_over = AtomicBool::new(false);
    let use_on = |domain: &Arc<XenDomain>, disk: &XenDisk| {
        // Each connection takes pages of the domain for good.
        for round in 0..200 {
            if is_over.load(Ordering::Relaxed) {
                return;
            }
            let front = Blkfront::connect(domain, &disk.folder(), &small());
            let mut front = front.unwrap_or_else(|error| panic!("{round}, {disk:?}: {error}"));
            front.queues[0].write(8, &[round; 512]).unwrap();
            assert_eq!(front.close().unwrap(), 0, "pages stay mapped");
        }
    };
    std::thread::scope(|scope| {
        let _end = AtEnd(&is_over);
        let guests = domains.iter().zip(&disks);
        guests.for_each(|(domain, disk)| drop(scope.spawn(|| use_on(domain, disk))));
        let mut random = Random(7);
        for _ in 0..10 {
            random.pause(256);
            world.kill(&mut daemon);
            daemon = world.daemon(&[]);
        }
    });
    assert!(daemon.terminate().success());
}
