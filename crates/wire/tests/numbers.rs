//! The numbers of the specifications, each written down a second time.

use manyring_wire::net::{self, CTRL_BITS, GUEST_OFFLOAD_BITS, flow, head, rss};
use manyring_wire::{blk, nbd, vhost_user, virtio};

/// Bits of a mask, the lowest first.
fn bits(mask: u64) -> Vec<u32> {
    (0..64).filter(|n| mask >> n & 1 == 1).collect()
}

#[test]
fn feature_bits_of_every_device_and_of_disks_are_the_specifications() {
    assert_eq!(bits(virtio::VIRTIO_F_ANY_LAYOUT), [27]);
    assert_eq!(bits(virtio::VIRTIO_F_INDIRECT_DESC), [28]);
    assert_eq!(bits(virtio::VIRTIO_F_EVENT_IDX), [29]);
    assert_eq!(bits(virtio::VIRTIO_F_VERSION_1), [32]);
    assert_eq!(bits(virtio::VIRTIO_F_RING_PACKED), [34]);
    assert_eq!(bits(virtio::VIRTIO_F_IN_ORDER), [35]);
    for (feature, bit) in [
        (blk::VIRTIO_BLK_F_SIZE_MAX, 1),
        (blk::VIRTIO_BLK_F_SEG_MAX, 2),
        (blk::VIRTIO_BLK_F_RO, 5),
        (blk::VIRTIO_BLK_F_BLK_SIZE, 6),
        (blk::VIRTIO_BLK_F_FLUSH, 9),
        (blk::VIRTIO_BLK_F_TOPOLOGY, 10),
        (blk::VIRTIO_BLK_F_CONFIG_WCE, 11),
        (blk::VIRTIO_BLK_F_MQ, 12),
        (blk::VIRTIO_BLK_F_DISCARD, 13),
        (blk::VIRTIO_BLK_F_WRITE_ZEROES, 14),
        (blk::VIRTIO_BLK_F_SECURE_ERASE, 16),
    ] {
        assert_eq!(bits(feature), [bit]);
    }
}

#[test]
fn feature_bits_of_network_devices_are_the_specifications() {
    for (feature, bit) in [
        (net::VIRTIO_NET_F_CSUM, 0),
        (net::VIRTIO_NET_F_GUEST_CSUM, 1),
        (net::VIRTIO_NET_F_CTRL_GUEST_OFFLOADS, 2),
        (net::VIRTIO_NET_F_MTU, 3),
        (net::VIRTIO_NET_F_MAC, 5),
        (net::VIRTIO_NET_F_GUEST_TSO4, 7),
        (net::VIRTIO_NET_F_GUEST_TSO6, 8),
        (net::VIRTIO_NET_F_GUEST_ECN, 9),
        (net::VIRTIO_NET_F_HOST_TSO4, 11),
        (net::VIRTIO_NET_F_HOST_TSO6, 12),
        (net::VIRTIO_NET_F_HOST_ECN, 13),
        (net::VIRTIO_NET_F_MRG_RXBUF, 15),
        (net::VIRTIO_NET_F_STATUS, 16),
        (net::VIRTIO_NET_F_CTRL_VQ, 17),
        (net::VIRTIO_NET_F_CTRL_RX, 18),
        (net::VIRTIO_NET_F_CTRL_VLAN, 19),
        (net::VIRTIO_NET_F_CTRL_RX_EXTRA, 20),
        (net::VIRTIO_NET_F_GUEST_ANNOUNCE, 21),
        (net::VIRTIO_NET_F_MQ, 22),
        (net::VIRTIO_NET_F_CTRL_MAC_ADDR, 23),
        (net::VIRTIO_NET_F_VQ_NOTF_COAL, 52),
        (net::VIRTIO_NET_F_NOTF_COAL, 53),
        (net::VIRTIO_NET_F_GUEST_USO4, 54),
        (net::VIRTIO_NET_F_GUEST_USO6, 55),
        (net::VIRTIO_NET_F_HOST_USO, 56),
        (net::VIRTIO_NET_F_HASH_REPORT, 57),
        (net::VIRTIO_NET_F_RSS, 60),
        (net::VIRTIO_NET_F_SPEED_DUPLEX, 63),
    ] {
        assert_eq!(bits(feature), [bit]);
    }
    assert_eq!(bits(GUEST_OFFLOAD_BITS), [1, 7, 8, 9, 54, 55]);
    assert_eq!(bits(CTRL_BITS), [2, 17, 18, 19, 20, 21, 23, 52, 53]);
}

#[test]
fn bits_of_vhost_user_are_the_specifications() {
    assert_eq!(bits(vhost_user::F_LOG_ALL), [26]);
    assert_eq!(bits(vhost_user::F_PROTOCOL_FEATURES), [30]);
    for (number, (feature, name)) in (0..).zip(vhost_user::PROTOCOL_FEATURES) {
        assert_eq!(bits(*feature), [number], "{name}");
    }
}

#[test]
fn the_longest_frame_is_an_ip_packet_with_an_ethernet_header_and_a_tag() {
    assert_eq!(net::FRAME_SIZE_MAX, 65_553);
    assert_eq!((net::HDR_F_NEEDS_CSUM, net::HDR_F_DATA_VALID), (1, 2));
    assert_eq!(blk::SECTOR_SIZE, 1 << blk::SECTOR_SHIFT);
    assert_eq!(blk::SEGMENT_UNMAP, 1);
}

#[test]
fn headers_that_are_looked_at_have_the_length_of_the_longest_ones() {
    use rss::hash_type::{IPV4, IPV6, TCPV4, TCPV6, UDPV4, UDPV6};
    // Ethernet, two sessions, IPv4 with all options, ports; Ethernet, a tag, IPv6, TCP with all.
    assert_eq!((flow::FLOW_BYTES, head::HEAD_SIZE_MAX), (122, 118));
    // For each of two addresses of IPv6 and two ports two halves of a byte, of 16 values each.
    assert_eq!(rss::TOEPLITZ_WORDS, 36 * 2 * 16);
    assert_eq!(bits(rss::hash_type::ALL.into()), [0, 1, 2, 3, 4, 5]);
    let types = [IPV4, TCPV4, UDPV4, IPV6, TCPV6, UDPV6];
    assert_eq!(types.map(u32::trailing_zeros), [0, 1, 2, 3, 4, 5]);
}

#[test]
fn flags_of_nbd_are_the_specifications() {
    for (flag, bit) in [
        (nbd::HAS_FLAGS, 0),
        (nbd::READ_ONLY, 1),
        (nbd::SEND_FLUSH, 2),
        (nbd::SEND_FUA, 3),
        (nbd::SEND_TRIM, 5),
        (nbd::SEND_WRITE_ZEROES, 6),
        (nbd::CAN_MULTI_CONN, 8),
        (nbd::FLAG_FUA, 0),
        (nbd::FLAG_NO_HOLE, 1),
    ] {
        assert_eq!(bits(flag.into()), [bit]);
    }
}
