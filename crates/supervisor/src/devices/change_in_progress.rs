//! `Carried`: a change that is being carried out, and which of its steps are done.

use super::prepare::{Prepared, Ready};
use super::saved_devices::Keep;
use crate::model::Done;
use manyring_config::diff::{Step, StepInfo};
use manyring_config::plan::{Plan, Wanted};
use std::collections::HashSet;

/// The result of the part of a change that needs no device to stop first.
#[derive(Debug)]
pub(super) enum Outcome {
    Done(Done),
    /// The change goes on with `rest` when the devices `leaving` have stopped. Devices whose names
    /// are in `replaced` are shown as being replaced until the new device of the name is served.
    Waits {
        leaving: Vec<Wanted>,
        replaced: HashSet<String>,
        rest: Rest,
    },
    /// The change was not begun: another change is stopping a device that it touches.
    PutOff,
}

/// The part of a change that is carried out when its leaving devices have stopped.
#[derive(Debug)]
pub(super) enum Rest {
    Change(Box<Carried>),
    /// Open the device again with its deferred plan, in which these keys have new values.
    Settle {
        device: Wanted,
        keys: Vec<String>,
    },
}

/// A change whose leaving devices are being stopped, and the steps that are left.
#[derive(Debug)]
pub(super) struct Carried {
    pub(super) desired: Plan,
    pub(super) steps: Vec<Step>,
    /// True for the plan of a whole file, false for a change of one device or group.
    pub(super) is_whole: bool,
    /// The daemon's generation when this change began to wait. A greater one at the end of the wait
    /// means that other changes were carried out meanwhile.
    pub(super) generation: u64,
    pub(super) leaving: Vec<Wanted>,
    /// The names of leaving devices that another device of the same name replaces.
    pub(super) replaced: HashSet<String>,
    pub(super) live: Vec<(Wanted, Wanted)>,
    pub(super) deferred: Vec<(Wanted, Vec<String>)>,
    pub(super) stage: Stage,
}

/// The devices that a change adds or replaces: all prepared, or some still to be opened.
#[derive(Debug)]
pub(super) enum Stage {
    /// All devices are opened, and their sockets have their names.
    Ready(Vec<Ready>),
    /// The devices `late` need a resource of a leaving device, and are opened after its end.
    Late { late: Vec<Wanted>, prepared: Vec<Prepared>, keep: Option<Keep> },
}

impl Carried {
    pub(super) fn new(desired: Plan, steps: Vec<Step>) -> Self {
        let (leaving, replaced, live, deferred) = Default::default();
        let (is_whole, generation, stage) = (false, 0, Stage::Ready(Vec::new()));
        Self { desired, steps, is_whole, generation, leaving, replaced, live, deferred, stage }
    }
}

/// Returns the steps as text for a log line.
pub(super) fn in_words(steps: &[StepInfo]) -> String {
    /// The most steps that a log line names.
    const NAMED_MAX: usize = 8;
    let words = |step: &StepInfo| format!("{} {}", step.step, step.device);
    let mut named: Vec<_> = steps.iter().take(NAMED_MAX).map(words).collect();
    if steps.len() > NAMED_MAX {
        named.push(format!("and {} more", steps.len() - NAMED_MAX));
    }
    named.join(", ")
}
