//! The control queue of a device: what each command does, and when.

mod effect;
mod late;
mod rss;

use super::guest::*;
use super::*;
use crate::Device;
use manyring_engine::EventKind;
use manyring_engine::{Call, Kick};
use manyring_engine::{FdReservation, Origin};
use manyring_wire::net::*;
use manyring_wire::virtio::VIRTIO_F_VERSION_1;
use rustix::event::{EventfdFlags, eventfd};
use std::time::Duration;
use tokio::time::Instant;

/// Every command with data that is right, and the feature it needs.
fn commands() -> Vec<(u8, u8, Vec<u8>, u64)> {
    let coalescing = [[4, 0, 0, 0], [9, 0, 0, 0]].concat();
    let of_queue = [&[1, 0, 0, 0][..], &coalescing].concat();
    let table = [&[1, 0, 0, 0][..], &[2, 0, 0, 0, 0, 7], &[0; 4]].concat();
    vec![
        (class::RX, class::RX_PROMISC, vec![1], VIRTIO_NET_F_CTRL_RX),
        (class::RX, class::RX_ALLMULTI, vec![1], VIRTIO_NET_F_CTRL_RX),
        (class::RX, class::RX_ALLUNI, vec![0], VIRTIO_NET_F_CTRL_RX_EXTRA),
        (class::RX, class::RX_NOMULTI, vec![0], VIRTIO_NET_F_CTRL_RX_EXTRA),
        (class::RX, class::RX_NOUNI, vec![0], VIRTIO_NET_F_CTRL_RX_EXTRA),
        (class::RX, class::RX_NOBCAST, vec![0], VIRTIO_NET_F_CTRL_RX_EXTRA),
        (class::MAC, class::MAC_TABLE_SET, table, VIRTIO_NET_F_CTRL_RX),
        (class::MAC, class::MAC_ADDR_SET, vec![2, 0, 0, 0, 0, 8], VIRTIO_NET_F_CTRL_MAC_ADDR),
        (class::VLAN, class::VLAN_ADD, vec![5, 0], VIRTIO_NET_F_CTRL_VLAN),
        (class::VLAN, class::VLAN_DEL, vec![5, 0], VIRTIO_NET_F_CTRL_VLAN),
        (class::ANNOUNCE, class::ANNOUNCE_ACK, vec![], VIRTIO_NET_F_GUEST_ANNOUNCE),
        (class::MQ, class::MQ_VQ_PAIRS_SET, vec![2, 0], VIRTIO_NET_F_MQ),
        (class::MQ, class::MQ_RSS_CONFIG, rss::config(&[0, 1]).emit(), VIRTIO_NET_F_RSS),
        (class::MQ, class::MQ_HASH_CONFIG, rss::hash().emit(), VIRTIO_NET_F_HASH_REPORT),
        (
            class::GUEST_OFFLOADS,
            class::GUEST_OFFLOADS_SET,
            vec![2, 0, 0, 0, 0, 0, 0, 0],
            VIRTIO_NET_F_CTRL_GUEST_OFFLOADS,
        ),
        (class::NOTF_COAL, class::NOTF_COAL_TX_SET, coalescing.clone(), VIRTIO_NET_F_NOTF_COAL),
        (class::NOTF_COAL, class::NOTF_COAL_RX_SET, coalescing, VIRTIO_NET_F_NOTF_COAL),
        (class::NOTF_COAL, class::NOTF_COAL_VQ_SET, of_queue, VIRTIO_NET_F_VQ_NOTF_COAL),
        (class::NOTF_COAL, class::NOTF_COAL_VQ_GET, vec![1, 0], VIRTIO_NET_F_VQ_NOTF_COAL),
    ]
}

#[test]
fn each_command_is_obeyed_if_its_feature_was_negotiated_and_refused_if_not() {
    let mut guest = Guest::new(EVERYTHING);
    for (kind, command, data, _) in commands() {
        assert_eq!(guest.command(kind, command, &data), OK, "{kind} {command}");
    }
    for (kind, command, data, feature) in commands() {
        // Without MQ the control queue lies elsewhere: nothing else has that effect.
        if feature != VIRTIO_NET_F_MQ {
            let mut guest = Guest::new(EVERYTHING & !feature);
            assert_eq!(guest.command(kind, command, &data), ERR, "{kind} {command}");
        }
    }
}

