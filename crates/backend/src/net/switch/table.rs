//! `Table`: the port of each MAC address, learnt from frames. Any thread may read it and learn.
//!
//! ```text
//! learn   the address is known behind this port? store the second, at most once in each second
//!         behind another port? it has moved: unless it has moved too often in this second
//!         unknown? take an entry of its set that is free or too old, if its port may have more;
//!         for the first address of a port also an entry of a port that has several
//! find    the entry of its set with this key that is not too old
//! ```
//! An entry is two words: the key (MAC address and VLAN), and the value (port, second, and a tag
//! made from the key). They are read one after the other without a lock, so a reader may see the
//! key before and the value after a change of the entry: then the tag does not belong to the key,
//! and the address counts as unknown. A writer claims an entry by setting its value to `BUSY`, and
//! only that writer writes the key. No thread waits: one that finds an entry busy learns the
//! address from a later frame.

use super::PortId;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// The most MAC addresses that a switch knows.
pub const ADDRESSES_MAX: usize = SETS * WAYS;
const SETS: usize = 1024;
const WAYS: usize = 4;
/// An address that has moved so many times in one second stays behind its port until the next.
const MOVES_MAX: u64 = 4;

const FREE: u64 = 0;
const BUSY: u64 = u64::MAX;
/// Layout of a value: tag, second, moves in that second, port.
const TAG_SHIFT: u32 = 32;
const SECOND_SHIFT: u32 = 15;
const SECOND_MASK: u64 = (1 << 17) - 1;
const MOVES_SHIFT: u32 = 12;
const MOVES_MASK: u64 = 7;
const PORT_MASK: u64 = (1 << MOVES_SHIFT) - 1;

/// The most ports of a switch. A port's number must fit the 12 bits of a value, and no value may
/// equal `BUSY`.
pub const PORTS_MAX: usize = 4000;

/// A MAC address in a VLAN, as the key of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct VlanAddress(u64);

impl VlanAddress {
    /// Makes the key of a MAC address in `vlan`, 0 to 4095; `None` for a group address, and for the
    /// address that is all zeroes.
    #[must_use]
    #[inline]
    pub(super) fn new(address: [u8; 6], vlan: u16) -> Option<Self> {
        let [a, b, c, d, e, f] = address;
        let number = u64::from_be_bytes([0, 0, a, b, c, d, e, f]);
        (a & 1 == 0 && number != 0).then_some(Self(number << 12 | u64::from(vlan & 0xfff)))
    }

    /// Returns a hash that spreads keys over all bits.
    #[inline]
    fn mixed(self) -> u64 {
        let mixed = (self.0 ^ self.0 >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (mixed ^ mixed >> 32).wrapping_mul(0x94d0_49bb_1331_11eb)
    }

    fn tag(self) -> u64 {
        self.mixed() >> 32
    }
}

#[derive(Debug, Default)]
struct Entry {
    key: AtomicU64,
    value: AtomicU64,
}

/// The effect of [`Table::learn`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Learnt {
    /// The address was known behind this port.
    Known,
    /// The address was unknown, and is known now.
    New,
    /// The address was behind another port before.
    Moved,
    /// The address stays behind another port, since it has moved too often in this second.
    Flaps,
    /// The address was not learnt: its set is full, or the port has as many addresses as it may
    /// have.
    Full,
}

/// The port behind which an address is learnt, and its limit.
#[derive(Debug)]
pub(super) struct Learner<'a> {
    /// The port.
    pub(super) port: PortId,
    /// The number of addresses that the table has behind the port.
    pub(super) count: &'a AtomicU32,
    /// The most addresses behind the port.
    pub(super) max: u32,
}

/// The MAC addresses that a switch knows.
#[derive(Debug)]
pub(super) struct Table {
    entries: Box<[Entry]>,
    /// Hashed with an address to choose its set, so that nobody can choose addresses that fill the
    /// set of another one.
    secret: u64,
    /// Seconds after which an address that sends nothing is forgotten.
    age: u64,
}

#[derive(Clone, Copy)]
struct Value(u64);

impl Value {
    fn new(key: VlanAddress, port: PortId, second: u32, moves: u64) -> Self {
        let second = (u64::from(second) & SECOND_MASK) << SECOND_SHIFT;
        Self(key.tag() << TAG_SHIFT | second | moves << MOVES_SHIFT | u64::from(port))
    }

    fn is_of(self, key: VlanAddress) -> bool {
        self.0 != BUSY && self.0 != FREE && self.0 >> TAG_SHIFT == key.tag()
    }

    fn second(self) -> u64 {
        self.0 >> SECOND_SHIFT & SECOND_MASK
    }

    fn moves(self) -> u64 {
        self.0 >> MOVES_SHIFT & MOVES_MASK
    }

