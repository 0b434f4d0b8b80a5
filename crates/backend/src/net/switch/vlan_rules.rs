//! The VLAN rules of a port: which frames it accepts, and which tags leaving frames have. Pure.

use super::table::VlanAddress;
use manyring_wire::net::TYPES_TAG;

/// Bytes of an Ethernet header.
pub(super) const ETHERNET: usize = 14;
/// Bytes of a VLAN tag.
pub(super) const VLAN_TAG: usize = 4;
/// Offset of a VLAN tag in a frame: behind both MAC addresses.
pub(super) const TAG_AT: usize = 12;
const TYPE_VLAN: u16 = 0x8100;

/// The VLANs of a port.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Vlans {
    /// All: every frame passes unchanged, with its tag or without one.
    #[default]
    All,
    /// One: frames of this VLAN, which have no tag on this port.
    Access(u16),
    /// Several: frames of these VLANs, which have their tags on this port.
    Trunk(Vec<u16>),
}

/// The change of a frame's VLAN tag between its two ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// Leave the frame as it is.
    None,
    /// Remove its tag.
    Strip,
    /// Insert a tag of this VLAN.
    Insert(u16),
    /// Set this VLAN in its tag, which has a priority and no VLAN.
    Set(u16),
}

/// The VLAN tag of a frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Tag {
    /// The number of the VLAN; 0: the frame has no VLAN.
    pub(super) vlan: u16,
    /// True if the frame has a tag, perhaps one with a priority and no VLAN.
    pub(super) is_tagged: bool,
    /// True if another tag lies behind this one.
    pub(super) has_inner: bool,
}

impl Tag {
    /// Parses the tag of a frame with these first bytes.
    #[must_use]
    #[inline]
    pub(super) fn of(head: &[u8]) -> Self {
        if kind(head, TAG_AT) != Some(TYPE_VLAN) {
            return Self::default();
        }
        match kind(head, ETHERNET) {
            Some(tci) => {
                let has_inner =
                    kind(head, ETHERNET + 2).is_some_and(|kind| TYPES_TAG.contains(&kind));
                Self { vlan: tci & 0xfff, is_tagged: true, has_inner }
            }
            None => Self::default(),
        }
    }
}

impl Vlans {
    /// Returns the VLAN of a frame that arrives with this tag; `None`: the port does not accept it.
    /// A tag with only a priority counts as no tag (802.1Q). An access port does not accept such a
    /// frame if a second tag follows it: guests on other access ports would get the frame with the
    /// second tag.
    #[must_use]
    pub(super) fn arrival(&self, tag: Tag) -> Option<u16> {
        match self {
            Self::All => Some(tag.vlan),
            Self::Access(vlan) => (tag.vlan == 0 && !tag.has_inner).then_some(*vlan),
            Self::Trunk(vlans) => vlans.contains(&tag.vlan).then_some(tag.vlan),
        }
    }

    /// True if the port is in this VLAN. `vlan` 0 stands for frames without a VLAN.
    #[must_use]
    pub(super) fn has(&self, vlan: u16) -> bool {
        match self {
            Self::All => true,
            Self::Access(own) => *own == vlan,
            Self::Trunk(vlans) => vlans.contains(&vlan),
        }
    }

    /// Returns the change for a frame of `vlan`, which arrived with `tag`, to leave by this port;
    /// `None`: it must not.
    #[must_use]
    pub(super) fn departure(&self, vlan: u16, tag: Tag) -> Option<Change> {
        let wants_tag = match self {
            Self::All => vlan != 0 || tag.is_tagged,
            Self::Access(own) if *own == vlan => false,
            Self::Trunk(vlans) if vlans.contains(&vlan) => true,
            Self::Access(_) | Self::Trunk(_) => return None,
        };
        Some(match (tag.is_tagged, wants_tag) {
            (true, false) => Change::Strip,
            (false, true) => Change::Insert(vlan),
            (true, true) if tag.vlan != vlan => Change::Set(vlan),
            _ => Change::None,
        })
    }
}

/// Returns the big-endian number in the two bytes at `at`.
fn kind(bytes: &[u8], at: usize) -> Option<u16> {
    let bytes = bytes.get(at..at + 2)?.try_into().ok()?;
    Some(u16::from_be_bytes(bytes))
}

