//! Requests and reports byte by byte, as the kernel writes and reads them.

use super::*;

#[test]
fn attributes_end_at_the_first_that_is_cut() {
    let mut request = Request::new(0, 0, 0, None);
    request.attribute(1, b"abc");
    request.attribute(2, b"defgh");
    let bytes = &request.emit(1)[NLMSG_HEADER_SIZE + IFINFOMSG_SIZE..];
    let whole: Vec<_> = attributes(bytes).collect();
    assert_eq!(whole, [(1, &b"abc"[..]), (2, &b"defgh"[..])]);
    assert_eq!(attributes(&bytes[..12]).collect::<Vec<_>>(), whole[..1]);
    assert_eq!(attributes(&[0; 64]).count(), 0);
}

fn message(kind: u16, index: u32, name: &[u8]) -> Vec<u8> {
    let mut request = Request::new(kind, 0, index, None);
    request.attribute(IFLA_IFNAME, name);
    request.emit(1)
}

#[test]
fn changes_are_told_apart_and_end_at_the_first_message_that_is_cut() {
    let both = [message(RTM_NEWLINK, 7, b"tap0\0"), message(RTM_DELLINK, 8, b"x\0")].concat();
    let event = |index, name: &str, is_gone| LinkEvent { index, name: name.into(), is_gone };
    let whole = [event(7, "tap0", false), event(8, "x", true)];
    assert_eq!(parse_events(&both), whole);
    assert_eq!(parse_events(&both[..both.len() - 1]), whole[..1]);
    assert_eq!(parse_events(&[0; 64]), []);
    assert_eq!(parse_events(&message(18, 7, b"tap0\0")), []);
}

/// The attributes `list`, one after the other.
fn nested(list: &[(u16, &[u8])]) -> Vec<u8> {
    let mut bytes = Request(Vec::new());
    list.iter().for_each(|(kind, value)| bytes.attribute(*kind, value));
    bytes.0
}

/// The kernel's report of interface 7, in answer to request 9.
fn report(flags: u32, list: &[(u16, &[u8])]) -> Vec<u8> {
    let mut request = Request::new(RTM_NEWLINK, 0, 7, None);
    request.0[24..28].copy_from_slice(&flags.to_ne_bytes());
    request.0.extend(nested(list));
    request.emit(9)
}

fn parsed(flags: u32, list: &[(u16, &[u8])]) -> InterfaceInfo {
    parse_answer(&report(flags, list), 9).unwrap().unwrap().unwrap()
}

/// The link of a kind, with these properties of its own.
fn of_kind(kind: &str, data: &[(u16, &[u8])]) -> InterfaceInfo {
    let (name, data) = ([kind.as_bytes(), b"\0"].concat(), nested(data));
    // The kernel marks an attribute that has others in it.
    let info = nested(&[(IFLA_INFO_KIND, &name), (IFLA_INFO_DATA | 1 << 15, &data)]);
    parsed(0, &[(IFLA_LINKINFO | 1 << 15, &info)])
}

#[test]
fn requests_have_the_bytes_that_the_kernel_reads() {
    let words = |words: &[u32]| words.iter().flat_map(|w| w.to_ne_bytes()).collect::<Vec<_>>();
    let two = |low: u16, high: u16| {
        u32::from_ne_bytes([low, high].map(u16::to_ne_bytes).concat().try_into().unwrap())
    };
    let (get, set) = (two(18, 1), two(19, 5));
    assert_eq!(Request::at(7).emit(3), words(&[32, get, 3, 0, 0, 7, 0, 0]));
    let find = [&words(&[44, get, 4, 0, 0, 0, 0, 0, two(9, 3)])[..], b"tap0\0\0\0\0"].concat();
    assert_eq!(Request::find("tap0").emit(4), find);
    let none = Change::default();
    assert_eq!(Request::set(7, &none).emit(5), words(&[32, set, 5, 0, 0, 7, 0, 0]));
    let down = Change { up: Some(false), ..none };
    assert_eq!(Request::set(7, &down).emit(5), words(&[32, set, 5, 0, 0, 7, 0, 1]));
    let all = Change { mtu: Some(9000), master: Some(3), txqueuelen: Some(500), up: Some(true) };
    let bytes = [56, set, 6, 0, 0, 7, 1, 1, two(8, 4), 9000, two(8, 10), 3, two(8, 13), 500];
    assert_eq!(Request::set(7, &all).emit(6), words(&bytes));
}

