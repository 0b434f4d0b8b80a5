//! What is shown of a device is the same, whether the daemon serves it or a device process.

use crate::support::process::Daemon;
use crate::support::program::http_json;
use crate::support::view::{View, await_alike, table};
use manyring_driver::{BlkDriver, BlkDriverOptions, NetDriver, NetDriverOptions};
use std::path::Path;

const NAMES: [&str; 3] = ["disk0", "read0", "lan0"];

/// A daemon with a disk and a network, whose devices are apart as `domains` says.
fn serve(domains: &str, image: &Path) -> Daemon {
    std::fs::File::create(image).unwrap().set_len(1 << 20).unwrap();
    let image = image.display();
    let config = format!(
        "[daemon]\ncontrol = '@/control'\nworkers = 1\ndomains = '{domains}'\n\
         [[blk]]\nname = 'disk0'\nsocket_path = '@/disk0'\nfile = '{image}'\nnum_queues = 2\n\
         logical_block_size = 4096\n\
         [[blk]]\nname = 'read0'\nsocket_path = '@/read0'\nnull = '1G'\nread_only = true\n\
         [[net]]\nname = 'lan0'\nsocket_path = '@/lan0'\nnull = true\nqueue_pairs = 2\nmtu = 1400\n\
         mac = '02:00:00:00:00:01'\n"
    );
    Daemon::run(&config, &["disk0", "read0", "lan0", "control"])
}

#[test]
fn a_disk_and_a_network_are_shown_alike_in_the_daemon_and_in_a_device_process() {
    let images = tempfile::tempdir().unwrap();
    let serve = |domains: &str| serve(domains, &images.path().join(domains));
    let daemons = ["one", "device"].map(serve);
    let alike = |when: &str| {
        let of = |daemon: &Daemon| View::of(&daemon.socket_of("control"), daemon.folder());
        await_alike(|| daemons.each_ref().map(of), when)
    };
    let idle = alike("nobody uses them");
    assert_eq!(idle.devices.len(), NAMES.len());
    for name in NAMES {
        let of = |daemon: &Daemon| table(&daemon.socket_of("control"), name, daemon.folder());
        let [here, apart] = daemons.each_ref().map(of);
        assert_eq!(here, apart);
    }
    for daemon in &daemons {
        let control = daemon.socket_of("control");
        let post = |path: &str, body: &str| {
            let (status, answer) = http_json(&control, "POST", path, body);
            assert_eq!(status, 200, "{path}: {answer}");
        };
        post("/v1/devices/disk0/resize", "{\"size\": 2097152}");
        post("/v1/devices/lan0/link", "{\"up\": false}");
        post("/v1/devices/lan0/mtu", "{\"mtu\": 1300}");
    }
    let changed = alike("the operator has changed them");
    assert_eq!(changed.devices[0]["size"], 2 << 20);
    assert_eq!(
        (&changed.devices[2]["link"], &changed.devices[2]["mtu"]),
        (&"down".into(), &1300.into())
    );
    let guests = daemons.each_ref().map(|daemon| {
        let options = BlkDriverOptions { queues: 2, ..BlkDriverOptions::default() };
        let mut disk = BlkDriver::connect(&daemon.socket_of("disk0"), &options).unwrap();
        for queue in &mut disk.queues {
            queue.write(0, &[7; 4096]).unwrap();
            queue.read(0, &mut [0; 4096]).unwrap();
        }
        let net =
            NetDriver::connect(&daemon.socket_of("lan0"), &NetDriverOptions::default()).unwrap();
        (disk, net)
    });
    let connected = alike("guests use them");
    for (device, is_connected) in connected.devices.iter().zip([true, false, true]) {
        assert_eq!(device["connected"], is_connected, "{device}");
    }
    assert_eq!(connected.devices[0]["queues"][1]["counters"]["requests"], 2);
    drop(guests);
    daemons.into_iter().for_each(|daemon| assert!(daemon.terminate().success()));
}
