//! A crowd: guests that are connected and do nothing, all of one process.
//!
//! Each has a device of its own with its rings set up; a network guest has given all its receive
//! buffers to the device. The crowd says `ready` when all are connected, and then holds them until
//! its standard input ends.

use super::LoadError;
use clap::Args;
use manyring_driver::{BlkDriver, BlkDriverOptions, DriverError, NetDriver, NetDriverOptions};
use std::io::{Read, Write};
use std::path::PathBuf;

/// Entries of each ring.
const QUEUE_SIZE: u16 = 64;

/// `manyring-bench load crowd ..`
#[derive(Args, Clone, Debug)]
pub(crate) struct CrowdArgs {
    /// The socket of a disk; once for each guest.
    #[arg(long, value_name = "PATH")]
    disk: Vec<PathBuf>,
    /// Queues of each disk.
    #[arg(long, value_name = "COUNT", default_value_t = 1)]
    disk_queues: u16,
    /// The socket of a network device; once for each guest.
    #[arg(long, value_name = "PATH")]
    net: Vec<PathBuf>,
}

/// Connects all guests, says so, and holds them until the standard input ends.
///
/// # Errors
/// [`LoadError`] if a guest cannot connect.
pub(crate) fn run(args: &CrowdArgs) -> Result<(), LoadError> {
    let failed = |error: DriverError| LoadError::Client {
        step: "a guest of a crowd",
        problem: error.to_string(),
    };
    let disk = BlkDriverOptions {
        queues: args.disk_queues,
        queue_size: QUEUE_SIZE,
        buffer_size: 4096,
        segment_size: 4096,
        spare: 0,
        ..BlkDriverOptions::default()
    };
    let net = NetDriverOptions {
        queue_size: QUEUE_SIZE,
        features: NetDriverOptions::PLAIN,
        transmit_size: 1536,
        spare: 0,
        ..NetDriverOptions::default()
    };
    let disks = args.disk.iter().map(|path| BlkDriver::connect(path, &disk));
    let disks: Vec<_> = disks.collect::<Result<_, _>>().map_err(failed)?;
    let nets = args.net.iter().map(|path| NetDriver::connect(path, &net));
    let nets: Vec<_> = nets.collect::<Result<_, _>>().map_err(failed)?;
    let mut out = std::io::stdout();
    let said = writeln!(out, "ready").and_then(|()| out.flush());
    let held = said.and_then(|()| std::io::stdin().read_to_end(&mut Vec::new()));
    drop((disks, nets));
    held.map(|_| ()).map_err(|e| LoadError::Client { step: "ready", problem: e.to_string() })
}
