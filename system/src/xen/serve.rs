//! The back-ends that can serve the disks of dom0's guests: Manyring and those it is compared with.

use super::machine::{LIMIT, Machine};
use crate::command::wait_for;
use crate::daemon::queues_of;
use crate::{Context, Outcome};
use serde_json::Value;

/// A back-end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Server {
    /// The daemon.
    Manyring,
    /// The kernel's xen-blkback, on a loop device.
    Blkback,
    /// QEMU's qdisk: one queue.
    Qdisk,
}

impl Server {
    /// The name of the back-end.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Manyring => "manyring",
            Self::Blkback => "xen-blkback",
            Self::Qdisk => "qdisk",
        }
    }

    /// The folder of its devices in xenstore.
    pub(super) fn kind(self) -> &'static str {
        match self {
            Self::Manyring | Self::Blkback => "vbd",
            Self::Qdisk => "qdisk",
        }
    }

    /// A disk as `xl` reads it.
    pub(super) fn disk(self, file: &str, device: &str, mode: &str) -> String {
        let how = match self {
            Self::Manyring => "backendtype=phy,script=block-manyring,",
            Self::Blkback => "",
            Self::Qdisk => "backendtype=qdisk,",
        };
        format!("{how}format=raw,vdev={device},access={mode},target={file}")
    }

    /// Starts to serve in dom0.
    pub(super) fn start(self, machine: &mut Machine) -> Outcome {
        let script = match self {
            Self::Manyring => return start_manyring(machine, ""),
            Self::Blkback => "must insmod /later/xen-blkback.ko max_queues=4 max_ring_page_order=4",
            Self::Qdisk => "",
        };
        machine.run(script).map(|_| ())
    }
}

const START: &str = r#"
/tmp/manyring xen-blk --kind vbd --kind manyring --num-queues 4 --control /tmp/control OPTIONS \
    2>>/host/manyring.log &
echo $! >/tmp/manyring.pid
# A killed one has left its socket there.
until_is /tmp/manyring stats --control /tmp/control >/dev/null
"#;

/// Starts Manyring in dom0 with some more options.
pub(super) fn start_manyring(machine: &mut Machine, options: &str) -> Outcome {
    machine.run(&START.replace("OPTIONS", options)).map(|_| ())
}

/// Manyring's counters: the output of `manyring stats --json` in dom0.
pub(super) fn stats(machine: &mut Machine) -> Outcome<Value> {
    let said = machine.run("/tmp/manyring stats --json --control /tmp/control")?;
    serde_json::from_str(&said).context("manyring stats --json")
}

/// Waits until all queues together have answered `requests_min` requests since the daemon began.
pub(super) fn has_served(machine: &mut Machine, requests_min: u64) -> Outcome {
    wait_for("requests under load", LIMIT, || {
        let stats = stats(machine)?;
        let devices = stats.get("devices").and_then(Value::as_array).into_iter().flatten();
        let queues = devices.filter_map(queues_of).flatten();
        // A device that has not connected yet has no counters.
        let requests: u64 = queues.filter_map(|queue| queue.value("requests").ok()).sum();
        Ok((requests >= requests_min).then_some(()))
    })
}
