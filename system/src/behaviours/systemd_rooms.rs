//! `manyring.service` with rooms under systemd as PID 1: a room has no right and a user of its own;
//! rooms die and the next daemon takes over under guests of User Mode Linux and QEMU; the daemon is
//! killed with its rooms under one that connects again. No byte is wrong and nobody is refused.

use super::{Behaviour, Scene};
use crate::Outcome;
use crate::soak::{self, Kills};

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "systemd_rooms", run };

fn run(scene: &Scene<'_>) -> Outcome {
    soak::run_house_of_systemd(&Kills {
        binary: scene.stage.binary.clone(),
        count: 5,
        seed: 7,
        is_packed: false,
        logs: scene.logs.clone(),
    })
}
