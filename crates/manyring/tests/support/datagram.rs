//! UDP over a tap by hand: the frames of a guest, and a socket of the host at the other end.

use super::process::{Daemon, TIMEOUT, wait_until};
use super::space::run;
use manyring_driver::{NetDriver, NetDriverOptions};
use manyring_wire::net::RawNetHeader;
use std::net::{IpAddr, UdpSocket};

/// Where the host is.
pub(crate) const HOST: [u8; 4] = [10, 77, 0, 1];
pub(crate) const HOST_PORT: u16 = 7000;
/// Where the guest is.
const GUEST: [u8; 4] = [10, 77, 0, 2];
const GUEST_MAC: [u8; 6] = [2, 0, 0, 0, 0, 0x22];
const ETHERNET: usize = 14;
const HEADERS: usize = ETHERNET + 20 + 8;

/// The host's socket on a tap.
#[derive(Debug)]
pub(crate) struct Host(UdpSocket);

impl Host {
    /// Gives interface `name` the host's address, and the guest's a place behind it.
    pub(crate) fn on(name: &str) -> Self {
        run(&format!("ip address add 10.77.0.1/24 dev {name}"));
        run(&format!("ip neighbor replace 10.77.0.2 lladdr 02:00:00:00:00:22 dev {name}"));
        let socket = UdpSocket::bind((IpAddr::from(HOST), HOST_PORT)).unwrap();
        socket.set_read_timeout(Some(TIMEOUT)).unwrap();
        Self(socket)
    }

    /// Sends to the guest's port.
    pub(crate) fn send(&self, port: u16, payload: &[u8]) {
        self.0.send_to(payload, (IpAddr::from(GUEST), port)).unwrap();
    }

    /// Waits for the next datagram of the guest.
    pub(crate) fn receive(&self) -> Vec<u8> {
        let mut bytes = vec![0; 1 << 16];
        let len = self.0.recv(&mut bytes).expect("a datagram");
        bytes.truncate(len);
        bytes
    }

    /// The next datagram of the guest, if one has arrived.
    pub(crate) fn try_receive(&self) -> Option<Vec<u8>> {
        self.0.set_nonblocking(true).unwrap();
        let mut bytes = vec![0; 1 << 16];
        let len = self.0.recv(&mut bytes).ok();
        self.0.set_nonblocking(false).unwrap();
        bytes.truncate(len?);
        Some(bytes)
    }

    /// A second handle, for another thread.
    pub(crate) fn twin(&self) -> Self {
        Self(self.0.try_clone().unwrap())
    }
}

/// A frame of the guest with a datagram from its port to the host's.
pub(crate) fn datagram(port: u16, payload: &[u8]) -> Vec<u8> {
    let mut frame = vec![0xff; 6];
    frame.extend(GUEST_MAC);
    frame.extend([8, 0]);
    let udp_len = u16::try_from(8 + payload.len()).unwrap();
    let mut ip = vec![0x45, 0];
    ip.extend((20 + udp_len).to_be_bytes());
    ip.extend([0, 0, 0x40, 0, 64, 17, 0, 0]);
    ip.extend(GUEST);
    ip.extend(HOST);
    let sum: u32 = ip.chunks(2).map(|w| u32::from(u16::from_be_bytes([w[0], w[1]]))).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    let checksum = !u16::try_from((folded & 0xffff) + (folded >> 16)).unwrap();
    ip[10..12].copy_from_slice(&checksum.to_be_bytes());
    frame.extend(ip);
    frame.extend(port.to_be_bytes());
    frame.extend(HOST_PORT.to_be_bytes());
    frame.extend(udp_len.to_be_bytes());
    // No checksum: IPv4 allows that.
    frame.extend([0, 0]);
    frame.extend(payload);
    frame
}

/// The payload of a datagram from the host to the guest; nothing else has that form.
pub(crate) fn payload(frame: &[u8]) -> Option<&[u8]> {
    let is_ours = frame.len() >= HEADERS
        && frame[12..14] == [8, 0]
        && frame[23] == 17
        && frame[26..34] == [HOST, GUEST].concat()[..];
    if !is_ours {
        return None;
    }
    let len = usize::from(u16::from_be_bytes([frame[38], frame[39]]));
    frame.get(HEADERS..HEADERS - 8 + len)
}

/// A guest at a device with one queue pair.
pub(crate) fn connect(daemon: &Daemon, name: &str) -> NetDriver {
    NetDriver::connect(&daemon.socket_of(name), &NetDriverOptions::default()).unwrap()
}

/// Sends a frame, once there is a buffer for it.
pub(crate) fn send(guest: &mut NetDriver, frame: &[u8]) {
    let tx = &mut guest.pairs[0].tx;
    let is_sent = wait_until(|| {
        tx.reclaim();
        tx.send(&RawNetHeader::default(), frame).unwrap()
    });
    assert!(is_sent, "no buffer comes back");
    tx.publish(0).unwrap();
}
