//! Address space: what one front-end can have mapped leaves room for its neighbours.

use crate::support::process::Daemon;
use manyring_driver::wire::vhost_user::{
    PROTOCOL_F_CONFIGURE_MEM_SLOTS, PROTOCOL_F_REPLY_ACK, Region,
};
use manyring_driver::{BlkDriver, BlkDriverOptions, DriverOp, FrontEnd};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::time::Duration;

const CONFIG: &str = "[[blk]]\nname = 'bad'\nsocket_path = '@/bad'\nmemory = '16M'\n\
    [[blk]]\nname = 'good'\nsocket_path = '@/good'\nmemory = '16M'\n\
    [[blk]]\nname = 'late'\nsocket_path = '@/late'\nmemory = '16M'\n";
const LONG: Duration = Duration::from_secs(30);

/// A front-end whose memory has these sizes, or the first of them if it may not have all: one file
/// without a page.
fn vast(daemon: &Daemon, file: &OwnedFd, sizes: &mut Vec<u64>) -> FrontEnd {
    loop {
        let mut front = FrontEnd::connect(&daemon.socket_of("bad"), LONG).unwrap();
        let protocol = PROTOCOL_F_CONFIGURE_MEM_SLOTS | PROTOCOL_F_REPLY_ACK;
        front.negotiate(0, 1 << 30, protocol).unwrap();
        let mut at = 0;
        let is_whole = sizes.iter().all(|&size| {
            let place = Region { guest_addr: at, size, user_addr: at, mmap_offset: 0 };
            at += size;
            front.add_mem_region(&(place, file.as_fd())).is_ok()
        });
        if is_whole {
            return front;
        }
        sizes.pop();
    }
}

#[test]
fn a_front_end_of_vast_memory_leaves_room_for_its_neighbours() {
    let daemon = Daemon::run(CONFIG, &["bad", "good", "late"]);
    let mut good =
        BlkDriver::connect(&daemon.socket_of("good"), &BlkDriverOptions::default()).unwrap();
    let file = memfd_create("vast", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, 1 << 46).unwrap();
    // It finds out by trying how much it can have.
    let mut sizes = Vec::new();
    for size in (16..=46).rev().map(|bits| 1 << bits) {
        let mut before = usize::MAX;
        while before != sizes.len() && sizes.len() < 500 {
            before = sizes.len();
            sizes.push(size);
            drop(vast(&daemon, &file, &mut sizes));
        }
    }
    let mut bad = vast(&daemon, &file, &mut sizes);
    bad.features().expect("its session goes on");
    good.queues[0].run(DriverOp::Flush).expect("the neighbour goes on");
    let late = BlkDriver::connect(&daemon.socket_of("late"), &BlkDriverOptions::default());
    late.expect("another guest can come").queues[0].run(DriverOp::Flush).unwrap();
}
