//! Hostile guests and front-ends: each costs its queue or its session, with one clear line; the
//! neighbour on the same daemon goes on, and nothing is left behind.

use crate::supervisor::{self, Kind, LONG};
use crate::support::process::{Daemon, wait_until};
use manyring_driver::hostile::{HostileRing, Racer, Spoil};
use manyring_driver::queue::RingFeatures;
use manyring_driver::wire::blk::VIRTIO_BLK_T_OUT;
use manyring_driver::wire::vhost_user::{
    FLAG_VERSION, Header, PROTOCOL_F_REPLY_ACK, VringAddr, VringState,
};
use manyring_driver::wire::virtio::VIRTIO_F_EVENT_IDX;
use manyring_driver::{
    Arena, BlkDriver, BlkDriverOptions, BlkDriverQueue, DriverError, DriverOp, FrontEnd, Virtqueue,
};
use rustix::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use zerocopy::IntoBytes;

const CONFIG: &str = "
[[blk]]
name = 'bad'
socket_path = '@/bad'
memory = '16M'
handshake_timeout = 1
[[blk]]
name = 'good'
socket_path = '@/good'
memory = '16M'
";

/// The neighbour: it writes, and finds what it has written.
fn writer(socket: &Path) -> impl FnMut() + Send + use<> {
    let mut guest = BlkDriver::connect(socket, &BlkDriverOptions::default()).unwrap();
    let mut back = vec![0; 8192];
    let mut rounds = 0u64..;
    move || {
        // All of the guest lives here, its session too.
        let guest = &mut guest;
        let (queue, round) = (&mut guest.queues[0], rounds.next().unwrap());
        let data = (round ^ 0x5a5a_5a5a).to_le_bytes().repeat(1024);
        let sector = round % 2000 * 16;
        queue.write(sector, &data).expect("the neighbour's write");
        queue.read(sector, &mut back).expect("the neighbour's read");
        assert!(data == back, "the neighbour's data");
    }
}

/// Both guests have disks.
struct Disks;

type Supervisor = supervisor::Supervisor<Disks>;

impl Supervisor {
    fn new() -> Self {
        Self::start(CONFIG, &["bad", "good"], writer)
    }

    fn front(&self) -> FrontEnd {
        FrontEnd::connect(&self.daemon.socket_of("bad"), LONG).unwrap()
    }

    fn guest(&self, features: u64) -> BlkDriver {
        let options = BlkDriverOptions { features, queue_size: 16, ..BlkDriverOptions::default() };
        BlkDriver::start(self.front(), &options).unwrap()
    }
}

impl Kind for Disks {
    fn serves_the_next_guest(supervisor: &Supervisor) {
        let mut guest = supervisor.guest(BlkDriverOptions::default().features);
        guest.queues[0].write(8, &[9; 512]).unwrap();
        let mut back = [0; 512];
        guest.queues[0].read(8, &mut back).unwrap();
        assert_eq!(back, [9; 512]);
    }
}

/// The line that a spoiled ring costs.
fn line_of(spoil: Spoil) -> &'static str {
    match spoil {
        Spoil::Loop | Spoil::SelfLoop | Spoil::IndirectLoop => "it loops",
        Spoil::NextOutside | Spoil::HeadOutside => "in a table of 16",
        Spoil::IndirectNextOutside => "in a table of 3",
        Spoil::HeadTwice => "chain 0 is available again while it is in flight",
        Spoil::AddressOutside | Spoil::AddressWraps | Spoil::LengthOutside => "not in guest memory",
        Spoil::LengthHuge => "longer than 2^32 bytes",
        Spoil::AvailJump | Spoil::AvailBack => "available index jumped",
        Spoil::ReadableAfterWritable => "device-readable descriptor after",
        Spoil::IndirectNested => "inside an indirect table",
        Spoil::IndirectNext => "with the NEXT flag",
        Spoil::IndirectOdd | Spoil::IndirectEmpty | Spoil::IndirectHuge => "indirect table of",
        Spoil::IndirectOutside => "not in guest memory",
        Spoil::NoStatus => "without a status byte",
        Spoil::ShortHeader => "shorter than its header",
    }
}