#[test]
fn answers_are_a_link_an_error_or_nothing_and_only_those_to_the_request_count() {
    let error = |number: i32| {
        let mut bytes = Request::new(NLMSG_ERROR, 0, 0, None).emit(9);
        bytes[16..20].copy_from_slice(&number.to_ne_bytes());
        parse_answer(&bytes, 9)
    };
    assert_eq!(error(0), Some(Ok(None)));
    assert_eq!((error(-19), error(i32::MIN)), (Some(Err(19)), Some(Err(i32::MAX))));
    let link = InterfaceInfo { index: 7, is_up: true, ..InterfaceInfo::default() };
    assert_eq!(parse_answer(&report(1, &[]), 9), Some(Ok(Some(link))));
    assert_eq!(parse_answer(&report(1, &[]), 8), None, "of another request");
    assert_eq!(parse_answer(&report(1, &[])[..28], 9), Some(Err(5)), "cut short");
    assert_eq!(parse_answer(&message(RTM_DELLINK, 7, b"tap0\0"), 1), Some(Err(5)));
    assert_eq!(parse_answer(&[], 9), None);
}

#[test]
fn a_link_has_the_properties_that_the_kernel_reports() {
    let [mtu, master, len, one] = [9000u32, 3, 250, 1].map(u32::to_ne_bytes);
    let address = [2, 0, 0, 0, 0, 5];
    let stats: Vec<_> = (1..=10_u64).flat_map(u64::to_ne_bytes).collect();
    let link = parsed(
        2,
        &[
            (IFLA_ADDRESS, &address),
            (IFLA_MTU, &mtu),
            (IFLA_MASTER, &master),
            (IFLA_TXQLEN, &len),
            (IFLA_STATS64, &stats),
        ],
    );
    let expected =
        InterfaceInfo { index: 7, address: Some([2, 0, 0, 0, 0, 5]), ..InterfaceInfo::default() };
    assert_eq!((link.rx_dropped, link.tx_dropped), (7, 8));
    let link = InterfaceInfo { rx_dropped: 0, tx_dropped: 0, ..link };
    assert_eq!(link, InterfaceInfo { mtu: 9000, master: Some(3), txqueuelen: 250, ..expected });
    assert_eq!(parsed(0, &[(IFLA_ADDRESS, &[0; 20])]).address, None, "of InfiniBand");
    let is_up = |flags| parsed(flags, &[]).is_up;
    assert!(is_up(1) && is_up(0x1003) && !is_up(0) && !is_up(!1));
    let any_group = |flags| parsed(flags, &[]).takes_any_group;
    assert!(any_group(0x100) && any_group(0x200) && any_group(0x300));
    assert!(!any_group(0) && !any_group(!0x300));
    let any_address = |count: [u8; 4]| parsed(0, &[(IFLA_PROMISCUITY, &count)]);
    assert!(any_address(one).takes_any_address && !any_address([0; 4]).takes_any_address);
    // A number that is cut short.
    for kind in [IFLA_MTU, IFLA_PROMISCUITY] {
        assert_eq!(parse_answer(&report(0, &[(kind, &[1, 0])]), 9), Some(Err(5)));
    }
}

