//! Few open files: what a front-end hoards stops neither its neighbours nor itself for good.

use crate::support::process::{Daemon, wait_until};
use crate::support::program::shown;
use manyring_driver::{BlkDriver, BlkDriverOptions, DriverOp, FrontEnd};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::AsFd;
use std::time::{Duration, SystemTime};

const CONFIG: &str = "[[blk]]\nname = 'bad'\nsocket_path = '@/bad'\nmemory = '16M'\n\
    num_queues = 128\n\
    [[blk]]\nname = 'good'\nsocket_path = '@/good'\nmemory = '16M'\n";
const LONG: Duration = Duration::from_secs(30);
/// Longest time of an answer: a hundred times the usual one, less than a message may be awaited.
const BOUND: Duration = Duration::from_secs(2);
const TRIES: usize = 5;
const SET_VRING_KICK: u32 = 12;
const SET_VRING_ERR: u32 = 14;

#[test]
fn a_front_end_that_hoards_fds_stops_no_neighbour_and_goes_when_it_leaves() {
    // A busy host may hold an answer up now and then, but a neighbour that waits for the front-end
    // is late each time.
    let all_took: Vec<_> = std::iter::repeat_with(beside_a_hoard)
        .take(TRIES)
        .take_while(|took| *took >= BOUND)
        .collect();
    assert!(all_took.len() < TRIES, "{all_took:?}");
}

/// How long the neighbour's answers take.
fn beside_a_hoard() -> Duration {
    let daemon = Daemon::run_behind("ulimit -n 700; exec", CONFIG, &["bad", "good"]);
    let mut good =
        BlkDriver::connect(&daemon.socket_of("good"), &BlkDriverOptions::default()).unwrap();
    let mut bad = FrontEnd::connect(&daemon.socket_of("bad"), LONG).unwrap();
    let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    // More than there is room for: the last ones are never taken.
    'hoard: for queue in 0..128u64 {
        for request in SET_VRING_KICK..=SET_VRING_ERR {
            let sent = bad.send_message(request, &queue.to_ne_bytes(), &[event.as_fd()]);
            if sent.is_err() {
                break 'hoard;
            }
        }
    }
    // Messages without fds are answered at once, and I/O goes on.
    let start = SystemTime::now();
    good.queues[0].run(DriverOp::Flush).unwrap();
    good.front.features().expect("the neighbour's question is answered");
    good.front.vring_base(0).expect("the neighbour's queue stops");
    let took = start.elapsed().unwrap();
    drop(good);
    // Whoever leaves gives back what it had, also while it waits for more.
    drop(bad);
    for name in ["bad", "good"] {
        let mut guest = BlkDriver::connect(&daemon.socket_of(name), &BlkDriverOptions::default());
        guest.as_mut().expect("the next guest is served").queues[0].run(DriverOp::Flush).unwrap();
    }
    took
}

#[test]
fn a_front_end_whose_fds_find_no_room_is_told_so_by_the_end_of_its_session() {
    let daemon = Daemon::run_behind("ulimit -n 700; exec", CONFIG, &["bad", "good"]);
    let mut bad = FrontEnd::connect(&daemon.socket_of("bad"), LONG).unwrap();
    let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    for queue in 0..128u64 {
        for request in SET_VRING_KICK..=SET_VRING_ERR {
            let _ = bad.send_message(request, &queue.to_ne_bytes(), &[event.as_fd()]);
        }
    }
    assert!(bad.is_closed_within(LONG).unwrap(), "it waits for ever");
    // The log has a thread of its own.
    let is_told = || daemon.log().contains("too few open files");
    assert!(wait_until(is_told), "{}", daemon.log());
}

#[test]
fn a_message_in_pieces_whose_fds_find_no_room_is_not_called_silence() {
    let daemon = Daemon::run_behind("ulimit -n 700; exec", CONFIG, &["bad", "good"]);
    let mut bad = FrontEnd::connect(&daemon.socket_of("bad"), LONG).unwrap();
    let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    for queue in 0..128u64 {
        for request in SET_VRING_KICK..=SET_VRING_ERR {
            // The time for the whole message runs from its first byte, so that it ends before the
            // time for room, which the fds need that come with the rest.
            let message = [request.to_ne_bytes(), 1u32.to_ne_bytes(), 8u32.to_ne_bytes()].concat();
            let rest = [&message[1..], &queue.to_ne_bytes()].concat();
            let _ = bad.send_bytes(&message[..1], &[]);
            // Longer than the step of a timer.
            std::thread::sleep(Duration::from_millis(3));
            let _ = bad.send_bytes(&rest, &[event.as_fd()]);
        }
    }
    assert!(bad.is_closed_within(LONG).unwrap(), "it waits for ever");
    let is_told = || daemon.log().contains("too few open files");
    assert!(wait_until(is_told), "{}", daemon.log());
}

#[test]
fn a_front_end_whose_doorbells_are_pipes_leaves_fds_for_its_neighbour() {
    let daemon = Daemon::run_behind("ulimit -n 1024; exec", CONFIG, &["bad", "good"]);
    let mut bad = FrontEnd::connect(&daemon.socket_of("bad"), LONG).unwrap();
    let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    let fds = || std::fs::read_dir(format!("/proc/{}/fd", daemon.pid())).unwrap().count();
    // It stops before its own messages find no room.
    'hoard: for queue in 0..128u64 {
        for request in SET_VRING_KICK..=SET_VRING_ERR {
            let fd = if request == SET_VRING_KICK { reader.as_fd() } else { writer.as_fd() };
            let sent = bad.send_message(request, &queue.to_ne_bytes(), &[fd]);
            // The answer says that all before was done.
            if sent.is_err() || bad.features().is_err() || fds() > 1020 {
                break 'hoard;
            }
        }
    }
    let mut good = BlkDriver::connect(&daemon.socket_of("good"), &BlkDriverOptions::default());
    good.as_mut().expect("the neighbour is served").queues[0].run(DriverOp::Flush).unwrap();
}