/// Offers a valid request, which is served, and a spoiled one, which stops the queue; the session
/// goes on.
fn spoil_ring(guest: &mut BlkDriver, spoil: Spoil) {
    let mut ring = HostileRing::new(&guest.arena, guest.queues[0].vring()).unwrap();
    ring.offer_valid().unwrap();
    let vring = guest.queues[0].vring();
    vring.kick().unwrap();
    assert!(wait_until(|| ring.used_idx() == 1));
    assert_eq!(ring.status().unwrap(), 0);
    ring.offer(spoil).unwrap();
    vring.kick().unwrap();
    assert!(vring.wait_err(LONG).unwrap(), "{spoil:?}: err is silent");
    // Before a chain that is in flight already comes that chain, which is in order.
    let answered = 1 + u16::from(spoil == Spoil::HeadTwice);
    assert_eq!(ring.used_idx(), answered, "{spoil:?} was answered");
    guest.front.features().expect("the session goes on");
    let base = guest.front.vring_base(0).expect("the session goes on");
    assert!(base.split().unwrap() <= 2, "{spoil:?}: base {base:?}");
}

#[test]
fn each_spoiled_ring_stops_its_queue_with_one_line_and_the_session_goes_on() {
    let supervisor = Supervisor::new();
    for spoil in Spoil::ALL {
        supervisor.one_line(line_of(spoil), || {
            spoil_ring(&mut supervisor.guest(BlkDriverOptions::default().features), spoil);
        });
    }
    supervisor.one_line("indirect descriptor without the feature", || {
        spoil_ring(&mut supervisor.guest(VIRTIO_F_EVENT_IDX), Spoil::IndirectNested);
    });
    supervisor.end();
}

#[test]
fn a_header_that_changes_between_reads_is_one_request_or_the_other() {
    let supervisor = Supervisor::new();
    let mut guest = supervisor.guest(0);
    let mut ring = HostileRing::new(&guest.arena, guest.queues[0].vring()).unwrap();
    // A read of sector 0 against a write far outside, whose chain has nothing to write.
    let (read, write) = ([0, 0], [u64::from(VIRTIO_BLK_T_OUT).to_le(), u64::MAX]);
    let racer = Racer::start(&guest.arena, ring.header_addr(), read, write).unwrap();
    let mut statuses = [0u32; 256];
    for round in 1..=500u16 {
        ring.offer_valid().unwrap();
        guest.queues[0].vring().kick().unwrap();
        assert!(wait_until(|| ring.used_idx() == round));
        statuses[usize::from(ring.status().unwrap())] += 1;
    }
    drop(racer);
    let known: u32 = statuses[..3].iter().sum();
    assert_eq!(known, 500, "{:?}", &statuses[..4]);
    supervisor.neighbour_goes_on();
    supervisor.end();
}

/// Sends what `send` sends; the back-end closes the session.
fn closes(supervisor: &Supervisor, send: impl FnOnce(&mut FrontEnd) -> Result<(), DriverError>) {
    let mut front = supervisor.front();
    front.features().unwrap();
    // The back-end may close before all is sent.
    let _ = send(&mut front);
    assert!(front.is_closed_within(LONG).unwrap(), "the session goes on");
}

#[test]
fn each_wrong_message_ends_its_session_with_one_line() {
    let supervisor = Supervisor::new();
    let null = std::fs::File::open("/dev/null").unwrap();
    let fd = null.as_fd();
    let state = |index, num| VringState { index, num }.as_bytes().to_vec();
    let ended = |what: &str, send: &dyn Fn(&mut FrontEnd) -> Result<(), DriverError>| {
        supervisor.one_line(what, || closes(&supervisor, send));
    };
    ended("SET_VRING_NUM has a payload of 4 bytes", &|f| f.send_message(8, &[1, 0, 0, 0], &[]));
    ended("GET_FEATURES has a payload of 8 bytes", &|f| f.send_message(1, &[0; 8], &[]));
    ended("request 200 is not in the table", &|f| f.send_message(200, &[], &[]));
    ended("request 0 is not in the table", &|f| f.send_message(0, &[], &[]));
    let header = |flags, size| Header { request: 2, flags, size }.emit();
    ended("more than any request has", &|f| f.send_bytes(&header(FLAG_VERSION, 1 << 30), &[]));
    ended("no known protocol version", &|f| f.send_bytes(&header(0, 8), &[]));
    ended("SET_OWNER with 1 file descriptors", &|f| f.send_message(3, &[], &[fd]));
    ended("too many file descriptors in a message", &|f| f.send_message(5, &[0; 8], &[fd; 40]));
    ended("SET_VRING_KICK with 0 file descriptors", &|f| f.send_message(12, &[0; 8], &[]));
    ended("vring 99 of a device with 8: the front-end is set to more queues", &|f| {
        f.send_message(8, &state(99, 16), &[])
    });
    ended("SET_VRING_NUM with the invalid value 100", &|f| f.send_message(8, &state(0, 100), &[]));
    ended("timed out in the middle of a message", &|f| f.send_bytes(&[2, 0, 0, 0, 1, 0], &[]));
    supervisor.end();
}

