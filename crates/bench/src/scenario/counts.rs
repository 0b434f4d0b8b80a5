//! The counters of the queues of one device, read from a daemon's control socket.

use crate::report::net::PerOperation;
use std::path::Path;
use std::process::Command;

/// Notifications of all queues of a device so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct NotificationCounts {
    kicks: f64,
    calls: f64,
}

/// The statistics that `manyring stats --json` prints of the daemon behind a control socket.
///
/// # Errors
/// The command's own words if it fails, or why they are no JSON.
pub(super) fn shown(manyring: &Path, control: &Path) -> Result<serde_json::Value, String> {
    let mut command = Command::new(manyring);
    let output = command.args(["stats", "--json", "--control"]).arg(control).output();
    let output = output.map_err(|e| e.to_string())?;
    if !output.status.success() {
        return Err(format!("stats: {}", String::from_utf8_lossy(&output.stderr).trim()));
    }
    serde_json::from_slice(&output.stdout).map_err(|e| format!("stats: {e}"))
}

impl NotificationCounts {
    /// Asks the daemon behind a control socket for what it counts of a device.
    pub(super) fn ask(manyring: &Path, control: &Path, device: &str) -> Result<Self, String> {
        Self::of(&shown(manyring, control)?, device)
    }

    /// The counts of a device, from the output of `manyring stats --json`.
    fn of(shown: &serde_json::Value, device: &str) -> Result<Self, String> {
        let devices = shown["devices"].as_array().into_iter().flatten();
        let found = devices.into_iter().find(|one| one["name"] == device);
        let queues = found.and_then(|one| one["queues"].as_array());
        let queues = queues.ok_or_else(|| format!("stats: no device {device}"))?;
        let sum = |counter: &str| {
            queues.iter().filter_map(|queue| queue["counters"][counter].as_f64()).sum()
        };
        Ok(Self { kicks: sum("kicks"), calls: sum("calls") })
    }

    /// The costs of each of `count` operations between an earlier reading and this one.
    pub(super) fn per_operation(self, earlier: Self, cpu_seconds: f64, count: f64) -> PerOperation {
        let per = |total: f64| if count > 0.0 { total / count } else { 0.0 };
        PerOperation {
            cpu_us_per_op: per(cpu_seconds * 1e6),
            kicks_per_op: per(self.kicks - earlier.kicks),
            calls_per_op: per(self.calls - earlier.calls),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notifications_of_a_device_are_those_of_all_its_queues_and_of_no_other_device() {
        let queue = |kicks: u64, calls: u64| {
            let counters = serde_json::json!({"kicks": kicks, "calls": calls, "packets": 9});
            serde_json::json!({ "counters": counters })
        };
        let shown = |n: u64| {
            serde_json::json!({"devices": [
                {"name": "guest0", "queues": [queue(n, 2 * n), queue(1, n)]},
                {"name": "guest1", "queues": [queue(1000, 1000)]},
            ]})
        };
        let at = |n| NotificationCounts::of(&shown(n), "guest0").unwrap();
        let each = at(30).per_operation(at(10), 0.5, 10.0);
        assert_eq!(
            each,
            PerOperation { cpu_us_per_op: 50_000.0, kicks_per_op: 2.0, calls_per_op: 6.0 }
        );
        assert_eq!(at(30).per_operation(at(10), 0.5, 0.0), PerOperation::default());
        assert!(NotificationCounts::of(&shown(1), "guest2").unwrap_err().contains("guest2"));
    }
}
