//! Input: the ring of a Xen disk. A front-end that writes requests, segments and counts at will:
//! no more is taken than the ring holds, a fault stays, a copy over that of a former request is
//! what lies in the ring, and a request that is parsed stays on the disk and inside its pages.
#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use manyring_memory::{GuestMemory, Mapping, Words};
use manyring_queue::blkif::{BackRing, FrontRing, Requests, RingConfig};
use manyring_queue::{BATCH_CHAINS, Base, Chain, Ring};
use manyring_wire::xen::blkif::{
    Abi, BlkifStatus, ENTRY_WORDS, INDIRECT_PAGES_MAX, Kind, Limits, PAGE_SIZE, RING_ENTRIES,
    RawRequest, Request, Response, SEGMENT_SIZE, Segment, ring_bytes,
};
use std::collections::VecDeque;
use std::sync::Arc;

#[derive(Arbitrary, Debug)]
enum Step {
    /// A request: its first word, sector, segments and counts where its layout has them.
    Request {
        place: u16,
        head: [u8; 4],
        sector: u16,
        far: bool,
        segments: Vec<(u32, u8, u8)>,
    },
    /// Any word of the ring.
    Word {
        at: u16,
        value: u32,
    },
    /// `req_prod` moves.
    Move(u8),
    Pop {
        max: u8,
        indirect: Vec<u8>,
    },
    PutBack,
    Answer,
    Publish,
    Arm,
    Disarm,
}

#[derive(Arbitrary, Debug)]
struct Input {
    abi: u8,
    order: u8,
    base: u32,
    sectors: u16,
    block_shift: u8,
    offered: u8,
    indirect_segments_max: u16,
    steps: Vec<Step>,
}

impl Input {
    fn limits(&self) -> Limits {
        let has = |bit: u8| self.offered & bit != 0;
        Limits {
            sectors: self.sectors.into(),
            block_shift: u32::from(self.block_shift % 80),
            writable: has(1),
            barrier: has(2),
            flush: has(4),
            discard: has(8),
            discard_secure: has(16),
            indirect_segments_max: self.indirect_segments_max,
        }
    }
}

fuzz_target!(|input: Input| {
    let abi = Abi::ALL[usize::from(input.abi % 3)];
    let config = RingConfig { abi, order: u32::from(input.order % 3), addr: 0 };
    let bytes = ring_bytes(config.order);
    let mapping = Arc::new(Mapping::anonymous(bytes as u64).unwrap());
    let memory = Arc::new(GuestMemory::of_mapping(mapping));
    let words = memory.words(0, bytes, 4096).unwrap();
    FrontRing::new(config, Base::from_bits(input.base), &memory).unwrap();
    let mut ring = BackRing::new(config, memory).unwrap();
    let (mut requests, mut held) = (Requests::new(), VecDeque::new());
    let (mut can_put_back, limits, mut prod) = (0, input.limits(), input.base);
    for step in input.steps {
        let fault = ring.fault();
        match step {
            Step::Request { place, head, sector, far, segments } => {
                let layout = abi.layout();
                let entry = usize::from(place % ring.size()) * layout.entry_size + RING_ENTRIES;
                let head = [head[0] % 8, head[1] % 16, head[2], head[3] % 18];
                words.store_u32(entry, u32::from_le_bytes(head));
                words.store_u32(entry + layout.sector, sector.into());
                words.store_u32(entry + layout.sector + 4, u32::from(far) << 31);
                for (n, (gref, first, last)) in segments.iter().take(11).enumerate() {
                    let at = entry + layout.segments + SEGMENT_SIZE * n;
                    let range = u32::from_le_bytes([first % 10, last % 10, 0, 0]);
                    words.store_u32s(at, &[*gref, range]);
                }
            }
            Step::Word { at, value } => {
                words.store_u32(4 * (usize::from(at) % (bytes / 4)), value);
            }
            Step::Move(ahead) => {
                prod = prod.wrapping_add(ahead.into());
                words.store_u32(0, prod);
            }
            Step::Pop { max, indirect } => {
                let first = ring.base().bits();
                let popped = ring.pop_batch(&mut requests, usize::from(max));
                assert!(popped <= BATCH_CHAINS && (fault.is_none() || popped == 0));
                for (index, count) in (0..popped).zip((0..).map(|n| first.wrapping_add(n))) {
                    let (chain, raw) = requests.take(index).unwrap();
                    let alone = entry_of(&words, (abi, ring.size()), count);
                    assert_eq!(*raw, alone, "not what lies in the ring");
                    assert_eq!(
                        Request::parse(raw, &limits),
                        Request::parse(&alone, &limits),
                        "bytes of a former request count",
                    );
                    judge(raw, &limits, &indirect);
                    held.push_back(chain);
                    can_put_back += 1;
                }
            }
            Step::PutBack => {
                if can_put_back > 0 && fault.is_none() {
                    can_put_back -= 1;
                    ring.unpop(held.pop_back().unwrap());
                }
            }
            Step::Answer => {
                // The oldest: those after it can still be put back.
                if let Some(chain) = held.pop_front() {
                    let response = Response { id: 0, operation: 0, status: BlkifStatus::Okay };
                    ring.push_response(chain, response);
                    can_put_back = can_put_back.min(held.len());
                }
            }
            Step::Publish => {
                ring.publish();
                ring.needs_notification();
            }
            Step::Arm => {
                ring.enable_notifications();
            }
            Step::Disarm => ring.disable_notifications(),
        }
        assert!(fault.is_none() || ring.fault() == fault, "the first fault does not stay");
        assert_eq!(held.len(), usize::from(ring.in_flight()));
        assert!(held.len() <= usize::from(ring.size()));
        let mut slots: Vec<u16> = held.iter().map(Chain::slot).collect();
        slots.sort_unstable();
        slots.dedup();
        assert_eq!(slots.len(), held.len(), "two requests have one slot");
    }
    held.into_iter().for_each(|chain| ring.discard(chain));
});