#[test]
fn a_front_end_that_says_nothing_is_sent_away_and_one_that_leaves_in_a_message_is_named() {
    let supervisor = Supervisor::new();
    supervisor.one_line("no message within 1 seconds", || {
        assert!(supervisor.front().is_closed_within(LONG).unwrap());
    });
    supervisor.one_line("disconnected in the middle of a message", || {
        supervisor.front().send_bytes(&[2, 0, 0, 0, 1, 0], &[]).unwrap();
    });
    supervisor.end();
}

#[test]
fn messages_in_a_wrong_order_do_no_harm() {
    let supervisor = Supervisor::new();
    let arena = Arena::new(1 << 20).unwrap();
    let vring = Virtqueue::new(&arena, 0, 16, RingFeatures::default(), 0).unwrap();
    let mut front = supervisor.front();
    front.set_vring_enable(0, true).unwrap();
    front.set_vring_kick(0, Some(vring.kick_fd())).unwrap();
    front.set_vring_call(0, Some(vring.call_fd())).unwrap();
    assert_eq!(front.vring_base(0).unwrap(), 0.into());
    front.set_vring_base(0, 77).unwrap();
    let nowhere =
        VringAddr { index: 0, flags: 0, descriptor: 0, used: 0, available: 0, log: u64::MAX };
    front.set_vring_addr(&nowhere).unwrap();
    front.set_vring_num(0, 16).unwrap();
    assert_eq!(front.vring_base(0).unwrap(), 77.into());
    // The session is not broken: the front-end starts it again, now in order.
    let mut guest = BlkDriver::start(front, &BlkDriverOptions::default()).unwrap();
    guest.queues[0].write(0, &[3; 512]).unwrap();
    supervisor.neighbour_goes_on();
    supervisor.end();
}

#[test]
fn ring_addresses_outside_of_memory_are_refused_and_the_session_goes_on() {
    let supervisor = Supervisor::new();
    supervisor.one_line("ring is not in memory", || {
        let arena = Arena::new(1 << 20).unwrap();
        let vring = Virtqueue::new(&arena, 0, 16, RingFeatures::default(), 0).unwrap();
        let mut front = supervisor.front();
        front.negotiate(0, 1 << 30, PROTOCOL_F_REPLY_ACK).unwrap();
        front.set_memory(&arena).unwrap();
        front.set_vring_num(0, 16).unwrap();
        front
            .set_vring_addr(&VringAddr {
                index: 0,
                flags: 0,
                descriptor: arena.user_addr(0) - 4096,
                used: vring.addresses().used,
                available: vring.addresses().available,
                log: 0,
            })
            .unwrap();
        let refused = front.set_vring_kick(0, Some(vring.kick_fd()));
        assert!(matches!(refused, Err(DriverError::Refused { request: 12 })), "{refused:?}");
        front.features().expect("the session goes on");
    });
    supervisor.end();
}

#[test]
fn a_kick_that_is_a_regular_file_ends_the_session() {
    let supervisor = Supervisor::new();
    let file = tempfile::tempfile().unwrap();
    supervisor.one_line("SET_VRING_KICK of vring 0", || {
        closes(&supervisor, |front| front.set_vring_kick(0, Some(file.as_fd())));
    });
    supervisor.end();
}

#[test]
fn a_memory_file_shorter_than_its_region_ends_the_session() {
    let supervisor = Supervisor::new();
    let arena = Arena::new(1 << 20).unwrap();
    supervisor.one_line("ends at byte 2097152 of a file of 1048576 bytes", || {
        closes(&supervisor, |front| {
            let (mut region, fd) = arena.table()[0];
            region.size *= 2;
            front.set_mem_table(&[(region, fd)])
        });
    });
    supervisor.end();
}

/// Guest memory of 1 MiB in a file on the disk of the build.
fn on_disk() -> Arena {
    let file = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let kind = rustix::fs::fstatfs(&file).unwrap().f_type;
    assert_ne!(kind, 0x0102_1994, "this test needs a build folder on a disk, not on tmpfs");
    Arena::in_file(file.into(), 1 << 20).expect("a build folder on a local disk")
}

