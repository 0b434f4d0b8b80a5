//! Spec -> options: how the front-ends of a device are served, in whichever process that is.

use manyring_memory::{MemoryFiles, MemoryRules};
use manyring_protocol::spec::FrontEndSpec;
use manyring_transport::vhost_user::ServeOptions;
use std::time::Duration;

/// How a device's front-ends are served, one after the other.
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
