//! How a bad port of a switch disturbs its neighbours, and three pairs of guests who talk by that
//! switch. The port is a receiver that takes nothing, one whose rings lie, one that is killed again
//! and again, or a sender whose rings lie. All of them have one worker.

use crate::support::prober::{NEIGHBOURS, Prober, SOCKETS, check};
use crate::support::process::{Daemon, wait_until};
use manyring_driver::hostile::{HostileRing, Spoil};
use manyring_driver::{NetDriver, NetDriverOptions};
use manyring_wire::net::RawNetHeader;
use std::sync::atomic::Ordering;

/// Guests who talk: number 1 to 2, 3 to 4, 5 to 6.
const TALKERS: u8 = 6;
const BAD: u8 = 7;
/// Frames of a talker in a round. They fit the ring of its partner.
const ROUND: u64 = 32;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Manner {
    Stalls,
    LiesAsReceiver,
    LiesAsSender,
    IsKilled,
}

fn name(n: u8) -> String {
    format!("port{n}")
}

fn mac(n: u8) -> [u8; 6] {
    [2, 0, 0, 0, 0, n]
}

fn serve() -> Daemon {
    let mut config =
        "[daemon]\ncontrol = '@/control'\nworkers = 1\ndomains = 'one'\n[[switch]]\nname = 's0'\n"
            .to_owned();
    let names: Vec<_> = (1..=BAD).map(name).collect();
    for name in &names {
        // Who is killed says again and again where it is.
        config += &format!(
            "[[net]]\nname = '{name}'\nsocket_path = '@/{name}'\nswitch = 's0'\n\
             floods_max = 1000000\nhandshake_timeout = 1\n"
        );
    }
    let names: Vec<_> = names.iter().map(String::as_str).collect();
    Daemon::run(&format!("{config}{NEIGHBOURS}"), &[&SOCKETS[..], &names].concat())
}

struct Port {
    n: u8,
    driver: NetDriver,
}

impl Port {
    /// Connects, and says where it is.
    fn connect(daemon: &Daemon, n: u8) -> Self {
        let socket = daemon.socket_of(&name(n));
        let driver = NetDriver::connect(&socket, &NetDriverOptions::default()).unwrap();
        let mut port = Self { n, driver };
        port.send([0xff; 6], 1);
        port
    }

    /// Sends frames of several lengths, as far as buffers are free. Returns how many.
    fn send(&mut self, to: [u8; 6], count: u64) -> u64 {
        let tx = &mut self.driver.pairs[0].tx;
        tx.reclaim();
        let mut sent = 0;
        for number in 0..count {
            let mut frame = [&to[..], &mac(self.n), &[0x88, 0xb5]].concat();
            frame.resize(if number % 2 == 0 { 60 } else { 1500 }, self.n);
            if !tx.send(&RawNetHeader::default(), &frame).unwrap() {
                break;
            }
            sent += 1;
        }
        tx.publish(0).unwrap();
        sent
    }

    /// How many frames of `from` have come.
    fn hear(&mut self, from: u8) -> u64 {
        let (rx, mut frame, mut heard) = (&mut self.driver.pairs[0].rx, Vec::new(), 0);
        while rx.recv(&mut frame).unwrap().is_some() {
            heard += u64::from(frame[6..12] == mac(from));
            frame.clear();
        }
        rx.refill().unwrap();
        heard
    }

    /// Does the worst to one of its rings.
    fn lie(&mut self, as_receiver: bool, spoil: Spoil) {
        let NetDriver { arena, pairs, .. } = &mut self.driver;
        let vring = if as_receiver { pairs[0].rx.vring() } else { pairs[0].tx.vring() };
        let mut ring = HostileRing::new(arena, vring).unwrap();
        ring.offer(spoil).unwrap();
        let _ = vring.kick();
    }
}

/// Frames that a pair has sent, and those that have come.
#[derive(Clone, Copy, Debug, Default)]
struct Talk {
    sent: u64,
    heard: u64,
}

/// Sends `count` frames in each pair, and counts those that have come.
fn talk(talkers: &mut [Port], talks: &mut [Talk; 3], count: u64) {
    for (pair, talk) in talkers.chunks_mut(2).zip(talks) {
        let [from, to] = pair else { continue };
        talk.sent += from.send(mac(to.n), count);
        talk.heard += to.hear(from.n);
        from.hear(to.n);
    }
}

#[test]
fn neighbours_of_a_bad_port_of_a_switch_wait_for_nothing_and_others_go_on_talking() {
    let daemon = serve();
    let mut prober = Prober::at(&daemon, daemon.folder());
    let mut talkers: Vec<_> = (1..=TALKERS).map(|n| Port::connect(&daemon, n)).collect();
    for manner in [Manner::Stalls, Manner::LiesAsReceiver, Manner::LiesAsSender, Manner::IsKilled] {
        let mut bad = Some(Port::connect(&daemon, BAD));
        let mut spoils = Spoil::ALL.into_iter().cycle();
        let (mut talks, mut rounds) = ([Talk::default(); 3], 0);
        let stalls = prober.beside(|is_over| {
            while !is_over.load(Ordering::Relaxed) {
                // All senders have the bad one as a receiver too: their buffers and its lanes.
                talkers.iter_mut().step_by(2).for_each(|from| {
                    from.send(mac(BAD), ROUND);
                });
                talk(&mut talkers, &mut talks, ROUND);
                rounds += 1;
                let spoil = spoils.next().unwrap();
                match (manner, &mut bad) {
                    (Manner::LiesAsReceiver, Some(port)) => port.lie(true, spoil),
                    (Manner::LiesAsSender, Some(port)) => port.lie(false, spoil),
                    _ => {}
                }
                if manner != Manner::Stalls {
                    drop(bad.take());
                    bad = Some(Port::connect(&daemon, BAD));
                }
            }
        });
        check(&format!("a port of a switch that is bad: {manner:?}"), stalls);
        // Alone, each pair hears all that it says. A bad one that has all credit of a sender for
        // its first 20 ms costs the sender's other receivers at most three frames of a hundred.
        let is_heard = |talk: &Talk| talk.heard * 100 >= talk.sent * 97;
        let are_heard = wait_until(|| {
            talk(&mut talkers, &mut talks, 0);
            talks.iter().all(is_heard)
        });
        assert!(rounds > 0 && are_heard, "{manner:?}: {talks:?} in {rounds} rounds");
        println!("{manner:?}: {talks:?} in {rounds} rounds");
        // And they hear each other still, whatever lies in the bad one's lanes.
        let mut after = [Talk::default(); 3];
        let is_heard = wait_until(|| {
            talk(&mut talkers, &mut after, ROUND);
            after.iter().all(|talk| talk.heard >= 10 * ROUND)
        });
        assert!(is_heard, "{manner:?}: {after:?}");
        drop(bad);
    }
}
