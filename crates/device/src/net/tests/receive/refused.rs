//! Buffers that can hold nothing, ports that are gone, memory that is not there.

use super::*;

#[test]
fn buffers_that_can_hold_nothing_stop_the_queue() {
    for (pieces, len) in [(1usize, 0u32), (1, 1), (1, 11), (513, 16)] {
        let mut guest = Guest::new(1024, 2048, true);
        guest.post(1);
        let writable: Vec<_> = (0..pieces).map(|_| (DATA, len)).collect();
        guest.ring.driver.add(&[], &writable).unwrap();
        guest.ring.driver.publish();
        guest.arrive(0, 60);
        guest.turn();
        assert!(matches!(guest.queue.fault(), Some(QueueError::Request(_))), "{pieces} x {len}");
        assert!(guest.take().is_none());
        guest.let_go();
        assert_eq!((guest.queue.in_flight(), guest.queue.base()), (0, 0.into()));
    }
    let mut guest = Guest::new(16, 2048, true);
    guest.ring.driver.add(&[(DATA, 2048)], &[]).unwrap();
    guest.ring.driver.publish();
    guest.turn();
    assert!(guest.queue.fault().is_some(), "a buffer the device may only read");
}

#[test]
fn a_buffer_of_a_header_alone_is_a_buffer() {
    let mut guest = Guest::new(64, HEADER_SIZE, true);
    guest.post_all();
    guest.arrive(0, 60);
    guest.turn();
    guest.expect(0, 60, 6);
}

#[test]
fn a_port_that_is_gone_is_left_alone_until_it_may_be_back() {
    let mut guest = Guest::new(64, 2048, true);
    guest.post_all();
    guest.port.script().arrives.push_back(Err(Errno::BADFD));
    guest.arrive(0, 60);
    guest.turn();
    assert!(guest.rx.is_broken() && guest.turn().packets == 0);
    assert!(guest.take().is_none());
    guest.rx.revive();
    guest.turn();
    guest.expect(0, 60, 1);
}

#[test]
fn a_frame_that_the_host_cannot_hand_out_costs_that_frame_alone() {
    let mut guest = Guest::new(64, 2048, true);
    guest.post_all();
    guest.port.script().arrives.push_back(Err(Errno::INVAL));
    guest.arrive(0, 60);
    guest.turn();
    guest.expect(0, 60, 1);
    assert_eq!(guest.ring.stats.dropped_refused.value(), 1);
    // One that hands out nothing is gone.
    guest.port.script().arrives.extend(std::iter::repeat_n(Err(Errno::INVAL), 100));
    guest.turn();
    guest.turn();
    assert!(guest.rx.is_broken() && guest.turn().packets == 0);
    assert_eq!(guest.ring.stats.dropped_refused.value(), 65);
}

#[test]
fn guest_memory_that_is_not_there_is_told() {
    let mut guest = Guest::new(64, 2048, true);
    guest.post_all();
    guest.port.script().arrives.push_back(Err(Errno::FAULT));
    assert!(guest.turn().memory_lost, "the kernel says so before a word of ours is touched");
}

#[test]
fn a_turn_ends_though_the_port_never_does() {
    let mut guest = Guest::new(256, 2048, true);
    guest.post_all();
    (0..200).for_each(|number| guest.arrive(number, 60));
    assert_eq!(guest.turn().packets, 64);
    let port = manyring_backend::net::null::NullPort::new(1, 9000);
    let mut rx = NetRx::new(port.open_rx(0).unwrap(), Arc::new(open_rules()), true, 256).unwrap();
    guest.let_go();
    let turn = rx.turn(&mut guest.queue, &guest.ring.stats);
    assert!(turn.packets > 0 && turn.packets <= 64);
    rx.let_go(&mut guest.queue, &guest.ring.stats);
}
