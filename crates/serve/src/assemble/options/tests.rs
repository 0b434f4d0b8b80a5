//! Each key of a device reaches its device process, or the supervisor alone uses it.

use crate::assemble::switch::of_switch_port;
use manyring_config as config;
use manyring_config::plan::{NetPlan, Plan, PortPlan};
use manyring_protocol::message::{Command, emit, parse};
use manyring_protocol::nbd::ExportSpec;
use manyring_protocol::spec::XenBlkSpec;

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

/// A key, its destination, and the keys of two devices that differ by it alone. A key without an
/// example goes into the spec, with one of `VALUES`.
type Example = (&'static str, Goes, &'static str, &'static str);

/// Values of keys, of which one is another than the default, whatever the key.
const VALUES: [&str; 14] = [
    "true",
    "false",
    "1",
    "7",
    "64",
    "4096",
    "'auto'",
    "'csum'",
    "'report'",
    "'writethrough'",
    "'1/1us'",
    "'1G'",
    "'x'",
    "1400",
];

const NULL: &str = "null = '1G'";
const FILE: &str = "file = '/f'";
const BLK: [Example; 21] = [
    ("name", Supervisor, "null = '1G'\nserial = 's'", "null = '1G'\nserial = 's'\nname = 'b'"),
    ("socket_path", Supervisor, NULL, "null = '1G'\nsocket_path = '/t'"),
    ("fd", Supervisor, NULL, "null = '1G'\nfd = 3"),
    ("client", Supervisor, NULL, "null = '1G'\nclient = true"),
    ("socket_owner", Supervisor, NULL, "null = '1G'\nsocket_owner = 0"),
    ("socket_group", Supervisor, NULL, "null = '1G'\nsocket_group = 0"),
    ("socket_mode", Supervisor, NULL, "null = '1G'\nsocket_mode = '0600'"),
    ("one_off", Supervisor, NULL, "null = '1G'\none_off = true"),
    ("limit", Supervisor, NULL, "null = '1G'\nlimit = { iops = 5 }"),
    ("file", Spec, NULL, FILE),
    ("domain", Supervisor, NULL, "null = '1G'\ndomain = 'd'"),
    ("null", Spec, NULL, "null = '2G'"),
    ("nbd", Spec, NULL, "nbd = 'nbd://h/d'"),
    ("reconnect", Spec, "nbd = 'nbd://h/d'", "nbd = 'nbd://h/d'\nreconnect = '5s'"),
    ("direct", Spec, FILE, "file = '/f'\ndirect = true"),
    ("lock_with_rings", Spec, FILE, "file = '/f'\nlock_with_rings = true"),
    ("format", Supervisor, FILE, "file = '/f'\nformat = 'raw'"),
    ("format", Spec, FILE, "file = '/f'\nformat = 'qcow2'\n[daemon]\nstate_dir = '/d'"),
    ("queue_workers", Spec, NULL, "null = '1G'\nqueue_workers = [0]"),
    ("fault", Spec, NULL, "null = '1G'\nfault = {}"),
    // The keys of the table `fault` are below.
    ("fault", Spec, NULL, "null = '1G'\nfault = { flush_errors = true }"),
];
const PORT: &str = "null = true";
const TAP: &str = "tap = 't'";
const SWITCH: &str = "switch = 's'\n[[switch]]\nname = 's'";
const NET: [Example; 36] = [
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
    ("limit", Supervisor, PORT, "null = true\nlimit = { tx_pps = 5 }"),
    ("must_exist", Supervisor, TAP, "tap = 't'\nmust_exist = true"),
    ("tap_fds", Spec, PORT, "tap_fds = [7]"),
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
    ("queue_workers", Spec, PORT, "null = true\nqueue_workers = [0]"),
    ("offload", Spec, PORT, "null = true\noffload = 'csum'"),
    ("mac", Spec, PORT, "null = true\nmac = '02:00:00:00:00:01'"),
    ("bridge", Supervisor, TAP, "tap = 't'\nbridge = 'b'"),
    ("up", Supervisor, TAP, "tap = 't'\nup = true"),
    ("sndbuf", Supervisor, TAP, "tap = 't'\nsndbuf = 4096"),
    ("txqueuelen", Supervisor, TAP, "tap = 't'\ntxqueuelen = 5"),
    ("merge", Spec, TAP, "tap = 't'\nmerge = false"),
    ("steer", Supervisor, TAP, "tap = 't'\nsteer = false"),
    ("receive_pairs", Spec, TAP, "tap = 't'\nreceive_pairs = 2"),
    ("domain", Supervisor, PORT, "null = true\ndomain = 'd'"),
    ("pcap", Spec, PORT, "null = true\npcap = '/p'"),
    ("fault", Spec, PORT, "null = true\nfault = {}"),
    // Only a tap merges packets, and `offload = 'none'` ends that.
    ("offload", Spec, TAP, "tap = 't'\noffload = 'none'"),
    ("fault", Spec, PORT, "null = true\nfault = { late_tx = 3 }"),
];
const XEN: [Example; 10] = [
    ("name", Supervisor, "", "name = 'b'"),
    ("kinds", Supervisor, "", "kinds = ['vbd']"),
    ("xenstore", Supervisor, "", "xenstore = '/x'"),
    ("simulated", Supervisor, "", "simulated = '/x'"),
    ("domain", Supervisor, "", "domain = 5"),
    ("direct", Spec, "", "direct = true"),
    ("format", Supervisor, "", "format = 'raw'"),
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
fn planned(table: &str, device: &str) -> Result<Plan, String> {
    let has = |key: &str| device.lines().any(|line| line.starts_with(&format!("{key} = ")));
    let is_xen = table == "[[xen_blk]]";
    let mut text = format!("{table}\n");
    if !has("name") || device.contains("[[switch]]") {
        text += "name = 'a'\n";
    }
    if !is_xen && !has("socket_path") && !has("fd") {
        text += "socket_path = '/s'\n";
    }
    config::parse(&format!("{text}{device}\n"))
}

fn plan(table: &str, device: &str) -> Plan {
    planned(table, device).unwrap_or_else(|error| panic!("{device}: {error}"))
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
        let options = xen.options_of(device.clone(), false, true);
        let spec = XenBlkSpec { disk, options, fault: xen.fault };
        return Some(Command::XenDisk { device, spec });
    }
    let blk = plan.blk.first().map(|blk| blk.spec(Some(TOLD)));
    let net = plan.net.first().map(|net| net.spec(mac(net), net.options.mtu));
    Some(Command::Device { device, spec: blk.or(net).unwrap()?, port: None })
}

/// The port of a switch that the device process is told of, and is here.
fn switch_port(plan: &Plan) -> Option<String> {
    let net = plan.net.first()?;
    let PortPlan::Switch(port) = &net.port else { return None };
    let port = port.spec(net.options.queue_pairs, net.mac, mac(net));
    let sent = Command::SwitchPort { device: "a".to_owned(), port: Some(port) };
    match parse(&emit(&sent).unwrap()).unwrap() {
        Command::SwitchPort { device, port: Some(port) } => {
            Some(format!("{:?}", of_switch_port(&device, &port)))
        }
        other => panic!("{other:?}"),
    }
}

/// What the device process is told of the device; `None`: the supervisor serves it.
fn told(plan: &Plan) -> Option<String> {
    let sent = emit(&command(plan)?).unwrap();
    let read: Command = parse(&sent).unwrap();
    assert_eq!(emit(&read).unwrap(), sent);
    Some(format!("{read:?} {:?}", switch_port(plan)))
}

fn check(table: &str, base: &str, examples: &[Example]) {
    let has_example = |key: &String| examples.iter().any(|example| example.0 == key);
    let usual = told(&plan(table, base));
    for key in keys(table).iter().filter(|key| !has_example(key)) {
        // A key that names a disk or a port stands alone.
        let texts = VALUES
            .iter()
            .flat_map(|value| [base, ""].map(|base| format!("{base}\n{key} = {value}")));
        let mut plans = texts.filter_map(|text| planned(table, &text).ok());
        let reaches = plans.any(|plan| told(&plan) != usual);
        assert!(reaches, "{table} {key}: no value of it reaches the device process");
    }
    for (key, goes, without, with) in examples {
        let (without, with) = (told(&plan(table, without)), told(&plan(table, with)));
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
    check("[[blk]]", NULL, &BLK);
}

#[test]
fn each_key_of_a_network_reaches_the_device_process_or_is_the_supervisors() {
    check("[[net]]", PORT, &NET);
}

#[test]
fn each_key_of_xens_disks_reaches_the_device_process_or_is_the_supervisors() {
    check("[[xen_blk]]", "", &XEN);
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
        let none = told(&plan(table, &format!("{device}\nfault = {{}}")));
        for key in keys {
            let with = |value: &str| format!("{device}\nfault = {{ {key} = {value} }}");
            let text = format!("{table}\n{}", with("1"));
            let is_bool = config::parse(&text).is_err_and(|error| error.contains("bool"));
            let value = if is_bool { "true" } else { "1" };
            assert_ne!(told(&plan(table, &with(value))), none, "{table} {key}");
        }
    }
}
