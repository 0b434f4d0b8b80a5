//! A guest's work with a network: it posts buffers, of which a frame fills one or more, and sends.

use super::guest::Guest;
use crate::support::datagram::{Host, datagram};
use manyring_wire::net::{HEADER_SIZE, VIRTIO_NET_F_MRG_RXBUF};

const RX: usize = 0;
const TX: usize = 1;
/// Frames that the host sends at a time.
const FRAMES: usize = 3;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Net {
    /// A frame fills as many buffers as it needs.
    is_mergeable: bool,
}

impl Net {
    pub(crate) fn of(features: u64) -> Self {
        Self { is_mergeable: features & VIRTIO_NET_F_MRG_RXBUF != 0 }
    }

    /// Buffers are posted, frames are sent in both directions.
    pub(crate) fn work(self, guest: &mut Guest, host: Option<&Host>) {
        guest.take(RX);
        guest.take(TX);
        for _ in 0..8 {
            let buffers: Vec<_> = match self.is_mergeable {
                true => vec![150 + guest.numbers.below(1200)],
                false => vec![HEADER_SIZE as u64, 40_000, 26_000],
            };
            let place = |len: u64| u32::try_from(len).unwrap();
            let places: Vec<_> =
                buffers.into_iter().map(|len| guest.any_place(place(len))).collect();
            guest.add(RX, &[], &places);
        }
        guest.lanes[RX].vring.publish().unwrap();
        for n in 0..guest.numbers.below(5) {
            let len = usize::try_from(guest.numbers.below(1400)).unwrap();
            let frame = [&[0; HEADER_SIZE][..], &datagram(9, &vec![u8::try_from(n).unwrap(); len])];
            let frame = frame.concat();
            let addr = guest.write(&frame);
            guest.add(TX, &[(addr, u32::try_from(frame.len()).unwrap())], &[]);
        }
        guest.lanes[TX].vring.publish().unwrap();
        if let Some(host) = host {
            for n in 0..FRAMES {
                let len = usize::try_from(guest.numbers.below(1400)).unwrap();
                host.send(9, &vec![u8::try_from(n).unwrap() | 0x80; len]);
            }
        }
    }

    /// Waits until frames have come; others are on their way when the rings stop.
    pub(crate) fn settle(self, guest: &mut Guest, host: Option<&Host>) {
        while guest.lanes[TX].in_flight > 0 {
            guest.wait_used(TX);
        }
        if let Some(host) = host {
            // The first of two is longer than the MTU: what was read into the guest's buffers stays
            // in those that the second one does not fill.
            (0..FRAMES).for_each(|_| {
                host.send(9, &[0x66; 1300]);
                host.send(9, &[0x77; 30]);
            });
        }
        if guest.lanes[RX].in_flight > 0 {
            guest.wait_used(RX);
        }
    }
}
