//! Two guests on a switch, for the bench: frames that a turn of the one's transmitq and a turn of
//! the other's receiveq carry.

use crate::guest::{RING_SIZE, guest};
use crate::{BLOCK, BUFFER, DATA, HEADER, activation, doorbell};
use manyring_backend::net::Port;
use manyring_backend::net::switch::{Clock, PortOptions, Switch, SwitchOptions, SwitchPort};
use manyring_device::bench::SoloRunning;
use manyring_engine::{Activation, Event};
use manyring_memory::Mapping;
use manyring_queue::DriverQueue;
use manyring_wire::net::Offloads;
use rustix::fd::OwnedFd;
use std::sync::Arc;
use tokio::sync::mpsc;

/// The link addresses of the guests.
const MACS: [[u8; 6]; 2] = [[2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]];

/// A guest's half of a queue, and the device's.
struct Side {
    driver: DriverQueue,
    running: SoloRunning,
    mapping: Arc<Mapping>,
    _kick: OwnedFd,
    _events: mpsc::Receiver<Event>,
}

impl Side {
    fn new(start: impl FnOnce(Activation) -> SoloRunning) -> Self {
        let (mapping, memory, config) = guest();
        let driver = DriverQueue::new(config, &memory).unwrap();
        let kick = doorbell();
        let (activation, events) = activation(config, memory, &kick);
        Self { driver, running: start(activation), mapping, _kick: kick, _events: events }
    }
}

/// The switch, the transmitq of one guest and the receiveq of the other.
pub(crate) struct Cable {
    from: Side,
    to: Side,
    len: u32,
    _ports: [SwitchPort; 2],
}

impl Cable {
    /// For frames of `len` bytes.
    pub(crate) fn new(len: u32) -> Self {
        let clock = Clock::new(|| 1);
        let switch = Switch::new(SwitchOptions { name: "solo".to_owned(), age: 300, clock });
        let ports = ["from", "to"].map(|name| switch.port(PortOptions::new(name, 1)).unwrap());
        let all = Offloads { csum: true, tso4: true, tso6: true, ecn: true, ..Default::default() };
        let to = Side::new(|activation| SoloRunning::rx(activation, &ports[1]).unwrap());
        for port in &ports {
            port.set_offloads(all).unwrap();
            port.set_attached(0, true).unwrap();
        }
        // The receiver says where it is.
        ports[1].transmit(&[&MACS[0][..], &MACS[1], &[0x88, 0xb5], &[0; 46]].concat()).unwrap();
        let from = Side::new(|activation| SoloRunning::tx(activation, &ports[0]).unwrap());
        let frame = [&MACS[1][..], &MACS[0], &[8, 0]].concat();
        for n in 0..u64::from(RING_SIZE) {
            let at = usize::try_from(DATA + n * u64::from(BLOCK)).unwrap() + HEADER as usize;
            from.mapping.slice(at, frame.len()).unwrap().write_from(&frame);
        }
        Self { from, to, len, _ports: ports }
    }

    /// The device's part: what is counted. Frames that were lent come back to their sender by its
    /// next turn, which is counted with them.
    #[inline(never)]
    fn serve(&mut self) {
        self.take_turns();
    }

    /// Takes turns as the counted function does. The count leaves it out, since its name differs.
    #[inline(never)]
    fn warm_up(&mut self) {
        std::hint::black_box(&mut *self).take_turns();
    }

    #[inline(always)]
    fn take_turns(&mut self) {
        assert!(self.from.running.turn() && self.to.running.turn());
        if self.len as usize > 116 {
            assert!(self.from.running.turn(), "lent frames came back");
        }
    }

    /// One round of `batch` frames.
    pub(crate) fn round(&mut self, batch: usize, is_counted: bool) {
        for n in 0..batch as u64 {
            let at = DATA + n * u64::from(BLOCK);
            self.from.driver.add(&[(at, HEADER + self.len)], &[]).expect("the ring is full");
            self.to.driver.add(&[], &[(at, BUFFER)]).expect("the ring is full");
        }
        for side in [&mut self.from, &mut self.to] {
            side.driver.enable_notifications();
            side.driver.publish();
        }
        if is_counted {
            self.serve()
        } else {
            self.warm_up()
        }
        for side in [&mut self.from, &mut self.to] {
            let used = std::iter::from_fn(|| side.driver.take_used()).count();
            assert_eq!(used, batch, "not every chain was used");
        }
    }
}
