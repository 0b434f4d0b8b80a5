//! Changes of rings that run: another memory table, regions added and removed, enable and disable,
//! stop and start, no call, no kick. Nothing is lost, stuck or changed.

use crate::load::Load;
use crate::support::process::{self, Daemon, TIMEOUT};
use crate::support::rings::{Restart, StopAtEnd, replace_table, spare_region};
use manyring_driver::{BlkDriver, BlkDriverOptions, DriverOp};
use manyring_wire::vhost_user::{
    PROTOCOL_F_CONFIG, PROTOCOL_F_CONFIGURE_MEM_SLOTS, PROTOCOL_F_MQ, PROTOCOL_F_REPLY_ACK,
};
use rustix::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

const QUEUES: u16 = 2;
fn connect(daemon: &Daemon, queues: u16) -> BlkDriver {
    let options = BlkDriverOptions {
        queues,
        protocol_features: PROTOCOL_F_MQ
            | PROTOCOL_F_CONFIG
            | PROTOCOL_F_REPLY_ACK
            | PROTOCOL_F_CONFIGURE_MEM_SLOTS,
        ..BlkDriverOptions::default()
    };
    BlkDriver::connect(&daemon.socket(), &options).unwrap()
}

/// Runs `change` again and again while all queues are busy; each time they must get on.
fn under_load(arguments: &[&str], rounds: usize, mut change: impl FnMut(&mut BlkDriver, usize)) {
    let daemon = Daemon::blk(arguments);
    let mut driver = connect(&daemon, QUEUES);
    let seed = 0x5eed;
    println!("seed {seed:#x}");
    let queues = std::mem::take(&mut driver.queues);
    let mut loads: Vec<_> =
        queues.into_iter().zip(0..).map(|(q, i)| Load::new(q, i, seed)).collect();
    let stop = AtomicBool::new(false);
    let done: Vec<_> = loads.iter().map(|_| AtomicU64::new(0)).collect();
    std::thread::scope(|scope| {
        for (load, done) in loads.iter_mut().zip(&done) {
            scope.spawn(|| load.run(&stop, done));
        }
        let _stop = StopAtEnd(&stop);
        let get_on = |at_least: u64| {
            let now = || done.iter().map(|d| d.load(Ordering::Relaxed)).collect::<Vec<_>>();
            let before = now();
            let got_on = process::wait_until(|| {
                now().iter().zip(&before).all(|(now, before)| *now >= before + at_least)
            });
            assert!(got_on, "{arguments:?}: requests done by queue: {before:?}, then {:?}", now());
        };
        get_on(100);
        for round in 0..rounds {
            change(&mut driver, round);
            get_on(50);
        }
    });
    assert!(!daemon.log().contains("WARN"), "{}", daemon.log());
}

const ARGUMENTS: [&[&str]; 3] = [
    &["--memory=16M", "--num-queues=2"],
    &["--memory=16M", "--num-queues=2", "--no-io-uring"],
    &["--memory=16M", "--num-queues=2", "--workers=1", "--spin-us=0"],
];

#[test]
fn a_memory_table_is_replaced_under_load() {
    for arguments in ARGUMENTS {
        under_load(arguments, 40, |driver, round| {
            replace_table(&mut driver.front, &driver.arena, round);
        });
    }
}

#[test]
fn a_memory_table_is_replaced_while_a_file_disk_works_past_the_page_cache() {
    let image = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    image.as_file().set_len(16 << 20).unwrap();
    let file = format!("--blk-file={}", image.path().display());
    under_load(&[&file, "--direct", "--num-queues=2"], 40, |driver, _| {
        let arena = driver.arena.clone();
        driver.front.set_memory(&arena).unwrap();
    });
}

#[test]
fn regions_come_and_go_under_load() {
    for arguments in ARGUMENTS {
        let mut spares = Vec::new();
        under_load(arguments, 40, |driver, round| {
            if round % 4 == 3 {
                for (region, _) in spares.drain(..) {
                    driver.front.remove_mem_region(&region).unwrap();
                }
            } else {
                let (region, file) = spare_region(round as u64);
                driver.front.add_mem_region(&(region, file.as_fd())).unwrap();
                spares.push((region, file));
            }
        });
    }
}

#[test]
fn queues_are_disabled_and_enabled_under_load() {
    for arguments in ARGUMENTS {
        under_load(arguments, 40, |driver, round| {
            let index = u32::try_from(round).unwrap() % u32::from(QUEUES);
            driver.front.set_vring_enable(index, false).unwrap();
            std::thread::sleep(Duration::from_millis(round as u64 % 4));
            driver.front.set_vring_enable(index, true).unwrap();
        });
    }
}

#[test]
fn queues_are_stopped_and_started_under_load() {
    for arguments in ARGUMENTS {
        let daemon = Daemon::blk(arguments);
        let mut driver = connect(&daemon, QUEUES);
        let restarts: Vec<_> = driver.queues.iter_mut().map(|q| Restart::of(q.vring())).collect();
        let mut loads: Vec<_> = driver.queues.drain(..).zip(0..).collect();
        let (stop, done) = (AtomicBool::new(false), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for (queue, index) in loads.drain(..) {
                let (stop, done) = (&stop, &done);
                scope.spawn(move || Load::new(queue, index, 1).run(stop, done));
            }
            let _stop = StopAtEnd(&stop);
            for round in 0..60 {
                restarts[round % restarts.len()].run(&mut driver.front);
                let goal = done.load(Ordering::Relaxed) + 50;
                assert!(process::wait_until(|| done.load(Ordering::Relaxed) >= goal), "{round}");
            }
        });
        assert!(!daemon.log().contains("WARN"), "{}", daemon.log());
    }
}

#[test]
fn a_kick_that_comes_before_enable_is_not_lost() {
    let daemon = Daemon::blk(&["--memory=16M"]);
    for _ in 0..20 {
        let mut driver = connect(&daemon, 1);
        driver.front.set_vring_enable(0, false).unwrap();
        let queue = &mut driver.queues[0];
        queue.submit(DriverOp::Read { sector: 0, len: 512 }).unwrap().unwrap();
        queue.publish().unwrap();
        queue.vring().kick().unwrap();
        assert!(queue.wait(Duration::from_millis(20)).is_err(), "a disabled ring is not served");
        driver.front.set_vring_enable(0, true).unwrap();
        assert_eq!(driver.queues[0].wait(TIMEOUT).unwrap().status, 0);
        drop(driver);
    }
}

#[test]
fn a_queue_without_call_is_served_to_a_driver_that_polls() {
    for arguments in ARGUMENTS {
        let daemon = Daemon::blk(arguments);
        let mut driver = connect(&daemon, 1);
        driver.front.set_vring_call(0, None).unwrap();
        let queue = &mut driver.queues[0];
        for sector in 0..500 {
            queue.submit(DriverOp::Read { sector, len: 512 }).unwrap().unwrap();
            queue.publish().unwrap();
            assert_eq!(queue.poll(TIMEOUT).unwrap().status, 0);
        }
    }
}

#[test]
fn a_queue_without_kick_is_looked_at_by_the_device() {
    for arguments in ARGUMENTS {
        let daemon = Daemon::blk(arguments);
        let mut driver = connect(&daemon, 1);
        driver.front.set_vring_kick(0, None).unwrap();
        let queue = &mut driver.queues[0];
        for sector in 0..50 {
            queue.submit(DriverOp::Read { sector, len: 512 }).unwrap().unwrap();
            queue.vring().queue().publish();
            assert_eq!(queue.poll(TIMEOUT).unwrap().status, 0);
            // Long enough for the device to stop spinning.
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}
