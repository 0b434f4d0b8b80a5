//! A guest with several queues: each flow comes by one of them, that by which the guest sends it.

use super::*;
use manyring_wire::net::rss::{HashConfig, RssConfig, hash_type};
use proptest::prelude::*;

/// A segment of connection `flow` between host 1 and host 2, sent by `from`.
fn segment(from: u8, flow: u16, number: u32) -> Vec<u8> {
    let to = 3 - from;
    let ip = [8, 0, 0x45, 0, 0, 60, 0, 0, 0, 0, 64, 6, 0, 0];
    let mut bytes = [&mac(to)[..], &mac(from), &ip].concat();
    bytes.extend([10, 0, 0, from, 10, 0, 0, to]);
    let ports = [4000 + flow, 80];
    let ports = if from == 1 { ports } else { [ports[1], ports[0]] };
    ports.iter().for_each(|port| bytes.extend(port.to_be_bytes()));
    bytes.extend(number.to_be_bytes());
    bytes.resize(if number.is_multiple_of(2) { 74 } else { 600 }, 0);
    bytes
}

/// The other pair of a guest.
struct Second {
    tx: Box<dyn PortTx>,
    rx: Option<Box<dyn PortRx>>,
}

/// A guest that uses two pairs.
fn with_two_pairs(world: &World, n: u8) -> (Guest, Second) {
    let guest = world.guest_on(n, PortOptions::new("two", 2));
    guest.port.set_attached(1, true).unwrap();
    let second =
        Second { tx: guest.port.open_tx(1).unwrap(), rx: Some(guest.port.open_rx(1).unwrap()) };
    (guest, second)
}

/// Guest 1 with one pair and guest 2 with two, which know each other and have taken all frames.
fn acquainted(world: &World) -> (Guest, Guest, Second) {
    let mut one = world.guest(1);
    let (mut two, mut second) = with_two_pairs(world, 2);
    one.greet(&mut []);
    two.greet(&mut [&mut one]);
    by_second(&mut two, &mut second, Guest::receive);
    two.receive();
    (one, two, second)
}

/// Does something by the other pair of a guest.
fn by_second<T>(guest: &mut Guest, second: &mut Second, act: impl FnOnce(&mut Guest) -> T) -> T {
    std::mem::swap(&mut guest.tx, &mut second.tx);
    std::mem::swap(&mut guest.rx, &mut second.rx);
    let result = act(guest);
    std::mem::swap(&mut guest.tx, &mut second.tx);
    std::mem::swap(&mut guest.rx, &mut second.rx);
    result
}

/// Which connection a frame belongs to.
fn flow_in(frame: &[u8]) -> u16 {
    u16::from_be_bytes([frame[34], frame[35]]) - 4000
}

proptest! {
    /// Whatever is sent by whom and by which pair: all frames of a flow come by one queue, until
    /// the guest sends the flow by another pair, and then by the queue of that pair.
    #[test]
    fn a_flow_has_one_queue_and_it_is_the_one_that_the_guest_sends_it_by(
        steps in prop::collection::vec((0u16..6, prop::option::of(any::<bool>())), 1..60)
    ) {
        let world = World::new();
        let (mut one, mut two, mut second) = acquainted(&world);
        let mut queues = [None; 6];
        for (number, (flow, replies)) in (1..).zip(steps) {
            if let Some(by_other) = replies {
                let frame = [segment(2, flow, number)];
                let act = |guest: &mut Guest| {
                    guest.send_all(&frame);
                };
                if by_other { by_second(&mut two, &mut second, act) } else { act(&mut two) }
                prop_assert_eq!(one.receive().len(), 1);
                queues[usize::from(flow)] = Some(usize::from(by_other));
                two.reap();
                by_second(&mut two, &mut second, Guest::reap);
                continue;
            }
            one.send_all(&[segment(1, flow, number), segment(1, flow, number + 1)]);
            let came = [two.receive(), by_second(&mut two, &mut second, Guest::receive)];
            one.reap();
            for (queue, frames) in came.iter().enumerate() {
                for frame in frames {
                    prop_assert_eq!(flow_in(frame), flow);
                    let expected = *queues[usize::from(flow)].get_or_insert(queue);
                    prop_assert_eq!(queue, expected, "flow {}", flow);
                }
            }
            prop_assert_eq!(came[0].len() + came[1].len(), 2);
        }
    }
}

proptest! {
    /// A guest that chooses by its hash gets each frame by the pair of its choice, whatever it has
    /// sent before; and as before when it has taken its choice back.
    #[test]
    fn a_guest_that_chooses_by_hash_gets_each_flow_by_the_pair_of_its_choice(
        key in prop::collection::vec(any::<u8>(), 40),
        table in prop::collection::vec(0u16..2, 8),
        flows in prop::collection::vec(0u16..50, 1..40),
    ) {
        let world = World::new();
        let (mut one, mut two, mut second) = acquainted(&world);
        let hash = HashConfig { types: hash_type::ALL, key };
        let rss = Arc::new(Rss::new(RssConfig { hash, unclassified: 0, table, transmitqs: 2 }));
        two.port.set_rss(Some(rss.clone())).unwrap();
        for (number, flow) in (1..).zip(&flows) {
            let frame = segment(1, *flow, number);
            one.send_all(&[frame.clone(), segment(1, *flow, number + 1)]);
            let came = [two.receive(), by_second(&mut two, &mut second, Guest::receive)];
            one.reap();
            prop_assert_eq!(came[rss.pair_of(&frame)].len(), 2, "flow {}", flow);
            prop_assert_eq!(came[1 - rss.pair_of(&frame)].len(), 0, "flow {}", flow);
        }
        two.port.set_rss(None).unwrap();
        two.send_all(&[segment(2, 7, 2)]);
        one.receive();
        one.send_all(&[segment(1, 7, 2)]);
        prop_assert_eq!(two.receive().len(), 1, "by the pair that it has sent the flow by");
    }
}
