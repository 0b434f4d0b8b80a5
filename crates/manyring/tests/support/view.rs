//! All that is shown of a daemon's devices, for comparison with what another daemon shows.

use super::process::wait_until;
use super::program::{http, manyring, output_of, shown};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;

/// The counters that these guests move by the same amount each time. Others count how the host's
/// scheduler ran.
const COUNTED: [&str; 6] =
    ["requests", "reads", "writes", "bytes_read", "bytes_written", "flushes"];

/// All that is shown of the devices, without what must differ: the folder and the device process.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct View {
    /// `GET /v1/devices`.
    pub(crate) devices: Vec<Value>,
    /// The lines of `GET /metrics` that say what a device is.
    gauges: Vec<String>,
    /// The families of metrics and their labels.
    families: BTreeSet<String>,
}

impl View {
    /// What the daemon shows once its first device shows so many requests of its first queue. A
    /// device process that does not tell its counters in time has those shown that it told last.
    pub(crate) fn after(requests: u64, (control, folder): (&Path, &Path)) -> Self {
        let counted =
            |view: &Self| view.devices[0]["queues"][0]["counters"]["requests"] == requests;
        let _ = wait_until(|| counted(&Self::of(control, folder)));
        Self::of(control, folder)
    }

    /// What the daemon behind this socket shows, which has its files in this folder.
    pub(crate) fn of(control: &Path, folder: &Path) -> Self {
        let folder = folder.display().to_string();
        let mut devices = shown(control, "/v1/devices")["devices"].as_array().unwrap().clone();
        for device in &mut devices {
            device.as_object_mut().unwrap().remove("process");
            device["socket"] = device["socket"].as_str().unwrap().replace(&folder, "@").into();
            device["queues"].as_array_mut().unwrap().iter_mut().for_each(only_counted);
        }
        let (status, _, metrics) = http(control, "GET", "/metrics", "");
        assert_eq!(status, 200);
        let lines = || metrics.lines().filter(|line| line.contains("{device=\""));
        let gauges = lines().filter(|line| line.starts_with("manyring_device"));
        let families = lines().filter_map(|line| line.split('}').next());
        // Which buckets there are follows from how long requests took.
        let families = families.filter(|name| !name.contains("_bucket{"));
        Self {
            gauges: gauges.map(str::to_owned).collect(),
            families: families.map(str::to_owned).collect(),
            devices,
        }
    }
}

/// Asks two daemons until they show the same. A device process that does not tell its counters in
/// time has those shown that it told last, so one look may come too early.
pub(crate) fn await_alike(daemons: impl Fn() -> [View; 2], when: &str) -> View {
    let _ = wait_until(|| {
        let [here, apart] = daemons();
        here == apart
    });
    let [here, apart] = daemons();
    assert_alike(&here, &apart, when);
    here
}

/// Two daemons show the same.
pub(crate) fn assert_alike(here: &View, apart: &View, when: &str) {
    for (here, apart) in here.devices.iter().zip(&apart.devices) {
        assert_eq!(here, apart, "{when}");
    }
    assert_eq!(here, apart, "{when}");
}

/// Leaves the names of all counters and histograms of a queue, and the values of those counters
/// that are the same each time.
fn only_counted(queue: &mut Value) {
    for (name, value) in queue["counters"].as_object_mut().unwrap() {
        if !COUNTED.contains(&name.as_str()) {
            *value = Value::Null;
        }
    }
    for (_, value) in queue["histograms"].as_object_mut().unwrap() {
        *value = Value::Null;
    }
}

/// What `manyring stats` prints of a device.
pub(crate) fn table(control: &Path, device: &str, folder: &Path) -> String {
    let output = output_of(manyring().args(["stats", device, "--control"]).arg(control));
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    text.replace(&folder.display().to_string(), "@")
}
