//! A port that joins frames of a flow sends some before their turn: each is counted once, whatever
//! becomes of the rest of the burst.

use super::*;
use manyring_backend::net::Merged;

/// A port that gives these answers, and is full after that. Frame 2 left with the first one.
#[derive(Debug)]
struct Overtaking(VecDeque<Sent>);

impl PortTx for Overtaking {
    fn send(&mut self, _: &Frames, _: usize) -> Sent {
        let full = Sent { stop: Some(Stop::Blocked), ahead: 0b100, ..Sent::default() };
        self.0.pop_front().unwrap_or(full)
    }

    fn readiness(&self) -> Readiness<'_> {
        Readiness::Never
    }
}

/// A guest that has offered four frames to such a port, of which the first was taken.
fn guest(answer: Sent) -> Guest {
    let mut guest = Guest::new([]);
    let port = Box::new(Overtaking([answer].into()));
    guest.tx = NetTx::new(port, Arc::new(open_rules()), ALL).unwrap();
    (0..4).for_each(|number| guest.offer_frame(number));
    guest.turn();
    guest
}

/// Both frames have left as one.
fn joined() -> Sent {
    let merged = Merged { packets: 2, frames: 1 };
    Sent { taken: 1, merged, ahead: 0b100, stop: Some(Stop::Blocked), ..Sent::default() }
}

/// The host has refused both.
fn refused() -> Sent {
    Sent { taken: 1, refused: 2, lost: 0b101, ahead: 0b100, ..Sent::default() }
}

#[test]
fn frames_that_left_before_their_turn_are_not_dropped_when_the_link_goes_down() {
    for (answer, passed) in [(joined(), 2), (refused(), 0)] {
        let mut guest = guest(answer);
        guest.tx.set_rules(Arc::new(Rules { link_up: false, ..open_rules() }));
        guest.turn();
        assert_eq!(guest.returned(), 4);
        let stats = &guest.ring.stats;
        let dropped = (stats.dropped_refused.value(), stats.dropped_link_down.value());
        assert_eq!((stats.packets.value(), dropped), (passed, (2 - passed, 2)));
    }
}

#[test]
fn frames_that_left_before_their_turn_are_not_dropped_when_the_rest_is_given_up() {
    for (answer, passed) in [(joined(), 2), (refused(), 0)] {
        let mut guest = guest(answer);
        let Guest { queue, tx, ring, .. } = &mut guest;
        tx.let_go(queue, &ring.stats);
        queue.publish();
        assert_eq!(guest.returned(), 4);
        let stats = &guest.ring.stats;
        let dropped = (stats.dropped_refused.value(), stats.dropped_port_full.value());
        assert_eq!((stats.packets.value(), dropped), (passed, (2 - passed, 2)));
    }
}
