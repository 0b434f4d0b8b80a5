//! Input: the ring. A valid ring with spoiled words: what is popped lies in guest memory, no more
//! is in flight than the ring holds, and a fault is the last thing that happens.
#![no_main]

#[path = "../guest.rs"]
mod guest;

use arbitrary::Arbitrary;
use guest::{Guest, Spoil};
use libfuzzer_sys::fuzz_target;
use manyring_queue::{BATCH_CHAINS, Batch, DeviceQueue};

#[derive(Arbitrary, Debug)]
enum Step {
    Spoil(Spoil),
    Pop { max: u8 },
    PutBack,
    Push { written: u32 },
    Publish,
    Arm,
    Disarm,
}

fuzz_target!(|input: ([bool; 3], u8, u16, Vec<Step>)| {
    let ([event_idx, indirect, in_order], log_size, base, steps) = input;
    let guest = Guest::new(1 << (log_size % 9), base, event_idx, indirect, in_order);
    let mut queue = DeviceQueue::new(guest.config, guest.memory.clone()).unwrap();
    let mut batch = Batch::new();
    let mut held = Vec::new();
    let mut can_put_back = 0;
    for step in steps {
        let fault = queue.fault();
        match step {
            Step::Spoil(spoil) => guest.apply(&spoil),
            Step::Pop { max } => {
                let popped = queue.pop_batch(&mut batch, usize::from(max));
                assert!(popped <= BATCH_CHAINS && (fault.is_none() || popped == 0));
                for index in 0..popped {
                    let (chain, readable, writable) = batch.take(index).unwrap();
                    for slice in readable.iter().chain(writable.iter()) {
                        guest.assert_inside(slice);
                    }
                    held.push(chain);
                    can_put_back += 1;
                }
            }
            Step::PutBack => {
                if can_put_back > 0 && fault.is_none() {
                    can_put_back -= 1;
                    queue.unpop(held.pop().unwrap());
                }
            }
            Step::Push { written } => {
                // The oldest: those after it can still be put back.
                if !held.is_empty() {
                    queue.push_used(held.remove(0), written);
                    can_put_back = can_put_back.min(held.len());
                }
            }
            Step::Publish => {
                queue.publish();
                queue.needs_notification();
            }
            Step::Arm => {
                queue.enable_notifications();
            }
            Step::Disarm => queue.disable_notifications(),
        }
        assert!(fault.is_none() || queue.fault() == fault, "the first fault does not stay");
        assert_eq!(held.len(), usize::from(queue.in_flight()));
        assert!(held.len() <= usize::from(queue.size()));
    }
    held.into_iter().for_each(|chain| queue.discard(chain));
});
