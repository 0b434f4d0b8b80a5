//! The Xen block interface: machine ABIs, the shared ring's layout, responses (Xen `io/blkif.h`).
//!
//! A front-end writes requests into a ring of shared pages. The back-end writes its responses over
//! requests that it has taken. The layout is that of the front-end's compiler: a guest of 32 bits
//! on x86 has other offsets than one of 64 ([`Abi`]). A request names pages of the guest by grant
//! references. [`Request::parse`] checks all that can be checked without those pages.
//!
//! Every sector of this protocol has 512 bytes, whatever the disk's `sector-size` says. All fields
//! are little-endian, as on every machine that Xen runs guests of these ABIs on.

mod raw;
mod request;
mod segment;

pub use raw::RawRequest;
pub use request::{Data, DataOp, Indirect, Kind, Limits, RefusedRequest, Request, RequestError};
pub use segment::{BlkifSegmentError, SEGMENT_SIZE, SEGMENTS_PER_PAGE, Segment};

/// Bytes of a page that a grant reference names, whatever the machine.
pub const PAGE_SIZE: usize = 4096;
/// Bytes of a sector, the unit of all sector numbers and ranges of requests.
pub const SECTOR_SIZE: u64 = 512;
/// Sectors of a page.
pub const SECTORS_PER_PAGE: u8 = 8;

/// Most segments that a request carries itself (`BLKIF_MAX_SEGMENTS_PER_REQUEST`).
pub const SEGMENTS_MAX: usize = 11;
/// Most pages of segments of one indirect request (`BLKIF_MAX_INDIRECT_PAGES_PER_REQUEST`).
pub const INDIRECT_PAGES_MAX: usize = 8;
/// Most segments of one indirect request: 8 pages hold 512 each.
pub const INDIRECT_SEGMENTS_MAX: u16 = 4096;

/// `operation`: read.
pub const OP_READ: u8 = 0;
/// `operation`: write.
pub const OP_WRITE: u8 = 1;
/// `operation`: a write barrier: after all earlier writes, before all later ones.
pub const OP_WRITE_BARRIER: u8 = 2;
/// `operation`: make all earlier writes durable; then write, if there are segments.
pub const OP_FLUSH_DISKCACHE: u8 = 3;
/// `operation`: discard sectors.
pub const OP_DISCARD: u8 = 5;
/// `operation`: a read or write whose segments lie in pages of their own.
pub const OP_INDIRECT: u8 = 6;

/// `flag` of a discard: erase every copy of the sectors.
pub const DISCARD_SECURE: u8 = 1;

/// `info` of the back-end's nodes: a CD-ROM.
pub const VDISK_CDROM: u32 = 1;
/// `info` of the back-end's nodes: the medium can be removed.
pub const VDISK_REMOVABLE: u32 = 2;
/// `info` of the back-end's nodes: the disk is read-only.
pub const VDISK_READONLY: u32 = 4;

/// Largest `ring-page-order` that is served: rings of up to 16 pages.
pub const RING_PAGE_ORDER_MAX: u32 = 4;
/// Offset of `req_prod` in the shared ring: the index behind the front's last request.
pub const REQ_PROD: usize = 0;
/// Offset of `req_event`: the front notifies the back when `req_prod` reaches it.
pub const REQ_EVENT: usize = 4;
/// Offset of `rsp_prod`: the index behind the back's last response.
pub const RSP_PROD: usize = 8;
/// Offset of `rsp_event`: the back notifies the front when `rsp_prod` reaches it.
pub const RSP_EVENT: usize = 12;
/// Offset of the first entry of the ring.
pub const RING_ENTRIES: usize = 64;

/// True if a move of a producer's index from `old` to `new` reaches `event`, the index at which the
/// peer wants a notification.
#[must_use]
#[inline]
pub const fn need_event(event: u32, new: u32, old: u32) -> bool {
    new.wrapping_sub(event) < new.wrapping_sub(old)
}

/// Bytes of a ring of `1 << order` pages.
#[must_use]
pub const fn ring_bytes(order: u32) -> usize {
    PAGE_SIZE << order
}

/// The layout rules of the front-end's compiler for requests and responses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Abi {
    /// The ABI of this machine, for a front-end that names no ABI. On every machine of 64 bits the
    /// layout is that of [`Abi::X86_64`].
    #[default]
    Native,
    /// `x86_32-abi`: numbers of 64 bits are aligned to 4 bytes.
    X86_32,
    /// `x86_64-abi`: numbers of 64 bits are aligned to 8 bytes.
    X86_64,
}

