//! Input: the buffers of a receiveq. Random buffers, frames of any length, the words between two
//! turns changed at will: a frame is read into guest memory between a header and a spill of the
//! daemon, no more buffers are held than the ring has, and those that wait are put back.
#![no_main]

#[path = "../guest.rs"]
mod guest;

use arbitrary::Arbitrary;
use guest::{Guest, Spoil};
use libfuzzer_sys::fuzz_target;
use manyring_backend::net::{PortRx, Readiness};
use manyring_device::fuzzing::SoloRx;
use manyring_memory::{GuestSlice, copy_to_slices};
use manyring_queue::DeviceQueue;
use manyring_wire::net::{FRAME_SIZE_MAX, HEADER_SIZE, Offloads, header_size};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

#[derive(Arbitrary, Debug)]
enum Step {
    /// A buffer in `pieces` pieces.
    Buffer {
        data: u16,
        pieces: u8,
        readable: bool,
    },
    /// A frame that arrives, with the first bytes of its header.
    Arrive {
        len: u16,
        long: bool,
        header: [u8; 2],
    },
    Spoil(Spoil),
    Turn,
    LetGo,
}

#[derive(Clone, Debug)]
struct Port {
    guest: Arc<Guest>,
    arrives: Arc<Mutex<VecDeque<Vec<u8>>>>,
}

impl PortRx for Port {
    fn recv(&mut self, buffers: &[GuestSlice]) -> Result<usize, Errno> {
        let [header, theirs @ .., spill] = buffers else { panic!("{} buffers", buffers.len()) };
        theirs.iter().for_each(|slice| self.guest.assert_inside(slice));
        assert!(header.len() == HEADER_SIZE && spill.len() >= HEADER_SIZE + FRAME_SIZE_MAX);
        assert!(buffers.len() <= 1024, "more than one system call takes");
        let bytes = self.arrives.lock().unwrap().pop_front().ok_or(Errno::AGAIN)?;
        assert_eq!(copy_to_slices(buffers, &bytes), bytes.len());
        Ok(bytes.len())
    }

    fn readiness(&self) -> Readiness<'_> {
        Readiness::Never
    }
}

fuzz_target!(|input: (u64, bool, Vec<Step>)| {
    let (features, is_mergeable, steps) = input;
    let guest = Arc::new(Guest::new(16, 65_530, true, true, true));
    let queue = DeviceQueue::new(guest.config, guest.memory.clone()).unwrap();
    let port = Port { guest: guest.clone(), arrives: Arc::default() };
    let given = Offloads::of_guest(features);
    // Mergeable buffers have long headers, whoever the driver is.
    let header_size = if is_mergeable { HEADER_SIZE } else { header_size(features) };
    let solo = SoloRx::new(queue, Box::new(port.clone()), given, is_mergeable).unwrap();
    let mut solo = solo.with_headers(header_size);
    for step in steps {
        match step {
            Step::Buffer { data, pieces, readable } => {
                guest.buffer(data % 0x4800, pieces % 8, readable);
            }
            Step::Arrive { len, long, header } => {
                let len = if long { usize::from(len) } else { usize::from(len % 2048) };
                let mut bytes = vec![0x5a; (HEADER_SIZE + len).min(HEADER_SIZE + FRAME_SIZE_MAX)];
                bytes[..HEADER_SIZE].fill(0);
                bytes[..2].copy_from_slice(&header);
                port.arrives.lock().unwrap().push_back(bytes);
            }
            Step::Spoil(spoil) => guest.apply(&spoil),
            Step::Turn => {
                solo.turn();
                assert!(solo.queue().in_flight() <= solo.queue().size());
            }
            Step::LetGo => {
                solo.let_go();
                assert_eq!(solo.queue().in_flight(), 0);
            }
        }
    }
});
