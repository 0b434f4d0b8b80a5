//! Half a minute of the soak, always the same: no byte wrong, nobody held up, nothing left behind.

use super::{Behaviour, Scene};
use crate::Outcome;
use crate::soak::{self, Options};
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "soak_short", run };

const TIME: Duration = Duration::from_secs(25);
/// Twenty times the promise: a debug build, on whatever machine runs the tests.
const PROMISE: Duration = Duration::from_secs(1);

fn run(scene: &Scene<'_>) -> Outcome {
    soak::run(&Options {
        binary: scene.stage.binary.clone(),
        time: TIME,
        seed: 8,
        tricks: String::new(),
        logs: scene.logs.clone(),
        promise: PROMISE,
    })
}
