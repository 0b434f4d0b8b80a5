//! The server of a disk is killed again and again under a guest that compares what it reads, and
//! another program serves the same image: the guest has no error and no wrong byte.

use super::{Behaviour, Scene};
use crate::Outcome;
use crate::guest::Kind;
use crate::nbd::{Engine, Trial, Turns};
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "uml_nbd_servers_killed", run };

fn run(scene: &Scene<'_>) -> Outcome {
    let mut turns = Turns::start(&Engine::ALL, scene.folder.path(), &scene.logs, false)?;
    let trial = Trial {
        binary: &scene.stage.binary,
        folder: scene.folder.path(),
        logs: &scene.logs,
        kernel: scene.kernel(Kind::Uml)?,
        queues: 1,
        kills: 4,
        pause: &mut || Duration::from_millis(500),
    };
    trial.run(&mut turns).map(drop)
}
