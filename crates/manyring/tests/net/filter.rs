//! Commands of the control queue at each kind of port: what is answered as done is done, what the
//! host keeps from the guest is refused, and the groups that a guest needs reach it. Needs root,
//! for network namespaces of its own.

use crate::support::process::{Daemon, wait_until};
use crate::support::space::{in_own_space, run};
use manyring_driver::{ControlDriverQueue, ControlOwner, NetDriver, NetDriverOptions};
use manyring_wire::net::rss::{HashConfig, RssConfig, hash_type};
use manyring_wire::net::{CtrlStatus, FilterTable, MacAddress, RawNetHeader, RxMode};
use manyring_wire::net::{VIRTIO_NET_F_RSS, class};

/// An address beside the guest's own.
const OTHER: MacAddress = [2, 0xaa, 0xbb, 0xcc, 0xdd, 0xee];
/// The groups to which neighbours solicit fd00::2, and of mDNS.
const SOLICITED: MacAddress = [0x33, 0x33, 0xff, 0, 0, 2];
const MDNS: MacAddress = [1, 0, 0x5e, 0, 0, 0xfb];
/// A type of frames that nobody else sends.
const TYPE: [u8; 2] = [0x88, 0xb5];
const VLAN: u16 = 5;

/// A kind of port, and the way to it.
struct Kind {
    name: &'static str,
    make: fn(),
    /// The keys of the guest's port, and of the port by which frames come to it.
    keys: &'static str,
    far: &'static str,
    /// The commands that are refused.
    refused: &'static [&'static str],
}

/// What a guest asks for that the interface below filters away.
const ADDRESSES: &[&str] = &["promisc", "alluni", "address", "rss", "other in table"];
const KINDS: [Kind; 9] = [
    Kind {
        name: "tap",
        make: make_bridge,
        keys: "tap = 'ta'\nbridge = 'br0'",
        far: "tap = 'tb'\nbridge = 'br0'",
        refused: &[],
    },
    Kind {
        name: "macvtap",
        make: || make_macvtap("bridge"),
        keys: "macvtap = 'up0'",
        far: "xdp = 'far'",
        refused: ADDRESSES,
    },
    Kind {
        name: "macvtap in a process of its own",
        make: || make_macvtap("private"),
        keys: "macvtap = 'up0'\ndomain = 'a'",
        far: "xdp = 'far'",
        refused: ADDRESSES,
    },
    Kind {
        name: "passthru",
        make: || make_macvtap("passthru"),
        keys: "macvtap = 'up0'",
        far: "xdp = 'far'",
        refused: &["rss"],
    },
    Kind {
        name: "passthru nopromisc",
        make: || make_macvtap("passthru nopromisc"),
        keys: "macvtap = 'up0'",
        far: "xdp = 'far'",
        refused: ADDRESSES,
    },
    Kind {
        name: "xdp",
        make: make_cable,
        keys: "xdp = 'near'",
        far: "xdp = 'far'",
        refused: ADDRESSES,
    },
    Kind {
        name: "promiscuous xdp",
        make: || {
            make_cable();
            run("ip link set near promisc on");
        },
        keys: "xdp = 'near'",
        far: "xdp = 'far'",
        refused: &["rss"],
    },
    Kind { name: "switch", make: || {}, keys: "switch = 's0'", far: "switch = 's0'", refused: &[] },
    Kind {
        name: "anti_spoof",
        make: || {},
        keys: "switch = 's0'\nvlan = 6\nanti_spoof = true",
        far: "switch = 's0'\nvlan = 6",
        refused: &["address", "vlan", "other in table"],
    },
];

fn make_bridge() {
    run("ip link add br0 type bridge mcast_snooping 0");
    run("ip link set br0 addrgenmode none up");
}

/// The guest's end has two queues, of which its peer uses the first.
fn make_cable() {
    run("ip link add near numtxqueues 2 numrxqueues 2 type veth peer name far");
    for end in ["near", "far"] {
        run(&format!("ip link set {end} addrgenmode none up"));
    }
}

