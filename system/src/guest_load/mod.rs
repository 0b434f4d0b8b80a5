//! What measurements of a real guest's TCP share: the guest with its daemon (`rig`), and what other
//! programs took of the CPUs meanwhile (`others`).

mod others;
mod rig;

pub(crate) use others::Others;
pub(crate) use rig::{Load, Rig, Setup};

#[cfg(test)]
pub(crate) use rig::Polling;
