//! Each key of a device: a device process makes of it what this process would, or the supervisor
//! alone uses it.

use super::*;
use crate::assemble::served;
use crate::assemble::switch::of_switch_port;
use manyring_config as config;
use manyring_config::plan::{NetPlan, Plan, PortPlan};
use manyring_protocol::message::{Command, emit, parse};
use manyring_protocol::nbd::ExportSpec;
use manyring_protocol::spec::{BlkSpec, DeviceSpec, KindSpec, NetSpec, XenBlkSpec};

/// Where the value of a key goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Goes {
    /// Into the spec of the device.
    Spec,
    /// Nowhere else: the supervisor uses it.
    Supervisor,
    /// No device process serves a device that has it.
    NoProcess,
}
use Goes::{NoProcess, Spec, Supervisor};

/// A key, its destination, and the keys of two devices that differ by it alone.
type Example = (&'static str, Goes, &'static str, &'static str);

const NULL: &str = "null = '1G'";
const FILE: &str = "file = '/f'";
const BLK: [Example; 33] = [
    ("name", Supervisor, "null = '1G'\nserial = 's'", "null = '1G'\nserial = 's'\nname = 'b'"),
    ("socket_path", Supervisor, NULL, "null = '1G'\nsocket_path = '/t'"),
    ("fd", Supervisor, NULL, "null = '1G'\nfd = 3"),
    ("client", Supervisor, NULL, "null = '1G'\nclient = true"),
    ("socket_owner", Supervisor, NULL, "null = '1G'\nsocket_owner = 0"),
    ("socket_group", Supervisor, NULL, "null = '1G'\nsocket_group = 0"),
    ("socket_mode", Supervisor, NULL, "null = '1G'\nsocket_mode = '0600'"),
    ("one_off", Supervisor, NULL, "null = '1G'\none_off = true"),
    ("handshake_timeout", Spec, NULL, "null = '1G'\nhandshake_timeout = 7"),
    ("memory_on_disk", Spec, NULL, "null = '1G'\nmemory_on_disk = true"),
    ("memory_max", Spec, NULL, "null = '1G'\nmemory_max = '1G'"),
    ("limit", Supervisor, NULL, "null = '1G'\nlimit = { iops = 5 }"),
    ("file", Spec, NULL, FILE),
    ("domain", Supervisor, NULL, "null = '1G'\ndomain = 'd'"),
    ("null", Spec, NULL, "null = '2G'"),
    ("memory", Spec, NULL, "memory = '1G'"),
    ("nbd", Spec, NULL, "nbd = 'nbd://h/d'"),
    ("reconnect", Spec, "nbd = 'nbd://h/d'", "nbd = 'nbd://h/d'\nreconnect = '5s'"),
    ("read_only", Spec, NULL, "null = '1G'\nread_only = true"),
    ("direct", Spec, FILE, "file = '/f'\ndirect = true"),
    ("lock_with_rings", Spec, FILE, "file = '/f'\nlock_with_rings = true"),
    ("format", Supervisor, FILE, "file = '/f'\nformat = 'raw'"),
    ("format", Spec, FILE, "file = '/f'\nformat = 'qcow2'\n[daemon]\nstate_dir = '/d'"),
    ("logical_block_size", Spec, NULL, "null = '1G'\nlogical_block_size = 4096"),
    ("num_queues", Spec, NULL, "null = '1G'\nnum_queues = 3"),
    ("queue_size", Spec, NULL, "null = '1G'\nqueue_size = 64"),
    ("queue_workers", Spec, NULL, "null = '1G'\nqueue_workers = [0]"),
    ("moderation", Spec, NULL, "null = '1G'\nmoderation = '32/100us'"),
    ("serial", Spec, NULL, "null = '1G'\nserial = 's'"),
    ("cache", Spec, NULL, "null = '1G'\ncache = 'writethrough'"),
    ("on_full", Spec, NULL, "null = '1G'\non_full = 'report'"),
    ("fault", Spec, NULL, "null = '1G'\nfault = {}"),
    // The keys of the table `fault` are below.
    ("fault", Spec, NULL, "null = '1G'\nfault = { flush_errors = true }"),
];
const PORT: &str = "null = true";
const TAP: &str = "tap = 't'";
const SWITCH: &str = "switch = 's'\n[[switch]]\nname = 's'";
const NET: [Example; 47] = [
    (
        "name",
        Supervisor,
        "null = true\nmac = '02:00:00:00:00:01'",
        "null = true\nmac = '02:00:00:00:00:01'\nname = 'b'",
    ),
    (
        "socket_path",
        Supervisor,
        "null = true\nmac = '02:00:00:00:00:01'",
        "null = true\nmac = '02:00:00:00:00:01'\nsocket_path = '/t'",
    ),
    (
        "fd",
        Supervisor,
        "null = true\nmac = '02:00:00:00:00:01'",
        "null = true\nmac = '02:00:00:00:00:01'\nfd = 3",
    ),
    ("client", Supervisor, PORT, "null = true\nclient = true"),
    ("socket_owner", Supervisor, PORT, "null = true\nsocket_owner = 0"),
    ("socket_group", Supervisor, PORT, "null = true\nsocket_group = 0"),
    ("socket_mode", Supervisor, PORT, "null = true\nsocket_mode = '0600'"),
    ("one_off", Supervisor, PORT, "null = true\none_off = true"),
    ("handshake_timeout", Spec, PORT, "null = true\nhandshake_timeout = 7"),
    ("memory_on_disk", Spec, PORT, "null = true\nmemory_on_disk = true"),
    ("memory_max", Spec, PORT, "null = true\nmemory_max = '1G'"),
    ("limit", Supervisor, PORT, "null = true\nlimit = { tx_pps = 5 }"),
    ("tap", Spec, PORT, TAP),
    ("must_exist", Supervisor, TAP, "tap = 't'\nmust_exist = true"),
    ("tap_fds", Spec, PORT, "tap_fds = [7]"),
    ("macvtap", Spec, PORT, "macvtap = 't'"),
    ("xdp", Spec, PORT, "xdp = 't'"),
    ("zero_copy", NoProcess, PORT, "xdp = 't'\nzero_copy = true\n[daemon]\ndomains = 'one'"),
    ("null", Spec, TAP, PORT),
    ("generate", Spec, PORT, "null = true\ngenerate = 64"),
    ("switch", Spec, PORT, SWITCH),
    ("vlan", Spec, SWITCH, "vlan = 5\nswitch = 's'\n[[switch]]\nname = 's'"),
    ("trunk", Spec, SWITCH, "trunk = [5]\nswitch = 's'\n[[switch]]\nname = 's'"),
    ("isolated", Spec, SWITCH, "isolated = true\nswitch = 's'\n[[switch]]\nname = 's'"),
    ("anti_spoof", Spec, SWITCH, "anti_spoof = true\nswitch = 's'\n[[switch]]\nname = 's'"),
    ("macs_max", Spec, SWITCH, "macs_max = 5\nswitch = 's'\n[[switch]]\nname = 's'"),
    ("floods_max", Spec, SWITCH, "floods_max = 5\nswitch = 's'\n[[switch]]\nname = 's'"),
    ("queue_pairs", Spec, PORT, "null = true\nqueue_pairs = 2"),
    ("queue_workers", Spec, PORT, "null = true\nqueue_workers = [0]"),
    ("moderation", Spec, PORT, "null = true\nmoderation = '32/100us'"),
    ("reclaim", Spec, PORT, "null = true\nreclaim = 'auto'"),
    ("offload", Spec, PORT, "null = true\noffload = 'csum'"),
    ("mac", Spec, PORT, "null = true\nmac = '02:00:00:00:00:01'"),
    ("mtu", Spec, PORT, "null = true\nmtu = 1400"),
    ("speed", Spec, PORT, "null = true\nspeed = 1000"),
    ("bridge", Supervisor, TAP, "tap = 't'\nbridge = 'b'"),
    ("up", Supervisor, TAP, "tap = 't'\nup = true"),
    ("sndbuf", Supervisor, TAP, "tap = 't'\nsndbuf = 4096"),
    ("txqueuelen", Supervisor, TAP, "tap = 't'\ntxqueuelen = 5"),
    ("merge", Spec, TAP, "tap = 't'\nmerge = false"),
    ("steer", Supervisor, TAP, "tap = 't'\nsteer = false"),
    ("hash_report", Spec, PORT, "null = true\nhash_report = true"),
    ("domain", Supervisor, PORT, "null = true\ndomain = 'd'"),
    ("pcap", Spec, PORT, "null = true\npcap = '/p'"),
    ("fault", Spec, PORT, "null = true\nfault = {}"),
    // Only a tap merges packets, and `offload = 'none'` ends that.
    ("offload", Spec, TAP, "tap = 't'\noffload = 'none'"),
    ("fault", Spec, PORT, "null = true\nfault = { late_tx = 3 }"),
];
const XEN: [Example; 21] = [
    ("name", Supervisor, "", "name = 'b'"),
    ("kinds", Supervisor, "", "kinds = ['vbd']"),
    ("xenstore", Supervisor, "", "xenstore = '/x'"),
    ("simulated", Supervisor, "", "simulated = '/x'"),
    ("domain", Supervisor, "", "domain = 5"),
    ("direct", Spec, "", "direct = true"),
    ("format", Supervisor, "", "format = 'raw'"),
    ("logical_block_size", Spec, "", "logical_block_size = 4096"),
    ("num_queues", Spec, "", "num_queues = 3"),
    ("cache", Spec, "", "cache = 'writethrough'"),
    ("on_full", Spec, "", "on_full = 'report'"),
    ("discard", Spec, "", "discard = false"),
    ("barrier", Spec, "", "barrier = true"),
    ("persistent", Spec, "", "persistent = false"),
    ("persistent_max", Spec, "", "persistent_max = 5"),
    ("indirect_segments_max", Spec, "", "indirect_segments_max = 5"),
    ("ring_page_order_max", Spec, "", "ring_page_order_max = 1"),
    ("moderation", Spec, "", "moderation = '32/100us'"),
    ("state_dir", Supervisor, "", "state_dir = '/d'"),
    ("limit", Supervisor, "", "limit = { iops = 5 }"),
    ("fault", Spec, "", "fault = {}"),
];

/// The keys of a table, as the parser lists them.
fn keys(table: &str) -> Vec<String> {
    let error = config::parse(&format!("{table}\nno_such_key = 1\n")).unwrap_err();
    let list = error.split_once("expected one of ").expect(&error).1;
    list.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

/// The plan of a device with these keys, and with a name and a socket.
fn plan(table: &str, device: &str) -> Plan {
    let has = |key: &str| device.lines().any(|line| line.starts_with(&format!("{key} = ")));
    let is_xen = table == "[[xen_blk]]";
    let mut text = format!("{table}\n");
    if !has("name") || device.contains("[[switch]]") {
        text += "name = 'a'\n";
    }
    if !is_xen && !has("socket_path") && !has("fd") {
        text += "socket_path = '/s'\n";
    }
    config::parse(&format!("{text}{device}\n")).unwrap_or_else(|error| panic!("{device}: {error}"))
}

fn mac(net: &NetPlan) -> [u8; 6] {
    net.mac.unwrap_or_else(|| net.made_mac())
}

/// An export that was measured.
const TOLD: ExportSpec = ExportSpec {
    size: 1 << 30,
    flags: 1,
    block_min: 1,
    block_preferred: 4096,
    block_max: 1 << 20,
    structured: true,
};

/// The command that gives the device to a device process; `None`: the supervisor serves it.
fn command(plan: &Plan) -> Option<Command> {
    let device = "a".to_owned();
    if let Some(xen) = plan.xen_blk.first() {
        let disk = xen.disk("/f").unwrap().spec("", None)?;
        let spec = XenBlkSpec { disk, settings: xen.settings((false, true)) };
        return Some(Command::XenDisk { device, spec });
    }
    let blk = plan.blk.first().map(|blk| blk.spec(Some(TOLD)));
    let net = plan.net.first().map(|net| net.spec(mac(net), net.mtu));
    Some(Command::Device { device, spec: blk.or(net).unwrap()?, port: None })
}

/// The options that this process has for the device.
fn options_here(plan: &Plan) -> String {
    if let Some(xen) = plan.xen_blk.first() {
        let settings = xen.settings((false, true));
        return format!("{:?} {:?}", of_xen("a", &settings), settings.fault);
    }
    let served = |device| {
        let options = served(device).unwrap().options;
        ServeOptions { one_off: false, ..options }
    };
    if let Some(blk) = plan.blk.first() {
        let settings = blk.settings();
        let served = served(&blk.device);
        return format!("{served:?} {:?} {:?}", of_blk("a", &settings), settings.fault);
    }
    let net = &plan.net[0];
    let settings = net.settings(mac(net), net.mtu);
    format!("{:?} {:?} {:?}", served(&net.device), of_net("a", &settings), settings.fault)
}

/// Those that the device process has which is told this.
fn options_there(command: Command) -> String {
    match command {
        Command::XenDisk { device, spec: XenBlkSpec { settings, .. } } => {
            format!("{:?} {:?}", of_xen(&device, &settings), settings.fault)
        }
        Command::Device { device, spec: DeviceSpec { front_end, kind, .. }, .. } => {
            let served = of_front_end(&front_end);
            match kind {
                KindSpec::Blk(BlkSpec { settings, .. }) => {
                    format!("{served:?} {:?} {:?}", of_blk(&device, &settings), settings.fault)
                }
                KindSpec::Net(NetSpec { settings, .. }) => {
                    format!("{served:?} {:?} {:?}", of_net(&device, &settings), settings.fault)
                }
            }
        }
        other => panic!("{other:?}"),
    }
}

/// The part of it that no options are made of.
fn backend(command: &Command) -> String {
    match command {
        Command::XenDisk { spec, .. } => format!("{:?}", spec.disk),
        Command::Device { spec: DeviceSpec { queue_workers, kind, .. }, .. } => match kind {
            KindSpec::Blk(blk) => format!("{queue_workers:?} {:?}", blk.disk),
            KindSpec::Net(net) => format!("{queue_workers:?} {:?} {}", net.port, net.captures),
        },
        other => panic!("{other:?}"),
    }
}

/// The port of a switch that the device process is told of, and is here.
fn switch_port(plan: &Plan) -> Option<String> {
    let net = plan.net.first()?;
    let PortPlan::Switch(port) = &net.port else { return None };
    let port = port.spec(net.queue_pairs, net.mac, mac(net));
    let sent = Command::SwitchPort { device: "a".to_owned(), port: Some(port) };
    match parse(&emit(&sent).unwrap()).unwrap() {
        Command::SwitchPort { device, port: Some(port) } => {
            Some(format!("{:?}", of_switch_port(&device, &port)))
        }
        other => panic!("{other:?}"),
    }
}

/// Checks that a device is in a device process what it would be here; describes what it is.
fn checked(table: &str, device: &str) -> Option<String> {
    let plan = plan(table, device);
    let sent = command(&plan)?;
    let port = switch_port(&plan);
    let read: Command = parse(&emit(&sent).unwrap()).unwrap();
    assert_eq!(read, sent, "{device}");
    let (backend, options) = (backend(&read), options_there(read));
    // A socket that is handed in is another process's to adopt.
    if !device.contains("fd = ") {
        assert_eq!(options, options_here(&plan), "{device}");
    }
    Some(format!("{backend} {port:?} {options}"))
}

fn check(table: &str, examples: &[Example]) {
    for key in keys(table) {
        assert!(examples.iter().any(|example| example.0 == key), "{table} {key}: no example");
    }
    for (key, goes, without, with) in examples {
        let (without, with) = (checked(table, without), checked(table, with));
        assert!(without.is_some(), "{table} {key}");
        let found = match &with {
            None => NoProcess,
            Some(_) if with == without => Supervisor,
            Some(_) => Spec,
        };
        assert_eq!(found, *goes, "{table} {key}");
    }
}

#[test]
fn each_key_of_a_disk_reaches_the_device_process_or_is_the_supervisors() {
    check("[[blk]]", &BLK);
}

#[test]
fn each_key_of_a_network_reaches_the_device_process_or_is_the_supervisors() {
    check("[[net]]", &NET);
}

#[test]
fn each_key_of_xens_disks_reaches_the_device_process_or_is_the_supervisors() {
    check("[[xen_blk]]", &XEN);
}

#[test]
fn each_key_of_a_fault_reaches_the_device_process() {
    for (table, device, fault) in [
        ("[[blk]]", NULL, "[blk.fault]"),
        ("[[net]]", PORT, "[net.fault]"),
        ("[[xen_blk]]", "", "[xen_blk.fault]"),
    ] {
        let keys = keys(&format!("{table}\n{fault}"));
        assert!(keys.len() > 4, "{keys:?}");
        let none = checked(table, &format!("{device}\nfault = {{}}"));
        for key in keys {
            let with = |value: &str| format!("{device}\nfault = {{ {key} = {value} }}");
            let text = format!("{table}\n{}", with("1"));
            let is_bool = config::parse(&text).is_err_and(|error| error.contains("bool"));
            let value = if is_bool { "true" } else { "1" };
            assert_ne!(checked(table, &with(value)), none, "{table} {key}");
        }
    }
}
