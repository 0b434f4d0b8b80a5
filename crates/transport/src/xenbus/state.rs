//! The xenbus handshake of one device as a pure state machine: (state, event) -> (state, actions).
//!
//! It does no I/O and knows no clock: an event has the nodes as they were read in one transaction,
//! and the actions say what to write, start and stop. `F` is the state of the front-end, `B` the
//! value of the back-end's own `state` node if another process wrote it.
//!
//! ```text
//! phase      event                                 actions                            next phase
//! New        B = Initialising                      Open                               Opening
//!            B = a state of a former process       Open                               Opening
//!            B = Closed                            -                                  Closed
//!            B = Closing; online = 0; no rings     write Closed                       Closed
//! Opening    Opened                                write the offer, InitWait          Waiting
//!            Opened; F and B were connected        Connect, and take the rings over   Starting
//!            Opened; F had answered a former offer Connect                            Starting
//!            Failed                                write error, Closed                Closed
//!            Failed; F and B were connected        -: tried again when looked at      New
//! Waiting    B = Initialising, or another disk     Open                               Opening
//!            F = Initialised, Connected            Connect                            Starting
//!            F = Closing                           write Closing                      Closing
//!            F = Closed; B = Closing; online = 0   write Closed                       Closed
//!            F is not there (yet)                  -                                  Waiting
//! Starting   Started                               write disk, Connected              Connected
//!            Failed                                write error, Closed                Closed
//!            Delayed; rings are taken over         -: tried again when looked at      New
//! Connected  F = Closing                           write Closing, Disconnect          Stopping
//!            F = Closed, or is gone                Disconnect                         Stopping
//!            F = Initialising                      Disconnect                         Stopping
//!            B = Initialising                      Disconnect                         Stopping
//!            F = Initialised, with other rings     Disconnect                         Stopping
//!            its nodes change in another way       write error, Closing, Disconnect   Stopping
//!            Fault                                 write error, Closing, Disconnect   Stopping
//!            B = Closing; online = 0; Detach       write Closing, once; serve on      Connected
//!            Resized                               write disk and state again         Connected
//! Stopping   Stopped; B = Initialising             Open                               Opening
//!            Stopped                               as it was begun: -                 Closing
//!                                                  write Closed                       Closed
//!                                                  write the offer, InitWait          Waiting
//! Closing    B = Initialising                      Open                               Opening
//!            F = anything else                     write Closed                       Closed
//! Closed     F = Initialising, online = 1          write the offer, InitWait          Waiting
//!            the same, and nothing fit is open     Open                               Opening
//!            B = Initialising                      Open                               Opening
//! any        the back-end's folder is gone         Disconnect; Close                  New
//!            Leave                                 Disconnect, nothing is written     Left
//! ```
//! Nodes that are read while an answer is awaited (`Opening`, `Starting`, `Stopping`) are handled
//! after the answer. After an error the front-end must change its state before it is served.

mod connect;
mod event;
mod open;
mod write_nodes;

pub use event::{Action, Change, Event, Negotiated};

use super::DeviceId;
use super::negotiate::{self, Reason, Seen, front_state, state_of};
use manyring_wire::xen::device::{Assignment, DiskGeometry, Nodes, Offer};
use manyring_wire::xen::keys;
use manyring_wire::xen::state::XenbusState;

/// What the device does when the queues have stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    Closing,
    Closed,
    Waiting,
    Left,
}

/// The phase of the handshake, as the module's documentation shows.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Phase {
    New,
    Opening,
    Waiting,
    Starting(Box<Running>),
    Connected(Box<Running>),
    Stopping(Next),
    Closing,
    Closed,
    Left,
}

/// A connection that is being made or runs, and the front-end's nodes from which it was made.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Running {
    config: Negotiated,
    front: Nodes,
}

/// The disk that was opened, and the offer, both for this front-end.
#[derive(Clone, Debug)]
struct Opened {
    assignment: Assignment,
    offer: Offer,
    disk: DiskGeometry,
}

