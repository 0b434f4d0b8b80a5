//! Writes the back-end's nodes: its offer, its disk, its state, its errors. The nodes are listed in
//! `wire/src/xen/keys.rs` and `device.rs`.

use super::super::negotiate::{Reason, state_of};
use super::{Action, Back, Change, Next, Phase};
use manyring_wire::xen::device::Writes;
use manyring_wire::xen::keys;
use manyring_wire::xen::state::XenbusState;

impl Back {
    /// Writes the offer and waits for the front-end.
    pub(super) fn wait(&mut self, actions: &mut Vec<Action>) -> bool {
        let mut writes = self.offer().emit();
        writes.push((keys::BACK_STATE.name.to_owned(), XenbusState::InitWait.emit()));
        self.tell(XenbusState::InitWait);
        let mut changes = self.in_folder(writes);
        changes.insert(0, Change { path: self.id.error_node(), value: None });
        actions.push(Action::Write(changes));
        self.phase = Phase::Waiting;
        self.inherited = false;
        true
    }

    /// Handles a device that cannot be served: writes the reason to its `error` node, and closes
    /// it.
    pub(super) fn fail(&mut self, reason: Reason, actions: &mut Vec<Action>) {
        let is_connected = matches!(self.phase, Phase::Connected(_));
        let state = match self.phase {
            Phase::Connected(_) => XenbusState::Closing,
            _ => XenbusState::Closed,
        };
        let text = Some(reason.to_string());
        let mut changes = vec![Change { path: self.id.error_node(), value: text }];
        changes.extend(self.in_folder(vec![(keys::BACK_STATE.name.to_owned(), state.emit())]));
        actions.push(Action::Write(changes));
        self.tell(state);
        self.barred = Some(state_of(&self.seen.front));
        self.reason = Some(reason);
        self.inherited = false;
        if is_connected {
            self.disconnect(Next::Closed, actions);
        } else {
            self.phase = Phase::Closed;
        }
    }

    pub(super) fn fail_once(&mut self, reason: Reason, actions: &mut Vec<Action>) -> bool {
        self.fail(reason, actions);
        false
    }

    pub(super) fn switch(&mut self, state: XenbusState, actions: &mut Vec<Action>) {
        if self.told != state {
            let writes = vec![(keys::BACK_STATE.name.to_owned(), state.emit())];
            actions.push(Action::Write(self.in_folder(writes)));
            self.tell(state);
        }
    }

    /// Stores the state that is being written, also in the nodes of the last reading.
    pub(super) fn tell(&mut self, state: XenbusState) {
        self.told = state;
        if let Some(value) = self.seen.back.get_mut(keys::BACK_STATE.name) {
            *value = state.emit().into_bytes();
        }
    }

    /// Writes the size and block sizes, then the state: a front-end watches only the state, and
    /// reads the other nodes when the state is written, even if its value stays the same.
    pub(super) fn write_disk(&mut self, state: XenbusState, actions: &mut Vec<Action>) {
        let Some(opened) = &self.opened else { return };
        let mut writes = opened.disk.emit();
        writes.push((keys::BACK_STATE.name.to_owned(), state.emit()));
        self.tell(state);
        actions.push(Action::Write(self.in_folder(writes)));
    }

    pub(super) fn in_folder(&self, writes: Writes) -> Vec<Change> {
        let folder = self.id.back_folder();
        let change =
            |(name, value)| Change { path: format!("{folder}/{name}"), value: Some(value) };
        writes.into_iter().map(change).collect()
    }
}