impl Abi {
    /// Every ABI.
    pub const ALL: [Self; 3] = [Self::Native, Self::X86_32, Self::X86_64];

    /// The ABI that the `protocol` node names. `None`: no guest of this machine has that ABI.
    #[must_use]
    pub fn parse(name: &[u8]) -> Option<Self> {
        match name {
            b"x86_32-abi" => Some(Self::X86_32),
            b"x86_64-abi" => Some(Self::X86_64),
            b"arm-abi" if cfg!(target_arch = "aarch64") => Some(Self::Native),
            _ => None,
        }
    }

    /// The value of the `protocol` node of a front-end with this ABI; `None`: it has no such node.
    #[must_use]
    pub const fn name(self) -> Option<&'static str> {
        match self {
            Self::Native => None,
            Self::X86_32 => Some("x86_32-abi"),
            Self::X86_64 => Some("x86_64-abi"),
        }
    }

    /// The offsets of the fields in this ABI.
    #[must_use]
    #[inline]
    pub const fn layout(self) -> &'static Layout {
        match self {
            Self::X86_32 => &X86_32,
            Self::Native | Self::X86_64 => &X86_64,
        }
    }

    /// Entries of a ring of `1 << order` pages: the largest power of two that fits behind the
    /// indexes.
    #[must_use]
    pub const fn ring_size(self, order: u32) -> u16 {
        assert!(order <= RING_PAGE_ORDER_MAX);
        let fit = (ring_bytes(order) - RING_ENTRIES) / self.layout().entry_size;
        // Less than 1024 entries fit into 16 pages.
        1 << fit.ilog2()
    }
}

/// Byte offsets of the fields of a ring entry. `operation`, what follows it in the first four
/// bytes, and the fields of a segment have the same offsets in every ABI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// `id` of a request.
    pub id: usize,
    /// `sector_number` of a request.
    pub sector: usize,
    /// The first segment of a read or write.
    pub segments: usize,
    /// `nr_sectors` of a discard.
    pub discard_sectors: usize,
    /// `handle` of an indirect request.
    pub indirect_handle: usize,
    /// `indirect_grefs` of an indirect request.
    pub indirect_grefs: usize,
    /// Bytes of a ring entry, which holds the largest request.
    pub entry_size: usize,
    /// Bytes of a response.
    pub response_size: usize,
}

impl Layout {
    /// Bytes that are used of the request whose first four bytes are `head`. A request that claims
    /// more segments than it can carry ends with its entry.
    #[must_use]
    #[inline]
    pub const fn request_size(&self, head: u32) -> usize {
        let [operation, count, ..] = head.to_le_bytes();
        match operation {
            OP_DISCARD => self.discard_sectors + 8,
            OP_INDIRECT => self.indirect_grefs + 4 * INDIRECT_PAGES_MAX,
            _ if count as usize > SEGMENTS_MAX => self.entry_size,
            _ => self.segments + SEGMENT_SIZE * count as usize,
        }
    }
}

const X86_32: Layout = Layout {
    id: 4,
    sector: 12,
    segments: 20,
    discard_sectors: 20,
    indirect_handle: 20,
    indirect_grefs: 24,
    entry_size: 108,
    response_size: 12,
};

const X86_64: Layout = Layout {
    id: 8,
    sector: 16,
    segments: 24,
    discard_sectors: 24,
    indirect_handle: 24,
    indirect_grefs: 28,
    entry_size: 112,
    response_size: 16,
};

/// Number of 32-bit words of the largest entry.
pub const ENTRY_WORDS: usize = X86_64.entry_size / 4;
/// Number of words of a response that carry data: `id`, and `operation` with `status`.
pub const RESPONSE_WORDS: usize = 3;

