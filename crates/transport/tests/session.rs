//! A session over a real socket: the effects of a front-end's messages on the device, and their
//! answers. The device is a recorder; it starts no queue.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where it fails")]

mod front;

use front::{Asked, Front, REGION, SLOWER, TIMEOUT, VERSION_1, doorbell, memory, region, rings};
use manyring_wire::vhost_user::{HEADER_SIZE, Region};
use manyring_wire::virtio::{VIRTIO_ID_BLOCK, VIRTIO_ID_NET};
use rustix::fd::AsFd;
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};
use zerocopy::IntoBytes;

#[test]
fn what_the_device_refuses_is_acknowledged_with_1_and_the_session_goes_on() {
    for agrees in [true, false] {
        let mut front = Front::new(VIRTIO_ID_NET, agrees);
        assert_eq!(front.ask("SET_OWNER", &[], &[]), 0);
        assert_eq!(front.device.asked(), [Asked::Features(VERSION_1)]);
        let refused = u64::from(!agrees);
        let mac = [1, 2, 3, 4, 5, 6];
        assert_eq!(front.ask("SEND_RARP", &[1, 2, 3, 4, 5, 6, 0, 0], &[]), refused);
        assert_eq!(front.ask("NET_SET_MTU", 1500u64.as_bytes(), &[]), refused);
        let write = [[4u32, 2, 0].as_bytes(), &[8, 9]].concat();
        assert_eq!(front.ask("SET_CONFIG", &write, &[]), refused);
        let asked = [Asked::Rarp(mac), Asked::Mtu(1500), Asked::Write(4, vec![8, 9])];
        assert_eq!(front.device.asked(), asked);
        assert_eq!(front.leave(), [Asked::Features(0)], "nothing of this guest is left");
    }
}

#[test]
fn the_config_space_is_read_from_its_offset_on() {
    let mut front = Front::new(VIRTIO_ID_BLOCK, true);
    let read = [[20u32, 3, 0].as_bytes(), &[0; 3]].concat();
    front.send("GET_CONFIG", 0, &read, &[]);
    assert_eq!(front.reply(), [[20u32, 3, 0].as_bytes(), &[20, 21, 22]].concat());
}

#[test]
fn requests_of_networks_are_offered_to_networks_only() {
    for (id, offered) in [(VIRTIO_ID_NET, true), (VIRTIO_ID_BLOCK, false)] {
        let mut front = Front::new(id, true);
        front.send("GET_PROTOCOL_FEATURES", 0, &[], &[]);
        let features = front.number();
        assert_eq!(features & (1 << 2 | 1 << 4) == 1 << 2 | 1 << 4, offered);
    }
}

#[test]
fn a_vring_is_handed_to_the_device_with_all_that_was_said() {
    let mut front = Front::new(VIRTIO_ID_BLOCK, true);
    let (kick, call, file) = (doorbell(), doorbell(), memory(REGION.size));
    assert_eq!(front.ask("ADD_MEM_REG", &region(REGION), &[file.as_fd()]), 0);
    front.describe(1);
    assert_eq!(front.ask("SET_VRING_ENABLE", [1u32, 1].as_bytes(), &[]), 0);
    assert_eq!(front.ask("SET_VRING_CALL", 1u64.as_bytes(), &[call.as_fd()]), 0);
    front.device.asked();
    let started = front.ask("SET_VRING_KICK", 1u64.as_bytes(), &[kick.as_fd()]);
    assert_eq!(started, 1, "the device could not");
    let doorbells = [true, true, false];
    assert_eq!(front.device.asked(), [Asked::Start(1, 128, 77.into(), true, doorbells)]);
    // It never can: nothing but a new kick starts the vring again.
    assert_eq!(front.ask("SET_VRING_NUM", [1u32, 64].as_bytes(), &[]), 0);
    assert_eq!(front.device.asked(), []);
    let err = doorbell();
    assert_eq!(front.ask("SET_VRING_ERR", 1u64.as_bytes(), &[err.as_fd()]), 0);
    front.ask("SET_VRING_KICK", (1u64 | 1 << 8).as_bytes(), &[]);
    let doorbells = [false, true, true];
    assert_eq!(front.device.asked(), [Asked::Start(1, 64, 77.into(), true, doorbells)]);
    front.send("GET_VRING_BASE", 0, [1u32, 0].as_bytes(), &[]);
    assert_eq!(front.reply(), [1u32, 77].as_bytes());
}

