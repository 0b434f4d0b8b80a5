//! Input: the migration log. Whatever a front-end says of it, and however long its file is by then,
//! it is refused, or every page that is written is marked in it, and nothing beside it is touched.
//! Several regions of memory come and go, logs replace each other, files are cut and grow.
#![no_main]

#[path = "../guest.rs"]
mod guest;

use arbitrary::Arbitrary;
use guest::{Guest, Spoil};
use libfuzzer_sys::fuzz_target;
use manyring_memory::{
    DirtyLog, DirtyPages, GuestMemory, LOG_PAGE, Mapping, RegionSpec, fence_full,
    install_sigbus_handler,
};
use manyring_queue::{Batch, Chain, DeviceQueue};
use rustix::fd::OwnedFd;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Bytes of a log's file at most.
const FILE_MAX: u64 = 1 << 16;

#[derive(Arbitrary, Debug)]
enum Step {
    Spoil(Spoil),
    /// A buffer is offered, as of a network.
    Buffer {
        len: u16,
        pieces: u8,
    },
    /// A log, whose numbers are small ones or any.
    Log {
        file: u16,
        size: u64,
        offset: u64,
        is_wild: bool,
    },
    NoLog,
    /// Another region of memory, which the log may be too short for.
    Region {
        at: u8,
        size: u8,
    },
    Cut {
        len: u16,
    },
    Pop {
        max: u8,
    },
    Push {
        which: u8,
    },
    PutBack,
    Publish,
    /// Pages that nobody checked.
    Mark {
        addr: u64,
        len: u64,
    },
}

struct Log {
    file: OwnedFd,
    offset: u64,
    size: u64,
    /// It was cut since.
    is_cut: bool,
}

fn log(file_len: u64, size: u64, offset: u64) -> Option<(Log, DirtyLog)> {
    let file = memfd_create("log", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, file_len).unwrap();
    let mapped = DirtyLog::map(&file, offset, size).ok()?;
    assert!(offset.checked_add(size).is_some_and(|end| end <= file_len), "mapped past the end");
    Some((Log { file, offset, size, is_cut: false }, mapped))
}

/// All pages that are marked. Fails if there is a bit outside of the log.
fn marked(log: &Log) -> BTreeSet<u64> {
    let mut bytes = vec![0; FILE_MAX as usize];
    let len = rustix::io::pread(&log.file, &mut bytes, 0).unwrap();
    let mut pages = BTreeSet::new();
    for (at, byte) in (0..).zip(&bytes[..len]).filter(|(_, byte)| **byte != 0) {
        let inside = log.offset..log.offset + log.size;
        assert!(inside.contains(&at), "byte {at} of the file is beside the log");
        pages.extend((0..8).filter(|n| byte >> n & 1 == 1).map(|n| (at - log.offset) * 8 + n));
    }
    pages
}

struct Held {
    chain: Chain,
    /// The guest pages that the chain may write; empty for a chain that was taken without a log. A
    /// change of the log is answered when no such chain is left.
    pages: Vec<u64>,
}

fuzz_target!(|input: ([bool; 2], u8, Vec<Step>)| {
    let ([event_idx, indirect], ring_size, steps) = input;
    install_sigbus_handler();
    let guest = Guest::new(1 << (ring_size % 7), 0, event_idx, indirect, false);
    let mut memory = guest.memory.clone();
    let mut queue = DeviceQueue::new(guest.config, memory.clone()).unwrap();
    let (mut batch, mut held, mut present) = (Batch::new(), Vec::<Held>::new(), None::<Log>);
    // The pages that the present log must have: those of chains that were returned since it was
    // set. The pages that it must have once the burst is published. The number of chains to put
    // back.
    let (mut owed, mut answered, mut newest) = (BTreeSet::new(), BTreeSet::new(), 0_usize);
    for step in steps {
        match step {
            Step::Spoil(spoil) => guest.apply(&spoil),
            Step::Buffer { len, pieces } => guest.buffer(len % 0x1000, pieces % 5, false),
            Step::Log { file, size, offset, is_wild } => {
                let small = |n: u64| if is_wild { n } else { n % (FILE_MAX / 2) };
                let Some((log, mapped)) = log(file.into(), small(size), small(offset)) else {
                    continue;
                };
                // One that is too short for the memory is refused.
                if let Ok(logged) = memory.with_log(Some(Arc::new(mapped))) {
                    memory = Arc::new(logged);
                    present = Some(log);
                    owed.clear();
                    queue.relocate(guest.config.addresses, memory.clone()).unwrap();
                }
            }
            Step::NoLog => {
                memory = Arc::new(memory.with_log(None).unwrap());
                present = None;
                owed.clear();
                answered.clear();
                held.iter_mut().for_each(|held| held.pages.clear());
                queue.relocate(guest.config.addresses, memory.clone()).unwrap();
            }
            Step::Region { at, size } => {
                if let Some(more) = with_region(&memory, at, size) {
                    memory = Arc::new(more);
                    queue.relocate(guest.config.addresses, memory.clone()).unwrap();
                }
            }
            Step::Cut { len } => {
                if let Some(log) = &mut present {
                    ftruncate(&log.file, len.into()).unwrap();
                    log.is_cut |= u64::from(len) < log.offset + log.size;
                }
            }
            Step::Pop { max } => {
                let popped = queue.pop_batch(&mut batch, max.into());
                newest = popped;
                for index in 0..popped {
                    let (chain, _, writable) = batch.take(index).unwrap();
                    let pages = writable.iter().flat_map(|slice| guest.pages(slice));
                    let pages = pages.filter(|_| present.is_some()).collect();
                    held.push(Held { chain, pages });
                }
            }
            Step::Push { which } if !held.is_empty() => {
                let at = usize::from(which) % held.len();
                let Held { chain, pages } = held.remove(at);
                newest = 0;
                answered.extend(pages);
                queue.push_used(chain, 1);
            }
            Step::PutBack if newest > 0 && queue.fault().is_none() => {
                newest -= 1;
                let Held { chain, pages } = held.pop().unwrap();
                owed.extend(pages);
                queue.unpop(chain);
            }
            Step::Publish => {
                queue.publish();
                owed.append(&mut answered);
            }
            Step::Mark { addr, len } => {
                if let (Some(pages), Some(log)) =
                    (DirtyPages::of(addr, len % FILE_MAX), memory.log())
                {
                    fence_full();
                    log.mark(pages);
                }
            }
            Step::Push { .. } | Step::PutBack => {}
        }
        let Some(log) = &present else { continue };
        let pages = marked(log);
        if log.is_cut || memory.is_broken() {
            continue;
        }
        assert!(owed.is_subset(&pages), "{owed:?} are not all marked in {pages:?}");
    }
    held.into_iter().for_each(|held| queue.discard(held.chain));
});

fn with_region(memory: &GuestMemory, at: u8, size: u8) -> Option<GuestMemory> {
    let size = (u64::from(size) + 1) * LOG_PAGE;
    let guest_addr = 0x10_0000 + u64::from(at) * 0x1_0000;
    let user_addr = 0x7100_0000 + guest_addr;
    let spec = RegionSpec { guest_addr, size, user_addr, mmap_offset: 0 };
    memory.with_mapping(spec, Arc::new(Mapping::anonymous(size).ok()?)).ok()
}
