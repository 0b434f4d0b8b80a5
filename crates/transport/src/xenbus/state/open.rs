//! Opens the disk that the tool stack names, and checks that the open disk is still the one it
//! names. The tool stack may remove and write the device's folders at any time, even between two
//! readings.

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

    /// The disk cannot be opened, or the rings cannot be connected: the device is closed.
    ///
    /// A front-end that a former process has left connected would lose its disk for good by that,
    /// and waits for responses anyway. So for such a front-end the disk is opened again later,
    /// whatever the error; and its rings are connected again later if the error passes.
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

    /// Why the rings of a former process are not taken over yet, if so. The caller must read the
    /// nodes again later.
    #[must_use]
    pub fn waits_for(&self) -> Option<&str> {
        self.waits_for.as_deref()
    }

    /// Offers the open disk to the front-end, if it is the one that the tool stack names; else
    /// opens that one first.
    pub(super) fn offer_again(&mut self, actions: &mut Vec<Action>) -> bool {
        if self.is_fit() {
            return self.wait(actions);
        }
        self.told = XenbusState::Initialising;
        self.begin(actions)
    }

    /// True if the open disk is the one that the tool stack names.
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

    /// True if the tool stack has written the device anew: we never write `Initialising`.
    pub(super) fn has_begun_anew(&self) -> bool {
        state_of(&self.seen.back) == Some(XenbusState::Initialising)
            && !matches!(self.told, XenbusState::Unknown | XenbusState::Initialising)
    }

    /// The tool stack has written the device anew: forgets all that happened before.
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

/// True if both name the same disk in the same way. `online` is left out: it says only whether the
/// device is to stay.
fn is_same(one: &Assignment, other: &Assignment) -> bool {
    let online = one.online;
    *one == Assignment { online, ..other.clone() }
}
