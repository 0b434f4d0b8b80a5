//! The server of a disk is killed again and again under a guest that compares what it reads, and
//! another program serves the same image: the guest has no error and no wrong byte.

use super::{Behaviour, Scene};
use crate::guest::Kind;
use crate::nbd::Trial;
use crate::{Outcome, check};
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "uml_nbd_servers_killed", run };

fn run(scene: &Scene<'_>) -> Outcome {
    let trial = Trial {
        binary: &scene.stage.binary,
        folder: scene.folder.path(),
        logs: &scene.logs,
        kernel: scene.kernel(Kind::Uml)?,
        queues: 1,
        kills: 4,
        tls: false,
        pause: &mut || Duration::from_millis(500),
    };
    let survived = trial.run()?;
    let losses = survived.losses;
    check(losses >= 4, || format!("{losses} connections were lost"))?;
    check(survived.runs != "0", || "nothing was compared".into())
}
