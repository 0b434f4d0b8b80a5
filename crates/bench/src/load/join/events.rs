//! `JoinEvents`: all that a join sleeps on, the taps and calls of its queue pairs, in one epoll
//! instance. So a sleep costs only as much as the pairs that have events.

use super::Lane;
use manyring_driver::DriverError;
use rustix::buffer::spare_capacity;
use rustix::event::{Timespec, epoll};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use std::time::Duration;

/// Token of the standard input, which ends when nobody needs the join any more.
const STDIN: u64 = u64::MAX;
/// Low bits of a token: the kind of the event. The higher bits are the number of the pair.
const TAP: u64 = 0;
const RX_CALL: u64 = 1;
const TX_CALL: u64 = 2;
const KIND_BITS: u32 = 2;

/// Reports taps that have frames, calls, and the end of the standard input.
pub(super) struct JoinEvents {
    epoll: OwnedFd,
    reported: Vec<epoll::Event>,
    is_open: bool,
}

impl JoinEvents {
    /// Watches the taps and calls of all pairs, and the standard input.
    pub(super) fn new(lanes: &mut [Lane<'_>]) -> Result<Self, Errno> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let watch = |fd: &dyn AsFd, data: u64| {
            // Edge-triggered: an event is reported once, so its pair goes on until nothing is left.
            let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
            epoll::add(&epoll, fd.as_fd(), epoll::EventData::new_u64(data), flags)
        };
        for (at, lane) in (0u64..).zip(&mut *lanes) {
            let place = at << KIND_BITS;
            watch(&lane.tap, place | TAP)?;
            watch(&lane.pair.rx.vring().call_fd(), place | RX_CALL)?;
            watch(&lane.pair.tx.vring().call_fd(), place | TX_CALL)?;
        }
        match watch(&std::io::stdin(), STDIN) {
            // The standard input is a file, on which epoll cannot wait.
            Ok(()) | Err(Errno::PERM) => {}
            Err(errno) => return Err(errno),
        }
        let reported = Vec::with_capacity(3 * lanes.len() + 1);
        Ok(Self { epoll, reported, is_open: true })
    }

    /// False: the standard input has ended.
    pub(super) fn is_open(&self) -> bool {
        self.is_open
    }

    /// Notes in the pairs which events have come by now. Does not wait.
    pub(super) fn look(&mut self, lanes: &mut [Lane<'_>]) -> Result<(), DriverError> {
        self.wait(lanes, Duration::ZERO)
    }

    /// Sleeps until an event comes, for less than a second, and notes it in its pair.
    pub(super) fn wait(
        &mut self,
        lanes: &mut [Lane<'_>],
        longest: Duration,
    ) -> Result<(), DriverError> {
        let timeout = Timespec { tv_sec: 0, tv_nsec: longest.subsec_nanos().into() };
        self.reported.clear();
        match epoll::wait(&self.epoll, spare_capacity(&mut self.reported), Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        for event in &self.reported {
            let data = event.data.u64();
            self.is_open &= data != STDIN;
            let at = usize::try_from(data >> KIND_BITS).unwrap_or(usize::MAX);
            let Some(lane) = lanes.get_mut(at) else { continue };
            match data & ((1 << KIND_BITS) - 1) {
                TAP => lane.tap_is_ready = true,
                RX_CALL => _ = lane.pair.rx.vring().clear_call()?,
                _ => _ = lane.pair.tx.vring().clear_call()?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use manyring_driver::{Arena, NetDriverOptions, NetDriverRx, NetDriverTx, NetPair};
    use manyring_queue::RingFeatures;
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::fd::BorrowedFd;
    use std::sync::Arc;

    fn lane<'a>(tap: BorrowedFd<'a>, index: u16) -> Lane<'a> {
        let options = NetDriverOptions { queue_size: 4, ..NetDriverOptions::default() };
        let size = NetDriverRx::arena_size(&options) + NetDriverTx::arena_size(&options);
        let arena = Arc::new(Arena::new(size).unwrap());
        let rx = NetDriverRx::new(&arena, index, options.features, &options).unwrap();
        let ring = RingFeatures::from_bits(options.features);
        let tx = NetDriverTx::new(&arena, index, ring, &options).unwrap();
        let pair = NetPair { rx, tx };
        Lane { pair, tap, tap_is_ready: false, start: None, is_suppressed: true, lost: 0 }
    }

    #[test]
    fn a_pair_hears_of_its_own_tap_and_calls_once_and_of_no_others() {
        // Something that can be waited for as a tap can.
        let taps = [(); 2].map(|()| eventfd(0, EventfdFlags::NONBLOCK).unwrap());
        let ring = |fd: BorrowedFd<'_>| {
            rustix::io::write(fd, &1u64.to_ne_bytes()).unwrap();
        };
        let mut lanes = [lane(taps[0].as_fd(), 0), lane(taps[1].as_fd(), 1)];
        let mut events = JoinEvents::new(&mut lanes).unwrap();
        let ready = |lanes: &[Lane<'_>; 2]| lanes.each_ref().map(|lane| lane.tap_is_ready);
        events.look(&mut lanes).unwrap();
        assert_eq!(ready(&lanes), [false; 2]);
        ring(taps[1].as_fd());
        ring(lanes[0].pair.rx.vring().call_fd());
        ring(lanes[1].pair.tx.vring().call_fd());
        events.look(&mut lanes).unwrap();
        assert_eq!(ready(&lanes), [false, true]);
        let calls = |lanes: &[Lane<'_>; 2]| {
            lanes
                .each_ref()
                .map(|lane| [lane.pair.rx.counters().calls, lane.pair.tx.counters().calls])
        };
        assert_eq!(calls(&lanes), [[1, 0], [0, 1]]);
        // Nothing has happened since, although nobody has read the tap.
        lanes[1].tap_is_ready = false;
        events.look(&mut lanes).unwrap();
        assert_eq!((ready(&lanes), calls(&lanes)), ([false; 2], [[1, 0], [0, 1]]));
    }
}
