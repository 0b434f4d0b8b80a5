//! Buffers of transmitted frames that go back in groups, as the driver sees them.

use super::*;

/// How long a buffer is kept at most.
const KEEP_NS: u64 = 25_000;

/// A driver that sends small frames, longer ones while it gets its buffers back later, and for
/// which the policy has found that out. At the time that is returned nothing is kept.
fn merging(moderation: Moderation) -> (Guest, u64) {
    let policies = (moderation, Reclaim::Auto);
    let mut guest = Guest::ruled(false, false, Scripted::default(), policies);
    let mut now_ns = 1;
    for (frames, len) in [(128, 100), (128, 200)] {
        for _ in 0..frames {
            now_ns += 2 * KEEP_NS;
            guest.turn(now_ns);
            guest.send_long(len, 1);
            guest.turn(now_ns);
        }
    }
    assert!(guest.ring.stats.buffers_kept.value() >= 127);
    now_ns += KEEP_NS;
    guest.turn(now_ns);
    guest.returned();
    guest.is_called();
    (guest, now_ns)
}

impl Guest {
    /// `count` frames of `len` bytes.
    pub(super) fn send_long(&mut self, len: usize, count: u64) {
        for _ in 0..count {
            let at = DATA + self.next % 256 * 0x1000;
            self.ring.write(at, &[&[0; HEADER_SIZE][..], &frame(self.next, len)].concat());
            let size = u32::try_from(HEADER_SIZE + len).unwrap();
            self.ring.driver.add(&[(at, size)], &[]).unwrap();
            self.next += 1;
        }
        self.ring.driver.publish();
    }
}

#[test]
fn a_driver_that_waits_gets_its_buffers_after_25_microseconds_and_is_told() {
    // Buffers that come back late are not kept on top of that.
    if late() {
        return;
    }
    let (mut guest, now_ns) = merging(Moderation::Off);
    for count in 1..8 {
        let now_ns = now_ns + count * 100_000;
        guest.send_long(200, count);
        guest.turn(now_ns);
        assert!(guest.returned() == 0 && !guest.is_called(), "{count}");
        assert_eq!(guest.running.deadline_ns(), Some(now_ns + KEEP_NS), "its worker must wake");
        guest.turn(now_ns + KEEP_NS - 1);
        assert_eq!(guest.returned(), 0, "{count}");
        guest.turn(now_ns + KEEP_NS);
        assert!(guest.is_called() && guest.returned() as u64 == count, "{count}");
        assert_eq!(guest.running.deadline_ns(), None, "{count}");
    }
}

#[test]
fn a_group_of_32_frames_or_16_kib_goes_back_at_once() {
    if late() {
        return;
    }
    let (mut guest, now_ns) = merging(Moderation::Off);
    guest.send_long(200, 31);
    guest.turn(now_ns);
    assert_eq!(guest.returned(), 0);
    guest.send_long(200, 1);
    guest.turn(now_ns + 1);
    assert!(guest.is_called() && guest.returned() == 32);
    guest.send_long(4000, 4);
    guest.turn(now_ns + 2);
    assert_eq!(guest.returned(), 0);
    guest.send_long(4000, 1);
    guest.turn(now_ns + 3);
    assert!(guest.is_called() && guest.returned() == 5);
    // A driver whose ring is full gets something in each turn.
    guest.send_long(200, 256);
    for turn in 4..8 {
        guest.turn(now_ns + turn);
        assert!(guest.is_called() && guest.returned() == 64, "turn {turn}");
    }
}

#[test]
fn moderation_does_not_keep_a_driver_waiting_that_has_nothing_left_in_the_ring() {
    if late() {
        return;
    }
    let limits = Limits { count_max: 0, delay_us_max: 10_000 };
    let (mut guest, now_ns) = merging(Moderation::Fixed(limits));
    guest.send_long(200, 3);
    guest.turn(now_ns);
    assert!(!guest.is_called() && guest.returned() == 0);
    guest.turn(now_ns + KEEP_NS);
    assert!(guest.is_called() && guest.returned() == 3);
}

#[test]
fn buffers_that_are_kept_go_back_when_the_port_is_full_and_when_the_queue_changes() {
    if late() {
        return;
    }
    type Change = fn(&mut Guest, u64);
    let block: Change = |guest, now_ns| {
        guest.port.script().sends.push_back(Next::Block);
        guest.send_long(200, 1);
        guest.turn(now_ns);
    };
    let memory: Change = |guest, now_ns| guest.set_memory(now_ns);
    let disable: Change = |guest, now_ns| {
        assert_eq!(guest.heed(|fence| Order::Enable(false, fence), now_ns), Ok(()));
    };
    let drain: Change = |guest, now_ns| guest.drain(now_ns);
    let changes = [("port", block), ("memory", memory), ("disable", disable), ("stop", drain)];
    for (what, change) in changes {
        let (mut guest, now_ns) = merging(Moderation::Off);
        guest.send_long(200, 3);
        guest.turn(now_ns);
        assert!(guest.returned() == 0 && !guest.is_called(), "{what}");
        change(&mut guest, now_ns + 1);
        assert!(guest.is_called() && guest.returned() == 3, "{what}");
    }
}

#[test]
fn nothing_is_kept_of_a_driver_whose_frames_do_not_grow() {
    let policies = (Moderation::Off, Reclaim::Auto);
    let mut guest = Guest::ruled(false, false, Scripted::default(), policies);
    for now_ns in 1..1000 {
        guest.send(1);
        guest.turn(now_ns * 2 * KEEP_NS);
        guest.returned();
    }
    let kept = guest.ring.stats.buffers_kept.value();
    assert!(kept <= 32, "one trial: {kept}");
}
