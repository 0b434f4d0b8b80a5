//! `Rules`: the settings by which a running queue passes frames: link, offloads, receive filter and
//! hash.

use manyring_memory::{GuestSlice, copy_from_slices};
use manyring_wire::net::rss::Hasher;
use manyring_wire::net::{
    FilterTable, HDR_F_NEEDS_CSUM, HDR_GSO_ECN, HDR_GSO_NONE, HDR_GSO_TCPV4, HDR_GSO_TCPV6,
    HDR_GSO_UDP_L4, MacAddress, Offloads, RawNetHeader, RxMode, VLAN_COUNT,
};
use std::sync::Arc;

/// The settings by which a queue passes frames; by default no frame passes. An immutable snapshot:
/// for each change the control thread makes a new one.
#[derive(Clone, Debug, Default)]
pub(crate) struct Rules {
    /// False: the guest's link is down, and every frame is dropped.
    pub(crate) link_up: bool,
    /// The offloads that the guest accepts: partial checksums and large segments.
    pub(crate) given: Offloads,
    /// Bytes of the longest finished frame, with a VLAN tag. Longer finished frames are dropped.
    pub(crate) frame_size_max: usize,
    /// Bytes of the longest frame that is expected: buffers for so many bytes are popped before a
    /// frame is read.
    pub(crate) room_size: usize,
    /// The receive filter of the guest; `None`: every frame is received.
    pub(crate) filter: Option<Filter>,
    /// The hash to report with each frame; `None`: the driver wants none.
    pub(crate) hash: Option<Arc<Hasher>>,
}

/// Whether a frame is delivered to the guest; if not, the reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RxDecision {
    Deliver,
    Filtered,
    Offload,
    LinkDown,
}

impl Rules {
    /// Returns the number of bytes of the longest finished frame that is delivered without being
    /// examined; 0 if the link is down or a filter must examine each frame. Must agree with
    /// [`Self::fate`].
    #[inline]
    pub(crate) fn plain_max(&self) -> usize {
        if self.link_up && self.filter.is_none() { self.frame_size_max } else { 0 }
    }

    /// Decides whether a frame of `len` bytes is delivered; `frame` has its bytes. A frame that was
    /// queued before the guest changed its offloads may need an offload that the guest no longer
    /// accepts.
    #[inline]
    pub(crate) fn fate(
        &self,
        header: &RawNetHeader,
        frame: &[GuestSlice<'_>],
        len: usize,
    ) -> RxDecision {
        let (flags, gso_type) = (header.flags, header.gso_type);
        if !self.link_up {
            return RxDecision::LinkDown;
        }
        if flags & HDR_F_NEEDS_CSUM != 0 && !self.given.csum {
            return RxDecision::Offload;
        }
        if gso_type == HDR_GSO_NONE {
            if len > self.frame_size_max {
                return RxDecision::Filtered;
            }
        } else if !takes(self.given, gso_type) {
            return RxDecision::Offload;
        }
        let Some(filter) = &self.filter else { return RxDecision::Deliver };
        let start = read_start::<FILTER_SIZE>(frame);
        if filter.passes(&start[..FILTER_SIZE.min(len)]) {
            RxDecision::Deliver
        } else {
            RxDecision::Filtered
        }
    }
}

/// Returns the first `N` bytes of a frame. If it is shorter, the remaining bytes are undefined.
#[inline]
fn read_start<const N: usize>(frame: &[GuestSlice<'_>]) -> [u8; N] {
    frame.first().and_then(GuestSlice::read_array::<N>).unwrap_or_else(|| {
        let mut bytes = [0; N];
        copy_from_slices(frame, &mut bytes);
        bytes
    })
}

/// True if a guest with the offloads `given` accepts a frame with this `gso_type`.
fn takes(given: Offloads, gso_type: u8) -> bool {
    let kind = match gso_type & !HDR_GSO_ECN {
        HDR_GSO_TCPV4 => given.tso4,
        HDR_GSO_TCPV6 => given.tso6,
        HDR_GSO_UDP_L4 => given.uso4 || given.uso6,
        _ => false,
    };
    kind && (gso_type & HDR_GSO_ECN == 0 || given.ecn)
}

/// Bytes that a filter examines: both MAC addresses, the type, and a VLAN tag with the type behind
/// it.
const FILTER_SIZE: usize = 18;

/// The receive filter of a guest (virtio 1.3 §5.1.6.5.1 to 5.1.6.5.3).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Filter {
    mac: MacAddress,
    promisc: bool,
    all_multi: bool,
    all_uni: bool,
    no_multi: bool,
    no_uni: bool,
    no_bcast: bool,
    table: FilterTable,
    /// One bit for each VLAN ID; `None`: the driver does not filter VLANs.
    vlans: Option<Box<[u64; VLAN_COUNT as usize / 64]>>,
}

/// Bytes for one bit for each VLAN ID.
pub(crate) const VLAN_BYTES: usize = VLAN_COUNT as usize / 8;
/// If the driver's table has more addresses of a kind (unicast or multicast), all frames of that
/// kind are received instead.
const TABLE_MAX: usize = 64;
const BROADCAST: MacAddress = [0xff; 6];
const VLAN_TYPE: [u8; 2] = [0x81, 0x00];

impl Filter {
    /// Makes a filter in promiscuous mode: every frame passes until the driver turns that off. With
    /// `filters_vlans`, then only frames of VLANs that the driver added pass.
    pub(crate) fn new(mac: MacAddress, filters_vlans: bool) -> Self {
        Self {
            mac,
            promisc: true,
            all_multi: false,
            all_uni: false,
            no_multi: false,
            no_uni: false,
            no_bcast: false,
            table: FilterTable::default(),
            vlans: filters_vlans.then(|| Box::new([0; VLAN_COUNT as usize / 64])),
        }
    }

