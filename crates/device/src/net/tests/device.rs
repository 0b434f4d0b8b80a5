//! The calls of sessions and operators to a device: queue pairs, MTU, link, announcements.

use super::guest::*;
use super::*;
use crate::Device;
use crate::net::{NetDevice, NetSide, OwnedPort};
use manyring_engine::Activation;
use manyring_wire::net::*;
use manyring_wire::virtio::VIRTIO_F_VERSION_1;

#[test]
fn the_host_uses_the_pairs_that_the_front_end_enables() {
    let guest = Guest::new(VIRTIO_F_VERSION_1 | VIRTIO_NET_F_MQ);
    assert_eq!(guest.attached(), [true, true]);
    let enable = |index: usize, enabled| {
        let handle = &guest.data[index].1;
        guest.runtime.block_on(guest.device.set_enabled(index, handle, enabled));
    };
    enable(2, false);
    assert_eq!(guest.attached(), [true, true], "its transmitq is in use");
    enable(3, false);
    assert_eq!(guest.attached(), [true, false]);
    enable(2, true);
    assert_eq!(guest.attached(), [true, true]);
}

#[test]
fn the_control_queue_is_the_one_that_was_negotiated() {
    let control = |guest: &Guest| -> Vec<usize> {
        (0..=COUNT + 1).filter(|index| guest.device.is_control_queue(*index)).collect()
    };
    assert_eq!(control(&Guest::new(EVERYTHING)), [COUNT]);
    assert_eq!(control(&Guest::new(VIRTIO_F_VERSION_1)), [COUNT], "no other can be it");
    assert_eq!(control(&Guest::new(EVERYTHING & !VIRTIO_NET_F_MQ)), [COUNT], "RSS has all pairs");
    let mut guest = Guest::new(EVERYTHING & !(VIRTIO_NET_F_MQ | VIRTIO_NET_F_RSS));
    assert_eq!((control(&guest), guest.device.guest().control), (vec![2, COUNT], Some(2)));
    // A queue stays the control queue that it was, until a guest uses its index for data.
    guest.stop_control();
    assert_eq!((control(&guest), guest.device.guest().control), (vec![2, COUNT], None));
    guest.stop_data();
    guest.runtime.block_on(guest.device.set_features(EVERYTHING));
    guest.features = EVERYTHING;
    guest.start_data();
    assert_eq!(control(&guest), [COUNT]);
}

#[test]
fn the_mtu_that_a_front_end_tells_before_the_features_is_the_guests() {
    let guest = Guest::new(VIRTIO_F_VERSION_1);
    let with_mtu = VIRTIO_F_VERSION_1 | VIRTIO_NET_F_MTU;
    // QEMU does so each time it starts the device.
    assert!(guest.device.set_front_end_mtu(9000));
    guest.runtime.block_on(guest.device.set_features(with_mtu));
    assert_eq!(guest.device.0.rules().frame_size_max, 9018);
    assert!(!guest.device.set_front_end_mtu(67) && !guest.device.set_front_end_mtu(65_536));
    // The next guest is another's.
    guest.runtime.block_on(guest.device.set_features(0));
    assert!(guest.device.set_front_end_mtu(9000));
    // So is the next one of a front-end that left before it told the features.
    guest.runtime.block_on(guest.device.set_features(0));
    guest.runtime.block_on(guest.device.set_features(with_mtu));
    assert_eq!(guest.device.0.rules().frame_size_max, FRAME_SIZE_MAX);
}

#[test]
fn the_guest_is_told_of_its_link_and_asked_to_announce_itself() {
    let mut guest = Guest::new(EVERYTHING);
    let changes = guest.device.config_changes();
    let status = |device: &NetDevice| {
        let mut bytes = [0xff; 2];
        device.read_config(6, &mut bytes);
        u16::from_le_bytes(bytes)
    };
    assert_eq!(status(&guest.device), VIRTIO_NET_S_LINK_UP);
    assert!(guest.device.announce());
    assert_eq!(status(&guest.device), VIRTIO_NET_S_LINK_UP | VIRTIO_NET_S_ANNOUNCE);
    assert_eq!(guest.command(class::ANNOUNCE, class::ANNOUNCE_ACK, &[]), OK);
    guest.runtime.block_on(guest.device.set_link(false));
    assert_eq!(status(&guest.device), 0);
    assert!(changes.has_changed().unwrap() && !guest.device.0.rules().link_up);
    assert!(!Guest::new(VIRTIO_F_VERSION_1).device.announce(), "its driver cannot");
}

/// A driver that hears of its link sends at once, an announcement for one, and only once.
#[test]
fn a_guest_is_shown_a_link_when_its_queues_pass_frames() {
    let guest = Guest::new(EVERYTHING);
    guest.runtime.block_on(async {
        guest.device.set_link(false).await;
        let changes = guest.device.config_changes();
        let keeps_workers_untold = guest.device.0.told.lock().await;
        let mut sets = Box::pin(guest.device.set_link(true));
        assert!(is_pending(&mut sets).await);
        assert!(!guest.device.is_link_up() && !changes.has_changed().unwrap());
        drop(keeps_workers_untold);
        sets.await;
        assert!(guest.device.is_link_up() && changes.has_changed().unwrap());
        // An operator pulls the cable while it is still being plugged in: the link stays down.
        guest.device.set_link(false).await;
        let keeps_workers_untold = guest.device.0.told.lock().await;
        let mut sets = Box::pin(guest.device.set_link(true));
        assert!(is_pending(&mut sets).await);
        let mut takes_back = Box::pin(guest.device.set_link(false));
        assert!(is_pending(&mut takes_back).await);
        drop(keeps_workers_untold);
        sets.await;
        takes_back.await;
        assert!(!guest.device.is_link_up() && !guest.device.0.rules().link_up);
    });
}