#[test]
fn commands_that_are_none_are_refused_and_the_next_one_is_served() {
    let mut guest = Guest::new(EVERYTHING);
    for (kind, command, data, _) in commands() {
        if command != class::NOTF_COAL_VQ_GET || kind != class::NOTF_COAL {
            assert_eq!(
                guest.command(kind, command, &[&data[..], &[0]].concat()),
                ERR,
                "{kind} {command}"
            );
        }
        if let Some((_, short)) = data.split_last() {
            assert_eq!(guest.command(kind, command, short), ERR, "{kind} {command}");
        }
        assert_eq!(guest.command(kind, 200, &data), ERR);
        assert_eq!(guest.command(200, command, &data), ERR);
    }
    assert_eq!(guest.command_with(&[], 1), [ERR]);
    assert_eq!(guest.command_with(&[class::RX], 1), [ERR]);
    for pairs in [0u16, 3, 0x8001, u16::MAX] {
        assert_eq!(guest.command(class::MQ, class::MQ_VQ_PAIRS_SET, &pairs.to_le_bytes()), ERR);
    }
    assert_eq!(guest.command(class::MAC, class::MAC_ADDR_SET, &[1, 0, 0, 0, 0, 1]), ERR);
    assert_eq!(guest.command(class::VLAN, class::VLAN_ADD, &[0, 0x10]), ERR);
    assert_eq!(guest.command(class::GUEST_OFFLOADS, 0, &[0xff; 8]), ERR);
    // Offloads that there are and that this driver has not negotiated.
    let mut guest = Guest::new(EVERYTHING & !VIRTIO_NET_F_GUEST_TSO4);
    let bits = VIRTIO_NET_F_GUEST_CSUM | VIRTIO_NET_F_GUEST_TSO4;
    assert_eq!(guest.command(class::GUEST_OFFLOADS, 0, &bits.to_le_bytes()), ERR);
    assert_eq!(guest.command(class::RX, class::RX_PROMISC, &[1]), OK);
    assert!(guest.events.try_recv().is_err(), "none of that is a fault of the ring");
}

#[test]
fn a_long_command_is_read_up_to_its_bound() {
    let mut guest = Guest::new(EVERYTHING);
    let table = |count: u32| {
        let macs: Vec<u8> =
            (0..count).flat_map(|n| [&[2, 0][..], &n.to_be_bytes()].concat()).collect();
        [&count.to_le_bytes()[..], &macs, &[0; 4]].concat()
    };
    assert_eq!(guest.command(class::MAC, class::MAC_TABLE_SET, &table(10_900)), OK);
    assert_eq!(guest.command(class::MAC, class::MAC_TABLE_SET, &table(10_930)), ERR);
    assert_eq!(guest.command(class::RX, class::RX_PROMISC, &[0; 64 << 10]), ERR);
}

#[test]
fn a_command_without_a_status_byte_stops_the_control_queue_alone() {
    for bytes in [&[class::RX, class::RX_PROMISC, 1][..], &[class::RX]] {
        let mut guest = Guest::new(EVERYTHING);
        guest.offer(bytes, 0);
        assert!(matches!(guest.next_event(), EventKind::Fault(_)));
        assert!(guest.ring.driver.take_used().is_none());
        assert_eq!(guest.device.stats(COUNT).unwrap().faults.value(), 1);
        assert_eq!(guest.device.stats(0).unwrap().running.value(), 1);
        guest.stop_control();
        guest.start_control();
        assert_eq!(guest.command(class::RX, class::RX_PROMISC, &[1]), OK);
    }
}

#[test]
fn the_host_uses_the_pairs_that_the_control_queue_says() {
    let mut guest = Guest::new(EVERYTHING);
    assert_eq!(guest.attached(), [true, false], "one pair until the driver says more");
    assert_eq!(guest.command(class::MQ, class::MQ_VQ_PAIRS_SET, &[2, 0]), OK);
    assert_eq!(guest.attached(), [true, true]);
    assert_eq!(guest.command(class::MQ, class::MQ_VQ_PAIRS_SET, &[0, 0]), ERR);
    assert_eq!(guest.attached(), [true, true]);
    assert_eq!(guest.command(class::MQ, class::MQ_VQ_PAIRS_SET, &[1, 0]), OK);
    assert_eq!(guest.attached(), [true, false]);
}

