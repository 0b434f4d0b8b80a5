//! A host that is slow: commands that do not need it are obeyed while it is called, and a command
//! that was refused has no effect in the end.

use super::*;
use crate::net::NetDevice;

/// Far less than a host is held.
const AT_ONCE: Duration = Duration::from_secs(4);

impl Guest {
    fn hold_host(&self, is_held: bool) {
        self.port.script().is_held = is_held;
    }

    fn use_pairs(&mut self, pairs: u8) -> u8 {
        self.command(class::MQ, class::MQ_VQ_PAIRS_SET, &[pairs, 0])
    }

    fn set_offloads(&mut self, bits: u64) -> u8 {
        self.command(class::GUEST_OFFLOADS, class::GUEST_OFFLOADS_SET, &bits.to_le_bytes())
    }

    fn set_promisc(&mut self, on: bool) -> u8 {
        self.command(class::RX, class::RX_PROMISC, &[on.into()])
    }

    /// True if the device does not filter.
    fn receives_all(&self) -> bool {
        self.device.0.rules().filter.is_none()
    }

    /// Lets the host go, and waits for its calls that attach pairs: `calls` from now on.
    fn attach_calls(&self, calls: &[(usize, bool)]) {
        let all = |guest: &Self| guest.port.script().attach_calls.clone();
        let before = all(self).len();
        self.hold_host(false);
        self.wait_until(|guest| all(guest).len() >= before + calls.len());
        assert_eq!(all(self)[before..], *calls);
    }

