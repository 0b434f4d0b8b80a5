//! Input: the packed ring, plain, with an in-flight region, or telling its own place. A ring, and a
//! region, of any words: what is popped lies in guest memory, no more is in flight than the ring
//! holds, and a fault is the last thing that happens. Processes end and others go on.
#![no_main]

#[path = "../guest.rs"]
mod guest;

use arbitrary::Arbitrary;
use guest::{Guest, Place};
use libfuzzer_sys::fuzz_target;
use manyring_memory::{Mapping, Words};
use manyring_queue::{BATCH_CHAINS, Batch, Chain, Chains, DeviceQueue, Ring, packed_inflight_size};
use std::collections::BTreeSet;
use std::sync::Arc;

#[derive(Arbitrary, Debug)]
enum Step {
    Descriptor { table: bool, index: u8, place: Place, len: u32, long: bool, flags: u8, id: u16 },
    Laps { at: u8, more: u8, wrap: bool },
    Scribble { at: u16, value: u16 },
    Pop { max: u8 },
    PutBack,
    Push { which: u8, written: u32 },
    SetAside,
    PopAside,
    UnpopAside,
    LeaveAside,
    Publish,
    Arm,
    Disarm,
    Next,
}

/// The record of the ring that outlives the process.
#[derive(Arbitrary, Debug)]
enum Kept {
    Nothing,
    Region,
    Trail,
}

#[derive(Arbitrary, Debug)]
struct Input {
    features: [bool; 3],
    size: u8,
    base: u32,
    kept: Kept,
    region: Vec<(u16, u16)>,
    steps: Vec<Step>,
}

fuzz_target!(|input: Input| {
    let [event_idx, indirect, in_order] = input.features;
    let size = u16::from(input.size) + 1;
    let guest = Guest::new(size, 0, event_idx, indirect, in_order).packed(input.base);
    let bytes = packed_inflight_size(size);
    let mapping = Arc::new(Mapping::anonymous(bytes as u64).unwrap());
    let region = Words::new(mapping, 0, bytes, 8).unwrap();
    let scribble = |at: u16, value| region.store_u16(usize::from(at) % (bytes / 2) * 2, value);
    input.region.into_iter().for_each(|(at, value)| scribble(at, value));
    let begin = || {
        let queue = DeviceQueue::unread(guest.config, guest.memory.clone()).ok()?;
        let mut queue = match input.kept {
            Kept::Nothing => queue,
            Kept::Region => queue.recorded(Some(region.clone()), None),
            Kept::Trail => queue.trailed(),
        };
        queue.begin();
        assert!(queue.owed() <= queue.size());
        Some(queue)
    };
    let Some(queue) = begin() else { return };
    let mut back = Back { queue, batch: Batch::new(), held: Vec::new(), can_put_back: 0 };
    for step in input.steps {
        let fault = back.queue.fault();
        match step {
            Step::Descriptor { table, index, place, len, long, flags, id } => {
                let len = if long { len } else { len % 0x1100 };
                guest.set_packed(table, index, &place, len, flags, id);
            }
            Step::Laps { at, more, wrap } => {
                guest.set_laps(u16::from(at), u16::from(at) + u16::from(more), wrap);
            }
            Step::Scribble { at, value } => scribble(at, value),
            Step::Next => {
                back.held.drain(..).for_each(|chain| back.queue.discard(chain));
                (back.queue, back.can_put_back) = (begin().unwrap(), 0);
                continue;
            }
            step => back.step(&guest, step),
        }
        assert!(fault.is_none() || back.queue.fault() == fault, "the first fault does not stay");
        let slots: BTreeSet<_> = back.held.iter().map(|chain| chain.slot()).collect();
        assert_eq!(slots.len(), back.held.len(), "a chain was popped twice");
        assert_eq!(back.held.len(), usize::from(back.queue.in_flight()));
        assert!(back.held.len() <= usize::from(back.queue.size()));
        assert!(back.queue.base().check(size, guest.config.features).is_ok());
    }
    back.held.into_iter().for_each(|chain| back.queue.discard(chain));
});

struct Back {
    queue: DeviceQueue,
    batch: Batch,
    held: Vec<Chain>,
    can_put_back: usize,
}

impl Back {
    fn step(&mut self, guest: &Guest, step: Step) {
        match step {
            Step::Pop { max } => {
                let was_broken = self.queue.fault().is_some();
                let popped = self.queue.pop_batch(&mut self.batch, usize::from(max));
                assert!(popped <= BATCH_CHAINS && (!was_broken || popped == 0));
                self.take(guest, popped);
                self.can_put_back += popped;
            }
            Step::PopAside => {
                let popped = self.queue.pop_aside(&mut self.batch, 8);
                self.take(guest, popped);
                self.can_put_back = 0;
            }
            Step::PutBack if self.can_put_back > 0 && self.queue.fault().is_none() => {
                self.can_put_back -= 1;
                let chain = self.held.pop().unwrap();
                self.queue.unpop(chain);
            }
            Step::Push { which, written } if !self.held.is_empty() => {
                let at = usize::from(which) % self.held.len();
                let chain = self.held.remove(at);
                self.queue.push_used(chain, written);
                self.can_put_back = self.can_put_back.min(self.held.len() - at);
            }
            Step::SetAside => {
                self.held.pop().into_iter().for_each(|chain| self.queue.set_aside(chain));
                self.can_put_back = 0;
            }
            Step::UnpopAside => _ = self.queue.unpop_aside(),
            Step::LeaveAside => _ = self.queue.leave_aside(),
            Step::Publish => {
                self.queue.publish();
                self.queue.needs_notification();
            }
            Step::Arm => _ = self.queue.enable_notifications(),
            Step::Disarm => self.queue.disable_notifications(),
            _ => {}
        }
    }

    fn take(&mut self, guest: &Guest, popped: usize) {
        for index in 0..popped {
            let (chain, readable, writable) = self.batch.take(index).unwrap();
            for slice in readable.iter().chain(writable.iter()) {
                guest.assert_inside(slice);
            }
            self.held.push(chain);
        }
    }
}