    fn port(self) -> PortId {
        PortId::try_from(self.0 & PORT_MASK).unwrap_or(PortId::MAX)
    }

    /// Returns the seconds since the address was seen; the stored second wraps around after a day
    /// and a half.
    fn age(self, second: u32) -> u64 {
        u64::from(second).wrapping_sub(self.second()) & SECOND_MASK
    }
}

impl Table {
    /// Makes a table that forgets addresses which have sent nothing for `age` seconds, 1 to 65536.
    #[must_use]
    pub(super) fn new(age: u32) -> Self {
        let entries = (0..ADDRESSES_MAX).map(|_| Entry::default()).collect();
        let secret = RandomState::new().build_hasher().finish();
        Self { entries, secret, age: u64::from(age) }
    }

    #[inline]
    #[allow(clippy::cast_possible_truncation, reason = "the low bits")]
    fn set(&self, key: VlanAddress) -> &[Entry] {
        let low = VlanAddress(key.0 ^ self.secret).mixed() as usize & (SETS - 1);
        &self.entries[low * WAYS..(low + 1) * WAYS]
    }

    /// Returns the port behind which `key` was learnt, if the address was seen in the last `age`
    /// seconds.
    #[must_use]
    #[inline]
    pub(super) fn find(&self, key: VlanAddress, second: u32) -> Option<PortId> {
        for entry in self.set(key) {
            if entry.key.load(Ordering::Acquire) == key.0 {
                let value = Value(entry.value.load(Ordering::Acquire));
                return (value.is_of(key) && value.age(second) <= self.age).then(|| value.port());
            }
        }
        None
    }

    /// Learns that `key` is behind the port of `learner`. `count_of` returns the number of
    /// addresses of another port, which is decremented if that port loses this one.
    pub(super) fn learn<'a>(
        &self,
        key: VlanAddress,
        learner: &Learner<'_>,
        second: u32,
        count_of: impl Fn(PortId) -> Option<&'a AtomicU32>,
    ) -> Learnt {
        let set = self.set(key);
        if let Some(entry) = set.iter().find(|e| e.key.load(Ordering::Acquire) == key.0) {
            let old = entry.value.load(Ordering::Acquire);
            if Value(old).is_of(key) {
                return self.renew(entry, Value(old), (key, learner, second), count_of);
            }
        }
        if learner.count.load(Ordering::Relaxed) >= learner.max {
            return Learnt::Full;
        }
        let is_old = |old: u64| old != FREE && Value(old).age(second) > self.age;
        // Otherwise ports with many addresses could evict the only address of another port from its
        // set.
        let may_yield = |old: u64| {
            let has = count_of(Value(old).port()).map_or(0, |count| count.load(Ordering::Relaxed));
            learner.count.load(Ordering::Relaxed) == 0 && has > 1
        };
        let take = |is_free: &dyn Fn(u64) -> bool| {
            for entry in set {
                let old = entry.value.load(Ordering::Acquire);
                if old == BUSY || !is_free(old) || !claim(entry, old) {
                    continue;
                }
                if old != FREE {
                    lose(count_of(Value(old).port()));
                }
                learner.count.fetch_add(1, Ordering::Relaxed);
                entry.key.store(key.0, Ordering::Release);
                entry.value.store(Value::new(key, learner.port, second, 0).0, Ordering::Release);
                return Some(Learnt::New);
            }
            None
        };
        take(&|old| old == FREE || is_old(old)).or_else(|| take(&may_yield)).unwrap_or(Learnt::Full)
    }

    /// Updates the entry of an address: stores the second, or moves the address to another port.
    fn renew<'a>(
        &self,
        entry: &Entry,
        old: Value,
        (key, learner, second): (VlanAddress, &Learner<'_>, u32),
        count_of: impl Fn(PortId) -> Option<&'a AtomicU32>,
    ) -> Learnt {
        let is_now = old.age(second) == 0;
        if old.port() == learner.port {
            if !is_now {
                let new = Value::new(key, learner.port, second, 0).0;
                // A failure is ignored: another thread has written a newer value.
                let _ =
                    entry.value.compare_exchange(old.0, new, Ordering::AcqRel, Ordering::Relaxed);
            }
            return Learnt::Known;
        }
        let moves = if is_now { old.moves() + 1 } else { 1 };
        let is_alive = old.age(second) <= self.age;
        if is_alive && moves > MOVES_MAX {
            return Learnt::Flaps;
        }
        if learner.count.load(Ordering::Relaxed) >= learner.max {
            return Learnt::Full;
        }
        let new = Value::new(key, learner.port, second, moves).0;
        if entry.value.compare_exchange(old.0, new, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            return Learnt::Known;
        }
        lose(count_of(old.port()));
        learner.count.fetch_add(1, Ordering::Relaxed);
        if is_alive { Learnt::Moved } else { Learnt::New }
    }

    /// Forgets the addresses of `port`; with `is_old`, only those that are too old in that second.
    /// Returns how many entries were freed.
    pub(super) fn forget(&self, port: PortId, is_old: Option<u32>) -> u32 {
        let mut count = 0;
        for entry in &self.entries {
            let old = entry.value.load(Ordering::Acquire);
            let is_other = old == FREE || old == BUSY || Value(old).port() != port;
            if is_other || is_old.is_some_and(|second| Value(old).age(second) <= self.age) {
                continue;
            }
            if claim(entry, old) {
                entry.key.store(0, Ordering::Release);
                entry.value.store(FREE, Ordering::Release);
                count += 1;
            }
        }
        count
    }

    /// Returns every address with its VLAN, its port, and the seconds since it was seen.
    #[must_use]
    #[allow(clippy::cast_possible_truncation, reason = "twelve bits")]
    pub(super) fn list(&self, second: u32) -> Vec<Station> {
        let of = |entry: &Entry| {
            let key = VlanAddress(entry.key.load(Ordering::Acquire));
            let value = Value(entry.value.load(Ordering::Acquire));
            let is_there = value.is_of(key) && value.age(second) <= self.age;
            let [_, _, address @ ..] = (key.0 >> 12).to_be_bytes();
            let vlan = (key.0 & 0xfff) as u16;
            is_there.then(|| Station { address, vlan, port: value.port(), age: value.age(second) })
        };
        self.entries.iter().filter_map(of).collect()
    }
}

