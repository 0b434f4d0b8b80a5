//! A device process dies and the front-end stops the rings: GET_VRING_BASE says where each of them
//! stands, so that whoever serves it next loses no buffer and uses none twice. Needs root, for
//! network namespaces of its own.

use crate::domain::pid;
use crate::support::datagram::{Host, datagram, payload};
use crate::support::process::{Daemon, TIMEOUT, wait_until};
use crate::support::space::{in_own_space, run};
use manyring_driver::{Arena, FrontEnd, Virtqueue};
use manyring_queue::RingFeatures;
use manyring_wire::net::{HEADER_SIZE, VIRTIO_NET_F_MRG_RXBUF};
use manyring_wire::vhost_user::{
    F_PROTOCOL_FEATURES, PROTOCOL_F_MQ, PROTOCOL_F_REPLY_ACK, VringAddr, VringState,
};
use manyring_wire::virtio::{
    VIRTIO_F_EVENT_IDX, VIRTIO_F_IN_ORDER, VIRTIO_F_RING_PACKED, VIRTIO_F_VERSION_1,
};
use rustix::process::{Signal, kill_process};
use std::collections::VecDeque;
use zerocopy::{FromBytes, IntoBytes};

/// Two networks on one bridge, each in a domain of its own: a guest moves from one to the other.
const CONFIG: &str = "[daemon]\ncontrol = '@/control'\nworkers = 1\n\
    [[net]]\nname = 'a'\nsocket_path = '@/a'\ntap = 'a0'\ndomain = 'a'\n\
    [[net]]\nname = 'b'\nsocket_path = '@/b'\ntap = 'b0'\ndomain = 'b'\n";

const NAMES: [&str; 2] = ["a", "b"];
const RX: usize = 0;
const SIZE: u16 = 128;
/// Receive buffers that the guest keeps posted: more than a device process takes at once.
const POSTED: usize = 100;
const BUFFER: u32 = 2048;

fn serve() -> (Daemon, Host) {
    let daemon = Daemon::run(CONFIG, &["a", "b", "control"]);
    run("ip link add bridge0 type bridge");
    for tap in ["a0", "b0"] {
        run(&format!("ip link set {tap} up master bridge0"));
        // A frame to the guest goes to both taps, wherever the guest was before.
        run(&format!("ip link set {tap} type bridge_slave learning off"));
    }
    run("ip link set bridge0 up");
    (daemon, Host::on("bridge0"))
}

/// A ring of the guest, and what it has seen of it.
struct Lane {
    vring: Virtqueue,
    /// The chains that the device has not returned, the oldest first: id and address.
    given: VecDeque<(u16, u64)>,
    /// Places that no chain has.
    free: Vec<u64>,
    /// Chains that were returned since the ring's life began.
    used: u32,
}

impl Lane {
    /// Takes the chains that were returned: each once, and in the order in which they were given.
    fn take(&mut self) -> Vec<(u64, u32)> {
        let queue = self.vring.queue();
        let mut taken = Vec::new();
        while let Some((id, written)) = queue.take_used() {
            let (given, addr) = self.given.pop_front().expect("a chain that nobody has given");
            assert_eq!(id, given, "returned in another order than it was given");
            taken.push((addr, written));
            self.free.push(addr);
            self.used += 1;
        }
        taken
    }

    /// Where the ring stands if every chain that was not returned is still to be taken.
    fn place(&self, is_packed: bool) -> u32 {
        if !is_packed {
            return self.used & 0xffff;
        }
        let (lap, at) = (self.used / u32::from(SIZE), self.used % u32::from(SIZE));
        let place = at | (((lap + 1) % 2) << 15);
        place | (place << 16)
    }
}

struct Guest {
    front: FrontEnd,
    arena: Arena,
    features: u64,
    lanes: [Lane; 2],
}

impl Guest {
    fn connect(daemon: &Daemon, name: &str, features: u64) -> Self {
        let (front, features) = negotiate(daemon, name, features);
        let ring = RingFeatures::from_bits(features);
        let arena = Arena::new(2 << 20).unwrap();
        let lanes = [0, 1].map(|index| {
            // A packed ring begins on an odd lap.
            let base = if ring.packed { 0x8000 } else { 0 };
            let vring = Virtqueue::new(&arena, index, SIZE, ring, base).unwrap();
            let place = |_| arena.alloc(BUFFER.into(), 16).unwrap();
            let free = (0..POSTED).map(place).collect();
            Lane { vring, given: VecDeque::new(), free, used: 0 }
        });
        let mut guest = Self { front, arena, features, lanes };
        let start = guest.lanes.each_ref().map(|lane| lane.place(guest.is_packed()));
        guest.start(start);
        guest
    }

    fn is_packed(&self) -> bool {
        self.features & VIRTIO_F_RING_PACKED != 0
    }

    /// Gives memory and rings to the back-end; each ring goes on at its base.
    fn start(&mut self, bases: [u32; 2]) {
        self.front.set_memory(&self.arena).unwrap();
        for (lane, base) in self.lanes.iter().zip(bases) {
            let (vring, at) = (&lane.vring, lane.vring.addresses());
            let index = vring.index();
            self.front.set_vring_num(index, vring.size().into()).unwrap();
            self.front.set(10, VringState { index, num: base }.as_bytes(), &[]).unwrap();
            let (descriptor, used, available) = (at.descriptor, at.used, at.available);
            let addr = VringAddr { index, flags: 0, descriptor, used, available, log: 0 };
            self.front.set_vring_addr(&addr).unwrap();
            self.front.set_vring_call(index, Some(vring.call_fd())).unwrap();
            self.front.set_vring_kick(index, Some(vring.kick_fd())).unwrap();
            self.front.set_vring_enable(index, true).unwrap();
        }
        self.lanes.iter_mut().for_each(|lane| lane.vring.kick().unwrap());
    }

