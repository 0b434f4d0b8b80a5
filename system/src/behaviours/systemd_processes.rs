//! `manyring.service` with device processes under systemd as PID 1: a device process has no right
//! and a user of its own; device processes die and the next daemon takes over under guests of User
//! Mode Linux and QEMU; the daemon is killed with its device processes under one that connects
//! again. No byte is wrong and nobody is refused.

use super::{Behaviour, Scene};
use crate::Outcome;
use crate::soak::{self, Kills};

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "systemd_processes", run };

fn run(scene: &Scene<'_>) -> Outcome {
    soak::run_supervisor_of_systemd(&Kills {
        binary: scene.stage.binary.clone(),
        count: 5,
        seed: 7,
        is_packed: false,
        logs: scene.logs.clone(),
    })
}
