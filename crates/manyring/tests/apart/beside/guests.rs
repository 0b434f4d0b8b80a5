//! Beside guests that abuse their rings: requests that change or are huge, a submission queue that
//! is always full, frames and receive buffers in pieces.

use super::{Beside, connect};
use crate::support::process::TIMEOUT;
use manyring_driver::hostile::{
    CtrlSpoil, GiantRing, HostileNet, HostileRing, Racer, RxSpoil, TxSpoil,
};
use manyring_driver::{BlkDriverOptions, ControlOwner, DriverOp, NetDriver, NetDriverOptions};
use manyring_wire::blk::{
    VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_WRITE_ZEROES, VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_IN,
    VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES,
};
use manyring_wire::net::RawNetHeader;
use std::sync::atomic::{AtomicBool, Ordering};

/// Requests of a giant's ring.
const GIANTS: u16 = 8;
/// MiB of a giant request: the most that an indirect table can say.
const GIANT_MIB: u16 = 1022;
/// Puts a giant request into a slot of the ring.
type Offer = fn(&mut GiantRing, u16);
/// Sectors of the disk in memory.
const SECTORS: u32 = (64 << 20) / 512;

#[test]
fn neighbours_of_headers_that_change_while_they_are_read_wait_for_nothing() {
    let mut beside = Beside::new();
    let mut guest = connect(&beside.bad(), &BlkDriverOptions::default());
    let queue = &mut guest.queues[0];
    let mut ring = HostileRing::new(&guest.arena, queue.vring()).unwrap();
    let (read, write) = ([VIRTIO_BLK_T_IN.into(), 0], [VIRTIO_BLK_T_OUT.into(), u64::MAX - 3]);
    let racer = Racer::start(&guest.arena, ring.header_addr(), read, write).unwrap();
    beside.bear("headers that change", || {
        let before = ring.used_idx();
        ring.offer_valid().unwrap();
        queue.vring().kick().unwrap();
        assert!(crate::support::process::wait_until(|| ring.used_idx() != before));
    });
    drop(racer);
}

#[test]
fn neighbours_of_requests_of_a_gigabyte_wait_for_nothing() {
    let mut beside = Beside::new();
    let bad = beside.bad();
    let options = BlkDriverOptions {
        spare: GiantRing::arena_size(GIANTS),
        features: BlkDriverOptions::default().features
            | VIRTIO_BLK_F_DISCARD
            | VIRTIO_BLK_F_WRITE_ZEROES,
        ..BlkDriverOptions::default()
    };
    let offers: [(&str, Offer); 4] = [
        ("reads", |ring, slot| ring.offer_data(slot, VIRTIO_BLK_T_IN, 0, GIANT_MIB, true).unwrap()),
        ("writes", |ring, slot| {
            ring.offer_data(slot, VIRTIO_BLK_T_OUT, 0, GIANT_MIB, false).unwrap();
        }),
        ("zeroes", |ring, slot| {
            ring.offer_range(slot, VIRTIO_BLK_T_WRITE_ZEROES, 0, SECTORS).unwrap();
        }),
        ("discards", |ring, slot| {
            ring.offer_range(slot, VIRTIO_BLK_T_DISCARD, 0, SECTORS).unwrap();
        }),
    ];
    for (name, offer) in offers {
        // Its guest leaves while they are under way, and comes back.
        beside.bear(&format!("{name} of a gigabyte"), || {
            let mut guest = connect(&bad, &options);
            let queue = &mut guest.queues[0];
            let mut ring = GiantRing::new(&guest.arena, queue.vring(), GIANTS).unwrap();
            (0..GIANTS).for_each(|slot| offer(&mut ring, slot));
            queue.vring().kick().unwrap();
            std::thread::sleep(3 * crate::support::prober::RETRY_DELAY);
        });
    }
}

/// Many queues on files, whose requests are submitted together with those of the neighbours.
#[test]
fn neighbours_of_a_submission_queue_that_is_always_full_wait_for_nothing() {
    const LEN: usize = 4096;
    const SIZE: u64 = 64 << 20;
    let disk = |direct: bool| {
        let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        file.as_file().set_len(SIZE).unwrap();
        let config = format!(
            "[[blk]]\nname = 'file'\nsocket_path = '@/file'\nfile = '{}'\ndirect = {direct}\n\
             num_queues = 8\n",
            file.path().display()
        );
        (file, config)
    };
    for direct in [false, true] {
        let (_file, config) = disk(direct);
        let mut beside = Beside::with(&["file"], &config);
        let options =
            BlkDriverOptions { queues: 8, buffer_size: 4096, ..BlkDriverOptions::default() };
        let mut guest = connect(&beside.daemon.socket_of("file"), &options);
        let mut sector = 0;
        for is_write in [false, true] {
            let name = format!("full rings, direct: {direct}, writes: {is_write}");
            beside.bear(&name, || {
                for queue in &mut guest.queues {
                    while queue.take().is_some() {}
                    loop {
                        sector = (sector + 8) % (SIZE / 512);
                        let op = match is_write {
                            true => DriverOp::WriteAny { sector, len: LEN },
                            false => DriverOp::Read { sector, len: LEN },
                        };
                        if queue.submit(op).unwrap().is_none() {
                            break;
                        }
                    }
                    queue.publish().unwrap();
                }
            });
        }
    }
}