    /// GET_VRING_BASE.
    fn stop(&mut self, lane: usize) -> u32 {
        let state = VringState { index: self.lanes[lane].vring.index(), num: 0 };
        self.front.send_message(11, state.as_bytes(), &[]).unwrap();
        VringState::read_from_bytes(&self.front.receive_reply(11).unwrap()).unwrap().num
    }

    fn enable(&mut self, is_enabled: bool) {
        (0..2).for_each(|index| self.front.set_vring_enable(index, is_enabled).unwrap());
    }

    /// Posts every receive buffer that the device does not have.
    fn post(&mut self) {
        let lane = &mut self.lanes[RX];
        while let Some(addr) = lane.free.pop() {
            let id = lane.vring.queue().add(&[], &[(addr, BUFFER)]).unwrap();
            lane.given.push_back((id, addr));
        }
        lane.vring.publish().unwrap();
    }

    /// Frames come, and are sent, until `count` more of each have passed.
    fn passes(&mut self, host: &Host, count: usize) {
        for n in 0..count {
            let text = format!("frame {n}");
            let arrives = wait_until(|| {
                // While a device process begins, many frames wait at the tap.
                self.post();
                host.send(1, text.as_bytes());
                self.receive().iter().any(|got| got == text.as_bytes())
            });
            assert!(arrives, "{text} does not arrive");
            self.send(text.as_bytes());
            while host.receive() != text.as_bytes() {}
        }
    }

    /// The payloads of the frames that have come.
    fn receive(&mut self) -> Vec<Vec<u8>> {
        let taken = self.lanes[RX].take();
        let read = |(addr, written): (u64, u32)| {
            let mut bytes = vec![0; usize::try_from(written).unwrap()];
            self.arena.read(addr, &mut bytes).unwrap();
            payload(bytes.get(HEADER_SIZE..)?).map(<[u8]>::to_vec)
        };
        taken.into_iter().filter_map(read).collect()
    }

    fn send(&mut self, payload: &[u8]) {
        let frame = [&[0; HEADER_SIZE][..], &datagram(1, payload)].concat();
        let lane = &mut self.lanes[1];
        lane.take();
        let addr = lane.free.pop().expect("every place is taken: frames were lost");
        self.arena.write(addr, &frame).unwrap();
        let len = u32::try_from(frame.len()).unwrap();
        let id = lane.vring.queue().add(&[(addr, len)], &[]).unwrap();
        lane.given.push_back((id, addr));
        lane.vring.publish().unwrap();
    }
}

fn negotiate(daemon: &Daemon, name: &str, features: u64) -> (FrontEnd, u64) {
    let mut front = FrontEnd::connect(&daemon.socket_of(name), TIMEOUT).unwrap();
    let wanted = features | VIRTIO_F_VERSION_1 | VIRTIO_NET_F_MRG_RXBUF | F_PROTOCOL_FEATURES;
    let protocol = PROTOCOL_F_REPLY_ACK | PROTOCOL_F_MQ;
    let agreed = front.negotiate(wanted, wanted, protocol).unwrap();
    (front, agreed)
}

/// What the front-end does with its rings around the death of the device process, before the guest
/// moves to the other device.
const ENDS: [&str; 5] = ["stop", "frames, stop", "disabled", "disable, stop", "between"];

/// The guest moves from one device to the other and back, and in each stay the device process dies
/// that serves it.
fn moves(features: u64) {
    in_own_space(|| {
        let (daemon, host) = serve();
        let mut guest = Guest::connect(&daemon, NAMES[0], features);
        for (stay, end) in ENDS.into_iter().cycle().enumerate().take(2 * ENDS.len()) {
            let name = NAMES[stay % 2];
            guest.passes(&host, 3);
            guest.post();
            let mut first = None;
            match end {
                "disabled" => guest.enable(false),
                "between" => first = Some(guest.stop(0)),
                _ => {}
            }
            kill_process(pid(&daemon, name), Signal::KILL).unwrap();
            match end {
                "frames, stop" => guest.passes(&host, 3),
                "disable, stop" => guest.enable(false),
                _ => {}
            }
            let bases = [first.unwrap_or_else(|| guest.stop(0)), guest.stop(1)];
            guest.lanes.iter_mut().for_each(|lane| _ = lane.take());
            let stand = guest.lanes.each_ref().map(|lane| lane.place(guest.is_packed()));
            assert_eq!(bases, stand, "stay {stay}, {end}, features {features:#x}");
            (guest.front, _) = negotiate(&daemon, NAMES[(stay + 1) % 2], features);
            guest.start(bases);
        }
        guest.passes(&host, 3);
        // No buffer is lost: the device uses each that it has.
        let left = guest.lanes[RX].given.len();
        assert!(left > POSTED / 2);
        let all = wait_until(|| {
            host.send(1, b"more");
            guest.receive();
            guest.lanes[RX].given.is_empty()
        });
        assert!(all, "{} of {left} buffers are lost", guest.lanes[RX].given.len());
        assert!(!daemon.log().contains("queue stopped"), "{}", daemon.log());
        drop(guest);
        assert!(daemon.terminate().success());
    });
}

#[test]
fn a_split_ring_goes_on_elsewhere_after_its_device_process_has_died() {
    moves(0);
    moves(VIRTIO_F_EVENT_IDX | VIRTIO_F_IN_ORDER);
}

#[test]
fn a_packed_ring_goes_on_elsewhere_after_its_device_process_has_died() {
    moves(VIRTIO_F_RING_PACKED);
    moves(VIRTIO_F_RING_PACKED | VIRTIO_F_EVENT_IDX);
}
