//! A transmitq that is disabled while its ring has more chains than an order may drop.

use super::*;
use manyring_queue::{IndirectTable, QueueError};
use oneshot::Receiver;

/// Entries of the largest ring, and where its parts and a table for all of its chains lie.
const ENTRIES: u16 = 32_768;
const PARTS: RingAddresses = RingAddresses { descriptor: 0, available: 0x8_0000, used: 0xa_0000 };
const TABLE: u64 = 0x20_0000;
const TABLE_LEN: u16 = 1024;
/// Batches that a worker may drop before another guest has its turn.
const TURNS_MAX: u64 = 16;
/// Flags of a descriptor: another one follows it; a table of others.
const NEXT: u16 = 1;
const INDIRECT: u16 = 4;

fn descriptor(addr: u64, len: u32, flags: u16, next: u16) -> Vec<u8> {
    let (addr, len) = (addr.to_le_bytes(), len.to_le_bytes());
    [&addr[..], &len, &flags.to_le_bytes(), &next.to_le_bytes()].concat()
}

/// A guest that has filled its ring. Each chain is the same table of 1024 bytes, one in each
/// descriptor, so that a batch is one chain.
fn guest_of_long_chains() -> Guest {
    let mut guest = Guest::new(false);
    let ring = &guest.ring;
    let config = QueueConfig { size: ENTRIES, addresses: PARTS, ..ring.config };
    for at in 0..TABLE_LEN {
        let flags = if at + 1 < TABLE_LEN { NEXT } else { 0 };
        let place = TABLE + u64::from(at) * 16;
        ring.write(place, &descriptor(DATA, 1, flags, at + 1));
    }
    for at in 0..ENTRIES {
        let chain = descriptor(TABLE, u32::from(TABLE_LEN) * 16, INDIRECT, 0);
        ring.write(u64::from(at) * 16, &chain);
        ring.write(PARTS.available + 4 + u64::from(at) * 2, &at.to_le_bytes());
    }
    ring.write(PARTS.available + 2, &ENTRIES.to_le_bytes());
    let activation = Activation {
        index: 0,
        queue: DeviceQueue::new(config, ring.memory.clone()).unwrap(),
        addresses: PARTS,
        kick: Some(Kick::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap()).unwrap()),
        call: None,
        err: None,
        enabled: true,
        features: 0,
        events: mpsc::channel(4).0,
    };
    let tx = NetTx::new(guest.port.sending(), guest.rules.load(), ALL).unwrap();
    guest.running = Box::new(RunningQueue::new(activation, tx, ring.stats.clone()));
    guest
}

impl Guest {
    pub(super) fn disable(&mut self) -> Receiver<Result<(), QueueError>> {
        let (fence, answer) = oneshot::channel();
        let mut io = QueueIo::new(&mut self.wait, 0, 1, 1);
        self.running.heed(Order::Enable(false, fence), &mut io);
        answer
    }

    fn dropped(&self) -> u64 {
        self.ring.stats.dropped_disabled.value()
    }
}

#[test]
fn a_full_ring_of_long_chains_is_not_emptied_in_one_order_but_before_that_is_answered() {
    let mut guest = guest_of_long_chains();
    let mut answer = guest.disable();
    assert!(guest.dropped() <= TURNS_MAX, "{} batches in one go", guest.dropped());
    let mut now_ns = 2;
    while answer.try_recv().is_err() {
        assert!(guest.dropped() < ENTRIES.into(), "it is empty");
        assert!(guest.running.is_hot() && !guest.settles((Decision::Sleep, false), now_ns));
        assert!(!guest.running.pauses_without_loss(), "another worker would have to go on");
        guest.turn(now_ns);
        now_ns += 1;
    }
    assert_eq!(guest.dropped(), ENTRIES.into());
    // From here on the driver may have its memory back.
    let used = guest.ring.read(PARTS.used, 4);
    guest.turn(now_ns);
    assert_eq!(guest.ring.read(PARTS.used, 4), used);
    assert!(!guest.running.is_hot() || guest.settles((Decision::Sleep, false), now_ns));
}

#[test]
fn whoever_waits_for_a_ring_to_be_emptied_hears_of_its_end_whatever_ends_it() {
    type End = fn(&mut Guest);
    let ends: [(&str, End); 3] = [
        ("a stop", |guest| guest.drain(2)),
        ("a fault", |guest| {
            // A table within the table.
            guest.ring.write(TABLE, &descriptor(DATA, 16, INDIRECT, 0));
            (2..4).for_each(|now_ns| guest.turn(now_ns));
        }),
        ("a driver that is wanted again", |guest| {
            assert_eq!(guest.heed(|fence| Order::Enable(true, fence), 2), Ok(()));
        }),
    ];
    for (what, end) in ends {
        let mut guest = guest_of_long_chains();
        let mut answer = guest.disable();
        assert!(answer.try_recv().is_err(), "there is more to drop");
        end(&mut guest);
        assert_eq!(answer.try_recv(), Ok(Ok(())), "{what}");
    }
}

#[test]
fn a_transmitq_that_sleeps_when_it_is_disabled_goes_on_dropping_what_its_driver_sends() {
    let mut guest = Guest::with(false, true);
    guest.set_kick(Kick::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap()).unwrap());
    guest.turn(1);
    let how = (Decision::Sleep, false);
    assert!(guest.settles(how, 2));
    // Each of these costs a turn, and an order takes fewer turns than that.
    let addr = MEMORY - 0x4000;
    let table = IndirectTable { addr, words: guest.ring.memory.words(addr, 0x4000, 16).unwrap() };
    for _ in 0..100 {
        guest.ring.driver.add_indirect(&[(DATA, 64); 1024], &[], &table).unwrap();
    }
    guest.ring.driver.publish();
    let mut answer = guest.disable();
    assert!(answer.try_recv().is_err(), "there is more to drop");
    let mut returned = guest.returned();
    for now_ns in 4..200 {
        guest.turn(now_ns);
        returned += guest.returned();
    }
    assert_eq!((returned, answer.try_recv()), (100, Ok(Ok(()))));
    // As its worker does when there was nothing for a while.
    assert!(!guest.running.is_hot() || guest.settles(how, 200));
    guest.ring.driver.add(&[(DATA, 72)], &[]).unwrap();
    assert!(guest.ring.driver.publish(), "nobody would look at it again");
}
