//! Parses a chain of a transmitq into a frame with a checked header (virtio 1.3 §5.1.6.2).

use super::tally::Tally;
use manyring_backend::net::{Frames, Token};
use manyring_memory::{GuestSlice, Pieces, copy_from_slices, total_len};
use manyring_wire::net::{
    FRAME_SIZE_MAX, HASH_HEADER_SIZE, HDR_F_NEEDS_CSUM, HEADER_SIZE, Offloads, PLACE_BYTES,
    RawNetHeader, USUAL_BYTES,
};
use zerocopy::FromBytes;

/// Shortest frame: an Ethernet header.
const FRAME_SIZE_MIN: usize = 14;

/// Why a chain does not hold a frame.
pub(super) enum Wrong {
    Short,
    TooLong,
    Header,
}

/// Copies the header of `SIZE` bytes once, checks it, and adds the frame behind it to the burst,
/// under `token`. `taken`: the offloads that the port accepts. `checks_place`: the port itself
/// checks the offsets of each partial checksum ([`manyring_backend::net::PortTx::checks_place`]).
///
/// [`HEADER_SIZE`] bytes are copied even if the header is shorter. Then the last two bytes, which
/// are `num_buffers` in a long header, belong to the frame: the check ignores that field
/// (§5.1.6.2).
#[inline(always)]
#[allow(
    clippy::inline_always,
    reason = "two formats of a ring call it; in each it is the loop's body"
)]
pub(super) fn add_frame<const SIZE: usize>(
    (frames, tally): (&mut Frames, &mut Tally),
    token: Token,
    readable: Pieces<'_>,
    (taken, checks_place): (Offloads, bool),
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
    let header = RawNetHeader::read_from_bytes(&bytes).map_err(|_| Wrong::Header)?;
    let header = header.checked(len, taken).map_err(|_| Wrong::Header)?;
    let is_looked_at = !checks_place && header.flags & HDR_F_NEEDS_CSUM != 0;
    if is_looked_at && !is_in_place(&header, &readable, SIZE) {
        return Err(Wrong::Header);
    }
    if !frames.push_as(token, &header, readable, SIZE, len) {
        return Err(Wrong::TooLong);
    }
    tally.add(&header, len);
    Ok(())
}

/// Returns true if the partial checksum of the frame behind the first `skip` bytes lies behind all
/// headers by which a switch or the host routes the frame (`wire::net::place`).
///
/// The driver can change the frame after this check. So a port that examines more of the frame than
/// its Ethernet header, or whose host does, must repeat the check on the bytes that it passes on.
///
/// [`is_in_place_by_copy`] is the plain version. Nearly all frames are TCP or UDP directly behind
/// Ethernet and IP, and their first bytes lie in one piece: for these, only the usual offsets are
/// compared. All other frames are copied and parsed.
#[inline]
fn is_in_place(header: &RawNetHeader, readable: &[GuestSlice], skip: usize) -> bool {
    let frame = match readable {
        [first, ..] if first.len() > skip => first.split_at(skip).1,
        [first, second, ..] if first.len() == skip => *second,
        // The header lies in several pieces.
        _ => return is_in_place_by_copy(header, readable, skip),
    };
    let start = frame.read_array::<USUAL_BYTES>();
    start.is_some_and(|start| header.is_in_usual_place(&start))
        || is_in_place_by_copy(header, readable, skip)
}

#[cold]
#[inline(never)]
fn is_in_place_by_copy(header: &RawNetHeader, readable: &[GuestSlice], skip: usize) -> bool {
    let mut bytes = [0; HASH_HEADER_SIZE + PLACE_BYTES];
    let known = copy_from_slices(readable, &mut bytes);
    header.is_in_place(bytes.get(skip..known).unwrap_or_default())
}
