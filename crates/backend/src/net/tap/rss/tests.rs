//! The RSS program chooses the same pair as `Rss`. Needs root, because the kernel runs the program.

use super::*;
use crate::net::tap::flows::tests::frames;
use manyring_wire::net::rss::HashConfig;
use proptest::prelude::*;

/// Pairs that the host uses, in the order of its queues: pair 2 is not among them.
const IN_USE: [usize; 3] = [1, 3, 0];

fn configs() -> impl Strategy<Value = RssConfig> {
    let len = prop::sample::select(vec![1usize, 2, 8, 128]);
    let table = len.prop_flat_map(|len| prop::collection::vec(0u16..4, len));
    let key = prop::collection::vec(any::<u8>(), 0..=40);
    (0..=hash_type::ALL, key, 0u16..4, table).prop_map(|(types, key, unclassified, table)| {
        RssConfig { hash: HashConfig { types, key }, unclassified, table, transmitqs: 4 }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn the_host_comes_to_the_pair_that_we_do(
        config in configs(),
        frames in prop::collection::vec(frames(), 1..12),
    ) {
        let flows = Flows::new().expect("these tests need root");
        flows.set_queues(&IN_USE);
        let rss = Rss::new(config);
        let hashed = Hashed::new(&rss, &flows).unwrap();
        for frame in frames {
            let said = bpf::run(hashed.program.as_fd(), &frame).unwrap();
            prop_assert_eq!(said, flows.place_of(rss.pair_of(&frame)), "{:?}", frame);
        }
    }
}

#[test]
fn a_table_is_obeyed_as_it_is_and_each_flow_has_one_queue() {
    let flows = Flows::new().expect("these tests need root");
    flows.set_queues(&[0, 1, 2, 3]);
    let table = (0..128).map(|at| at % 4).collect();
    let key = (1..=40).collect();
    let hash = HashConfig { types: hash_type::ALL, key };
    let rss = Rss::new(RssConfig { hash, unclassified: 0, table, transmitqs: 4 });
    let hashed = Hashed::new(&rss, &flows).unwrap();
    let mut counts = [0; 4];
    for port in 0..256u16 {
        let mut frame = vec![2; 12];
        frame.extend([8, 0, 0x45, 0, 0, 40, 0, 1, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
        frame.extend(port.to_be_bytes());
        frame.extend([20, 81]);
        frame.extend([0; 16]);
        let queue = bpf::run(hashed.program.as_fd(), &frame).unwrap();
        counts[usize::try_from(queue).unwrap()] += 1;
        frame.extend([7; 100]);
        assert_eq!(bpf::run(hashed.program.as_fd(), &frame), Ok(queue), "{port}");
    }
    assert!(counts.iter().all(|count| *count >= 32), "{counts:?}");
}