    pub(crate) fn set_mode(&mut self, mode: RxMode, on: bool) {
        *match mode {
            RxMode::Promisc => &mut self.promisc,
            RxMode::AllMulti => &mut self.all_multi,
            RxMode::AllUni => &mut self.all_uni,
            RxMode::NoMulti => &mut self.no_multi,
            RxMode::NoUni => &mut self.no_uni,
            RxMode::NoBcast => &mut self.no_bcast,
        } = on;
    }

    pub(crate) fn set_mac(&mut self, mac: MacAddress) {
        self.mac = mac;
    }

    pub(crate) fn set_table(&mut self, table: FilterTable) {
        self.table = table;
    }

    pub(crate) fn set_vlan(&mut self, id: u16, on: bool) {
        if let Some(vlans) = &mut self.vlans {
            let bit = 1 << (id % 64);
            if let Some(word) = vlans.get_mut(usize::from(id / 64)) {
                *word = if on { *word | bit } else { *word & !bit };
            }
        }
    }

    /// True if this mode is on.
    pub(crate) fn mode(&self, mode: RxMode) -> bool {
        match mode {
            RxMode::Promisc => self.promisc,
            RxMode::AllMulti => self.all_multi,
            RxMode::AllUni => self.all_uni,
            RxMode::NoMulti => self.no_multi,
            RxMode::NoUni => self.no_uni,
            RxMode::NoBcast => self.no_bcast,
        }
    }

    /// Returns the MAC table, without entries beyond those that the filter uses.
    pub(crate) fn table(&self) -> FilterTable {
        let some = |all: &[MacAddress]| all.iter().copied().take(TABLE_MAX + 1).collect();
        FilterTable { unicast: some(&self.table.unicast), multicast: some(&self.table.multicast) }
    }

    /// Returns the VLANs that the driver added, one bit each; `None`: it does not filter VLANs.
    pub(crate) fn vlans(&self) -> Option<[u8; VLAN_BYTES]> {
        let words = self.vlans.as_deref()?;
        let mut bytes = [0; VLAN_BYTES];
        for (bytes, word) in bytes.chunks_mut(8).zip(words) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        Some(bytes)
    }

    /// Sets the VLANs from [`Self::vlans`], if the driver filters VLANs.
    pub(crate) fn set_vlans(&mut self, bytes: &[u8; VLAN_BYTES]) {
        if let Some(words) = &mut self.vlans {
            for (bytes, word) in bytes.as_chunks().0.iter().zip(words.iter_mut()) {
                *word = u64::from_le_bytes(*bytes);
            }
        }
    }

    /// True if every frame passes without being examined.
    pub(crate) fn passes_all(&self) -> bool {
        self.promisc
    }

    /// True if the filter passes the frame that starts with `bytes`.
    pub(crate) fn passes(&self, bytes: &[u8]) -> bool {
        if self.promisc {
            return true;
        }
        let Some((mac, rest)) = bytes.split_first_chunk::<6>() else { return false };
        self.passes_vlan(rest) && self.passes_mac(*mac)
    }

