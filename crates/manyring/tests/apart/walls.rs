//! The waits of the neighbours of an abuse that holds a worker: guests on other workers, the
//! control API, and a new session of another device, each measured by the prober. `beside.rs` has
//! the abuses that hold none.
//!
//! One abuse holds its worker: a page fault that takes as long as the front-end likes. Guests on
//! that worker wait with it; the control API, sessions, and guests on other workers do not.

use crate::faults::{self, Hole};
use crate::support::prober::{NEIGHBOURS, Prober, SOCKETS, check};
use crate::support::process::{Daemon, TIMEOUT, wait_until};
use crate::support::program::{http, manyring, output_of};
use manyring_driver::{Arena, FrontEnd, Virtqueue};
use manyring_queue::RingFeatures;
use manyring_wire::net::VIRTIO_NET_F_CTRL_VQ;
use manyring_wire::vhost_user::{
    F_PROTOCOL_FEATURES, PROTOCOL_F_CONFIGURE_MEM_SLOTS, PROTOCOL_F_REPLY_ACK, Region, VringAddr,
};
use manyring_wire::virtio::VIRTIO_F_VERSION_1;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, memfd_create};
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use zerocopy::IntoBytes;

/// Number of the request ADD_MEM_REG.
const ADD_MEM_REG: u32 = 37;
/// Index of the control queue of a device with one pair.
const CONTROLQ: u32 = 2;
pub(crate) const PAGE: u64 = 4096;
/// Bytes of memory of a guest with one ring.
const SIZE: u64 = 16 * PAGE;

/// A guest with one ring of 16 entries, in a file of its own.
pub(crate) struct Ring {
    pub(crate) front: FrontEnd,
    pub(crate) arena: Arena,
    pub(crate) file: OwnedFd,
    vring: Virtqueue,
}

impl Ring {
    /// Ring `index` of the device at `socket`, which is not started yet.
    fn connect(socket: &Path, name: &str, index: u32) -> Self {
        Self::in_file(socket, memfd_create(name, MemfdFlags::CLOEXEC).unwrap(), index, SIZE)
    }

    /// Ring `index` of the device at `socket`, not started yet, in `size` bytes of `file`.
    pub(crate) fn in_file(socket: &Path, file: OwnedFd, index: u32, size: u64) -> Self {
        let mut front = FrontEnd::connect(socket, TIMEOUT).unwrap();
        let required = F_PROTOCOL_FEATURES | VIRTIO_F_VERSION_1;
        let protocol = PROTOCOL_F_REPLY_ACK | PROTOCOL_F_CONFIGURE_MEM_SLOTS;
        let features = front.negotiate(VIRTIO_NET_F_CTRL_VQ, required, protocol);
        let arena = Arena::in_file(file.try_clone().unwrap(), size).unwrap();
        let ring_features = RingFeatures::from_bits(features.unwrap());
        let vring = Virtqueue::new(&arena, index, 16, ring_features, 0).unwrap();
        front.set_memory(&arena).unwrap();
        Self { front, arena, file, vring }
    }

    /// Adds a region of memory, without waiting until it is there.
    pub(crate) fn send_region(&mut self, region: Region, file: &OwnedFd) {
        let body = [&[0; 8], region.as_bytes()].concat();
        self.front.send_message(ADD_MEM_REG, &body, &[file.as_fd()]).unwrap();
    }

    /// Takes every page of the ring out of memory: it reads as the empty ring that it was.
    fn punch(&self) {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&self.file, flags, 0, SIZE).unwrap();
    }

    /// Starts the ring. It is enabled before: the answer to a later "enable" would be the worker's.
    pub(crate) fn start(&mut self) {
        let (front, vring, at) = (&mut self.front, &self.vring, self.vring.addresses());
        let index = vring.index();
        front.set_vring_enable(index, true).unwrap();
        front.set_vring_num(index, vring.size().into()).unwrap();
        front.set_vring_base(index, 0).unwrap();
        let (descriptor, available, used) = (at.descriptor, at.available, at.used);
        let addr = VringAddr { index, flags: 0, descriptor, used, available, log: 0 };
        front.set_vring_addr(&addr).unwrap();
        front.set_vring_call(index, Some(vring.call_fd())).unwrap();
        front.set_vring_kick(index, Some(vring.kick_fd())).unwrap();
    }

    /// Offers a request or command that lies in pages which nobody has touched.
    pub(crate) fn offer(&mut self) {
        let [head, status] = [(); 2].map(|()| self.arena.alloc(PAGE, PAGE).unwrap());
        self.vring.queue().add(&[(head, 16)], &[(status, 1)]).unwrap();
        self.vring.publish().unwrap();
        self.vring.kick().unwrap();
    }

    pub(crate) fn is_answered(&mut self) -> bool {
        self.vring.wait_used(TIMEOUT).is_ok()
    }
}

/// Where a page fault of a bad guest holds its worker.
#[derive(Clone, Copy, Debug)]
enum At {
    /// The ring is read when its queue starts.
    Start,
    /// A request or command is read.
    Request,
}

