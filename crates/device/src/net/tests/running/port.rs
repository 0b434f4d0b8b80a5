//! The events of a queue's port, and how often the port is watched.

use super::super::churn::Wire;
use super::*;
use std::os::unix::net::UnixDatagram;

/// A receiveq of a socket, with kick and buffers, and the other end of the socket.
fn guest_of_socket(uring: bool) -> (Guest, UnixDatagram) {
    let mut guest = Guest::new(true);
    guest.wait = Wait::new(uring).unwrap();
    let (ours, theirs) = UnixDatagram::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    let kick = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    let activation = Activation {
        index: 0,
        queue: guest.ring.device_half(),
        addresses: guest.ring.config.addresses,
        kick: Some(Kick::new(kick).unwrap()),
        call: None,
        err: None,
        enabled: true,
        features: 0,
        events: mpsc::channel(4).0,
    };
    let rx = NetRx::new(Box::new(Wire(Arc::new(ours))), guest.rules.load(), true, 256).unwrap();
    guest.running = Box::new(RunningQueue::new(activation, rx, guest.ring.stats.clone()));
    guest.post();
    (guest, theirs)
}

/// The events of watched ports within some 30 milliseconds.
fn port_events(wait: &mut Wait) -> Vec<Woken> {
    let (mut all, mut woken) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        wait.sleep(&mut woken, Some(std::time::Duration::from_millis(10)));
        all.append(&mut woken);
    }
    all.retain(|event| matches!(event.source, EventSource::Port { .. }));
    all
}

#[test]
fn a_port_that_is_watched_is_not_watched_twice_however_often_its_queue_settles() {
    for uring in [true, false] {
        let (mut guest, theirs) = guest_of_socket(uring);
        for round in 0..3 {
            for now_ns in [1000, 2000, 3000] {
                guest.running.wake(now_ns);
                guest.turn(now_ns);
                assert!(guest.settles((Decision::Sleep, false), now_ns), "{round} {now_ns}");
            }
            theirs.send(&[&[0; HEADER_SIZE][..], &frame(round, 60)].concat()).unwrap();
            let [ready] = port_events(&mut guest.wait)[..] else { panic!("one event, one frame") };
            let mut io = QueueIo::new(&mut guest.wait, 0, 1, 4000);
            guest.running.on_event(Happened::Port, ready, &mut io);
            guest.turn(4000);
            assert_eq!(guest.returned(), 1, "uring {uring}, round {round}");
        }
    }
}

#[test]
fn a_port_is_gone_if_its_event_says_so_and_brings_nothing() {
    let [input, err, hup, invalid] = [0x1, 0x8, 0x10, 0x20];
    for (result, is_gone) in [
        (input, false),
        (0, false),
        (input | hup, false),
        (input | err, false),
        (err, true),
        (hup, true),
        (invalid, true),
        (-Errno::BADF.raw_os_error(), true),
    ] {
        let mut guest = Guest::receiving(false);
        guest.set_kick(Kick::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap()).unwrap());
        guest.post();
        let event =
            Woken { source: EventSource::Port { slot: 0, generation: 1 }, result, ended: true };
        let mut io = QueueIo::new(&mut guest.wait, 0, 1, 1);
        guest.running.on_event(Happened::Port, event, &mut io);
        guest.turn(2);
        assert!(guest.settles((Decision::Sleep, false), 3));
        let told = guest.events.try_recv().map(|event| event.kind);
        assert_eq!(told.ok(), is_gone.then_some(EventKind::PortGone), "{result:#x}");
    }
}
