//! A packet's way, in one page and without a VM: out of a guest to the host, and back. Start here.
//! Needs root, for a network namespace of its own.

use crate::support::datagram::{HOST, HOST_PORT, Host, datagram, payload};
use crate::support::process::{Daemon, TIMEOUT};
use crate::support::space::in_own_space;
use manyring_driver::{ControlOwner, NetDriver, NetDriverOptions};
use manyring_wire::net::RawNetHeader;

const CONFIG: &str = "[[net]]\nname = 'lan'\nsocket_path = '@/lan'\ntap = 'lan0'\n";

#[test]
fn a_frame_goes_out_and_one_comes_back_whoever_owns_the_control_queue() {
    for control in [ControlOwner::FrontEnd, ControlOwner::Device] {
        in_own_space(|| {
            // The daemon makes the tap `lan0`; a socket of the host's own network is its other end.
            let daemon = Daemon::run(CONFIG, &["lan"]);
            let host = Host::on("lan0");
            // The driver half is the guest: it connects, shares its memory, starts its rings.
            let options = NetDriverOptions { control, ..NetDriverOptions::default() };
            let mut guest = NetDriver::connect(&daemon.socket_of("lan"), &options).unwrap();
            // transmitq: a chain of header and frame is made available, and comes back when sent.
            let tx = &mut guest.pairs[0].tx;
            assert!(tx.send(&RawNetHeader::default(), &datagram(1, b"hello")).unwrap());
            tx.publish(0).unwrap();
            tx.drain(TIMEOUT).unwrap();
            assert_eq!(host.receive(), b"hello");
            // receiveq: the device reads a frame of the host straight into buffers of the guest.
            host.send(1, b"and back");
            let rx = &mut guest.pairs[0].rx;
            let mut frame = Vec::new();
            while payload(&frame) != Some(b"and back") {
                frame.clear();
                rx.recv_wait(&mut frame, TIMEOUT).unwrap();
            }
            assert_eq!((&frame[26..30], &frame[34..36]), (&HOST[..], &HOST_PORT.to_be_bytes()[..]));
        });
    }
}
