//! Discard and write-zeroes by plain system calls do the same.

use super::qemu_discard_punches_holes::blocks_come_back;
use super::{Behaviour, Scene};
use crate::Outcome;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "qemu_discard_without_io_uring", run };

fn run(scene: &Scene<'_>) -> Outcome {
    blocks_come_back(scene, &["--num-queues", "1", "--no-io-uring"])
}