fn make_macvtap(mode: &str) {
    make_cable();
    // The host itself joins no group on it.
    run("sysctl -q net.ipv6.conf.default.disable_ipv6=1");
    run(&format!(
        "ip link add link near name up0 numtxqueues 2 numrxqueues 2 type macvtap mode {mode}"
    ));
    run("ip link set up0 addrgenmode none up");
}

/// A guest, another one whose frames reach it, and their daemon.
struct Both {
    daemon: Daemon,
    guest: NetDriver,
    far: NetDriver,
    /// Where the next frames that must arrive go.
    own: MacAddress,
    sent: u32,
}

impl Both {
    fn begin(kind: &Kind) -> Self {
        (kind.make)();
        let config = format!(
            "[daemon]\n[[switch]]\nname = 's0'\n\
             [[net]]\nname = 'a'\nsocket_path = '@/a'\nqueue_pairs = 2\n{}\n\
             [[net]]\nname = 'b'\nsocket_path = '@/b'\n{}\n",
            kind.keys, kind.far
        );
        let daemon = Daemon::run(&config, &["a", "b"]);
        let options = |control, queue_pairs| NetDriverOptions {
            control,
            queue_pairs,
            features: NetDriverOptions::PLAIN | NetDriverOptions::CONTROL | VIRTIO_NET_F_RSS,
            ..NetDriverOptions::default()
        };
        let connect =
            |name: &str, options| NetDriver::connect(&daemon.socket_of(name), &options).unwrap();
        let guest = connect("a", options(ControlOwner::Device, 2));
        let far = connect("b", options(ControlOwner::FrontEnd, 1));
        let own = guest.config.mac;
        let mut both = Self { daemon, guest, far, own, sent: 0 };
        // The kernel drops what is sent before it knows of a carrier.
        both.reaches(own, None);
        both
    }

    /// Sends a frame to this address to the guest.
    fn send(&mut self, to: MacAddress, vlan: Option<u16>) -> u32 {
        self.sent += 1;
        let number = self.sent.to_be_bytes();
        let tag = vlan.map(|vlan| [[0x81, 0], vlan.to_be_bytes()].concat()).unwrap_or_default();
        let from = self.far.config.mac;
        let frame = [&to[..], &from, &tag, &TYPE, &number, &[0; 46]].concat();
        let tx = &mut self.far.pairs[0].tx;
        assert!(wait_until(|| {
            tx.reclaim();
            tx.send(&RawNetHeader::default(), &frame).unwrap()
        }));
        tx.publish(0).unwrap();
        self.sent
    }

    /// True if a frame to this address reaches the guest. If it does not, later frames tell: one to
    /// the guest and one to all, which a macvtap delivers by a thread of its own.
    fn reaches(&mut self, to: MacAddress, vlan: Option<u16>) -> bool {
        let number = self.send(to, vlan);
        let (mut is_there, mut later) = (false, [false; 2]);
        assert!(wait_until(|| {
            self.send(self.own, None);
            self.send([0xff; 6], None);
            let rx = &mut self.guest.pairs[0].rx;
            let mut frame = Vec::new();
            while rx.recv(&mut frame).unwrap().is_some() {
                let at = if frame[12..14] == [0x81, 0] { 16 } else { 12 };
                if frame[at..at + 2] == TYPE {
                    let found = u32::from_be_bytes(frame[at + 2..at + 6].try_into().unwrap());
                    is_there |= found == number;
                    later[usize::from(frame[0] == 0xff)] |= found > number;
                }
                frame.clear();
            }
            rx.refill().unwrap();
            later == [true; 2]
        }));
        is_there
    }

    /// True if the command was done; it must be refused exactly if `refused` names it.
    fn is_answered(&self, name: &str, refused: &[&str], answer: CtrlStatus) -> bool {
        assert_eq!(answer == CtrlStatus::Err, refused.contains(&name), "{}", self.log(name));
        answer == CtrlStatus::Ok
    }

    fn log(&self, name: &str) -> String {
        format!("{name}: {}", self.daemon.log())
    }
}

