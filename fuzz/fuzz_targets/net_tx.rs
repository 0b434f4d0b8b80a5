//! Input: what a guest sends. Random headers, pieces and chains on a port that blocks now and then,
//! the words between two turns changed at will: what the port gets is a frame with a header that
//! is right, in guest memory, and every chain that is popped comes back once.
#![no_main]

#[path = "../guest.rs"]
mod guest;

use arbitrary::Arbitrary;
use guest::{Guest, Spoil};
use libfuzzer_sys::fuzz_target;
use manyring_backend::net::{Frames, PortTx, Readiness, Sent, Stop};
use manyring_device::fuzzing::SoloTx;
use manyring_memory::{copy_from_slices, total_len};
use manyring_queue::DeviceQueue;
use manyring_wire::net::{FRAME_SIZE_MAX, HEADER_SIZE, Offloads, RawNetHeader, header_size};
use std::sync::Arc;
use zerocopy::FromBytes;

#[derive(Arbitrary, Debug)]
enum Step {
    /// A frame: its header in two pieces, then the same bytes `times` times.
    Frame {
        header: [u8; 12],
        cut: u8,
        data: u16,
        times: u8,
        writable: bool,
    },
    Spoil(Spoil),
    Turn {
        is_enabled: bool,
    },
    LetGo,
}

#[derive(Debug)]
struct Port {
    guest: Arc<Guest>,
    taken: Offloads,
    /// The fate of each frame that the port gets.
    script: Vec<u8>,
}

impl PortTx for Port {
    fn send(&mut self, frames: &Frames, first: usize) -> Sent {
        let mut sent = Sent::default();
        for index in first..frames.count() {
            let (len, slices) = (frames.len(index), frames.slices(index));
            assert!((14..=FRAME_SIZE_MAX).contains(&len));
            assert_eq!(total_len(slices), (HEADER_SIZE + len) as u64);
            slices[1..].iter().for_each(|slice| self.guest.assert_inside(slice));
            let mut bytes = vec![0; HEADER_SIZE + len];
            assert_eq!(copy_from_slices(slices, &mut bytes), bytes.len());
            let header = RawNetHeader::read_from_bytes(&bytes[..HEADER_SIZE]).unwrap();
            assert_eq!(header.checked(len, self.taken), Ok(header));
            match self.script.pop() {
                Some(0) => sent.stop = Some(Stop::Blocked),
                Some(1) => sent.stop = Some(Stop::NoMemory),
                Some(2) => {
                    sent.refused += 1;
                    sent.lost |= 1 << index;
                }
                _ => {}
            }
            if sent.stop.is_some() {
                break;
            }
            sent.taken += 1;
        }
        sent
    }

    fn readiness(&self) -> Readiness<'_> {
        Readiness::Never
    }
}

fuzz_target!(|input: (u64, Vec<u8>, Vec<Step>)| {
    let (features, script, steps) = input;
    let taken = Offloads::of_host(features);
    let guest = Arc::new(Guest::new(16, 65_530, true, true, true));
    let queue = DeviceQueue::new(guest.config, guest.memory.clone()).unwrap();
    let port = Port { guest: guest.clone(), taken, script };
    let solo = SoloTx::new(queue, Box::new(port), taken).unwrap();
    let mut solo = solo.with_headers(header_size(features));
    let (mut held, mut now_ns) = (0, 0);
    for step in steps {
        match step {
            Step::Frame { header, cut, data, times, writable } => {
                guest.frame(&header, cut % 13, data % 0x4800, times % 6, writable);
            }
            Step::Spoil(spoil) => guest.apply(&spoil),
            Step::Turn { is_enabled } => {
                now_ns += 1_000_000;
                let (popped, returned) = solo.turn(is_enabled, now_ns);
                held = held + popped - returned;
            }
            Step::LetGo => {
                solo.let_go();
                held = 0;
            }
        }
        assert_eq!(usize::from(solo.queue().in_flight()), held);
    }
    solo.let_go();
    assert_eq!(solo.queue().in_flight(), 0);
});
