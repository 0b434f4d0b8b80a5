//! A guest of a real Xen uses disks that Manyring serves in dom0, and that `xl` hands it.

use super::{Behaviour, Scene};
use crate::Outcome;
use crate::xen::{self, Options, Server};
use std::path::Path;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "xen_disk", run };

/// The hotplug script that the project ships.
const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../contrib/xen/block-manyring");

fn run(scene: &Scene<'_>) -> Outcome {
    xen::run_short(&Options {
        manyring: scene.stage.binary.clone(),
        script: Path::new(SCRIPT).to_owned(),
        logs: scene.log("xen"),
        server: Server::Manyring,
        only: Vec::new(),
    })
}
