//! Real Xen in QEMU's emulation: its own tool stack and Linux's own front-end against Manyring in
//! dom0, and against the kernel's back-end and QEMU's.
//!
//! ```text
//! parts     Debian's packages, unpacked into the cache
//! images    the first file systems of dom0 (dom0.sh) and of guests (guest.sh)
//! machine   QEMU with Xen; scripts for dom0 go in and out through a shared folder
//! domain    a guest; its scripts go in and out over its console
//! serve     who serves the disks
//! rig       all of these, for the cases
//! cases     what must hold
//! compare   how many requests each back-end answers
//! ```

mod cases;
mod compare;
mod domain;
mod images;
mod machine;
mod parts;
mod rig;
mod serve;
mod stages;

pub use compare::compare;
pub use serve::Server;

use crate::runner::Totals;
use crate::{Context, Outcome, check};
use cases::Case;
use machine::MachineOptions;
use parts::Parts;
use rig::Rig;
use stages::Stages;
use std::path::PathBuf;
use std::time::Instant;

/// The cases to run, and the programs and folders for them.
#[derive(Clone, Debug)]
pub struct Options {
    /// The daemon.
    pub manyring: PathBuf,
    /// The hotplug script that does nothing.
    pub script: PathBuf,
    /// Where the logs go.
    pub logs: PathBuf,
    /// The back-end that serves the disks.
    pub server: Server,
    /// Only cases whose names contain one of these; empty: all cases.
    pub only: Vec<String>,
}

impl Options {
    fn boot(&self, parts: &Parts, is_shown: bool) -> Outcome<Rig> {
        std::fs::create_dir_all(&self.logs).context(self.logs.display())?;
        let options = MachineOptions {
            manyring: &self.manyring,
            script: &self.script,
            logs: &self.logs,
            has_qdisk: self.server == Server::Qdisk,
            dom0_cpus: 1,
            counts_instructions: false,
        };
        Rig::boot(parts, &options, self.server, Stages::begin(is_shown))
    }
}

/// Plays every case that the back-end can do, and says of each how it went and how long it took.
///
/// # Errors
/// Parts of Xen are missing, or no case has such a name; what fails in a case is counted.
pub fn run(options: &Options) -> Outcome<Totals> {
    let wanted = |case: &&Case| {
        let mut parts = options.only.iter();
        let is_named = options.only.is_empty() || parts.any(|part| case.name.contains(part));
        is_named && case.is_for(options.server)
    };
    let chosen: Vec<_> = cases::ALL.iter().filter(wanted).collect();
    check(!chosen.is_empty(), || format!("no case of {} is chosen", options.server.name()))?;
    let parts = Parts::prepare()?;
    let mut totals = Totals::default();
    let mut rig = None;
    for case in chosen {
        let start = Instant::now();
        let here = match &mut rig {
            Some(rig) => rig,
            None => rig.insert(options.boot(&parts, true)?),
        };
        let before = here.machine.cpu_seconds();
        let outcome = (case.run)(here);
        let seconds = start.elapsed().as_secs_f64();
        let ran = here.machine.cpu_seconds() - before;
        let name = format!("xen::{} on {}", case.name, options.server.name());
        match outcome {
            Ok(()) => {
                totals.passed += 1;
                println!("PASS {name} ({seconds:.1} s, {ran:.1} s of CPU)");
            }
            Err(error) => {
                println!("FAIL {name} ({seconds:.1} s): {error}");
                totals.fail(&name, &error);
                // A failed case must not make the next one fail by its remains: boot a new machine.
                if let Some(rig) = rig.take() {
                    keep_logs(rig, options, case)?;
                }
            }
        }
    }
    Ok(totals)
}

/// Plays the short cases on one boot: a part of `cargo xtask test`.
///
/// # Errors
/// A case failed; the sentence names it.
pub fn run_short(options: &Options) -> Outcome {
    let parts = Parts::prepare()?;
    let mut rig = options.boot(&parts, false)?;
    for case in cases::ALL.iter().filter(|case| case.is_short && case.is_for(options.server)) {
        (case.run)(&mut rig).context(case.name)?;
    }
    Ok(())
}

/// Another boot writes into the same folder.
fn keep_logs(rig: Rig, options: &Options, case: &Case) -> Outcome {
    drop(rig);
    let kept = options.logs.join(format!("failed-{}", case.name));
    std::fs::create_dir_all(&kept).context(kept.display())?;
    for name in ["dom0", "xen.log"] {
        let to = kept.join(name);
        std::fs::rename(options.logs.join(name), &to).context(to.display())?;
    }
    println!("     logs: {}", kept.display());
    Ok(())
}