/// The back-end's part of one device's handshake.
#[derive(Debug)]
pub struct Back {
    id: DeviceId,
    phase: Phase,
    seen: Seen,
    /// The state that this process, or a former one, has last written to the back-end's `state`
    /// node; `Unknown` before that.
    told: XenbusState,
    /// The assignment that is being opened, or was opened.
    assignment: Option<Assignment>,
    opened: Option<Opened>,
    /// True once the operator removes the device.
    detaching: bool,
    /// True if this process leaves the device after the awaited answer.
    leaving: bool,
    /// The state of the front-end when the device failed. The front-end is not served before its
    /// state is another one.
    barred: Option<Option<XenbusState>>,
    reason: Option<Reason>,
    /// Why the rings of a former process are not resumed yet.
    waits_for: Option<String>,
    /// True if a former process has offered the device, and this process has neither offered nor
    /// connected it yet.
    inherited: bool,
    /// The number of the last connection ([`Negotiated::number`]).
    number: u32,
}

impl Back {
    /// Makes the back-end of a device whose nodes were not read yet.
    #[must_use]
    pub fn new(id: DeviceId) -> Self {
        Self {
            id,
            phase: Phase::New,
            seen: Seen::default(),
            told: XenbusState::Unknown,
            assignment: None,
            opened: None,
            detaching: false,
            leaving: false,
            barred: None,
            reason: None,
            waits_for: None,
            inherited: false,
            number: 0,
        }
    }

    /// Returns the id of the device.
    #[must_use]
    pub fn id(&self) -> &DeviceId {
        &self.id
    }

    /// Returns the state that was last written; `Unknown` before that.
    #[must_use]
    pub fn state(&self) -> XenbusState {
        self.told
    }

    /// Returns the present connection, while the device is connected.
    #[must_use]
    pub fn connected(&self) -> Option<&Negotiated> {
        match &self.phase {
            Phase::Connected(running) => Some(&running.config),
            _ => None,
        }
    }

    /// Returns the error for which the device was last closed, if any. The error is forgotten when
    /// the device connects again.
    #[must_use]
    pub fn reason(&self) -> Option<&Reason> {
        self.reason.as_ref()
    }

    /// Returns the offer of this device to its front-end.
    #[must_use]
    pub fn offer(&self) -> Offer {
        self.opened.as_ref().map_or_else(Offer::default, |opened| opened.offer)
    }

    /// True if this process has left the device, and has nothing more to do for it.
    #[must_use]
    pub fn has_left(&self) -> bool {
        self.phase == Phase::Left
    }

    /// Handles one event.
    pub fn handle(&mut self, event: Event) -> Vec<Action> {
        let mut actions = Vec::new();
        match event {
            Event::Seen(seen) => {
                self.seen = seen;
                self.waits_for = None;
            }
            Event::Opened { offer, disk } => self.opened(offer, disk, &mut actions),
            Event::Started => self.started(&mut actions),
            Event::Stopped => self.stopped(&mut actions),
            Event::Failed(text) => self.failed(text, false, &mut actions),
            Event::Delayed(text) => self.failed(text, true, &mut actions),
            Event::Fault { number, text } => {
                if self.connected().is_some_and(|config| config.number == number) {
                    self.fail(Reason::Device(text), &mut actions);
                }
            }
            Event::Resized(disk) => self.resized(disk, &mut actions),
            Event::Detach => self.detaching = true,
            Event::DetachNow => self.detach_now(&mut actions),
            Event::Leave => self.leaving = true,
        }
        // Each call moves to a later phase. The loop ends, because moving back to an earlier phase
        // needs an answer, which is another event.
        while self.advance(&mut actions) {}
        actions
    }

    fn opened(&mut self, offer: Offer, disk: DiskGeometry, actions: &mut Vec<Action>) {
        if self.phase != Phase::Opening {
            return;
        }
        let Some(assignment) = self.assignment.clone() else { return };
        if self.asks_for_another(&assignment) {
            self.begin(actions);
            return;
        }
        let offer = negotiate::offer_to(&assignment, offer);
        let disk = negotiate::disk_for(&assignment, disk);
        let disk = match self.is_left_connected() {
            true => negotiate::disk_left(&self.seen.back, disk),
            false => disk,
        };
        // Which phase follows depends on the states that a former process and the front-end have
        // left: take a connected front-end over, or finish closing, or offer the disk.
        self.opened = Some(Opened { assignment, offer, disk });
        match (self.told, state_of(&self.seen.front)) {
            _ if self.is_left_connected() => self.connect(true, actions),
            _ if self.is_left_connecting() => self.connect(false, actions),
            (XenbusState::Connected | XenbusState::Closing, Some(XenbusState::Closing)) => {
                self.switch(XenbusState::Closing, actions);
                self.phase = Phase::Closing;
            }
            (XenbusState::Connected | XenbusState::Closing, state)
                if state != Some(XenbusState::Initialising) =>
            {
                self.switch(XenbusState::Closed, actions);
                self.phase = Phase::Closed;
            }
            _ => drop(self.wait(actions)),
        }
    }

