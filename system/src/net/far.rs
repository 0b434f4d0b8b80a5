//! The far end of a guest's network: iperf3's servers, and data with its checksum.

use super::{Namespace, Service};
use crate::{Context, Outcome};
use std::path::Path;

/// Nothing here outlives this.
const SECONDS: &str = "600";
/// iperf3's default port and more: a server serves one client at a time.
const IPERF3: [&str; 4] = ["5201", "5202", "5203", "5204"];

/// Servers in a namespace; dropped, they are gone.
#[derive(Debug)]
pub struct Far {
    services: Vec<Service>,
}

impl Far {
    /// Starts them: iperf3 at 5201 to 5204; at 7001 what is sent is answered by its sha256, at
    /// 7002 there is a file of 1 MiB, at 7003 its sha256. Files and logs lie in `folder`.
    ///
    /// # Errors
    /// They do not start.
    pub fn start(namespace: &Namespace, folder: &Path) -> Outcome<Self> {
        let data = folder.join("far.data");
        // Not zeroes, and no two parts alike.
        let content: Vec<u8> = (0u32..1 << 18).flat_map(|n| mixed(n).to_le_bytes()).collect();
        std::fs::write(&data, content).context(data.display())?;
        let mut services = Vec::new();
        for port in IPERF3 {
            let log = folder.join(format!("iperf3-{port}.log"));
            let mut command = namespace.child("timeout");
            command.args([SECONDS, "iperf3", "--server", "--forceflush", "--port", port]);
            let mut service = Service::silent(command, &log)?;
            service.until_says("listening", &log)?;
            services.push(service);
        }
        let data = data.to_string_lossy();
        let mut far = Self { services };
        for (port, program) in [
            ("7001", &["sha256sum"][..]),
            ("7002", &["cat", &data]),
            ("7003", &["sha256sum", &data]),
        ] {
            far.offer(namespace, folder, port, program)?;
        }
        Ok(far)
    }

    /// Whoever connects to `port` talks to a new run of `program`, a name and its arguments.
    ///
    /// # Errors
    /// The server does not start.
    pub fn offer(
        &mut self,
        namespace: &Namespace,
        folder: &Path,
        port: &str,
        program: &[&str],
    ) -> Outcome {
        let mut command = namespace.child("timeout");
        command.args([SECONDS, "busybox", "nc", "-ll", "-p", port, "-e"]).args(program);
        let log = folder.join(format!("nc-{port}.log"));
        self.services.push(Service::silent(command, &log)?);
        Ok(())
    }
}

/// One step of Knuth's multiplicative hash.
fn mixed(n: u32) -> u32 {
    n.wrapping_mul(2_654_435_761).rotate_left(n % 32)
}
