//! A packed ring that shows in its descriptors where it goes on (`packed/trail.rs`).

use super::{PackedDeviceHalf, byte_of};
use crate::order::Order;
use crate::packed::trail::{self, Found};
use crate::place::{F_AVAIL, F_USED, Place};
use manyring_memory::fence_compiler;
use manyring_wire::virtqueue::{DESC_F_NEXT, Descriptor};

impl PackedDeviceHalf {
    /// As [`DeviceQueue::trailed`](crate::DeviceQueue::trailed).
    #[must_use]
    pub fn trailed(mut self) -> Self {
        debug_assert!(!self.has_begun, "the place would not be looked for");
        // A record or the trail says the place, not both. The trail works for any front-end.
        self.record = None;
        // Chains in another order: the place would not say which of them are answered.
        self.features.in_order = true;
        self.order = Order::new(self.size.next_power_of_two());
        (self.trail, self.is_noted) = (Some(Vec::new()), true);
        self
    }

    /// Goes on at the place that the ring shows. Returns true if the driver must be notified: the
    /// former process may have been killed before it notified.
    pub(super) fn find_place(&mut self) -> bool {
        if self.trail.is_none() {
            return false;
        }
        let found = trail::find(self.size, |at| flags_of(self.high(Place { at, wrap: true })));
        let Some(found) = found else { return false };
        if !self.end_burst(found) {
            return false;
        }
        let place = found.from.add(found.burst, self.size);
        let is_other = place != self.used;
        (self.avail, self.used) = (place, place);
        is_other
    }

    /// Publishes the burst that a former process had begun to write. Its chains were answered, but
    /// some of their lengths are lost. So all of them get the length 0, and the driver drops the
    /// data that it received in them. False if the descriptors do not form whole chains.
    fn end_burst(&self, Found { from, burst, unwritten }: Found) -> bool {
        let (mut words, mut n) = (Vec::new(), 0);
        while n < unwritten {
            let first = words.len();
            loop {
                if n >= burst {
                    return false;
                }
                let place = from.add(n, self.size);
                let word = self.high(place);
                words.push((place, shown(word, place)));
                n += 1;
                if flags_of(word) & DESC_F_NEXT == 0 {
                    // The id of a chain is that of its last descriptor (§2.8.6).
                    words[first].1 = used_word(words[first].0, id_of(word), 0);
                    break;
                }
            }
        }
        for n in unwritten..burst {
            let place = from.add(n, self.size);
            let word = self.high(place);
            self.store(place, emptied(word));
        }
        words.into_iter().rev().for_each(|(place, word)| self.store(place, word));
        true
    }

    /// Returns a chain as `write_used` does, but writes all of its descriptors as used.
    pub(super) fn trail_used(&mut self, slot: u16, written: u32) {
        let kept = self.slots.kept(slot);
        let mut place = self.used;
        let word = used_word(place, kept.id, written);
        let trail = self.trail.get_or_insert_default();
        if self.first.is_none() {
            self.first = Some((place, word));
        } else {
            trail.push((place, word));
        }
        for (_, high) in self.slots.descs(slot).skip(1) {
            place = place.add(1, self.size);
            trail.push((place, shown(*high, place)));
        }
        let (_, count) = self.slots.free_used(slot);
        self.has_used(count);
    }

    /// Writes the descriptors of the burst except its first one, from the last one down.
    pub(super) fn write_trail(&mut self) {
        let Some(mut trail) = self.trail.take() else { return };
        trail.drain(..).rev().for_each(|(place, word)| self.store(place, word));
        self.trail = Some(trail);
    }

    fn store(&self, place: Place, word: u64) {
        self.areas.desc.store_u64(byte_of(place) + 8, word);
        // The next process relies on the order of these stores, if this one is killed.
        fence_compiler();
    }

    fn high(&self, place: Place) -> u64 {
        self.areas.desc.load_u64_acquire(byte_of(place) + 8).to_le()
    }
}

/// The second word of the used descriptor of a chain.
fn used_word(place: Place, id: u16, written: u32) -> u64 {
    let flags = place.used_flags();
    Descriptor { addr: 0, len: written, flags, next: 0 }.emit_packed(id).1
}

/// The second word of a used chain's descriptor behind its first one. The driver does not read it
/// (§2.8.6). All flags stay, except the two of the lap.
fn shown(high: u64, place: Place) -> u64 {
    let flags = flags_of(high) & !(F_AVAIL | F_USED) | place.used_flags();
    (high & (u64::MAX >> 16) | u64::from(flags) << 48).to_le()
}

/// A used descriptor with the length 0.
fn emptied(high: u64) -> u64 {
    (high & !u64::from(u32::MAX)).to_le()
}

#[allow(clippy::cast_possible_truncation, reason = "the highest 16 bits")]
fn flags_of(high: u64) -> u16 {
    (high >> 48) as u16
}

#[allow(clippy::cast_possible_truncation, reason = "16 bits of it")]
fn id_of(high: u64) -> u16 {
    (high >> 32) as u16
}