/// A disk whose lock goes with its rings, in a domain of its own or in that which `keys` names.
fn ring_locked(images: &tempfile::TempDir, name: &str, queues: usize, keys: &str) -> String {
    let file = images.path().join(name);
    std::fs::File::create(&file).unwrap().set_len(1 << 20).unwrap();
    format!(
        "[[blk]]\nname = '{name}'\nsocket_path = '@/{name}'\nfile = '{}'\n\
         lock_with_rings = true\nnum_queues = {queues}\n{keys}",
        file.display()
    )
}

/// Open files of the daemon itself, without its device processes.
fn open_files(daemon: &Daemon) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", daemon.pid())).unwrap().count()
}

#[test]
fn copies_of_what_device_processes_were_given_take_nothing_of_what_the_daemon_keeps_for_itself() {
    const LIMIT: usize = 1024;
    /// Each has 130 descriptions in its device process: the budget has 768.
    const SERVED: usize = 5;
    let images = tempfile::tempdir().unwrap();
    let names: Vec<_> = (0..=SERVED).map(|number| format!("disk{number}")).collect();
    let mut config = "[daemon]\ncontrol = '@/control'\ndomains = 'device'\n".to_owned();
    config.extend(names.iter().map(|name| ring_locked(&images, name, 128, "")));
    let names: Vec<_> = names.iter().map(String::as_str).chain(["bad", "worse", "good"]).collect();
    for name in &names[SERVED + 1..] {
        config += &format!(
            "[[blk]]\nname = '{name}'\nsocket_path = '@/{name}'\nmemory = '1M'\n\
             num_queues = 128\n"
        );
    }
    let daemon = Daemon::run_behind(&format!("ulimit -n {LIMIT}; exec"), &config, &names);
    let connect =
        |name: &str| BlkDriver::connect(&daemon.socket_of(name), &BlkDriverOptions::default());
    let mut guests: Vec<_> = names[..SERVED].iter().map(|name| connect(name).unwrap()).collect();
    // One further disk is not served, and its front-end is told why by the log.
    assert!(connect(names[SERVED]).is_err(), "{}", daemon.log());
    let is_told = || daemon.log().contains("(ulimit -n): lock_with_rings takes");
    assert!(wait_until(is_told), "{}", daemon.log());
    // Whatever front-ends hoard then, the daemon can accept, open and start what it needs.
    let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let hoards = ["bad", "worse"].map(|name| {
        let mut bad = FrontEnd::connect(&daemon.socket_of(name), LONG).unwrap();
        for queue in 0..128u64 {
            for request in SET_VRING_KICK..=SET_VRING_ERR {
                let _ = bad.send_message(request, &queue.to_ne_bytes(), &[event.as_fd()]);
            }
        }
        let _ = bad.features();
        bad
    });
    let open = open_files(&daemon);
    assert!(open < LIMIT - 64, "{open} files: {}", daemon.log());
    connect("good").unwrap().queues[0].run(DriverOp::Flush).unwrap();
    let devices = shown(&daemon.socket_of("control"), "/v1/devices");
    assert_eq!(devices["devices"].as_array().unwrap().len(), names.len(), "{devices}");
    for guest in &mut guests {
        guest.queues[0].run(DriverOp::Flush).unwrap();
    }
    assert!(!daemon.log().contains("Too many open files"), "{}", daemon.log());
    drop(hoards);
}

#[test]
fn a_disk_in_use_takes_as_many_open_files_as_the_guide_says() {
    const DISKS: usize = 10;
    const QUEUES: u16 = 4;
    // One device process serves all. Its channel, its process and the files of its threads are no
    // disk's.
    const PROCESS: usize = 8;
    let images = tempfile::tempdir().unwrap();
    for locks in [false, true] {
        let names: Vec<_> = (0..DISKS).map(|number| format!("disk{number}")).collect();
        let tables =
            names.iter().map(|name| ring_locked(&images, name, QUEUES.into(), "domain = 'x'\n"));
        let key = format!("lock_with_rings = {locks}");
        let tables: String = tables.map(|t| t.replace("lock_with_rings = true", &key)).collect();
        let names: Vec<_> = names.iter().map(String::as_str).collect();
        let config = format!("[daemon]\ncontrol = '@/control'\n{tables}");
        let daemon = Daemon::run_behind("exec", &config, &names);
        let before = open_files(&daemon);
        let options = BlkDriverOptions { queues: QUEUES, ..BlkDriverOptions::default() };
        let connect = |name: &&str| BlkDriver::connect(&daemon.socket_of(name), &options).unwrap();
        let mut guests: Vec<_> = names.iter().map(connect).collect();
        for queue in guests.iter_mut().flat_map(|guest| &mut guest.queues) {
            queue.run(DriverOp::Flush).unwrap();
        }
        let took = open_files(&daemon) - before;
        println!("lock_with_rings = {locks}: {before} files, {took} more for {DISKS} guests");
        // docs/guide/sizing.md
        let (queues, copies) = (usize::from(QUEUES), usize::from(QUEUES) + 2);
        let says = 2 + 3 * queues + 2 + if locks { copies } else { 0 };
        assert!(took <= DISKS * says + PROCESS, "{took} for {DISKS} disks: {}", daemon.log());
        assert!(took + DISKS * 2 >= DISKS * says, "{took} for {DISKS} disks: the guide says more");
    }
}