/// The request of this count, as it lies in the ring, and zeroes behind it.
fn entry_of(words: &Words, (abi, size): (Abi, u16), count: u32) -> RawRequest {
    let layout = abi.layout();
    let place = (count % u32::from(size)) as usize;
    let at = RING_ENTRIES + place * layout.entry_size;
    let mut copy = [0; ENTRY_WORDS];
    let len = layout.request_size(words.load_u32(at)) / 4;
    words.load_u32s(at, &mut copy[..len]);
    RawRequest::new(abi, copy)
}

/// Parses a request as a handler would, and its indirect pages, which all hold `page`.
fn judge(raw: &RawRequest, limits: &Limits, page: &[u8]) {
    let request = match Request::parse(raw, limits) {
        Ok(request) => request,
        Err(refusal) => {
            assert_eq!(refusal.id, raw.id());
            assert!(refusal.error.status() != BlkifStatus::Okay && !refusal.to_string().is_empty());
            return;
        }
    };
    assert_eq!(request.id, raw.id());
    let inside = |segment: &Segment| segment.offset() + segment.len() <= PAGE_SIZE;
    match request.kind {
        Kind::Data(data) => {
            assert!(data.segment_count() > 0 && data.segments().all(|s| inside(&s)));
            let sum: u64 = data.segments().map(|s| u64::from(s.sectors())).sum();
            assert!(data.sector + sum <= limits.sectors);
        }
        Kind::Indirect(indirect) => {
            let pages = indirect.grefs().len();
            assert!((1..=INDIRECT_PAGES_MAX).contains(&pages));
            let mut segments = Vec::new();
            for index in 0..pages {
                let bytes = indirect.page_bytes(index);
                assert!((SEGMENT_SIZE..=PAGE_SIZE).contains(&bytes));
                let page: Vec<u8> = page.iter().copied().cycle().take(bytes).collect();
                segments.extend(Segment::parse_page(&page).map_while(Result::ok));
            }
            if let Ok(sectors) = indirect.check(&segments, limits) {
                assert!(segments.iter().all(inside));
                assert!(indirect.sector + sectors <= limits.sectors);
            }
        }
        Kind::Discard { sector, count, .. } => {
            assert!(count > 0 && sector + count <= limits.sectors);
        }
        Kind::Flush | Kind::Barrier => {}
    }
}