/// The bad guest has worker 1, its neighbours worker 0 or whichever there is.
const BAD_APART: &str = "
[daemon]
control = '@/control'
workers = 2
[[blk]]
name = 'disk'
socket_path = '@/disk'
memory = '16M'
queue_workers = [1]
[[net]]
name = 'net'
socket_path = '@/net'
null = true
queue_workers = [1]
";

/// The worker that does not come back is named, with the device that holds it.
fn is_named(daemon: &Daemon, device: &str) {
    let control = daemon.socket_of("control");
    let gauge = |metrics: &str| {
        let lines = metrics.lines().filter(|l| l.starts_with("manyring_thread_stuck{"));
        lines.filter(|l| l.contains(&format!("device=\"{device}\"}} 1"))).count() == 1
    };
    assert!(wait_until(|| gauge(&http(&control, "GET", "/metrics", "").2)), "{}", daemon.log());
    let shown = || {
        let output = output_of(manyring().arg("stats").arg("--control").arg(&control));
        String::from_utf8_lossy(&output.stdout).contains(&format!(" s by {device}, in "))
    };
    assert!(wait_until(shown), "{}", daemon.log());
    let named =
        |line: &str| line.contains("is blocked") && line.contains(&format!("device=\"{device}\""));
    assert!(wait_until(|| daemon.log().lines().any(named)), "{}", daemon.log());
}

#[test]
fn a_page_fault_that_does_not_end_holds_its_worker_and_neither_sessions_nor_the_control_api() {
    let names = [&SOCKETS[..], &["disk", "net", "faults"]].concat();
    let daemon = faults::daemon(&format!("{BAD_APART}{NEIGHBOURS}"), &names);
    let mut prober = Prober::at(&daemon, daemon.folder());
    for (device, index) in [("disk", 0), ("net", CONTROLQ)] {
        for at in [At::Start, At::Request] {
            let name = format!("hole-{device}-{at:?}");
            let mut ring = Ring::connect(&daemon.socket_of(device), &name, index);
            let mut hole = match at {
                At::Start => {
                    ring.punch();
                    let hole = Hole::new(&daemon, &name);
                    ring.start();
                    hole
                }
                At::Request => {
                    ring.start();
                    let hole = Hole::new(&daemon, &name);
                    ring.offer();
                    hole
                }
            };
            hole.wait_until_touched();
            is_named(&daemon, device);
            check(&name, prober.worst(20));
            drop(hole);
            if matches!(at, At::Start) {
                ring.offer();
            }
            assert!(ring.is_answered(), "{name}: the guest goes on");
        }
    }
}

#[test]
fn a_front_end_that_waits_for_its_queue_to_stop_is_told_of_with_the_thread_that_is_held() {
    let daemon = faults::daemon(BAD_APART, &["control", "disk", "net", "faults"]);
    let mut ring = Ring::connect(&daemon.socket_of("disk"), "hole-base", 0);
    ring.start();
    let hole = Hole::new(&daemon, "hole-base");
    ring.offer();
    is_named(&daemon, "disk");
    std::thread::scope(|scope| {
        let base = scope.spawn(|| ring.front.vring_base(0));
        let told = |line: &str| {
            line.contains("a queue is still stopping") && line.contains("by \\\"disk\\\"")
        };
        assert!(wait_until(|| daemon.log().lines().any(told)), "{}", daemon.log());
        drop(hole);
        base.join().unwrap().expect("the base");
    });
}

#[test]
fn a_worker_that_hangs_starves_the_watchdog_though_another_one_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(TIMEOUT)).unwrap();
    let told = [("NOTIFY_SOCKET", path.to_str().unwrap()), ("WATCHDOG_USEC", "200000")];
    let daemon = faults::daemon_told(BAD_APART, &["control", "disk", "net", "faults"], &told);
    let hear = || {
        let mut bytes = [0; 1024];
        let count = manager.recv(&mut bytes).unwrap();
        String::from_utf8(bytes[..count].to_vec()).unwrap()
    };
    let is_fed = || while hear() != "WATCHDOG=1\n" {};
    let says = |what: &str| daemon.log().matches(what).count();
    is_fed();
    let mut ring = Ring::connect(&daemon.socket_of("disk"), "hole-watchdog", 0);
    ring.start();
    let mut hole = Hole::new(&daemon, "hole-watchdog");
    ring.offer();
    hole.wait_until_touched();
    let named = |line: &str| {
        line.contains("a worker is blocked; not feeding the watchdog")
            && line.contains("device=\"disk\"")
    };
    let hangs = || daemon.log().lines().filter(|line| named(line)).count();
    assert!(wait_until(|| hangs() >= 2), "{}", daemon.log());
    // Between two looks that find it nothing is told.
    manager.set_nonblocking(true).unwrap();
    while manager.recv(&mut [0; 1024]).is_ok() {}
    let before = says("not feeding the watchdog");
    assert!(wait_until(|| says("not feeding the watchdog") >= before + 2), "{}", daemon.log());
    assert!(manager.recv(&mut [0; 1024]).is_err());
    manager.set_nonblocking(false).unwrap();
    drop(hole);
    is_fed();
    assert!(ring.is_answered());
}
