//! The guests that abuse their daemon: a flood of kicks, one of messages, and requests of 1 GiB.

use super::{Deed, Guest, GuestArgs, Watch, check, failed};
use crate::load::LoadError;
use manyring_driver::hostile::GiantRing;
use manyring_driver::wire::blk::{VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES};
use manyring_driver::wire::vhost_user::{PROTOCOL_F_CONFIG, PROTOCOL_F_MQ};
use manyring_driver::{
    BlkDriver, BlkDriverOptions, BlkDriverQueue, DriverError, DriverOp, FrontEnd,
};
use rustix::io::Errno;
use std::time::Duration;

/// Number of queues of the guest that floods kicks.
const KICKED_QUEUES: u16 = 8;
/// Kicks per request of a queue.
const KICKS: u64 = 64;

/// Kicks all its queues without end. A queue has at most one request, so most kicks announce
/// nothing.
pub(super) struct Kicker {
    driver: BlkDriver,
}

impl Kicker {
    pub(super) fn connect(args: &GuestArgs) -> Result<Self, LoadError> {
        let options = BlkDriverOptions { queues: KICKED_QUEUES, ..BlkDriverOptions::default() };
        Ok(Self { driver: BlkDriver::connect(&args.socket, &options).map_err(failed)? })
    }
}

impl Guest for Kicker {
    fn turn(&mut self, watch: &mut Watch) -> Result<(), LoadError> {
        for queue in &mut self.driver.queues {
            while queue.take().is_some() {}
            if queue.in_flight() == 0 {
                queue.submit(DriverOp::Read { sector: 8, len: 512 }).map_err(failed)?;
                queue.publish().map_err(failed)?;
            }
            for _ in 0..KICKS {
                queue.vring().kick().map_err(failed)?;
            }
            watch.add(KICKS);
        }
        Ok(())
    }
}

/// Queues of the guest whose front-end floods messages: the messages are about the first one, a
/// request is in flight on the second one.
const TOLD_QUEUES: u16 = 2;
/// Messages that the daemon reads at once; of those behind them it reads one in a millisecond
/// (`Pace`, in the transport crate).
const AT_ONCE: u32 = 8192;
/// Messages between two looks at the request.
const MESSAGES: u32 = 64;

/// Disables a queue and enables it again for ever. Each of these messages is an order for the
/// worker, and the front-end waits for none to be obeyed. The guest has one request in flight all
/// the time, on another queue.
pub(super) struct Messenger {
    front: FrontEnd,
    asked: BlkDriverQueue,
    /// Whether the next message enables or disables the first queue.
    enables: bool,
    /// True: no message is sent before the measurement begins.
    is_late: bool,
}

impl Messenger {
    /// Connects. A flood without end sends what the daemon reads at once before it is measured, so
    /// that it is measured at its pace.
    pub(super) fn connect(args: &GuestArgs) -> Result<Self, LoadError> {
        // Without acknowledgements (REPLY_ACK) the next message need not wait for the last one.
        let protocol_features = PROTOCOL_F_MQ | PROTOCOL_F_CONFIG;
        let options = BlkDriverOptions {
            queues: TOLD_QUEUES,
            protocol_features,
            ..BlkDriverOptions::default()
        };
        let BlkDriver { front, mut queues, .. } =
            BlkDriver::connect(&args.socket, &options).map_err(failed)?;
        let asked = queues.pop().ok_or(LoadError::Options("a disk without a queue"))?;
        let is_late = args.deed == Deed::FirstMessages;
        let mut messenger = Self { front, asked, enables: false, is_late };
        if !is_late {
            (0..AT_ONCE).try_for_each(|_| messenger.send()).map_err(failed)?;
        }
        // From now on the front-end sees to its request also while the socket is full.
        messenger.front.stream().set_nonblocking(true).map_err(|e| failed(e.into()))?;
        Ok(messenger)
    }

    fn send(&mut self) -> Result<(), DriverError> {
        self.front.set_vring_enable(0, self.enables)?;
        self.enables = !self.enables;
        Ok(())
    }
}

impl Guest for Messenger {
    fn turn(&mut self, watch: &mut Watch) -> Result<(), LoadError> {
        while let Some(done) = self.asked.take() {
            check(done)?;
        }
        if self.asked.in_flight() == 0 {
            self.asked.submit(DriverOp::Read { sector: 8, len: 512 }).map_err(failed)?;
            self.asked.publish().map_err(failed)?;
        }
        if self.is_late && watch.began.is_none() {
            std::thread::sleep(Duration::from_millis(1));
            return Ok(());
        }
        for _ in 0..MESSAGES {
            match self.send() {
                Ok(()) => watch.add(1),
                Err(DriverError::System(Errno::AGAIN)) => {
                    // A full socket holds some hundred messages, so it is not empty after this.
                    std::thread::sleep(Duration::from_millis(1));
                    break;
                }
                Err(error) => return Err(failed(error)),
            }
        }
        Ok(())
    }
}

/// Number of 1 GiB requests in flight.
const GIANTS: u16 = 8;
/// Data of a request that reads or writes, in MiB: the most that an indirect table names.
const GIANT_MIB: u16 = 1022;
/// Sectors of a request that writes zeroes: 1 GiB.
const GIANT_SECTORS: u32 = 1 << 21;

/// Reads, writes and zeroes the first GiB of its disk, all of it with each request.
pub(super) struct Giant {
    driver: BlkDriver,
    ring: GiantRing,
    offered: u16,
    seen: u16,
}

impl Giant {
    pub(super) fn connect(args: &GuestArgs) -> Result<Self, LoadError> {
        let spare = GiantRing::arena_size(GIANTS);
        let options = BlkDriverOptions { spare, ..BlkDriverOptions::default() };
        let mut driver = BlkDriver::connect(&args.socket, &options).map_err(failed)?;
        let queue =
            driver.queues.first_mut().ok_or(LoadError::Options("a disk without a queue"))?;
        let ring = GiantRing::new(&driver.arena, queue.vring(), GIANTS).map_err(failed)?;
        let seen = ring.ring.used_idx();
        Ok(Self { driver, ring, offered: seen, seen })
    }

    /// Offers [`GIANTS`] requests, and kicks.
    fn offer(&mut self) -> Result<(), DriverError> {
        for slot in 0..GIANTS {
            match slot % 3 {
                0 => self.ring.offer_range(slot, VIRTIO_BLK_T_WRITE_ZEROES, 0, GIANT_SECTORS)?,
                1 => self.ring.offer_data(slot, VIRTIO_BLK_T_OUT, 0, GIANT_MIB, false)?,
                _ => self.ring.offer_data(slot, VIRTIO_BLK_T_IN, 0, GIANT_MIB, true)?,
            }
        }
        self.offered = self.offered.wrapping_add(GIANTS);
        self.driver.queues.iter_mut().try_for_each(|queue| queue.vring().kick())
    }
}

impl Guest for Giant {
    fn turn(&mut self, watch: &mut Watch) -> Result<(), LoadError> {
        if self.seen == self.offered {
            self.offer().map_err(failed)?;
        }
        std::thread::sleep(Duration::from_millis(1));
        let used = self.ring.ring.used_idx();
        watch.add(used.wrapping_sub(self.seen).into());
        self.seen = used;
        Ok(())
    }
}
