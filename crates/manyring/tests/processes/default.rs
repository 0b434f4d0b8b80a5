//! A configuration that says nothing of domains: the daemon is a supervisor, and a device process
//! serves the devices of each user. A command that serves one device is one process.

use crate::domain::{counted, pid, process};
use crate::support::process::{self, Daemon};
use crate::support::program::{manyring, output_of, shown};
use manyring_driver::{BlkDriver, BlkDriverOptions, NetDriver, NetDriverOptions};

const CONFIG: &str = "[daemon]\ncontrol = '@/control'\n\
    [[blk]]\nname = 'a'\nsocket_path = '@/a'\nmemory = '1M'\n\
    [[net]]\nname = 'n'\nsocket_path = '@/n'\nnull = true\n";

/// The domain of this process's user.
fn own() -> String {
    format!("user:{}", rustix::process::getuid().as_raw())
}

/// True if a process maps memory of the guests of this test.
fn maps_guest_memory(process: impl std::fmt::Display) -> bool {
    std::fs::read_to_string(format!("/proc/{process}/maps")).unwrap().contains("/memfd:guest")
}

#[test]
fn a_configuration_that_says_nothing_gets_a_supervisor_without_guest_memory_and_a_device_process() {
    if !process::only_in_default_form() {
        return;
    }
    let daemon = Daemon::run(CONFIG, &["a", "n", "control"]);
    let mut guest =
        BlkDriver::connect(&daemon.socket_of("a"), &BlkDriverOptions::default()).unwrap();
    guest.queues[0].write(8, &[7; 512]).unwrap();
    let _network =
        NetDriver::connect(&daemon.socket_of("n"), &NetDriverOptions::default()).unwrap();
    let own_process = process(&daemon, &own());
    assert_eq!((&own_process["state"], &own_process["starts"]), (&"serving".into(), &1.into()));
    assert_eq!(own_process["devices"], serde_json::json!(["a", "n"]));
    assert_eq!(shown(&daemon.socket_of("control"), "/v1/devices/a")["process"], own());
    assert_eq!(counted(&daemon, "a", "writes"), 1);
    assert!(!maps_guest_memory(daemon.pid()), "the supervisor has mapped a guest's memory");
    assert!(maps_guest_memory(pid(&daemon, &own()).as_raw_nonzero()), "its device process has");
    let file = daemon.folder().join("manyring.toml");
    let plan = output_of(manyring().args(["run", "--print-plan", "--config"]).arg(file)).stdout;
    let plan: serde_json::Value = serde_json::from_slice(&plan).unwrap();
    assert_eq!(plan["daemon"]["domains"], "user");
    assert!(daemon.terminate().success());
}

#[test]
fn a_command_that_serves_one_device_is_one_process() {
    if !process::only_in_default_form() {
        return;
    }
    let daemon = Daemon::blk(&["--memory", "1M"]);
    let mut guest = BlkDriver::connect(&daemon.socket(), &BlkDriverOptions::default()).unwrap();
    guest.queues[0].write(8, &[7; 512]).unwrap();
    assert!(maps_guest_memory(daemon.pid()));
}