/// An address that a switch knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Station {
    /// The address.
    pub address: [u8; 6],
    /// Its VLAN; 0: none.
    pub vlan: u16,
    /// The port that it is behind.
    pub port: PortId,
    /// Seconds since it was seen.
    pub age: u64,
}

/// Claims an entry whose value was `old`. Returns true if the caller may write it.
fn claim(entry: &Entry, old: u64) -> bool {
    entry.value.compare_exchange(old, BUSY, Ordering::AcqRel, Ordering::Relaxed).is_ok()
}

/// Subtracts one from a port's number of addresses; it may be 0 already if the port was forgotten.
fn lose(count: Option<&AtomicU32>) {
    if let Some(count) = count {
        let _ = count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    struct Ports([AtomicU32; 4]);

    impl Ports {
        fn new() -> Self {
            Self(std::array::from_fn(|_| AtomicU32::new(0)))
        }

        fn learn(
            &self,
            table: &Table,
            key: VlanAddress,
            port: PortId,
            max: u32,
            second: u32,
        ) -> Learnt {
            let count = &self.0[usize::from(port)];
            let learner = Learner { port, count, max };
            table.learn(key, &learner, second, |port| self.0.get(usize::from(port)))
        }

        fn counts(&self) -> [u32; 4] {
            std::array::from_fn(|n| self.0[n].load(Ordering::Relaxed))
        }
    }

    fn key(n: u8) -> VlanAddress {
        VlanAddress::new([2, 0, 0, 0, 0, n], 0).unwrap()
    }

    #[test]
    fn groups_and_the_address_of_nobody_are_no_stations() {
        assert!(
            VlanAddress::new([1, 0, 0, 0, 0, 0], 0).is_none()
                && VlanAddress::new([0; 6], 7).is_none()
        );
        assert_ne!(
            VlanAddress::new([2; 6], 1),
            VlanAddress::new([2; 6], 2),
            "a station of each VLAN"
        );
    }

    #[test]
    fn a_station_moves_at_once_but_not_more_than_four_times_in_a_second() {
        let (table, ports) = (Table::new(300), Ports::new());
        assert_eq!(ports.learn(&table, key(1), 0, 8, 10), Learnt::New);
        assert_eq!(ports.learn(&table, key(1), 0, 8, 10), Learnt::Known);
        for n in 1..=4 {
            assert_eq!(ports.learn(&table, key(1), n % 2, 8, 10), Learnt::Moved);
        }
        assert_eq!(ports.learn(&table, key(1), 1, 8, 10), Learnt::Flaps);
        assert_eq!((table.find(key(1), 10), ports.counts()), (Some(0), [1, 0, 0, 0]));
        assert_eq!(ports.learn(&table, key(1), 1, 8, 11), Learnt::Moved);
    }

    #[test]
    fn what_is_silent_is_forgotten_and_its_entry_used_again() {
        let (table, ports) = (Table::new(5), Ports::new());
        ports.learn(&table, key(1), 0, 1, 100);
        assert_eq!((table.find(key(1), 105), table.find(key(1), 106)), (Some(0), None));
        assert_eq!(ports.learn(&table, key(2), 0, 1, 106), Learnt::Full, "the entry is counted");
        ports.0[0].fetch_sub(table.forget(0, Some(106)), Ordering::Relaxed);
        assert_eq!(ports.learn(&table, key(2), 0, 1, 106), Learnt::New);
        assert_eq!(table.list(106).len(), 1);
        assert_eq!(table.forget(0, None), 1);
        assert_eq!(table.find(key(2), 106), None);
    }

    #[test]
    fn one_port_cannot_fill_the_table() {
        let (table, ports) = (Table::new(300), Ports::new());
        for n in 0..10_000u32 {
            let [_, b, c, d] = n.to_be_bytes();
            ports.learn(&table, VlanAddress::new([2, 9, 9, b, c, d], 0).unwrap(), 0, 8, 1);
        }
        assert_eq!(ports.counts()[0], 8);
        assert_eq!(ports.learn(&table, key(200), 1, 8, 1), Learnt::New, "others have room");
    }

    #[test]
    fn nobody_knows_which_addresses_share_a_set() {
        // In a table with a known hash these addresses share one set. The victim's port has another
        // address already, so that it takes nobody's entry.
        let (table, ports) = (Table::new(300), Ports::new());
        let own = key(2);
        ports.learn(&table, own, 1, 8, 1);
        let at = |table: &Table, key: VlanAddress| {
            table.set(key).as_ptr().addr() - table.entries.as_ptr().addr()
        };
        let victim = key(1);
        let keys = (0..u32::MAX).map(|n| {
            let [_, b, c, d] = n.to_be_bytes();
            VlanAddress::new([2, 9, 9, b, c, d], 0).unwrap()
        });
        let colliding: Vec<_> =
            keys.filter(|key| at(&table, *key) == at(&table, victim)).take(2 * WAYS).collect();
        for key in &colliding {
            ports.learn(&table, *key, 0, 8, 1);
        }
        assert_eq!(ports.learn(&table, victim, 1, 8, 1), Learnt::Full);
        // In another table, whose secret differs, they lie in different sets.
        let (table, ports) = (Table::new(300), Ports::new());
        ports.learn(&table, own, 1, 8, 1);
        for key in &colliding {
            ports.learn(&table, *key, 0, 8, 1);
        }
        assert_eq!(ports.learn(&table, victim, 1, 8, 1), Learnt::New);
    }

    #[test]
    fn ports_of_many_addresses_leave_room_for_one_of_each_other_port() {
        let (table, ports) = (Table::new(300), Ports::new());
        for n in 0..60_000u32 {
            let [_, b, c, d] = n.to_be_bytes();
            ports.learn(&table, VlanAddress::new([2, 9, b, c, d, 0], 0).unwrap(), 0, 60_000, 1);
        }
        assert_eq!(ports.counts()[0], 4096, "every set is full");
        assert_eq!(ports.learn(&table, key(1), 1, 8, 1), Learnt::New);
        assert_eq!((table.find(key(1), 1), ports.counts()), (Some(1), [4095, 1, 0, 0]));
        assert_eq!(ports.learn(&table, key(2), 1, 8, 1), Learnt::Full, "its second one must wait");
        // The first address of a port stays: no other port takes the last address that a port has.
        for n in 0..60_000u32 {
            let [_, b, c, d] = n.to_be_bytes();
            ports.learn(&table, VlanAddress::new([2, 8, b, c, d, 0], 0).unwrap(), 2, 60_000, 1);
        }
        assert_eq!((table.find(key(1), 1), ports.counts()), (Some(1), [4094, 1, 1, 0]));
    }

    proptest! {
        /// The table against a map: each address is where it was last seen, if there was room.
        #[test]
        fn it_knows_what_a_map_knows(
            steps in proptest::collection::vec((0..12u8, 0..4u16, 0..3u32), 1..200),
        ) {
            let (table, ports) = (Table::new(4), Ports::new());
            let (mut map, mut now) = (HashMap::<u8, (u16, u32)>::new(), 0);
            for (station, port, later) in steps {
                now += later;
                match ports.learn(&table, key(station), port, 100, now) {
                    Learnt::Known | Learnt::New | Learnt::Moved => {
                        map.insert(station, (port, now));
                    }
                    Learnt::Flaps => prop_assert_ne!(map[&station].0, port),
                    Learnt::Full => {}
                }
                for (station, (port, seen)) in &map {
                    let known = (now - seen <= 4).then_some(*port);
                    if let Some(found) = table.find(key(*station), now) {
                        prop_assert_eq!(Some(found), known);
                    }
                }
            }
            let counted: u32 = ports.counts().iter().sum();
            let held = (0..4).map(|port| table.forget(port, None)).sum::<u32>();
            prop_assert_eq!(counted, held);
        }
    }
}