#[test]
fn memory_in_a_file_on_a_disk_ends_the_session_and_the_line_names_the_key() {
    let supervisor = Supervisor::new();
    let arena = on_disk();
    supervisor.one_line("allow it with memory_on_disk", || {
        closes(&supervisor, |front| front.set_memory(&arena));
    });
    supervisor.end();
}

#[test]
fn memory_in_a_file_on_a_disk_is_served_where_the_operator_allows_it() {
    let of_the_file = "[[blk]]\nname = 'blk0'\nsocket_path = '@/blk0'\nmemory = '16M'\n\
        memory_on_disk = true\n";
    for daemon in
        [Daemon::run(of_the_file, &["blk0"]), Daemon::blk(&["--memory", "16M", "--memory-on-disk"])]
    {
        let options = BlkDriverOptions { queue_size: 8, ..BlkDriverOptions::default() };
        let mut front = FrontEnd::connect(&daemon.socket(), LONG).unwrap();
        let protocol = options.protocol_features;
        let agreed = front.negotiate(options.features, 1 << 30, protocol).unwrap();
        let arena = Arc::new(on_disk());
        let features = RingFeatures::from_bits(agreed);
        let mut queue = BlkDriverQueue::new(&arena, 0, features, &options).unwrap();
        front.set_memory(&arena).unwrap();
        front.start_vring(queue.vring(), 0).unwrap();
        queue.write(8, &[7; 512]).unwrap();
        let mut back = [0; 512];
        queue.read(8, &mut back).unwrap();
        assert_eq!(back, [7; 512]);
    }
}

#[test]
fn memory_beyond_what_the_operator_allows_ends_the_session_and_the_line_names_the_key() {
    let of_the_file = "[[blk]]\nname = 'blk0'\nsocket_path = '@/blk0'\nmemory = '16M'\n\
        memory_max = '1M'\n";
    for daemon in [
        Daemon::run(of_the_file, &["blk0"]),
        Daemon::blk(&["--memory", "16M", "--memory-max", "1M"]),
    ] {
        let connect = |bytes| {
            let mut front = FrontEnd::connect(&daemon.socket(), LONG).unwrap();
            let options = BlkDriverOptions::default();
            let protocol = options.protocol_features;
            front.negotiate(options.features, 1 << 30, protocol).unwrap();
            let sent = front.set_memory(&Arena::new(bytes).unwrap());
            (sent, front)
        };
        let (sent, mut front) = connect(2 << 20);
        assert!(sent.is_err() || front.is_closed_within(LONG).unwrap());
        let line = "1048576 bytes together, which memory_max allows";
        assert!(wait_until(|| daemon.log().contains(line)), "{}", daemon.log());
        let (sent, mut front) = connect(1 << 20);
        sent.unwrap();
        assert!(!front.is_closed_within(std::time::Duration::from_millis(100)).unwrap());
    }
}

#[test]
fn memory_cut_away_under_a_running_ring_costs_that_session_only() {
    let supervisor = Supervisor::new();
    supervisor.one_line("guest memory was truncated", || {
        let mut guest = supervisor.guest(0);
        guest.queues[0].run(DriverOp::Flush).unwrap();
        rustix::fs::ftruncate(guest.arena.table()[0].1, 0).unwrap();
        // Nothing of that memory is touched here from now on.
        guest.queues[0].vring().kick().unwrap();
        assert!(guest.front.is_closed_within(LONG).unwrap(), "the session goes on");
    });
    supervisor.end();
}

#[test]
fn after_a_hundred_hostile_sessions_the_daemon_holds_what_it_held() {
    let supervisor = Supervisor::new();
    supervisor.next_guest_is_served();
    let before = supervisor.settled();
    let null = std::fs::File::open("/dev/null").unwrap();
    for round in 0..100usize {
        match round % 3 {
            0 => closes(&supervisor, |f| f.send_message(5, &[0; 8], &[null.as_fd(); 40])),
            1 => closes(&supervisor, |f| f.send_message(3, &[], &[null.as_fd()])),
            _ => {
                let spoil = Spoil::ALL[round % Spoil::ALL.len()];
                spoil_ring(&mut supervisor.guest(BlkDriverOptions::default().features), spoil);
            }
        }
    }
    supervisor.next_guest_is_served();
    supervisor.holds_no_more_than(before, 0);
    supervisor.neighbour_goes_on();
    supervisor.end();
}
