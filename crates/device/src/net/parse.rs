//! Parses a chain of a transmitq into a frame with a checked header (virtio 1.3 §5.1.6.2).

use super::tally::Tally;
use manyring_backend::net::{Frames, Token};
use manyring_memory::{GuestSlice, Pieces, copy_from_slices, total_len};
use manyring_wire::net::{FRAME_SIZE_MAX, HEADER_SIZE, Offloads, RawHeader};
use zerocopy::FromBytes;

/// Shortest frame: an Ethernet header.
const FRAME_SIZE_MIN: usize = 14;

/// Why a chain does not hold a frame.
pub(super) enum Wrong {
    Short,
    TooLong,
    Header,
}

/// Copies the header of `SIZE` bytes once, checks it, and adds the frame behind it to the
/// burst, under `token`.
///
/// [`HEADER_SIZE`] bytes are copied even if the header is shorter. Then the last two, which are
/// `num_buffers` in a long header, belong to the frame: the check ignores that field (§5.1.6.2).
#[inline(always)]
#[allow(
    clippy::inline_always,
    reason = "two formats of a ring call it; in each it is the loop's body"
)]
pub(super) fn add_frame<const SIZE: usize>(
    (frames, tally): (&mut Frames, &mut Tally),
    token: Token,
    readable: Pieces<'_>,
    taken: Offloads,
) -> Result<(), Wrong> {
    let size = usize::try_from(total_len(&readable)).unwrap_or(usize::MAX);
    let len = size.checked_sub(SIZE).ok_or(Wrong::Short)?;
    if len < FRAME_SIZE_MIN {
        return Err(Wrong::Short);
    }
    if len > FRAME_SIZE_MAX {
        return Err(Wrong::TooLong);
    }
    let bytes = match readable.first().and_then(GuestSlice::read_array::<HEADER_SIZE>) {
        Some(bytes) => bytes,
        None => {
            let mut bytes = [0; HEADER_SIZE];
            copy_from_slices(&readable, &mut bytes);
            bytes
        }
    };
    let header = RawHeader::read_from_bytes(&bytes).map_err(|_| Wrong::Header)?;
    let header = header.checked(len, taken).map_err(|_| Wrong::Header)?;
    if !frames.push_as(token, &header, readable, SIZE, len) {
        return Err(Wrong::TooLong);
    }
    tally.add(&header, len);
    Ok(())
}
