//! Tricks with rings: what is spoiled, too much, or too large.

use super::{Driver, Hostile, Played};
use manyring_driver::hostile::{
    CtrlSpoil, GiantRing, HostileNet, HostileRing, Racer, RxSpoil, Spoil, TxSpoil,
};
use manyring_driver::wire::blk::{
    VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES,
};
use manyring_driver::wire::net::RawNetHeader;
use manyring_driver::{BlkDriverOptions, DriverOp};
use std::time::Duration;

/// Requests of a giant's ring in flight.
const DEPTH: u16 = 8;
/// Bytes of a hostile guest's disk, a sparse file.
pub(in crate::soak) const DISK_SIZE: u64 = 1 << 30;

/// Kicks without end, with and without anything to do.
pub(super) fn kick_flood(hostile: &mut Hostile<'_>) -> Played {
    let mut driver = hostile.driver()?;
    while !hostile.is_over() {
        let vring = match &mut driver {
            Driver::Blk(driver) => driver.queues[0].vring(),
            Driver::Net(driver) => driver.pairs[0].rx.vring(),
        };
        for _ in 0..1000 {
            vring.kick()?;
        }
    }
    Ok(())
}

/// A session for each way to spoil a request; a broken ring takes no more.
pub(super) fn spoiled_requests(hostile: &mut Hostile<'_>) -> Played {
    while !hostile.is_over() {
        let mut driver = hostile.blk(BlkDriverOptions::default())?;
        let queue = &mut driver.queues[0];
        let mut ring = HostileRing::new(&driver.arena, queue.vring())?;
        for _ in 0..1 + hostile.random.below(4) {
            ring.offer(hostile.random.pick(&Spoil::ALL))?;
            queue.vring().kick()?;
        }
        hostile.wait(Duration::from_millis(10));
    }
    Ok(())
}

/// A request whose header changes while the device reads it.
pub(super) fn racing_header(hostile: &mut Hostile<'_>) -> Played {
    let mut driver = hostile.blk(BlkDriverOptions::default())?;
    let queue = &mut driver.queues[0];
    let mut ring = HostileRing::new(&driver.arena, queue.vring())?;
    let (read, write) = ([VIRTIO_BLK_T_IN.into(), 0], [VIRTIO_BLK_T_OUT.into(), u64::MAX - 3]);
    let _racer = Racer::start(&driver.arena, ring.header_addr(), read, write)?;
    while !hostile.is_over() {
        let before = ring.used_idx();
        ring.offer_valid()?;
        queue.vring().kick()?;
        while ring.used_idx() == before && !hostile.is_over() {
            std::thread::yield_now();
        }
    }
    Ok(())
}

/// Reads of 1 GiB, eight at once.
pub(super) fn giant_reads(hostile: &mut Hostile<'_>) -> Played {
    giants(hostile, |ring, slot| ring.offer_data(slot, VIRTIO_BLK_T_IN, 0, 1022, true))
}

/// Zeroes over the whole disk.
pub(super) fn giant_zeroes(hostile: &mut Hostile<'_>) -> Played {
    giants(hostile, |ring, slot| ring.offer_range(slot, VIRTIO_BLK_T_WRITE_ZEROES, 0, SECTORS))
}

/// Discards of the whole disk.
pub(super) fn giant_discards(hostile: &mut Hostile<'_>) -> Played {
    giants(hostile, |ring, slot| ring.offer_range(slot, VIRTIO_BLK_T_DISCARD, 0, SECTORS))
}

#[allow(clippy::cast_possible_truncation, reason = "2^21 sectors")]
const SECTORS: u32 = (DISK_SIZE / 512) as u32;

fn giants(hostile: &mut Hostile<'_>, offer: fn(&mut GiantRing, u16) -> Played) -> Played {
    let spare = GiantRing::arena_size(DEPTH);
    let mut driver = hostile.blk(BlkDriverOptions { spare, ..BlkDriverOptions::default() })?;
    let queue = &mut driver.queues[0];
    let mut ring = GiantRing::new(&driver.arena, queue.vring(), DEPTH)?;
    let mut offered = ring.ring.used_idx();
    while !hostile.is_over() {
        for slot in 0..DEPTH {
            offer(&mut ring, slot)?;
            offered = offered.wrapping_add(1);
        }
        queue.vring().kick()?;
        while ring.ring.used_idx() != offered && !hostile.is_over() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    Ok(())
}

/// Small requests, the ring always full.
pub(super) fn request_flood(hostile: &mut Hostile<'_>) -> Played {
    let mut driver = hostile.blk(BlkDriverOptions { queues: 4, ..BlkDriverOptions::default() })?;
    while !hostile.is_over() {
        for queue in &mut driver.queues {
            while queue.take().is_some() {}
            while queue.submit(DriverOp::Read { sector: 8, len: 512 })?.is_some() {}
            queue.publish()?;
        }
    }
    Ok(())
}

/// Frames, receive buffers and commands that are none.
pub(super) fn spoiled_frames(hostile: &mut Hostile<'_>) -> Played {
    while !hostile.is_over() {
        let mut driver = hostile.net()?;
        let pair = &mut driver.pairs[0];
        let vring = if hostile.random.below(3) == 0 { pair.rx.vring() } else { pair.tx.vring() };
        let mut ring = HostileNet::new(&driver.arena, vring)?;
        for _ in 0..1 + hostile.random.below(8) {
            match hostile.random.below(4) {
                0 => ring.receive(hostile.random.pick(&RxSpoil::ALL))?,
                1 => ring.command(hostile.random.pick(&CtrlSpoil::ALL))?,
                _ => ring.send(hostile.random.pick(&TxSpoil::ALL))?,
            }
            vring.kick()?;
            hostile.wait(Duration::from_millis(2));
        }
    }
    Ok(())
}

/// Frames as fast as the ring takes them, and no receive buffer ever given back.
pub(super) fn frame_flood(hostile: &mut Hostile<'_>) -> Played {
    let mut driver = hostile.net()?;
    let tx = &mut driver.pairs[0].tx;
    while !hostile.is_over() {
        while tx.send(&RawNetHeader::default(), &[255; 1400])? {}
        tx.publish(0)?;
    }
    Ok(())
}