#[test]
fn interfaces_on_another_one_take_what_their_own_mode_says() {
    assert_eq!(of_kind("bridge", &[]).kind, "bridge");
    let mode = |mode: u32| mode.to_ne_bytes();
    let (passthru, vepa) = (mode(MACVLAN_MODE_PASSTHRU), mode(2));
    let flags = |flags: u16| flags.to_ne_bytes();
    let is_promiscuous = |data: &[(u16, &[u8])]| of_kind("macvtap", data).takes_any_address;
    assert!(is_promiscuous(&[(IFLA_MACVLAN_MODE, &passthru)]));
    assert!(!is_promiscuous(&[(IFLA_MACVLAN_MODE, &vepa)]) && !is_promiscuous(&[]));
    for (bits, expected) in [(0, true), (1, false), (2, true), (3, false)] {
        let bits = flags(bits);
        let data = [(IFLA_MACVLAN_MODE, &passthru[..]), (IFLA_MACVLAN_FLAGS, &bits)];
        assert_eq!(is_promiscuous(&data), expected, "{bits:?}");
    }
    // How often the interface below was made promiscuous says nothing of them.
    let one = 1u32.to_ne_bytes();
    for (kind, expected) in [("macvtap", false), ("ipvtap", false), ("macvlan", true)] {
        let name = [kind.as_bytes(), b"\0"].concat();
        let info = nested(&[(IFLA_INFO_KIND, &name)]);
        let link = parsed(0, &[(IFLA_PROMISCUITY, &one), (IFLA_LINKINFO, &info)]);
        assert_eq!(link.takes_any_address, expected, "{kind}");
    }
    let data = nested(&[(IFLA_MACVLAN_MODE, &passthru)]);
    let info = nested(&[(IFLA_INFO_KIND, b"macvtap\0"), (IFLA_INFO_DATA, &data)]);
    let link = parsed(0, &[(IFLA_PROMISCUITY, &one), (IFLA_LINKINFO, &info)]);
    assert!(link.takes_any_address, "passthru, whatever else is said");
}

#[test]
fn a_tap_is_told_from_a_tun_and_has_the_properties_of_its_own() {
    let (three, four) = (3u32.to_ne_bytes(), 4u32.to_ne_bytes());
    let tap = |data: &[(u16, &[u8])]| {
        of_kind("tun", &[&[(IFLA_TUN_TYPE, &[TUN_TYPE_TAP][..])], data].concat()).tap
    };
    let plain = TapLink::default();
    assert_eq!(tap(&[]), Some(plain));
    assert_eq!(of_kind("tun", &[(IFLA_TUN_TYPE, &[1])]).tap, None, "a tun");
    assert_eq!(of_kind("tun", &[]).tap, None);
    assert_eq!(of_kind("veth", &[(IFLA_TUN_TYPE, &[TUN_TYPE_TAP])]).tap, None);
    let with = |kind, value: &[u8]| tap(&[(kind, value)]).unwrap();
    assert_eq!(with(IFLA_TUN_PI, &[1]), TapLink { has_packet_info: true, ..plain });
    assert_eq!(with(IFLA_TUN_MULTI_QUEUE, &[1]), TapLink { is_multi_queue: true, ..plain });
    assert_eq!(with(IFLA_TUN_NUM_QUEUES, &three), TapLink { attached: 3, ..plain });
    assert_eq!(with(IFLA_TUN_NUM_DISABLED_QUEUES, &four), TapLink { detached: 4, ..plain });
    assert_eq!((with(IFLA_TUN_PI, &[0]), with(IFLA_TUN_MULTI_QUEUE, &[0])), (plain, plain));
}

#[test]
fn an_interface_has_the_numbers_of_its_xdp_programs_whatever_their_mode() {
    let (driver, generic) = (7_u32.to_ne_bytes(), 9_u32.to_ne_bytes());
    let with =
        |list: &[(u16, &[u8])]| parsed(0, &[(IFLA_XDP | 1 << 15, &nested(list))]).xdp_programs;
    let (fd, attached, flags) = (1, 2, 3);
    assert_eq!(with(&[(attached, &[0])]), []);
    let of_driver = IFLA_XDP_PROG_ID + 1;
    assert_eq!(
        with(&[(attached, &[1]), (IFLA_XDP_PROG_ID, &driver), (of_driver, &driver)]),
        [7, 7]
    );
    // The kernel names none of several as the interface's.
    let several = [(of_driver, &driver[..]), (of_driver + 1, &generic)];
    assert_eq!(with(&several), [7, 9]);
    assert_eq!(with(&[(fd, &driver), (flags, &generic), (IFLA_XDP_PROG_ID, &[1])]), []);
}