    fn started(&mut self, actions: &mut Vec<Action>) {
        match std::mem::replace(&mut self.phase, Phase::New) {
            Phase::Starting(running) => self.phase = Phase::Connected(running),
            other => return self.phase = other,
        }
        if self.leaving || self.is_gone() || self.has_begun_anew() {
            return;
        }
        self.reason = None;
        self.inherited = false;
        // A device that is to close, and was taken over, keeps its state `Closing`.
        let state = match self.told {
            XenbusState::Closing => XenbusState::Closing,
            _ => XenbusState::Connected,
        };
        self.write_disk(state, actions);
    }

    fn stopped(&mut self, actions: &mut Vec<Action>) {
        let Phase::Stopping(next) = self.phase else { return };
        match next {
            Next::Left => self.phase = Phase::Left,
            _ if self.is_gone() => self.phase = Phase::Closed,
            _ if self.has_begun_anew() => self.restart(),
            Next::Closing => self.phase = Phase::Closing,
            Next::Closed => {
                self.switch(XenbusState::Closed, actions);
                self.phase = Phase::Closed;
            }
            Next::Waiting => drop(self.offer_again(actions)),
        }
    }

    fn resized(&mut self, disk: DiskGeometry, actions: &mut Vec<Action>) {
        let Some(opened) = &mut self.opened else { return };
        // Keep the block sizes: a front-end may have been told other ones (`disk_left`).
        let DiskGeometry { sector_size, physical_sector_size, .. } = opened.disk;
        let disk = negotiate::disk_for(&opened.assignment, disk);
        opened.disk = DiskGeometry { sector_size, physical_sector_size, ..disk };
        if matches!(self.phase, Phase::Connected(_)) {
            self.write_disk(self.told, actions);
        }
    }

    fn detach_now(&mut self, actions: &mut Vec<Action>) {
        self.detaching = true;
        if matches!(self.phase, Phase::Connected(_)) {
            self.switch(XenbusState::Closing, actions);
            self.disconnect(Next::Closed, actions);
        }
    }

    /// Moves to the next phase, if the nodes of the last reading lead to one. Returns false if the
    /// phase stays.
    fn advance(&mut self, actions: &mut Vec<Action>) -> bool {
        match self.phase {
            Phase::Starting(_) | Phase::Stopping(_) | Phase::Left => return false,
            Phase::Connected(_) if self.leaving => {
                self.disconnect(Next::Left, actions);
                return false;
            }
            _ if self.leaving => {
                self.phase = Phase::Left;
                return false;
            }
            Phase::Opening => return false,
            Phase::New if self.waits_for.is_some() => return false,
            _ if self.is_gone() => return self.advance_gone(actions),
            _ if self.has_begun_anew() => return self.advance_anew(actions),
            _ => {}
        }
        let front = match front_state(self.front_folder(), &self.seen.front) {
            Ok(front) => Some(front),
            // The front-end's folder is not known before the phase `Opening`.
            Err(_) if matches!(self.phase, Phase::New | Phase::Closed) => None,
            Err(reason) => return self.fail_once(reason, actions),
        };
        if self.barred.is_some_and(|at| at != front) {
            self.barred = None;
        }
        let front = front.unwrap_or_default();
        match &self.phase {
            Phase::New => self.begin_with(front, actions),
            Phase::Waiting => self.advance_waiting(front, actions),
            Phase::Connected(_) => self.advance_connected(front, actions),
            Phase::Closing => front != XenbusState::Closing && self.close(actions),
            Phase::Closed => self.advance_closed(front, actions),
            Phase::Opening | Phase::Starting(_) | Phase::Stopping(_) | Phase::Left => false,
        }
    }

    /// Advances a device whose back-end's folder does not exist, or has no `state` node yet.
    fn advance_gone(&mut self, actions: &mut Vec<Action>) -> bool {
        match self.phase {
            // Nothing was begun. (A device in this phase that has an assignment waits for a
            // shortage of the host to end, and may have an open disk.)
            Phase::New if self.assignment.is_none() => {}
            Phase::Connected(_) => self.disconnect(Next::Closed, actions),
            _ => {
                actions.push(Action::Close);
                let (reason, number) = (self.reason.take(), self.number);
                *self = Self { reason, number, ..Self::new(self.id.clone()) };
            }
        }
        false
    }