    fn passes_vlan(&self, behind_mac: &[u8]) -> bool {
        let (Some(vlans), Some(tag)) = (&self.vlans, behind_mac.get(6..10)) else { return true };
        if tag[..2] != VLAN_TYPE {
            return true;
        }
        let id = u16::from_be_bytes([tag[2], tag[3]]) & (VLAN_COUNT - 1);
        // VLAN ID 0 is a tag with only a priority (802.1Q).
        id == 0 || vlans.get(usize::from(id / 64)).is_some_and(|word| word >> (id % 64) & 1 == 1)
    }

    fn passes_mac(&self, mac: MacAddress) -> bool {
        let is_listed = |list: &[MacAddress]| list.len() > TABLE_MAX || list.contains(&mac);
        if mac == BROADCAST {
            !self.no_bcast
        } else if mac[0] & 1 == 1 {
            !self.no_multi && (self.all_multi || is_listed(&self.table.multicast))
        } else {
            !self.no_uni && (self.all_uni || mac == self.mac || is_listed(&self.table.unicast))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: MacAddress = [2, 0, 0, 0, 0, 1];
    const OTHER: MacAddress = [2, 0, 0, 0, 0, 2];
    const GROUP: MacAddress = [0x33, 0x33, 0, 0, 0, 1];

    fn frame(to: MacAddress, vlan: Option<u16>) -> Vec<u8> {
        let mut bytes = [&to[..], &OTHER].concat();
        if let Some(id) = vlan {
            bytes.extend([0x81, 0]);
            bytes.extend((id | 0x2000).to_be_bytes());
        }
        bytes.extend([8, 0, 1, 2, 3, 4]);
        bytes
    }

    #[test]
    fn what_is_passed_on_without_a_look_is_what_has_no_other_fate() {
        let filters = [None, Some(Filter::new(OWN, false))];
        for (link_up, filter) in [(true, 0), (true, 1), (false, 0), (false, 1)] {
            let filter = filters[filter].clone();
            let rules = Rules { link_up, frame_size_max: 1518, filter, ..Rules::default() };
            for len in [14, 1518, 1519] {
                let fate = rules.fate(&RawNetHeader::default(), &[], len);
                let is_plain = len <= rules.plain_max();
                assert!(!is_plain || fate == RxDecision::Deliver, "{rules:?} {len}");
                let needs_no_look = link_up && rules.filter.is_none() && len <= 1518;
                assert_eq!(is_plain, needs_no_look, "{rules:?} {len}");
            }
        }
    }

    #[test]
    fn everything_passes_until_the_driver_asks_for_less() {
        let filter = Filter::new(OWN, true);
        assert!(filter.passes(&frame(OTHER, Some(5))) && filter.passes_all());
    }

    #[test]
    fn addresses_are_told_apart() {
        let mut filter = Filter::new(OWN, false);
        filter.set_mode(RxMode::Promisc, false);
        let passes = |f: &Filter| [OWN, OTHER, GROUP, BROADCAST].map(|m| f.passes(&frame(m, None)));
        assert_eq!(passes(&filter), [true, false, false, true]);
        filter.set_table(FilterTable { unicast: vec![OTHER], multicast: vec![GROUP] });
        assert_eq!(passes(&filter), [true, true, true, true]);
        filter.set_mode(RxMode::NoUni, true);
        filter.set_mode(RxMode::NoMulti, true);
        filter.set_mode(RxMode::NoBcast, true);
        assert_eq!(passes(&filter), [false; 4]);
        let mut filter = Filter::new(OWN, false);
        filter.set_mode(RxMode::Promisc, false);
        filter.set_mode(RxMode::AllMulti, true);
        assert_eq!(passes(&filter), [true, false, true, true]);
        filter.set_mode(RxMode::AllUni, true);
        filter.set_mac(OTHER);
        assert_eq!(passes(&filter), [true; 4]);
        assert!(!filter.passes(&[1, 2, 3]), "too short for an address");
    }

    #[test]
    fn vlans_pass_if_they_were_asked_for() {
        let mut filter = Filter::new(OWN, true);
        filter.set_mode(RxMode::Promisc, false);
        let passes = |f: &Filter| [None, Some(5), Some(4095)].map(|v| f.passes(&frame(OWN, v)));
        assert_eq!(passes(&filter), [true, false, false]);
        assert!(filter.passes(&frame(OWN, Some(0))), "a priority is no VLAN");
        filter.set_vlan(5, true);
        filter.set_vlan(4095, true);
        assert_eq!(passes(&filter), [true, true, true]);
        filter.set_vlan(5, false);
        assert_eq!(passes(&filter), [true, false, true]);
        let mut all = Filter::new(OWN, false);
        all.set_mode(RxMode::Promisc, false);
        assert_eq!(passes(&all), [true; 3], "a driver that does not filter gets all");
    }
}
