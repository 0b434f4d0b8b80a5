//! The verdict on a frame that a port sends: which port gets it, with which change of its VLAN tag,
//! or why it is dropped. Reaching the verdict also learns the frame's source address.

use super::counters::Count;
use super::shared::Shared;
use super::table::{self, Learner, Learnt};
use super::vlan_rules::{self, Change, Tag};
use super::{Destination, Map, PortId, Switch};
use manyring_wire::net::RawNetHeader;
use manyring_wire::net::sender::is_own;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The decision about a frame, by the rules and the table of MAC addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Send it to this port, with this change of its VLAN tag.
    To(PortId, Change),
    /// Send it to all ports but its own.
    Flood,
    /// Drop it; the reason is counted. `refused`: the sender has broken a rule of its port.
    Drop { refused: bool },
}

impl Switch {
    /// Decides where a frame of `port` goes, and learns its source address. `head` is the frame's
    /// beginning. A partial checksum in `header` must not lie in the bytes that are judged here.
    pub(super) fn judge(
        &self,
        port: &Shared,
        map: &Map,
        (header, head): (&RawNetHeader, &[u8]),
        second: u32,
    ) -> (Verdict, u16, Tag) {
        let (counters, tag) = (&port.counters, Tag::of(head));
        let refused = |count: &Count| {
            count.add(1);
            (Verdict::Drop { refused: true }, 0, tag)
        };
        let Some(vlan) = port.options.vlans.arrival(tag) else {
            return refused(&counters.dropped_vlan);
        };
        if port.options.only.is_some_and(|mac| !is_own(head, mac)) {
            return refused(&counters.dropped_spoofed);
        }
        if !header.is_in_place(head) {
            return refused(&counters.dropped_unfinished);
        }
        let Some((to, from)) = vlan_rules::keys(head, vlan) else {
            return refused(&counters.dropped_spoofed);
        };
        let Some(from) = from else {
            // A group address cannot be the source of a frame: drop it.
            return refused(&counters.dropped_spoofed);
        };
        match map.owner(&head[6..12], vlan) {
            Some(owner) if owner.port.id != port.id => counters.not_learnt.add(1),
            _ => self.learn(port, map, from, second),
        }
        let is_passed = |group: u8| self.group_fwd_mask >> group & 1 == 1;
        if vlan_rules::reserved_group(head).is_some_and(|group| !is_passed(group)) {
            counters.dropped_reserved.add(1);
            return (Verdict::Drop { refused: false }, vlan, tag);
        }
        let known = to.and_then(|to| self.find(port.id, map, (to, &head[..6], vlan), second));
        let verdict = match known {
            Some(destination) => self.toward(port, &destination.port, (vlan, tag)),
            None => Self::flood(port, second),
        };
        (verdict, vlan, tag)
    }

    /// Returns the port of a MAC address: the one for which it is configured, or behind which it
    /// was learnt.
    fn find<'a>(
        &self,
        from: PortId,
        map: &'a Map,
        (key, address, vlan): (table::VlanAddress, &[u8], u16),
        second: u32,
    ) -> Option<&'a Arc<Destination>> {
        match map.owner(address, vlan) {
            None => map.get(self.table.find(key, second)?),
            Some(owner) if owner.is_running() => Some(owner),
            // The guest with this configured address may run on another host now, so send to the
            // uplink: the guest has not arrived here yet, or has left.
            Some(owner) => {
                let uplink = map.uplink.filter(|uplink| *uplink != from);
                uplink.and_then(|uplink| map.get(uplink)).or(Some(owner))
            }
        }
    }

    fn learn(&self, port: &Shared, map: &Map, from: table::VlanAddress, second: u32) {
        let counters = &port.counters;
        let learner = Learner { port: port.id, count: &port.macs, max: port.options.macs_max };
        let count_of = |id| map.get(id).map(|destination| &destination.port.macs);
        match self.table.learn(from, &learner, second, count_of) {
            Learnt::Known | Learnt::New => {}
            Learnt::Moved => counters.moves.add(1),
            Learnt::Flaps => counters.flaps.add(1),
            Learnt::Full => {
                counters.not_learnt.add(1);
                self.make_room(port, second);
            }
        }
    }

    /// Returns the verdict on a frame to a port that was found.
    fn toward(&self, port: &Shared, to: &Shared, (vlan, tag): (u16, Tag)) -> Verdict {
        let dropped = |count: &Count| {
            count.add(1);
            Verdict::Drop { refused: false }
        };
        if to.id == port.id {
            return dropped(&port.counters.dropped_own);
        }
        if port.options.isolated && to.options.isolated {
            return dropped(&port.counters.dropped_isolated);
        }
        match to.options.vlans.departure(vlan, tag) {
            Some(change) => Verdict::To(to.id, change),
            None => dropped(&port.counters.dropped_vlan),
        }
    }

    fn flood(port: &Shared, second: u32) -> Verdict {
        if port.may_flood(second) {
            port.counters.flooded.add(1);
            return Verdict::Flood;
        }
        port.counters.dropped_flood.add(1);
        Verdict::Drop { refused: false }
    }

    /// Forgets the old MAC addresses of a port, so that others can be learnt: once in a second at
    /// most, because the whole table must be searched.
    #[cold]
    fn make_room(&self, port: &Shared, second: u32) {
        if port.swept.swap(second, Ordering::Relaxed) != second {
            let old = self.table.forget(port.id, Some(second));
            let less = |n: u32| Some(n.saturating_sub(old));
            let _ = port.macs.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        }
    }
}