    /// Begins from the state that the tool stack, or a former process, has left. Opens nothing for
    /// a device that must be removed and has no rings.
    fn begin_with(&mut self, front: XenbusState, actions: &mut Vec<Action>) -> bool {
        use XenbusState::{Closing, Connected, InitWait, Initialised, Initialising};
        self.told = state_of(&self.seen.back).unwrap_or(Initialising);
        self.inherited = matches!(self.told, InitWait | Initialised | Connected | Closing);
        let has_rings =
            matches!(front, Initialised | Connected) && matches!(self.told, Connected | Closing);
        if self.told == XenbusState::Closed {
            self.phase = Phase::Closed;
            true
        } else if self.is_over() && !has_rings {
            self.close(actions)
        } else {
            self.begin(actions)
        }
    }

    fn advance_waiting(&mut self, front: XenbusState, actions: &mut Vec<Action>) -> bool {
        if let Some(reason) = negotiate::hotplug_failure(&self.id, &self.seen.back) {
            return self.fail_once(reason, actions);
        }
        if self.is_unwanted() {
            // The device stays closed until the front-end changes its state.
            self.barred = Some(Some(front));
            return self.close(actions);
        }
        if !self.is_fit() {
            return self.offer_again(actions);
        }
        match front {
            XenbusState::Initialised | XenbusState::Connected => {
                self.connect(false, actions);
                true
            }
            XenbusState::Closing => {
                self.switch(XenbusState::Closing, actions);
                self.phase = Phase::Closing;
                true
            }
            XenbusState::Closed => self.close(actions),
            _ => false,
        }
    }

    fn advance_connected(&mut self, front: XenbusState, actions: &mut Vec<Action>) -> bool {
        match front {
            XenbusState::Closing => {
                self.switch(XenbusState::Closing, actions);
                self.disconnect(Next::Closing, actions);
            }
            XenbusState::Closed | XenbusState::Unknown => self.disconnect(Next::Closed, actions),
            XenbusState::Initialising => self.disconnect(Next::Waiting, actions),
            _ => match self.is_as_negotiated() {
                Ok(()) => self.ask_to_close(actions),
                // The front-end has made new rings, as it does after its domain was resumed.
                Err(Reason::Changed { .. }) if front == XenbusState::Initialised => {
                    self.disconnect(Next::Waiting, actions);
                }
                Err(reason) => return self.fail_once(reason, actions),
            },
        }
        false
    }

    fn advance_closed(&mut self, front: XenbusState, actions: &mut Vec<Action>) -> bool {
        let begins = front == XenbusState::Initialising && self.barred.is_none();
        if !begins || self.is_unwanted() {
            return false;
        }
        self.offer_again(actions)
    }

    /// True if the tool stack or the operator removes the device.
    fn is_unwanted(&self) -> bool {
        let closes = |state| matches!(state, XenbusState::Closing | XenbusState::Closed);
        let is_asked = state_of(&self.seen.back).is_some_and(closes) && !closes(self.told);
        let online = keys::ONLINE.flag(negotiate::value(&self.seen.back, keys::ONLINE.name));
        self.detaching || is_asked || online == Ok(false)
    }

    /// As [`Self::is_unwanted`], for a device that a former process may have served: if its `state`
    /// node says `Closing`, the tool stack removes it.
    fn is_over(&self) -> bool {
        self.is_unwanted() || self.told == XenbusState::Closing
    }

    /// True if the back-end's `state` node does not exist: there is no device to serve.
    fn is_gone(&self) -> bool {
        state_of(&self.seen.back) == Some(XenbusState::Unknown)
    }

    /// Writes `Closing` if the device is removed. The front-end is served until it has closed.
    fn ask_to_close(&mut self, actions: &mut Vec<Action>) {
        if self.told != XenbusState::Closing && self.is_unwanted() {
            self.switch(XenbusState::Closing, actions);
        }
    }

    fn close(&mut self, actions: &mut Vec<Action>) -> bool {
        self.switch(XenbusState::Closed, actions);
        self.phase = Phase::Closed;
        true
    }

    fn disconnect(&mut self, next: Next, actions: &mut Vec<Action>) {
        actions.push(Action::Disconnect);
        self.phase = Phase::Stopping(next);
    }

    fn front_folder(&self) -> &str {
        self.assignment.as_ref().map_or("", |assignment| &assignment.frontend)
    }
}

#[cfg(test)]
mod tests;