#[test]
fn coalescing_is_told_as_it_was_set() {
    let mut guest = Guest::new(EVERYTHING);
    assert_eq!(guest.coalescing_of(0), Ok((0, 0)));
    let rx = [[8, 0, 0, 0], [50, 0, 0, 0]].concat();
    assert_eq!(guest.command(class::NOTF_COAL, class::NOTF_COAL_RX_SET, &rx), OK);
    let one = [&[3, 0, 0, 0][..], &[1, 0, 0, 0], &[255, 255, 255, 255]].concat();
    assert_eq!(guest.command(class::NOTF_COAL, class::NOTF_COAL_VQ_SET, &one), OK);
    let all: Vec<_> = (0..4).map(|index| guest.coalescing_of(index)).collect();
    assert_eq!(all, [Ok((8, 50)), Ok((0, 0)), Ok((8, 50)), Ok((1, u32::MAX))]);
    // The control queue, and one that there is not.
    assert_eq!(guest.coalescing_of(4), Err(ERR));
    assert_eq!(guest.coalescing_of(u16::MAX), Err(ERR));
    // One that the driver has not started.
    let (_ring, handle) = guest.data.pop().unwrap();
    guest.runtime.block_on(guest.device.stop(3, handle)).unwrap();
    assert_eq!((guest.coalescing_of(3), guest.coalescing_of(2)), (Err(ERR), Ok((8, 50))));
    let other = [&[4, 0, 0, 0][..], &[0; 8]].concat();
    assert_eq!(guest.command(class::NOTF_COAL, class::NOTF_COAL_VQ_SET, &other), ERR);
}

#[test]
fn a_control_queue_that_starts_again_begins_with_nothing_set() {
    let mut guest = Guest::new(EVERYTHING);
    let given = guest.port.script().given;
    for (kind, command, data, _) in commands() {
        guest.command(kind, command, &data);
    }
    guest.command(class::RX, class::RX_PROMISC, &[0]);
    assert_eq!(guest.device.mac(), [2, 0, 0, 0, 0, 8]);
    assert!(guest.device.0.rules().filter.is_some());
    assert_ne!(guest.port.script().given, given);
    guest.stop_control();
    guest.start_control();
    assert_eq!(guest.device.mac(), [2, 0, 0, 0, 0, 9]);
    assert!(guest.device.0.rules().filter.is_none());
    assert_eq!(guest.attached(), [true, false]);
    assert_eq!(guest.coalescing_of(1), Ok((0, 0)));
    assert_eq!(guest.device.0.rules().given, given, "and the guest takes again what it negotiated");
    assert_eq!(guest.port.script().given, given, "and the port gives it");
}

