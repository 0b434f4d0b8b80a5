//! `Carried`: a change that is being carried out, and how far it is.

use super::kept::Keep;
use super::prepare::{Prepared, Ready};
use crate::model::Done;
use manyring_config::diff::{Step, StepInfo};
use manyring_config::plan::{Plan, Wanted};
use std::collections::HashSet;

/// How far a change is.
#[derive(Debug)]
pub(super) enum Outcome {
    Done(Done),
    /// These devices end first. Those whose names are `replaced` are shown as such until others
    /// have their names.
    Waits {
        leaving: Vec<Wanted>,
        replaced: HashSet<String>,
        rest: Rest,
    },
    /// It touches devices that end for another change.
    PutOff,
}

/// The part of a change that is left once its devices have ended.
#[derive(Debug)]
pub(super) enum Rest {
    Change(Box<Carried>),
    /// The device comes again, with the values of these keys that were put off.
    Settle {
        device: Wanted,
        keys: Vec<String>,
    },
}

/// A change that is being carried out.
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

/// How far the devices are that come.
#[derive(Debug)]
pub(super) enum Stage {
    /// Their sockets have their names.
    Ready(Vec<Ready>),
    /// Some of them, `late`, need what one has that goes.
    Late { late: Vec<Wanted>, prepared: Vec<Prepared>, keep: Option<Keep> },
}

impl Carried {
    pub(super) fn new(desired: Plan, steps: Vec<Step>) -> Self {
        let (leaving, replaced, live, deferred) = Default::default();
        let (is_whole, generation, stage) = (false, 0, Stage::Ready(Vec::new()));
        Self { desired, steps, is_whole, generation, leaving, replaced, live, deferred, stage }
    }
}

/// Steps as a line of the log names them.
pub(super) fn in_words(steps: &[StepInfo]) -> String {
    /// Steps that a line of the log names.
    const NAMED_MAX: usize = 8;
    let words = |step: &StepInfo| format!("{} {}", step.step, step.device);
    let mut named: Vec<_> = steps.iter().take(NAMED_MAX).map(words).collect();
    if steps.len() > NAMED_MAX {
        named.push(format!("and {} more", steps.len() - NAMED_MAX));
    }
    named.join(", ")
}
