//! Opens the disk that the tool stack names, and checks that it still names the open disk. The tool
//! stack may remove and rewrite the device's folders at any time, even between two readings.

use super::super::negotiate::{self, Reason, state_of};
use super::{Action, Back, Next, Phase};
use manyring_wire::xen::device::Assignment;
use manyring_wire::xen::state::XenbusState;

impl Back {
    /// Opens the disk that the tool stack names.
    pub(super) fn begin(&mut self, actions: &mut Vec<Action>) -> bool {
        match negotiate::assignment(&self.id, &self.seen.back) {
            Ok(assignment) => {
                actions.push(Action::Open(assignment.clone()));
                self.assignment = Some(assignment);
                self.phase = Phase::Opening;
                false
            }
            Err(reason) => self.fail_once(reason, actions),
        }
    }

    /// Closes the device, because opening the disk or connecting the rings has failed.
    ///
    /// A front-end that a former process has left connected would lose its disk for good by that,
    /// and it can wait for responses. So for such a front-end, opening is retried after any error,
    /// and connecting its rings is retried after a passing one.
    pub(super) fn failed(&mut self, text: String, is_passing: bool, actions: &mut Vec<Action>) {
        let is_kept = match &self.phase {
            Phase::Opening => self.is_left_connected(),
            Phase::Starting(running) => running.config.takeover && is_passing,
            _ => return,
        };
        if is_kept {
            self.phase = Phase::New;
            self.waits_for = Some(text);
        } else {
            self.fail(Reason::Device(text), actions);
        }
    }

    /// Returns why the rings of a former process are not resumed yet; `None`: none wait. The caller
    /// must read the nodes again later.
    #[must_use]
    pub fn waits_for(&self) -> Option<&str> {
        self.waits_for.as_deref()
    }

    /// Offers the open disk to the front-end. If the tool stack names another disk, opens that disk
    /// first.
    pub(super) fn offer_again(&mut self, actions: &mut Vec<Action>) -> bool {
        if self.is_fit() {
            return self.wait(actions);
        }
        self.told = XenbusState::Initialising;
        self.begin(actions)
    }

    /// True if the tool stack still names the open disk.
    pub(super) fn is_fit(&self) -> bool {
        let opened = self.opened.as_ref();
        opened.is_some_and(|opened| {
            let asked = negotiate::assignment(&self.id, &self.seen.back);
            asked.is_ok_and(|asked| is_same(&opened.assignment, &asked))
        })
    }

    /// True if the tool stack names another disk than `assignment`.
    pub(super) fn asks_for_another(&self, assignment: &Assignment) -> bool {
        let asked = negotiate::assignment(&self.id, &self.seen.back);
        asked.is_ok_and(|asked| !is_same(assignment, &asked))
    }

    /// True if the tool stack has created the device again: only the tool stack writes the state
    /// `Initialising`.
    pub(super) fn has_begun_anew(&self) -> bool {
        state_of(&self.seen.back) == Some(XenbusState::Initialising)
            && !matches!(self.told, XenbusState::Unknown | XenbusState::Initialising)
    }

    /// Handles a device that the tool stack has created again: resets the state machine.
    pub(super) fn advance_anew(&mut self, actions: &mut Vec<Action>) -> bool {
        if matches!(self.phase, Phase::Connected(_)) {
            self.disconnect(Next::Waiting, actions);
            return false;
        }
        self.restart();
        true
    }

    pub(super) fn restart(&mut self) {
        self.barred = None;
        self.detaching = false;
        self.inherited = false;
        self.told = XenbusState::Unknown;
        self.phase = Phase::New;
    }
}

/// True if both assignments name the same disk with the same settings. `online` is ignored: it only
/// says whether the device is being removed.
fn is_same(one: &Assignment, other: &Assignment) -> bool {
    let online = one.online;
    *one == Assignment { online, ..other.clone() }
}