/// A network device that delivers frames as fast as its guest takes them.
const ENDLESS: &str = "
[[net]]
name = 'endless'
socket_path = '@/endless'
null = true
generate = 1500
";

#[test]
fn neighbours_of_receive_buffers_in_pieces_wait_for_nothing() {
    let mut beside = Beside::with(&["endless"], ENDLESS);
    let socket = beside.daemon.socket_of("endless");
    let mergeable = NetDriverOptions::default();
    beside.bear("receive buffers in pieces of one byte", || {
        let mut guest = NetDriver::connect(&socket, &mergeable).unwrap();
        let rx = &mut guest.pairs[0].rx;
        let mut ring = HostileNet::new(&guest.arena, rx.vring()).unwrap();
        let pieces = [1; 200];
        for _ in 0..100 {
            ring.offer(&[], &[], &pieces).unwrap();
            rx.vring().kick().unwrap();
        }
    });
    let mut spoils = RxSpoil::ALL.into_iter().cycle();
    beside.bear("receive buffers that are none", || {
        let mut guest = NetDriver::connect(&socket, &mergeable).unwrap();
        let rx = &mut guest.pairs[0].rx;
        let mut ring = HostileNet::new(&guest.arena, rx.vring()).unwrap();
        ring.receive(spoils.next().unwrap()).unwrap();
        rx.vring().kick().unwrap();
        let _ = rx.vring().wait_err(crate::support::prober::RETRY_DELAY);
    });
    // Each frame fills more than a hundred of them.
    let small =
        NetDriverOptions { mergeable_size: 13, queue_size: 256, ..NetDriverOptions::default() };
    let mut guest = NetDriver::connect(&socket, &small).unwrap();
    let mut frame = Vec::new();
    beside.bear("receive buffers of one byte behind the header", || {
        let rx = &mut guest.pairs[0].rx;
        while rx.recv(&mut frame).unwrap().is_some() {
            frame.clear();
        }
        rx.refill().unwrap();
    });
}

#[test]
fn neighbours_of_frames_that_are_none_and_of_rings_that_are_disabled_wait_for_nothing() {
    let mut beside = Beside::new();
    let socket = beside.daemon.socket_of("net");
    let options = NetDriverOptions { control: ControlOwner::Device, ..NetDriverOptions::default() };
    let (mut frames, mut commands) =
        (TxSpoil::ALL.into_iter().cycle(), CtrlSpoil::ALL.into_iter().cycle());
    beside.bear("frames that are none", || {
        let mut guest = NetDriver::connect(&socket, &options).unwrap();
        let tx = &mut guest.pairs[0].tx;
        let mut ring = HostileNet::new(&guest.arena, tx.vring()).unwrap();
        ring.send(frames.next().unwrap()).unwrap();
        tx.vring().kick().unwrap();
        let _ = tx.vring().wait_err(crate::support::prober::RETRY_DELAY);
    });
    beside.bear("commands that are spoiled", || {
        let mut guest = NetDriver::connect(&socket, &options).unwrap();
        let arena = guest.arena.clone();
        let vring = guest.control().unwrap().vring();
        let mut ring = HostileNet::new(&arena, vring).unwrap();
        ring.command(commands.next().unwrap()).unwrap();
        vring.kick().unwrap();
        let _ = vring.wait_err(crate::support::prober::RETRY_DELAY);
    });
    let large =
        NetDriverOptions { queue_size: 1024, transmit_size: 2048, ..NetDriverOptions::default() };
    let mut guest = NetDriver::connect(&socket, &large).unwrap();
    let (frame, is_full) = (vec![0x5a; 1500], AtomicBool::new(false));
    beside.bear("a full ring that is disabled and enabled", || {
        let pair = &mut guest.pairs[0];
        let index = pair.tx.vring().index();
        guest.front.set_vring_enable(index, false).unwrap();
        while pair.tx.send(&RawNetHeader::default(), &frame).unwrap() {
            is_full.store(true, Ordering::Relaxed);
        }
        pair.tx.publish(0).unwrap();
        guest.front.set_vring_enable(index, true).unwrap();
        pair.tx.drain(TIMEOUT).unwrap();
    });
    assert!(is_full.load(Ordering::Relaxed));
}