/// Declares the structures of `io/blkif.h` for one alignment and compares them with a layout.
macro_rules! check_layout {
    ($layout:ident, $($packed:tt)*) => {
        const _: () = {
            #[$($packed)*]
            struct SegmentFields(u32, u8, u8);
            #[$($packed)*]
            struct RequestFields(u8, u8, u16, u64, u64, [SegmentFields; SEGMENTS_MAX]);
            #[$($packed)*]
            struct DiscardFields(u8, u8, u16, u64, u64, u64);
            #[$($packed)*]
            struct IndirectFields(u8, u8, u16, u64, u64, u16, [u32; INDIRECT_PAGES_MAX]);
            #[$($packed)*]
            struct ResponseFields(u64, u8, i16);

            use std::mem::offset_of;
            assert!(size_of::<SegmentFields>() == SEGMENT_SIZE);
            assert!(offset_of!(RequestFields, 3) == $layout.id);
            assert!(offset_of!(RequestFields, 4) == $layout.sector);
            assert!(offset_of!(RequestFields, 5) == $layout.segments);
            assert!(size_of::<RequestFields>() == $layout.entry_size);
            assert!(offset_of!(DiscardFields, 3) == $layout.id);
            assert!(offset_of!(DiscardFields, 4) == $layout.sector);
            assert!(offset_of!(DiscardFields, 5) == $layout.discard_sectors);
            assert!(offset_of!(IndirectFields, 2) == 2);
            assert!(offset_of!(IndirectFields, 3) == $layout.id);
            assert!(offset_of!(IndirectFields, 4) == $layout.sector);
            assert!(offset_of!(IndirectFields, 5) == $layout.indirect_handle);
            assert!(offset_of!(IndirectFields, 6) == $layout.indirect_grefs);
            assert!(size_of::<IndirectFields>() <= $layout.entry_size);
            assert!(offset_of!(ResponseFields, 1) == 8 && offset_of!(ResponseFields, 2) == 10);
            assert!(size_of::<ResponseFields>() == $layout.response_size);
            // Entries and fields begin at multiples of 4 bytes.
            assert!($layout.entry_size % 4 == 0 && $layout.entry_size <= 4 * ENTRY_WORDS);
        };
    };
}

check_layout!(X86_64, repr(C));
// On x86 with 32 bits, nothing is aligned to more than 4 bytes.
check_layout!(X86_32, repr(C, packed(4)));

const _: () = assert!(INDIRECT_SEGMENTS_MAX as usize == INDIRECT_PAGES_MAX * SEGMENTS_PER_PAGE);
const _: () = assert!(SECTORS_PER_PAGE as u64 * SECTOR_SIZE == PAGE_SIZE as u64);

/// How a request ended (`BLKIF_RSP_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i16)]
pub enum BlkifStatus {
    /// `BLKIF_RSP_OKAY`
    Okay = 0,
    /// `BLKIF_RSP_ERROR`
    Error = -1,
    /// `BLKIF_RSP_EOPNOTSUPP`: the back-end does not serve this operation; the front-end may go on.
    Unsupported = -2,
}

impl BlkifStatus {
    /// The status with this number. `None`: the specification has no such status.
    #[must_use]
    pub const fn parse(number: i16) -> Option<Self> {
        match number {
            0 => Some(Self::Okay),
            -1 => Some(Self::Error),
            -2 => Some(Self::Unsupported),
            _ => None,
        }
    }
}

/// A response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Response {
    /// The id of the request.
    pub id: u64,
    /// The operation of the request ([`Request::echo`]); for an indirect request the inner
    /// operation. With any other value a Linux front-end stops using the disk.
    pub operation: u8,
    /// How the request ended.
    pub status: BlkifStatus,
}

impl Response {
    /// The words of the response. Only its padding differs between ABIs.
    #[must_use]
    #[allow(clippy::cast_possible_truncation, reason = "the id is cut into its two words")]
    #[allow(clippy::cast_sign_loss, reason = "the status is carried as its bits")]
    #[inline]
    pub const fn emit(self) -> [u32; RESPONSE_WORDS] {
        let [low, high] = (self.status as i16 as u16).to_le_bytes();
        let last = u32::from_le_bytes([self.operation, 0, low, high]);
        [self.id as u32, (self.id >> 32) as u32, last]
    }

    /// Parses the words of a response. `None`: the specification has no such status.
    #[must_use]
    #[allow(clippy::cast_possible_wrap, reason = "the status is carried as its bits")]
    pub const fn parse(words: [u32; RESPONSE_WORDS]) -> Option<Self> {
        let id = words[0] as u64 | (words[1] as u64) << 32;
        let [operation, _, low, high] = words[2].to_le_bytes();
        match BlkifStatus::parse(u16::from_le_bytes([low, high]) as i16) {
            Some(status) => Some(Self { id, operation, status }),
            None => None,
        }
    }
}

#[cfg(test)]
mod tests;