/// Returns the destination and the source address of a frame; `None`: it is too short.
#[must_use]
#[inline]
fn addresses(head: &[u8]) -> Option<([u8; 6], [u8; 6])> {
    let (to, rest) = head.split_first_chunk()?;
    Some((*to, *rest.first_chunk()?))
}

/// Returns the number of the group to which a frame goes, if the group is one of 01:80:c2:00:00:00
/// to 01:80:c2:00:00:0f, whose frames bridges do not forward (IEEE 802.1Q §8.6.3).
#[must_use]
#[inline]
pub(super) fn reserved_group(head: &[u8]) -> Option<u8> {
    match head {
        [1, 0x80, 0xc2, 0, 0, last @ 0..16, ..] => Some(*last),
        _ => None,
    }
}

/// Returns the destination and source of a frame as keys of the table; `None` in place of a group
/// address.
#[must_use]
#[inline]
pub(super) fn keys(head: &[u8], vlan: u16) -> Option<(Option<VlanAddress>, Option<VlanAddress>)> {
    let (to, from) = addresses(head)?;
    Some((VlanAddress::new(to, vlan), VlanAddress::new(from, vlan)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: [u8; 6] = [2, 0, 0, 0, 0, 1];

    fn ethernet(from: [u8; 6], kind: u16) -> Vec<u8> {
        [&[0xff; 6][..], &from, &kind.to_be_bytes()].concat()
    }

    #[test]
    fn access_and_trunk_ports_exchange_frames_of_their_vlans_and_no_others() {
        let (untagged, tagged) =
            (Tag::default(), Tag { vlan: 5, is_tagged: true, has_inner: false });
        let (all, access, trunk) = (Vlans::All, Vlans::Access(5), Vlans::Trunk(vec![5, 7]));
        assert_eq!((access.arrival(untagged), access.arrival(tagged)), (Some(5), None));
        assert_eq!((trunk.arrival(untagged), trunk.arrival(tagged)), (None, Some(5)));
        assert_eq!((all.arrival(untagged), all.arrival(tagged)), (Some(0), Some(5)));
        assert_eq!(access.departure(5, tagged), Some(Change::Strip));
        assert_eq!(access.departure(5, untagged), Some(Change::None), "from another access port");
        assert_eq!((access.departure(6, untagged), access.departure(0, untagged)), (None, None));
        assert_eq!(trunk.departure(5, untagged), Some(Change::Insert(5)));
        assert_eq!(
            (trunk.departure(5, tagged), trunk.departure(8, tagged)),
            (Some(Change::None), None)
        );
        assert_eq!(all.departure(5, untagged), Some(Change::Insert(5)));
        // A priority without a VLAN.
        let priority = Tag { vlan: 0, ..tagged };
        assert_eq!((access.arrival(priority), trunk.arrival(priority)), (Some(5), None));
        assert_eq!(access.arrival(Tag { has_inner: true, ..priority }), None);
        assert_eq!(all.arrival(priority), Some(0));
        assert_eq!(trunk.departure(5, priority), Some(Change::Set(5)));
        assert_eq!(all.departure(5, priority), Some(Change::Set(5)));
        assert_eq!(all.departure(0, priority), Some(Change::None));
        assert_eq!(access.departure(5, priority), Some(Change::Strip));
        assert_eq!(all.departure(0, untagged), Some(Change::None));
    }

    #[test]
    fn the_groups_of_bridges_are_sixteen() {
        let frame = |last: u8| [1, 0x80, 0xc2, 0, 0, last, 2, 0, 0, 0, 0, 1];
        assert!((0..16).all(|last| reserved_group(&frame(last)) == Some(last)));
        assert!((16..=255).all(|last| reserved_group(&frame(last)).is_none()));
        assert_eq!(reserved_group(&frame(0)[..5]), None);
        assert_eq!(reserved_group(&[1, 0x80, 0xc2, 0, 1, 0, 2]), None);
    }

    #[test]
    fn a_tag_is_read_whole_or_not_at_all() {
        let frame = [&ethernet(OWN, TYPE_VLAN)[..], &[0x20, 5, 8, 0]].concat();
        assert_eq!(Tag::of(&frame), Tag { vlan: 5, is_tagged: true, has_inner: false });
        assert_eq!(Tag::of(&frame[..15]), Tag::default());
        let double = [&frame[..16], &[0x88, 0xa8, 0, 6]].concat();
        assert!(Tag::of(&double).has_inner);
    }
}
