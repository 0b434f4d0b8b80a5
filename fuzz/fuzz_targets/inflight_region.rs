//! Input: the in-flight region. Whatever its words say, and whatever is written into it later, a
//! ring is refused or served: no chain is popped twice, and no more than the ring holds. Processes
//! end and others go on from it.
#![no_main]

#[path = "../guest.rs"]
mod guest;

use arbitrary::Arbitrary;
use guest::{Guest, Spoil};
use libfuzzer_sys::fuzz_target;
use manyring_memory::{Mapping, Words};
use manyring_queue::{Batch, Chains, DeviceQueue, Ring, inflight_size};
use std::collections::BTreeSet;
use std::sync::Arc;

#[derive(Arbitrary, Debug)]
enum Step {
    Spoil(Spoil),
    Scribble {
        at: u16,
        value: u16,
    },
    Pop {
        max: u8,
    },
    PutBack,
    Push {
        which: u8,
    },
    SetAside,
    PopAside,
    UnpopAside,
    LeaveAside,
    Publish,
    /// The process ends, and the next one begins.
    Next,
}

fuzz_target!(|input: ([bool; 3], u8, u16, [u16; 8], Vec<(u16, u16)>, Vec<Step>)| {
    let ([event_idx, indirect, in_order], log_size, base, header, words, steps) = input;
    let guest = Guest::new(1 << (log_size % 9), base, event_idx, indirect, in_order);
    let size = inflight_size(guest.config.size);
    let mapping = Arc::new(Mapping::anonymous(size as u64).unwrap());
    let region = Words::new(mapping, 0, size, 8).unwrap();
    let scribble = |at: u16, value| region.store_u16(usize::from(at) % (size / 2) * 2, value);
    (0..).zip(header).for_each(|(at, value)| scribble(at, value));
    words.into_iter().for_each(|(at, value)| scribble(at, value));
    let begin = || {
        let queue = DeviceQueue::unread(guest.config, guest.memory.clone()).unwrap();
        let mut queue = queue.recorded(Some(region.clone()), None);
        queue.begin();
        assert!(queue.owed() <= queue.size());
        queue
    };
    let mut queue = begin();
    let mut batch = Batch::new();
    let mut held = Vec::new();
    let mut can_put_back = 0;
    for step in steps {
        match step {
            Step::Spoil(spoil) => guest.apply(&spoil),
            Step::Scribble { at, value } => scribble(at, value),
            Step::Pop { .. } | Step::PopAside => {
                let popped = match step {
                    Step::Pop { max } => queue.pop_batch(&mut batch, usize::from(max)),
                    _ => queue.pop_aside(&mut batch, 8),
                };
                for index in 0..popped {
                    let (chain, readable, writable) = batch.take(index).unwrap();
                    for slice in readable.iter().chain(writable.iter()) {
                        guest.assert_inside(slice);
                    }
                    held.push(chain);
                }
                can_put_back =
                    if matches!(step, Step::Pop { .. }) { can_put_back + popped } else { 0 };
            }
            Step::PutBack if can_put_back > 0 && queue.fault().is_none() => {
                can_put_back -= 1;
                queue.unpop(held.pop().unwrap());
            }
            Step::Push { which } if !held.is_empty() => {
                let at = usize::from(which) % held.len();
                queue.push_used(held.remove(at), 1);
                can_put_back = can_put_back.min(held.len() - at);
            }
            Step::SetAside => {
                held.pop().into_iter().for_each(|chain| queue.set_aside(chain));
                can_put_back = 0;
            }
            Step::UnpopAside => _ = queue.unpop_aside(),
            Step::LeaveAside => _ = queue.leave_aside(),
            Step::Publish => _ = queue.publish(),
            Step::Next => {
                held.drain(..).for_each(|chain| queue.discard(chain));
                queue = begin();
                can_put_back = 0;
            }
            Step::PutBack | Step::Push { .. } => {}
        }
        let slots: BTreeSet<_> = held.iter().map(|chain| chain.slot()).collect();
        assert_eq!(slots.len(), held.len(), "a chain was popped twice");
        assert_eq!(held.len(), usize::from(queue.in_flight()));
        assert!(held.len() <= usize::from(queue.size()));
    }
    held.into_iter().for_each(|chain| queue.discard(chain));
});
