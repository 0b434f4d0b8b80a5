//! Metrics of the connections between disks and their NBD servers.

use super::exposition::{Sort, Text};
use crate::state::State;
use manyring_backend::blk::Connection;

/// Writes the metric families of connections to NBD servers; writes nothing if no disk has a
/// connection.
pub(super) fn write(out: &mut Text, state: &State) {
    let mut all = Vec::new();
    for device in &state.devices.served() {
        let Some(blk) = device.view.side.as_blk() else { continue };
        for (index, connection) in blk.host.disk().connections().into_iter().enumerate() {
            let name = device.view.name();
            all.push((format!("device=\"{name}\",connection=\"{index}\""), connection));
        }
    }
    if all.is_empty() {
        return;
    }
    let mut family = |name: &str, sort, unit, help, value: &dyn Fn(&Connection) -> u64| {
        out.family(name, sort, unit, help);
        for (labels, connection) in &all {
            out.line(labels, value(connection));
        }
    };
    let (gauge, counter, bytes) = (Sort::Gauge, Sort::Counter, Some("bytes"));
    let help = "1 while the connection to the disk's server is up";
    family("manyring_connection_up", gauge, None, help, &|c| c.is_up.into());
    let help = "1 if queues share the connection, because the server accepts no more connections";
    family("manyring_connection_shared", gauge, None, help, &|c| c.is_shared.into());
    let help = "Times the connection was lost";
    family("manyring_connection_losses", counter, None, help, &|c| c.losses);
    let help = "Requests that the server has not answered";
    family("manyring_connection_in_flight", gauge, None, help, &|c| c.in_flight);
    let help = "Bytes sent to the server";
    family("manyring_connection_sent_bytes", counter, bytes, help, &|c| c.bytes_sent);
    let help = "Bytes received from the server";
    family("manyring_connection_received_bytes", counter, bytes, help, &|c| c.bytes_received);
}
