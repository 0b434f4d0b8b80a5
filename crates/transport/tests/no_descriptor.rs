//! A host that has no file descriptor left for an in-flight region. A test program of its own: the
//! limit is the process's.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where it fails")]

mod front;

use front::{Asked, Front, REGION, doorbell, memory, region};
use manyring_wire::vhost_user::InflightArea;
use manyring_wire::virtio::VIRTIO_ID_BLOCK;
use rustix::fd::{AsFd, AsRawFd};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use zerocopy::{FromBytes, IntoBytes};

#[test]
fn a_front_end_for_whose_region_the_host_has_no_descriptor_is_served_without_one() {
    let mut front = Front::new(VIRTIO_ID_BLOCK, true);
    let (file, kick) = (memory(REGION.size), doorbell());
    assert_eq!(front.ask("ADD_MEM_REG", &region(REGION), &[file.as_fd()]), 0);
    front.describe(0);
    let limit = getrlimit(Resource::Nofile);
    let next = rustix::io::dup(&file).unwrap();
    let first_free = next.as_raw_fd().try_into().ok();
    drop(next);
    setrlimit(Resource::Nofile, Rlimit { current: first_free, ..limit }).unwrap();
    let asked = InflightArea { queues: 2, queue_size: 128, ..InflightArea::default() };
    front.send("GET_INFLIGHT_FD", 0, asked.as_bytes(), &[]);
    let answer = front.reply();
    setrlimit(Resource::Nofile, limit).unwrap();
    // No bytes: QEMU then gives no region.
    assert_eq!(InflightArea::read_from_bytes(&answer).unwrap(), InflightArea::default());
    front.ask("SET_VRING_KICK", 0_u64.as_bytes(), &[kick.as_fd()]);
    let started = Asked::Start(0, 128, 77.into(), false, [true, false, false]);
    assert!(front.leave().contains(&started));
}
