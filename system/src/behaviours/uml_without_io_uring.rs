//! Without io_uring (as in container profiles) the epoll twin serves a guest just as well.

use super::uml_ext4_checksums::guest_and_host_agree;
use super::{Behaviour, Scene};
use crate::Outcome;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "uml_without_io_uring", run };

fn run(scene: &Scene<'_>) -> Outcome {
    guest_and_host_agree(scene, &["--no-io-uring"])
}
