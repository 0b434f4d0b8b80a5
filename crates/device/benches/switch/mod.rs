//! Guests on a switch, for the bench: frames that a turn of the one's transmitq and a turn of the
//! other's receiveq carry, alone or beside a third guest.

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
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::mpsc;

/// The link addresses of the guests.
const MACS: [[u8; 6]; 3] = [[2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2], [2, 0, 0, 0, 0, 3]];
/// Rounds, of a millisecond each, after which a guest that is killed again and again is killed: to
/// connect again takes longer.
const LIFE: u64 = 128;

/// A third guest, to whom the sender sends every other frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Third {
    /// It takes what comes.
    Serves,
    /// It takes nothing.
    Stalls,
    /// The descriptors of its ring lead out of its memory, so that its queue is given up.
    Lies,
    /// It takes nothing, and is killed and there again every [`LIFE`] rounds.
    IsKilled,
}

/// A guest's half of a queue, and the device's.
struct Side {
    driver: DriverQueue,
    running: SoloRunning,
    mapping: Arc<Mapping>,
    /// How many chains were made available, which chooses their buffers.
    made: u64,
    _kick: OwnedFd,
    _events: mpsc::Receiver<Event>,
}

impl Side {
    fn new(start: impl FnOnce(Activation) -> SoloRunning) -> Self {
        let (mapping, memory, config) = guest();
        let driver = DriverQueue::new(config, &memory).unwrap();
        let kick = doorbell();
        let (activation, events) = activation(config, memory, &kick);
        let running = start(activation);
        Self { driver, running, mapping, made: 0, _kick: kick, _events: events }
    }

    /// The buffer of the next chain.
    fn next_buffer(&mut self) -> u64 {
        let at = DATA + self.made % u64::from(RING_SIZE) * u64::from(BLOCK);
        self.made += 1;
        at
    }

    /// A frame of `len` bytes to this address.
    fn send(&mut self, to: [u8; 6], len: u32) {
        let at = self.next_buffer();
        let head = [&to[..], &MACS[0], &[8, 0]].concat();
        let place = usize::try_from(at).unwrap() + HEADER as usize;
        self.mapping.slice(place, head.len()).unwrap().write_from(&head);
        self.driver.add(&[(at, HEADER + len)], &[]).expect("the ring is full");
    }

    /// Posts `count` buffers for frames.
    fn post(&mut self, count: usize) {
        for _ in 0..count {
            let at = self.next_buffer();
            self.driver.add(&[], &[(at, BUFFER)]).expect("the ring is full");
        }
        self.publish();
    }

    fn publish(&mut self) {
        self.driver.enable_notifications();
        self.driver.publish();
    }

    /// How many chains have come back since the last time.
    fn take_used(&mut self) -> usize {
        std::iter::from_fn(|| self.driver.take_used()).count()
    }
}

/// The switch, the transmitq of one guest and the receiveq of the other.
pub(crate) struct Cable {
    from: Side,
    to: Side,
    third: Option<(Third, Side)>,
    len: u32,
    round: u64,
    /// Buffers of the receiver that are left of the last round.
    left: usize,
    /// The switch's time in milliseconds: a round takes one.
    ms: Arc<AtomicU64>,
    ports: [SwitchPort; 3],
}

impl Cable {
    /// For frames of `len` bytes.
    pub(crate) fn new(len: u32, third: Option<Third>) -> Self {
        let ms = Arc::new(AtomicU64::new(1));
        let time = ms.clone();
        let clock = Clock::new(move || time.load(Ordering::Relaxed));
        let switch = Switch::new(SwitchOptions {
            name: "solo".to_owned(),
            age: 300,
            group_fwd_mask: 0,
            clock,
        });
        let ports = ["from", "to", "third"].map(|name| {
            // With the usual limit, frames flooded while the third guest is away would be dropped.
            let options = PortOptions { floods_max: 1_000_000, ..PortOptions::new(name, 1) };
            switch.port(options).unwrap()
        });
        // The receivers say where they are, before anybody has a queue that hears it.
        for (port, mac) in ports.iter().zip(&MACS).skip(1) {
            port.transmit(&[&MACS[0][..], mac, &[0x88, 0xb5], &[0; 46]].concat()).unwrap();
        }
        let all = Offloads { csum: true, tso4: true, tso6: true, ecn: true, ..Default::default() };
        let to = Side::new(|activation| SoloRunning::rx(activation, &ports[1]).unwrap());
        let third = third.map(|third| (third, Self::third(third, &ports[2])));
        for port in &ports {
            port.set_offloads(all).unwrap();
            port.set_attached(0, true).unwrap();
        }
        let from = Side::new(|activation| SoloRunning::tx(activation, &ports[0]).unwrap());
        Self { from, to, third, len, round: 0, left: 0, ms, ports }
    }

    /// The receiveq of a third guest.
    fn third(third: Third, port: &SwitchPort) -> Side {
        let mut side = Side::new(|activation| SoloRunning::rx(activation, port).unwrap());
        if third == Third::Lies {
            side.driver.add(&[], &[(1 << 50, BUFFER)]).unwrap();
            side.publish();
            side.running.turn();
        }
        side
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
            let came_back = self.from.running.turn();
            assert!(came_back || self.third.is_some(), "lent frames came back");
        }
    }

    /// One round of `batch` frames, and `batch` more to the third guest, if there is one.
    pub(crate) fn round(&mut self, batch: usize, is_counted: bool) {
        for _ in 0..batch {
            self.from.send(MACS[1], self.len);
            if self.third.is_some() {
                self.from.send(MACS[2], self.len);
            }
        }
        self.from.publish();
        // Until a bad receiver is found out, it may cost the others frames.
        self.to.post(batch - self.left);
        if is_counted {
            self.serve()
        } else {
            self.warm_up()
        }
        let sent = self.from.take_used();
        self.left = batch - self.to.take_used();
        assert!(self.left == 0 || !is_counted, "not every frame came");
        if self.third.is_none() {
            assert_eq!(sent, batch, "not every chain was used");
        }
        self.end_round(batch);
    }

    /// Ends a round with the turns of the third guest.
    fn end_round(&mut self, batch: usize) {
        let Some((third, side)) = &mut self.third else { return };
        self.round += 1;
        self.ms.fetch_add(1, Ordering::Relaxed);
        match third {
            Third::Serves => {
                side.post(batch);
                assert!(side.running.turn());
                assert_eq!(side.take_used(), batch, "not every frame came to the third guest");
            }
            Third::IsKilled if self.round.is_multiple_of(LIFE) => {
                *side = Self::third(*third, &self.ports[2]);
            }
            Third::IsKilled | Third::Stalls | Third::Lies => {}
        }
    }
}