/// The commands beside filters, with data that is right.
fn other_commands() -> Vec<(&'static str, u8, u8, Vec<u8>)> {
    let coalescing = [[4, 0, 0, 0], [9, 0, 0, 0]].concat();
    let of_queue = [&[1, 0, 0, 0][..], &coalescing].concat();
    let hash = HashConfig { types: hash_type::ALL, key: vec![0x6d; 40] };
    let rss = RssConfig { hash, unclassified: 0, table: vec![0], transmitqs: 1 };
    vec![
        ("rss", class::MQ, class::MQ_RSS_CONFIG, rss.emit()),
        ("pairs", class::MQ, class::MQ_VQ_PAIRS_SET, vec![2, 0]),
        ("one pair", class::MQ, class::MQ_VQ_PAIRS_SET, vec![1, 0]),
        ("announced", class::ANNOUNCE, class::ANNOUNCE_ACK, vec![]),
        ("offloads", class::GUEST_OFFLOADS, class::GUEST_OFFLOADS_SET, vec![0; 8]),
        ("coalesce tx", class::NOTF_COAL, class::NOTF_COAL_TX_SET, coalescing.clone()),
        ("coalesce rx", class::NOTF_COAL, class::NOTF_COAL_RX_SET, coalescing),
        ("coalesce one", class::NOTF_COAL, class::NOTF_COAL_VQ_SET, of_queue),
        ("coalescing", class::NOTF_COAL, class::NOTF_COAL_VQ_GET, vec![1, 0]),
        ("no vlan", class::VLAN, class::VLAN_DEL, vec![9, 0]),
        ("nomulti", class::RX, class::RX_NOMULTI, vec![0]),
        ("nouni", class::RX, class::RX_NOUNI, vec![0]),
        ("nobcast", class::RX, class::RX_NOBCAST, vec![0]),
        ("allmulti", class::RX, class::RX_ALLMULTI, vec![1]),
        ("no allmulti", class::RX, class::RX_ALLMULTI, vec![0]),
        ("alluni", class::RX, class::RX_ALLUNI, vec![1]),
        ("no alluni", class::RX, class::RX_ALLUNI, vec![0]),
    ]
}

fn control(both: &mut Both) -> &mut ControlDriverQueue {
    both.guest.control.as_mut().unwrap()
}

/// The commands that set a filter, and whether frames follow them.
fn filters_work(both: &mut Both, refused: &[&str]) {
    // As for a guest whose front-end keeps the control queue: nothing is asked for, all is passed.
    assert!(both.reaches(SOLICITED, None) && both.reaches(MDNS, None), "{}", both.log("groups"));
    let promisc = |both: &mut Both, on| control(both).set_rx_mode(RxMode::Promisc, on).unwrap();
    assert_eq!(promisc(both, false), CtrlStatus::Ok);
    let table = |both: &mut Both, unicast: &[MacAddress]| {
        let (unicast, multicast) = (unicast.to_vec(), vec![SOLICITED]);
        control(both).set_mac_table(&FilterTable { unicast, multicast }).unwrap()
    };
    assert_eq!(table(both, &[]), CtrlStatus::Ok);
    let reached = [SOLICITED, MDNS, OTHER, [0xff; 6]].map(|to| both.reaches(to, None));
    assert_eq!(reached, [true, false, false, true]);
    let answer = table(both, &[OTHER]);
    both.is_answered("other in table", refused, answer);
    assert!(both.reaches(SOLICITED, None), "also of a list that is refused");
    // On a cable without a card behind it frames to other addresses come in spite of the answer.
    let answer = promisc(both, true);
    let is_done = both.is_answered("promisc", refused, answer);
    assert!(both.reaches(MDNS, None));
    assert!(!is_done || both.reaches(OTHER, None));
    assert_eq!((promisc(both, false), table(both, &[])), (CtrlStatus::Ok, CtrlStatus::Ok));
    let (own, answer) = (both.own, control(both).set_mac(OTHER).unwrap());
    if both.is_answered("address", refused, answer) {
        both.own = OTHER;
        assert!(both.reaches(OTHER, None) && !both.reaches(own, None));
        assert_eq!(control(both).set_mac(own).unwrap(), CtrlStatus::Ok);
        both.own = own;
    }
    assert!(both.reaches(own, None) && !both.reaches(OTHER, None));
    assert!(!both.reaches(own, Some(VLAN)));
    let answer = control(both).add_vlan(VLAN).unwrap();
    let is_done = both.is_answered("vlan", refused, answer);
    assert_eq!(both.reaches(own, Some(VLAN)), is_done);
}

