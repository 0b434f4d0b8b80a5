//! Network devices in tables and metrics.

use super::{command, connect, get, post, send, serve, wait_for};
use crate::support::process::Daemon;
use crate::support::program::fetch;
use manyring_driver::{ControlOwner, NetDriver, NetDriverOptions};
use manyring_wire::net::VIRTIO_NET_F_MQ;
use serde_json::{Value, json};
use std::os::unix::net::UnixStream;

#[test]
fn the_command_stats_has_a_table_for_disks_and_one_for_networks() {
    let daemon = serve();
    let mut driver = connect(&daemon, "lan", ControlOwner::Device, 1);
    send(&mut driver, 6);
    wait_for(&daemon, "lan", 1, "packets", 6);
    post(&daemon, "lan/link", json!({ "up": false }));
    send(&mut driver, 2);
    wait_for(&daemon, "lan", 1, "dropped_link_down", 2);
    let (code, table, error) = command(&daemon, &["stats"]);
    assert_eq!(code, Some(0), "{error}");
    let words: Vec<Vec<_>> = table.lines().map(|l| l.split_whitespace().collect()).collect();
    assert_eq!((words[0][3], words[1][0], words[2].len()), ("REQUESTS", "disk", 0), "{table}");
    let head = "DEVICE QUEUE WORKER PACKETS MB AVG-B GSO% KICKS KICKS- CALLS CALLS- HELD BATCH";
    assert_eq!(words[3][..13].join(" "), head, "{table}");
    let names: Vec<_> = words[4..8].iter().map(|line| (line[0], line[1])).collect();
    assert_eq!(names, [("lan", "rx0"), ("lan", "tx0"), ("lan", "ctrl"), ("gen", "-")], "{table}");
    assert_eq!(words[5][3..7], ["6", "0.0", "200", "0"], "{table}");
    assert!(table.contains("\nlan tx0 dropped: 2 link down\n\nWORKER"), "{table}");
    let queue = &get(&daemon, "lan")["queues"][1];
    let derived = (&queue["packet_size_average"], &queue["gso_share"]);
    assert_eq!(derived, (&200.into(), &0.0.into()), "{queue}");
}

#[test]
fn the_control_queue_is_called_so_where_the_driver_has_it() {
    let daemon = serve();
    let names = |daemon: &Daemon| -> Vec<Value> {
        let lan = get(daemon, "lan");
        lan["queues"].as_array().unwrap().iter().map(|queue| queue["name"].clone()).collect()
    };
    assert_eq!(names(&daemon), ["rx0", "tx0", "rx1", "tx1", "ctrl"]);
    // Without MQ it is the third.
    let defaults = NetDriverOptions::default();
    let features = defaults.features & !VIRTIO_NET_F_MQ;
    let options = NetDriverOptions { control: ControlOwner::Device, features, ..defaults };
    let driver = NetDriver::connect(&daemon.socket_of("lan"), &options).unwrap();
    let (_, table, _) = command(&daemon, &["stats", "lan"]);
    let shown = table.lines().skip(1).map(|line| line.split_whitespace().nth(1).unwrap());
    assert_eq!(shown.collect::<Vec<_>>(), ["rx0", "tx0", "ctrl"], "{table}");
    drop(driver);
    assert_eq!(names(&daemon)[2], "ctrl", "what it counted was commands");
    let _driver = connect(&daemon, "lan", ControlOwner::Device, 2);
    assert_eq!(names(&daemon), ["rx0", "tx0", "rx1", "tx1", "ctrl"]);
}

#[test]
fn metrics_have_link_mtu_and_pairs_of_network_devices_alone() {
    let daemon = serve();
    let _driver = connect(&daemon, "lan", ControlOwner::FrontEnd, 2);
    post(&daemon, "gen/link", json!({ "up": false }));
    let stream = UnixStream::connect(daemon.socket_of("control")).unwrap();
    let (_, _, text) = fetch(stream, "/metrics", &["accept: application/openmetrics-text"]);
    let text = String::from_utf8(text).unwrap();
    for line in [
        "# TYPE manyring_device_link_up gauge",
        "manyring_device_link_up{device=\"lan\"} 1",
        "manyring_device_link_up{device=\"gen\"} 0",
        "# UNIT manyring_device_mtu_bytes bytes",
        "manyring_device_mtu_bytes{device=\"gen\"} 1400",
        "manyring_device_attached_pairs{device=\"lan\"} 2",
        "manyring_device_attached_pairs{device=\"gen\"} 0",
        "manyring_device_size_bytes{device=\"disk\"} 1048576",
    ] {
        assert!(text.lines().any(|l| l == line), "{line}\n{text}");
    }
    for none in [
        "manyring_device_link_up{device=\"disk\"}",
        "manyring_device_mtu_bytes{device=\"lan\"}",
        "manyring_device_size_bytes{device=\"lan\"}",
    ] {
        assert!(!text.contains(none), "{none}\n{text}");
    }
}