#[test]
fn a_vring_that_the_host_lacks_something_for_is_tried_again_with_all_that_was_said() {
    let mut front = Front::new(VIRTIO_ID_BLOCK, true);
    let (kick, file) = (doorbell(), memory(REGION.size));
    assert_eq!(front.ask("ADD_MEM_REG", &region(REGION), &[file.as_fd()]), 0);
    front.describe(0);
    front.device.asked();
    front.device.shortages.store(3, Ordering::Relaxed);
    let started = front.ask("SET_VRING_KICK", 0u64.as_bytes(), &[kick.as_fd()]);
    assert_eq!(started, 0, "it is accepted, and starts when it can");
    // Without a further word of the front-end; the last time it cannot start at all.
    let (began, mut asked) = (SystemTime::now(), Vec::new());
    while asked.len() < 4 && began.elapsed().unwrap() < TIMEOUT {
        std::thread::sleep(Duration::from_millis(10));
        asked.extend(front.device.asked());
    }
    let start = Asked::Start(0, 128, 77.into(), false, [true, false, false]);
    assert_eq!(asked, vec![start; 4]);
    front.send("GET_VRING_BASE", 0, [0u32, 0].as_bytes(), &[]);
    assert_eq!(front.reply(), [0u32, 77].as_bytes());
}

#[test]
fn a_vring_that_waits_for_the_host_is_the_front_ends_to_stop_and_to_change() {
    let mut front = Front::new(VIRTIO_ID_BLOCK, true);
    let (kick, file) = (doorbell(), memory(REGION.size));
    assert_eq!(front.ask("ADD_MEM_REG", &region(REGION), &[file.as_fd()]), 0);
    front.device.shortages.store(u32::MAX, Ordering::Relaxed);
    for size in [128u32, 64] {
        front.describe(0);
        assert_eq!(front.ask("SET_VRING_NUM", [0, size].as_bytes(), &[]), 0);
        assert_eq!(front.ask("SET_VRING_KICK", 0u64.as_bytes(), &[kick.as_fd()]), 0);
        front.send("GET_VRING_BASE", 0, [0u32, 0].as_bytes(), &[]);
        assert_eq!(front.reply(), [0u32, 77].as_bytes());
        let tries = front.device.asked().into_iter().filter_map(|asked| match asked {
            Asked::Start(0, size, ..) => Some(u32::from(size)),
            _ => None,
        });
        let tries: Vec<_> = tries.collect();
        assert!(!tries.is_empty() && tries.iter().all(|tried| *tried == size), "{tries:?}");
    }
    assert_eq!(front.leave(), [Asked::Features(0)]);
}

#[test]
fn a_ring_that_is_not_in_memory_is_told_at_its_err_and_starts_when_it_is() {
    let mut front = Front::new(VIRTIO_ID_BLOCK, true);
    let (kick, err, file) = (doorbell(), doorbell(), memory(REGION.size));
    let elsewhere = Region { guest_addr: 1 << 30, user_addr: 0x1000, ..REGION };
    assert_eq!(front.ask("ADD_MEM_REG", &region(elsewhere), &[file.as_fd()]), 0);
    front.describe(0);
    assert_eq!(front.ask("SET_VRING_ERR", 0u64.as_bytes(), &[err.as_fd()]), 0);
    front.device.asked();
    assert_eq!(front.ask("SET_VRING_KICK", 0u64.as_bytes(), &[kick.as_fd()]), 1);
    assert!(rings(&err), "its err was rung");
    assert_eq!(front.device.asked(), []);
    front.ask("ADD_MEM_REG", &region(REGION), &[file.as_fd()]);
    let doorbells = [true, false, true];
    assert_eq!(front.device.asked(), [Asked::Start(0, 128, 77.into(), false, doorbells)]);
}

