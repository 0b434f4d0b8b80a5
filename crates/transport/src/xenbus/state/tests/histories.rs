//! Any events in any order.

use super::*;
use proptest::prelude::*;

/// A step of a random history.
#[derive(Clone, Debug)]
enum Step {
    SetFront(&'static str, String),
    RemoveFront(&'static str),
    SetBack(&'static str, String),
    RemoveBack(&'static str),
    Rings(u8),
    Toolstack,
    Gone,
    Look,
    Fault,
    Resize(u16),
    Detach,
    DetachNow,
    Refuse(bool),
    RefuseRings(bool),
    Slow(bool),
    Restart,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    const FRONT_NAMES: [&str; 8] = [
        "state",
        "ring-ref",
        "ring-ref0",
        "event-channel",
        "multi-queue-num-queues",
        "ring-page-order",
        "protocol",
        "feature-persistent",
    ];
    const BACK_NAMES: [&str; 6] =
        ["state", "online", "mode", "frontend", "frontend-id", "hotplug-status"];
    let value = prop_oneof![3 => "[0-9]", 1 => Just("error".to_owned()), 1 => ".{0,4}"];
    let front = prop_oneof![2 => Just("state"), 1 => prop::sample::select(&FRONT_NAMES[..])];
    let back = prop::sample::select(&BACK_NAMES[..]);
    let state = (1..7_u8).prop_map(|n| n.to_string());
    let step = prop_oneof![
        8 => state.prop_map(|value| Step::SetFront("state", value)),
        4 => (front.clone(), value.clone()).prop_map(|(name, value)| Step::SetFront(name, value)),
        1 => front.prop_map(Step::RemoveFront),
        2 => (back.clone(), value).prop_map(|(name, value)| Step::SetBack(name, value)),
        1 => back.prop_map(Step::RemoveBack),
        6 => (1..4_u8).prop_map(Step::Rings),
        3 => Just(Step::Toolstack),
        1 => Just(Step::Gone),
        8 => Just(Step::Look),
        1 => Just(Step::Fault),
        1 => any::<u16>().prop_map(Step::Resize),
        1 => Just(Step::Detach),
        1 => Just(Step::DetachNow),
        1 => any::<bool>().prop_map(Step::Refuse),
        1 => any::<bool>().prop_map(Step::RefuseRings),
        2 => any::<bool>().prop_map(Step::Slow),
        1 => Just(Step::Restart),
    ];
    prop::collection::vec(step, 0..60)
}

impl World {
    fn step(&mut self, step: Step) {
        match step {
            Step::SetFront(name, value) => self.set_front(name, &value),
            Step::RemoveFront(name) => drop(self.seen.front.remove(name)),
            Step::SetBack(name, value) => self.set_back(name, &value),
            Step::RemoveBack(name) => drop(self.seen.back.remove(name)),
            Step::Rings(gref) => self.rings(&gref.to_string()),
            Step::Toolstack => self.seen = World::new().seen,
            Step::Gone => self.seen = Seen::default(),
            Step::Look => self.look(),
            Step::Fault => self.fault("fault"),
            Step::Resize(sectors) => self.handle(Event::Resized(disk(sectors.into()))),
            Step::Detach => self.handle(Event::Detach),
            Step::DetachNow => self.handle(Event::DetachNow),
            Step::Refuse(refuses) => self.refuses = refuses.then_some("no"),
            Step::RefuseRings(refuses) => {
                self.refuses_rings = refuses.then(|| Event::Delayed("not now".to_owned()));
            }
            Step::Slow(is_slow) => {
                self.is_slow = is_slow;
                if !is_slow {
                    self.answer();
                }
            }
            Step::Restart => {
                self.back = Back::new(id());
                self.is_running = false;
                self.answers.clear();
            }
        }
    }

    /// Checks the invariants that hold whenever the nodes were looked at and every answer has come.
    fn check(&mut self) {
        self.is_slow = false;
        self.answer();
        self.look();
        let front = XenbusState::parse(self.seen.front.get("state").map_or(b"0", |v| v));
        assert_eq!(self.back.connected().is_some(), self.is_running);
        if let Some(config) = self.back.connected() {
            let now = Connection::parse(&self.seen.front, &offer()).unwrap();
            assert_eq!(config.connection, now, "what runs is not what the nodes say");
            use XenbusState::{Closed, Closing, Initialising, Unknown};
            let ended = matches!(front, None | Some(Unknown | Initialising | Closing | Closed));
            assert!(!ended, "served in state {front:?}");
        } else if self.seen.back.contains_key("state") && self.back.waits_for().is_none() {
            assert_ne!(self.back.state(), XenbusState::Connected);
        }
    }
}

proptest! {
    /// Whatever ends write, in whatever order: no panic, no connection but that of the nodes, one
    /// connection at most, and the end once the nodes are gone.
    #[test]
    fn any_history_leaves_no_connection_that_is_not_in_the_tree(steps in steps()) {
        let mut world = World::new();
        for step in steps {
            world.step(step);
            if !world.is_slow {
                world.check();
            }
        }
        world.seen = Seen::default();
        world.check();
        prop_assert!(!world.is_running);
        prop_assert_eq!(world.back.state(), XenbusState::Unknown);
        world.take();
        world.look();
        prop_assert_eq!(world.take(), "");
    }
}