/// True if the future does not end when it is polled once.
async fn is_pending(future: &mut (impl Future<Output = ()> + Unpin)) -> bool {
    std::future::poll_fn(|context| {
        std::task::Poll::Ready(std::pin::Pin::new(&mut *future).poll(context).is_pending())
    })
    .await
}

#[test]
fn a_device_announces_its_guest_by_a_rarp_frame() {
    let guest = Guest::new(VIRTIO_F_VERSION_1);
    assert!(guest.runtime.block_on(guest.device.send_rarp([2, 0, 0, 0, 0, 9])));
    let sent = guest.port.sent();
    assert_eq!((sent.len(), sent[0].len(), &sent[0][12..14]), (1, 60, &[0x80, 0x35][..]));
}

#[test]
fn a_queue_that_the_device_has_not_does_not_start() {
    let guest = Guest::new(VIRTIO_F_VERSION_1);
    let ring = Ring::new(16, true);
    let activation = Activation {
        index: COUNT,
        queue: ring.device_half(),
        addresses: ring.config.addresses,
        kick: None,
        call: None,
        err: None,
        enabled: true,
        features: guest.features,
        events: guest.sender.clone(),
    };
    assert!(guest.runtime.block_on(guest.device.start(activation)).is_err());
}

#[test]
fn nothing_is_announced_while_the_link_is_down() {
    let guest = Guest::new(VIRTIO_F_VERSION_1);
    guest.runtime.block_on(guest.device.set_link(false));
    assert!(guest.runtime.block_on(guest.device.send_rarp([2, 0, 0, 0, 0, 9])));
    assert!(guest.port.sent().is_empty());
}

#[test]
fn a_device_offers_no_more_offloads_than_the_operator_lets_it() {
    use crate::net::Offload;
    let host = ALL.host_features();
    for (offload, offered) in [
        (Offload::All, host | GUEST_OFFLOAD_BITS),
        (Offload::Csum, VIRTIO_NET_F_CSUM | VIRTIO_NET_F_GUEST_CSUM),
        (Offload::None, 0),
    ] {
        let options = NetOptions { offload, ..options(PAIRS) };
        let device = NetDevice::new(options, Arc::new(Scripted::default()), pool(1));
        assert_eq!(device.features() & (host | GUEST_OFFLOAD_BITS), offered, "{offload:?}");
    }
}

fn plain() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

#[test]
fn a_process_that_serves_the_queues_gets_what_a_guest_may_choose_and_leaves_nothing_behind() {
    let (runtime, port) = (plain(), Scripted::default());
    port.script().attached = vec![false; PAIRS];
    let owned = OwnedPort::new(options(PAIRS), Arc::new(port.clone()));
    let attached = || port.script().attached.clone();
    let run = |future| runtime.block_on(future);
    let lend = |pair, attached| runtime.block_on(owned.lend_pair(pair, attached));
    assert_eq!((lend(1, true), lend(2, true)), (Ok(()), Err(Errno::INVAL)));
    assert_eq!(attached(), [false, true]);
    let csum = Offloads { csum: true, ..Offloads::default() };
    let offloads = |offloads| runtime.block_on(owned.lend_offloads(offloads));
    assert_eq!((offloads(csum), offloads(csum)), (Ok(()), Ok(())));
    assert_eq!(port.script().offload_calls.last(), Some(&csum));
    // The guest's choices are shown, and the operator's requests are counted.
    assert!(!owned.announce());
    let shown =
        crate::net::Guest { mac: Some([2; 6]), announces: true, control: Some(2), pairs: Some(1) };
    owned.show_guest(shown);
    assert!(owned.announce() && owned.mac() == [2; 6]);
    let is_control = |index: &usize| owned.is_control_queue(*index);
    assert_eq!((0..=COUNT + 1).filter(is_control).collect::<Vec<_>>(), [2, COUNT]);
    // A process that says how many pairs its port uses may say too much.
    assert_eq!(owned.attached_pairs(), 1);
    owned.show_guest(crate::net::Guest { pairs: Some(3), ..shown });
    assert_eq!(owned.attached_pairs(), 2);
    assert_eq!(owned.outside().announcements, 1);
    run(owned.take_back());
    assert_eq!((attached(), owned.attached_pairs()), (vec![false, false], 0));
    assert_eq!(port.script().offload_calls.last(), Some(&Offloads::default()));
    assert!(owned.mac() != [2; 6] && !owned.announce());
    // The last control queue is shown until another guest has another one.
    assert_eq!((0..=COUNT + 1).filter(is_control).collect::<Vec<_>>(), [2, COUNT]);
}

#[test]
fn an_owned_port_tells_the_process_that_serves_it_of_link_and_mtu() {
    let (runtime, port) = (plain(), Scripted::default());
    let owned = OwnedPort::new(options(PAIRS), Arc::new(port));
    let mut changes = owned.changes();
    runtime.block_on(owned.set_link(false));
    assert!(!owned.is_link_up() && !owned.outside().link_up && changes.has_changed().unwrap());
    changes.mark_unchanged();
    runtime.block_on(owned.set_link(true));
    assert!(owned.is_link_up() && owned.outside().link_up && changes.has_changed().unwrap());
    changes.mark_unchanged();
    assert_eq!(runtime.block_on(owned.set_mtu(67)), Err(Errno::INVAL));
    assert!(!changes.has_changed().unwrap());
    assert_eq!(runtime.block_on(owned.set_mtu(1400)), Ok(()));
    assert_eq!((owned.mtu(), owned.outside().mtu), (Some(1400), Some(1400)));
    assert!(changes.has_changed().unwrap());
}
