//! The OSD of a Ceph cluster is killed again and again under a guest that compares what it reads of
//! an image there: the guest waits, and has no error and no wrong byte.

use super::{Behaviour, Scene};
use crate::Outcome;
use crate::ceph::Cluster;
use crate::guest::Kind;
use crate::nbd::Trial;
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "uml_ceph_osd_killed", run };

fn run(scene: &Scene<'_>) -> Outcome {
    let (binary, folder) = (&scene.stage.binary, scene.folder.path());
    let mut cluster = Cluster::start(binary, folder, &scene.logs)?;
    let trial = Trial {
        binary,
        folder,
        logs: &scene.logs,
        kernel: scene.kernel(Kind::Uml)?,
        queues: 1,
        kills: 3,
        pause: &mut || Duration::from_millis(500),
    };
    trial.run(&mut cluster).map(drop)
}