#[test]
fn a_driver_that_starts_again_is_called_at_once() {
    let mut guest = Guest::new(EVERYTHING);
    let minute = [[0, 0, 0, 0], [0, 0x87, 0x93, 3]].concat();
    assert_eq!(guest.command(class::NOTF_COAL, class::NOTF_COAL_TX_SET, &minute), OK);
    guest.stop_data();
    guest.stop_control();
    guest.start_data();
    guest.start_control();
    assert_eq!(guest.coalescing_of(1), Ok((0, 0)));
    let (ring, call) = (&mut guest.data[1].0, &guest.calls[1]);
    ring.write(DATA, &[&[0; HEADER_SIZE][..], &frame(0, 60)].concat());
    ring.driver.add(&[(DATA, 72)], &[]).unwrap();
    ring.driver.publish();
    let start = Instant::now();
    while rustix::io::read(call, &mut [0; 8]).is_err() {
        assert!(start.elapsed() < TIMEOUT, "the call waits for the driver that was");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_port_that_cannot_switch_its_offloads_is_an_error_of_that_command() {
    let mut guest = Guest::new(EVERYTHING);
    let given = guest.device.0.rules().given;
    guest.port.script().refuses_offloads = true;
    assert_eq!(guest.command(class::GUEST_OFFLOADS, 0, &[0; 8]), ERR);
    assert_eq!(guest.device.0.rules().given, given);
    guest.port.script().refuses_offloads = false;
    assert_eq!(guest.command(class::GUEST_OFFLOADS, 0, &[0; 8]), OK);
    assert_eq!(guest.device.0.rules().given, Offloads::default());
}

#[test]
fn the_host_is_called_for_a_guest_that_takes_something_else_than_the_one_before() {
    let guest = Guest::new(EVERYTHING);
    let calls = || guest.port.script().offload_calls.clone();
    assert_eq!(calls().len(), 1, "not once more for the control queue");
    let next = |features| {
        guest.runtime.block_on(guest.device.set_features(0));
        assert_eq!(guest.device.0.rules().given, Offloads::default());
        guest.runtime.block_on(guest.device.set_features(features));
    };
    next(EVERYTHING);
    assert_eq!(calls().len(), 1);
    next(VIRTIO_F_VERSION_1);
    assert_eq!(calls()[1..], [Offloads::default()]);
}

#[test]
fn commands_go_on_in_other_memory() {
    let mut guest = Guest::new(EVERYTHING);
    assert_eq!(guest.command(class::RX, class::RX_PROMISC, &[1]), OK);
    let memory = Arc::new((*guest.ring.memory).clone());
    let handle = guest.control.as_ref().unwrap();
    let moved = guest.runtime.block_on(handle.set_memory(memory, guest.ring.config.addresses));
    assert_eq!(moved, Ok(()));
    assert_eq!(guest.command(class::RX, class::RX_PROMISC, &[1]), OK);
    assert_eq!(guest.stop_control(), 2);
}

#[test]
fn a_session_is_heard_between_two_commands() {
    let mut guest = Guest::new(EVERYTHING);
    guest.stop_control();
    // A driver that never stops keeps its ring as full as this one.
    guest.ring = Ring::new(64, true);
    for _ in 0..32 {
        guest.offer(&[class::RX], 1);
    }
    let kick = Kick::new(guest.kick.try_clone().unwrap()).unwrap();
    let call = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    guest.control = Some(guest.start(&guest.ring, COUNT, Some(kick), call));
    let base = guest.stop_control();
    assert!(base < 32, "the whole ring was served before the session was heard");
}

#[test]
fn a_kick_whose_other_end_is_closed_costs_nothing() {
    let mut guest = Guest::new(EVERYTHING);
    guest.stop_control();
    guest.ring = Ring::new(64, true);
    let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    let call = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    let origin = Origin::new(Arc::default());
    let kick = guest.runtime.block_on(async {
        let reader = origin.adopt(reader, &mut FdReservation::for_message().await);
        Some(Kick::of_front_end(reader, COUNT).await.unwrap())
    });
    guest.control = Some(guest.start(&guest.ring, COUNT, kick, call));
    // The last kick is heard, though its end is closed behind it.
    let eventfd = std::mem::replace(&mut guest.kick, writer);
    guest.offer(&[class::RX, class::RX_PROMISC, 1], 1);
    drop(std::mem::replace(&mut guest.kick, eventfd));
    let stats = guest.device.0.stats.to_run(COUNT);
    let kicks = || stats.kicks.value();
    let pause = |guest: &Guest, ms| {
        guest.runtime.block_on(async { tokio::time::sleep(Duration::from_millis(ms)).await })
    };
    let answer = (0..60_000).find_map(|_| {
        pause(&guest, 1);
        guest.ring.driver.take_used()
    });
    assert_eq!(answer.map(|(_, written)| written), Some(1));
    // The kick and the end of its pipe are heard, which may be after the answer, and nothing else.
    pause(&guest, 100);
    assert!(kicks() <= 2, "{} kicks", kicks());
    // Another one is as good as the first was.
    let kick = Kick::new(guest.kick.try_clone().unwrap()).unwrap();
    guest.runtime.block_on(guest.control.as_ref().unwrap().set_kick(Some(kick)));
    assert_eq!(guest.command(class::RX, class::RX_PROMISC, &[1]), OK);
}

#[test]
fn a_session_is_heard_while_a_command_waits_for_the_host() {
    let mut guest = Guest::new(EVERYTHING);
    guest.port.script().is_held = true;
    let command = [&[class::GUEST_OFFLOADS, class::GUEST_OFFLOADS_SET][..], &[0; 8]].concat();
    guest.offer(&command, 1);
    let handle = guest.control.as_ref().unwrap();
    let is_under_way = || guest.device.0.stats.to_run(COUNT).in_flight.value() == 1;
    let call = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    let ours = Arc::new(Call::new(call.try_clone().unwrap()).unwrap());
    guest.runtime.block_on(async {
        while !is_under_way() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        handle.set_err(None).await;
        handle.set_call(Some(ours)).await;
    });
    assert!(is_under_way(), "the host has not answered yet");
    assert!(guest.ring.driver.take_used().is_none());
    // A new call is rung at once; the answer rings it again.
    assert!(rustix::io::read(&call, &mut [0; 8]).is_ok());
    guest.port.script().is_held = false;
    let base = guest.stop_control();
    assert_eq!((base, guest.ring.driver.take_used().map(|(_, written)| written)), (1, Some(1)));
    assert!(rustix::io::read(&call, &mut [0; 8]).is_ok());
}