#[test]
fn each_command_at_each_kind_of_port_has_its_effect_or_is_refused() {
    for kind in KINDS {
        in_own_space(|| {
            println!("{}", kind.name);
            let mut both = Both::begin(&kind);
            filters_work(&mut both, kind.refused);
            for (name, group, command, data) in other_commands() {
                // A worker that a busy host does not run within a second has a command refused.
                let mut answers = (0..5).map(|_| {
                    control(&mut both).command(group, command, &[&data], 8).unwrap().status == 0
                });
                let is_done = answers.any(|is_done| is_done != kind.refused.contains(&name));
                assert!(is_done, "{}", both.log(name));
            }
            assert!(both.daemon.terminate().success());
        });
    }
}

#[test]
fn a_port_without_a_network_does_every_command() {
    let config = "[daemon]\n[[net]]\nname = 'a'\nsocket_path = '@/a'\nnull = true\n";
    let daemon = Daemon::run(config, &["a"]);
    let options = NetDriverOptions { control: ControlOwner::Device, ..NetDriverOptions::default() };
    let mut guest = NetDriver::connect(&daemon.socket_of("a"), &options).unwrap();
    let control = guest.control.as_mut().unwrap();
    for mode in RxMode::ALL {
        assert_eq!(control.set_rx_mode(mode, true).unwrap(), CtrlStatus::Ok);
    }
    let table = FilterTable { unicast: vec![OTHER], multicast: vec![MDNS] };
    assert_eq!(control.set_mac_table(&table).unwrap(), CtrlStatus::Ok);
    assert_eq!(control.set_mac(OTHER).unwrap(), CtrlStatus::Ok);
    assert_eq!(control.add_vlan(VLAN).unwrap(), CtrlStatus::Ok);
    for (name, group, command, data) in other_commands() {
        // One pair, of which nothing is chosen.
        let status = control.command(group, command, &[&data], 8).unwrap().status;
        assert_eq!(status, u8::from(["rss", "pairs", "one pair"].contains(&name)), "{name}");
    }
    assert!(daemon.terminate().success());
}

#[test]
fn groups_are_refused_where_the_daemon_may_not_join_them_until_the_operator_has() {
    let kind = &KINDS[1];
    let without_rights = "exec setpriv --bounding-set -net_raw --inh-caps -net_raw";
    for is_set in [false, true] {
        in_own_space(|| {
            make_macvtap("bridge");
            if is_set {
                run("ip link set up0 allmulticast on");
            }
            let config =
                format!("[daemon]\n[[net]]\nname = 'a'\nsocket_path = '@/a'\n{}\n", kind.keys);
            let daemon = Daemon::run_behind(without_rights, &config, &["a"]);
            let options =
                NetDriverOptions { control: ControlOwner::Device, ..NetDriverOptions::default() };
            let mut guest = NetDriver::connect(&daemon.socket_of("a"), &options).unwrap();
            let control = guest.control.as_mut().unwrap();
            let expected = if is_set { CtrlStatus::Ok } else { CtrlStatus::Err };
            let table = FilterTable { unicast: vec![], multicast: vec![MDNS] };
            assert_eq!(control.set_mac_table(&table).unwrap(), expected, "{}", daemon.log());
            assert_eq!(control.set_rx_mode(RxMode::AllMulti, true).unwrap(), expected);
            assert_eq!(control.set_mac_table(&FilterTable::default()).unwrap(), CtrlStatus::Ok);
            let hint = "run \"ip link set up0 allmulticast on\"";
            assert_eq!(daemon.log().contains(hint), !is_set, "{}", daemon.log());
            assert!(daemon.terminate().success());
            let shown = run("ip link show up0");
            assert_eq!(shown.contains("ALLMULTI"), is_set, "{shown}");
        });
    }
}