    /// Lets the control thread run until `is_so`.
    fn wait_until(&self, is_so: impl Fn(&Self) -> bool) -> bool {
        self.runtime.block_on(async {
            let start = Instant::now();
            while !is_so(self) && start.elapsed() < TIMEOUT {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            is_so(self)
        })
    }

    /// One frame into transmitq `index`.
    fn send(&mut self, index: usize) {
        let ring = &mut self.data[index].0;
        ring.write(DATA, &[&[0; HEADER_SIZE][..], &frame(0, 60)].concat());
        ring.driver.add(&[(DATA, 72)], &[]).unwrap();
        ring.driver.publish();
    }
}

/// Calls the host, which is held, as a session does.
fn hold_by_session(guest: &Guest) {
    guest.hold_host(true);
    let inner = guest.device.0.clone();
    guest.runtime.spawn(async move {
        inner.set_enabled(0, false).await;
        inner.set_enabled(1, false).await;
    });
}

fn is_for_the_host(kind: u8) -> bool {
    [class::MQ, class::GUEST_OFFLOADS].contains(&kind)
}

#[test]
fn commands_that_do_not_need_the_host_do_not_wait_for_it() {
    for by_session in [true, false] {
        let mut guest = Guest::new(EVERYTHING);
        if by_session {
            hold_by_session(&guest);
        } else {
            guest.hold_host(true);
            assert_eq!(guest.use_pairs(2), ERR);
        }
        for (kind, command, data, _) in commands() {
            if !is_for_the_host(kind) {
                assert_eq!(guest.command(kind, command, &data), OK, "{kind} {command}");
            }
        }
        assert_eq!(guest.device.mac(), [2, 0, 0, 0, 0, 8]);
        assert_eq!(guest.set_promisc(false), OK);
        assert!(!guest.receives_all());
        // The operator's word is no call of the host either.
        let start = Instant::now();
        guest.runtime.block_on(guest.device.set_link(false));
        assert!(start.elapsed() < AT_ONCE, "{:?}", start.elapsed());
        guest.hold_host(false);
        assert_eq!(guest.set_promisc(true), OK);
        assert!(guest.receives_all());
    }
}

#[test]
fn a_driver_that_goes_on_changing_pairs_leaves_the_host_to_others() {
    let mut guest = Guest::new(EVERYTHING);
    assert_eq!(guest.use_pairs(2), OK);
    let call = Duration::from_millis(10);
    guest.port.script().slow = Some(call);
    let start = Instant::now();
    for round in 0..6 {
        assert_eq!(guest.use_pairs(1 + round % 2), OK);
    }
    // Between six calls there are five rests, each four times as long as a call.
    assert!(start.elapsed() >= call * 26, "{:?}", start.elapsed());
    assert_eq!(guest.set_promisc(false), OK);
}

#[test]
fn a_session_that_goes_on_changing_pairs_leaves_the_host_to_others() {
    let guest = Guest::new(EVERYTHING);
    let call = Duration::from_millis(5);
    guest.port.script().slow = Some(call);
    let (inner, start) = (guest.device.0.clone(), Instant::now());
    guest.runtime.block_on(async {
        for round in 0..60 {
            for index in 0..2 {
                inner.set_enabled(index, round % 2 == 1).await;
            }
        }
    });
    assert!(guest.port.script().attach_calls.len() >= 60);
    // Without a rest it had the host all the time: sixty calls. Sixteen are free, and some more.
    assert!(start.elapsed() >= call * 150, "{:?}", start.elapsed());
}

#[test]
fn pairs_that_were_refused_to_the_driver_are_not_used_in_the_end() {
    let mut guest = Guest::new(EVERYTHING);
    guest.hold_host(true);
    for _ in 0..2 {
        let start = Instant::now();
        assert_eq!(guest.use_pairs(2), ERR);
        assert!(start.elapsed() < AT_ONCE, "{:?}", start.elapsed());
    }
    // The host does what it was asked to, and then that it is not to.
    guest.attach_calls(&[(1, true), (1, false)]);
    assert_eq!(guest.use_pairs(1), OK);
    assert_eq!((guest.attached(), guest.device.attached_pairs()), (vec![true, false], 1));
    assert_eq!(guest.use_pairs(2), OK);
    assert_eq!((guest.attached(), guest.device.attached_pairs()), (vec![true, true], 2));
}

#[test]
fn pairs_that_the_driver_could_not_give_up_go_on() {
    let mut guest = Guest::new(EVERYTHING);
    assert_eq!(guest.use_pairs(2), OK);
    guest.hold_host(true);
    assert_eq!(guest.use_pairs(1), ERR);
    guest.send(3);
    assert!(guest.wait_until(|guest| guest.port.sent().len() == 1), "the host is still held");
    guest.attach_calls(&[(1, false), (1, true)]);
    guest.send(3);
    assert!(guest.wait_until(|guest| guest.port.sent().len() == 2));
}

#[test]
fn offloads_that_were_refused_to_the_driver_are_not_given_in_the_end() {
    let mut guest = Guest::new(EVERYTHING);
    let given = guest.port.script().given;
    guest.hold_host(true);
    assert_eq!(guest.set_offloads(VIRTIO_NET_F_GUEST_CSUM), ERR);
    assert_eq!(guest.device.0.rules().given, given);
    guest.hold_host(false);
    let csum = Offloads { csum: true, ..Offloads::default() };
    let calls = |guest: &Guest| guest.port.script().offload_calls.clone();
    assert!(
        guest.wait_until(|guest| calls(guest).ends_with(&[csum, given])),
        "{:?}",
        calls(&guest)
    );
    assert_eq!(guest.device.0.rules().given, given);
}

#[test]
fn the_last_command_wins_over_a_host_that_is_late() {
    let mut guest = Guest::new(EVERYTHING);
    guest.hold_host(true);
    assert_eq!((guest.use_pairs(2), guest.set_offloads(VIRTIO_NET_F_GUEST_CSUM)), (ERR, ERR));
    guest.hold_host(false);
    assert_eq!((guest.use_pairs(2), guest.set_offloads(0)), (OK, OK));
    let is_last = |guest: &Guest| {
        let given = guest.port.script().given;
        guest.attached() == [true, true] && given == Offloads::default()
    };
    assert!(is_last(&guest));
    guest.runtime.block_on(async { tokio::time::sleep(Duration::from_millis(100)).await });
    assert!(is_last(&guest), "and nothing comes behind it");
}

#[test]
fn a_driver_that_begins_while_the_host_is_late_is_obeyed_and_begins_with_nothing_set() {
    let mut guest = Guest::new(EVERYTHING);
    assert_eq!(guest.use_pairs(2), OK);
    guest.stop_control();
    guest.hold_host(true);
    guest.start_control();
    assert_eq!(guest.set_promisc(false), OK);
    assert!(!guest.receives_all());
    assert_eq!(guest.set_offloads(0), ERR);
    guest.attach_calls(&[(1, false)]);
    assert_eq!(guest.use_pairs(2), OK);
}

#[test]
fn what_is_refused_to_a_driver_is_not_put_back_over_what_the_next_one_has() {
    let mut guest = Guest::new(EVERYTHING);
    assert_eq!(guest.use_pairs(2), OK);
    guest.hold_host(true);
    guest.offer(&[class::MQ, class::MQ_VQ_PAIRS_SET, 1, 0], 1);
    // While the command waits, another driver begins.
    let (device, features) = (NetDevice(guest.device.0.clone()), guest.features);
    guest.runtime.spawn(async move {
        tokio::time::sleep(Duration::from_millis(300)).await;
        device.set_features(features).await;
    });
    let is_answered = |guest: &Guest| guest.ring.read(ANSWER, 1) == [ERR];
    assert!(guest.wait_until(is_answered));
    guest.attach_calls(&[(1, false)]);
    guest.runtime.block_on(async { tokio::time::sleep(Duration::from_millis(100)).await });
    assert_eq!(guest.attached(), [true, false], "one pair until the driver says more");
}

#[test]
fn what_the_workers_did_not_hear_in_time_has_no_effect() {
    let mut guest = Guest::in_pool(EVERYTHING, pool(2));
    // The worker that is held serves the data queues; the control queue has another one.
    let control = guest.control.as_ref().unwrap();
    assert!(guest.runtime.block_on(control.move_to(1)));
    guest.port.script().holds_worker = true;
    guest.send(1);
    assert!(guest.wait_until(|guest| guest.port.script().worker_waits));
    let mac = [2, 0, 0, 0, 0, 8];
    assert_eq!(guest.command(class::MAC, class::MAC_ADDR_SET, &mac), ERR);
    assert_eq!(guest.set_promisc(false), ERR);
    assert!(guest.receives_all() && guest.device.mac() != mac);
    assert_eq!(guest.coalescing_of(1), Ok((0, 0)), "a question is answered");
    guest.port.script().holds_worker = false;
    assert_eq!(guest.set_promisc(false), OK);
    assert!(!guest.receives_all() && guest.device.mac() != mac);
}