#[test]
fn memory_that_is_removed_or_replaced_is_gone() {
    let mut front = Front::new(VIRTIO_ID_BLOCK, true);
    let (err, file) = (doorbell(), memory(REGION.size));
    let other = Region { guest_addr: 1 << 30, user_addr: 0x1000, ..REGION };
    front.describe(0);
    assert_eq!(front.ask("SET_VRING_ERR", 0u64.as_bytes(), &[err.as_fd()]), 0);
    let starts = |front: &mut Front| {
        let kick = doorbell();
        front.device.asked();
        front.ask("SET_VRING_KICK", 0u64.as_bytes(), &[kick.as_fd()]);
        !front.device.asked().is_empty()
    };
    assert_eq!(front.ask("ADD_MEM_REG", &region(REGION), &[file.as_fd()]), 0);
    assert_eq!(front.ask("ADD_MEM_REG", &region(other), &[file.as_fd()]), 0);
    assert!(starts(&mut front));
    assert_eq!(front.ask("REM_MEM_REG", &region(REGION), &[]), 0);
    assert!(!starts(&mut front), "its region was removed");
    let table = [2u32.as_bytes(), &[0; 4], other.as_bytes(), REGION.as_bytes()].concat();
    front.ask("SET_MEM_TABLE", &table, &[file.as_fd(), file.as_fd()]);
    assert!(starts(&mut front));
    let table = [1u32.as_bytes(), &[0; 4], other.as_bytes()].concat();
    assert_eq!(front.ask("SET_MEM_TABLE", &table, &[file.as_fd()]), 0);
    assert!(!starts(&mut front), "the table is all there is");
}

#[test]
fn memory_and_doorbells_that_are_none_end_the_session() {
    let (short, file) = (memory(REGION.size - 1), memory(REGION.size));
    let mut front = Front::new(VIRTIO_ID_BLOCK, true);
    assert!(front.ends_with("ADD_MEM_REG", &region(REGION), &[short.as_fd()]));
    for name in ["SET_VRING_KICK", "SET_VRING_CALL", "SET_VRING_ERR"] {
        let mut front = Front::new(VIRTIO_ID_BLOCK, true);
        assert!(front.ends_with(name, 0u64.as_bytes(), &[file.as_fd()]), "{name}");
    }
    let mut front = Front::new(VIRTIO_ID_BLOCK, true);
    assert!(front.ends_with("SET_BACKEND_REQ_FD", &[], &[file.as_fd()]));
}

#[test]
fn a_change_of_the_config_space_is_told_on_the_back_end_channel() {
    let mut front = Front::new(VIRTIO_ID_BLOCK, true);
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    ours.set_read_timeout(Some(TIMEOUT)).unwrap();
    front.device.changes.send_modify(|n| *n += 1);
    assert_eq!(front.ask("SET_BACKEND_REQ_FD", &[], &[theirs.as_fd()]), 0);
    front.device.changes.send_modify(|n| *n += 1);
    let mut bytes = [0; HEADER_SIZE];
    ours.read_exact(&mut bytes).unwrap();
    // BACKEND_CONFIG_CHANGE_MSG, version 1, no payload.
    assert_eq!(bytes[..], *[2u32, 1, 0].as_bytes());
}

#[test]
fn messages_that_cost_much_cpu_time_are_read_when_those_before_are_paid_for() {
    let mut front = Front::new(VIRTIO_ID_BLOCK, true);
    let began = SystemTime::now();
    for _ in 0..25 {
        assert_eq!(front.write_for(40 * SLOWER), 0);
    }
    // The credit is used up. Beyond it, a twentieth of the time is theirs.
    assert_eq!(front.write_for(20), 0);
    assert_eq!(front.write_for(1), 0);
    let took = began.elapsed().unwrap();
    assert!(took >= Duration::from_millis(20 * 20), "{took:?}");
    assert_eq!(front.device.asked().len(), 1 + 27, "each was carried out");
}

#[test]
fn a_second_message_that_takes_far_too_much_cpu_time_ends_the_session() {
    let mut front = Front::new(VIRTIO_ID_BLOCK, true);
    assert_eq!(front.write_for(60 * SLOWER), 0);
    for _ in 0..10 {
        assert_eq!(front.write_for(40 * SLOWER), 0, "not far too much");
    }
    // The second one is carried out, and answered: what it took is known afterwards.
    assert_eq!(front.write_for(60 * SLOWER), 0);
    assert!(front.is_ended());
    let asked = front.leave();
    assert_eq!(asked.len(), 1 + 12 + 1);
    assert_eq!(asked.last(), Some(&Asked::Features(0)), "the session was torn down");
}
