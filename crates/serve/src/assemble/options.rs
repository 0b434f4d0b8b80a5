//! Turns the spec of a front-end into the options of `transport`'s sessions, in the supervisor and
//! in device processes.

use manyring_memory::{MemoryFiles, MemoryRules};
use manyring_protocol::spec::FrontEndSpec;
use manyring_transport::vhost_user::ServeOptions;
use std::time::Duration;

/// Options of the sessions that serve a device's front-ends, one after the other.
pub(crate) fn of_front_end(spec: &FrontEndSpec) -> ServeOptions {
    let FrontEndSpec { handshake_timeout, memory_on_disk, memory_max } = *spec;
    let memory = MemoryRules::from(match memory_on_disk {
        true => MemoryFiles::LocalDisk,
        false => MemoryFiles::InMemory,
    });
    ServeOptions {
        handshake_timeout: Duration::from_secs(handshake_timeout),
        memory: MemoryRules { bytes_max: memory_max.unwrap_or(memory.bytes_max), ..memory },
        ..ServeOptions::default()
    }
}

#[cfg(test)]
mod tests;
